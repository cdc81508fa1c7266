"""The configurations of a plan, ready for ``kvsim run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.config.tables import parse_config
from sim.studies.planning.report import config_path
from sim.studies.planning.serve_command import not_said, serve_command
from sim.studies.planning.trial import split_table, with_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.studies.planning.outcome import CandidatePlan
    from sim.studies.planning.planner import Planner


def configurations(planner: Planner, plans: Sequence[CandidatePlan]) -> dict[str, str]:
    """Return files by their path: YAML that ``kvsim run`` takes as it is.

    One engine at the highest rate that it holds and, where the plan's traffic takes
    several, the first replica of the fleet.
    """
    files = {}
    for each in plans:
        if each.found is None:
            continue
        run = with_scale(each.candidate.run, each.found.rate.value / planner.base_rate)
        path = config_path(each)
        rate = f"at {each.found.rate.value:.4g} requests/s, the highest rate it holds"
        files[path] = _text(each, run, rate)
        if each.fleet is not None and each.fleet.num_replicas > 1:
            number = each.fleet.num_replicas
            split = split_table(number, 0, planner.plan.replicas.by)
            fleet = dict(each.candidate.run)
            fleet["workload"] = {**fleet["workload"], "split": split}
            said = (
                f"as replica 0 of {number} under {planner.target_rate:.4g} requests/s"
            )
            files[path.replace(".yaml", f".replica_of_{number}.yaml")] = _text(
                each, fleet, said
            )
    return files


def _text(each: CandidatePlan, run: dict[str, Any], said: str) -> str:
    config = parse_config(run)
    assert each.candidate.capacity is not None
    lines = [
        f"# {each.candidate.name} {said}.",
        "# To serve it:",
        f"#   {serve_command(config.engine, each.candidate.capacity)}",
    ]
    if missing := not_said(config.engine):
        lines.append(f"# The command does not say: {', '.join(missing)}")
    return "\n".join([*lines, config.to_yaml()])
