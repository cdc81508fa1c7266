"""The real continuous batching of transformers, as a writer of decision logs.

It runs on the CPU with a tiny model of random weights, synchronously, one call of
``prepare_next_batch`` a step. Schedules do not depend on what the model says, so that
the tokens of the workload are put in place of the sampled ones: a workload means the
same tokens here and in `kvsim decisions`.

``python -m tests.conformance.hf_reference FOLDER`` writes the logs of its workloads.
"""

from __future__ import annotations

import sys
from collections import deque
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from sim.scheduler.log.lines import TableChanges
from sim.studies.conformance import load_workload, write_log
from sim.studies.conformance.stream_tokens import StreamTokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.scheduler.log.lines import Line
    from sim.studies.conformance.requests import DecisionRequest
    from sim.studies.conformance.workload import DecisionWorkload

RELEASE = "5.17"
VOCABULARY = 50_000
"""More than any token of a workload."""
END = 3
"""Ends a sequence; no token of a workload."""
NO_ROOM = "no_room"
"""Error of a log that ends because nothing can be scheduled, and nobody evicted."""


def why_missing() -> str | None:
    """Return why the reference cannot run here, or None."""
    try:
        import psutil  # noqa: F401, PLC0415
        import torch  # noqa: F401, PLC0415
        import transformers  # noqa: PLC0415
    except ImportError as error:
        return f"{error.name} is not installed (make test-all installs it)"
    found: str = transformers.__version__
    if found.split(".")[:2] != RELEASE.split("."):
        return f"transformers {RELEASE}.x is the reference, {found} is installed"
    return None


@cache
def _model() -> Any:
    """Return the smallest Llama there is."""
    import torch  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


@contextmanager
def _without_pinned_memory() -> Iterator[None]:
    """Let the CPU pool be made where no GPU is: of ordinary memory."""
    import torch  # noqa: PLC0415

    empty = torch.empty

    def plain(*shape: Any, pin_memory: bool = False, **more: Any) -> Any:
        return empty(*shape, **more)

    with patch.object(torch, "empty", plain):
        yield


