"""``kvsim decisions``: the schedule of a workload, step by step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="")]

EXIT_DIFFERENT = 1


def decisions(
    workload: Path | None = None,
    /,
    *,
    out: Path | None = None,
    diff: Annotated[tuple[Path, Path] | None, Parameter(negative="")] = None,
    check: Flag = False,
    overwrite: Flag = False,
    quiet: Flag = False,
    json: Flag = False,
) -> int:
    """Write the schedule of a workload step by step, or show where two logs part.

    Parameters
    ----------
    workload
        Workload file (JSON): requests by step, and the engine. Its "reference", such
        as "vllm 0.33.0" or "transformers 5.17.0", picks the generation.
    out
        Where to write the log, a JSON object a step; compressed if it ends in .gz.
        Default: standard output.
    diff
        Two logs, A B: show their first difference in words instead. Exit status 1 if
        they differ.
    check
        Prove the scheduler's invariants after every call.
    overwrite
        Replace an existing file.
    quiet
        Print nothing but errors.
    json
        Print the result, or the difference, as JSON.
    """
    from sim.errors import ConfigError

    if diff is not None:
        if workload is not None or out is not None:
            raise ConfigError(
                "--diff compares two logs that exist; give it alone, without a "
                "workload and without --out"
            )
        return _compare(diff, quiet=quiet, as_json=json)
    if workload is None:
        raise ConfigError("give a workload file and --out LOG.jsonl.gz, or --diff A B")
    if out is not None and out.exists():
        if not overwrite:
            raise ConfigError(f"{out} exists; name another --out, or give --overwrite")
        if workload.exists() and out.samefile(workload):
            raise ConfigError(f"{out} is the workload itself; name another --out")
    return _write(workload, out, check=check, quiet=quiet, as_json=json)


def _write(
    path: Path, out: Path | None, *, check: bool, quiet: bool, as_json: bool
) -> int:
    from json import dumps

    from sim.decisions import DecisionDriver, load_workload, write_log
    from sim.errors import ConfigError, SchedulerError

    workload = load_workload(path)
    try:
        driver = DecisionDriver(workload, check=check)
    except SchedulerError as error:
        raise ConfigError(f"{path}: config: {error}") from error
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
    if as_json:
        print(dumps(result, indent=2))
    elif not quiet:
        print(
            f"{workload.name}: {workload.generation} as {workload.reference}, "
            f"{len(workload.requests):,} requests, {driver.num_steps:,} steps, "
            f"{driver.num_preemptions:,} preemptions; {_ENDINGS[driver.ending]}; "
            f"log in {out}"
        )
    return 0


_ENDINGS = {
    "done": "all requests done",
    "stalled": "stalled: nothing can move any more, as in the reference",
    "no_room": "ended, as the reference does: nobody finds a block or can be evicted",
    "swap_oom": "ended for lack of CPU swap space, as the reference does",
}


def _compare(paths: tuple[Path, Path], *, quiet: bool, as_json: bool) -> int:
    from json import dumps

    from sim.decisions import first_difference, read_log

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
