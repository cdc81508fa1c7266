"""``kvsim decisions``: the schedule of a workload, step by step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from sim.cli import options
from sim.cli.console import print_json
from sim.cli.main import EXIT_DIFFERENT

if TYPE_CHECKING:
    from sim.studies.conformance import (
        DecisionDriver,
        DecisionWorkload,
        PairDriver,
        SglangDriver,
        SizingCases,
    )

    Driver = DecisionDriver | PairDriver | SglangDriver


@options.claiming("out")
def decisions(
    workload: Path | None = None,
    /,
    *,
    out: Path | None = None,
    diff: Annotated[tuple[Path, Path] | None, Parameter(negative="")] = None,
    scheduler: Literal["vllm"] | None = None,
    check: options.Flag = False,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Write the schedule of a workload step by step, or show where two logs part.

    Parameters
    ----------
    workload
        Workload file (JSON): requests by step, and the engine. Its "reference", such
        as "vllm 0.33.0", "sglang 0.5.9" or "transformers 5.17.0", picks the generation.
        A file with "cases" asks which pools an engine plans, and is answered a line a
        case.
    out
        Where to write the log, a JSON object a step; compressed if it ends in .gz.
        Default: standard output.
    diff
        Two logs, A B: show their first difference in words instead. Exit status 1 if
        they differ.
    scheduler
        vllm: let the installed vLLM's own scheduler decide, whatever release the
        reference names (V1 only).
    check
        Prove the scheduler's invariants after every call.
    """
    from sim.errors import ConfigError

    if diff is not None:
        if workload is not None or out is not None or scheduler is not None:
            raise ConfigError(
                "--diff compares two logs that exist; give it alone, without a "
                "workload, --out and --scheduler"
            )
        return _compare(diff, quiet=quiet, as_json=json)
    if workload is None:
        raise ConfigError("give a workload file and --out LOG.jsonl.gz, or --diff A B")
    if out is not None and out.exists():
        if not overwrite:
            raise ConfigError(f"{out} exists; name another --out, or give --overwrite")
        if workload.exists() and out.samefile(workload):
            raise ConfigError(f"{out} is the workload itself; name another --out")
    from sim.studies.conformance import load_sizing_cases, load_workload

    if (cases := load_sizing_cases(workload)) is not None:
        if scheduler is not None:
            raise ConfigError(
                f"{workload} asks for pools, which no scheduler decides; leave "
                f"--scheduler out"
            )
        return _write_sizing(workload, cases, out, quiet=quiet, as_json=json)
    asked = load_workload(workload)
    driver = _driver(workload, asked, check=check, hosted=scheduler is not None)
    return _write(asked, driver, out, quiet=quiet, as_json=json)


def _driver(
    path: Path, workload: DecisionWorkload, *, check: bool, hosted: bool
) -> Driver:
    from sim.errors import ConfigError, SchedulerError
    from sim.studies.conformance import driver_of
    from sim.studies.conformance.driver import hosted_scheduler, make_scheduler

    make = hosted_scheduler if hosted else make_scheduler
    try:
        return driver_of(workload, check=check, make=make)
    except SchedulerError as error:
        raise ConfigError(f"{path}: config: {error}") from error


def _write(
    workload: DecisionWorkload,
    driver: Driver,
    out: Path | None,
    *,
    quiet: bool,
    as_json: bool,
) -> int:
    from json import dumps

    from sim.studies.conformance import write_log

    if out is None:
        for line in driver.lines():
            print(dumps(line, separators=(",", ":")))
        return 0
    write_log(driver.lines(), out)
    result: dict[str, Any] = {
        "name": workload.name,
        "reference": workload.reference,
        "generation": workload.generation,
        "num_requests": len(workload.requests),
        "num_steps": driver.num_steps,
        "num_preemptions": driver.num_preemptions,
        "ending": driver.ending,
        "log": str(out),
    }
    if (installed := getattr(driver.scheduler, "installed", None)) is not None:
        result["hosted_vllm"] = installed
    if as_json:
        print_json(result)
    elif not quiet:
        print(
            f"{workload.name}: {_who(workload, driver)}, "
            f"{len(workload.requests):,} requests, {driver.num_steps:,} steps, "
            f"{driver.num_preemptions:,} preemptions; {_ENDINGS[driver.ending]}; "
            f"log in {out}"
        )
    return 0


def _write_sizing(
    path: Path, asked: SizingCases, out: Path | None, *, quiet: bool, as_json: bool
) -> int:
    from json import dumps

    from sim.studies.conformance import write_log

    lines = list(asked.lines())
    if out is None:
        for line in lines:
            print(dumps(line, separators=(",", ":")))
        return 0
    write_log(lines, out)
    refused = sum("error" in line for line in lines)
    if as_json:
        print_json(
            {
                "reference": asked.reference,
                "num_cases": len(lines),
                "num_refused": refused,
                "log": str(out),
            }
        )
    elif not quiet:
        print(
            f"{path.name}: {len(lines)} pools as {asked.reference} plans them, "
            f"{refused} of them refused; log in {out}"
        )
    return 0


def _who(workload: DecisionWorkload, driver: Driver) -> str:
    """Say whose decisions they are."""
    installed = getattr(driver.scheduler, "installed", None)
    if installed is None:
        return f"{workload.generation} as {workload.reference}"
    return f"vLLM {installed} itself (reference: {workload.reference})"


_ENDINGS = {
    "done": "all requests done",
    "stalled": "stalled: nothing can move any more, as in the reference",
    "no_room": "ended, as the reference does: nobody finds a block or can be evicted",
    "swap_oom": "ended for lack of CPU swap space, as the reference does",
    "died": "ended: the engine dies, as the reference does",
    "cut": "cut off at max_steps",
}


def _compare(paths: tuple[Path, Path], *, quiet: bool, as_json: bool) -> int:
    from json import dumps

    from sim.studies.conformance import first_difference, read_log

    difference = first_difference(*(read_log(path) for path in paths))
    if as_json:
        found = None if difference is None else difference.to_dict()
        print(dumps({"equal": difference is None, "first_difference": found}))
    elif difference is not None and not quiet:
        print(difference.in_words((f"A, {paths[0].name}", f"B, {paths[1].name}")))
    elif not quiet:
        print(f"equal: {paths[0]} and {paths[1]} take the same decisions")
    sys.stdout.flush()
    return 0 if difference is None else EXIT_DIFFERENT
