"""Drive an installed vLLM, and write what it took and what it did.

On a machine with a GPU and vLLM (0.26 was recorded; the names of its internals that are
read here are those of 0.24 to 0.33)::

    python -m tests.truth.record_vllm MODEL_FOLDER measured/h200 --traffic traffic.csv

Facts come first (JSON): memory for the KV cache, seconds of steps of decodes alone, of
steps with a chunk beside decodes, and to the first token of an idle engine; how many
experts of a mixture tokens touch. With --traffic, requests and steps follow (Parquet).
The model's folder needs a config.json alone: weights are random, prompts are random
tokens, ends are those of the traffic (columns arrival_s, num_prompt_tokens and
num_output_tokens). The engine runs in this process, so that its scheduler can be looked
at; a request is given to it between two steps, which a server does beside them.
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

_WARM_UP = ((0.0, 300, 20), (0.02, 2000, 30), (0.05, 700, 40))
_NUM_DECODED = 40
"""Tokens of each request of a step of decodes that is timed."""
_TOUCHING = (1, 2, 4, 8, 10, 16, 32, 64, 128, 256)
"""Tokens whose experts are counted."""

Jobs = list[tuple[float, int, int]]
"""Arrival, prompt tokens and output tokens of each request."""


class Recorder:
    """An engine in this process, and what its scheduler is seen to do."""

    def __init__(self, model: str, arguments: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams  # noqa: PLC0415

        self._sampling = SamplingParams
        self._engine: Any = LLM(
            model=model,
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **arguments,
        ).llm_engine
        self.core = self._engine.engine_core.engine_core
        self.steps: list[dict[str, Any]] = []
        self.ends_s: list[float] = []
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

    @property
    def model(self) -> Any:
        return self.core.model_executor.driver_worker.worker.get_model()

    def run(self, jobs: Jobs) -> list[dict[str, Any]]:
        """Serve requests as they come; return one entry for each."""
        prompts = [
            [self._draw.randrange(1000, 30_000) for _ in range(num_tokens)]
            for _, num_tokens, _ in jobs
        ]
        for seen in (self.steps, self.ends_s, self.preemptions):
            seen.clear()
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
            outputs = engine.step()
            if outputs:
                self.ends_s.append(self._now_s())
            for output in outputs:
                entry = found[int(output.request_id)]
                if output.outputs[0].token_ids:
                    entry.setdefault("first_token_s", self._now_s())
                if output.finished:
                    entry["finish_s"] = self._now_s()
        return found


def decodes_s(recorder: Recorder, num_seqs: int, context: int) -> float:
    """Return the median seconds between two steps of decodes alone."""
    recorder.run([(0.0, context, _NUM_DECODED)] * num_seqs)
    alone: list[float] = [
        step["scheduled_s"]
        for step in recorder.steps
        if step["num_decodes"] == num_seqs and not step["chunk_tokens"]
    ]
    pairs = itertools.pairwise(alone)
    return statistics.median(later - sooner for sooner, later in pairs)


def mixed_s(recorder: Recorder, num_seqs: int, context: int, num_tokens: int) -> float:
    """Return the median seconds of a step of decodes and one chunk, of three.

    Chunks come one by one while nothing but decodes runs, so that the step of each is
    the longest between two outputs until its token came.
    """
    settled_s = 1.0 + 5e-5 * num_seqs * context
    jobs = [(0.0, context, 4000)] * num_seqs
    jobs += [(settled_s + 0.4 * index, num_tokens, 1) for index in range(3)]
    found = _until_last(recorder, jobs)
    times: list[float] = []
    for entry in found[num_seqs:]:
        pairs = itertools.pairwise(recorder.ends_s)
        times.append(
            max(
                later - sooner
                for sooner, later in pairs
                if entry["added_s"] <= later <= entry["finish_s"]
            )
        )
    return statistics.median(times)


def _until_last(recorder: Recorder, jobs: Jobs) -> list[dict[str, Any]]:
    """Serve until the last request has ended, and give the others up."""
    engine, core = recorder._engine, recorder.core
    step = engine.step
    last = str(len(jobs) - 1)

    def stepped() -> Any:
        outputs = step()
        if any(each.finished and each.request_id == last for each in outputs):
            engine.abort_request([str(index) for index in range(len(jobs) - 1)])
        return outputs

    engine.step = stepped
    try:
        return recorder.run(jobs)
    finally:
        engine.step = step
        assert not core.scheduler.running


def prompt_s(recorder: Recorder, num_tokens: int) -> float:
    """Return the median seconds to the first token of an idle engine, of three."""
    waits: list[float] = []
    for _ in range(3):
        (entry,) = recorder.run([(0.0, num_tokens, 1)])
        waits.append(entry["first_token_s"] - entry["added_s"])
    return statistics.median(waits)


def experts_touched(recorder: Recorder) -> dict[int, float]:
    """Return the mean number of a layer's experts that so many tokens touch.

    Tokens are drawn from a prompt beyond the graphs, whose routing can be seen.
    """
    chosen: list[Any] = []
    routers = [
        module.router
        for module in recorder.model.modules()
        if hasattr(getattr(module, "router", None), "set_capture_fn")
    ]
    for router in routers:
        router.set_capture_fn(lambda ids: chosen.append(ids.detach().cpu()))
    recorder.run([(0.0, 2000, 1)])
    for router in routers:
        router.set_capture_fn(None)
    means: dict[int, float] = {}
    for num_tokens in _TOUCHING if chosen else ():
        counts = []
        for ids in chosen:
            rows = recorder._draw.sample(range(len(ids)), min(num_tokens, len(ids)))
            counts.append(len(ids[rows].unique()))
        means[num_tokens] = statistics.fmean(counts)
    return means


def _facts(recorder: Recorder, given: argparse.Namespace) -> dict[str, Any]:
    cache = recorder.core.vllm_config.cache_config
    found: dict[str, Any] = {
        "available_bytes": recorder.core.available_gpu_memory_for_kv_cache,
        "num_gpu_blocks": cache.num_gpu_blocks,
        "block_size": cache.block_size,
        "arguments": given.engine,
    }
    measures = (
        ("experts_touched", lambda: experts_touched(recorder)),
        ("plateaus", lambda: [(*p, decodes_s(recorder, *p)) for p in given.decodes]),
        ("prompts", lambda: [(*p, prompt_s(recorder, *p)) for p in given.prompts]),
        ("mixed", lambda: [(*p, mixed_s(recorder, *p)) for p in given.mixed]),
    )
    for name, measure in measures:
        found[name] = measure()
        given.out.with_name(f"{given.out.name}.json").write_text(json.dumps(found))
        print(name, found[name], flush=True)
    return found


def _shapes(text: str) -> list[tuple[int, ...]]:
    """Read ``1x1024,8x2048``."""
    return [tuple(map(int, each.split("x"))) for each in text.split(",") if each]


def _traffic(path: Path) -> Jobs:
    with path.open() as lines:
        return [
            (
                float(row["arrival_s"]),
                int(row["num_prompt_tokens"]),
                int(row["num_output_tokens"]),
            )
            for row in csv.DictReader(lines)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder with a config.json")
    parser.add_argument("out", type=Path, help="beginning of the files' names")
    parser.add_argument("--traffic", type=Path)
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON, of LLM")
    parser.add_argument(
        "--decodes",
        type=_shapes,
        default="1x1024,8x2048,32x1024,64x512,128x256",
        help="sequences x prompt of each, whose steps are timed",
    )
    parser.add_argument(
        "--prompts", type=_shapes, default="64,256,512,1024,2048,4096,8000"
    )
    parser.add_argument(
        "--mixed", type=_shapes, default="", help="sequences x prompt x chunk"
    )
    given = parser.parse_args()
    recorder = Recorder(given.model, given.engine)
    recorder.run(list(_WARM_UP))
    found = _facts(recorder, given)
    if given.traffic is None:
        return
    requests = recorder.run(_traffic(given.traffic))
    found["preemptions"] = recorder.preemptions
    given.out.with_name(f"{given.out.name}.json").write_text(json.dumps(found))
    for step in recorder.steps:
        used = step.pop("kv_cache_usage") * (found["num_gpu_blocks"] - 1)
        step["num_used_blocks"] = round(used)
    for name, rows in {"requests": requests, "steps": recorder.steps}.items():
        path = given.out.with_name(f"{given.out.name}_{name}.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path)


if __name__ == "__main__":
    main()
