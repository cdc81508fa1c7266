"""llm-d's router: a weighted sum of queue, KV cache and prefix scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.engine.balancer import Load
from sim.engine.routers.block_index import BlockIndex, prompt_hashes
from sim.engine.routers.counting import RandomRouter

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    - prefix: the share of the prompt's blocks that the engine was sent before.

    Parameters
    ----------
    num_engines
        Places to choose from.
    stream
        Draws among equals.
    num_gpu_blocks
        By place, blocks of an engine's pool: so many hashes are remembered of it, each
        of a larger block.
    block_size
        Of the engines; blocks of the index have at least `LEAST_BLOCK_TOKENS` tokens.
    queue_weight, kv_cache_weight, prefix_weight
        Of the scores.

    Attributes
    ----------
    interval_s
        Between two calls of `hear`, which tell what was scraped.

    Notes
    -----
    Source: llm-d-router of August 2026, ``pkg/epp/config/loader/defaults.go`` and its
    scorers; prefixes by routed prompts, without KV events.
    """

    interval_s = SCRAPE_INTERVAL_S

    def __init__(
        self,
        num_engines: int,
        stream: np.random.Generator,
        *,
        num_gpu_blocks: Sequence[int],
        block_size: int,
        queue_weight: float = 2.0,
        kv_cache_weight: float = 2.0,
        prefix_weight: float = 3.0,
    ) -> None:
        super().__init__(num_engines, stream)
        self.queue_weight = queue_weight
        self.kv_cache_weight = kv_cache_weight
        self.prefix_weight = prefix_weight
        self.block_tokens = max(block_size, LEAST_BLOCK_TOKENS)
        self.index = BlockIndex(num_gpu_blocks)
        self.hear([Load(0, 0, 0.0)] * num_engines)

    def hear(self, loads: Sequence[Load]) -> None:
        """Take the metrics of all engines, as they are at this moment."""
        self._loads = loads
        queues = [loads[place].num_waiting for place in self.places]
        longest, shortest = max(queues), min(queues)
        # What is told does not change until it is told again.
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
        """Return by place how many leading tokens it was sent before."""
        hashes = prompt_hashes(request, self.block_tokens, MOST_HASHED_TOKENS)
        return [num * self.block_tokens for num in self.index.num_matched(hashes)]

    def scores(self, hashes: Sequence[int]) -> list[float]:
        """Return by place the sum for a prompt with these block hashes."""
        matched = self.index.num_matched(hashes)
        if not any(matched):
            return self._without_prefix
        return [
            score + self.prefix_weight * (own / len(hashes))
            for score, own in zip(self._without_prefix, matched, strict=True)
        ]

    def _pick(self, request: Request) -> int:
        hashes = prompt_hashes(request, self.block_tokens, MOST_HASHED_TOKENS)
        scores = self.scores(hashes)
        if scores is not self._without_prefix:
            places = self._best(scores)
        else:
            if self._best_without_prefix is None:
                self._best_without_prefix = self._best(scores)
            places = self._best_without_prefix
        place = places[self._draw(len(places))]
        self.index.add(hashes, place)
        return place

    def _best(self, scores: Sequence[float]) -> list[int]:
        """Return the places with the highest score."""
        best = max(scores[place] for place in self.places)
        return [place for place in self.places if scores[place] == best]
