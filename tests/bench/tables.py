"""Results of `make bench`, as the Markdown tables of README.md.

    python -m tests.bench.tables results/bench.json

The file is pytest-benchmark's (``--benchmark-json``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench.loops import PATHS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Benchmarks = list[dict[str, Any]]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    heads = list(header)
    lines = [f"| {' | '.join(line)} |" for line in (heads, *rows)]
    lines.insert(1, "|---" * len(heads) + "|")
    return "\n".join(lines)


def whole_runs(benchmarks: Benchmarks) -> str:
    """Rates of each path, and ratios within the same rounds."""
    ratios = [f"fast / {path}" for path in PATHS[1:]]
    header = ("loop", "steps", "preemptions", *PATHS, *ratios, "fast, wall")
    return table(header, map(whole_run, benchmarks))


def whole_run(benchmark: dict[str, Any]) -> Iterator[str]:
    seen = benchmark["extra_info"]
    yield benchmark["params"]["regime"]
    yield f"{seen['num_steps']:,}"
    yield f"{seen['num_preemptions']:,}"
    for path in PATHS:
        rate = seen.get(f"{path} requests/s")
        yield "" if rate is None else f"{rate:,.0f}"
    for path in PATHS[1:]:
        ratio = seen.get(f"fast / {path}")
        yield "" if ratio is None else f"{ratio:.1f}"
    yield f"{seen['fast requests/s, wall']:,.0f}"


def steps(benchmarks: Benchmarks) -> str:
    """Medians by path and caching (rows) and by batch (columns)."""
    cells: dict[str, dict[int, str]] = {}
    for benchmark in benchmarks:
        params = benchmark["params"]
        name = params["path"] + (", prefix caching" if params["caching"] else "")
        num_steps = benchmark["extra_info"]["num_steps"]
        median_us = benchmark["stats"]["median"] / num_steps * 1e6
        cells.setdefault(name, {})[params["num_running"]] = f"{median_us:.2f} µs"
    batches = sorted({batch for row in cells.values() for batch in row})
    return table(
        ("a step of", *(f"{batch} decodes" for batch in batches)),
        ([name, *(row[batch] for batch in batches)] for name, row in cells.items()),
    )


def micros(benchmarks: Benchmarks) -> str:
    """Medians of single operations."""
    return table(
        ("operation", "case", "median"),
        (
            (
                benchmark["group"].removeprefix("micro: "),
                case(benchmark["name"]),
                time(benchmark["stats"]["median"]),
            )
            for benchmark in benchmarks
        ),
    )


def case(name: str) -> str:
    """Return a benchmark's parameters or, if it has none, its name."""
    test, _, params = name.partition("[")
    return params.rstrip("]") or test.removeprefix("test_").replace("_", " ")


def time(seconds: float) -> str:
    """Return seconds in a unit that suits them."""
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.2f} µs"


def main() -> None:
    benchmarks = json.loads(Path(sys.argv[1]).read_text())["benchmarks"]
    for kind, make in (("whole run", whole_runs), ("step", steps), ("micro", micros)):
        found = [each for each in benchmarks if each["group"].startswith(kind)]
        if found:
            print(f"\n{make(found)}")


if __name__ == "__main__":
    main()
