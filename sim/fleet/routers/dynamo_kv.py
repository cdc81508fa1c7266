"""Dynamo's KV router: the least blocks to compute and to hold."""

from __future__ import annotations

from bisect import insort
from functools import partial
from math import exp
from typing import TYPE_CHECKING, Final

from cache.errors import require
from sim.engine.clock import step_priority
from sim.errors import ConfigError
from sim.fleet.checks import at_least
from sim.fleet.routers.block_index import prompt_runs
from sim.fleet.routers.counting import RandomRouter
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np

    from sim.engine.clock import Clock
    from sim.fleet.routers.block_index import Run
    from sim.scheduler.request import Request

FORGOTTEN_AFTER_S: Final = 120.0
"""Without KV events, how long a prompt is believed to be cached where it was sent."""


class _Sent:
    """A request in flight, as the router counts it."""

    __slots__ = ("num_new_tokens", "request", "runs")

    def __init__(
        self, request: Request, runs: Sequence[Run], num_new_tokens: int
    ) -> None:
        self.request = request
        self.runs = runs
        self.num_new_tokens = num_new_tokens


class HeldBlocks:
    """Distinct blocks of the prompts in flight at an engine.

    Each prompt has the first so many blocks of a run, so that the longest has all::

        run a: 3, 12, 40 blocks of three prompts     run b: 7, 7 of two

    Attributes
    ----------
    num_blocks
        Blocks that some prompt has.
    """

    def __init__(self) -> None:
        self.num_blocks = 0
        self._lengths: dict[int, list[int]] = {}  # by run, ascending

    def num_shared(self, runs: Sequence[Run]) -> int:
        """Return how many blocks of a prompt are held: its first ones."""
        num_shared = 0
        for key, num_blocks in runs:
            lengths = self._lengths.get(key)
            if lengths is None:
                break
            if lengths[-1] < num_blocks:
                return num_shared + lengths[-1]
            num_shared += num_blocks
        return num_shared

    def add(self, runs: Sequence[Run]) -> None:
        """Count a prompt in."""
        for key, num_blocks in runs:
            lengths = self._lengths.get(key)
            if lengths is None:
                self._lengths[key] = [num_blocks]
                self.num_blocks += num_blocks
            else:
                self.num_blocks += max(num_blocks - lengths[-1], 0)
                insort(lengths, num_blocks)

    def remove(self, runs: Sequence[Run]) -> None:
        """Count a prompt out that was counted in."""
        for key, num_blocks in runs:
            lengths = self._lengths[key]
            self.num_blocks -= lengths[-1]
            lengths.remove(num_blocks)
            if lengths:
                self.num_blocks += lengths[-1]
            else:
                del self._lengths[key]

    def clear(self) -> None:
        """Count all prompts out."""
        self._lengths.clear()
        self.num_blocks = 0

    def check(self) -> None:
        """Prove that lengths are in order, and blocks are counted right.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        for lengths in self._lengths.values():
            require(
                lengths and lengths == sorted(lengths) and lengths[0] > 0,
                "held blocks: lengths of a run are out of order",
            )
        num_blocks = sum(lengths[-1] for lengths in self._lengths.values())
        require(num_blocks == self.num_blocks, "held blocks: miscounted")


class RoutedBlocks:
    """When an engine was sent which blocks last: the first so many of each run.

    What was sent later stands first, before what is longer and older.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, float]]] = {}

    def num_since(self, runs: Iterable[Run], oldest_s: float) -> int:
        """Return how many leading blocks were sent then or later."""
        num_found = 0
        for key, num_blocks in runs:
            young = [n for n, at_s in self._parts.get(key, ()) if at_s >= oldest_s]
            if not young:
                break
            if young[-1] < num_blocks:
                return num_found + young[-1]
            num_found += num_blocks
        return num_found

    def add(self, runs: Iterable[Run], now_s: float) -> None:
        """Take note of a prompt."""
        for key, num_blocks in runs:
            longer = [each for each in self._parts.get(key, ()) if each[0] > num_blocks]
            self._parts[key] = [(num_blocks, now_s), *longer]

    def clear(self) -> None:
        """Forget all."""
        self._parts.clear()


