"""The verdict of a plan in sentences: its fleet, by what margin, how surely."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from sim.results.metrics import quantity
from sim.results.summary.compared import short_value
from sim.studies.planning.answer.file import varied_settings
from sim.studies.planning.phases.outcome import cost_rank
from sim.studies.planning.spec import NO_PRICE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_NUM_ALTERNATIVES = 2
_CONFIDENT = 0.9
_HOST_KEYS = ("kv_offloading_size", "kv_offloading_link", "kv_offloading_backend")
_HARDLY = 1e-3
"""A search that finds no rate ends at a lower share than this."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a plan with one model, in sentences.

    Parameters
    ----------
    holds
        Whether any candidate serves the traffic within the objectives.
    answer
        The fleet to buy, or that none serves the traffic.
    one_engine
        How much one engine of it holds.
    margin
        How far the objectives are from their limits, a sentence each.
    binds
        The resource that keeps it from holding more.
    confidence
        How sure that is.
    alternatives
        Other fleets that serve the traffic, a sentence each, cheapest first.
    changes
        Changes that would move the answer, a sentence each.
    left_out
        Candidates that do not serve it, and why, a sentence each.
    command
        How to serve one engine.
    not_said
        Settings that the command does not carry.
    routers
        The worth of routers, a sentence each.
    host_memory
        The worth of host memory behind the pools, a sentence each.
    fleets
        Cost and service of fleets that the plan names, a sentence each.
    router
        How to start the router before several engines.
    """

    holds: bool
    answer: str
    one_engine: str = ""
    margin: tuple[str, ...] = ()
    binds: str = ""
    confidence: str = ""
    alternatives: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    command: str = ""
    not_said: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    host_memory: tuple[str, ...] = ()
    fleets: tuple[str, ...] = ()
    router: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def verdicts_of(plan: Mapping[str, Any]) -> dict[str, Verdict]:
    """Return the verdict of ``plan.json`` on each of its models."""
    models = dict.fromkeys(each["model"] for each in plan["candidates"])
    return {model: _verdict(plan, model) for model in models}


def verdict_of(plan: Mapping[str, Any]) -> Verdict:
    """Return the verdict of ``plan.json`` of a plan with one model."""
    (found,) = verdicts_of(plan).values()
    return found


def _verdict(plan: Mapping[str, Any], model: str) -> Verdict:
    target = plan["traffic"]["rate"]
    varied = varied_settings(plan)
    candidates: list[Mapping[str, Any]] = [
        {**each, "varied": varied[each["name"]]}
        for each in plan["candidates"]
        if each["model"] == model
    ]
    served = sorted(
        (each for each in candidates if each.get("replicas")),
        key=lambda each: cost_rank(
            each["cost_per_hour"], each["replicas"], each["rate"]["cost_low"], target
        ),
    )
    left_out = tuple(
        f"{_each(each)}{_with(each)}: {each['reason']}"
        for each in candidates
        if each["reason"]
    )
    rate = f"{target:,.4g} requests/s"
    if not served:
        return Verdict(False, _without_fleet(plan, candidates, rate), left_out=left_out)
    best = served[0]
    return Verdict(
        holds=True,
        answer=(
            f"Buy {_gpus(best)}, {_cost(plan, best)}: "
            f"{_fleet(best, best['replicas'])}{_with(best)} "
            f"{_serve(best['replicas'])} {rate} of "
            f"{best['model']} within the objectives{_behind(plan, best)}."
        ),
        one_engine=_one_engine(plan, best),
        margin=tuple(_margins(plan, best)),
        binds=_sentence(best["binding"]["sentence"]) if best["binding"] else "",
        confidence=_confidence(best),
        alternatives=tuple(_alternatives(plan, served)),
        changes=tuple(_changes(plan, served)),
        left_out=left_out,
        command=best["serve_command"],
        not_said=tuple(best["not_in_the_command"]),
        routers=tuple(_routers(plan, best)),
        host_memory=tuple(host_memory_sentences(plan, candidates)),
        fleets=tuple(_given_fleets(plan)),
        router=best.get("router_flags", ""),
    )


def _without_fleet(
    plan: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]], rate: str
) -> str:
    """Say that nothing serves the traffic, or that the plan was stopped too early."""
    if not plan.get("stopped_in"):
        left = sum(each.get("status") == "not_searched" for each in candidates)
        if left:
            return (
                f"No candidate that was searched serves {rate} within the objectives; "
                f"{left:,} {'was' if left == 1 else 'were'} not (search.shortlist)."
            )
        return f"No candidate serves {rate} within the objectives."
    most = max(
        (each for each in candidates if each.get("rate")),
        key=lambda each: each["rate"]["value"],
        default=None,
    )
    said = "The plan was stopped before it knew how many engines are needed"
    if most is None:
        return f"{said}."
    return (
        f"{said} for {rate}: one on {_each(most)}{_with(most)} holds "
        f"{most['rate']['value']:.3g} requests/s."
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _each(each: Mapping[str, Any]) -> str:
    number, gpu = each["tensor_parallel_size"], each["gpu"]
    return gpu if number == 1 else f"{number} x {gpu}"


def _with(each: Mapping[str, Any], but: Sequence[str] = ()) -> str:
    """Return the settings that tell a candidate from others, null ones left out."""
    told = ", ".join(
        f"{key} {short_value(value)}"
        for key, value in each["varied"].items()
        if value is not None and key.split(".")[0] not in but
    )
    return f" ({told})" if told else ""


def _engines(number: int) -> str:
    return "1 engine" if number == 1 else f"{number:,} engines"


def _fleet(each: Mapping[str, Any], number: int) -> str:
    ranks = each["tensor_parallel_size"]
    said = f"{_engines(number)} on {ranks} {each['gpu']}"
    return said + (" each" if number > 1 else "")


def _serve(number: int) -> str:
    return "serves" if number == 1 else "serve"


def _gpus(each: Mapping[str, Any]) -> str:
    number = each["replicas"] * each["tensor_parallel_size"]
    return f"{number:,} {each['gpu']}"


def _cost(
    plan: Mapping[str, Any], each: Mapping[str, Any], more_engines: int = 0
) -> str:
    number = each["replicas"] + more_engines
    cost = each["cost_per_hour"] * number / each["replicas"]
    if plan["prices"]["currency"] == NO_PRICE:
        return "1 GPU" if cost == 1 else f"{cost:,g} GPUs"
    return f"{cost:,.2f} {plan['prices']['currency']} an hour"


def _one_engine(plan: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    rate, target = best["rate"], plan["traffic"]["rate"]
    if rate["at_bound"]:
        return (
            f"One such engine was not searched beyond {quantity(rate['value'])} "
            "requests/s: what it holds at most takes longer traffic, or another end of "
            "search.rates."
        )
    said = "holds it" if best["replicas"] == 1 else "does not hold it"
    if best["replicas"] > 1 and rate["value"] >= target:
        said += " in every simulation"
    return (
        f"One such engine {said}: the most that it holds is {rate['value']:.3g} "
        f"requests/s ({rate['low']:.3g} to {rate['high']:.3g} from seed to seed; "
        f"{target:.3g} asked)."
    )


def _margins(plan: Mapping[str, Any], each: Mapping[str, Any]) -> Iterator[str]:
    fleet = _fleet_of(each, each["replicas"])
    for objective in plan["objectives"]:
        value = fleet["values"].get(objective["name"])
        if value is None:
            continue
        limit, found = objective["limit"], value["value"]
        side = "below" if found <= limit else "above"
        share = f"{abs(1 - found / limit):.0%}" if limit else ""
        yield (
            f"{objective['name']} is {quantity(found)}, {share} {side} "
            f"{quantity(limit)}."
        )


def _fleet_of(each: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    return next(f for f in each["fleets"] if f["replicas"] == number)


def _confidence(each: Mapping[str, Any]) -> str:
    fleet, rate = _fleet_of(each, each["replicas"]), each["rate"]
    few = "so few seeds" if rate["confidence"] < _CONFIDENT else "the seeds"
    told = (
        f"It held in {fleet['seeds_that_hold']} of {fleet['num_seeds']} simulations "
        f"of other traffic of the same kind; {few} give the interval above "
        f"a confidence of {rate['confidence']:.0%}."
    )
    steps = [text for text in each["extrapolated"] if text.startswith("step times")]
    wide = [text for text in each["extrapolated"] if text.startswith("KV blocks")]
    if wide:  # the reasons are those of kvsim capacity
        blocks = wide[0].split(": ")[1]
        told += (
            f" Its pool is taken to have {each['num_gpu_blocks']:,} KV blocks, and may "
            f"have {blocks} (kvsim capacity says why): with what an engine's log says, "
            "set engine.num_gpu_blocks_override."
        )
    return told + (f" {_sentence(steps[0])}" if steps else "")


def _alternatives(
    plan: Mapping[str, Any], served: list[Mapping[str, Any]]
) -> Iterator[str]:
    others = served[1 : 1 + _NUM_ALTERNATIVES]
    for each in others:
        dearer = each["cost_per_hour"] / served[0]["cost_per_hour"] - 1
        than = f"{dearer:.0%} dearer" if dearer else "at the same cost"
        yield (
            f"{_fleet(each, each['replicas'])}{_with(each)}: {_cost(plan, each)}, "
            f"{than}; "
            f"{_latencies(plan, each, each['replicas'])}"
        )
    best = served[0]
    if len(others) < _NUM_ALTERNATIVES and len(best["fleets"]) > 1:
        spare = best["fleets"][-1]["replicas"]
        if spare > best["replicas"]:
            cost = _cost(plan, best, spare - best["replicas"])
            yield (
                f"{_fleet(best, spare)}: {cost}, with one engine to spare; "
                f"{_latencies(plan, best, spare)}"
            )


def _latencies(plan: Mapping[str, Any], each: Mapping[str, Any], number: int) -> str:
    values = _fleet_of(each, number)["values"]
    names = [o["name"] for o in plan["objectives"] if o["name"] in values]
    return (
        ", ".join(f"{name} {quantity(values[name]['value'])}" for name in names) + "."
    )


def _changes(plan: Mapping[str, Any], served: list[Mapping[str, Any]]) -> Iterator[str]:
    best, target = served[0], plan["traffic"]["rate"]
    number, rate = best["replicas"], best["rate"]
    room = number * rate["value"] / target - 1
    if not rate["at_bound"]:
        yield (
            f"Traffic: about {room:.0%} more fits, by {_engines(number)} at "
            f"the most that one holds."
            if room >= 0.01
            else "Traffic: there is no room for more; more of it takes another engine."
        )
    if plan["cost_band"]:
        yield from _if_steps_are_off(plan, best, target)
    yield from _if_prices_differ(plan, served)


def _behind(plan: Mapping[str, Any], best: Mapping[str, Any]) -> str:
    """Name the router of the answer, and the one with which it costs least."""
    found = [each for each in best.get("routers") or [] if each["replicas"]]
    if not found or best["replicas"] == 1:
        return ""
    first = found[0]
    least = min(found, key=lambda each: float(each["fewest"]["cost_per_hour"]))
    said = f" behind {first['router']['kind']}"
    cost = least["fewest"]["cost_per_hour"]
    if cost == first["fewest"]["cost_per_hour"]:
        return said
    return (
        f"{said}; behind {least['router']['kind']} {_engines(least['replicas'])} "
        f"{'does' if least['replicas'] == 1 else 'do'}, for {cost:,.2f} "
        f"{plan['prices']['currency']} an hour"
    )


def _routers(plan: Mapping[str, Any], best: Mapping[str, Any]) -> Iterator[str]:
    """Say how many replicas each router needs, and the latency of as many behind it."""
    found = best.get("routers") or []
    if not found:
        if best["replicas"] == 1 and len(plan["replicas"]["routers"]) > 1:
            yield (
                "One engine serves the traffic, and a router has no choice: compare "
                "routers under more of it (workload, rate_scale)."
            )
        return
    first, latency = found[0], plan["pareto"]["latency"]
    for each in found:
        kind = each["router"]["kind"]
        if each["replicas"] is None:
            needs = "too many replicas are needed"
        else:
            needs = f"{each['replicas']} replicas do"
            if each["replicas"] == 1:
                needs = "1 replica does"
        if each is not first and each["replicas"] and first["replicas"]:
            saved = first["fewest"]["cost_per_hour"] - each["fewest"]["cost_per_hour"]
            currency = plan["prices"]["currency"]
            if saved:
                more = "less" if saved > 0 else "more"
                needs += f", {abs(saved):,.2f} {currency} an hour {more}"
        alike = (each["alike"] or {}).get("values", {}).get(latency)
        with_as_many = (
            f"; {best['replicas']} have {latency} {alike['value']:,.0f}"
            if alike
            else ""
        )
        yield f"Behind {kind} {needs}{with_as_many}."


def _given_fleets(plan: Mapping[str, Any]) -> Iterator[str]:
    """Tell the cost of fleets that the plan names, and whether they serve it."""
    fleets = plan.get("fleets") or []
    if not fleets:
        return
    latency, currency = plan["pareto"]["latency"], plan["prices"]["currency"]
    for each in sorted(
        fleets, key=lambda fleet: (not fleet.get("serves"), fleet["cost_per_hour"])
    ):
        cost = f"{each['cost_per_hour']:,.2f} {currency} an hour"
        if each["reason"]:
            yield f"{each['name']}, {cost}: {each['reason']}"
            continue
        seeds = f"{each['seeds_that_hold']} of {each['num_seeds']} seeds"
        does = f"serves the traffic in {seeds}"
        if not each["serves"]:
            does = f"does not serve the traffic (it holds in {seeds})"
        names = _missed(plan, each) or [latency]
        values = ((name, each["values"].get(name)) for name in names)
        said = "".join(f", {name} {v['value']:,.0f}" for name, v in values if v)
        yield f"{each['name']}, {cost}: {does}{said}."


def _missed(plan: Mapping[str, Any], fleet: Mapping[str, Any]) -> list[str]:
    """Return the limits of latencies that a fleet does not keep in the median."""
    limits = {e["name"]: e["limit"] for e in plan["objectives"] if "_ms" in e["name"]}
    found = fleet["values"].items()
    return [name for name, v in found if name in limits and v["value"] > limits[name]]


def _if_steps_are_off(
    plan: Mapping[str, Any], best: Mapping[str, Any], target: float
) -> Iterator[str]:
    band = (
        f"{plan['cost_band']:.0%} slower than predicted"
        if best["rate"]["cost_bounds"] == "cost_band"
        else "at the upper bound of the cost model"
    )
    if best["rate"]["cost_low"] <= _HARDLY * best["rate"]["value"]:
        yield f"Speed: if all steps are {band}, not even an idle engine does."
        return
    needed = ceil(target / best["rate"]["cost_low"] - 1e-9)
    more = needed - best["replicas"]
    if more <= 0:
        yield f"Speed: nothing changes if all steps are {band}."
        return
    cost = _cost(plan, best, more)
    yield f"Speed: if all steps are {band}, it takes {_fleet(best, needed)}: {cost}."


def _if_prices_differ(
    plan: Mapping[str, Any], served: list[Mapping[str, Any]]
) -> Iterator[str]:
    best = served[0]
    other = next((each for each in served[1:] if each["gpu"] != best["gpu"]), None)
    if other is None:
        return
    price = best["cost_per_hour"] / other["num_gpus"]
    now = plan["prices"]["per_gpu_hour"][other["gpu"]]
    yield (
        f"Prices: below {price:,.2f} {plan['prices']['currency']} an hour for "
        f"{other['gpu']} (now {now:,.2f}), "
        f"{_fleet(other, other['replicas'])}{_with(other)} would cost less."
    )


# -- host memory ---------------------------------------------------------------------


def host_memory_sentences(
    plan: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Say for each candidate with host memory how much it saves against one without.

    Parameters
    ----------
    plan
        As ``plan.json`` has it.
    candidates
        Those of one model.
    """
    without = {
        _without_host(each): each
        for each in candidates
        if not _host_gib(each) and "rate" in each
    }
    for each in candidates:
        base = without.get(_without_host(each))
        if _host_gib(each) and "rate" in each and base is not None:
            yield f"{_host(each)}{_with(each, _HOST_KEYS)} {_gain(plan, each, base)}."


