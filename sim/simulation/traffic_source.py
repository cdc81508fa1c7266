"""Requests of a file: a trace of any kind, or a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.config.overrides import Overrides, override
from sim.config.tables import load_traffic
from sim.config.workload import WorkloadConfig
from sim.errors import ConfigError
from sim.simulation.workload import make_workload
from workloads.traces import guess_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workloads.spec import RequestSpec

CONFIG_SUFFIXES = (".yaml", ".yml")


def read_requests(
    path: Path | str, overrides: Overrides = (), *, kind: str | None = None
) -> Sequence[RequestSpec]:
    """Return the requests of a trace file, or of a configuration's workload.

    Parameters
    ----------
    path
        A trace, or a configuration (``*.yaml``): a whole one, or its ``workload``
        table with a ``seed``.
    overrides
        Of a trace, arguments of its reader, ``limit``, ``window`` and so on; of a
        configuration, changes as of `sim.config.tables.load_config`.
    kind
        A trace's format; told by its content unless given.

    Returns
    -------
    sequence of RequestSpec
        In order of arrival.

    Raises
    ------
    ConfigError, WorkloadError
        If the file cannot be read, or an override does not fit.

    Examples
    --------
    >>> from kvsim import read_requests
    >>> requests = read_requests("examples/demo.yaml", {"seed": 1})
    >>> len(requests), requests[0].num_prompt_tokens
    (21930, 414)
    """
    path = Path(path)
    if path.suffix.lower() in CONFIG_SUFFIXES:
        if kind is not None:
            raise ConfigError(
                f"kind is for traces; '{path}' is a configuration, which names its own"
            )
        return configured_requests(path, overrides)
    table: dict[str, Any] = {}
    override(table, overrides)
    return recorded_requests(path, kind or guess_kind(path), table)


def configured_requests(path: Path, overrides: Overrides) -> Sequence[RequestSpec]:
    """Return the requests of a configuration's workload; see `read_requests`."""
    traffic = load_traffic(path, overrides)
    return make_workload(traffic.workload, traffic.seed).requests()


def recorded_requests(
    path: Path, kind: str, table: Mapping[str, Any]
) -> Sequence[RequestSpec]:
    """Return the requests of a trace, its format known; see `read_requests`."""
    trace = {"kind": kind, "path": str(path), **table}
    return make_workload(WorkloadConfig(trace=trace), seed=0).requests()
