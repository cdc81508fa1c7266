"""``kvsim workload generate``: what a configuration samples, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sim.cli import options
from sim.cli.console import note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import RequestSpec


@options.claiming("out")
def generate(
    spec: Path,
    /,
    *,
    out: Path,
    to: str = "kvsim",
    set_: options.Settings = None,
    seed: options.Seed = None,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> int:
    """Sample the traffic of a configuration and write it, to be replayed anywhere.

    A run of the configuration and a run of the file give the same results.

    Parameters
    ----------
    spec
        YAML configuration: a whole one, or only its workload table (and seed).
    out
        File to write; .gz or .zst at its end compresses it.
    to
        Format: kvsim loses nothing; others of kvsim workload convert lose what they
        cannot hold, which is listed on stderr.
    """
    from sim.cli.workload.convert import writer_of
    from sim.cli.workload.source import warnings_in_a_line
    from sim.config.tables import load_traffic
    from sim.simulation.workload import make_workload
    from workloads.traces.writing import check_writable, write_trace

    writer = writer_of(to, [])
    check_writable(out, overwrite)
    traffic = load_traffic(spec, options.with_seed(set_, seed))
    with warnings_in_a_line():
        requests = make_workload(traffic.workload, traffic.seed).requests()
    losses = writer.losses(requests)
    write_trace(out, requests, writer, overwrite)
    for line in losses:
        note(f"lost: {line}")
    if not quiet:
        users = traffic.workload.max_concurrent_users
        print(f"{_counted(requests)} are in {out} ({to})")
        print(f"run them: --set {_replayed(to, out, users)}")
    return 0


def _counted(requests: Sequence[RequestSpec]) -> str:
    """Return how many requests, and how many sessions they are, in words."""
    from workloads.requests.columns import RequestColumns

    counted = f"{len(requests):,} requests"
    if isinstance(requests, RequestColumns):
        return counted
    sessions = {request.session_id for request in requests} - {None}
    return f"{counted} of {len(sessions):,} sessions" if sessions else counted


def _replayed(kind: str, path: Path, num_users: int | None) -> str:
    """Return the setting that replays the file, with what no file can say."""
    from json import dumps
    from re import fullmatch
    from shlex import quote

    name = str(path) if fullmatch(r"[\w./-]+", str(path)) else dumps(str(path))
    users = "" if num_users is None else f", max_concurrent_users: {num_users}"
    return quote(f"workload={{trace: {{kind: {kind}, path: {name}}}{users}}}")