def _host_gib(each: Mapping[str, Any]) -> float:
    return float(each.get("engine", {}).get("kv_offloading_size") or 0.0)


def _without_host(each: Mapping[str, Any]) -> str:
    """Return the settings that tell a candidate from others, host memory apart."""
    told = each.get("engine", {})
    engine = {key: value for key, value in told.items() if key not in _HOST_KEYS}
    return json.dumps(engine, sort_keys=True, default=str)


def _host(each: Mapping[str, Any]) -> str:
    rate = (each["engine"].get("kv_offloading_link") or {}).get("load_bytes_per_s")
    over = f" over {rate / 1e9:,.4g} GB/s" if rate else ""
    return f"{_host_gib(each):,.4g} GiB of host memory behind each engine{over}"


def _gain(
    plan: Mapping[str, Any], each: Mapping[str, Any], base: Mapping[str, Any]
) -> str:
    rates = (
        f"one engine holds {each['rate']['value']:.3g} requests/s, "
        f"{base['rate']['value']:.3g} without"
    )
    gpu = each["gpu"]
    if not (each.get("replicas") and base.get("replicas")):
        return f"changes no fleet that was found: {rates}"
    saved = base["num_gpus"] - each["num_gpus"]
    costs = base["cost_per_hour"] - each["cost_per_hour"]
    money = f"{abs(costs):,.2f} {plan['prices']['currency']} an hour"
    paid = f"costs {money} {'less' if costs > 0 else 'more'}" if costs else "is free"
    if saved > 0:
        return f"saves {saved:,} of {base['num_gpus']:,} {gpu}, and {paid}: {rates}"
    if saved < 0:
        return f"takes {-saved:,} {gpu} more, and {paid}: {rates}"
    return f"saves none of {base['num_gpus']:,} {gpu}, and {paid}: {rates}"
