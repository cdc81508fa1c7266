"""Launches compile as they are written: types, options, constants that Triton infers.

A driver on paper stands in for the GPU's; all up to the launch itself is Triton's own.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.calibrate.missing import torch_and_triton

torch_and_triton()

# ruff: noqa: E402
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from calibrate.gpu.attention import Engines, attention_call
from calibrate.kernels import triton_copy
from tests.calibrate.paged import Shape, random_batch


class PaperDriver:
    """Says that an H200 is here, and can do nothing."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_interface(self) -> Any:
        return torch.cpu


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The kernels that were compiled for a launch, in order."""
    done: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert not warmup
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        done.append((self.fn.__name__, kernel))
        return kernel

    monkeypatch.setattr(JITFunction, "run", compiled)
    monkeypatch.setattr(driver, "_active", PaperDriver())
    return done


def launch(variant: str, query_lens: list[int], lens: list[int]) -> None:
    batch = random_batch(Shape(4, 2, 128, 16, torch.bfloat16), query_lens, lens)
    attention_call(variant, batch, Engines(torch.device("cpu"), 132, None))[0]()


def test_decode(launched: list[tuple[str, Any]]) -> None:
    launch("split_kv", [1, 1], [700, 3])
    names = [name for name, _ in launched]
    assert names == ["decode_split_kernel", "decode_reduce_kernel"]
    assert "cp.async.cg.shared.global" in launched[0][1].asm["ptx"]


def test_a_table_of_another_width_compiles_nothing_new(
    launched: list[tuple[str, Any]],
) -> None:
    """Widths of 1, of a multiple of 16 and of anything else, all in one piece."""
    for width in (15, 250, 200):  # the test's tables are a block wider
        launch("split_kv", [1, 1], [width, 3])
    assert len({kernel.hash for _, kernel in launched}) == 1


def test_mixed(launched: list[tuple[str, Any]]) -> None:
    launch("mixed", [40, 1], [40, 90])
    ((name, kernel),) = launched
    assert name == "mixed_attention_kernel"
    assert "wgmma" in kernel.asm["ptx"]


def test_copies(launched: list[tuple[str, Any]]) -> None:
    pool = torch.zeros(2, 2, 8, 16, 2, 64, dtype=torch.bfloat16)
    pairs = torch.tensor([[0, 1], [2, 3], [4, 5]])
    triton_copy.copy_blocks(pool, pairs)
    triton_copy.swap_pages(pool, pool, pairs, 3)
    triton_copy.swap_pages(pool, pool, pairs[:1], 3)
    assert len({kernel.hash for _, kernel in launched}) == 2
    for _, kernel in launched:
        assert "ld.global.v4" in kernel.asm["ptx"]
        assert "st.global.v4" in kernel.asm["ptx"]
