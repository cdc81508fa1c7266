"""``kvsim workload describe``: what traffic is like."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.cli import options
from sim.cli.console import print_json

if TYPE_CHECKING:
    from sim.results.output import ResultFiles
    from workloads.analysis import Description


@options.claiming("out")
def describe(
    file: Path,
    /,
    *,
    from_: options.TraceFormat = None,
    set_: options.TraceSettings = None,
    skip_bad_lines: options.SkipBadLines = False,
    block_size: int = 16,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> int:
    """Describe traffic: rates, burstiness, lengths, prefix sharing, sessions.

    Prefix sharing is what an infinite cache would find of each prompt in earlier
    prompts, in order of arrival; generated text is left out. What a cache of any
    size finds: kvsim workload curve.

    Parameters
    ----------
    file
        A trace of any kind, or a configuration (YAML) whose workload is taken.
    block_size
        Tokens of the full blocks by which sharing is counted; a trace that is cut
        into pieces of its own is also counted by those.
    out
        Folder for description.json and figures.
    """
    from sim.cli.workload.source import requests_of
    from sim.results.output import check_output
    from workloads.analysis import describe as description_of

    if out is not None:
        check_output(out, overwrite=overwrite, files=_files())
    silent = quiet or json
    requests = requests_of(file, from_, set_ or [], skip_bad_lines, quiet=silent)
    found = description_of(requests, block_size)
    whole = {"file": file.name} | found.to_dict()
    if out is not None:
        _write(file.name, found, whole, out, overwrite=overwrite)
    if json:
        print_json(whole)
    elif not quiet:
        from sim.cli.output.workload import print_description

        print_description(file.name, found)
        if out is not None:
            print(f"description.json and figures are in {out}")
    return 0


def _files() -> ResultFiles:
    from sim.results.output import ResultFiles

    names = frozenset({"description.json", "figures"})
    return ResultFiles("kvsim workload describe", "description.json", names)


def _write(
    title: str,
    found: Description,
    whole: dict[str, Any],
    out: Path,
    *,
    overwrite: bool,
) -> None:
    """Write the folder, as a whole or not at all."""
    from sim.results.output import output_directory, write_json
    from sim.views.plots.studies.traffic import draw_traffic

    with output_directory(out, overwrite=overwrite, files=_files()) as partial:
        write_json(partial / "description.json", whole)
        draw_traffic(title, found, partial / "figures")
