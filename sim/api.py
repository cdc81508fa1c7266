"""The public face: a function for each question."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.costs import crossover as comparison
from sim.errors import ConfigError
from sim.results.summary.compared import differing
from sim.simulation.simulate import simulate as _simulate
from sim.simulation.workload import read_requests
from sim.studies.planning import solve
from sim.studies.planning.spec import load_plan
from sim.studies.prefixes import report as prefixes
from sim.studies.sweeps.dataset import RowMaker, text_keys
from sim.studies.sweeps.expand import Sweep
from sim.studies.sweeps.job import Job
from sim.studies.sweeps.local import LocalExecutor, SerialExecutor, num_cpus
from sim.studies.sweeps.spec import load_sweep
from sim.studies.sweeps.supplies import gather
from sim.studies.sweeps.task import run_summary
from sim.studies.validation import run as validation
from sim.views.results import (
    CrossoverReport,
    PlanResult,
    PrefixReport,
    Results,
    Validation,
    with_figures,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

    from sim.config.files import Overrides
    from sim.config.tables import RunConfig
    from sim.studies.sweeps.job import Executor
    from sim.views.explore.beside import Explored
    from workloads.spec import RequestSpec

__all__ = [
    "Results",
    "crossover",
    "explore",
    "hit_curve",
    "plan",
    "read_requests",
    "simulate",
    "sweep",
    "validate",
]

_MANY_STEPS = 5_000
"""Steps of a run that leaves more memory than looking for it takes time (2 ms)."""


def simulate(config: RunConfig) -> Results:
    """Run one simulation and return its results, intervals included.

    Parameters
    ----------
    config
        As of `load_config`.

    Returns
    -------
    Results
        Tables, summary and figures.

    Raises
    ------
    ConfigError, CapacityError, WorkloadError
        If the parts cannot be built or do not fit together.

    Examples
    --------
    >>> from kvsim import load_config, simulate
    >>> minute = {"workload.preset.duration_s": 60}
    >>> results = simulate(load_config("examples/demo.yaml", minute))
    >>> summary = results.summary
    >>> summary["num_gpu_blocks"], summary["completed"], summary["num_preemptions"]
    (16075, 366, 0)
    """
    if isinstance(config, str | Path):
        raise ConfigError(
            f"simulate takes a configuration, not its path; write "
            f"simulate(load_config({str(config)!r}))"
        )
    results = with_figures(Results, _simulate(config))
    if results.summary["num_steps"] > _MANY_STEPS:
        gc.collect(1)  # a run ends in cycles, few objects with all of its arrays
    return results


def sweep(
    runs: Iterable[RunConfig] | Path | str, *, num_workers: int | None = None
) -> pd.DataFrame:
    """Run many configurations on this machine; a row for each, in their order.

    Parameters
    ----------
    runs
        Configurations, or the path of a sweep file (docs/sweeps.md).
    num_workers
        Processes; one for each processor unless given, and with 1 this process does
        the work. A script with more needs ``if __name__ == "__main__":``.

    Returns
    -------
    DataFrame
        Columns as in a sweep's dataset: the keys in which the runs differ, ``status``
        and ``error``, the numbers of the summary.

    Raises
    ------
    ConfigError
        If there is no run, or for a mistake in the sweep file.

    Examples
    --------
    >>> from kvsim import load_config, sweep
    >>> short, rate = {"workload.preset.duration_s": 30}, "workload.preset.rate_scale"
    >>> configs = [
    ...     load_config("examples/demo.yaml", short | {rate: scale})
    ...     for scale in (0.5, 1.0)
    ... ]
    >>> runs = sweep(configs, num_workers=1)
    >>> runs[[rate, "status", "completed"]].values.tolist()
    [[0.5, 'done', 75], [1.0, 'done', 164]]
    """
    import pandas as pd  # noqa: PLC0415 - slow to import

    jobs, rows = _jobs(runs)
    by_index = {job.index: job for job in jobs}
    with _executor(jobs, num_workers) as executor:
        found = {
            outcome.index: rows.row(by_index[outcome.index], outcome)
            for outcome in executor.run(jobs, run_summary)
        }
    frame = pd.DataFrame([found[index] for index in sorted(found)])
    others = [name for name in frame.columns if name not in rows.leaders]
    return frame[[*rows.leaders, *others]]


def _jobs(runs: Iterable[RunConfig] | Path | str) -> tuple[list[Job], RowMaker]:
    """Return the runs, and what makes rows of them."""
    if isinstance(runs, str | Path):
        plan = Sweep(load_sweep(runs))
        jobs, keys, repeats = list(plan.jobs()), list(plan.spec.keys), plan.spec.repeats
    else:
        data = [config.to_data() for config in runs]
        varied = differing(data)
        keys, repeats = list(varied), 1
        jobs = [
            Job(i, {key: values[i] for key, values in varied.items()}, each)
            for i, each in enumerate(data)
        ]
    if not jobs:
        raise ConfigError("a sweep needs a configuration at least, got none; give some")
    return jobs, RowMaker(keys, text_keys(jobs, keys), repeats)


def _executor(jobs: Sequence[Job], num_workers: int | None) -> Executor:
    num = num_workers or min(num_cpus(), len(jobs))
    if num < 1:
        raise ConfigError(f"num_workers must be at least 1, got {num_workers}")
    return (
        SerialExecutor(gather(jobs)) if num == 1 else LocalExecutor(num, gather(jobs))
    )


def hit_curve(
    requests: Sequence[RequestSpec] | Path | str, **question: Any
) -> PrefixReport:
    """Say which share of the prompts a prefix cache of each size finds.

    The miss ratio is what is left; ``kvsim workload curve`` says the same.

    Parameters
    ----------
    requests
        In order of arrival; or a trace or configuration, see `read_requests`.
    **question
        See `sim.studies.prefixes.report.CurveQuestion`: ``model``, ``gpu``,
        ``block_size``, ``share``, ``sample`` and so on.

    Returns
    -------
    PrefixReport
        With ``table``, ``plot()``, ``need`` and ``sentence()``.

    Raises
    ------
    ConfigError, WorkloadError
        If the file cannot be read, or a number is out of range.

    Examples
    --------
    >>> from kvsim import hit_curve, read_requests
    >>> requests = read_requests("examples/chat_sessions.yaml")[:500]
    >>> report = hit_curve(requests, share=0.9)
    >>> report.need.num_blocks
    1138
    >>> bool(report.table["lru_hit_rate"].is_monotonic_increasing)
    True
    """
    try:
        asked = prefixes.CurveQuestion(**question)
    except TypeError as error:
        known = prefixes.CurveQuestion.__dataclass_fields__
        names, unknown = ", ".join(known), sorted(set(question) - set(known))
        raise ConfigError(
            f"'{unknown[0]}' is nothing that a curve is asked (there are: {names})"
        ) from error
    memory = asked.memory()
    name = "requests"
    if isinstance(requests, str | Path):
        name, requests = Path(requests).name, read_requests(requests)
    found = prefixes.prefix_report(name, requests, asked, memory)
    return with_figures(PrefixReport, found)


def plan(
    path: Path | str, overrides: Overrides = (), *, num_workers: int | None = None
) -> PlanResult:
    """Find the cheapest way to serve traffic, and how much each candidate holds.

    Parameters
    ----------
    path
        A plan (docs/plans.md).
    overrides
        As of `sim.load_config`.
    num_workers
        As of `sweep`.

    Returns
    -------
    PlanResult
        With ``table``, a row for each candidate, ``data``, that of ``plan.json``, and
        ``plot``, the figures by name.

    Raises
    ------
    ConfigError, CapacityError, WorkloadError
        For a mistake in the plan, and where no candidate meets the objectives.

    Examples
    --------
    >>> from kvsim import plan
    >>> traffic = {"synthetic": {
    ...     "num_requests": 100,
    ...     "arrivals": {"kind": "poisson", "rate": 4.0},
    ...     "prompt_tokens": {"kind": "fixed", "tokens": 500},
    ...     "output_tokens": {"kind": "fixed", "tokens": 50},
    ... }}
    >>> asked = {
    ...     "workload": traffic,
    ...     "candidates": {"model": ["Qwen/Qwen2.5-7B"], "gpu": ["l40s", "h100_sxm"]},
    ...     "search": {"num_seeds": 3, "tolerance": 0.2, "curve": [], "curve_seeds": 1},
    ...     "sensitivity": None,
    ... }
    >>> found = plan("examples/plan_chat.yaml", asked, num_workers=1)
    >>> found.table["status"].tolist()
    ['ok', 'ok']
    >>> figure = found.plot.pareto()
    """
    asked = load_plan(path, overrides)
    executor = (
        SerialExecutor() if num_workers == 1 else solve.executor_for(asked, num_workers)
    )
    with executor:
        return with_figures(PlanResult, solve.solve(asked, executor))


def crossover(
    model: str,
    *,
    profile: Path | str | None = None,
    gpu: str | None = None,
    **engine: Any,
) -> CrossoverReport:
    """Compare swapping a preempted sequence out and in with computing it again.

    Parameters
    ----------
    model
        Bundled name, or path to a config.json.
    profile
        A kvprofile/1 file with tables of the model; the GPU's datasheet unless given.
    gpu
        GPU name, or a datasheet; the profile's unless given.
    **engine
        ``tensor_parallel_size``, ``block_size``, ``max_num_batched_tokens``,
        ``kv_cache_dtype``.

    Returns
    -------
    CrossoverReport
        With ``sentences``, ``table`` and ``plot()``.

    Raises
    ------
    UserError
        If neither profile nor GPU is given, or something does not fit.

    Examples
    --------
    >>> from kvsim import crossover
    >>> report = crossover("meta-llama/Llama-3.1-8B", gpu="h200_sxm")
    >>> list(report.sentences)
    ['loop', 'batch', 'kernel']
    >>> list(report.table)
    ['recompute_ms', 'swap_loop_ms', 'swap_batch_ms', 'swap_kernel_ms']
    """
    file = None if profile is None else Path(profile)
    question = comparison.Question(model=model, file=file, gpu=gpu, **engine)
    return with_figures(CrossoverReport, question.answer())


def explore(
    config: RunConfig, *, traffic: Sequence[Path | str] = (), port: int = 0
) -> Explored:
    """Serve a live page on a configuration, shown below the cell of a notebook.

    What ``kvsim explore`` serves, until `Explored.stop` or the end of the process.

    Parameters
    ----------
    config
        As of `load_config`; where the page begins.
    traffic
        Traces, or configurations for their workload, that the page can be given in
        place of its traffic.
    port
        Where to listen on 127.0.0.1; any free port unless given.

    Returns
    -------
    Explored
        With ``url`` and ``stop()``.

    Raises
    ------
    ConfigError
        If the extra ``explore`` is not installed, the port is taken, or a file of
        traffic cannot be read.

    Examples
    --------
    >>> from kvsim import explore, load_config
    >>> page = explore(load_config("examples/demo.yaml"))
    >>> page.url.startswith("http://127.0.0.1:")
    True
    >>> page.stop()
    """
    try:
        from sim.views.explore.beside import Explored  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"explore needs {error.name}; pip install 'kvsim[explore]'"
        ) from error
    return Explored(config, port, [Path(each) for each in traffic])


def validate(
    config: RunConfig,
    measured: Path | str,
    timeseries: Path | str | None = None,
    *,
    fit: Sequence[str] = (),
    fit_on: float = 1.0 / 3.0,
) -> Validation:
    """Simulate a run that was measured, and say how far off the simulation is.

    Parameters
    ----------
    config
        The engine and the workload as they were.
    measured
        requests.csv, the JSON of ``vllm bench serve``, or the text of ``/metrics``.
    timeseries
        States over time, a CSV.
    fit
        What to fit on the first part of the run: ``host``, or ``cost.KEY=LOW:HIGH``.
    fit_on
        That part, as a share of the run's time; the rest is judged.

    Returns
    -------
    Validation
        With ``table``, a row for each metric, and ``plot``, the figures by name.

    Raises
    ------
    ConfigError, MeasuredError
        If a file cannot be read, or does not fit the configuration.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from kvsim import load_config, simulate, validate
    >>> config = load_config("examples/demo.yaml", {"workload.preset.duration_s": 30})
    >>> served = simulate(config).requests
    >>> names = {
    ...     "finish_s": "last_token_s",
    ...     "num_prompt_tokens": "prompt_tokens",
    ...     "num_output_tokens": "output_tokens",
    ... }
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "requests.csv"
    ...     served.rename(columns=names).to_csv(path, index=False)
    ...     found = validate(config, path)
    >>> float(found.table.loc["mean_ttft_ms", "error_pct"].round(3))
    0.0
    >>> figure = found.plot.latencies()
    """
    series = None if timeseries is None else Path(timeseries)
    found = validation.validate_file(
        config, Path(measured), series, fit=fit, fit_on=fit_on
    )
    found = replace(found, results=with_figures(Results, found.results))
    return with_figures(Validation, found)
