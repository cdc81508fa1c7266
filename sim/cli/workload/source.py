"""The requests that a command line names: a trace of any kind, or a configuration."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.cli.console import note, warn

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

    Without a `kind`, a trace's format is told by its content, and said on stderr.
    `settings` are ``key=value``: of the trace, or of the configuration.
    """
    from sim.errors import ConfigError
    from sim.simulation import workload
    from workloads.traces import guess_kind

    if file.suffix.lower() in workload.CONFIG_SUFFIXES:
        if kind is not None:
            raise ConfigError(
                f"--from is for traces; '{file}' is a configuration, which names its "
                f"own"
            )
        if skip_bad_lines:
            settings = [*settings, "workload.trace.skip_bad_lines=true"]
        with warnings_in_a_line():
            return workload.configured_requests(file, list(settings))
    if kind is None:
        kind = guess_kind(file)
        if not quiet:
            note(f"'{file}' is read as {kind}")
    given = table_of(settings)
    refuse_named(given, ("kind", "path"), "--set ", "FILE and --from")
    if skip_bad_lines:
        given = {"skip_bad_lines": True, **given}
    with warnings_in_a_line():
        return workload.recorded_requests(file, kind, given)


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print a workload's warnings as everything else on stderr is printed."""
    from workloads.errors import WorkloadWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WorkloadWarning)
        try:
            yield
        finally:  # an error may have its reason there
            warn(warning.message for warning in caught)


def table_of(settings: Sequence[str]) -> dict[str, Any]:
    """Return the table that ``key.path=value`` assignments spell, values in YAML."""
    from sim.config.files import assign

    table: dict[str, Any] = {}
    for setting in settings:
        assign(table, setting)
    return table


def refuse_named(
    table: dict[str, Any], names: Sequence[str], option: str, instead: str
) -> None:
    """Refuse settings of what the command line says by other means."""
    from sim.errors import ConfigError

    for name in names:
        if name in table:
            raise ConfigError(
                f"{option}{name}: the command line says so by {instead}; got "
                f"{table[name]!r}; remove it"
            )
