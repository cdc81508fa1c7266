"""``kvsim export``: results in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sim.cli.options import Overwrite, Quiet

if TYPE_CHECKING:
    from sim.views.exports.chrome import Window


def export(
    directory: Path,
    /,
    *,
    to: Literal["chrome", "bench", "prometheus", "csv"],
    out: Path | None = None,
    overwrite: Overwrite = False,
    begin: float | None = None,
    end: float | None = None,
    quiet: Quiet = False,
) -> int:
    """Write the results of a run in a format that other tools open.

    Parameters
    ----------
    directory
        Results of ``kvsim run``.
    to
        "chrome": a trace of the schedule for ui.perfetto.dev; "bench": the JSON of
        vllm bench serve; "prometheus": counters and histograms under vLLM's names;
        "csv": a folder with the tables.
    out
        Where to; a trace whose name ends in .gz is compressed. Default: trace.json,
        bench.json, metrics.prom or csv, in exports of the results.
    begin
        Of "chrome": the first simulated second to be written.
    end
        Of "chrome": the simulated second to end before.
    """
    from sim.views.exports.formats import export as write

    window = _window(to, begin, end)
    path, lines = write(directory, to, out, window, overwrite=overwrite)
    if not quiet:
        print(f"{path}")
        for line in lines:
            print(f"  {line}")
    return 0


def _window(to: str, begin: float | None, end: float | None) -> Window | None:
    from math import inf

    from sim.errors import ConfigError
    from sim.views.exports.chrome import Window
    from sim.views.exports.formats import FORMATS

    if begin is None and end is None:
        return None
    if not FORMATS[to].has_window:
        raise ConfigError(
            f"--begin and --end are of --to chrome, got --to {to}; leave them out"
        )
    first, last = begin or 0.0, inf if end is None else end
    if not 0.0 <= first < last:
        raise ConfigError(
            f"--begin and --end are seconds with 0 <= begin < end, got {first:g} and "
            f"{last:g}"
        )
    return Window(first, last)
