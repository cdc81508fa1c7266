"""Advice in sentences: the same on a terminal and on a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.results.metrics import quantity

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


_MOST_SAID = 10.0
"""A rise beyond that, elevenfold, is not put into figures."""


def advice_lines(advice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the best remedies, the answer first; `advice` is of ``advice.json``."""
    name, number = advice["objective"], advice["num_seeds"]
    best = advice["best"]
    if best:
        needs = f" ({best[0]['needs']})" if best[0]["needs"] else ""
        yield f"What helps most: {best[0]['name']}{needs}."
    else:
        yield f"Nothing that was tried helps {name}."
    held = f"the objectives hold in {advice['seeds_that_hold']} of {number} seeds"
    promised = held if advice["is_promised"] else "the run promises nothing"
    value = quantity(advice["value"])
    yield f"As it is, {name} is {value} on average and {promised}; {advice['binds']}."


def best_rows(advice: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the remedies that help most: name, effect, and options of the server."""
    for place, each in enumerate(advice["best"], 1):
        needs = f" ({each['needs']})" if each["needs"] else ""
        none = "" if each["needs"] else "vllm serve has no option for it"
        flags = f"vllm serve {each['flags']}" if each["flags"] else none
        yield f"{place}. {each['name']}{needs}", _effect(advice, each), flags


def _effect(advice: Mapping[str, Any], each: Mapping[str, Any]) -> str:
    held = ""
    if advice["is_promised"]:
        held = f"; holds in {each['seeds_that_hold']} of {advice['num_seeds']} seeds"
    others = "".join(
        f"; {name} {change:+.0%}"
        for name, change in (each["others"] or {}).items()
        if abs(change) >= 0.01
    )
    return f"{_change(advice, each)}{others}{held}"


def _change(advice: Mapping[str, Any], each: Mapping[str, Any]) -> str:
    value = "" if each["value"] is None else f" to {quantity(each['value'])}"
    return f"{advice['objective']} {each['change']:+.1%} ({_span(each)}){value}"


def _span(each: Mapping[str, Any]) -> str:
    """Return an interval in words; of few seeds it may hardly have a bound."""
    high = f"{each['high']:+.1%}" if each["high"] < _MOST_SAID else "any factor"
    return f"{each['low']:+.1%} to {high}"


def tried_lines(advice: Mapping[str, Any]) -> Iterator[str]:
    """Yield the other remedies that were tried, and their effects."""
    best = [each["name"] for each in advice["best"]]
    for each in advice["tried"]:
        if each["name"] in best:
            continue
        needs = f" ({each['needs']})" if each["needs"] else ""
        if each["verdict"] == "cannot run":
            yield f"{each['name']}{needs}: cannot run: {each['reason']}"
        elif each["verdict"] in ("no effect", "unclear"):
            span = _span(each)
            more = "; more --seeds tell" * (each["verdict"] == "unclear")
            yield f"{each['name']}{needs}: {each['verdict']} ({span}{more})"
        else:
            yield f"{each['name']}{needs}: {each['verdict']}, {_change(advice, each)}"
