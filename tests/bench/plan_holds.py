"""Whether the rates of a plan are right: fresh seeds, 10 % below and 10 % above.

    python -m tests.bench.plan_holds results/plan_chat [CANDIDATE ...]

For each candidate: in how many of 40 seeds that the plan has not seen they hold.
Right is at least 90 % below and at most 10 % above.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sim.studies.planning.search.tasks import observe, request_of
from sim.studies.sweeps.job import Job
from sim.studies.sweeps.local import LocalExecutor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NUM_SEEDS = 40
FIRST_SEED = 1_000_000
SHARES = (0.9, 1.0, 1.1)


def requests(
    directory: Path, candidate: Mapping[str, Any], share: float
) -> list[dict[str, Any]]:
    """Return trials at a share of a candidate's highest rate, one a fresh seed."""
    plan = json.loads((directory / "plan.json").read_text())
    asked = yaml.safe_load((directory / "plan.yaml").read_text())
    run = yaml.safe_load((directory / candidate["config"]).read_text())
    scale = share * candidate["rate"]["value"] / plan["traffic"]["rate_at_scale_1"]
    return [
        request_of(
            {**run, "seed": FIRST_SEED + i},
            asked["objectives"],
            warmup_share=candidate["warmup_share"],
            rate_scale=scale,
        )
        for i in range(NUM_SEEDS)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line a candidate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("candidates", nargs="*")
    parser.add_argument("--workers", type=int, default=None)
    chosen = parser.parse_args(arguments)
    plan = json.loads((chosen.directory / "plan.json").read_text())
    found = [each for each in plan["candidates"] if "rate" in each]
    with LocalExecutor(chosen.workers) as executor:
        for each in found:
            if chosen.candidates and each["name"] not in chosen.candidates:
                continue
            held = []
            for share in SHARES:
                asked = requests(chosen.directory, each, share)
                jobs = [Job(i, {}, request) for i, request in enumerate(asked)]
                outcomes = list(executor.run(jobs, observe))
                margins = [(o.summary or {})["margin"] for o in outcomes]
                held.append(sum(m is not None and m <= 0 for m in margins))
            said = ", ".join(
                f"{number} of {NUM_SEEDS} at {share:.0%}"
                for number, share in zip(held, SHARES, strict=True)
            )
            print(f"{each['name']} ({each['rate']['value']:.4g}/s): {said}", flush=True)


if __name__ == "__main__":
    main()