class Reference:
    """The real engine, stepped through a decision workload.

    Parameters
    ----------
    workload
        Requests by step, and the engine.
    early_ends
        Names of requests that the model ends; to the engine they could go on.
    """

    def __init__(
        self, workload: DecisionWorkload, early_ends: frozenset[str] = frozenset()
    ) -> None:
        self.workload = workload
        self.early_ends = early_ends
        self._arrivals = deque(workload.requests)
        self._tokens = {
            raw.id: StreamTokens(raw.prompt, raw.out_seed) for raw in workload.requests
        }
        self._lengths = {raw.id: raw.output_len for raw in workload.requests}
        self._num_generated = dict.fromkeys(self._lengths, 0)
        self._aborts = deque(
            sorted(
                (max(raw.abort_step, raw.arrival_step), raw.abort_step, raw.id)
                for raw in workload.requests
                if raw.abort_step is not None
            )
        )
        self._tables = TableChanges()
        self._open: set[str] = set()
        self._seen: set[str] = set()
        self.manager = self._make_manager()
        with _without_pinned_memory():
            self.processor = self.manager._create_batch_processor()
        self.manager.batch_processor = self.processor
        self.scheduler = self.processor.scheduler
        self._block_table = self.processor.cache.group_cache_managers[0].block_table
        self._hook()
        self._pretend_block_table()

    def _make_manager(self) -> Any:
        import torch  # noqa: PLC0415
        from transformers import GenerationConfig  # noqa: PLC0415
        from transformers.generation.configuration_utils import (  # noqa: PLC0415
            ContinuousBatchingConfig,
        )

        engine: Any = self.workload.engine
        # K and V of the one layer; half a block more, for the float to round down.
        block_bytes = 2 * engine.block_size * 4 * torch.float32.itemsize
        space = (engine.num_cpu_blocks + 0.5) * block_bytes / 2**30
        settings = ContinuousBatchingConfig(
            block_size=engine.block_size,
            num_blocks=engine.num_gpu_blocks,
            max_batch_tokens=engine.max_num_batched_tokens,
            max_requests_per_batch=engine.max_num_seqs,
            max_memory_percent=0.9,
            allow_block_sharing=engine.enable_prefix_caching,
            use_async_batching=False,
            use_cuda_graph=False,
            safety_margin=engine.safety_margin,
            cpu_offload_space=space if engine.num_cpu_blocks else 0.0,
            scheduler_type="fifo",
        )
        return _model().init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=END, max_new_tokens=1 << 20),
            settings,
        )

    def _pretend_block_table(self) -> None:
        """Let the scheduler decide as with a block table, which needs a GPU.

        The batch is then computed in the way that does without.
        """
        engine: Any = self.workload.engine
        scheduler, most = self.scheduler, engine.max_blocks_per_request
        if not most:
            return
        self.processor.cache.max_blocks_per_request = most
        scheduler.max_decode_fast_path_length = most * engine.block_size
        schedule_batch = scheduler.schedule_batch

        def schedule_plain(*budgets: int) -> tuple[Any, bool, int, int]:
            batch, _, num_q_tokens, max_kv_read = schedule_batch(*budgets)
            return batch, False, num_q_tokens, max_kv_read

        scheduler.schedule_batch = schedule_plain

    # -- what is looked at ----------------------------------------------------

    def _hook(self) -> None:
        """See evictions and restorations as they are made, and say the tokens."""
        manager, ios = (
            self.processor.offloading_manager,
            self.processor.inputs_and_outputs,
        )
        copy_out, add = manager._offload_to_cpu, self.scheduler.add_waiting_request
        evict, restore = manager.offload_requests, manager.restore_scheduled_requests
        output = ios.prepare_batch_update
        is_evicting = False

        def offload_requests() -> int:
            nonlocal is_evicting
            is_evicting = True
            num_evicted: int = evict()
            is_evicting = False
            return num_evicted

        def add_waiting_request(state: Any) -> None:
            if is_evicting:
                mode = "swap" if state.is_cpu_offloaded else "recompute"
                self._line.setdefault("preempt", []).append([state.request_id, mode])
            add(state)

        def offload_to_cpu(victims: Any) -> set[str]:
            copied: set[str] = copy_out(victims)
            for victim in victims:
                if victim.request_id in copied:
                    self._line.setdefault("swap_out", []).extend(
                        list(pair)
                        for pair in zip(
                            self._block_table[victim.request_id],
                            manager._request_id_to_cpu_blocks[victim.request_id],
                            strict=True,
                        )
                    )
            return copied

        def restore_scheduled_requests(batch: Any) -> None:
            for future in batch:
                if future.state.is_cpu_offloaded:
                    name = future.state.request_id
                    self._restored.add(name)
                    places = manager._request_id_to_cpu_blocks[name]
                    self._line.setdefault("swap_in", []).extend(
                        list(pair)
                        for pair in zip(places, self._block_table[name], strict=False)
                    )
            restore(batch)
            self._describe(batch)

        def prepare_batch_update() -> tuple[Any, list[int], Any]:
            batch, sampled, logprobs = output()
            names = [each.state.request_id for each in batch if each.has_new_token]
            assert len(names) <= len(sampled)
            return batch, [self._next_token(name) for name in names], logprobs

        manager.offload_requests = offload_requests
        manager._offload_to_cpu = offload_to_cpu
        manager.restore_scheduled_requests = restore_scheduled_requests
        self.scheduler.add_waiting_request = add_waiting_request
        ios.prepare_batch_update = prepare_batch_update

    def _next_token(self, name: str) -> int:
        index = self._num_generated[name]
        self._num_generated[name] += 1
        if name in self.early_ends and index + 1 == self._lengths[name]:
            return END
        return self._tokens[name].output(0, index)

    def _describe(self, batch: Any) -> None:
        """Write down the batch, before the engine advances it."""
        sched, cached, tables = [], {}, {}
        for future in batch:
            state = future.state
            name = state.request_id
            kind = "r"
            if name in self._restored:
                kind = "s"
            elif name not in self._open:
                kind = "c" if state._true_initial_tokens else "n"
                cached[name] = state.position_offset
            self._open.add(name)
            sched.append([name, future.query_length, kind, state.position_offset])
            if change := self._tables.change(name, list(self._block_table[name])):
                tables[name] = change
        self._line |= {"sched": sched, "nbt": sum(entry[1] for entry in sched)}
        if cached and self.processor.cache.allow_block_sharing:
            self._line["cached"] = cached
        if tables:
            self._line["bt"] = tables

    def _queues(self) -> Line:
        scheduler = self.scheduler
        waiting = [
            scheduler.waiting_requests[i] for i in scheduler.waiting_requests_order
        ]
        line: Line = {
            "waiting": [w.request_id for w in waiting if not w.is_cpu_offloaded],
            "running": list(scheduler.active_requests),
            "swapped": [w.request_id for w in waiting if w.is_cpu_offloaded],
            "free": self._free(),
        }
        if self.processor.cache.allow_block_sharing:
            line["hashes"] = len(self.processor.cache._block_manager._hash_to_id)
        return line

    def _free(self) -> list[int]:
        return [
            self.processor.cache.get_num_free_blocks(),
            len(self.processor.offloading_manager._free_cpu_blocks),
        ]

    # -- the loop -------------------------------------------------------------

    def lines(self) -> Iterator[Line]:
        """Run the workload, and yield a line for each call."""
        step = 0
        while self._arrivals or self.scheduler.has_pending_requests():
            if not self.scheduler.has_pending_requests():
                step = max(step, self._arrivals[0].arrival_step)
            while self._arrivals and self._arrivals[0].arrival_step <= step:
                self._add(self._arrivals.popleft())
            self._line = {"t": step}
            self._cancel_due(step)
            self._restored: set[str] = set()
            self.processor._update_tp_group_state()  # takes arrivals and aborts
            if self._is_busy_after_aborts():
                line = self._step()
                yield line
                if "stalled" in line or "error" in line:
                    return
            else:
                assert not self.processor.prepare_next_batch()
            step += 1

    def _is_busy_after_aborts(self) -> bool:
        known = {*self.scheduler.active_requests, *self.scheduler.waiting_requests}
        return bool(known - self.scheduler._requests_to_cancel)

    def _add(self, raw: DecisionRequest) -> None:
        longer = 7 if raw.id in self.early_ends else 0
        self.manager.add_request(
            list(self._tokens[raw.id].prompt()),
            request_id=raw.id,
            max_new_tokens=raw.output_len + longer,
        )

    def _cancel_due(self, step: int) -> None:
        aborted = []
        queued = {*self.scheduler.active_requests, *self.scheduler.waiting_requests}
        queued |= {state.request_id for state in self.manager.input_queue.queue}
        while self._aborts and self._aborts[0][0] <= step:
            name = self._aborts.popleft()[2]
            if name in queued:
                self.manager.cancel_request(name)
                aborted.append(name)
        if aborted:
            self._line["abort"] = aborted

    def _step(self) -> Line:
        """Let the engine make a step, and return its line."""
        try:
            has_batch = self.processor.prepare_next_batch()
        except RuntimeError as error:
            if "no requests can be offloaded" not in str(error):
                raise
            return self._line | {"error": NO_ROOM}
        if not has_batch:
            line = {"sched": [], "nbt": 0, **self._line, **self._queues()}
            line["free_end"] = self._free()
            return line | ({"stalled": True} if self._is_left_alone() else {})
        self._open -= {name for name, _ in self._line.get("preempt", ())}
        line = self._line | self._queues()
        before = dict(self.scheduler.active_requests)
        self.processor._generation_step(self.manager.model)
        self.processor.update_batch()
        order = [entry[0] for entry in line["sched"]]
        if finished := [
            name
            for name in order
            if name in before and name not in self.scheduler.active_requests
        ]:
            line["fin"] = finished
        line["free_end"] = self._free()
        return line

    def _is_left_alone(self) -> bool:
        """Whether no arrival and no abort of an unfinished request is to come."""
        queued = {*self.scheduler.active_requests, *self.scheduler.waiting_requests}
        due = {name for *_, name in self._aborts}
        return not (self._arrivals or due & queued)


def write_logs(folder: Path) -> None:
    """Write ``NAME.golden.jsonl.gz`` beside each ``NAME.workload.json``."""
    for path in sorted(folder.glob("*.workload.json")):
        log = path.with_name(path.name.replace(".workload.json", ".golden.jsonl.gz"))
        log.unlink(missing_ok=True)
        write_log(Reference(load_workload(path)).lines(), log)


if __name__ == "__main__":
    write_logs(Path(sys.argv[1]))
