"""The router of vLLM's production stack: known prefixes only, whatever the load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cache.tokens import TokenRuns
from sim.fleet.routers.counting import RandomRouter

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    import numpy as np

    from sim.scheduler.request import Request

CHUNK_TOKENS: Final = 32
"""Of 128 characters, with 4 of them a token."""


class _Chunk:
    """A chunk of prompts, behind those that lead to it."""

    __slots__ = ("children", "places")

    def __init__(self) -> None:
        self.places: set[int] = set()
        self.children: dict[Hashable, _Chunk] = {}


class ProductionStackPrefix(RandomRouter):
    """Any of the engines that were sent the longest known prefix of the prompt.

    Where no chunk of the prompt is known, any engine at all. Nothing is forgotten, not
    even of an engine that comes back empty, and load is not looked at.

    Parameters
    ----------
    num_engines
        Places to choose from.
    stream
        Draws among them.

    Notes
    -----
    Source: production-stack main of August 2026, ``src/vllm_router/routers``:
    ``prefixaware`` with ``prefix_min_match_length`` 0.
    """

    def __init__(self, num_engines: int, stream: np.random.Generator) -> None:
        super().__init__(num_engines, stream)
        self._root = _Chunk()

    def candidates(self, request: Request) -> list[int]:
        """Return the places among which it draws, in order."""
        node, places = self._root, set(self.places)
        for chunk in _chunks(request):
            found = node.children.get(chunk)
            if found is None or not places & found.places:
                break
            node = found
            places &= found.places
        return sorted(places)

    def _pick(self, request: Request) -> int:
        places = self.candidates(request)
        place = places[self._draw(len(places))]
        node = self._root
        for chunk in _chunks(request):
            node = node.children.setdefault(chunk, _Chunk())
            node.places.add(place)
        return place


def _chunks(request: Request) -> Iterator[Hashable]:
    """Yield the identity of each chunk; the last one may be short."""
    prompt = request.tokens.prompt()
    for start in range(0, request.num_prompt_tokens, CHUNK_TOKENS):
        chunk = prompt[start : start + CHUNK_TOKENS]
        yield chunk.pieces if isinstance(chunk, TokenRuns) else tuple(chunk)
