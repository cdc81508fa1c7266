"""Which steps of a long schedule are executed: some of each kind, over all of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from calibrate.replay.log import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def shares(counts: Mapping[str, int], most: int) -> dict[str, int]:
    """Return how many steps of each kind are taken, at most `most` together.

    Every kind gets the same; what a rare kind leaves goes to the others, so that
    swaps, one step in thousands, are not lost among decodes.
    """
    taken: dict[str, int] = {}
    left = most
    kinds = sorted(counts, key=lambda kind: (counts[kind], KINDS.index(kind)))
    for place, kind in enumerate(kinds):
        taken[kind] = min(counts[kind], left // (len(kinds) - place))
        left -= taken[kind]
    return taken


def chosen(kinds: Sequence[str], most: int | None) -> list[int]:
    """Return the places of the steps that are executed, ascending.

    Parameters
    ----------
    kinds
        Of all steps, in order.
    most
        How many; None for all. Those of a kind are evenly spaced in its own order.
    """
    counts = Counter(kinds)
    if most is None or most >= len(kinds):
        return list(range(len(kinds)))
    taken = shares(counts, most)
    seen: Counter[str] = Counter()
    places = []
    for place, kind in enumerate(kinds):
        number, share = seen[kind], taken[kind]
        seen[kind] += 1
        # the next of `share` equal stretches begins here
        if (number + 1) * share // counts[kind] > number * share // counts[kind]:
            places.append(place)
    return places
