"""llm-d's router: a weighted sum of queue, KV cache and prefix scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.errors import ConfigError
from sim.fleet.balancer import Load
from sim.fleet.checks import at_least
from sim.fleet.routers.block_index import BlockIndex, Run, prompt_runs
from sim.fleet.routers.counting import RandomRouter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from sim.scheduler.request import Request

SCRAPE_INTERVAL_S: Final = 0.05
"""Between two reads of an engine's metrics. Source: `MinRefreshMetricsInterval`."""
LEAST_BLOCK_TOKENS: Final = 64
MOST_HASHED_TOKENS: Final = 131_072


class LlmD(RandomRouter):
    """The engine with the best sum of scores, any of equals.

    Each score lies between 0 and 1:

    - queue: 1 for the shortest queue of waiting requests, 0 for the longest; 1 for all
      where they are equal;
    - KV cache: the share that is free;
    - prefix: the share of the prompt's blocks that the engine was sent before or, if
      `precise`, that its KV events say it has.

    Parameters
    ----------
    num_engines
        Places to choose from.
    stream
        Draws among equals.
    num_gpu_blocks
        By place, blocks of an engine's pool: so many of the index's, which are larger,
        are remembered of it.
    block_size
        Of the engines; blocks of the index have at least `LEAST_BLOCK_TOKENS` tokens.
    cached_blocks
        Returns by place how many leading blocks of a prompt an engine has, as its KV
        events say, which take no time here; None of engines that tell nothing.
    precise
        Whether these are heard; otherwise prompts count as cached where they were sent.
    block_tokens
        Of a block of the index; by default those of the engines, but
        `LEAST_BLOCK_TOKENS` at least.
    max_prefix_blocks
        Leading blocks of a prompt that are looked at; by default those of
        `MOST_HASHED_TOKENS`.
    lru_capacity
        Blocks that are remembered of an engine, by default as many as it has blocks.
    queue_weight, kv_cache_weight, prefix_weight
        Of the scores.

    Raises
    ------
    ConfigError
        If engines do not tell what they cache, and are to be heard; or if a size is
        below 1, or a weight below 0.

    Attributes
    ----------
    interval_s
        Between two calls of `hear`, which tell what was scraped.
    hears_kv_events, knows_metrics_only
        Whether it is `precise`: engines may not run ahead of what it looks at. If not,
        it looks at nothing between two scrapes.

    Notes
    -----
    Source: llm-d-router of August 2026, ``pkg/epp/config/loader/defaults.go`` and its
    scorers: ``approx-prefix-cache-producer`` and ``precise-prefix-cache-producer``,
    the latter without speculative entries.
    """

    interval_s = SCRAPE_INTERVAL_S

    def __init__(
        self,
        num_engines: int,
        stream: np.random.Generator,
        *,
        num_gpu_blocks: Sequence[int],
        block_size: int,
        cached_blocks: Callable[[Request], list[int]] | None = None,
        precise: bool = False,
        block_tokens: int | None = None,
        max_prefix_blocks: int | None = None,
        lru_capacity: int | None = None,
        queue_weight: float = 2.0,
        kv_cache_weight: float = 2.0,
        prefix_weight: float = 3.0,
    ) -> None:
        super().__init__(num_engines, stream)
        at_least(
            0,
            queue_weight=queue_weight,
            kv_cache_weight=kv_cache_weight,
            prefix_weight=prefix_weight,
        )
        at_least(
            1,
            block_tokens=block_tokens,
            max_prefix_blocks=max_prefix_blocks,
            lru_capacity=lru_capacity,
        )
        self.queue_weight = queue_weight
        self.kv_cache_weight = kv_cache_weight
        self.prefix_weight = prefix_weight
        if precise and cached_blocks is None:
            raise ConfigError(
                "precise: engines of the v1 generation tell what they cache, and these "
                "are others; set it to false"
            )
        self.hears_kv_events = precise
        self.knows_metrics_only = not precise
        self._cached_blocks = cached_blocks if precise else None
        self._block_size = block_size
        self.block_tokens = block_tokens or max(block_size, LEAST_BLOCK_TOKENS)
        most = max_prefix_blocks or MOST_HASHED_TOKENS // self.block_tokens
        self._most_tokens = most * self.block_tokens
        capacities = [lru_capacity or each for each in num_gpu_blocks]
        self.index = BlockIndex(capacities)
        self.hear([Load(0, 0, 0.0)] * num_engines)

    def hear(self, loads: Sequence[Load]) -> None:
        """Take the metrics of all engines, as they are at this moment."""
        self._loads = loads
        queues = [loads[place].num_waiting for place in self.places]
        longest, shortest = max(queues), min(queues)
        # Loads do not change until they are told again.
        self._without_prefix = [
            self.queue_weight
            * (
                (longest - load.num_waiting) / (longest - shortest)
                if longest > shortest
                else 1.0
            )
            + self.kv_cache_weight * (1.0 - load.kv_cache_usage)
            for load in loads
        ]
        self._best_without_prefix: list[int] | None = None

    def set_ready(self, places: Sequence[int]) -> None:
        super().set_ready(places)
        self.hear(self._loads)

    def _forget(self, place: int) -> None:
        self.index.forget(place)

    def cached_tokens(self, request: Request) -> list[int]:
        """Return by place how many leading tokens it is believed to have."""
        matched = self.num_matched(request, self._runs(request))
        return [each * self.block_tokens for each in matched]

    def num_matched(self, request: Request, runs: Sequence[Run]) -> list[int]:
        """Return by place how many of a prompt's blocks it is believed to have."""
        if self._cached_blocks is None:
            return self.index.num_matched(runs)
        size, most = self._block_size, self._num_blocks(request)
        cached = self._cached_blocks(request)
        return [min(each * size // self.block_tokens, most) for each in cached]

    def _runs(self, request: Request) -> list[Run]:
        """Return the blocks that are looked up in the index, if that is asked."""
        if self._cached_blocks is not None:
            return []
        return prompt_runs(request, self.block_tokens, self._most_tokens)

    def _num_blocks(self, request: Request) -> int:
        num_tokens = min(request.num_prompt_tokens, self._most_tokens)
        return num_tokens // self.block_tokens

    def scores(self, request: Request, runs: Sequence[Run]) -> list[float]:
        """Return by place the sum for a prompt of these runs."""
        matched = self.num_matched(request, runs)
        if not any(matched):
            return self._without_prefix
        num_blocks = self._num_blocks(request)
        return [
            score + self.prefix_weight * (own / num_blocks)
            for score, own in zip(self._without_prefix, matched, strict=True)
        ]

    def _pick(self, request: Request) -> int:
        runs = self._runs(request)
        scores = self.scores(request, runs)
        if scores is not self._without_prefix:
            places = self._best(scores)
        else:
            if self._best_without_prefix is None:
                self._best_without_prefix = self._best(scores)
            places = self._best_without_prefix
        place = places[self._draw(len(places))]
        self.index.add(runs, place)
        return place

    def _best(self, scores: Sequence[float]) -> list[int]:
        """Return the places with the highest score."""
        best = max(scores[place] for place in self.places)
        return [place for place in self.places if scores[place] == best]
