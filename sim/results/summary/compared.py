"""Several runs side by side: settings that differ, and the better run in a sentence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sim.results.metrics import quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class _Number(NamedTuple):
    words: str
    unit: str
    is_more_better: bool = False


_JUDGED: Final = {
    "p95_ttft_ms": _Number("p95 TTFT", "ms"),
    "p95_tpot_ms": _Number("p95 TPOT", "ms"),
    "p95_e2el_ms": _Number("p95 E2E", "ms"),
    "output_throughput": _Number("output tokens/s", "", is_more_better=True),
}
"""Numbers of a summary by which runs are judged, by key."""
_ALIKE: Final = 0.01
"""Numbers within this share of each other are the same."""
_MOST_KEYS: Final = 3

Values = dict[str, list[float]]


def compared_lines(
    names: Sequence[str],
    configs: Sequence[Mapping[str, Any]],
    summaries: Sequence[Mapping[str, Any]],
) -> Iterator[str]:
    """Yield a sentence on the better of several runs, and one on their settings.

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
        for key in _JUDGED
        if all(summaries[place].get(key) is not None for place in places)
    }
    best = {key: _best_places(key, values) for key in values}
    moved = [key for key in best if len(best[key]) < len(places)]
    if not moved:
        return "None is better: latencies at p95 and throughput are within 1 %."
    everywhere = set.intersection(*best.values())
    if everywhere:
        told = "; ".join(
            f"{_JUDGED[key].words} "
            + _against_numbers(key, values[key], best[key], everywhere)
            for key in moved
        )
        better = _listed([names[places[place]] for place in sorted(everywhere)])
        return f"{better} {'is' if len(everywhere) == 1 else 'are'} better: {told}."
    said = [
        f"{_listed([names[places[place]] for place in sorted(best[key])])}"
        f" {'has' if len(best[key]) == 1 else 'have'} the "
        f"{'most' if _JUDGED[key].is_more_better else 'least'} {_JUDGED[key].words}"
        f" ({_against_numbers(key, values[key], best[key])})"
        for key in moved
    ]
    return f"None is better in all: {'; '.join(said)}."


def _best_places(key: str, values: Values) -> set[int]:
    """Return the places whose number is as good as the best, within 1 %."""
    numbers = values[key]
    if _JUDGED[key].is_more_better:
        top = max(numbers)
        return {i for i, number in enumerate(numbers) if number >= top * (1 - _ALIKE)}
    least = min(numbers)
    return {i for i, number in enumerate(numbers) if number <= least * (1 + _ALIKE)}


def _against_numbers(
    key: str, numbers: Sequence[float], best: set[int], told: set[int] | None = None
) -> str:
    """Return numbers with their unit, those as good, and the others to the worst.

    Parameters
    ----------
    best
        Places of the numbers that are as good as the best one.
    told
        Of these, those whose names stand before the numbers; None: all.
    """
    told = best if told is None else told
    said = f"{_quantities(numbers, sorted(told))} {_JUDGED[key].unit}".strip()
    if best > told:
        said += f" (within 1 %: {_quantities(numbers, sorted(best - told))})"
    others = sorted(
        set(range(len(numbers))) - best,
        key=lambda place: numbers[place],
        reverse=_JUDGED[key].is_more_better,
    )
    return f"{said} against {_quantities(numbers, others)}"


def _quantities(numbers: Sequence[float], places: Sequence[int]) -> str:
    return _listed(list(dict.fromkeys(quantity(numbers[place]) for place in places)))


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


# -- settings ------------------------------------------------------------------------

_MISSING = object()


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return plain data with dotted keys: one entry for every value that is no table.

    Tables that have names, as pools, stand under these.

    Examples
    --------
    >>> flat({"engine": {"gpu": "h200_sxm", "watermark": None}, "seed": 0})
    {'engine.gpu': 'h200_sxm', 'engine.watermark': None, 'seed': 0}
    >>> flat({"pools": [{"name": "old", "replicas": 2}, {"name": "new"}]})
    {'pools.old.name': 'old', 'pools.old.replicas': 2, 'pools.new.name': 'new'}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, list) and value and all(map(_name_of, value)):
            found |= flat({_name_of(each): each for each in value}, f"{prefix}{key}.")
        elif isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _name_of(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys in which configurations differ, and the value of each of them.

    Keys are dotted, in the order in which they first come; None where one has none.
    """
    tables = [flat(config) for config in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    found = {key: [table.get(key, _MISSING) for table in tables] for key in keys}
    return {
        key: [None if value is _MISSING else value for value in values]
        for key, values in found.items()
        if len({_text(value) for value in values}) > 1
    }


def _text(value: Any) -> str:
    return "" if value is _MISSING else json.dumps(value, sort_keys=True, default=str)


def short_value(value: Any) -> str:
    """Return a value in few words: of a table its kind and keys, of a path the file.

    Of a pool its name and replicas; what is null or an empty table is left out.

    Examples
    --------
    >>> short_value({"kind": "/home/me/my.py:InTurn", "most_times": 2})
    'my.py:InTurn most_times=2'
    >>> short_value("/home/me/my.py:InTurn"), short_value("lru"), short_value(None)
    ('my.py:InTurn', 'lru', 'null')
    >>> pool = {"name": "decode", "replicas": 6, "role": "decode", "engine": {}}
    >>> short_value([{"name": "prefill", "replicas": 2, "role": "prefill"}, pool])
    '2 prefill, 6 decode'
    """
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return ", ".join(short_value(each) for each in value)
    if isinstance(value, dict):
        head, said = [], {"kind"}
        if "kind" in value:
            head.append(short_value(value["kind"]))
        if "name" in value and "replicas" in value:
            head.append(f"{value['replicas']} {value['name']}")
            said |= {"name", "replicas"}
            if value.get("role") in ("serve", value["name"]):
                said.add("role")
        told = {k: v for k, v in value.items() if k not in said}
        rest = (
            f"{k}={short_value(v)}"
            for k, v in told.items()
            if v is not None and v != {}
        )
        return " ".join([*head, *rest])
    if isinstance(value, str):
        return value.rpartition("/")[2] if ".py:" in value else value
    return json.dumps(value, default=str)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ends of dotted keys that tell them apart.

    Examples
    --------
    >>> short_names(["engine.gpu", "workload.a.name", "workload.b.name"])
    {'engine.gpu': 'gpu', 'workload.a.name': 'a.name', 'workload.b.name': 'b.name'}
    >>> short_names(["fleet.router.kind", "fleet.pools.0.replicas"])
    {'fleet.router.kind': 'router.kind', 'fleet.pools.0.replicas': 'replicas'}
    """
    return {key: _short(key, keys) for key in keys}


_OF_WHAT = frozenset({"kind", "name", "path"})
"""Keys that say nothing without their table."""


def _short(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    for num in range(1 + (parts[-1] in _OF_WHAT), len(parts)):
        if parts[-num].isdigit():
            continue
        end = ".".join(parts[-num:])
        if sum(f".{other}".endswith(f".{end}") for other in keys) == 1:
            return end
    return key
