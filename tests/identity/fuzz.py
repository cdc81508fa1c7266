"""Random configurations on both paths, as many as asked for.

::

    python -m tests.identity.fuzz 2000            # seeds 0 to 1999
    python -m tests.identity.fuzz 2000 --from 5000 --keep-going
    python -m tests.identity.fuzz --file FILE     # one configuration, as printed
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from sim.config.tables import RunConfig, load_config
from tests.identity.compare import Look, compare, look_of, report
from tests.identity.random_configs import draw_case
from tests.identity.regimes import regimes_of
from tests.identity.shrink import shrink

PROGRESS_EVERY = 100


def main() -> int:
    """Compare, report, and return the exit status: 1 for a difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.identity.fuzz")
    parser.add_argument("number", nargs="?", type=int, default=1000)
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed")
    parser.add_argument("--file", type=Path, help="one configuration instead")
    parser.add_argument("--keep-going", action="store_true", help="past a difference")
    asked = parser.parse_args()
    if asked.file:
        return _one(asked.file)
    return _many(range(asked.first, asked.first + asked.number), asked.keep_going)


def _one(path: Path) -> int:
    look = look_of(path.read_text())
    config = load_config(path)
    compared = compare(config, look)
    if compared.differences:
        print(report(config, look, compared))
        return 1
    print(f"equal; {', '.join(sorted(regimes_of(compared)))}")
    return 0


def _many(seeds: range, keep_going: bool) -> int:
    counts: Counter[str] = Counter()
    num_done = num_different = 0
    known_kinds: set[str] = set()
    for seed in seeds:
        case = draw_case(seed)
        compared = compare(*case)
        num_done += 1
        counts.update(regimes_of(compared))
        if compared.differences:
            num_different += 1
            print(f"seed {seed}:", *compared.differences, sep="\n- ", flush=True)
            kinds = {line.partition(":")[0] for line in compared.differences}
            if kinds - known_kinds:
                _show_smaller(*case)
            known_kinds |= kinds
            if not keep_going:
                break
        elif num_done % PROGRESS_EVERY == 0:
            print(
                f"{num_done} of {len(seeds)}: {_shares(counts, num_done)}", flush=True
            )
    print(
        f"{num_done} configurations, {num_different} on which the paths differ; "
        f"{_shares(counts, num_done)}"
    )
    return bool(num_different)


def _show_smaller(config: RunConfig, look: Look) -> None:
    print("made smaller:", flush=True)
    smaller = shrink(config, look)
    print(report(smaller, look, compare(smaller, look)), flush=True)


def _shares(counts: Counter[str], total: int) -> str:
    return ", ".join(
        f"{name} {100 * number / total:.0f} %" for name, number in counts.most_common()
    )


if __name__ == "__main__":
    sys.exit(main())
