"""``kvsim validate``: what a real engine did, simulated and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.studies.validation.run import Validation

Flag = Annotated[bool, Parameter(negative="")]


def validate(
    config: Path,
    /,
    *,
    measured: Path,
    timeseries: Path | None = None,
    fit: Annotated[list[str] | None, Parameter(negative="")] = None,
    fit_on: float = 1.0 / 3.0,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", allow_leading_hyphen=False),
    ] = None,
    out: Path | None = None,
    overwrite: Flag = False,
    figures: bool = True,
    quiet: Flag = False,
    json: Flag = False,
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
        What to fit on the first part of the run: host (cost.step_overhead_s), or
        cost.KEY=LOW:HIGH; may be given several times.
    fit_on
        That part, as a share of the run's time; the rest is judged.
    set_
        Change a key, as key.path=value; may be given several times.
    out
        Folder for the report. Default: results/validate-NAME-OF-CONFIG.
    overwrite
        Replace the report in that folder.
    figures
        Draw the figures.
    quiet
        Print nothing but warnings and errors.
    json
        Print the report as JSON.
    """
    from sim.config.tables import load_config
    from sim.results.output import output_directory
    from sim.studies.validation.output import VALIDATION_FILES, write_validation
    from sim.studies.validation.run import validate_file

    run_config = load_config(config, set_ or [])
    directory = out or Path("results") / f"validate-{config.stem}"
    with output_directory(
        directory, overwrite=overwrite, files=VALIDATION_FILES
    ) as partial:
        validation = validate_file(
            run_config, measured, timeseries, fit=fit or [], fit_on=fit_on
        )
        report = write_validation(validation, partial)
        if figures:
            from sim.views.plots.validation import draw_validation

            draw_validation(validation, partial / "figures")
    _show(validation, report, directory, quiet=quiet, as_json=json)
    return 0


def _show(
    validation: Validation,
    report: Mapping[str, Any],
    directory: Path,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    import sys

    for line in report["warnings"]:
        print(f"kvsim: warning: {line}", file=sys.stderr)
    if validation.fit is not None:
        for key in validation.fit.at_bound:
            print(
                f"kvsim: warning: {key} was fitted to an end of its range; something "
                "else is off",
                file=sys.stderr,
            )
    if as_json:
        from json import dumps

        print(dumps(report, indent=2, allow_nan=False))
    elif not quiet:
        from sim.studies.validation.terminal import print_report

        print_report(report, directory)
