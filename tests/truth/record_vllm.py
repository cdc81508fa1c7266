"""Drive an installed vLLM with arrivals from a file, and write what it did.

On a machine with a GPU and vLLM (0.26 was recorded; the names of its internals that are
read here are those of 0.24 to 0.33)::

    python -m tests.truth.record_vllm MODEL_FOLDER traffic.csv measured/h200

Three files come of it: facts (JSON), requests and steps (Parquet). The model's folder
needs a config.json alone: weights are random, prompts are random tokens, ends are those
of the traffic (columns arrival_s, num_prompt_tokens and num_output_tokens). The engine
runs in this process, so that its scheduler can be looked at; a request is given to it
between two steps, which a server does beside them.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DECODES = ((1, 1024), (8, 2048), (32, 1024), (64, 512), (128, 256))
"""(sequences, prompt of each), forty tokens of each of which are timed."""
PROMPTS = (64, 256, 512, 1024, 2048, 4096, 8000)
_WARM_UP = ((0.0, 300, 20), (0.02, 2000, 30), (0.05, 700, 40))

Jobs = list[tuple[float, int, int]]
"""Arrival, prompt tokens and output tokens of each request."""


class Recorder:
    """An engine in this process, and what its scheduler is seen to do."""

    def __init__(self, model: str, num_gpu_blocks: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams  # noqa: PLC0415

        self._sampling = SamplingParams
        self._engine: Any = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=8192,
            max_num_batched_tokens=8192,
            max_num_seqs=256,
            num_gpu_blocks_override=num_gpu_blocks,
            gpu_memory_utilization=0.9,
            disable_log_stats=True,
        ).llm_engine
        self.core = self._engine.engine_core.engine_core
        self.steps: list[dict[str, Any]] = []
        self.preemptions: list[tuple[float, int, int]] = []
        self._begin_s = 0.0
        self._draw = random.Random(0)
        self._watch(self.core.scheduler)

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    def _watch(self, scheduler: Any) -> None:
        schedule, preempt = scheduler.schedule, scheduler._preempt_request

        def scheduled(*args: Any, **more: Any) -> Any:
            at_s = self._now_s()
            output = schedule(*args, **more)
            took_s = self._now_s() - at_s
            step = self._step(scheduler, output)
            self.steps.append({"scheduled_s": at_s, "schedule_s": took_s} | step)
            return output

        def preempted(request: Any, *args: Any, **more: Any) -> Any:
            number = int(request.request_id.split("-")[0])
            entry = (self._now_s(), number, request.num_computed_tokens)
            self.preemptions.append(entry)
            return preempt(request, *args, **more)

        scheduler.schedule, scheduler._preempt_request = scheduled, preempted

    @staticmethod
    def _step(scheduler: Any, output: Any) -> dict[str, Any]:
        contexts, chunks = [], []
        for name, num_tokens in output.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            context = request.num_computed_tokens
            if num_tokens == 1 and context > request.num_prompt_tokens:
                contexts.append(context)
            else:
                chunks.append((num_tokens, context))
        manager = scheduler.kv_cache_manager
        return {
            "num_decodes": len(contexts),
            "num_decode_context_tokens": sum(contexts),
            "chunk_tokens": [tokens for tokens, _ in chunks],
            "chunk_context_tokens": [context for _, context in chunks],
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "kv_cache_usage": manager.usage,
        }

    def run(self, jobs: Jobs) -> list[dict[str, Any]]:
        """Serve requests as they come; return one entry for each."""
        prompts = [
            [self._draw.randrange(1000, 100_000) for _ in range(num_tokens)]
            for _, num_tokens, _ in jobs
        ]
        self.steps.clear()
        self.preemptions.clear()
        found: list[dict[str, Any]] = [
            {
                "arrival_s": at_s,
                "num_prompt_tokens": prompt,
                "num_output_tokens": output,
            }
            for at_s, prompt, output in jobs
        ]
        engine, come = self._engine, 0
        self._begin_s = time.perf_counter()
        while come < len(jobs) or engine.has_unfinished_requests():
            while come < len(jobs) and jobs[come][0] <= self._now_s():
                found[come]["added_s"] = self._now_s()
                limits = self._sampling(
                    max_tokens=jobs[come][2], ignore_eos=True, detokenize=False
                )
                prompt = {"prompt_token_ids": prompts[come]}
                engine.add_request(str(come), prompt, limits)
                come += 1
            if not engine.has_unfinished_requests():
                time.sleep(5e-4)
                continue
            for output in engine.step():
                entry = found[int(output.request_id)]
                if output.outputs[0].token_ids:
                    entry.setdefault("first_token_s", self._now_s())
                if output.finished:
                    entry["finish_s"] = self._now_s()
        return found


def decodes_s(recorder: Recorder, num_seqs: int, context: int) -> float:
    """Return the median seconds between two steps of decodes alone."""
    recorder.run([(0.0, context, 40)] * num_seqs)
    alone: list[float] = [
        step["scheduled_s"]
        for step in recorder.steps
        if step["num_decodes"] == num_seqs and not step["chunk_tokens"]
    ]
    pairs = itertools.pairwise(alone)
    return statistics.median(later - sooner for sooner, later in pairs)


def prompt_s(recorder: Recorder, num_tokens: int) -> float:
    """Return the median seconds to the first token of an idle engine, of three."""
    waits: list[float] = []
    for _ in range(3):
        (entry,) = recorder.run([(0.0, num_tokens, 1)])
        waits.append(entry["first_token_s"] - entry["added_s"])
    return statistics.median(waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("traffic", type=Path)
    parser.add_argument("out", type=Path, help="beginning of the files' names")
    parser.add_argument("--num-gpu-blocks", type=int, default=3500)
    given = parser.parse_args()
    with given.traffic.open() as lines:
        jobs = [
            (
                float(row["arrival_s"]),
                int(row["num_prompt_tokens"]),
                int(row["num_output_tokens"]),
            )
            for row in csv.DictReader(lines)
        ]
    recorder = Recorder(given.model, given.num_gpu_blocks)
    recorder.run(list(_WARM_UP))
    found: dict[str, Any] = {
        "available_bytes": recorder.core.available_gpu_memory_for_kv_cache,
        "plateaus": [(*each, decodes_s(recorder, *each)) for each in DECODES],
        "prompts": [(each, prompt_s(recorder, each)) for each in PROMPTS],
    }
    requests = recorder.run(jobs)
    found["preemptions"] = recorder.preemptions
    for step in recorder.steps:
        used = step.pop("kv_cache_usage") * (given.num_gpu_blocks - 1)
        step["num_used_blocks"] = round(used)
    given.out.with_name(f"{given.out.name}.json").write_text(json.dumps(found))
    for name, rows in {"requests": requests, "steps": recorder.steps}.items():
        path = given.out.with_name(f"{given.out.name}_{name}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)


if __name__ == "__main__":
    main()
