"""A step costs a sum of counts times coefficients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.costs.parts import above_zero, at_least_zero, cost_columns, step_cost

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from sim.costs.base import BatchShape, StepCost

_UNITS = {
    "base_s": "s/step",
    "decode_s": "s/decode",
    "prefill_s": "s/prefill chunk",
    "prefill_token_s": "s/token",
    "decode_context_token_s": "s/token",
    "prefill_context_token_s": "s/token",
    "prefill_attention_pair_s": "s/pair",
    "swapped_block_s": "s/block",
    "copied_block_s": "s/block",
}


class LinearCost:
    """Seconds of a step as a linear function of its shape.

    ::

        host_s               base_s
        gemm_s               decode_s · num_decodes + prefill_s · num_prefills
                             + prefill_token_s · num_prefill_tokens
        decode_attention_s   decode_context_token_s · num_decode_context_tokens
        prefill_attention_s  prefill_context_token_s · num_prefill_context_tokens
                             + prefill_attention_pair_s · num_prefill_attention_pairs
        swap_s               swapped_block_s · (swapped in + swapped out)
        copy_s               copied_block_s · num_copied_blocks

    What a real step spends on reading the weights is part of `base_s`, so an empty
    step costs as much as that: fit the coefficients to steps that compute.

    Parameters
    ----------
    base_s
        Seconds a step; finite and > 0.
    decode_s, prefill_s
        Seconds a decode, seconds a prefill chunk.
    prefill_token_s
        Seconds a query token of the prefill chunks.
    decode_context_token_s, prefill_context_token_s
        Seconds a token of context of the decodes, of the prefill chunks.
    prefill_attention_pair_s
        Seconds a causal query-key pair of the prefill chunks.
    swapped_block_s, copied_block_s
        Seconds a block moved between CPU and GPU, a block copied on the GPU.

    Raises
    ------
    ConfigError
        If a coefficient is negative or not finite, or `base_s` is 0.
    """

    __slots__ = tuple(_UNITS)

    def __init__(
        self,
        base_s: float,
        *,
        decode_s: float = 0.0,
        prefill_s: float = 0.0,
        prefill_token_s: float = 0.0,
        decode_context_token_s: float = 0.0,
        prefill_context_token_s: float = 0.0,
        prefill_attention_pair_s: float = 0.0,
        swapped_block_s: float = 0.0,
        copied_block_s: float = 0.0,
    ) -> None:
        self.base_s = above_zero("base_s", base_s)
        self.decode_s = at_least_zero("decode_s", decode_s)
        self.prefill_s = at_least_zero("prefill_s", prefill_s)
        self.prefill_token_s = at_least_zero("prefill_token_s", prefill_token_s)
        self.decode_context_token_s = at_least_zero(
            "decode_context_token_s", decode_context_token_s
        )
        self.prefill_context_token_s = at_least_zero(
            "prefill_context_token_s", prefill_context_token_s
        )
        self.prefill_attention_pair_s = at_least_zero(
            "prefill_attention_pair_s", prefill_attention_pair_s
        )
        self.swapped_block_s = at_least_zero("swapped_block_s", swapped_block_s)
        self.copied_block_s = at_least_zero("copied_block_s", copied_block_s)

    def step(self, shape: BatchShape) -> StepCost:
        """Return the cost of a step of this shape, in seconds."""
        return step_cost(
            self.decode_s * shape.num_decodes
            + self.prefill_s * shape.num_prefills
            + self.prefill_token_s * shape.num_prefill_tokens,
            self.prefill_context_token_s * shape.num_prefill_context_tokens
            + self.prefill_attention_pair_s * shape.num_prefill_attention_pairs,
            self.decode_context_token_s * shape.num_decode_context_tokens,
            0.0,
            0.0,
            self.swapped_block_s
            * (shape.num_swapped_in_blocks + shape.num_swapped_out_blocks),
            self.copied_block_s * shape.num_copied_blocks,
            self.base_s,
        )

    def batch_total(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_prefill_tokens: int,
        prefill_context: int,
        pairs: int,
    ) -> float:
        """Return ``total_s`` of a step that moves no blocks; as `StepPricer` says."""
        gemm_s = (
            self.decode_s * num_decodes
            + self.prefill_s * num_prefills
            + self.prefill_token_s * num_prefill_tokens
        )
        prefill_s = (
            self.prefill_context_token_s * prefill_context
            + self.prefill_attention_pair_s * pairs
        )
        decode_s = self.decode_context_token_s * decode_context
        return gemm_s + prefill_s + decode_s + self.base_s

    def decode_total(self, num_decodes: int) -> Callable[[int], float]:
        """Return ``total_s`` of steps of so many decodes, a function of their context.

        As `StepPricer.decode_total`: the sum of `step` without the parts that are 0.
        """
        gemm_s = self.decode_s * num_decodes
        context_token_s, base_s = self.decode_context_token_s, self.base_s
        return lambda context: gemm_s + context_token_s * context + base_s

    def columns(self, shapes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return `step` of each row of `shapes`; as `StepPricer.columns`."""
        decodes, context, prefills, tokens, past, pairs, *moved = shapes.T
        return cost_columns(
            len(shapes),
            self.decode_s * decodes
            + self.prefill_s * prefills
            + self.prefill_token_s * tokens,
            self.prefill_context_token_s * past + self.prefill_attention_pair_s * pairs,
            self.decode_context_token_s * context,
            0.0,
            0.0,
            self.swapped_block_s * (moved[0] + moved[1]),
            self.copied_block_s * moved[2],
            self.base_s,
        )

    def describe(self) -> dict[str, Any]:
        """Return the coefficients with units and source, JSON-ready."""
        return {
            "kind": "linear",
            "bounds": False,
            "parameters": {
                key: {
                    "value": getattr(self, key),
                    "unit": unit,
                    "source": "configuration",
                }
                for key, unit in _UNITS.items()
            },
        }
