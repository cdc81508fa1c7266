"""Kernel times of a made-up device, smooth or noisy."""

import numpy as np

from calibrate.device import DeviceFacts
from sim.hardware.gpus import load_gpu

DEVICE = DeviceFacts.of_gpu(load_gpu("h200_sxm"))


def columns(**values):
    """Columns of integers, broadcast to one length."""
    length = max(np.size(value) for value in values.values())
    return {
        key: np.broadcast_to(np.asarray(value, dtype=np.int64), length).copy()
        for key, value in values.items()
    }


def decode_columns(batch, context, num_heads=32, num_kv_heads=8):
    return columns(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        kv_itemsize=2,
        window=0,
        batch=batch,
        context=context,
    )


def decode_seconds(table):
    """A floor, a cost a sequence x KV head, and KV bytes at 80 % of the bandwidth."""
    keys = table["batch"] * table["context"]
    kv_bytes = keys * table["num_kv_heads"] * 128 * 4
    return 1e-5 + 2e-8 * table["batch"] * table["num_kv_heads"] + kv_bytes / 3.84e12


def grid(first, second):
    left, right = np.meshgrid(first, second, indexing="ij")
    return left.ravel(), right.ravel()
