"""Moving blocks in Triton: copy-on-write over all layers, and swaps of small pages.

A pool (see `calibrate.kernels`) is read as pages: ``2 * num_layers`` of them a block,
one *plane* (a layer's keys, or its values) apart::

    plane p   | page 0 | page 1 | ... | page num_blocks - 1 |   p = 2 * layer + K/V
              '--------' page_words 32-bit words

`copy_blocks` moves pairs of blocks inside one pool, all planes at once. `swap_pages`
moves them between two pools, one of which may lie in pinned host memory, which a kernel
reads and writes over the bus; a bounded number of programs does so, so that the rest of
the device stays free for the step.

Source: ``copy_blocks`` of vLLM 0.7 (pairs source, destination; all layers in one
launch); the small-copy kernel that drivers use for batches of small pages is the model
for the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from calibrate.kernels.triton_support import FP_FUSION, cdiv, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def copy_blocks_kernel(
    pool_ptr,
    pairs_ptr,
    plane_stride,
    page_words,
    CHUNK: tl.constexpr,
):
    """Copy one chunk of one page of one pair; sizes in 32-bit words.

    Grid: (pairs, planes, chunks of a page).
    """
    pair = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    source = tl.load(pairs_ptr + 2 * pair)
    target = tl.load(pairs_ptr + 2 * pair + 1)
    base = pool_ptr + plane * plane_stride
    mask = word < page_words
    page = tl.load(base + source * page_words + word, mask=mask)
    tl.store(base + target * page_words + word, page, mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "num_pages"])
def swap_pages_kernel(
    source_ptr,
    target_ptr,
    pairs_ptr,
    source_plane_stride,
    target_plane_stride,
    num_pairs,
    num_pages,
    page_words,
    CHUNK: tl.constexpr,
):
    """Copy pages between pools, each program every so many; sizes in 32-bit words.

    Grid: (programs,). Page i is pair ``i % num_pairs`` of plane ``i // num_pairs``.
    """
    for page in range(tl.program_id(0), num_pages, tl.num_programs(0)):
        pair = page % num_pairs
        plane = (page // num_pairs).to(tl.int64)
        source = tl.load(pairs_ptr + 2 * pair)
        target = tl.load(pairs_ptr + 2 * pair + 1)
        source_base = source_ptr + plane * source_plane_stride + source * page_words
        target_base = target_ptr + plane * target_plane_stride + target * page_words
        for first in range(0, page_words, CHUNK):
            word = first + tl.arange(0, CHUNK)
            mask = word < page_words
            words = tl.load(source_base + word, mask=mask)
            tl.store(target_base + word, words, mask=mask)


def page_words(pool: Tensor) -> Tensor:
    """View a pool as (planes, num_blocks, 32-bit words of a page)."""
    page_bytes = pool[0, 0, 0].numel() * pool.element_size()
    if not pool.is_contiguous() or page_bytes % 4:
        raise ValueError(
            "a pool must be contiguous with pages of a multiple of 4 bytes; got pages"
            f" of {page_bytes} bytes in strides {pool.stride()}"
        )
    return pool.view(torch.uint8).view(-1, pool.shape[2], page_bytes).view(torch.int32)


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copy blocks onto others of the same pool, in every layer; one launch.

    Pairs are (num_pairs, 2), int64, on the pool's device: source and target of each. No
    block is both source and target, and none is target twice.
    """
    words = page_words(pool)
    planes, _, size = words.shape
    if pairs.shape[0] == 0:
        return
    chunk = min(2048, next_power_of_2(size))
    grid = (pairs.shape[0], planes, cdiv(size, chunk))
    copy_blocks_kernel[grid](
        words,
        pairs,
        words.stride(0),
        size,
        CHUNK=chunk,
        num_warps=4,
        enable_fp_fusion=FP_FUSION,
    )


def swap_pages(source: Tensor, target: Tensor, pairs: Tensor, programs: int) -> None:
    """Copy blocks between two pools, in every layer; one launch.

    Either pool may lie in pinned host memory; pairs are (num_pairs, 2), int64, on the
    device. `programs` do the work, at most one a page: about the multiprocessors that
    the copy occupies.
    """
    swap_words(page_words(source), page_words(target), pairs, programs)


def swap_words(source: Tensor, target: Tensor, pairs: Tensor, programs: int) -> None:
    """Copy pages of (planes, num_blocks, words), int32, as `swap_pages` does."""
    planes, _, size = source.shape
    num_pages = planes * pairs.shape[0]
    if num_pages == 0:
        return
    chunk = min(4096, next_power_of_2(size))
    swap_pages_kernel[(min(programs, num_pages),)](
        source,
        target,
        pairs,
        source.stride(0),
        target.stride(0),
        pairs.shape[0],
        num_pages,
        size,
        CHUNK=chunk,
        num_warps=8,
        enable_fp_fusion=FP_FUSION,
    )
