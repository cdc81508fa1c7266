"""``kvsim workload convert``: a trace in another format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sim.cli import options
from sim.cli.console import note

if TYPE_CHECKING:
    from workloads.traces import TraceWriter

_OUT = "out."
"""Start of the settings that are the writer's."""

_UNWRITTEN = {
    "sharegpt": "its words would have to be made up; kvsim and mooncake keep who "
    "shares text with whom"
}
"""Kinds that are read only, and why."""


@options.claiming("out")
def convert(
    file: Path,
    /,
    *,
    to: str,
    out: Path,
    from_: options.TraceFormat = None,
    set_: options.Assignments = None,
    skip_bad_lines: options.SkipBadLines = False,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
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
    set_
        key=value: a key of the trace, such as limit=1000, or as out.key=value one of
        the format that is written, such as out.block_tokens=16; may be given several
        times.
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
        note(f"lost: {line}")
    if not quiet:
        print(f"{len(requests):,} requests are in {out} ({to})")
    return 0


def writer_of(kind: str, settings: list[str]) -> TraceWriter:
    """Return the writer of a format; `settings` are its arguments, ``key=value``."""
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
