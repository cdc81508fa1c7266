"""Plans on clusters of Ray that lose nodes: run by `test_ray_nodes`.

In a process of its own, as Ray leaves threads, handlers and warnings behind; the plans
are commands of their own, which Ray ends where the head dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.cluster_utils import Cluster

from tests.faults.commands import finish, written_files
from tests.shared import ROOT
from tests.sim.studies.planning.plans import small, written
from tests.sim.studies.sweeps.on_ray import HEAD, SLOW

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = ("plan", "plan.yaml", "--quiet")
COMMAND = """
from sim.studies.sweeps import ray_cluster
from sim.cli.main import main
ray_cluster._LOST_S = 2.0
main()
"""


def losing(
    place: Path, name: str, head: dict[str, Any], lose: Callable[[Cluster, Any], None]
) -> dict[str, Any]:
    """Run a plan on a cluster of two nodes, one of which goes when some is done."""
    out = place / name
    answers = place / f"{name}.answers.jsonl"
    cluster = Cluster(initialize_head=True, head_node_args=HEAD | head)
    try:
        node = cluster.add_node(num_cpus=1)
        words = [*PLAN, "--address", cluster.address, "--out", name]
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        while process.poll() is None and not answers.exists():
            time.sleep(0.02)
        lose(cluster, node)
        _, err = process.communicate()
    finally:
        cluster.shutdown()
    found = {"status": process.returncode, "wrote": out.exists()}
    told = [line for line in err.splitlines() if "runs the file" not in line]
    found["told"] = " ".join(told)
    num_known = answers.read_text("utf-8").count("\n") if answers.exists() else 0
    if not out.exists():
        finish([*PLAN, "--resume", "--workers", "1", "--out", name], place)
    return found | {"left": num_known, "output": written_files(out)}


def main(place: Path) -> None:
    """Print what was found as JSON."""
    (place / "slow.py").write_text(SLOW)
    cost = {"kind": f"{place / 'slow.py'}:Slow", "step_s": 0.01}
    written(small(cost=cost), place)
    whole = finish([*PLAN, "--workers", "1", "--out", "local"], place)

    def lose_node(cluster: Cluster, node: Any) -> None:
        cluster.remove_node(node, allow_graceful=False)

    def lose_head(cluster: Cluster, node: Any) -> None:
        del node
        cluster.remove_node(cluster.head_node, allow_graceful=False)

    facts = {
        "a node": losing(place, "one", {}, lose_node),
        "all processors": losing(place, "all", {"num_cpus": 0}, lose_node),
        "the head": losing(place, "head", {}, lose_head),
    }
    for found in facts.values():
        found["same"] = found.pop("output") == whole
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
