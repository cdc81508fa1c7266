"""Swaps and block copies: what moving KV blocks costs, and what of it a step shows.

A block lies in *descriptors*: pieces that are contiguous on both sides. Each generation
of engines has its way to move them, its *variant* (D descriptors, B bytes)::

    loop     one call a descriptor, the host waits for the calls:
                 host    call · D
                 all     fixed + max(call · D, B / link)
    batch    one call for all descriptors, then the copy engine:
                 host    fixed + descriptor · D
                 all     host + fixed + max(B / link, dma · D), less what is described
                         beside the copy: all but the first `FIRST_DESCRIPTORS`
    kernel   a kernel on some multiprocessors reads the host's memory:
                 host    0
                 all     fixed + B / (link · share)

A step that swaps pays for each direction apart, and `fixed` once a direction. *Serial*
transfers add to the step. Those *beside* the step add what the host waits and what
outlasts the step, where both slow each other down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, get_args

from cache.v1.specs import MambaSpec
from sim.costs.parts import Memo
from sim.costs.rates.widths import ESTIMATE, Width, wider
from sim.scheduler.generation import KvLayout, SwapVariant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cache.v1.specs import KVCacheLayout
    from sim.hardware.models.architecture import ModelArchitecture

VARIANTS: Final[tuple[SwapVariant, ...]] = get_args(SwapVariant)
LAYOUTS: Final[tuple[KvLayout, ...]] = get_args(KvLayout)

SMALL_PAGE_BYTES: Final = 28 * 1024
FEWEST_SMALL_PAGES: Final = 16
"""Loads of pages below the one and of at least the other go by kernel where others go
by batch: below 28 KiB the copy engine falls to a sixth (vLLM pull request 42212)."""


FIRST_DESCRIPTORS: Final = 10_000
"""Descriptors of a batch before which nothing is copied. Published calls of 10,000 take
the sum of both, those of 50,000 and 100,000 hardly more than the copy (pull request
42212); this number puts all of them within 9 %."""


class Moved(NamedTuple):
    """Seconds of one transfer."""

    total_s: float
    """From the call to the end of the transfer, alone on an idle GPU."""
    host_s: float
    """Of these, those that the host spends in the call."""
    extrapolated: bool = True
    """Whether no measurement stands behind it."""
    width: Width = ESTIMATE
    """By how much it may be shorter and longer."""
    beside_s: float = 0.0
    """Of `host_s`, the last ones, in which blocks are copied already."""

    @property
    def begin_s(self) -> float:
        """Seconds from the call to the first byte."""
        return self.host_s - self.beside_s

    @property
    def copy_s(self) -> float:
        """Seconds of the copy, alone on an idle GPU."""
        return self.total_s - self.begin_s


STATE_PIECES: Final = 4
"""Descriptors of a state of Mamba2 or a gated delta net: of the tail of its convolution
three, as its inputs are divided among ranks one by one, and its matrices."""

NOTHING: Final = Moved(0.0, 0.0, False, Width(0.0, 0.0))


KERNEL_BOTH_WAYS_SHARE: Final = 0.685
"""Of what a direction reaches alone, what is left to it while both are busy and a
kernel copies one of them: 68.5 GB/s in place of twice 50 on an H100 (vLLM blog,
2026-01-08; the copy engines reach 83.4)."""
KERNEL_STEP_FACTOR: Final = 1.06
"""How much longer steps take while a kernel copies (as before)."""


class Transfer(Protocol):
    """The price of moving blocks in one direction."""

    def at(self, num_blocks: int) -> Moved:
        """Return the price of so many blocks, at least 1."""
        ...


class JobTransfer(Protocol):
    """The price of moving blocks of several KV cache groups in one direction."""

    def at(self, num_by_group: Sequence[int]) -> tuple[Moved, bool]:
        """Return the price of a job, and whether a kernel moves it."""
        ...


@dataclass(frozen=True, slots=True)
class Pages:
    """How a block lies in memory on one rank."""

    per_block: int
    """Descriptors of a block."""
    page_bytes: float

    @property
    def block_bytes(self) -> float:
        return self.per_block * self.page_bytes


def pages_of(model: ModelArchitecture, layout: KvLayout, block_bytes: float) -> Pages:
    """Return the descriptors of a block of `block_bytes` over all layers.

    ``separate`` keeps K and V of a layer apart, as the engines before V1 do; with
    ``joined`` they are one page a layer, with ``cross_layer`` a block is one page. A
    latent (MLA) has no two halves.
    """
    halves = 1 if model.kv_lora_rank else 2
    layers = model.num_hidden_layers
    counts = {"separate": halves * layers, "joined": layers, "cross_layer": 1}
    return Pages(counts[layout], block_bytes / counts[layout])


def pages_by_group(layout: KVCacheLayout) -> tuple[Pages, ...]:
    """Return how a block of each KV cache group is read by another engine.

    The first layers of all groups share a tensor, and so on: a block is read from all
    tensors that layers of two groups lie in, and from the others of its own group.
    Where some layers have states, a block of attention is read from all tensors, and
    one of a state from those that have some: without its padding, in `STATE_PIECES`.

    Source: vLLM 0.33, ``vllm/distributed/kv_transfer/kv_connector/v1/nixl``:
    ``base_worker.py`` (`_compute_desc_ids`, `_build_mamba_local`).
    """
    lengths = [len(group.layer_names) for group in layout.groups]
    shared = sorted([0, *lengths])[-2]
    states = [
        length
        for group, length in zip(layout.groups, lengths, strict=True)
        if isinstance(group.spec, MambaSpec)
    ]
    if states:
        shared = max(lengths)
    return tuple(
        Pages(STATE_PIECES * max(states), group.spec.state_bytes / STATE_PIECES)
        if isinstance(group.spec, MambaSpec)
        else Pages(max(length, shared), group.bytes_per_block / length)
        for group, length in zip(layout.groups, lengths, strict=True)
    )


def pages_by_offloaded_group(layout: KVCacheLayout) -> tuple[Pages, ...]:
    """Return how a block of each KV cache group is copied to a CPU tier.

    Only its own layers are, in contrast to `pages_by_group`.
    """
    return tuple(
        Pages(len(group.layer_names), group.bytes_per_block / len(group.layer_names))
        for group in layout.groups
    )


@dataclass(frozen=True, slots=True)
class Loop:
    """One call a descriptor; see the module."""

    pages: Pages
    fixed_s: float
    call_s: float
    bytes_per_s: float

    def at(self, num_blocks: int) -> Moved:
        host_s = self.call_s * (self.pages.per_block * num_blocks)
        link_s = self.pages.block_bytes * num_blocks / self.bytes_per_s
        total_s = self.fixed_s + max(host_s, link_s)
        return Moved(total_s, host_s, beside_s=host_s)


@dataclass(frozen=True, slots=True)
class Batch:
    """One call for all descriptors; see the module."""

    pages: Pages
    fixed_s: float
    descriptor_s: float
    dma_s: float
    bytes_per_s: float

    def at(self, num_blocks: int) -> Moved:
        num_descriptors = self.pages.per_block * num_blocks
        host_s = self.fixed_s + self.descriptor_s * num_descriptors
        num_hidden = max(num_descriptors - FIRST_DESCRIPTORS, 0)
        hidden_s = self.descriptor_s * num_hidden
        link_s = self.pages.block_bytes * num_blocks / self.bytes_per_s
        copy_s = max(link_s, self.dma_s * num_descriptors, hidden_s)
        total_s = host_s - hidden_s + (self.fixed_s + copy_s)
        return Moved(total_s, host_s, beside_s=hidden_s)


@dataclass(frozen=True, slots=True)
class CopyKernel:
    """A kernel that copies small pages; see the module."""

    pages: Pages
    fixed_s: float
    bytes_per_s: float

    def at(self, num_blocks: int) -> Moved:
        link_s = self.pages.block_bytes * num_blocks / self.bytes_per_s
        return Moved(self.fixed_s + link_s, 0.0)


@dataclass(frozen=True, slots=True)
class ByPageSize:
    """Small pages in numbers by one transfer, the others by another."""

    pages: Pages
    small: Transfer
    other: Transfer

    def takes_small(self, num_blocks: int) -> bool:
        """Whether so many blocks are many pages that are small."""
        few = self.pages.per_block * num_blocks < FEWEST_SMALL_PAGES
        return not few and self.pages.page_bytes < SMALL_PAGE_BYTES

    def at(self, num_blocks: int) -> Moved:
        small = self.takes_small(num_blocks)
        return (self.small if small else self.other).at(num_blocks)


@dataclass(frozen=True, slots=True)
class LinkTransfer:
    """A link of which its speed is known, and nothing else."""

    block_bytes: float
    bytes_per_s: float
    latency_s: float = 0.0

    def at(self, num_blocks: int) -> Moved:
        link_s = self.block_bytes * num_blocks / self.bytes_per_s
        return Moved(self.latency_s + link_s, 0.0)


@dataclass(frozen=True, slots=True)
class PerBlock:
    """So many seconds a block."""

    block_s: float

    def at(self, num_blocks: int) -> Moved:
        return Moved(self.block_s * num_blocks, 0.0)


@dataclass(frozen=True, slots=True)
class OneGroupTransfer:
    """Blocks of the only KV cache group."""

    whole: Transfer

    def at(self, num_by_group: Sequence[int]) -> tuple[Moved, bool]:
        """See `JobTransfer.at`."""
        (number,) = num_by_group
        return self.whole.at(number), goes_by_kernel(self.whole, number)


class GroupTransfer:
    """Blocks of several KV cache groups in one transfer.

    A block of a group is a page for each of its layers, without padding; all pages of a
    transfer are descriptors of one call.

    Parameters
    ----------
    whole
        The price of blocks of one group.
    groups
        How a block of each group lies in memory on one rank.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/worker.py``
    (`register_kv_caches`).
    """

    def __init__(self, whole: Transfer, groups: Sequence[Pages]) -> None:
        self._whole = whole
        self._groups = groups

    def at(self, num_by_group: Sequence[int]) -> tuple[Moved, bool]:
        """Return the price of so many blocks of each group, and if a kernel moves them.

        At least one block of some group.
        """
        pairs = list(zip(num_by_group, self._groups, strict=True))
        num_pages = sum(number * pages.per_block for number, pages in pairs)
        num_bytes = sum(number * pages.block_bytes for number, pages in pairs)
        if isinstance(self._whole, PerBlock):
            return self._whole.at(sum(num_by_group)), False
        way = _of_pages(self._whole, num_bytes / num_pages)
        return way.at(num_pages), goes_by_kernel(way, num_pages)


def _of_pages(transfer: Any, page_bytes: float) -> Any:
    """Return a transfer whose blocks are single pages of a size."""
    if isinstance(transfer, LinkTransfer):
        return replace(transfer, block_bytes=page_bytes)
    parts = {}
    if isinstance(transfer, ByPageSize):
        parts = {
            name: _of_pages(getattr(transfer, name), page_bytes)
            for name in ("small", "other")
        }
    return replace(transfer, pages=Pages(1, page_bytes), **parts)


def goes_by_kernel(transfer: Transfer, num_blocks: int) -> bool:
    """Whether a kernel moves so many blocks, on multiprocessors that steps lack."""
    if isinstance(transfer, ByPageSize):
        return transfer.takes_small(num_blocks)
    return isinstance(transfer, CopyKernel)


@dataclass(frozen=True, slots=True)
class Swapping:
    """Time that swaps add to a step.

    Parameters
    ----------
    load, store
        To the GPU, and to the host.
    overlap
        Whether transfers run beside the step; if not, before it.
    step_factor, transfer_factor
        How much longer a step takes while a transfer runs, and the reverse, >= 1.
    """

    load: Transfer
    store: Transfer
    overlap: bool = False
    step_factor: float = 1.0
    transfer_factor: float = 1.0
    _kept: Memo[Moved] = field(
        init=False, repr=False, compare=False, default_factory=Memo
    )

    def moved(self, num_loaded: int, num_stored: int) -> Moved:
        """Return the price of both directions, one after the other."""
        key = num_loaded << 32 | num_stored
        return self._kept.get(key) or self._kept.keep(
            key, self._moved(num_loaded, num_stored)
        )

    def _moved(self, num_loaded: int, num_stored: int) -> Moved:
        load = self.load.at(num_loaded) if num_loaded else NOTHING
        store = self.store.at(num_stored) if num_stored else NOTHING
        return Moved(
            load.total_s + store.total_s,
            load.host_s + store.host_s,
            load.extrapolated or store.extrapolated,
            wider(load.width, store.width),
        )

    def exposed_s(self, num_loaded: int, num_stored: int, gpu_s: float) -> float:
        """Return the seconds by which a step grows."""
        return self.shown_s(self.moved(num_loaded, num_stored), gpu_s)

    def shown_s(self, moved: Moved, gpu_s: float) -> float:
        """Return the seconds by which a step grows that moves so much."""
        if not self.overlap:
            return moved.total_s
        rest_s = moved.total_s - moved.host_s
        return moved.host_s + outlasting_s(
            gpu_s, rest_s, self.step_factor, self.transfer_factor
        )


def outlasting_s(
    gpu_s: float, transfer_s: float, step_factor: float, transfer_factor: float
) -> float:
    """Return the seconds that a transfer beside a step adds to it.

    While both run, a second of the step takes `step_factor` seconds and one of the
    transfer `transfer_factor`; what is left when the first ends goes on alone. That is
    what the two factors mean where they are measured: one is timed while the other
    runs all the time. With factors of 1 this is ``max(gpu_s, transfer_s) - gpu_s``.
    """
    beside_s, slowed_s = transfer_s * transfer_factor, gpu_s * step_factor
    if beside_s <= slowed_s:
        return beside_s - beside_s / step_factor
    return slowed_s - gpu_s + (beside_s - slowed_s) / transfer_factor
