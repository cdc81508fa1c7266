"""Simulate a measured run, say how far off the simulation is, and write it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.results.output import ResultFiles, write_json, write_text
from sim.results.schema import OF_REQUESTS
from sim.simulation.run import Simulation
from sim.simulation.workload import make_workload
from sim.studies.validation import compare
from sim.studies.validation.clocks import on_one_clock
from sim.studies.validation.fit import (
    ended_by,
    fit_terms,
    is_of_front_end,
    parse_term,
)
from sim.studies.validation.inputs import Inputs, inputs_of, notes_of
from sim.studies.validation.observed import (
    MeasuredError,
    observed_of,
    series_of,
    usage_over,
)
from sim.studies.validation.readers import read
from sim.studies.validation.readers.requests_csv import read_timeseries
from sim.studies.validation.sharpness import MORE_BLOCKS_PCT, sharpness_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pandas as pd

    from sim.config.tables import RunConfig
    from sim.results.run import Results
    from sim.simulation.progress import Progress
    from sim.studies.validation.fit import Fit, Term
    from sim.studies.validation.observed import (
        Floats,
        Observed,
        ObservedRequests,
        TimeSeries,
    )
    from sim.studies.validation.sharpness import Sharpness


_BLOCKS_KEY: Final = "engine.num_gpu_blocks_override"

_RUNS_OF_A_TERM: Final = 30
"""About as many runs as a fit takes for each of its terms."""


class _Runs:
    """How many simulations are done, of about how many there will be."""

    def __init__(self, num_terms: int, tell: Callable[[float, int], None]) -> None:
        self._num_fitting = num_terms * _RUNS_OF_A_TERM
        self.total = self._num_fitting + 1 + len(MORE_BLOCKS_PCT)
        self._tell = tell
        self._done = 0
        tell(0, self.total)

    def told(self, progress: Progress) -> None:
        """Take note of how far the run of the moment is."""
        share = progress.num_done / max(progress.num_requests, 1)
        self._tell(min(self._done + share, self._most), self.total)

    def ended(self) -> None:
        self._done = min(self._done + 1, int(self._most))
        self._tell(self._done, self.total)

    def fitted(self) -> None:
        """Take note that no more is to be fitted, however many runs that took."""
        self._done, self._num_fitting = self._num_fitting, self.total
        self._tell(self._done, self.total)

    @property
    def _most(self) -> float:
        return self._num_fitting or self.total


@dataclass(frozen=True)
class Validation:
    """A measured run beside the simulated one."""

    results: Results  # of the simulation, with the fitted values
    measured: Observed  # requests of both in the order of the measurement
    predicted: Observed
    series: TimeSeries | None  # states at the moments that were measured, or None
    # by latency, (requests,): mean KV usage while it passed, that is until the
    # first token, from it to the last, and over both; from the measurement where it
    # has it, else from the simulation. None without requests.
    usage: dict[str, Floats] | None
    fit: Fit | None  # the fitted values, or None
    sharpness: Sharpness  # predictions with more blocks
    notes: tuple[str, ...]  # notes for the reader, a sentence each

    @property
    def judged(self) -> Any:
        """Requests that nothing was fitted on; None for all."""
        requests = self.measured.requests
        if self.fit is None or requests is None:
            return None
        return ~ended_by(requests, self.fit.split_s)

    @property
    def table(self) -> pd.DataFrame:
        """A row for each metric: predicted, measured, and the error in percent."""
        import pandas as pd  # noqa: PLC0415 - slow to import

        found = compare.metrics(self.predicted, self.measured)
        return pd.DataFrame.from_dict(found, orient="index")

    @property
    def usage_of(self) -> str:
        """The source of `usage`: "the measurement" or "the simulation"."""
        series = self.measured.series
        known = series is not None and series.kv_cache_usage is not None
        return "the measurement" if known else "the simulation"

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "source": self.measured.source,
            "title": self.results.summary["title"],
            "notes": list(self.notes),
            "metrics": compare.metrics(self.predicted, self.measured),
            "fit": None if self.fit is None else self.fit.to_dict(),
            "profile": self.results.summary.get("profile"),
            "extrapolated_share": self.results.summary.get("extrapolated_share"),
            "num_gpu_blocks": self.results.summary["num_gpu_blocks"],
            "warnings": [*self.measured.warnings, *self.results.summary["warnings"]],
            "sharpness": self.sharpness.to_dict(self.measured),
        }
        ours, theirs = self.predicted.requests, self.measured.requests
        if ours is not None and theirs is not None:
            found["per_request"] = compare.per_request(ours, theirs)
            if self.fit is not None:
                found["judged_metrics"] = compare.metrics(
                    self.predicted, self.measured, self.judged
                )
                found["judged_per_request"] = compare.per_request(
                    ours, theirs, self.judged
                )
            if self.usage is not None:
                found["kv_usage_of"] = self.usage_of
                found["by_kv_usage"] = compare.by_pressure(ours, theirs, self.usage)
        if self.series is not None and self.measured.series is not None:
            found["curves"] = compare.curves(self.series, self.measured.series)
        return found


def validate(
    config: RunConfig,
    measured: Observed,
    terms: Sequence[Term] = (),
    fit_on: float = 1.0 / 3.0,
    warm_up: int = 0,
    *,
    on_progress: Callable[[float, int], None] | None = None,
) -> Validation:
    """Simulate the measured run; `on_progress` is told of runs, done and in all."""
    measured = on_one_clock(measured)
    runs = _Runs(len(terms), on_progress or (lambda *_: None))
    if config.workload.client is not None:
        raise ConfigError(
            "workload.client: measured requests came when they came, tries included; "
            "remove it"
        )
    _check_engines(config, measured)
    inputs = _inputs(config, measured)
    measured = _without_warm_up(measured, warm_up)
    if measured.begins_at_queue and any(is_of_front_end(each) for each in terms):
        raise MeasuredError(
            "--fit front_end: the measurement begins at the engine's queue (queued_s), "
            "so nothing in it passed the front end; leave it out, or give latencies "
            "that clients saw"
        )
    if measured.begins_at_queue and config.front_end is not None:
        config = config.model_copy(update={"front_end": None})
        note = "the measurement begins at the engine's queue: front_end is left out"
        measured = replace(measured, notes=(*measured.notes, note))
    if measured.requests is not None and measured.requests.arrival_s is not None:
        config = _open_loop(config)

    def predict(changes: Mapping[str, float]) -> Observed:
        return observed_of(_simulated(config, inputs, changes, runs), inputs.lines)

    fit = None
    if terms:
        fit = fit_terms(terms, measured, predict, _split_s(measured, fit_on))
        runs.fitted()
    fitted = fit.values if fit else {}
    results = _simulated(config, inputs, fitted, runs)
    predicted = observed_of(results, inputs.lines)
    series = measured.series
    return Validation(
        results=results,
        measured=measured,
        predicted=predicted,
        series=None if series is None else series_of(results, series.time_s),
        usage=_usage(results, measured, predicted),
        fit=fit,
        sharpness=sharpness_of(
            results,
            predicted,
            measured,
            lambda num_blocks: predict({**fitted, **_blocks(results, num_blocks)}),
        ),
        notes=(*measured.notes, *inputs.notes, *notes_of(results, predicted, measured)),
    )


def validate_file(
    config: RunConfig,
    measured: Path,
    timeseries: Path | None = None,
    *,
    fit: Sequence[str] = (),
    fit_on: float = 1.0 / 3.0,
    warm_up: int = 0,
    on_progress: Callable[[float, int], None] | None = None,
) -> Validation:
    """Validate as `validate` does, from files of measurements."""
    if not 0.0 < fit_on < 1.0:
        raise ConfigError(
            f"fit_on is a share of the run's time, between 0 and 1; got {fit_on:g}"
        )
    terms = [parse_term(text) for text in fit]
    observed = read(measured)
    if timeseries is not None:
        observed = replace(observed, series=read_timeseries(timeseries))
    return validate(config, observed, terms, fit_on, warm_up, on_progress=on_progress)


def _check_engines(config: RunConfig, measured: Observed) -> None:
    """Refuse a measurement of several engines where one is simulated."""
    requests = measured.requests
    if requests is None or requests.engine is None:
        return
    num_engines = len(np.unique(requests.engine))
    if config.fleet is None and config.engine.data_parallel_size == 1:
        raise MeasuredError(
            f"the measurement is of {num_engines} engines, the simulation of one: give "
            f"the rows and the workload of one, or a fleet"
        )


def _inputs(config: RunConfig, measured: Observed) -> Inputs:
    specs = make_workload(config.workload, config.seed).requests()
    if measured.requests is None:
        lines = np.arange(len(specs))
        note = (
            "the source has no single requests: arrivals and lengths are the workload's"
        )
        return Inputs(tuple(specs), lines, (note,))
    return inputs_of(specs, measured.requests)


def _without_warm_up(measured: Observed, num_requests: int) -> Observed:
    """Leave TTFT and TPOT of the first requests out of the comparison."""
    requests = measured.requests
    if not num_requests:
        return measured
    if requests is None or num_requests >= requests.num_requests:
        raise MeasuredError(
            f"--warm-up leaves out the first of several requests, got {num_requests} "
            f"of {0 if requests is None else requests.num_requests}; give fewer"
        )
    first = np.arange(requests.num_requests)
    if requests.arrival_s is not None:
        first = np.argsort(requests.arrival_s, kind="stable")
    ttft_s = requests.ttft_s.copy()
    ttft_s[first[:num_requests]] = np.nan
    note = f"TTFT and TPOT of the first {num_requests:,} requests, a warm-up, left out"
    return replace(
        measured,
        requests=replace(requests, ttft_s=ttft_s),
        notes=(*measured.notes, note),
    )


def _open_loop(config: RunConfig) -> RunConfig:
    """Return the configuration without users: the measured arrivals have them in."""
    if config.workload.max_concurrent_users is None:
        return config
    data = config.to_data()
    data["workload"]["max_concurrent_users"] = None
    return parse_config(data)


def _simulated(
    config: RunConfig, inputs: Inputs, changes: Mapping[str, float], runs: _Runs
) -> Results:
    if changes:
        data = config.to_data()
        for name, value in changes.items():
            _set(data, name.split("."), value)
        config = parse_config(data)
    results = Simulation(config, specs=inputs.specs).run(runs.told)
    runs.ended()
    return results


def _set(data: dict[str, Any], path: Sequence[str], value: float) -> None:
    """Set a key of a configuration, by the tables and the places in lists above it."""
    *above, key = path
    table: Any = data
    for each in above:
        if isinstance(table, list):
            table = table[int(each)]
        else:
            table[each] = table.get(each) or {}
            table = table[each]
    table[key] = value


def _blocks(results: Results, num_gpu_blocks: int) -> dict[str, int]:
    """Return keys that give an engine so many blocks, those of a fleet in proportion.

    The number is that of the first pool.
    """
    if results.config.fleet is None:
        return {_BLOCKS_KEY: num_gpu_blocks}
    first = results.summary["num_gpu_blocks"]
    return {
        f"fleet.pools.{place}.{_BLOCKS_KEY}": -(
            -pool["num_gpu_blocks"] * num_gpu_blocks // first
        )
        for place, pool in enumerate(results.summary["pools"])
    }


def _split_s(measured: Observed, share: float) -> float:
    requests = measured.requests
    if requests is None or requests.arrival_s is None:
        return 0.0  # `fit_terms` refuses that
    begin_s = float(requests.arrival_s.min())
    end_s = float(np.nanmax(requests.arrival_s + requests.e2el_s, initial=begin_s))
    return begin_s + share * (end_s - begin_s)


def _usage(
    results: Results, measured: Observed, predicted: Observed
) -> dict[str, Floats] | None:
    """Return the mean KV usage while each latency of each request passed."""
    theirs, ours, series = measured.requests, predicted.requests, measured.series
    if theirs is None or ours is None:
        return None
    if (
        series is not None
        and series.kv_cache_usage is not None
        and theirs.arrival_s is not None
    ):
        known = ~np.isnan(series.kv_cache_usage)
        curve = series.time_s[known], series.kv_cache_usage[known]
        return {
            name: _mean_between(*curve, *span)
            for name, span in _spans_s(theirs).items()
        }
    return {
        name: usage_over(results, *span, ours.engine)
        for name, span in _spans_s(ours).items()
    }


def _spans_s(requests: ObservedRequests) -> dict[str, tuple[Floats, Floats]]:
    assert requests.arrival_s is not None
    begin_s = requests.arrival_s
    first_s, last_s = begin_s + requests.ttft_s, begin_s + requests.e2el_s
    return {
        "ttft": (begin_s, first_s),
        "tpot": (first_s, last_s),
        "e2el": (begin_s, last_s),
    }


def _mean_between(
    time_s: Floats, values: Floats, begin_s: Floats, end_s: Floats
) -> Floats:
    """Return the mean of a curve of straight lines between two moments each.

    Before its first moment and after its last the curve stays as it is there.
    """
    first_s = min(float(time_s[0]), float(np.nanmin(begin_s))) - 1.0
    last_s = max(float(time_s[-1]), float(np.nanmax(end_s))) + 1.0
    time_s = np.concatenate([[first_s], time_s, [last_s]])
    values = np.concatenate([values[:1], values, values[-1:]])
    middles = (values[1:] + values[:-1]) / 2.0 * np.diff(time_s)
    area = np.concatenate([np.zeros(1), np.cumsum(middles)])
    spent = np.interp(end_s, time_s, area) - np.interp(begin_s, time_s, area)
    mean: Floats = spent / np.maximum(end_s - begin_s, 1e-12)
    return np.clip(mean, 0.0, 1.0)


VALIDATION_FILES: Final = ResultFiles(
    "a validation",
    "validation.json",
    frozenset({"config.yaml", "validation.json", "requests.csv", "figures"}),
)
"""Files of the report of ``kvsim validate``."""


def write_validation(validation: Validation, directory: Path) -> dict[str, Any]:
    """Write ``validation.json``, ``requests.csv``, ``config.yaml``; return the first.

    ``config.yaml`` is the configuration that was simulated, with the fitted values;
    ``requests.csv`` has both sides of every request, in seconds.
    """
    report = validation.to_dict()
    write_json(directory / "validation.json", report)
    write_text(directory / "config.yaml", validation.results.config.to_yaml())
    ours, theirs = validation.predicted.requests, validation.measured.requests
    if ours is not None and theirs is not None:
        import pandas as pd  # noqa: PLC0415  (slow to import; the command line waits)

        columns: dict[str, Any] = {"index": np.arange(theirs.num_requests)}
        if theirs.arrival_s is not None:
            columns["arrival_s"] = theirs.arrival_s
        columns["prompt_tokens"] = theirs.num_prompt_tokens
        columns["output_tokens"] = theirs.num_output_tokens
        for name in (each.column for each in OF_REQUESTS):
            columns[f"measured_{name}"] = getattr(theirs, name)
            columns[f"predicted_{name}"] = getattr(ours, name)
        if validation.usage is not None:
            columns["kv_cache_usage"] = validation.usage["e2el"]
        if validation.judged is not None:
            columns["judged"] = validation.judged
        text = pd.DataFrame(columns).to_csv(index=False, lineterminator="\n")
        write_text(directory / "requests.csv", text)
    return report
