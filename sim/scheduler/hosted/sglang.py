"""The scheduler, radix cache and allocators of an installed SGLang, without a GPU.

What runs is the release's own: its event loops, `process_input_requests`,
`get_next_batch_to_run`, `run_batch`, `process_batch_result` and all that they call, on
tensors of the CPU. Played are the sockets, the model (it returns the tokens that the
workload names), streams and statistics. Three things are pinned, so that a log is the
same again: the clock of the radix cache counts its readings; the requests that a more
urgent one pushes out keep the order in which they were chosen; and the paged allocator
says that pages are short before its kernel reads past the end of its list.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from sim.scheduler.hosted.sglang_api import load_sglang
from sim.scheduler.log.lines import TableChanges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sim.scheduler.log.lines import Line


class HostedSglang:
    """Takes a workload through the installed SGLang's own event loop.

    Parameters
    ----------
    settings
        Keys of a decision workload, all of them.
    requests
        In order of arrival: ``id``, ``arrival_step``, ``prompt`` (token ids),
        ``output_len``, ``priority`` (None for none), ``ignore_eos``, ``abort_step``.
    output
        Token `index` of the output of the request `id`.

    Attributes
    ----------
    ending
        ``"done"``, ``"stalled"``, ``"died"`` or ``"cut"``, once the log has ended.

    Raises
    ------
    SchedulerError
        If no SGLang that we know is installed.
    """

    _most_idle = 3
    """Steps in which nothing moves before the engine is stalled."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        requests: Sequence[Mapping[str, Any]],
        output: Callable[[str, int], int],
    ) -> None:
        self._api = self._load()
        self._settings = settings
        self._output = output
        self.ending = ""
        self._arrivals = deque(requests)
        self._aborts = deque(
            sorted(
                (each["abort_step"], each["id"])
                for each in requests
                if each["abort_step"] is not None
            )
        )
        self._requests: dict[str, Any] = {}  # those that are or were in the queue
        self._gone: set[str] = set()
        self._tables = TableChanges()
        self._lines: list[Line] = []
        self._line: Line = {}
        self._step = self._num_idle = 0
        self._scheduler = self._made()

    def lines(self) -> list[Line]:
        """Run the workload, and return a line for each iteration of the event loop."""
        loop = self._loop()
        with self._api.pinned(self._note_preempted), redirect_stdout(StringIO()):
            try:
                loop()
            except _EndedError:
                pass
            except RuntimeError as error:
                self.ending = "died"
                self._lines.append(
                    {k: v for k, v in self._line.items() if k not in _LATER}
                    | {"error": str(error).partition("\n")[0]}
                )
        return self._lines

    @staticmethod
    def _load() -> Any:
        return load_sglang()

    def _loop(self) -> Any:
        """Return the release's event loop."""
        way = "overlap" if self._settings["overlap"] else "normal"
        return getattr(self._scheduler, f"event_loop_{way}")

    # Methods that the event loop calls instead of its own.

    def _receive(self, *_: Any, **__: Any) -> list[Any]:
        """End the line of the last iteration, and hand over what has arrived."""
        if self._line:
            self._end_line()
        self._line = {"t": self._step}
        return []

    def _process_input(self, _: list[Any]) -> None:
        process = self._api.Scheduler.process_input_requests
        while self._arrivals and self._arrivals[0]["arrival_step"] <= self._step:
            process(self._scheduler, [self._requested(self._arrivals.popleft())])
        aborted = []
        while self._aborts and self._aborts[0][0] <= self._step:
            name = self._aborts.popleft()[1]
            request = self._requests.get(name)
            if name in self._gone or request is None or request.finished():
                continue
            process(self._scheduler, [self._api.AbortReq(rid=name)])
            aborted.append(name)
        if aborted:
            self._line = {"t": self._step, "abort": aborted} | self._line

    def _requested(self, told: Mapping[str, Any]) -> Any:
        """Return the message of a request."""
        return self._api.request(told)

    def _next_batch(self) -> Any:
        """Let the release schedule, and note what it decided."""
        batch = self._api.Scheduler.get_next_batch_to_run(self._scheduler)
        self._note_batch(batch)
        return batch

    def _note_batch(self, batch: Any) -> None:
        line = self._line
        if batch is None:
            line["mode"] = "idle"
        else:
            line["mode"] = batch.forward_mode.name.lower()
            line["batch"] = self._entries(batch)
            if tables := self._changed_tables(batch):
                line["kv"] = tables
        line.update(self._queues())

    def _forward(self, *_: Any, **__: Any) -> Any:
        """Play the model: each request has the next token of its stream."""
        return self._tokens_of(self._scheduler.cur_batch)

    def _tokens_of(self, batch: Any) -> Any:
        ids = [
            self._output(request.rid, length - len(request.origin_input_ids))
            for request, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True)
        ]
        return self._api.GenerationBatchResult(
            logits_output=SimpleNamespace(hidden_states=None),
            next_token_ids=self._api.torch.tensor(ids, dtype=self._api.torch.int64),
        )

    def _process_result(self, batch: Any, result: Any) -> None:
        unfinished = [each for each in batch.reqs if not each.finished()]
        self._api.Scheduler.process_batch_result(self._scheduler, batch, result)
        ended = [each.rid for each in unfinished if each.finished()]
        if ended:
            self._line["fin"] = ended

    def _add_to_queue(self, request: Any, *, is_retracted: bool = False) -> None:
        if is_retracted:
            self._line.setdefault("retract", []).append(request.rid)
        self._requests[request.rid] = request
        self._api.Scheduler._add_request_to_queue(
            self._scheduler, request, is_retracted
        )

    def _send(self, message: Any, request: Any = None) -> None:
        """Note which requests were turned away, and which left the queue."""
        del request
        if isinstance(message, self._api.AbortReq):
            key = "dropped" if message.finished_reason is None else "reject"
            self._line.setdefault(key, []).append(message.rid)
            self._gone.add(message.rid)

    def _note_preempted(self, requests: Iterable[Any]) -> None:
        names = [each.rid for each in requests]
        self._line.setdefault("preempt", []).extend(names)

    def _evict(self, params: Any) -> Any:
        allocator, size = self._allocator, self._settings["page_size"]
        removed: list[list[int]] = []
        free = allocator.free

        def noted(indices: Any) -> None:
            removed.append([len(indices), int(indices[0]) // size])
            free(indices)

        allocator.free = noted
        try:
            result = self._api.RadixCache.evict(self._tree, params)
        finally:
            del allocator.free
        if removed:
            self._line.setdefault("evict", []).append([params.num_tokens, removed])
        return result

    # Fields of a line.

    def _entries(self, batch: Any) -> list[Any]:
        if batch.forward_mode.is_decode():
            return [request.rid for request in batch.reqs]
        return [
            [request.rid, int(num_new), int(before), self._row_of(request)]
            for request, num_new, before in zip(
                batch.reqs, batch.extend_lens, batch.prefix_lens, strict=True
            )
        ]

    def _changed_tables(self, batch: Any) -> dict[str, list[Any]]:
        size = self._settings["page_size"]
        tables = {}
        for request, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            row = self._pool.req_to_token[self._row_of(request), :length:size]
            if change := self._tables.change(request.rid, (row // size).tolist()):
                tables[request.rid] = change
        return tables

    def _row_of(self, request: Any) -> int:
        return int(request.req_pool_idx)

    def _ratio(self) -> float:
        ratio: float = self._scheduler.new_token_ratio
        return ratio

    def _queues(self) -> Line:
        scheduler = self._scheduler
        line: Line = {}
        if scheduler.chunked_req is not None:
            line["chunked"] = scheduler.chunked_req.rid
        line["waiting"] = [each.rid for each in scheduler.waiting_queue]
        line["running"] = [each.rid for each in scheduler.running_batch.reqs]
        if scheduler.running_batch.batch_is_full:
            line["full"] = True
        line["ratio"] = self._ratio()
        line["free"] = self._free()
        if not self._settings["disable_radix_cache"]:
            line["nodes"] = self._num_nodes()
        return line

    def _free(self) -> list[int]:
        tree = self._tree
        if self._settings["disable_radix_cache"]:
            return [self._allocator.available_size(), 0, 0]
        return [
            self._allocator.available_size(),
            tree.evictable_size(),
            tree.protected_size(),
        ]

    def _root(self) -> Any:
        return self._tree.root_node

    def _num_nodes(self) -> int:
        stack, found = [self._root()], -1
        while stack:
            found += 1
            stack.extend(stack.pop().children.values())
        return found

    def _end_line(self) -> None:
        """Append the line, and go on to the next step or end the loop."""
        line = self._line
        line["free_end"] = self._free()
        self._lines.append(line)
        is_idle = line["mode"] == "idle"
        waits = bool(line["waiting"]) or not self.is_at_rest()
        self._num_idle = self._num_idle + 1 if is_idle and waits else 0
        if self._num_idle == self._most_idle and not (self._arrivals or self._aborts):
            line["stalled"] = True
            self._end("stalled")
        self._step += 1
        if is_idle and not (waits or line["running"]):
            if not self._arrivals:
                self._end("done")
            self._step = max(self._step, self._arrivals[0]["arrival_step"])
        if self._step >= self._settings["max_steps"]:
            self._end("cut")

    def is_at_rest(self) -> bool:
        """Whether nothing stands in a queue beside the one of waiting requests."""
        return True

    def _end(self, how: str) -> None:
        self.ending = how
        raise _EndedError

    def _told(self, args: Any, worker: Any) -> dict[str, Any]:
        """Return the attributes that the settings alone say, of every release."""
        api, settings = self._api, self._settings
        longest = min(settings["context_len"], settings["max_total_num_tokens"]) - 1
        return {
            "server_args": args,
            "schedule_policy": args.schedule_policy,
            "enable_priority_scheduling": args.enable_priority_scheduling,
            "schedule_low_priority_values_first": (
                args.schedule_low_priority_values_first
            ),
            "priority_scheduling_preemption_threshold": (
                args.priority_scheduling_preemption_threshold
            ),
            "enable_overlap": settings["overlap"],
            "page_size": settings["page_size"],
            "spec_algorithm": api.SpeculativeAlgorithm.from_string(None),
            "disaggregation_mode": api.DisaggregationMode.NULL,
            "tp_worker": worker,
            "model_worker": worker,
            "max_total_num_tokens": settings["max_total_num_tokens"],
            "max_prefill_tokens": settings["max_prefill_tokens"],
            "max_running_requests": settings["max_running_requests"],
            "max_queued_requests": settings["max_queued_requests"],
            "max_req_len": longest,
            "max_req_input_len": longest - 5,
        }

    def _made(self) -> Any:
        """Return the release's scheduler, set up by its own methods where they can."""
        api, settings = self._api, self._settings
        args = api.server_args(settings)
        scheduler = object.__new__(api.Scheduler)
        self._pool, self._allocator = api.pools(settings)
        worker = SimpleNamespace(
            is_hybrid_swa=False,
            model_runner=SimpleNamespace(
                hybrid_gdn_config=None,
                mamba2_config=None,
                linear_attn_model_spec=None,
            ),
            get_memory_pool=lambda: (self._pool, self._allocator),
            forward_batch_generation=self._forward,
        )
        scheduler.__dict__.update(
            {
                **_OFF,
                **self._told(args, worker),
                "model_config": SimpleNamespace(
                    hf_eos_token_id=set(),
                    vocab_size=1 << 30,
                    context_len=settings["context_len"],
                    _resolved_model_impl="",
                    is_encoder_decoder=False,
                    is_multimodal=False,
                    is_matryoshka=False,
                    think_end_id=None,
                ),
                "grammar_manager": SimpleNamespace(
                    has_waiting_grammars=lambda: False,
                    process_req_with_grammar=lambda _: False,
                    abort_requests=lambda _: None,
                    grammar_queue=(),
                ),
                "dllm_manager": SimpleNamespace(any_staging_reqs=lambda: False),
                "send_to_tokenizer": SimpleNamespace(send_output=self._send),
            }
        )
        scheduler.init_cache_with_memory_pool()
        scheduler.init_running_status()
        scheduler.init_chunked_prefill()
        scheduler.init_schedule_policy()
        scheduler.init_deterministic_inference_config()
        scheduler.init_request_dispatcher()
        self._tree = scheduler.tree_cache
        if not settings["disable_radix_cache"]:
            self._tree.evict = self._evict
        scheduler.future_map = (
            api.FutureMap(
                settings["max_running_requests"],
                scheduler.chunked_prefill_size,
                settings["context_len"],
                "cpu",
                scheduler.spec_algorithm,
            )
            if settings["overlap"]
            else None
        )
        scheduler.__dict__.update(
            recv_requests=self._receive,
            process_input_requests=self._process_input,
            get_next_batch_to_run=self._next_batch,
            process_batch_result=self._process_result,
            _add_request_to_queue=self._add_to_queue,
        )
        return scheduler


_LATER: Final = {
    "mode",
    "batch",
    "kv",
    "swa",
    "chunked",
    "waiting",
    "running",
    "full",
} | {
    *("ratio", "free", "nodes", "fin"),
}
"""Fields that a line has only once a call has returned."""


class _EndedError(Exception):
    """The workload is through."""


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for what is only written down or shown."""


_STREAM: Final = SimpleNamespace(wait_stream=_nothing, synchronize=_nothing)
_OFF: Final[dict[str, Any]] = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "dp_size": 1,
    "dp_rank": None,
    "attn_tp_rank": 0,
    "attn_tp_size": 1,
    "attn_cp_cpu_group": None,
    "attn_tp_cpu_group": None,
    "tp_cpu_group": None,
    "tp_group": None,
    "gpu_id": 0,
    "abort_on_priority_when_disabled": False,
    "enable_lora": False,
    "enable_lora_overlap_loading": False,
    "enable_pdmux": False,
    "skip_tokenizer_init": True,
    "enable_fpm": False,
    "enable_hisparse": False,
    "enable_metrics": False,
    "enable_overlap_mlx": False,
    "enable_trace": False,
    "stream_interval": 1 << 60,
    "enable_hierarchical_cache": False,
    "enable_hicache_storage": False,
    "enable_kv_cache_events": False,
    "is_generation": True,
    "require_mlp_sync": False,
    "dllm_config": None,
    "tokenizer": None,
    "device": "cpu",
    "offload_tags": set(),
    "adder": None,
    "current_scheduler_metrics_enabled": False,
    "num_generated_tokens": 0,
    "forward_ct_decode": 0,
    "batch_record_buf": [None, None],
    "batch_record_ct": 0,
    "default_stream": _STREAM,
    "draft_worker": None,
    "external_corpus_manager": None,
    "forward_pass_device_timer": None,
    "lora_drainer": None,
    "metrics_collector": None,
    "schedule_stream": _STREAM,
    "use_ngram_embedding": False,
    "forward_stream": _STREAM,
    "forward_stream_ctx": nullcontext(),
    "copy_stream_ctx": nullcontext(),
    "device_module": SimpleNamespace(
        Event=lambda: SimpleNamespace(record=_nothing, synchronize=_nothing)
    ),
    # statistics, streaming and self-checks
    "_profile_batch_predicate": _nothing,
    "log_batch_result_stats": _nothing,
    "log_prefill_stats": _nothing,
    "log_decode_stats": _nothing,
    "report_decode_stats": _nothing,
    "report_prefill_stats": _nothing,
    "maybe_send_health_check_signal": _nothing,
    "maybe_collect_routed_experts": _nothing,
    "maybe_collect_customized_info": _nothing,
    "stream_output": _nothing,
    "check_memory": _nothing,
    "check_tree_cache": _nothing,
    "get_pool_stats": _nothing,
    "reset_device_timer_window": _nothing,
    "_check_all_pools": lambda _: (False, ()),
    "_check_req_pool": _nothing,
    "_check_tree_cache": _nothing,
    "_maybe_log_idle_metrics": _nothing,
    "_publish_kv_events": _nothing,
    "maybe_sleep_on_idle": _nothing,
    "_maybe_clear_mm_inputs": _nothing,
}
"""Attributes that a plain engine of one GPU has, and those only shown."""
