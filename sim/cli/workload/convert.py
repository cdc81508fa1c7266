"""``kvsim workload convert``: a trace in another format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from workloads.traces import TraceWriter

_OUT = "out."
"""Start of the settings that are the writer's."""

_UNWRITTEN = {
    "sharegpt": "its words would have to be made up; kvsim and mooncake keep who "
    "shares text with whom"
}
"""Kinds that are read only, and why."""


def convert(
    file: Path,
    /,
    *,
    to: str,
    out: Path,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    set_: Annotated[
        list[str] | None,
        Parameter(name="--set", negative="", allow_leading_hyphen=False),
    ] = None,
    skip_bad_lines: Annotated[bool, Parameter(negative="")] = False,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Write a trace, or the traffic of a configuration, in another format.

    What the format cannot hold is listed on stderr, a line each.

    Parameters
    ----------
    file
        Trace, plain or compressed (gzip, zstd), or a configuration (*.yaml).
    to
        azure, burstgpt, kvsim (loses nothing), llmservingsim, mooncake, vidur or
        vllm_bench.
    out
        File to write; .gz or .zst at its end compresses it.
    from_
        Format of the trace, those of --to or sharegpt; default: told by the content.
    set_
        key=value: a key of the trace, such as limit=1000, or as out.key=value one of
        the format that is written, such as out.block_tokens=16; may be given several
        times.
    skip_bad_lines
        Leave malformed lines out and count them, instead of refusing the first.
    overwrite
        Replace a file that exists.
    quiet
        Print nothing but warnings and errors.
    """
    from sim.cli.workload.source import requests_of
    from workloads.traces.writing import check_writable, write_trace

    settings = list(set_ or [])
    read_settings = [each for each in settings if not each.startswith(_OUT)]
    writer = writer_of(
        to, [each.removeprefix(_OUT) for each in settings if each.startswith(_OUT)]
    )
    check_writable(out, overwrite)
    requests = requests_of(file, from_, read_settings, skip_bad_lines, quiet=quiet)
    losses = writer.losses(requests)
    write_trace(out, requests, writer, overwrite)
    for line in losses:
        print(f"kvsim: lost: {line}", file=sys.stderr)
    if not quiet:
        print(f"{len(requests):,} requests are in {out} ({to})")
    return 0


def writer_of(kind: str, settings: list[str]) -> TraceWriter:
    """Return the writer of a format.

    Parameters
    ----------
    kind
        Its name.
    settings
        ``key=value``: arguments of the writer.

    Raises
    ------
    ConfigError
        If there is no such writer, or a setting is not one of its.
    """
    from sim.cli.workload.source import refuse_named, table_of
    from sim.config.plug import build
    from sim.errors import ConfigError
    from workloads.traces import TRACE_WRITERS

    if kind in _UNWRITTEN:
        raise ConfigError(f"--to: '{kind}' is not written: {_UNWRITTEN[kind]}")
    given = table_of(settings)
    refuse_named(given, ("kind",), "--set out.", "--to")
    writer: TraceWriter = build(TRACE_WRITERS, {"kind": kind} | given, "--to")
    return writer
