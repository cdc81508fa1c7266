"""The requests that a command line names: a trace of any kind, or a configuration."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workloads.spec import RequestSpec


def requests_of(
    file: Path,
    kind: str | None,
    settings: Sequence[str],
    skip_bad_lines: bool,
    *,
    quiet: bool = False,
) -> Sequence[RequestSpec]:
    """Return the requests of a trace file or of a configuration's workload.

    Parameters
    ----------
    file
        A trace, or a configuration (``*.yaml``): a whole one, or its ``workload``
        table with a ``seed``.
    kind
        A trace's format; None to tell it by the content, which is said on stderr.
    settings
        ``key=value``: keys of the trace (arguments of its reader, ``limit``, ``window``
        and so on), or keys of the configuration.
    skip_bad_lines
        Leave malformed lines of a trace out, with a warning.
    quiet
        Do not say which format was found.

    Raises
    ------
    ConfigError, WorkloadError
        In one line.

    Notes
    -----
    The workload's warnings are printed on stderr, one line each.
    """
    from sim.simulation.traffic_source import CONFIG_SUFFIXES

    if file.suffix.lower() in CONFIG_SUFFIXES:
        return _configured(file, kind, list(settings), skip_bad_lines)
    return _recorded(file, kind, settings, skip_bad_lines, quiet=quiet)


def _recorded(
    file: Path,
    kind: str | None,
    settings: Sequence[str],
    skip_bad_lines: bool,
    *,
    quiet: bool,
) -> Sequence[RequestSpec]:
    """Return the requests of a trace."""
    from sim.simulation.traffic_source import recorded_requests
    from workloads.traces import guess_kind

    if kind is None:
        kind = guess_kind(file)
        if not quiet:
            print(f"kvsim: '{file}' is read as {kind}", file=sys.stderr)
    given = table_of(settings)
    refuse_named(given, ("kind", "path"), "--set ", "FILE and --from")
    if skip_bad_lines:
        given = {"skip_bad_lines": True, **given}
    with _warnings_in_a_line():
        return recorded_requests(file, kind, given)


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Print a workload's warnings as everything else on stderr is printed."""
    from workloads.errors import WorkloadWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WorkloadWarning)
        try:
            yield
        finally:  # an error may have its reason there
            for warning in caught:
                print(f"kvsim: warning: {warning.message}", file=sys.stderr)


def table_of(settings: Sequence[str]) -> dict[str, Any]:
    """Return the table that ``key.path=value`` assignments spell, values in YAML.

    Raises
    ------
    ConfigError
        If one is no assignment.
    """
    from sim.config.overrides import assign

    table: dict[str, Any] = {}
    for setting in settings:
        assign(table, setting)
    return table


def refuse_named(
    table: dict[str, Any], names: Sequence[str], option: str, instead: str
) -> None:
    """Refuse settings of what the command line says by other means.

    Raises
    ------
    ConfigError
        If the table has one of the names.
    """
    from sim.errors import ConfigError

    for name in names:
        if name in table:
            raise ConfigError(
                f"{option}{name}: the command line says so by {instead}; got "
                f"{table[name]!r}; remove it"
            )


def _configured(
    file: Path, kind: str | None, settings: list[str], skip_bad_lines: bool
) -> Sequence[RequestSpec]:
    """Return the requests of a configuration's workload."""
    from sim.errors import ConfigError
    from sim.simulation.traffic_source import configured_requests

    if kind is not None:
        raise ConfigError(
            f"--from is for traces; '{file}' is a configuration, which names its own"
        )
    if skip_bad_lines:
        settings.append("workload.trace.skip_bad_lines=true")
    with _warnings_in_a_line():
        return configured_requests(file, settings)
