"""A step costs a sum of counts times coefficients."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from sim.costs.checks import above_zero, at_least_zero
from sim.costs.parts import Count, FormulaCost, Line, Seconds, SteadyDecodes
from sim.costs.transfers import PerBlock, Swapping

if TYPE_CHECKING:
    from sim.costs.parts import Parts, Rest
    from sim.scheduler.batch import BatchShape

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


@dataclass(slots=True, eq=False)
class LinearCost(FormulaCost):
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

    base_s: float
    _: KW_ONLY
    decode_s: float = 0.0
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_context_token_s: float = 0.0
    prefill_context_token_s: float = 0.0
    prefill_attention_pair_s: float = 0.0
    swapped_block_s: float = 0.0
    copied_block_s: float = 0.0

    def __post_init__(self) -> None:
        self.base_s = above_zero("base_s", self.base_s)
        for key in [*_UNITS][1:]:
            setattr(self, key, at_least_zero(key, getattr(self, key)))

    def counted(
        self, num_decodes: Count, num_prefills: Count, num_prefill_tokens: Count
    ) -> tuple[Seconds, Seconds, Seconds, Seconds, None]:
        gemm_s = (
            self.decode_s * num_decodes
            + self.prefill_s * num_prefills
            + self.prefill_token_s * num_prefill_tokens
        )
        return gemm_s, 0.0, 0.0, self.base_s, None

    def prefill_attention_s(
        self,
        num_prefills: Count,
        num_tokens: Count,
        num_context_tokens: Count,
        num_pairs: Count,
    ) -> Seconds:
        del num_prefills, num_tokens
        return (
            self.prefill_context_token_s * num_context_tokens
            + self.prefill_attention_pair_s * num_pairs
        )

    def decode_attention_s(
        self, num_decodes: Count, num_context_tokens: Count, num_prefills: Count
    ) -> Seconds:
        del num_decodes, num_prefills
        return self.decode_context_token_s * num_context_tokens

    def steady_decodes(self, num_decodes: int) -> SteadyDecodes:
        return self.along(num_decodes, [Line(0, 0.0, self.decode_context_token_s)])

    def rest(self, shape: BatchShape, parts: Parts) -> Rest:
        del parts
        num_swapped = shape.num_swapped_in_blocks + shape.num_swapped_out_blocks
        copy_s = self.copied_block_s * shape.num_copied_blocks
        return self.swapped_block_s * num_swapped, copy_s, False, 0.0, 0.0

    def swapping(self) -> Swapping:
        """Return the times of moving blocks, the same both ways."""
        way = PerBlock(self.swapped_block_s)
        return Swapping(way, way, overlap=True)

    def describe(self) -> dict[str, Any]:
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
