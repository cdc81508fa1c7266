"""``kvsim validate``: what a real engine did, simulated and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.cli import options
from sim.cli.console import print_json, progress_bar, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sim.cli.console import ShowProgress
    from sim.studies.validation.run import Validation


def validate(
    config: Path,
    /,
    *,
    measured: Path,
    timeseries: Path | None = None,
    fit: options.Several = None,
    fit_on: float = 1.0 / 3.0,
    warm_up: int = 0,
    set_: options.Settings = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    figures: options.Figures = True,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Simulate a run that was measured, and report how far off the simulation is.

    Arrivals and output lengths are taken from the measurement where it has them, prompt
    identity and the engine from the configuration.

    Parameters
    ----------
    config
        YAML configuration of the engine and the workload as they were.
    measured
        requests.csv (arrival_s, queued_s, first_token_s, last_token_s, prompt_tokens,
        output_tokens), the JSON of 'vllm bench serve', or the text of vLLM's /metrics.
    timeseries
        States over time: a CSV with t, running, waiting, swapped, kv_cache_pct.
    fit
        What to fit on the first part of the run: host (cost.step_overhead_s), links
        (cost.link_bytes_per_s), front_end (front_end.client_to_queue_s), or
        cost.KEY=LOW:HIGH; may be given several times.
    fit_on
        That part, as a share of the run's time; the rest is judged.
    warm_up
        First requests whose TTFT and TPOT are left out of the comparison.
    out
        Folder for the report. Default: results/validate-NAME-OF-CONFIG.
    """
    from sim.config.tables import load_config
    from sim.results.output import output_directory
    from sim.studies.validation.run import (
        VALIDATION_FILES,
        validate_file,
        write_validation,
    )

    run_config = load_config(config, set_ or [])
    directory = out or Path("results") / f"validate-{config.stem}"
    with output_directory(
        directory, overwrite=overwrite, files=VALIDATION_FILES
    ) as partial:
        with progress_bar(_reporter, 1, "runs", shown=not (quiet or json)) as told:
            validation = validate_file(
                run_config,
                measured,
                timeseries,
                fit=fit or [],
                fit_on=fit_on,
                warm_up=warm_up,
                on_progress=told,
            )
        report = write_validation(validation, partial)
        if figures:
            from sim.views.plots.output import write_pngs
            from sim.views.plots.studies.validation import figures_of

            write_pngs(figures_of(validation), validation, partial / "figures")
    _show(validation, report, directory, quiet=quiet, as_json=json)
    return 0


def _reporter(show: ShowProgress) -> Callable[[float, int], None]:
    def update(done: float, total: int) -> None:
        show(done, phase="validating", total=total)

    return update


def _show(
    validation: Validation,
    report: Mapping[str, Any],
    directory: Path,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    warn(report["warnings"])
    if validation.fit is not None:
        warn(
            f"{key} was fitted to an end of its range; something else is off"
            for key in validation.fit.at_bound
        )
        if validation.fit.explains_little:
            fit = validation.fit
            warn(
                [
                    f"{', '.join(fit.values)} explains little of the error "
                    f"({fit.error_before_pct:.1f} % before, {fit.error_after_pct:.1f} "
                    f"% after); another term is off: try --fit links or --fit host"
                ]
            )
    if as_json:
        print_json(report)
    elif not quiet:
        from sim.cli.output.validation import print_report

        print_report(report, directory)
