"""A sweep on a cluster of two nodes, one of which is killed: run by `test_sweep_ray`.

In a process of its own, as Ray leaves threads, handlers and warnings behind.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
from ray.cluster_utils import Cluster

from sim.cli.main import run as kvsim
from sim.studies.sweeps.expand import Sweep
from sim.studies.sweeps.local import SerialExecutor
from sim.studies.sweeps.ray_cluster import RayExecutor
from sim.studies.sweeps.spec import load_sweep
from sim.studies.sweeps.supplies import gather
from sim.studies.sweeps.task import run_summary
from tests.sim.commands import TRACE, files
from tests.sim.studies.sweeps.files import CRASHER, by_index, tiny, write_sweep

HEAD = {"num_cpus": 1, "include_dashboard": False}

SLOW = """
import time
from sim.costs.constant import ConstantCost

class Slow(ConstantCost):
    def describe(self):
        time.sleep(0.15)
        return super().describe()
"""


def sweep_with_every_ending(directory: Path) -> Path:
    """36 runs that take their time, one that crashes, one that does not fit."""
    (directory / "crash.py").write_text(CRASHER)
    (directory / "slow.py").write_text(SLOW)
    base = tiny() | {"cost": {"kind": f"{directory / 'slow.py'}:Slow", "step_s": 0.01}}
    listed: list[dict[str, Any]] = [{"seed": seed} for seed in range(36)]
    unfit: dict[str, Any] = {"engine.num_gpu_blocks_override": None}
    unfit |= {"engine.model": "moonshotai/Kimi-Dev-72B", "engine.gpu": "l40s"}
    crash = {"cost": {"kind": f"{directory / 'crash.py'}:Crash"}}
    listed.insert(10, {"seed": 998} | crash)
    listed.insert(20, {"seed": 999} | unfit)
    return write_sweep(directory, base=base, list=listed)


def run_and_kill(cluster: Cluster, path: Path, out: Path) -> int:
    """Run a sweep on the cluster; kill a node when some of it is done."""
    node = cluster.add_node(num_cpus=1)
    known: list[int] = []

    def kill_a_node() -> None:
        while not list((out / "runs").glob("part-*.parquet")):
            time.sleep(0.05)
        known.append(len(pd.read_parquet(out / "runs")))
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=kill_a_node)
    thread.start()
    options = ["--address", cluster.address, "--quiet", "--out", str(out)]
    assert kvsim(["sweep", str(path), *options]) == 0
    thread.join()
    return known[0]


def runs_without_their_files(cluster: Cluster, directory: Path) -> bool:
    """Whether runs get what they need from where the sweep was started."""
    (directory / "trace.csv").write_text(TRACE)
    (directory / "mine.py").write_text(SLOW)
    base = tiny(num_gpu_blocks_override=100, max_model_len=1024)
    base["workload"] = {"trace": {"kind": "azure", "path": "trace.csv"}}
    base["cost"] = {"kind": "mine.py:Slow", "step_s": 0.01}
    path = write_sweep(directory, base=base, repeats=4)
    jobs = list(Sweep(load_sweep(path)).jobs())
    with SerialExecutor() as serial:
        expected = by_index(serial.run(jobs, run_summary))
    supplies = gather(jobs, at_least=1)
    for name in ("trace.csv", "mine.py"):
        (directory / name).unlink()
    with RayExecutor(cluster.address, supplies) as executor:
        found = by_index(executor.run(jobs, run_summary))
    return found == expected and {status for status, *_ in found.values()} == {"done"}


def main(directory: Path) -> None:
    """Print what was found as JSON."""
    path = sweep_with_every_ending(directory)
    local, ray = directory / "local", directory / "ray"
    assert kvsim(["sweep", str(path), "--out", str(local), "--quiet"]) == 0
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        num_known = run_and_kill(cluster, path, ray)
        facts = {
            "killed_after": num_known,
            "statuses": pd.read_parquet(ray / "runs")["status"]
            .value_counts()
            .to_dict(),
            "same": files(ray)["runs/runs.parquet"]
            == files(local)["runs/runs.parquet"],
            "engine": json.loads((ray / "run.json").read_text())["engine"],
            "shipped": runs_without_their_files(cluster, directory),
        }
    finally:
        cluster.shutdown()
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
