"""Estimators with ``fit`` and ``predict``, one kind of operation a class."""

from __future__ import annotations

from calibrate.estimators.attention import (
    DecodeAttention,
    MixedAttention,
    PrefillAttention,
)
from calibrate.estimators.curves import AllReduce, Copy, Layer, Swap
from calibrate.estimators.delta import DeltaDecode, DeltaPrefill
from calibrate.estimators.gemm import Gemm
from calibrate.estimators.kernel import KernelEstimator
from calibrate.estimators.latent import LatentDecode, LatentPrefill
from calibrate.estimators.moe import Moe

ESTIMATORS: dict[str, type[KernelEstimator]] = {
    kind.operation: kind
    for kind in (
        DecodeAttention,
        PrefillAttention,
        MixedAttention,
        LatentDecode,
        LatentPrefill,
        DeltaDecode,
        DeltaPrefill,
        Gemm,
        Moe,
        AllReduce,
        Layer,
        Swap,
        Copy,
    )
}
"""Operation of a profile to the class that fits it."""

__all__ = [
    "ESTIMATORS",
    "AllReduce",
    "Copy",
    "DecodeAttention",
    "DeltaDecode",
    "DeltaPrefill",
    "Gemm",
    "KernelEstimator",
    "LatentDecode",
    "LatentPrefill",
    "Layer",
    "MixedAttention",
    "Moe",
    "PrefillAttention",
    "Swap",
]
