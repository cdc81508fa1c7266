"""`HostedSglang` for releases whose event loop makes plans: 0.5.19 to 0.5.23.

The scheduler is split into components there, its settings come from a context of the
process, and its tree is the unified one, of which the core in Python is taken: it does
what the compiled one does, and its nodes can be counted. Played beside what
`sim.scheduler.hosted.sglang` plays: beams, attention across ranks, embeddings of
n-grams and the reports of load.
"""

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from sim.scheduler.hosted.sglang import _STREAM, HostedSglang, _nothing
from sim.scheduler.hosted.sglang_api import SglangApi, installed_sglang
from sim.scheduler.log.lines import TableChanges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_MODULES: Final = {
    "context": "sglang.srt.runtime_context",
    "trees": "sglang.srt.mem_cache.registry",
    "params": "sglang.srt.mem_cache.cache_init_params",
    "scheduler": "sglang.srt.managers.scheduler",
    "fields": "sglang.srt.arg_groups.arg_utils",
    "windows": "sglang.srt.mem_cache.base_swa_memory_pool",
}
_INTERVAL: Final = "SGLANG_SWA_EVICTION_INTERVAL"
_WAYS: Final = ("free_segment", "free")
_RANKS: Final = dict.fromkeys(("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank"), 0)


@cache
def load_plans() -> PlansApi:
    """Import what is needed of an installed SGLang that makes plans.

    Raises
    ------
    SchedulerError
        If there is none, or one whose rules are not known here.
    """
    installed_sglang()
    return PlansApi()


