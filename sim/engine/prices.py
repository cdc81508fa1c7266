"""The prices that the fast path asks for, of any cost model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.costs.base import BatchShape, ends_by, own_method, pricer_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.costs.base import BatchTotal, CostModel, DecodeEnds


def batch_total_of(cost_model: CostModel) -> BatchTotal:
    """Return the model's own ``batch_total``, or one that asks it step by step."""
    own: BatchTotal | None = own_method(cost_model, "batch_total")
    if own is not None:
        return own

    def batch_total(*shape: int) -> float:
        return cost_model.step(BatchShape(*shape)).total_s

    return batch_total


def decode_ends_of(cost_model: CostModel) -> Callable[[int], DecodeEnds]:
    """Return the model's own ``decode_ends``, or one made of what it has."""
    own: Callable[[int], DecodeEnds] | None = own_method(cost_model, "decode_ends")
    if own is not None:
        return own
    pricer = pricer_of(cost_model)
    decode_total = _asking(cost_model) if pricer is None else pricer.decode_total

    def decode_ends(num_decodes: int) -> DecodeEnds:
        return ends_by(decode_total(num_decodes), num_decodes)

    return decode_ends


def _asking(cost_model: CostModel) -> Callable[[int], Callable[[int], float]]:
    """Return ``decode_total`` of a model that prices whole steps only."""

    def decode_total(num_decodes: int) -> Callable[[int], float]:
        def total_s(num_context_tokens: int) -> float:
            shape = BatchShape(num_decodes, num_context_tokens, 0, 0, 0, 0)
            return cost_model.step(shape).total_s

        return total_s

    return decode_total
