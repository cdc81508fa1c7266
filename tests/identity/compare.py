"""One configuration by our scheduler and by the oracle, and what differs (invariant 8).

No tolerance: floats are compared bit by bit, NaN with NaN, types with types.
"""

from __future__ import annotations

import math
import re
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import yaml

from cache.v1.runs.group_tables import GroupRunTables
from sim.config.tables import RunConfig, parse_config
from sim.engine.clock import ARRIVAL_PRIORITY, At
from sim.scheduler.v1 import holdings
from sim.simulation.run import Simulation
from tests.identity.trail import Trail
from tests.oracles.v1_groups import StepwiseTables
from tests.shared import ROOT

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pandas as pd
    import simpy


Build = Callable[[RunConfig], Simulation]
"""Puts a run together."""

ORACLE = f"{ROOT / 'tests' / 'oracles' / 'v1.py'}:V1Scheduler"
TABLES = ("steps", "preemptions", "requests")
OF_ONE: dict[str, Any] = {"pools": [{"name": "main", "replicas": 1}]}
NOT_COMPARED = frozenset({"path", "path_reason", "title"})
"""Keys of the summary that name the scheduler and its path."""


@dataclass(frozen=True, slots=True)
class Run:
    """One path's run.

    Parameters
    ----------
    path, path_reason
        What the simulation says of itself.
    tables
        Steps, preemptions and requests; empty where the run ended in an error.
    summary
        The same.
    error
        That error in words, else empty.
    trail
        What it did to the cache; None where it could not be built.
    """

    path: str
    path_reason: str
    tables: dict[str, pd.DataFrame]
    summary: dict[str, Any]
    error: str
    trail: Trail | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs of one configuration.

    Parameters
    ----------
    chosen
        As the simulation takes it by itself.
    reference
        By the oracle.
    differences
        The first one of each table, in words; empty where all is equal.
    is_counted
        Whether ours was run once more with blocks that are only counted.
    """

    chosen: Run
    reference: Run
    differences: list[str]
    is_counted: bool = False


class Look(NamedTuple):
    """How closely a run is watched."""

    every_steps: int = 0
    """Compare queues, tables and the free queue after each so many steps; 0 for at the
    end only, which leaves the fast path as free as it can be."""
    told: bool = False
    """Compare the blocks that move, too."""
    aborts: tuple[tuple[float, int], ...] = ()
    """When clients withdraw which requests."""


ONLY_THE_END = Look()


def of_one_group(config: RunConfig) -> Simulation:
    """Return a run by the oracle, which knows one group of layers.

    It knows no steps in flight: these are compared with a run that is stepwise.
    """
    if config.engine.schedules_ahead:
        return Simulation(config, stepwise=True)
    return Simulation(by_the_oracle(config))


def of_groups(config: RunConfig) -> Simulation:
    """Return a run whose decodes are looked at one by one, of any groups of layers."""
    with (
        patch.object(holdings, "BlockTables", StepwiseTables),
        patch.object(GroupRunTables, "serves", return_value=False),
    ):
        return Simulation(config, stepwise=True)


def one_by_one(config: RunConfig) -> Simulation:
    """Return a run that looks at its decodes one by one."""
    return Simulation(config, stepwise=True)


def of_one_engine(config: RunConfig) -> Simulation:
    """Return a run of a fleet of one engine; `run` compares what engines have, too."""
    data = config.model_dump(exclude_unset=True)
    return Simulation(parse_config(data | {"fleet": OF_ONE}))


def compare(
    config: RunConfig, look: Look = ONLY_THE_END, reference: Build = of_one_group
) -> Comparison:
    """Run a configuration on both paths.

    Parameters
    ----------
    config
        What to simulate.
    look
        How closely.
    reference
        Puts together what it is compared with.
    """
    theirs = run(config, look, reference)
    chosen = run(config, look, Simulation)
    differences = list(_differences(chosen, theirs))
    is_counted = chosen.trail is not None and chosen.trail.keeps_ids
    if is_counted:
        counted = run(config, look, Simulation, looks_at_ids=False)
        differences += [f"counted, {line}" for line in _differences(counted, theirs)]
    return Comparison(chosen, theirs, differences, is_counted)


def assert_equal_paths(
    config: RunConfig, look: Look = ONLY_THE_END, reference: Build = of_one_group
) -> Comparison:
    """Fail, with a configuration that shows it again, unless both paths are equal."""
    compared = compare(config, look, reference)
    assert not compared.differences, report(config, look, compared)
    return compared


def run(
    config: RunConfig, look: Look, build: Build, *, looks_at_ids: bool = True
) -> Run:
    """Run a configuration on one path; whatever it raises is part of the outcome.

    Without a look at ids of blocks only these are not compared: it may count them.
    """
    try:
        simulation = build(config)
    except Exception as error:
        return Run("none", "", {}, {}, _in_words(error), None)
    trail = None
    has_fleet = simulation.config.fleet is not None
    if looks_at_ids and not has_fleet:
        trail = Trail(simulation, look.every_steps, told=look.told)
    elif look.every_steps and not has_fleet:
        simulation.engine.observe(look.every_steps, lambda _: simulation.check())
    if look.aborts:
        simulation.env.process(_withdraw(simulation, look.aborts))
    tables, summary, words = {}, {}, ""
    try:
        results = simulation.run(check_every=look.every_steps if has_fleet else 0)
        if trail is None:
            simulation.check()
        else:
            trail.close()
        tables = {name: getattr(results, name) for name in TABLES}
        if has_fleet:  # whichever took them first
            order = ["engine", "step"]
            tables["steps"] = tables["steps"].sort_values(order, ignore_index=True)
        groups = results.recording.group_table
        if groups is not None:
            tables["kv_cache_groups"] = groups.arrow.to_pandas()
        more = results.recording
        for name, each in (
            ("prefix_tree", more.tree_table),
            ("transfers", more.transfer_table),
            ("tier", more.tier_table),
            ("fleet", more.fleet_table),
        ):
            if each is not None:
                tables[name] = each.arrow.to_pandas()
        summary = dict(results.summary)
        if has_fleet and config.fleet is None:
            _without_a_fleet(tables, summary)
    except Exception as error:
        words = _in_words(error)
    path, reason = simulation.path, simulation.path_reason
    return Run(path, reason, tables, summary, words, trail)


def _without_a_fleet(tables: dict[str, pd.DataFrame], summary: dict[str, Any]) -> None:
    tables.pop("fleet", None)
    for table in tables.values():
        if "engine" in table:
            table.pop("engine")
    for key in ("router", "engines", "pools", "imbalance", "gpu_hours"):
        summary.pop(key)


def _withdraw(
    simulation: Simulation, aborts: Iterable[tuple[float, int]]
) -> Iterator[simpy.Event]:
    for at_s, request_id in aborts:
        if at_s > simulation.env.now:
            yield At(simulation.env, at_s, ARRIVAL_PRIORITY)
        request = simulation.recorder.active.get(request_id)
        if request is not None:
            simulation.engine.abort(request, "its client withdrew it")


def by_the_oracle(config: RunConfig) -> RunConfig:
    """Return the configuration with the oracle as its scheduler."""
    engine = config.engine.model_copy(update={"scheduler": ORACLE})
    return config.model_copy(update={"engine": engine})


def _in_words(error: Exception) -> str:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = ""
    if frame is not None:
        where = f" ({frame.tb_frame.f_code.co_name}, line {frame.tb_lineno})"
    return f"{type(error).__name__}: {error}{where}"


def report(config: RunConfig, look: Look, compared: Comparison) -> str:
    """Return what differs, and a file that shows it again."""
    return "\n".join(
        [
            "the scheduler differs from the oracle:",
            *(f"- {line}" for line in compared.differences),
            "to see it again: python -m tests.identity.fuzz --file FILE, with",
            reproduction(config, look),
        ]
    )


# -- differences ----------------------------------------------------------------


def _differences(chosen: Run, reference: Run) -> Iterator[str]:
    if chosen.error or reference.error:
        ours, theirs = _message(chosen.error), _message(reference.error)
        if ours != theirs:
            yield f"error: {chosen.error!r}, not {reference.error!r}"
    if not (chosen.error or reference.error):
        yield from _result_differences(chosen, reference)
    if chosen.trail is not None and reference.trail is not None:
        yield from trail_differences(chosen.trail, reference.trail)


def _message(error: str) -> str:
    """Return an error without where it was raised and where objects lie."""
    return re.sub(r" at 0x\w+", "", error.rpartition(" (")[0])


def _result_differences(ours: Run, theirs: Run) -> Iterator[str]:
    for name in theirs.tables:
        line = table_difference(ours.tables[name], theirs.tables[name])
        if line:
            yield f"{name}: {line}"
    line = _summary_difference(ours.summary, theirs.summary)
    if line:
        yield f"summary: {line}"


def table_difference(ours: pd.DataFrame, theirs: pd.DataFrame) -> str | None:
    """Return the first difference of two tables by row, or None.

    Parameters
    ----------
    ours, theirs
        Two tables of one kind.
    """
    if list(ours.columns) != list(theirs.columns):
        return f"columns {list(ours.columns)}, not {list(theirs.columns)}"
    first: tuple[int, str] | None = None
    num_rows = min(len(ours), len(theirs))
    for name in ours.columns:
        mine, others = ours[name], theirs[name]
        if mine.dtype != others.dtype:
            return f"{name} is {mine.dtype}, not {others.dtype}"
        differs = _differs(
            mine.to_numpy()[:num_rows], others.to_numpy()[:num_rows]
        ).nonzero()[0]
        if len(differs) and (first is None or differs[0] < first[0]):
            first = int(differs[0]), name
    if first is not None:
        row, name = first
        of = {
            key: theirs[key].iloc[row]
            for key in ("step", "request_id")
            if key in theirs
        }
        where = ", ".join(f"{key} {value}" for key, value in of.items())
        values = (each[name].iloc[[row]].to_list()[0] for each in (ours, theirs))
        return "row {} ({}): {} is {!r}, not {!r}".format(row, where, name, *values)
    if len(ours) != len(theirs):
        return f"{len(ours)} rows, not {len(theirs)}; as far as both go they are equal"
    return None


def _differs(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> Any:
    """Return where two columns differ, NaN being equal to NaN and -0.0 not to 0.0."""
    if ours.dtype == np.float64:
        both_nan = np.isnan(ours) & np.isnan(theirs)
        return (ours.view(np.int64) != theirs.view(np.int64)) & ~both_nan
    return ours != theirs


def _summary_difference(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> str | None:
    keys = [[key for key in each if key not in NOT_COMPARED] for each in (ours, theirs)]
    if keys[0] != keys[1]:
        return f"keys {keys[0]}, not {keys[1]}"
    for key in keys[0]:
        if _spelled(ours[key]) != _spelled(theirs[key]):
            return f"{key} is {ours[key]!r}, not {theirs[key]!r}"
    return None


def _spelled(value: Any) -> str:
    """Return a text that differs where values, their bits or their types do."""
    if isinstance(value, float) and math.isnan(value):
        return f"{type(value).__name__} nan"
    return f"{type(value).__name__} {value!r}"


def trail_differences(ours: Trail, theirs: Trail) -> Iterator[str]:
    """Yield what two runs did differently to their caches, the first of each kind."""
    for mine, other in zip(ours.states, theirs.states, strict=False):
        line = _state_difference(mine._asdict(), other._asdict())
        if line:
            yield f"state after step {other.step}: {line}"
            break
    if len(ours.states) != len(theirs.states):
        yield f"states: {len(ours.states)}, not {len(theirs.states)}"
    for index, (table, other_table) in enumerate(
        zip(ours.given_up, theirs.given_up, strict=False)
    ):
        if table != other_table:
            yield (
                f"tables given up: number {index} is {_table(table)}, "
                f"not {_table(other_table)}"
            )
            break
    if len(ours.given_up) != len(theirs.given_up):
        yield f"tables given up: {len(ours.given_up)}, not {len(theirs.given_up)}"


def _table(table: tuple[int, array[int]]) -> str:
    return f"of request {table[0]}: {table[1].tolist()}"


def _state_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    for name, value in theirs.items():
        if ours[name] == value:
            continue
        if name in ("tables", "num_registered"):
            for request_id, mine, other in zip(
                theirs["running"], ours[name], value, strict=True
            ):
                if mine != other:
                    return f"{name} of request {request_id}: {mine}, not {other}"
        if name == "moved":
            return _moved_difference(ours[name], value)
        if name == "free":
            return f"free queue: {_sequence_difference(ours[name], value)}"
        return f"{name}: {ours[name]}, not {value}"
    return None


def _moved_difference(
    ours: Mapping[str, list[int]], theirs: Mapping[str, list[int]]
) -> str | None:
    for kind, ids in theirs.items():
        line = _sequence_difference(ours[kind], ids)
        if line:
            return f"blocks {kind} since the last look, sorted: {line}"
    return None


def _sequence_difference(ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    if ours == theirs:
        return None
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            next_few = slice(index, index + 8)
            return (
                f"number {index} is {mine}, not {other}, out of "
                f"{list(ours[next_few])}, not {list(theirs[next_few])}"
            )
    return f"{len(ours)} of them, not {len(theirs)}"


# -- reproduction ---------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Writes each request of a listed trace on a line."""

    def represent_request(self, data: _OneLine) -> yaml.Node:
        return self.represent_mapping("tag:yaml.org,2002:map", data, flow_style=True)


class _OneLine(dict[str, Any]):
    pass


_Dumper.add_representer(_OneLine, _Dumper.represent_request)


def reproduction(config: RunConfig, look: Look) -> str:
    """Return a configuration as YAML, with how it was observed in a comment."""
    data = config.model_dump(exclude_unset=True)
    trace = data["workload"].get("trace")
    if trace and "requests" in trace:
        trace["requests"] = [_OneLine(each) for each in trace["requests"]]
    text = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=10_000
    ).replace(f"{ROOT}/", "")
    told = ", told of blocks" if look.told else ""
    aborts = f"; aborts: {list(look.aborts)}" if look.aborts else ""
    return f"# observed every {look.every_steps} steps{told}{aborts}\n{text}"


def look_of(text: str) -> Look:
    """Return how closely a configuration that `reproduction` wrote is to be watched."""
    found = re.search(
        r"observed every (\d+) steps(, told of blocks)?(?:; aborts: (.*))?", text
    )
    if not found:
        return ONLY_THE_END
    aborts = tuple(map(tuple, literal_eval(found[3] or "[]")))
    return Look(int(found[1]), bool(found[2]), aborts)
