"""How many experts tokens of different requests choose, against published choices.

The law (`touched_alike`) has one parameter a model. It is fitted here to the experts of
16 tokens, and judged by those of the other numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import pytest

from sim.costs.experts.routed import touched_alike, touched_experts

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Choices:
    """Mean numbers of different experts, by tokens of as many requests."""

    name: str
    num_experts: int
    experts_per_token: int
    touched: Mapping[int, float]
    correlation: tuple[float, float]
    """The bounds between which the parameter comes out."""

    def fitted(self) -> float:
        """Return the correlation at which 16 tokens choose as many, by halving."""
        low, high = 0.0, 0.9
        for _ in range(50):
            middle = 0.5 * (low + high)
            found = touched_alike(self.num_experts, self.experts_per_token, 16, middle)
            low, high = (middle, high) if found > self.touched[16] else (low, middle)
        return low


def of(*touched: float) -> Mapping[int, float]:
    """Return the numbers by 2, 4, 8, ... tokens."""
    return MappingProxyType({2 << i: number for i, number in enumerate(touched)})


CHOICES: Final = (
    Choices(
        "DeepSeek-V2-Lite, four tasks",
        *(64, 6, of(11.3, 20.2, 32.8, 46.9, 57.5, 62.5), (0.02, 0.04)),
    ),
    Choices(
        "DeepSeek-V2-Lite, one task",
        *(64, 6, of(11.0, 18.9, 29.6, 41.7, 52.1, 58.4), (0.06, 0.09)),
    ),
    Choices(
        "gpt-oss-20b, 703 topics",
        *(32, 4, of(7.2, 11.9, 17.5, 22.7, 26.4, 28.8), (0.09, 0.11)),
    ),
    Choices(
        "Qwen3-30B-A3B, layer 12, 64 decodes",
        *(128, 8, of(13.9, 22.0, 32.1, 42.9, 52.4), (0.20, 0.25)),
    ),
    Choices(
        "Qwen3-30B-A3B, layer 16, 1,024 tokens",
        128,
        8,
        of(13.2, 20.4, 28.7, 37.8, 46.3, 54.3, 61.9, 68.0),
        (0.26, 0.31),
    ),
    Choices("Mixtral-8x7B", 8, 2, of(3.46, 5.34, 7.05, 7.8), (0.01, 0.04)),
)
"""Means over the layers, counted in choices that were published token by token:
deepseek-ai/ESFT (results/expert_scores), GPT-OSS-MoE-ExpertFingerprinting (thinking),
stanford-ppl/step_artifact (dyn_tiling/expert_routing), all on GitHub; their addresses
are in ``sim/costs/README.md``."""


@pytest.mark.parametrize("choices", CHOICES, ids=lambda choices: choices.name)
def test_one_parameter_tells_all_numbers_of_tokens(choices: Choices) -> None:
    found = choices.fitted()
    low, high = choices.correlation
    assert low <= found <= high
    sizes = choices.num_experts, choices.experts_per_token
    for tokens, touched in choices.touched.items():
        assert touched_alike(*sizes, tokens, found) == pytest.approx(touched, rel=0.05)


@pytest.mark.parametrize("choices", CHOICES[:-1], ids=lambda choices: choices.name)
def test_a_free_choice_touches_more(choices: Choices) -> None:
    sizes = choices.num_experts, choices.experts_per_token
    assert touched_experts(*sizes, 16) > 1.05 * choices.touched[16]
