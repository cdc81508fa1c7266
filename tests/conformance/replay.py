"""Drive the V1 scheduler through a conformance workload and write its log.

Format and step loop: conformance/README.md beside the logs, sections 1 to 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cache.tokens import ListTokens
from sim.generation import sample
from sim.request import Request
from sim.scheduler.v1 import V1Scheduler

if TYPE_CHECKING:
    from sim.scheduler.base import SchedulerOutput


def segment_tokens(seed: int, length: int) -> list[int]:
    return [
        10 + ((seed * 1000003 + i * 7919 + (seed ^ i) * 31) % 49979)
        for i in range(length)
    ]


def make_request(index: int, raw: dict[str, Any], max_model_len: int) -> Request:
    prompt = [t for seed, n in raw["prompt"] for t in segment_tokens(seed, n)]
    length = len(prompt)
    num_output_tokens = raw["output_len"]
    output = segment_tokens(raw["out_seed"], num_output_tokens + 1)
    return Request(
        request_id=index,
        arrival_s=float(raw["arrival_step"]),
        num_prompt_tokens=length,
        tokens=ListTokens(prompt + output),
        max_num_tokens=min(length + num_output_tokens, max_model_len),
        oracle_num_tokens=length + num_output_tokens,
        priority=raw.get("priority", 0),
    )


ENGINE_KEYS = {
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "enable_prefix_caching": "enable_prefix_caching",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "chunked_prefill": "enable_chunked_prefill",
    "policy": "scheduling_policy",
    "sliding_window": "sliding_window",
    "watermark": "watermark",
    "scheduler_reserve_full_isl": "scheduler_reserve_full_isl",
    "long_prefill_token_threshold_adaptive": "long_prefill_token_threshold_adaptive",
    "max_num_active_seqs": "max_num_active_seqs",
    "prefill_schedule_interval": "prefill_schedule_interval",
    "max_num_scheduled_tokens": "max_num_scheduled_tokens",
}
"""Key of a workload's configuration to argument of the scheduler."""


def make_scheduler(workload: dict[str, Any]) -> V1Scheduler:
    """Construct the scheduler of a workload, in the dialect of its reference."""
    # A key that a workload leaves out does not exist for its reference; this one is on
    # by default in releases that have it.
    config = {"scheduler_reserve_full_isl": False} | workload["config"]
    return V1Scheduler(
        config["num_gpu_blocks"],
        config["block_size"],
        engine_version=workload["reference"].removeprefix("vllm "),
        **{ENGINE_KEYS[key]: config[key] for key in ENGINE_KEYS if key in config},
    )


class Replay:
    """One workload, stepped as the reference driver steps it."""

    def __init__(self, workload: dict[str, Any], *, check: bool = True) -> None:
        self.check = check
        config = workload["config"]
        self.caching = config["enable_prefix_caching"]
        self.scheduler = make_scheduler(workload)
        self.names = [raw["id"] for raw in workload["requests"]]
        self.pending = [
            make_request(i, raw, config["max_model_len"])
            for i, raw in enumerate(workload["requests"])
        ]
        self.aborts = sorted(
            (raw["abort_step"], raw["id"], self.pending[i])
            for i, raw in enumerate(workload["requests"])
            if raw.get("abort_step") is not None
        )
        self.logged_tables: dict[int, list[int]] = {}
        self.step = 0

    def run(self) -> list[dict[str, Any]]:
        lines = []
        scheduler = self.scheduler
        while self.pending or scheduler.num_running or scheduler.num_waiting:
            if not (scheduler.num_running or scheduler.num_waiting):
                self.step = max(self.step, int(self.pending[0].arrival_s))
            while self.pending and self.pending[0].arrival_s <= self.step:
                scheduler.add_request(self.pending.pop(0))
            aborted = self._abort_due()
            if scheduler.num_running or scheduler.num_waiting:
                line: dict[str, Any] = {"t": self.step}
                if aborted:
                    line["abort"] = aborted
                lines.append(line | self._one_step())
                if self._has_stalled(lines[-1]):
                    lines[-1]["stalled"] = True
                    break
            self.step += 1
        return lines

    def _has_stalled(self, line: dict[str, Any]) -> bool:
        """Whether a step did nothing, and nobody is to come or to go."""
        return not (
            line["sched"]
            or "preempt" in line
            or self.pending
            or any(not request.status.is_finished for *_, request in self.aborts)
        )

    def _abort_due(self) -> list[str]:
        aborted = []
        while self.aborts and self.aborts[0][0] <= self.step:
            _, name, request = self.aborts.pop(0)
            if not request.status.is_finished:
                if request in self.pending:
                    self.pending.remove(request)
                else:
                    self.scheduler.abort(request)
                aborted.append(name)
        return aborted

    def _one_step(self) -> dict[str, Any]:
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        resumed = {r.request_id for r in scheduler.waiting if r.num_preemptions}
        output = scheduler.schedule(float(self.step))
        if self.check:
            scheduler.check()
        line = self._batch(output, resumed)
        tables = self._tables(output)
        if tables:
            line["bt"] = tables
        line["waiting"] = [self.names[r.request_id] for r in scheduler.waiting]
        line["running"] = [self.names[r.request_id] for r in scheduler.running]
        line["free"] = [pool.num_free_blocks]
        if self.caching:
            line["hashes"] = len(pool.cached_blocks)
        finished = sample(output, self.step, float(self.step))
        scheduler.update(finished)
        if self.check:
            scheduler.check()
        if finished:
            line["fin"] = [self.names[r.request_id] for r in finished]
        line["free_end"] = [pool.num_free_blocks]
        return line

    def _batch(self, output: SchedulerOutput, resumed: set[int]) -> dict[str, Any]:
        admitted = {r.request_id for r in output.admitted}
        line: dict[str, Any] = {}
        sched = []
        cached = {}
        for request, num_tokens in zip(
            output.scheduled, output.num_scheduled_tokens, strict=True
        ):
            name = self.names[request.request_id]
            computed = request.num_computed_tokens - num_tokens
            kind = "r"
            if request.request_id in admitted:
                kind = "c" if request.request_id in resumed else "n"
                cached[name] = computed
            sched.append([name, num_tokens, kind, computed])
        line["sched"] = sched
        line["nbt"] = output.num_batched_tokens
        if cached and self.caching:
            line["cached"] = cached
        if output.preemptions:
            line["preempt"] = [
                [self.names[p.request.request_id], p.mode.value]
                for p in output.preemptions
            ]
        return line

    def _tables(self, output: SchedulerOutput) -> dict[str, Any]:
        manager = self.scheduler.kv_cache_manager
        changes = {}
        for request in output.scheduled:
            ids = manager.get_block_ids(request)
            last = self.logged_tables.get(request.request_id, [])
            if ids != last:
                keep = 0
                while keep < min(len(ids), len(last)) and ids[keep] == last[keep]:
                    keep += 1
                changes[self.names[request.request_id]] = [keep, ids[keep:]]
                self.logged_tables[request.request_id] = ids
        return changes
