"""What ``kvsim sweep`` shows: a progress bar, and what came of the runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sim.cli.console import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.studies.sweeps.session import Tally


@contextmanager
def sweep_progress(
    num_runs: int, *, shown: bool
) -> Iterator[Callable[[Tally], None] | None]:
    """Show runs ended, those that failed and the time left."""
    with progress_bar(num_runs, "runs", shown=shown) as show:
        if show is None:
            yield None
            return

        def update(tally: Tally) -> None:
            failed = f"{tally.num_failed:,} failed" if tally.num_failed else ""
            show(tally.num_ended, failed)

        yield update


def print_tally(tally: Tally, dataset: str, num_workers: int, wall_s: float) -> None:
    counts = ", ".join(f"{n:,} {status}" for status, n in sorted(tally.counts.items()))
    print(f"runs     {tally.num_ended:,} of {tally.num_runs:,}: {counts}")
    rate = f"; {tally.run_wall_s:.1f} s of runs" if tally.run_wall_s else ""
    print(f"took     {wall_s:.1f} s on {num_workers:,} workers{rate}")
    print(f"dataset  {dataset}, a row each")
