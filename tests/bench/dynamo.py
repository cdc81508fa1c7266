"""Mooncake x8 on eight engines beside Dynamo's own replay of it, with its KV router.

    pip install --no-deps ai-dynamo-runtime==1.6.1
    python -m tests.bench.dynamo

Processor time, in turns: of Dynamo the call that reads the trace and replays it, its
log off; of ours the loop, and the loop with the reading of the trace before it.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from importlib.util import find_spec
from statistics import median
from time import process_time

from tests.bench.loops import MOONCAKE, NUM_MOONCAKE_REQUESTS, Regime, make_loop, timed
from tests.shared import shared

ROUTERS = ("dynamo_kv", "llm_d")
NUM_BLOCKS, NUM_ENGINES, LOAD = 15_587, 8, 8
REPLAY = f"""
import sys, time
import dynamo._core as core

engine = {{
    "backend": "vllm",
    "timing_model": {{"type": "fixed", "prefill_ms": 50.0, "decode_ms": 10.0}},
    "num_gpu_blocks": {NUM_BLOCKS},
    "block_size": 16,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}}
before = time.process_time()
core.run_mocker_trace_replay(
    [sys.argv[1]],
    extra_engine_args={{"engine": engine}},
    router_mode="kv_router",
    router_config=core.KvRouterConfig(),
    num_workers={NUM_ENGINES},
    trace_block_size=512,
    arrival_speedup_ratio={LOAD}.0,
)
print("CPU s", time.process_time() - before)
"""


def replay_s() -> float:
    """Return the processor time of Dynamo's replay, in seconds."""
    told = subprocess.run(
        [sys.executable, "-c", REPLAY, str(shared(MOONCAKE))],
        env=os.environ | {"DYN_LOG": "error"},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(told.stdout.rsplit("CPU s", 1)[1])


def regime_of(router: str) -> Regime:
    """Return the same traffic on engines of ours."""
    pools = f"pools: [{{name: main, replicas: {NUM_ENGINES}}}]"
    settings = (
        f"workload.trace.rate_scale={LOAD}",
        f"engine.num_gpu_blocks_override={NUM_BLOCKS}",
        "engine.max_num_batched_tokens=8192",
        f"fleet={{{pools}, router: {{kind: {router}}}}}",
    )
    return Regime(
        "mooncake_conversation.yaml", MOONCAKE, settings, NUM_MOONCAKE_REQUESTS
    )


def own_s(router: str) -> tuple[float, float]:
    """Return the processor time of the loop, and with what comes before it."""
    before = process_time()
    loop = make_loop(regime_of(router).config(), "fast")
    made_s = process_time() - before
    loop_s = timed(loop.run).cpu
    del loop
    gc.collect()
    return loop_s, made_s + loop_s


def main() -> None:
    parser = argparse.ArgumentParser(description="Time Mooncake beside Dynamo.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    if find_spec("dynamo") is None:
        sys.exit("Dynamo is missing: pip install --no-deps ai-dynamo-runtime==1.6.1")
    print("| router | Dynamo, CPU s | loop | times | with the trace | times |")
    print("|---|---|---|---|---|---|", flush=True)
    for router in ROUTERS:
        theirs, loops, wholes = [], [], []
        for _ in range(rounds):
            theirs.append(replay_s())
            loop_s, whole_s = own_s(router)
            loops.append(loop_s)
            wholes.append(whole_s)
        own = [
            f"{median(each):.2f} | {median(theirs) / median(each):.1f}, least of each "
            f"{min(theirs) / min(each):.1f}"
            for each in (loops, wholes)
        ]
        print(f"| {router} | {median(theirs):.2f} | {' | '.join(own)} |", flush=True)


if __name__ == "__main__":
    main()