class DynamoKv(RandomRouter):
    """The engine with the least cost, any of equals.

    The cost of an engine, in blocks, is ::

        prefill_load_scale x max(0, (tokens of prompts in flight there that are not
                 computed + tokens of this prompt) / block_size - overlap)
        + distinct full blocks of the prompts in flight there and of this one
        + decode_active_request_weight x requests in flight there

    where `overlap` is `overlap_score_credit` for each leading block that is cached. A
    prompt in flight counts as computed from its first token on.

    Parameters
    ----------
    env
        The clock.
    num_engines
        Places to choose from.
    stream
        Draws among equals.
    block_size
        Of the engines.
    cached_blocks
        Returns by place how many leading blocks of a prompt an engine has, as its KV
        events say, which take no time here; None of engines that tell nothing.
    use_kv_events
        Whether these are heard; otherwise prompts count as cached where they were sent
        for `FORGOTTEN_AFTER_S`.
    overlap_score_credit, prefill_load_scale, decode_active_request_weight
        See above. Dynamo's decode pools have a credit of 0.
    router_temperature
        Above 0 an engine is drawn: with the exponential of its cost over the range of
        costs, by the temperature.
    turn_of
        Returns by place when the steps of an engine end among what happens at one
        instant. A pair's decoder is chosen when the step of its prefiller ends.

    Attributes
    ----------
    looks_at_arrivals_only
        It asks engines and the clock when a request comes, and at no other time.

    Notes
    -----
    Source: Dynamo 1.6.1, ``lib/kv-router``. Requests do not wait in the router, as by
    default, and output blocks do not count.
    """

    looks_at_arrivals_only = True

    def __init__(
        self,
        env: Clock,
        num_engines: int,
        stream: np.random.Generator,
        block_size: int,
        cached_blocks: Callable[[Request], list[int]] | None,
        *,
        use_kv_events: bool = True,
        overlap_score_credit: float = 1.0,
        prefill_load_scale: float = 1.0,
        decode_active_request_weight: float = 0.0,
        router_temperature: float = 0.0,
        turn_of: Callable[[int], float] = step_priority,
    ) -> None:
        super().__init__(num_engines, stream)
        self._stream = stream
        at_least(
            0,
            router_temperature=router_temperature,
            overlap_score_credit=overlap_score_credit,
            prefill_load_scale=prefill_load_scale,
            decode_active_request_weight=decode_active_request_weight,
        )
        if use_kv_events and cached_blocks is None:
            raise ConfigError(
                "use_kv_events: engines of the v1 generation tell what they cache, and "
                "these are others; set it to false"
            )
        self._env, self._turn_of = env, turn_of
        self._block_size = block_size
        self._cached_blocks = cached_blocks
        self._use_kv_events = use_kv_events
        self._credit = overlap_score_credit
        self._scale = prefill_load_scale
        self._weight = decode_active_request_weight
        self._temperature = router_temperature
        self._blocks = [HeldBlocks() for _ in range(num_engines)]
        self._sent: list[dict[int, _Sent]] = [{} for _ in range(num_engines)]
        self._computing: list[dict[int, _Sent]] = [{} for _ in range(num_engines)]
        self._num_computing = [0] * num_engines
        # Their first token is there, or will be at a time that is known.
        self._computed: list[list[Request]] = [[] for _ in range(num_engines)]
        self._routed = [RoutedBlocks() for _ in range(num_engines)]
        self._on_first = [partial(self._first, place) for place in range(num_engines)]

    def overlaps(self, request: Request, runs: Sequence[Run]) -> list[int]:
        """Return by place how many leading blocks are believed to be cached."""
        if self._use_kv_events and self._cached_blocks is not None:
            return self._cached_blocks(request)
        oldest_s = self._env.now - FORGOTTEN_AFTER_S
        return [routed.num_since(runs, oldest_s) for routed in self._routed]

    def cached_tokens(self, request: Request) -> list[int]:
        """Return the same in tokens."""
        runs = prompt_runs(request, self._block_size)
        return [each * self._block_size for each in self.overlaps(request, runs)]

    def _first(self, place: int, request: Request) -> None:
        self._computed[place].append(request)

    def num_computing(self, place: int) -> int:
        """Return the tokens of prompts at an engine that are not computed."""
        if self._computed[place]:
            now_s, env = self._env.now, self._env
            later = []
            for request in self._computed[place]:
                first_token_s = request.first_token_s
                if first_token_s < now_s or (
                    first_token_s == now_s and env.turn >= self._turn_of(place)
                ):
                    self._let_go(place, request)
                else:  # known before, amid quiet steps
                    later.append(request)
            self._computed[place] = later
        return self._num_computing[place]

    def _let_go(self, place: int, request: Request) -> None:
        """Count the prompt of a request as computed."""
        sent = self._computing[place].get(request.request_id)
        if sent is not None and sent.request is request:
            del self._computing[place][request.request_id]
            self._num_computing[place] -= sent.num_new_tokens

    def active_tokens(self, request: Request) -> float:
        """Return the tokens that are not computed where `request` would be sent."""
        runs = prompt_runs(request, self._block_size)
        costs = self.costs(request, runs, self.overlaps(request, runs))
        return float(self.num_computing(min(self.places, key=costs.__getitem__)))

    def costs(
        self, request: Request, runs: Sequence[Run], overlaps: Sequence[int]
    ) -> list[float]:
        """Return the cost of each engine, by place."""
        costs = []
        num_prompt_tokens, size = request.num_prompt_tokens, self._block_size
        num_prompt_blocks = num_prompt_tokens // size
        for place, overlap in enumerate(overlaps):
            num_tokens = self.num_computing(place) + num_prompt_tokens
            num_prefill = num_tokens / size - self._credit * overlap
            held = self._blocks[place]
            num_blocks = held.num_blocks + num_prompt_blocks - held.num_shared(runs)
            costs.append(
                self._scale * max(num_prefill, 0.0)
                + num_blocks
                + self._weight * self.num_in_flight[place]
            )
        return costs

    def _pick(self, request: Request) -> int:
        runs = prompt_runs(request, self._block_size)
        overlaps = self.overlaps(request, runs)
        place = self._drawn(self.costs(request, runs, overlaps))
        num_new = request.num_prompt_tokens - overlaps[place] * self._block_size
        sent = _Sent(request, runs, max(num_new, 0))
        number = request.request_id
        self._sent[place][number] = self._computing[place][number] = sent
        self._num_computing[place] += sent.num_new_tokens
        request.on_first_token = self._on_first[place]
        self._blocks[place].add(runs)
        if not self._use_kv_events:
            self._routed[place].add(runs, self._env.now)
        return place

    def _drawn(self, costs: Sequence[float]) -> int:
        places, stream = self.places, self._stream
        own = [costs[place] for place in places]
        least, most = min(own), max(own)
        best = [p for p, cost in zip(places, own, strict=True) if cost == least]
        if not self._temperature:
            return best[self._draw(len(best))]
        if least == most:
            return best[int(stream.integers(len(best)))]
        scale = self._temperature * (most - least)
        weights = [exp((least - cost) / scale) for cost in own]
        whole = added(weights)
        return int(stream.choice(places, p=[each / whole for each in weights]))

    def ended(self, request: Request, place: int) -> None:
        super().ended(request, place)
        sent = self._sent[place].pop(request.request_id, None)
        if sent is None:
            return  # the engine was gone in between
        self._let_go(place, sent.request)
        self._blocks[place].remove(sent.runs)

    def _forget(self, place: int) -> None:
        self._blocks[place].clear()
        self._sent[place].clear()
        self._computing[place].clear()
        self._computed[place].clear()
        self._num_computing[place] = 0
        self._routed[place].clear()
