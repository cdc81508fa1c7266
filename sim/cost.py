"""What a step costs: the shape of a batch in, seconds out.

The engine knows the `CostModel` protocol and nothing else; each model is one file in
``sim/costs``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class BatchShape(NamedTuple):
    """The work of one engine step, as exact integers.

    A *decode* is a scheduled request with a query of one token; everything longer is
    a *prefill* chunk. Context lengths include the tokens of this step.
    """

    num_decodes: int
    """Requests with a query of one token."""
    num_decode_context_tokens: int
    """Sum over decodes of the keys each attends to."""
    num_prefills: int
    """Requests with a query of more than one token."""
    num_prefill_tokens: int
    """Sum over prefill chunks of query tokens."""
    num_prefill_context_tokens: int
    """Sum over prefill chunks of the context at the chunk's end."""
    num_prefill_attention_pairs: int
    """Sum over prefill chunks of causal query-key pairs."""
    num_swapped_in_blocks: int = 0
    """KV blocks copied from CPU to GPU before the step."""
    num_swapped_out_blocks: int = 0
    """KV blocks copied from GPU to CPU before the step."""
    num_copied_blocks: int = 0
    """KV blocks copied on the GPU (copy-on-write) before the step."""


EMPTY_SHAPE = BatchShape(0, 0, 0, 0, 0, 0)
"""A step that computes nothing."""


class StepCost(NamedTuple):
    """The length of one engine step in seconds, and its parts.

    The parts add up to `total_s`. A part that a model does not know is 0.
    """

    total_s: float
    gemm_s: float = 0.0
    """Linear layers of all transformer layers."""
    prefill_attention_s: float = 0.0
    decode_attention_s: float = 0.0
    head_s: float = 0.0
    """Output projection and sampling."""
    allreduce_s: float = 0.0
    """Collectives of tensor parallelism."""
    swap_s: float = 0.0
    copy_s: float = 0.0
    host_s: float = 0.0
    """Scheduler, input preparation, launches and everything not named above."""
    extrapolated: bool = False
    """Whether the shape lies outside what the model was fitted on."""


class CostModel(Protocol):
    """Seconds of an engine step.

    Implementations are pure: the same shape always costs the same, and an empty
    shape costs host time, more than zero (invariant 3).
    """

    def step(self, shape: BatchShape) -> StepCost:
        """Return the cost of a step of this shape, in seconds."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return parameters and sources, JSON-ready, for the results' provenance."""
        ...
