"""The highest rate that holds: a guess, a bracket, and halving led by the slope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf, log, sqrt
from typing import TYPE_CHECKING

import numpy as np

from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape
from sim.simulation.assemble import make_capacity, make_cost_model
from workloads.requests.columns import RequestColumns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.tables import RunConfig
    from sim.costs.base import CostModel
    from sim.hardware.capacity import CapacityEstimate
    from sim.results.summary.objectives import Objective
    from workloads.spec import RequestSpec

Margin = Callable[[float], float]
"""From a rate to how far it misses the objectives: at most 0 where it holds, see
`sim.results.summary.objectives.Objective.margin`."""

_NEAR = 1.1
"""Ends of a bracket so close that a line between their margins can be trusted."""
_REACH = 2.5
"""Tolerances that a line is followed beyond a rate that was tried: slopes are known to
a third, so that this is off by less than a tolerance."""
_MOST_LED = 2
"""Rates in a row that a slope may choose before steps are taken."""
LEVEL = 0.3
"""Margins within this follow a slope; farther below a limit they may be flat."""
_FAR = 1.25
"""Farther than this, as a factor, a slope leads nowhere."""
_ROUNDING = 1e-9
"""Of logarithms of rates, and far below any tolerance."""
_EDGE = 0.1
"""The slope may choose a point within the middle of a bracket, 80 % of it."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """Where the objectives stop to hold, for one seed."""

    rate: float
    """A bound if the search ended there."""
    tried: tuple[tuple[float, float], ...]
    """Rates and margins in the order in which they were tried."""
    at_bound: str = ""
    """``low`` if not even the lowest rate holds, ``high`` if the highest does."""
    slope: float | None = None
    """Of the margin over the logarithm of the rate, there; None if it is a cliff."""


@dataclass(slots=True)
class _Bracket:
    """A rate that holds and a higher one that does not, each with its margin."""

    holds: float = 0.0
    below: float = -inf
    misses: float = inf
    above: float = inf

    def take(self, rate: float, margin: float) -> None:
        if margin <= 0:
            self.holds, self.below = rate, margin
        else:
            self.misses, self.above = rate, margin

    @property
    def ratio(self) -> float:
        return self.misses / self.holds if self.holds else inf

    def is_closed(self, tolerance: float) -> bool:
        """Return whether the crossing is known to within `tolerance`, as a share."""
        if self.ratio <= 1 + tolerance:
            return True
        if self.ratio > _NEAR or not self.has_slope:
            return False
        width, below = log(self.ratio), log(self.crossing() / self.holds)
        # `next_inside` goes half a tolerance beyond the crossing, but for rounding.
        return min(below, width - below) <= _REACH * log(1 + tolerance) + _ROUNDING

    @property
    def has_slope(self) -> bool:
        """Whether both margins are numbers to draw a line through."""
        return -inf < self.below and self.above < inf

    @property
    def slope(self) -> float | None:
        """Of the line between both margins, where it can be trusted."""
        if not self.has_slope or self.ratio > _NEAR:
            return None
        return (self.above - self.below) / log(self.ratio)

    def crossing(self) -> float:
        """Return where a line through both margins is 0; the middle without slopes."""
        share = -self.below / (self.above - self.below) if self.has_slope else 0.5
        return self.holds * exp(share * log(self.misses / self.holds))

    def next_inside(self, tolerance: float) -> float:
        """Return a rate just beyond the crossing, so that the bracket closes there."""
        width = log(self.ratio)
        share = log(self.crossing() / self.holds) / width
        nudge = log(1 + tolerance) / 2 / width
        share += nudge if share < 0.5 else -nudge
        return self.holds * exp(width * min(max(share, _EDGE), 1 - _EDGE))


def find_threshold(
    margin: Margin,
    guess: float,
    *,
    step: float = 1.25,
    tolerance: float = 0.01,
    bounds: tuple[float, float] = (0.0, inf),
    slope: float | None = None,
) -> Threshold:
    """Return the rate at which `margin` crosses 0, if it rises with the rate.

    Rates are tried outwards from `guess`, each step the square of the one before,
    until one holds and one does not. The bracket is then cut where a line through both
    margins meets 0, and in half wherever that left more than half of it. The result may
    be off by the share `tolerance`: the ends of the bracket are so close, or a line
    through the margins of ends within 10 % meets 0 close to one of them.

    A `slope` that is known, of the same engine under other traffic, say, leads from the
    first margin to where the crossing should be, and ends the search that is near it.

    Where the margin falls somewhere, as queues make it do now and then, the result is
    one of several crossings.
    """
    bracket, tried = _Bracket(), list[tuple[float, float]]()
    low, high = bounds
    rate, num_led = min(max(guess, low), high), 0
    while True:
        found = margin(rate)
        tried.append((rate, found))
        before = bracket.ratio
        bracket.take(rate, found)
        if bracket.ratio < inf:
            if bracket.is_closed(tolerance):
                at = bracket.crossing()
                return Threshold(at, tuple(tried), slope=bracket.slope or slope)
            shrank = bracket.ratio <= sqrt(before)
            middle = bracket.holds * sqrt(bracket.ratio)
            rate = bracket.next_inside(tolerance) if shrank else middle
            continue
        if rate == (high if found <= 0 else low):
            at_bound = "high" if found <= 0 else "low"
            return Threshold(rate, tuple(tried), at_bound, slope)
        led = _led(rate, found, slope)
        is_near = led is not None and (
            low < led < high
            and abs(found) <= LEVEL
            and abs(log(led / rate)) <= _REACH * log(1 + tolerance)
        )
        if led is not None and is_near:
            return Threshold(led, tuple(tried), slope=slope)
        if led is None or num_led == _MOST_LED:
            led = rate * step if found <= 0 else rate / step
            step *= step
        else:
            num_led += 1
        rate = min(max(led, low), high)


def _led(rate: float, margin: float, slope: float | None) -> float | None:
    """Return where a line of this slope meets a margin of 0, if that is not far."""
    if slope is None or not -inf < margin < inf:
        return None
    shift = -margin / slope
    return rate * exp(shift) if abs(shift) <= log(_FAR) else None


_STEADY_SHARE = 0.7
"""Bursts keep a real engine below the rate of a steady stream."""


def guessed_rate(
    config: RunConfig,
    specs: Sequence[RequestSpec],
    objectives: Sequence[Objective],
) -> float:
    """Return the rate at which mean requests would saturate an engine, less 30 %.

    Data-parallel ranks share it evenly.

    With B running requests of P prompt and O output tokens, each step computes B
    decodes and B / O prompts. B is the most that cache, ``max_num_seqs`` and the token
    budget hold, and that keeps a step within the objectives on TPOT and ITL.
    """
    model, gpu = load_model(config.engine.model), load_gpu(config.engine.gpu)
    capacity = make_capacity(config.engine, model, gpu)
    cost_model = make_cost_model(config, model, gpu)
    prompt, output = _mean_lengths(specs)
    most = _most_running(capacity, prompt, output)
    longest_s = min(
        (each.limit / 1e3 for each in objectives if each.of in ("tpot", "itl")),
        default=float("inf"),
    )
    low, high = 1.0, most
    for _ in range(20):  # the largest batch whose steps are short enough
        middle = (low + high) / 2
        if _step_s(cost_model, middle, prompt, output) <= longest_s:
            low = middle
        else:
            high = middle
    rate = _STEADY_SHARE * low / (output * _step_s(cost_model, low, prompt, output))
    return rate * config.engine.data_parallel_size


def _mean_lengths(specs: Sequence[RequestSpec]) -> tuple[float, float]:
    if isinstance(specs, RequestColumns):
        prompts, outputs = specs.num_prompt_tokens, specs.num_output_tokens
    else:
        prompts = np.array([spec.num_prompt_tokens for spec in specs])
        outputs = np.array([spec.num_output_tokens for spec in specs])
    return float(prompts.mean()), float(outputs.mean())


def _most_running(capacity: CapacityEstimate, prompt: float, output: float) -> float:
    by_cache = capacity.kv_cache_tokens / (prompt + output / 2)
    by_budget = capacity.max_num_batched_tokens / (1 + prompt / output)
    return max(1.0, min(by_cache, by_budget, capacity.max_num_seqs))


def _step_s(
    cost_model: CostModel, num_running: float, prompt: float, output: float
) -> float:
    """Return the seconds of a step; prompts come in whole, on average."""
    prompts = num_running / output
    decodes = max(1, round(num_running))
    chunks, tokens = round(prompts + 0.5), round(prompts * prompt)
    shape = BatchShape(
        num_decodes=decodes,
        num_decode_context_tokens=round(decodes * (prompt + output / 2)),
        num_prefills=chunks if tokens else 0,
        num_prefill_tokens=tokens,
        num_prefill_context_tokens=tokens,
        num_prefill_attention_pairs=round(tokens * prompt / 2),
    )
    return cost_model.step(shape).total_s
