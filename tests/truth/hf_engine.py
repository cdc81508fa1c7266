"""A run of the real continuous batching of transformers, timed as a client would.

The engine is that of `tests.conformance.hf_reference`: the release's own scheduler,
caches, eviction and forward pass, on a CPU with a tiny model of random weights. Every
step ends when its tokens are known, so its end is when they were given.

``python -m tests.truth.hf_engine FOLDER`` writes a run measured in seconds, ready for
``kvsim validate FOLDER/engine.yaml --measured FOLDER/requests.csv --timeseries
FOLDER/timeseries.csv --fit cost.base_s=0.0001:0.02 --fit cost.decode_s=0:0.002``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from sim.config.tables import parse_config
from sim.simulation.workload import make_workload
from tests.conformance.hf_cases import as_workload
from tests.conformance.hf_reference import Reference

if TYPE_CHECKING:
    from sim.config.tables import RunConfig
    from sim.scheduler.log.lines import Line
    from sim.studies.conformance.workload import DecisionWorkload

NUM_BLOCKS, NUM_CPU_BLOCKS, BLOCK_SIZE = 120, 24, 16
_GIB_A_BLOCK = 2 / 1024
"""Of Llama-3.1-8B, whose name stands for the tiny model: only sizes of pools matter."""


def config(*, num_blocks: int = NUM_BLOCKS, num_requests: int = 100) -> dict[str, Any]:
    """A hundred requests at once, in a cache that holds about twenty of them."""
    lengths = {"kind": "lognormal", "sigma": 0.5}
    return {
        "workload": {
            "synthetic": {
                "num_requests": num_requests,
                "arrivals": {"kind": "constant", "rate": 1e6},
                "prompt_tokens": lengths | {"median": 20, "max": 150},
                "output_tokens": lengths | {"median": 80, "max": 400},
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h100_sxm",
            "scheduler": "hf_fifo",
            "num_gpu_blocks_override": num_blocks,
            "block_size": BLOCK_SIZE,
            "swap_space": NUM_CPU_BLOCKS * _GIB_A_BLOCK,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 64,
            "max_model_len": 512,
            "enable_prefix_caching": False,
            "safety_margin": 0.0,
            "max_blocks_per_request": 0,
        },
        "cost": {"kind": "linear", "base_s": 0.005},
        "seed": 1,
    }


def decision_workload(config: RunConfig) -> DecisionWorkload:
    """Return the workload of a configuration, all of it there at step 0."""
    engine = config.engine
    specs = make_workload(config.workload, config.seed).requests()
    facts = {
        "block_size": engine.block_size,
        "num_gpu_blocks": engine.num_gpu_blocks_override,
        "num_cpu_blocks": NUM_CPU_BLOCKS,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "max_num_seqs": engine.max_num_seqs,
        "safety_margin": engine.safety_margin,
        "max_blocks_per_request": engine.max_blocks_per_request,
        "enable_prefix_caching": False,
    }
    requests = [
        {
            "id": f"r{spec.request_id}",
            "arrival_step": 0,
            "prompt": [[10 + spec.request_id, spec.num_prompt_tokens]],
            "output_len": spec.num_output_tokens,
            "out_seed": 7,
        }
        for spec in specs
    ]
    return as_workload(facts, requests, "timed")


class TimedReference(Reference):
    """The real engine with a watch beside it.

    Parameters
    ----------
    workload
        Of `decision_workload`.
    in_steps
        Whether the watch counts steps in place of seconds: what it says is then a
        matter of decisions alone, and the same each time.
    """

    def __init__(self, workload: DecisionWorkload, *, in_steps: bool) -> None:
        super().__init__(workload)
        self._in_steps = in_steps
        self._begin_s = 0.0
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._num_preemptions = dict.fromkeys(self._lengths, 0)
        self.states: list[dict[str, float]] = []

    def measure(self) -> None:
        """Run to the end."""
        self._begin_s = time.perf_counter()
        for _ in self.lines():
            pass

    def _now(self) -> float:
        if self._in_steps:
            return float(len(self.states))
        return time.perf_counter() - self._begin_s

    def _step(self) -> Line:
        begin = self._now()
        line = super()._step()
        num_blocks: int = self.workload.config["num_gpu_blocks"]
        state = {
            "running": len(line["running"]),
            "waiting": len(line["waiting"]),
            "swapped": len(line["swapped"]),
            "kv_cache_pct": 100.0 * (1.0 - line["free"][0] / num_blocks),
        }
        self.states.append(state)
        end = self._now()
        state["t"] = 0.5 * (begin + end)
        for name, *_ in line["sched"]:
            if self._num_generated[name]:
                self._first.setdefault(name, end)
                self._last[name] = end
        for name, _ in line.get("preempt", ()):
            self._num_preemptions[name] += 1
        return line

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write ``requests.csv`` and ``timeseries.csv``."""
        rows = [
            {
                "arrival_s": 0.0,
                "first_token_s": self._first[raw.id],
                "last_token_s": self._last[raw.id],
                "prompt_tokens": raw.num_prompt_tokens,
                "output_tokens": raw.output_len,
                "preemptions": self._num_preemptions[raw.id],
            }
            for raw in self.workload.requests
        ]
        requests, series = folder / "requests.csv", folder / "timeseries.csv"
        pd.DataFrame(rows).to_csv(requests, index=False)
        pd.DataFrame(self.states).to_csv(series, index=False)
        return requests, series


def main() -> None:
    """Measure in seconds, after a warm-up; write configuration and measurement."""
    import torch  # noqa: PLC0415  (not where the module is only collected)

    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    small = decision_workload(parse_config(config(num_requests=4)))
    TimedReference(small, in_steps=False).measure()
    engine = TimedReference(decision_workload(parse_config(config())), in_steps=False)
    engine.measure()
    engine.write(folder)
    (folder / "engine.yaml").write_text(yaml.safe_dump(config()), encoding="utf-8")


if __name__ == "__main__":
    main()
