"""Dynamo's KV router: the least blocks to compute and to hold."""

from __future__ import annotations

from collections import Counter
from math import exp
from typing import TYPE_CHECKING, Final

from sim.engine.clock import ARRIVAL_PRIORITY
from sim.engine.routers.block_index import prompt_hashes
from sim.engine.routers.counting import RandomRouter
from sim.errors import ConfigError
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from sim.engine.clock import Clock
    from sim.scheduler.request import Request

FORGOTTEN_AFTER_S: Final = 120.0
"""Without KV events, how long a prompt is believed to be cached where it was sent."""


class _Sent:
    """A request in flight, as the router counts it."""

    __slots__ = ("hashes", "num_new_tokens", "request")

    def __init__(
        self, request: Request, hashes: Sequence[int], num_new_tokens: int
    ) -> None:
        self.request = request
        self.hashes = hashes
        self.num_new_tokens = num_new_tokens


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

    Notes
    -----
    Source: Dynamo 1.6.1, ``lib/kv-router``. Requests do not wait in the router, as by
    default, and output blocks do not count.
    """

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
    ) -> None:
        super().__init__(num_engines, stream)
        self._stream = stream
        if router_temperature < 0:
            raise ConfigError(
                f"router_temperature: must be 0 or more, got {router_temperature}"
            )
        if use_kv_events and cached_blocks is None:
            raise ConfigError(
                "use_kv_events: engines of the v1 generation tell what they cache, and "
                "these are others; set it to false"
            )
        self._env = env
        self._block_size = block_size
        self._cached_blocks = cached_blocks
        self._use_kv_events = use_kv_events
        self._credit = overlap_score_credit
        self._scale = prefill_load_scale
        self._weight = decode_active_request_weight
        self._temperature = router_temperature
        self._blocks: list[Counter[int]] = [Counter() for _ in range(num_engines)]
        self._sent: list[dict[int, _Sent]] = [{} for _ in range(num_engines)]
        self._computing: list[dict[int, _Sent]] = [{} for _ in range(num_engines)]
        self._routed: list[dict[int, float]] = [{} for _ in range(num_engines)]

    def overlaps(self, request: Request, hashes: Sequence[int]) -> list[int]:
        """Return by place how many leading blocks are believed to be cached."""
        if self._use_kv_events and self._cached_blocks is not None:
            return self._cached_blocks(request)
        oldest_s = self._env.now - FORGOTTEN_AFTER_S
        found = []
        for routed in self._routed:
            known = (i for i, h in enumerate(hashes) if routed.get(h, -1.0) < oldest_s)
            found.append(next(known, len(hashes)))
        return found

    def cached_tokens(self, request: Request) -> list[int]:
        """Return the same in tokens."""
        hashes = prompt_hashes(request, self._block_size)
        return [each * self._block_size for each in self.overlaps(request, hashes)]

    def num_computing(self, place: int) -> int:
        """Return the tokens of prompts at an engine that are not computed."""
        computing, env = self._computing[place], self._env
        for number, sent in [*computing.items()]:
            first_token_s = sent.request.first_token_s  # known before, amid quiet steps
            if first_token_s < env.now or (
                first_token_s == env.now and env.turn > ARRIVAL_PRIORITY
            ):
                del computing[number]
        return sum(sent.num_new_tokens for sent in computing.values())

    def active_tokens(self, request: Request) -> float:
        """Return the tokens that are not computed where `request` would be sent."""
        hashes = prompt_hashes(request, self._block_size)
        costs = self.costs(request, hashes, self.overlaps(request, hashes))
        return float(self.num_computing(min(self.places, key=costs.__getitem__)))

    def costs(
        self, request: Request, hashes: Sequence[int], overlaps: Sequence[int]
    ) -> list[float]:
        """Return the cost of each engine, by place."""
        costs = []
        for place, overlap in enumerate(overlaps):
            num_tokens = self.num_computing(place) + request.num_prompt_tokens
            num_prefill = num_tokens / self._block_size - self._credit * overlap
            held = self._blocks[place]
            num_blocks = len(held) + sum(each not in held for each in hashes)
            costs.append(
                self._scale * max(num_prefill, 0.0)
                + num_blocks
                + self._weight * self.num_in_flight[place]
            )
        return costs

    def _pick(self, request: Request) -> int:
        hashes = prompt_hashes(request, self._block_size)
        overlaps = self.overlaps(request, hashes)
        place = self._drawn(self.costs(request, hashes, overlaps))
        num_new = request.num_prompt_tokens - overlaps[place] * self._block_size
        sent = _Sent(request, hashes, max(num_new, 0))
        number = request.request_id
        self._sent[place][number] = self._computing[place][number] = sent
        self._blocks[place].update(hashes)
        if not self._use_kv_events:
            self._routed[place].update(dict.fromkeys(hashes, self._env.now))
        return place

    def _drawn(self, costs: Sequence[float]) -> int:
        places, stream = self.places, self._stream
        own = [costs[place] for place in places]
        least, most = min(own), max(own)
        if not self._temperature or least == most:
            best = [p for p, cost in zip(places, own, strict=True) if cost == least]
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
        self._computing[place].pop(request.request_id, None)
        held = self._blocks[place]
        for each in sent.hashes:
            held[each] -= 1
            if not held[each]:
                del held[each]

    def _forget(self, place: int) -> None:
        self._blocks[place].clear()
        self._sent[place].clear()
        self._computing[place].clear()
        self._routed[place].clear()
