"""The price of a step: the shape of a batch in, seconds out.

The engine knows the `CostModel` protocol and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import nan
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    Protocol,
    cast,
    runtime_checkable,
)

from sim.scheduler.batch import BatchShape  # noqa: TC001  # users name it from here

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class StepCost(NamedTuple):
    """The length of one engine step in seconds, and its parts.

    The parts add up to `total_s`. A part that a model does not know is 0. Bounds that
    it does not know are NaN, which is recorded as `total_s`.
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
    lo_s: float = nan
    """Nine steps of ten of this shape should take from `lo_s` to `hi_s`; above 0."""
    hi_s: float = nan

    @property
    def parts(self) -> tuple[float, ...]:
        """Seconds that add up to `total_s`, in the order of `STEP_PARTS`."""
        return self[1:9]


Bound = Literal["lo", "hi"]
BOUNDS: Final[tuple[Bound, Bound]] = ("lo", "hi")

STEP_PARTS: Final = StepCost._fields[1:9]
"""The fields of `StepCost` that add up to `total_s`."""


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

    It agrees with ``step`` bit for bit; a model without it is asked step by step. A
    `sim.costs.parts.FormulaCost` has it, and all else that saves a run time. Another
    model may have ``batch_total``, a `BatchTotal`, and ``decode_total(num_decodes)``,
    which returns the price of so many decodes and nothing else: a function from
    `num_decode_context_tokens` to ``step(...).total_s``.
    """

    def columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return ``step()`` of each row.

        Parameters
        ----------
        shapes
            (n, 9), the fields of `BatchShape` in order.

        Returns
        -------
        NDArray[np.float64]
            (n, 12), the fields of `StepCost` in order; `extrapolated` is 0 or 1.
        """
        ...


@runtime_checkable
class Together(Protocol):
    """Optional part of a cost model: what ranks that divide experts do together.

    ``step`` of such a model is then the price of a rank by itself, without experts.
    """

    def together(self, shapes: Sequence[BatchShape]) -> tuple[float, float]:
        """Return seconds of experts and of exchanges, the same for every rank.

        Parameters
        ----------
        shapes
            The batches of all ranks; `rank_tokens` counts their tokens
            (`sim.costs.experts.exchange`).
        """
        ...


@runtime_checkable
class ReadsPrefixesOnce(Protocol):
    """Optional part of a cost model: attention that reads a common prefix once a step.

    ``step`` of a `SharingShape` is then that of a model that `reading_once` returns.
    """

    @property
    def reads_prefixes_once(self) -> bool:
        """Whether it ever does."""
        ...

    def num_read_once(
        self, num_common_tokens: int, num_decodes: int, num_prefills: int
    ) -> int:
        """Return how many tokens of a prefix a step of these requests reads once.

        Parameters
        ----------
        num_common_tokens
            See `SharingShape`.
        num_decodes, num_prefills
            The requests of the step.
        """
        ...

    def reading_once(self, num_tokens: int) -> CostModel:
        """Return the model of steps that read so many tokens once; 0 for none."""
        ...


BatchTotal = Callable[[int, int, int, int, int, int], float]
"""From the first six fields of `BatchShape` to ``step(...).total_s`` in seconds."""

DecodeEnds = Callable[[int, int, float, float], list[float]]
"""From ``(num_decode_context_tokens, num_steps, now_s, until_s)`` to the ends, in
seconds, of steps of the same decodes in a row.

Each step attends to one token a decode more than the one before, and starts where that
one ended, the first at `now_s`. The last is number `num_steps` (at least 1), or the
first that ends at `until_s` or later, or not after it began."""


def pricer_of(cost_model: CostModel) -> StepPricer | None:
    """Return `cost_model` if it is a `StepPricer` that can be trusted, else None."""
    if own_method(cost_model, "columns"):
        return cast("StepPricer", cost_model)
    return None


def own_method(
    cost_model: CostModel, name: str, beside: Collection[str] = ("step", "parts")
) -> Any:
    """Return a method that agrees with those it stands `beside`, or None.

    It must stand where they are defined or nearer to the object: a subclass that
    redefines ``step`` alone inherits methods that price something else. A class may set
    a method to None to be asked step by step.
    """
    kinds = type(cost_model).__mro__
    for names in (getattr(cost_model, "__dict__", {}), *map(vars, kinds)):
        if name in names:
            return getattr(cost_model, name)
        if any(other in names for other in beside):
            break
    return None
