"""Triton kernels compile for GPUs that are not here, down to machine code."""

from __future__ import annotations

import pytest

from tests.calibrate.missing import torch_and_triton

torch_and_triton()

# ruff: noqa: E402
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile

from calibrate.gpu.attention import PROGRAMS_PER_SM
from calibrate.kernels import triton_copy, triton_decode, triton_mixed
from calibrate.kernels.triton_support import FP_FUSION

ATTENTION = {
    "NUM_KV_HEADS": 8,
    "GROUP": 4,
    "HEAD_DIM": 128,
    "HEAD_PAD": 128,
    "BLOCK_SIZE": 16,
    "TILE": 64,
    "WIDEN": False,
}
DECODE = {**ATTENTION, "GROUP_PAD": 16, "SINGLE": False}
INTS = ("_stride", "_len", "_words", "num_pairs", "num_pages")


def types(names: list[str], pointers: dict[str, str]) -> dict[str, str]:
    """Return the signature of a kernel's parameters, as a launch would infer it."""
    signature: dict[str, str] = {}
    for name in names:
        if name in pointers:
            signature[name] = pointers[name]
        elif name == "scale_log2":
            signature[name] = "fp32"
        elif name.isupper():
            signature[name] = "constexpr"
        else:
            assert name.endswith(INTS), name
            signature[name] = "i32"
    return signature


def attention_pointers(dtype: str, kv_dtype: str) -> dict[str, str]:
    ints = (
        "block_tables_ptr",
        "context_lens_ptr",
        "query_starts_ptr",
        "tile_seqs_ptr",
        "tile_firsts_ptr",
        *("item_seqs_ptr", "item_starts_ptr", "first_items_ptr"),
    )
    return {
        **dict.fromkeys(ints, "*i32"),
        **dict.fromkeys(("out_ptr", "query_ptr"), f"*{dtype}"),
        **dict.fromkeys(("key_ptr", "value_ptr"), f"*{kv_dtype}"),
        **dict.fromkeys(("partial_ptr", "lse_ptr"), "*fp32"),
    }


def compiled(
    kernel: object,
    pointers: dict[str, str],
    constants: dict[str, object],
    arch: int,
    **launch: int,
) -> CompiledKernel:
    signature = types(kernel.arg_names, pointers)
    # what a launch finds out by itself: aligned pointers and strides
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if name.endswith(("_ptr", "_stride", "_words")) and name != "table_stride"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"enable_fp_fusion": FP_FUSION, **launch}
    return compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_decode_compiles(arch: int) -> None:
    pointers = attention_pointers("bf16", "bf16")
    split = compiled(triton_decode.decode_split_kernel, pointers, DECODE, arch)
    assert len(split.asm["cubin"]) > 1000
    # reads are 16 bytes wide, and go through the asynchronous copy
    assert "cp.async.cg.shared.global" in split.asm["ptx"]
    assert "mma" in split.asm["ptx"]
    constants = {"NUM_HEADS": 32, "HEAD_DIM": 128, "HEAD_PAD": 128}
    reduce = compiled(triton_decode.decode_reduce_kernel, pointers, constants, arch)
    assert len(reduce.asm["cubin"]) > 1000


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_mixed_compiles(arch: int) -> None:
    pointers = attention_pointers("bf16", "bf16")
    constants = {**ATTENTION, "ROWS": 128}
    kernel = compiled(triton_mixed.mixed_attention_kernel, pointers, constants, arch)
    assert len(kernel.asm["cubin"]) > 1000
    assert "mma" in kernel.asm["ptx"]


SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""That a program may have at most, of the CUDA programming guide."""


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_programs_fit_a_multiprocessor(arch: int, head_dim: int) -> None:
    """As they are launched: shared memory, and four decodes side by side."""
    pointers = attention_pointers("bf16", "bf16")
    wide = {"HEAD_DIM": head_dim, "HEAD_PAD": head_dim}
    shape, chunk = triton_decode.DecodeShape(), triton_mixed.MixedShape()
    decode = compiled(
        triton_decode.decode_split_kernel,
        pointers,
        {**DECODE, **wide, "TILE": shape.tile},
        arch,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    side_by_side = PROGRAMS_PER_SM if head_dim == 128 else 1
    assert side_by_side * decode.metadata.shared <= SHARED_BYTES[arch]
    tile = chunk.tile if head_dim == 128 else chunk.tile // 2
    mixed = compiled(
        triton_mixed.mixed_attention_kernel,
        pointers,
        {**ATTENTION, **wide, "ROWS": chunk.rows, "TILE": tile},
        arch,
        num_warps=chunk.num_warps,
        num_stages=chunk.num_stages,
    )
    assert mixed.metadata.shared <= SHARED_BYTES[arch]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_copies_compile(arch: int) -> None:
    pool = dict.fromkeys(("pool_ptr", "source_ptr", "target_ptr"), "*i32")
    pointers = {**pool, "pairs_ptr": "*i64"}
    for kernel, chunk in (
        (triton_copy.copy_blocks_kernel, 2048),
        (triton_copy.swap_pages_kernel, 4096),
    ):
        built = compiled(kernel, pointers, {"CHUNK": chunk}, arch)
        assert "ld.global.v4" in built.asm["ptx"]
        assert "st.global.v4" in built.asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("fp16", "fp16"), ("bf16", "fp8e4nv")])
def test_other_precisions_compile(arch: int, dtype: str, kv_dtype: str) -> None:
    pointers = attention_pointers(dtype, kv_dtype)
    for kernel, constants in (
        (triton_decode.decode_split_kernel, DECODE),
        (triton_mixed.mixed_attention_kernel, {**ATTENTION, "ROWS": 64}),
    ):
        assert len(compiled(kernel, pointers, constants, arch).asm["cubin"]) > 1000
