"""What a step costs: the shape of a batch in, seconds out.

The engine knows the `CostModel` protocol and nothing else; each model is one file in
``sim/costs``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray


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


class StepPricer(Protocol):
    """Optional part of a cost model: many steps at once, each priced as `step` would.

    Both methods agree with ``step`` bit for bit, so that a run gives the same results
    whichever of the three it asks. A model without them is asked step by step.
    """

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        """Return the price of a step of so many decodes and nothing else.

        The function takes `num_decode_context_tokens` and returns ``step(...).total_s``
        in seconds.
        """
        ...

    def columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return ``step()`` of each row.

        Parameters
        ----------
        shapes
            (n, 9), the fields of `BatchShape` in order.

        Returns
        -------
        NDArray[np.float64]
            (n, 10), the fields of `StepCost` in order; `extrapolated` is 0 or 1.
        """
        ...


_PRICER_METHODS: Final = ("decode_total", "columns")


def pricer_of(cost_model: CostModel) -> StepPricer | None:
    """Return `cost_model` if it is a `StepPricer` that can be trusted, else None.

    Both methods must stand where ``step`` is defined or nearer to the object: a
    subclass that redefines ``step`` alone inherits methods that price something else.
    """
    trusted: set[str] = set()
    kinds = type(cost_model).__mro__
    for names in (getattr(cost_model, "__dict__", {}), *map(vars, kinds)):
        trusted.update(name for name in _PRICER_METHODS if name in names)
        if "step" in names:
            break
    # a class may set a method to None to be asked step by step
    if all(name in trusted and getattr(cost_model, name) for name in _PRICER_METHODS):
        return cast("StepPricer", cost_model)
    return None
