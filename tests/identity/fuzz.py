"""Random configurations on both paths, as many as asked for.

::

    python -m tests.identity.fuzz 2000            # seeds 0 to 1999
    python -m tests.identity.fuzz 2000 --from 5000 --keep-going
    python -m tests.identity.fuzz 2000 --groups   # models with several KV cache groups
    python -m tests.identity.fuzz 2000 --tiers    # a CPU tier behind the pool
    python -m tests.identity.fuzz 2000 --groups --tiers  # both
    python -m tests.identity.fuzz 2000 --plain    # blocks are counted: nothing cached
    python -m tests.identity.fuzz 2000 --prefixes # one beginning, which steps read once
    python -m tests.identity.fuzz 2000 --fleets   # several engines behind a router
    python -m tests.identity.fuzz 2000 --pairs    # prefill and decode apart
    python -m tests.identity.fuzz 2000 --tiers --of-one  # beside a fleet of one engine
    python -m tests.identity.fuzz --file FILE     # one configuration, as printed
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from sim.config.tables import RunConfig, load_config
from tests.identity.compare import (
    ONLY_THE_END,
    Build,
    Look,
    compare,
    look_of,
    of_groups,
    of_one_engine,
    of_one_group,
    one_by_one,
    report,
)
from tests.identity.random_configs import Case, draw_case, draw_plain_case
from tests.identity.random_fleets import draw_fleet_case, draw_pair_case
from tests.identity.random_groups import draw_group_case
from tests.identity.random_prefixes import draw_prefix_case
from tests.identity.random_tiers import draw_group_tier_case, draw_tier_case
from tests.identity.regimes import regimes_of
from tests.identity.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRESS_EVERY = 100


def main() -> int:
    """Compare, report, and return the exit status: 1 for a difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.identity.fuzz")
    parser.add_argument("number", nargs="?", type=int, default=1000)
    parser.add_argument("--from", dest="first", type=int, default=0, help="first seed")
    parser.add_argument("--file", type=Path, help="one configuration instead")
    parser.add_argument("--groups", action="store_true", help="several groups")
    parser.add_argument("--tiers", action="store_true", help="a tier behind the pool")
    parser.add_argument("--plain", action="store_true", help="blocks counted")
    parser.add_argument("--prefixes", action="store_true", help="one beginning of all")
    parser.add_argument("--fleets", action="store_true", help="several engines")
    parser.add_argument("--pairs", action="store_true", help="prefill and decode apart")
    parser.add_argument("--of-one", action="store_true", help="beside a fleet of one")
    parser.add_argument("--keep-going", action="store_true", help="past a difference")
    asked = parser.parse_args()
    draw, reference = draw_case, of_one_group
    if asked.groups and asked.tiers:
        draw, reference = draw_group_tier_case, of_groups
    elif asked.groups:
        draw, reference = draw_group_case, of_groups
    elif asked.tiers:
        draw, reference = draw_tier_case, one_by_one
    elif asked.plain:
        draw = draw_plain_case
    elif asked.prefixes:
        draw = draw_prefix_case
    elif asked.fleets:
        draw, reference = draw_fleet_case, one_by_one
    elif asked.pairs:
        draw, reference = draw_pair_case, of_groups
    if asked.of_one:
        reference = of_one_engine
    if asked.file:
        return _one(asked.file, reference)
    seeds = range(asked.first, asked.first + asked.number)
    return _many(seeds, asked.keep_going, draw, reference)


def _one(path: Path, reference: Build) -> int:
    look = look_of(path.read_text())
    config = load_config(path)
    compared = compare(config, look, reference)
    if compared.differences:
        print(report(config, look, compared))
        return 1
    print(f"equal; {', '.join(sorted(regimes_of(compared)))}")
    return 0


def _many(
    seeds: range, keep_going: bool, draw: Callable[[int], Case], reference: Build
) -> int:
    counts: Counter[str] = Counter()
    num_done = num_different = 0
    known_kinds: set[str] = set()
    for seed in seeds:
        case = draw(seed)
        if reference is of_one_engine:  # whose clients withdraw nothing
            case = case._replace(look=ONLY_THE_END)
        compared = compare(*case, reference)
        num_done += 1
        counts.update(regimes_of(compared))
        if compared.differences:
            num_different += 1
            print(f"seed {seed}:", *compared.differences, sep="\n- ", flush=True)
            kinds = {line.partition(":")[0] for line in compared.differences}
            if kinds - known_kinds:
                _show_smaller(*case, reference)
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


def _show_smaller(config: RunConfig, look: Look, reference: Build) -> None:
    print("made smaller:", flush=True)
    smaller = shrink(config, look, reference)
    print(report(smaller, look, compare(smaller, look, reference)), flush=True)


def _shares(counts: Counter[str], total: int) -> str:
    return ", ".join(
        f"{name} {100 * number / total:.0f} %" for name, number in counts.most_common()
    )


if __name__ == "__main__":
    sys.exit(main())