class PlansApi(SglangApi):
    """The names of an SGLang that makes plans."""

    def __init__(self) -> None:
        super().__init__()
        modules: dict[str, Any] = {
            key: importlib.import_module(at) for key, at in _MODULES.items()
        }
        self._context, self._trees = modules["context"], modules["trees"]
        self._params, self._fields = modules["params"], modules["fields"]
        self._windows = modules["windows"]
        # is asked of the model's configuration, of which there is none
        modules["scheduler"].get_resolved_model_impl = _nothing

    def server_args(self, settings: Mapping[str, Any]) -> Any:
        kind = self._args.ServerArgs
        fields_of = getattr(self._fields, "record_fields", fields)
        names = {each.name for each in fields_of(kind)}
        given = kind(
            **{
                "model_path": "",
                "device": "cpu",
                "attention_backend": "torch_native",
                "disable_overlap_schedule": not settings["overlap"],
                "pp_max_micro_batch_size": settings["max_running_requests"],
            }
            | {name: value for name, value in settings.items() if name in names}
        )
        context = self._context.get_context()
        context.set_server_args(given)
        context.parallel._overrides.update(_RANKS)
        context.config_bag("device")._set("gpu_id", 0)
        return given

    def pools(self, settings: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the pools of request slots and of tokens, two of these with a window.

        The latter are the release's own allocator over a pool without memory.
        """
        swa = settings.get("swa")
        if swa is None:
            return super().pools(settings)
        os.environ[_INTERVAL] = str(swa["eviction_interval"])
        slots, _ = super().pools({**settings, "page_size": 1})
        return slots, self._allocator.swa.SWATokenToKVPoolAllocator(
            settings["max_total_num_tokens"],
            swa["max_total_num_tokens"],
            page_size=settings["page_size"],
            dtype=self.torch.bfloat16,
            device="cpu",
            kvcache=self._no_memory(),
            need_sort=settings["need_sort"],
        )

    def _no_memory(self) -> Any:
        """Return a pool of two kinds of layers that only knows whose peer is whose."""

        class Pool(self._windows.BaseSWAKVPool):  # type: ignore[misc,name-defined]
            store_dtype = self.torch.bfloat16
            full_to_swa_index_mapping: Any

            def register_mapping(self, full_to_swa_index_mapping: Any) -> None:
                self.full_to_swa_index_mapping = full_to_swa_index_mapping

            def translate_loc_from_full_to_swa(self, kv_indices: Any) -> Any:
                return self.full_to_swa_index_mapping[kv_indices]

        Pool.__abstractmethods__ = frozenset()
        return object.__new__(Pool)

    @cache  # noqa: B019  # as the other releases'
    def _paged(self) -> Any:
        """Return the release's own, which looks for no page that is not there."""
        return self._allocator.PagedTokenToKVPoolAllocator

    def tree(
        self, settings: Mapping[str, Any], args: Any, pools: tuple[Any, Any]
    ) -> Any:
        """Return the tree cache that the release takes for such pools."""
        slots, allocator = pools
        swa = settings.get("swa")
        return self._trees.create_tree_cache(
            _made_of(
                self._trees.TreeCacheBuildContext,
                effective_chunked_prefill_size=settings["chunked_prefill_size"],
                server_args=args,
                params=_made_of(
                    self._params.CacheInitParams,
                    disable=settings["disable_radix_cache"],
                    req_to_token_pool=slots,
                    token_to_kv_pool_allocator=allocator,
                    page_size=settings["page_size"],
                    eviction_policy=settings["radix_eviction_policy"],
                    chunked_prefill_size=settings["chunked_prefill_size"],
                    tree_core_backend="python",
                    sliding_window_size=swa and swa["sliding_window_size"],
                ),
                is_hybrid_swa=swa is not None,
                full_tokens_per_layer=swa and settings["max_total_num_tokens"],
                is_hybrid_ssm=False,
                enable_hierarchical_cache=False,
                disable_radix_cache=settings["disable_radix_cache"],
                tp_worker=None,
                model_config=None,
                tp_size=1,
                tp_rank=0,
                tp_group=None,
            )
        )

    def future_map(self, pool: Any) -> Any:
        """Return what relays tokens from a batch to the next one."""
        spec = self.SpeculativeAlgorithm.from_string(None)
        return spec.create_future_map("cpu", pool)

    def request(self, told: Mapping[str, Any], **more: Any) -> Any:
        return super().request(
            told, input_embeds=None, token_type_ids=None, time_stats=None, **more
        )


def _made_of(kind: type[Any], **told: Any) -> Any:
    """Return an instance, told what its release has a field for."""
    names = {each.name for each in fields(kind)}
    return kind(**{name: value for name, value in told.items() if name in names})


class HostedPlans(HostedSglang):
    """`HostedSglang` of a release that makes plans."""

    @staticmethod
    def _load() -> Any:
        return load_plans()

    # Methods that the event loop calls instead of its own.

    def _ingest(self, *_: Any, **__: Any) -> list[Any]:
        self._receive()
        self._process_input([])
        return []

    def _plan(self, running_batch: Any, last_batch: Any) -> Any:
        plan = self._api.Scheduler.get_next_batch_to_run(
            self._scheduler, running_batch=running_batch, last_batch=last_batch
        )
        self._scheduler.running_batch = plan.running_batch
        self._note_batch(plan.batch_to_run)
        return plan

    def _forward(self, batch: Any, **_: Any) -> Any:
        result = self._tokens_of(batch)
        result.logits_output = None
        return result

    def _evict(self, params: Any, **_: Any) -> Any:
        allocator, removed = self._allocator, list[list[int]]()
        with ExitStack() as noting:
            if self._settings.get("swa") is None:
                noting.enter_context(self._noted(allocator, removed, _WAYS))
                told = [params.num_tokens, removed]
            else:
                dropped = list[list[int]]()
                full = allocator.full_attn_allocator
                noting.enter_context(self._noted(full, removed, _WAYS))
                noting.enter_context(
                    self._noted(allocator, dropped, ("free_swa_segment",))
                )
                told = [params.num_tokens, removed, params.swa_num_tokens, dropped]
            result = type(self._tree).evict_for_alloc(self._tree, params)
        if any(told[1::2]):
            self._line.setdefault("evict", []).append(told)
        return result

    @contextmanager
    def _noted(
        self, allocator: Any, removed: list[list[int]], names: Iterable[str]
    ) -> Iterator[None]:
        """Note which slots are freed meanwhile, by methods of an allocator."""
        size = self._settings["page_size"]
        ways = {name: getattr(allocator, name) for name in names}

        def noting(free: Any) -> Any:
            def noted(indices: Any, **where: int) -> None:
                removed.append([len(indices), int(indices[0]) // size])
                num_removed = len(removed)
                free(indices, **where)
                del removed[num_removed:]  # of a way that takes another

            return noted

        allocator.__dict__.update({name: noting(free) for name, free in ways.items()})
        try:
            yield
        finally:
            for name in ways:
                delattr(allocator, name)

    # Fields of a line.

    def _note_batch(self, batch: Any) -> None:
        super()._note_batch(batch)
        if batch is None or self._settings.get("swa") is None:
            return
        size, tables = self._settings["page_size"], {}
        peers = self._allocator.full_to_swa_index_mapping
        for request, length in zip(batch.reqs, batch.seq_lens.tolist(), strict=True):
            row = self._pool.req_to_token[self._row_of(request), :length:size]
            ids = (peers[row.long()] // size).tolist()
            if change := self._windows.change(request.rid, ids):
                tables[request.rid] = change
        if tables:
            self._line["swa"] = tables

    def _free(self) -> list[int]:
        if self._settings.get("swa") is None:
            return super()._free()
        allocator, tree = self._allocator, self._tree
        return [
            allocator.full_available_size(),
            tree.full_evictable_size(),
            tree.full_protected_size(),
            allocator.swa_available_size(),
            tree.swa_evictable_size(),
            tree.swa_protected_size(),
        ]

    def _row_of(self, request: Any) -> int:
        return int(request.kv.req_pool_idx)

    def _ratio(self) -> float:
        ratio: float = self._scheduler.new_token_ratio_tracker.current
        return ratio

    def _root(self) -> Any:
        return self._tree.tree_core.root_node

    def _made(self) -> Any:
        api, settings = self._api, self._settings
        swa = settings.get("swa")
        self._windows = TableChanges()
        args = api.server_args(settings)
        scheduler = object.__new__(api.Scheduler)
        self._pool, self._allocator = pools = api.pools(settings)
        self._tree = tree = api.tree(settings, args, pools)
        worker = SimpleNamespace(
            model_runner=SimpleNamespace(attn_backend=None, prefill_aware_swa=False),
            forward_batch_generation=self._forward,
        )
        scheduler.__dict__.update(
            {
                **_OFF,
                **self._told(args, worker),
                "is_hybrid_swa": swa is not None,
                "sliding_window_size": swa and swa["sliding_window_size"],
                "req_to_token_pool": self._pool,
                "token_to_kv_pool_allocator": self._allocator,
                "tree_cache": tree,
                "disable_radix_cache": settings["disable_radix_cache"],
                "model_config": SimpleNamespace(
                    hf_eos_token_id=set(),
                    vocab_size=1 << 30,
                    context_len=settings["context_len"],
                    is_encoder_decoder=False,
                    is_multimodal=False,
                    is_matryoshka=False,
                    self_opened_think_start_ids=None,
                    think_end_ids=None,
                ),
                "ipc_channels": SimpleNamespace(
                    send_to_tokenizer=SimpleNamespace(send_output=self._send)
                ),
                "metrics_reporter": _Quiet(),
                "weight_updater": _Quiet(),
                "profiler_manager": _Quiet(),
                "load_publisher": _Quiet(),
                "kv_events_publisher": _Quiet(),
            }
        )
        scheduler.init_running_status()
        scheduler.init_chunked_prefill()
        scheduler.init_schedule_policy()
        scheduler.init_deterministic_inference_config()
        scheduler.init_request_dispatcher()
        scheduler.init_batch_result_processor()
        if not settings["disable_radix_cache"]:
            tree.evict_for_alloc = self._evict
        scheduler.future_map = api.future_map(self._pool)
        scheduler.__dict__.update(
            ingest_requests=self._ingest,  # from 0.5.20 on; before that the next two
            request_receiver=SimpleNamespace(recv_requests=self._receive),
            process_input_requests=self._process_input,
            get_next_batch_to_run=self._plan,
            process_batch_result=self._process_result,
            _add_request_to_queue=self._add_to_queue,
        )
        return scheduler


class _Quiet:
    """A component that only shows something, or is not asked here."""

    enable_metrics = False
    num_generated_tokens = forward_ct_decode = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _same(batch: Any, **_: Any) -> Any:
    """Stand in for what changes a batch of other engines."""
    return batch


_STAGES: Final = SimpleNamespace(
    record=lambda _: nullcontext(), enter=_nothing, exit=_nothing, _trace_stage=None
)
_OFF: Final[dict[str, Any]] = {
    **dict.fromkeys(
        (
            "abort_on_priority_when_disabled",
            "enable_lora",
            "enable_lora_overlap_loading",
            "enable_pdmux",
            "enable_trace",
            "enable_fpm",
            "enable_hierarchical_cache",
            "enable_hicache_storage",
            "enable_lmcache",
            "enable_session_radix_cache",
            "enable_unified_cache_external_linker",
            "enable_unified_memory",
            "enable_hisparse",
            "enable_overlap_mlx",
            "enable_async_d2h_copy",
            "require_mlp_sync",
            "is_hybrid_ssm",
            "_war_barrier_enabled",
            "_sched_idled",
        ),
        False,
    ),
    **dict.fromkeys(
        (
            "max_new_tokens_limit",
            "tokenizer",
            "dllm_config",
            "decode_offload_manager",
            "hisparse_coordinator",
            "metrics_collector",
            "draft_worker",
            "rust_server",
            "dynamic_chunk_sizer",
            "min_free_slots_delayer",
            "lora_drainer",
            "mm_receiver",
            "external_corpus_manager",
            "load_snapshot_writer",
            "scripted_scheduler_hook",
            "_confidence_budget_prepare",
            "pad_input_ids_func",
        )
    ),
    "ps": SimpleNamespace(
        **_RANKS,
        **dict.fromkeys(("tp_size", "pp_size", "dp_size"), 1),
        dp_rank=None,
        gpu_id=0,
    ),
    "processed_tokens_counter": 0,
    "is_generation": True,
    "skip_tokenizer_init": True,
    "device": "cpu",
    "batch_record_buf": [None, None],
    "batch_record_ct": 0,
    "schedule_stream": _STREAM,
    "forward_stream": _STREAM,
    "copy_stream": _STREAM,
    "forward_stream_ctx": nullcontext(),
    "copy_stream_ctx": nullcontext(),
    "device_module": SimpleNamespace(
        Event=lambda: SimpleNamespace(record=_nothing, synchronize=_nothing)
    ),
    "scheduler_stage_metrics": _STAGES,
    "grammar_manager": SimpleNamespace(
        has_waiting_grammars=lambda: False,
        process_req_with_grammar=lambda _: False,
        abort_requests=_nothing,
        grammar_queue=(),
    ),
    "dllm_manager": SimpleNamespace(any_staging_reqs=lambda: False),
    "dp_attn_adapter": SimpleNamespace(
        maybe_prepare_mlp_sync_batch=_same,
        maybe_convert_decode_to_extend=_same,
        drop_sync_wait_carry=_nothing,
    ),
    "ngram_embedding_manager": SimpleNamespace(prepare_for_forward=_same),
    "beam_coordinator": SimpleNamespace(
        pending_member_rows=lambda _: 0,
        retire_group=_nothing,
        maybe_select_and_relay=_nothing,
        commit_decode=lambda _: set(),
    ),
    "load_inquirer": SimpleNamespace(
        _get_num_pending_tokens=lambda **_: 0, get_loads=_nothing
    ),
    "output_streamer": SimpleNamespace(stream_output=_nothing),
    "invariant_checker": SimpleNamespace(
        _check_all_pools=lambda _: (False, []),
        _check_req_pool=_nothing,
        _check_tree_cache=_nothing,
    ),
    "pool_stats_observer": SimpleNamespace(get_pool_stats=_nothing),
    # statistics, streaming and self-checks
    "init_beam_coordinator": _nothing,
    "maybe_send_health_check_signal": _nothing,
    "maybe_sleep_on_idle": _nothing,
    "publish_load_snapshot": _nothing,
    "_record_step_counters": _nothing,
    "_maybe_clear_mm_inputs": _nothing,
    "_maybe_report_active_ranks": _nothing,
    "_record_kv_event_lora_name": _nothing,
    "_maybe_namespace_elastic_radix_cache": _nothing,
    "_prefetch_kvcache": _nothing,
}
"""Attributes of a plain engine of one GPU, and stand-ins for reports."""
