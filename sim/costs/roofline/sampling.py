"""The sampler's filters: what top-k and top-p take of a step, by kernel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sim.hardware.capacity.arguments import parse_release
from sim.hardware.capacity.constants import (
    FIRST_FLASHINFER_IMAGE,
    FIRST_TRITON_OF_FEW_ROWS_MINOR,
    FIRST_TRITON_SAMPLER_MINOR,
    LAST_FLASHINFER_IMAGE,
    LEAST_SEGMENTED_ROWS,
    LEAST_TRITON_ROWS,
)
from sim.hardware.capacity.kernels import is_amd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.hardware.gpus import GpuSpec

_FIRST_FLASHINFER_MINOR: Final = 21
"""From here FlashInfer filters unless it is told not to. Source: vLLM 0.20 and 0.21,
``vllm/envs.py`` (`VLLM_USE_FLASHINFER_SAMPLER`); the second model runner's of 0.24."""
_NUM_SMS: Final = 132
"""Of a GPU whose number is not known."""
_SOURCE: Final = (
    "kernels alone: vLLM pull requests 33538, 40376 and 51507; see sim/costs/README.md"
)


class SamplerKernel(Enum):
    """Kernel that filters the logits of a step."""

    SORT = "sort"
    """PyTorch sorts all logits of all requests."""
    TRITON = "triton"
    """A program a multiprocessor walks through the logits of one request at a time."""
    FLASHINFER = "flashinfer"
    """Rejects samples until one passes."""


class _Sorting(NamedTuple):
    """Seconds of PyTorch: passes over all rows, and what a row's length costs."""

    logit_bytes: float

    def start_s(self, num_rows: int, vocab_size: int) -> float:
        if num_rows >= LEAST_SEGMENTED_ROWS:
            return 8.3e-9 * vocab_size
        return 0.1e-3 + 1.8e-9 * vocab_size


class _Walk(NamedTuple):
    """Seconds of Triton's programs: each row once, as many at a time as there are."""

    start_s: float
    logit_s: float


class _Rejecting(NamedTuple):
    """Seconds of FlashInfer: rounds over a row, and bytes of all rows."""

    start_s: float
    logit_s: float
    logit_bytes: float


_TOP_K, _TOP_P, _BOTH = (True, False), (False, True), (True, True)
_SORTS: Final = {
    _TOP_K: _Sorting(345.0),
    _TOP_P: _Sorting(385.0),
    _BOTH: _Sorting(415.0),
}
_WALKS: Final = {
    _TOP_K: _Walk(52e-6, 1.9e-9),
    _TOP_P: _Walk(173e-6, 2.65e-9),
    _BOTH: _Walk(70e-6, 2.2e-9),
}
_REJECTIONS: Final = {
    _TOP_K: _Rejecting(10e-6, 0.83e-9, 27.0),
    _TOP_P: _Rejecting(13e-6, 0.42e-9, 22.0),
    _BOTH: _Rejecting(17e-6, 0.87e-9, 38.0),
}


_INTERVALS: Final = {
    SamplerKernel.SORT: (0.8, 2.0),
    SamplerKernel.TRITON: (0.3, 3.4),
    SamplerKernel.FLASHINFER: (0.5, 2.0),
}
"""Measured over these: a sort on an MI350X, versions of Triton's kernel, and of
FlashInfer one table alone, so that the interval is stated."""


@dataclass(frozen=True, slots=True)
class SamplerRule:
    """How the logits of a step are filtered, where its requests ask for it.

    Parameters
    ----------
    kernel
        What the release takes.
    filters
        Whether by top-k, and by top-p: one of them at least.
    few_rows
        Requests below which Triton's place is taken by a sort.
    """

    kernel: SamplerKernel
    filters: tuple[bool, bool]
    few_rows: int = 0

    def seconds(self, num_rows: int, vocab_size: int, gpu: GpuSpec) -> float:
        """Return what filtering so many requests adds to a step.

        Sampling itself is `sampler_bytes_per_logit`. FlashInfer's figures include a
        softmax; those of others stand for masking alone.
        """
        if not num_rows:
            return 0.0
        bandwidth = gpu.memory_bandwidth_bytes_per_s
        if self.kernel is SamplerKernel.FLASHINFER:
            own = _REJECTIONS[self.filters]
            start_s = own.start_s + own.logit_s * vocab_size
            return start_s + own.logit_bytes * num_rows * vocab_size / bandwidth
        if self.kernel is SamplerKernel.TRITON and num_rows >= self.few_rows:
            walk = _WALKS[self.filters]
            rounds = max(1.0, num_rows / (gpu.num_sms or _NUM_SMS))
            return (walk.start_s + walk.logit_s * vocab_size) * rounds
        sort = _SORTS[self.filters]
        moved_s = sort.logit_bytes * num_rows * vocab_size / bandwidth
        return sort.start_s(num_rows, vocab_size) + moved_s

    def described(self) -> dict[str, Any]:
        """Return it with its source, JSON-ready."""
        asked = zip(("top_k", "top_p"), self.filters, strict=True)
        return {
            "kernel": self.kernel.value,
            "filters": [name for name, is_asked in asked if is_asked],
            "source": _SOURCE,
            "interval": list(_INTERVALS[self.kernel]),
            "unit": "times the filters' seconds",
        }


def rule_of(
    generation_config: Mapping[str, Any], engine_version: str, gpu: GpuSpec
) -> SamplerRule | None:
    """Return how a release filters what requests ask for by default; None: not at all.

    Greedy requests are not filtered. Where FlashInfer is taken if it is installed, it
    is taken to be, as in vLLM's images.

    Source: vLLM 0.7.3 to 0.33.0, ``v1/sample/ops/topk_topp_sampler.py``, and before V1
    ``model_executor/layers/sampler.py``.
    """
    top_k, top_p = generation_config.get("top_k"), generation_config.get("top_p")
    filters = (top_k or 0) > 0, (top_p or 1.0) < 1.0
    if generation_config.get("temperature") == 0.0 or not any(filters):
        return None
    release = parse_release(engine_version)
    minor, _ = release
    has_image = FIRST_FLASHINFER_IMAGE <= release <= LAST_FLASHINFER_IMAGE
    if not is_amd(gpu) and (has_image or minor >= _FIRST_FLASHINFER_MINOR):
        return SamplerRule(SamplerKernel.FLASHINFER, filters)
    if minor < FIRST_TRITON_SAMPLER_MINOR:
        return SamplerRule(SamplerKernel.SORT, filters)
    few = 0 if minor >= FIRST_TRITON_OF_FEW_ROWS_MINOR else LEAST_TRITON_ROWS
    return SamplerRule(SamplerKernel.TRITON, filters, few)
