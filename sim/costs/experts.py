"""How many different experts the tokens of a step touch, in closed form."""

from __future__ import annotations

from math import sqrt
from typing import Any


def touched_experts(num_experts: Any, experts_per_token: Any, num_tokens: Any) -> Any:
    """Return the expected number of different experts that tokens choose.

    Each token takes `experts_per_token` different ones of `num_experts`, uniformly and
    independently of the others, so that one is missed by all with ``(1 - k/E)^n``.
    Real routers are skewed and touch fewer. Numbers or columns of them.
    """
    missed = (1.0 - experts_per_token / num_experts) ** num_tokens
    return num_experts * (1.0 - missed)


def touched_experts_spread(
    num_experts: int, experts_per_token: int, num_tokens: int
) -> float:
    """Return the standard deviation of that number.

    Two experts are both missed by a token with ``(1 - k/E) (1 - k/(E-1))``.
    """
    total, chosen = num_experts, experts_per_token
    one = 1.0 - chosen / total
    missed = one**num_tokens
    both = (
        (one * max(1.0 - chosen / (total - 1), 0.0)) ** num_tokens if total > 1 else 0.0
    )
    variance = total * missed * (1.0 - missed) + total * (total - 1) * (
        both - missed * missed
    )
    return sqrt(max(variance, 0.0))
