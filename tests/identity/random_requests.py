"""Random requests that share prompts in every way that a cache can notice."""

from __future__ import annotations

from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

Request = dict[str, Any]
Prompt = list[list[int]]

_MOST_OUTPUT_TOKENS = 2500
"""Of a whole case, so that it takes milliseconds."""


def draw_requests(rng: Random, block_size: int, step_s: float) -> list[Request]:
    """Return requests for `tests.identity.listed_trace.ListedTrace`.

    Parameters
    ----------
    rng
        Decides all.
    block_size
        Prompts are cut at its multiples more often than chance would.
    step_s
        About the length of a step; arrivals are drawn on its scale.
    """
    longest_output = rng.choice([1, 3, 12, 40, 40, 120, 400])
    most = min(150, 2 * _MOST_OUTPUT_TOKENS // (longest_output + 1))
    num_requests = rng.randint(min(12, most), most)
    arrivals = _arrivals(rng, num_requests, step_s)
    style = rng.choice(
        [_own, _stems, _stems, _mosaic, _same, _chat, _chat, _echo, _echo]
    )
    lengths = _Lengths(rng, block_size)
    requests: list[Request] = []
    for index, arrival_s in enumerate(arrivals):
        requests.append(
            {
                "at": arrival_s,
                "prompt": style(rng, lengths, requests),
                "out": rng.randint(1, longest_output),
                "seg": 2 * index + 1,
            }
        )
    if rng.random() < 0.1:
        _answer_alike(rng, requests)
    if rng.random() < 0.2:
        _limit(rng, requests)
    if rng.random() < 0.2:
        _chain(rng, requests)
    return requests


class _Lengths:
    """Lengths on the scale of a block, often at its edge."""

    def __init__(self, rng: Random, block_size: int) -> None:
        self.rng = rng
        self.block_size = block_size
        self.most_blocks = rng.choice([1, 3, 8, 8, 20]) if block_size < 32 else 4
        self.fixed = self.draw()

    def draw(self) -> int:
        rng, block_size = self.rng, self.block_size
        if rng.random() < 0.4:
            edge = block_size * rng.randint(1, self.most_blocks)
            return max(1, edge + rng.choice([-1, 0, 0, 0, 1]))
        return rng.randint(1, self.most_blocks * block_size)


def _own_segment(requests: list[Request]) -> int:
    """Return a segment id of prompts that nobody else has."""
    return 2 * (100 + len(requests))


def _own(rng: Random, lengths: _Lengths, requests: list[Request]) -> Prompt:
    """Nothing shared."""
    del rng
    return [[_own_segment(requests), lengths.draw()]]


def _stems(rng: Random, lengths: _Lengths, requests: list[Request]) -> Prompt:
    """Beginnings of few streams, each cut anywhere, some with a tail of their own."""
    prompt = [[2 * rng.randrange(3), lengths.draw()]]
    if rng.random() < 0.5:
        prompt.append([_own_segment(requests), lengths.draw()])
    return prompt


def _mosaic(rng: Random, lengths: _Lengths, requests: list[Request]) -> Prompt:
    """Few segments put together, with lengths that rarely meet blocks."""
    del requests
    cuts = [1, 2, 3, lengths.block_size, lengths.block_size + 1, lengths.fixed, 0]
    prompt = [[0, rng.choice([1, lengths.block_size])]]
    return prompt + [
        [2 * rng.randrange(3), rng.choice(cuts)] for _ in range(rng.randint(1, 7))
    ]


def _same(rng: Random, lengths: _Lengths, requests: list[Request]) -> Prompt:
    """One prompt for all, block-aligned as often as not, rarely with a tail."""
    if not requests and rng.random() < 0.5:
        lengths.fixed = lengths.block_size * rng.randint(1, lengths.most_blocks)
    prompt = [[0, lengths.fixed]]
    if rng.random() < 0.1:
        prompt.append([_own_segment(requests), lengths.draw()])
    return prompt


def _chat(rng: Random, lengths: _Lengths, requests: list[Request]) -> Prompt:
    """Follow-ups that quote an answer, maybe unfinished or cut, and new talks."""
    stem = [[0, lengths.fixed]] if lengths.fixed % 2 else []
    if not requests or rng.random() < 0.3:
        return [*stem, [_own_segment(requests), lengths.draw()]]
    parent = requests[-rng.randint(1, min(len(requests), 8))]
    if len(parent["prompt"]) > 9:
        return [*stem, [_own_segment(requests), lengths.draw()]]
    out = parent["out"]
    quoted = rng.choice([out, out, out, max(1, out - 1), out + 1, rng.randint(1, out)])
    prompt = [*parent["prompt"], [parent["seg"], quoted]]
    if rng.random() < 0.8:
        prompt.append([_own_segment(requests), lengths.draw()])
    return [list(each) for each in prompt]


def _echo(rng: Random, lengths: _Lengths, requests: list[Request]) -> Prompt:
    """Quotes at length of the few latest answers, which mostly are still written.

    Whoever waits for room may find more of its prompt with every block of an answer.
    """
    quotable = [each for each in requests[-6:] if len(each["prompt"]) < 4]
    if not quotable or rng.random() < 0.3:
        return [[_own_segment(requests), lengths.draw()]]
    parent = rng.choice(quotable)
    prompt = [*parent["prompt"], [parent["seg"], max(1, parent["out"] - 1)]]
    if rng.random() < 0.5:
        prompt.append([_own_segment(requests), lengths.draw()])
    return [list(each) for each in prompt]


def _answer_alike(rng: Random, requests: list[Request]) -> None:
    """Let few answers exist, so that two runs of a prompt fill equal blocks."""
    for request in requests:
        request["seg"] = 2 * rng.randrange(2) + 1


def _limit(rng: Random, requests: list[Request]) -> None:
    """Let some clients ask for less than the model would say."""
    for request in requests:
        if rng.random() < 0.5:
            request["max_tokens"] = rng.randint(1, request["out"] + 2)


def _chain(rng: Random, requests: list[Request]) -> None:
    """Let some wait for the end of one before, and then as long as they came apart."""
    share = rng.choice([0.2, 0.6, 0.9])
    for index, request in enumerate(requests):
        if index and rng.random() < share:
            previous = rng.randrange(max(0, index - 8), index)
            request["previous_id"] = previous
            request["delay_s"] = request["at"] - requests[previous]["at"]


# -- arrivals ---------------------------------------------------------------------


def _arrivals(rng: Random, num_requests: int, step_s: float) -> list[float]:
    draw: Callable[[Random, int, float], list[float]] = rng.choice(
        [_at_once, _bursts, _poisson, _poisson, _poisson, _grid, _sums]
    )
    return draw(rng, num_requests, step_s)


def _gap_s(rng: Random, step_s: float) -> float:
    return step_s * rng.choice([0.1, 0.5, 1.0, 2.0, 4.0, 10.0, 40.0])


def _at_once(rng: Random, num_requests: int, step_s: float) -> list[float]:
    del rng, step_s
    return [0.0] * num_requests


def _bursts(rng: Random, num_requests: int, step_s: float) -> list[float]:
    size, gap_s = rng.randint(2, 30), 5 * _gap_s(rng, step_s)
    return [index // size * gap_s for index in range(num_requests)]


def _poisson(rng: Random, num_requests: int, step_s: float) -> list[float]:
    rate = 1 / _gap_s(rng, step_s)
    return list(accumulate(rng.expovariate(rate) for _ in range(num_requests)))


def _grid(rng: Random, num_requests: int, step_s: float) -> list[float]:
    """Whole multiples of a step."""
    most = rng.choice([1, 3, 10, 30])
    steps = accumulate(rng.randint(0, most) for _ in range(num_requests))
    return [step * step_s for step in steps]


def _sums(rng: Random, num_requests: int, step_s: float) -> list[float]:
    """Ends of steps as the clock adds them up, to the last bit, while it is busy."""
    most = rng.choice([1, 3, 10])
    steps = list(accumulate(rng.randint(0, most) for _ in range(num_requests)))
    steps = [step - steps[0] for step in steps]
    ends = list(accumulate(repeat(step_s, steps[-1]), initial=0.0))
    return [ends[step] for step in steps]
