"""Several runs side by side in a sentence or two: what differs, and which is better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sim.results.differences import differing, short_names, short_value
from sim.results.verdict import quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_JUDGED: Final = (
    ("p95_ttft_ms", "p95 TTFT", "ms", False),
    ("p95_tpot_ms", "p95 TPOT", "ms", False),
    ("p95_e2el_ms", "p95 E2E", "ms", False),
    ("output_throughput", "output tokens/s", "", True),
)
"""Key of the summary, its words, its unit, and whether more is better."""
_ALIKE: Final = 0.01
"""Numbers within this share of each other are the same."""
_MOST_KEYS: Final = 3

Values = dict[str, list[float]]


def compared_lines(
    names: Sequence[str],
    configs: Sequence[Mapping[str, Any]],
    summaries: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    """Yield which of several runs is better, then in what their settings differ.

    Runs that keep their objectives are better than those that do not; among equals it
    takes latencies and throughput that are all at least as good.
    """
    verdicts = [each.get("verdict") for each in summaries]
    holds = [verdict is not None and bool(verdict["holds"]) for verdict in verdicts]
    places = list(range(len(names)))
    told = ""
    if any(verdicts) and len(set(holds)) > 1:
        places = [place for place in places if holds[place]]
        verb = "keeps its" if len(places) == 1 else "keep their"
        kept = _listed([names[place] for place in places])
        others = "the other does" if len(names) == len(places) + 1 else "the others do"
        told = f"{kept} {verb} objectives; {others} not."
    if len(places) > 1:
        told = f"{told} {_better(names, summaries, places)}".strip()
    yield told
    yield _differences(configs)


def _better(
    names: Sequence[str], summaries: Sequence[Mapping[str, Any]], places: Sequence[int]
) -> str:
    values = {
        key: [float(summaries[place][key]) for place in places]
        for key, *_ in _JUDGED
        if all(summaries[place].get(key) is not None for place in places)
    }
    best = {key: _best_places(key, values) for key in values}
    moved = [key for key in best if len(best[key]) < len(places)]
    if not moved:
        return "None is better: latencies at p95 and throughput are within 1 %."
    everywhere = set.intersection(*best.values())
    if everywhere:
        first = min(everywhere)
        told = "; ".join(_against(key, values[key], first) for key in moved)
        if len(everywhere) == 1:
            return f"{names[places[first]]} is better: {told}."
        both = _listed([names[places[place]] for place in sorted(everywhere)])
        return f"{both} are better: {told}."
    said = [
        f"{names[places[min(best[key])]]} has the {_side(key)} {_words(key)}"
        f" ({_against_numbers(key, values[key], min(best[key]))})"
        for key in moved
    ]
    return f"None is better in all: {'; '.join(said)}."


def _best_places(key: str, values: Values) -> set[int]:
    """Return the places whose number is as good as the best, within 1 %."""
    numbers = values[key]
    if _is_more_better(key):
        top = max(numbers)
        return {i for i, number in enumerate(numbers) if number >= top * (1 - _ALIKE)}
    least = min(numbers)
    return {i for i, number in enumerate(numbers) if number <= least * (1 + _ALIKE)}


def _is_more_better(key: str) -> bool:
    return next(more for name, _, _, more in _JUDGED if name == key)


def _words(key: str) -> str:
    return next(words for name, words, _, _ in _JUDGED if name == key)


def _side(key: str) -> str:
    return "most" if _is_more_better(key) else "least"


def _against(key: str, numbers: Sequence[float], first: int) -> str:
    return f"{_words(key)} {_against_numbers(key, numbers, first)}"


def _against_numbers(key: str, numbers: Sequence[float], first: int) -> str:
    """Return a number, its unit, and the others from next best to worst."""
    unit = next(unit for name, _, unit, _ in _JUDGED if name == key)
    others = sorted([*numbers[:first], *numbers[first + 1 :]])
    if _is_more_better(key):
        others.reverse()
    told = f"{quantity(numbers[first])} {unit}".strip()
    return f"{told} against {_listed([quantity(each) for each in others])}"


def _differences(configs: Sequence[Mapping[str, Any]]) -> str:
    found = differing(configs)
    if not found:
        return "Their configurations are the same."
    names = short_names(list(found))
    if len(found) > _MOST_KEYS:
        return f"They differ in {len(found)} settings: {_listed(list(names.values()))}."
    said = (
        f"{names[key]} ({', '.join(short_value(value) for value in values)})"
        for key, values in found.items()
    )
    return f"They differ in {_listed(list(said))}."


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
