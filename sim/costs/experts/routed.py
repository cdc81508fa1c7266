"""How many different experts the tokens of a step touch, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, lgamma, sqrt
from typing import Any, Final

_LARGEST: Final = {2: 0.564, 4: 1.029, 8: 1.424, 16: 1.766, 32: 2.070, 64: 2.344}
"""Deviations by which the largest of so many normal numbers lies above their mean."""
_NINE_OF_TEN: Final = 1.645
"""Standard deviations on either side of the mean that hold nine of ten."""
_FREE: Final = 1e-6
"""A correlation below which tokens are taken to choose freely: the closed form of
correlated ones cancels there."""
CORRELATION: Final = (
    "tokens of different requests choose freely; published choices correlate by 0.02 "
    "to 0.12: deepseek-ai/ESFT, GPT-OSS-MoE-ExpertFingerprinting, "
    "stanford-ppl/step_artifact, gajsanders/moe-trace"
)
CORRELATION_INTERVAL: Final = (0.0, 0.29)
"""Its end: a step of Qwen3-30B-A3B whose requests are all of one data set."""


def touched_experts(num_experts: Any, experts_per_token: Any, num_tokens: Any) -> Any:
    """Return the expected number of different experts that tokens choose freely.

    Each token takes `experts_per_token` different ones of `num_experts`, uniformly and
    independently of the others, so that one is missed by all with ``(1 - k/E)^n``.
    Numbers or columns of them.
    """
    missed = (1.0 - experts_per_token / num_experts) ** num_tokens
    return num_experts * (1.0 - missed)


def touched_alike(
    num_experts: int, experts_per_token: int, num_tokens: int, correlation: float
) -> float:
    """Return the same where routers prefer some experts.

    An expert is chosen by a share of the tokens that differs from one to another as a
    beta law has it, with a mean of ``k/E`` and the spread that makes the choices of two
    tokens correlate so much: they share ``k (k/E + (1 - k/E) correlation)`` experts. No
    correlation is a free choice, and one token takes k whatever it is.
    """
    if correlation < _FREE or experts_per_token >= num_experts:
        return float(touched_experts(num_experts, experts_per_token, num_tokens))
    whole = 1.0 / correlation - 1.0
    other = whole * (1.0 - experts_per_token / num_experts)
    missed = lgamma(other + num_tokens) - lgamma(other)
    missed += lgamma(whole) - lgamma(whole + num_tokens)
    return num_experts * (1.0 - exp(missed))


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


def busiest_rank(
    num_experts: int,
    experts_per_token: int,
    num_tokens: int,
    num_ranks: int,
    correlation: float = 0.0,
) -> tuple[float, float]:
    """Return the experts and the rows of the rank that has most to do.

    Ranks divide the experts, and all wait for the last. What a rank has of both is
    close to normal, so that the largest of several lies so many deviations above the
    mean; ranks are taken for independent, and for equally preferred: a correlation
    counts for the experts that are touched, not for how they lie on the ranks.
    """
    own, share = num_experts / num_ranks, 1.0 / num_ranks
    above = max((d for ranks, d in _LARGEST.items() if ranks <= num_ranks), default=0.0)
    touched = touched_alike(num_experts, experts_per_token, num_tokens, correlation)
    touched /= num_ranks
    missed = (1.0 - experts_per_token / num_experts) ** num_tokens
    spread = sqrt(own * missed * (1.0 - missed))
    rest = (num_experts - experts_per_token) / max(num_experts - 1, 1)
    rows = experts_per_token * num_tokens * share
    rows_spread = sqrt(max(rows * (1.0 - share) * rest, 0.0))
    return min(touched + above * spread, own), rows + above * rows_spread


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Seconds of the routed experts of all layers on the GPU with most to do."""

    num_experts: int
    experts_per_token: int
    num_ranks: int = 1
    """GPUs that divide the experts, of all data-parallel ranks."""
    are_whole: bool = False
    """Whether a GPU holds some of them whole, not a part of each."""
    expert_s: float = 0.0
    """To read one of them, as much of it as a GPU holds."""
    token_memory_s: float = 0.0
    token_compute_s: float = 0.0
    """For a token with all that it chooses, were they on one GPU."""
    start_s: float = 0.0
    """To start and drain the kernels of all layers, beyond those of dense MLPs."""
    correlation: float = 0.0
    """Of the choices of two tokens; see `touched_alike`."""

    def seconds(self, num_tokens: int) -> float:
        """Return seconds for so many tokens, of all data-parallel ranks."""
        if not num_tokens:
            return 0.0
        total, chosen = self.num_experts, self.experts_per_token
        alike = self.correlation
        if self.are_whole and self.num_ranks > 1:
            touched, rows = busiest_rank(
                total, chosen, num_tokens, self.num_ranks, alike
            )
            return self.seconds_of(touched, rows / chosen)
        if alike:
            touched = touched_alike(total, chosen, num_tokens, alike)
        else:
            # most steps are of a free choice: a call less
            touched = touched_experts(total, chosen, num_tokens)
        return self.seconds_of(touched, num_tokens)

    def seconds_of(self, touched: float, num_tokens: float) -> float:
        """Return seconds for so many tokens that choose so many different experts."""
        memory_s = self.expert_s * touched + self.token_memory_s * num_tokens
        compute_s = self.token_compute_s * num_tokens
        return self.start_s + sqrt(memory_s * memory_s + compute_s * compute_s)

    def spread_s(self, num_tokens: int, num_layers: int) -> float:
        """Return by how much the choice of tokens moves nine steps of ten, in seconds.

        Layers choose independently: the spread of their sum grows with the root of
        their number.
        """
        spread = touched_experts_spread(
            self.num_experts, self.experts_per_token, num_tokens
        )
        return _NINE_OF_TEN * spread * self.expert_s / sqrt(num_layers)
