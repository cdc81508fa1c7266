"""The metrics of vLLM 0.33 under its names, types, labels and bounds.

Source: vLLM 0.33.0, ``vllm/v1/metrics/loggers.py`` and ``buckets.py``. What an engine
has only with LoRA or hidden metrics, and what single connectors tell, is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sim.results.schema import REQUEST_S, TOKEN_S, TTFT_S, one_two_five
from sim.serving.metrics.named import Named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from sim.config.engine import EngineConfig
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.serving.live import LiveEngine

_ITERATION_TOKENS: Final = (
    *(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
)
_SAMPLES: Final = (1, 2, 5, 10, 20)
_PREEMPTIONS: Final = (1, 2, 3, 4, 5, 10, 20)
_FINISHED: Final = ("stop", "length", "abort", "error", "repetition")
_SOURCES: Final = ("local_compute", "local_cache_hit", "external_kv_transfer")
_TIERS: Final = ("device", "host", "p2p", "disk", "external_unspecified")

_CACHE_CONFIG: Final = {
    "block_size": "16",
    "user_specified_block_size": "False",
    "kv_cache_layout": "None",
    "prefix_match_unit": "None",
    "gpu_memory_utilization": "0.92",
    "cache_dtype": "auto",
    "is_attention_free": "False",
    "num_gpu_blocks_override": "None",
    "sliding_window": "None",
    "enable_prefix_caching": "True",
    "prefix_caching_hash_algo": "sha256",
    "prefix_cache_retention_interval": "0",
    "kv_cache_dtype_skip_layers": "[]",
    "mamba_page_size_padded": "None",
    "skip_page_size_padded": "None",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "replayssm_buffer_len": "16",
    "use_replayssm": "False",
    "use_kda_recoverssm": "False",
    "num_gpu_blocks": "None",
    "num_cpu_blocks": "None",
    "simple_cpu_offload_num_blocks": "None",
    "effective_attention_block_size": "None",
    "kv_cache_size_tokens": "None",
    "kv_cache_max_concurrency": "None",
    "hash_block_size": "None",
    "cache_hit_alignment_tokens": "None",
    "kv_sharing_fast_prefill": "False",
    "swa_bounded_replay": "True",
    "kv_cache_memory_bytes": "None",
    "kv_offloading_size": "None",
    "kv_offloading_backend": "native",
    "_block_size_resolved": "True",
}
"""Labels of ``cache_config_info``, with the release's defaults."""


class VllmMetrics:
    """See `sim.serving.metrics.engine.EngineMetrics`."""

    def __init__(self, registry: CollectorRegistry, live: LiveEngine) -> None:
        named = Named(registry, "vllm:", ("model_name", "engine"))
        gauge, counter, histogram = named.gauge, named.counter, named.histogram
        self._model = live.config.engine.model
        self._children: dict[tuple[Any, int, tuple[str, ...]], Any] = {}
        lengths = one_two_five(live.max_model_len)
        self._live = live
        # Without a way to know them, as in a release that is not asked to estimate.
        counter("estimated_flops_per_gpu", "Operations of a GPU.")
        counter("estimated_read_bytes_per_gpu", "Bytes that a GPU read.")
        counter("estimated_write_bytes_per_gpu", "Bytes that a GPU wrote.")
        counter("mm_cache_queries", "Items looked up in the multi-modal cache.")
        counter("mm_cache_hits", "Items found in the multi-modal cache.")
        self._running = gauge("num_requests_running", "Requests in batches.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait.")
        self._by_reason = gauge(
            "num_requests_waiting_by_reason", "Requests that wait, by reason.", "reason"
        )
        self._sleep = gauge("engine_sleep_state", "Always awake.", "sleep_state")
        self._usage = gauge("kv_cache_usage_perc", "KV-cache usage, 1 means all.")
        self._queries = counter("prefix_cache_queries", "Tokens looked up.")
        self._hits = counter("prefix_cache_hits", "Tokens found in the cache.")
        self._outer_queries = counter(
            "external_prefix_cache_queries", "Tokens looked up in a tier."
        )
        self._outer_hits = counter(
            "external_prefix_cache_hits", "Tokens found in a tier."
        )
        self._preemptions = counter("num_preemptions", "Preemptions of the engine.")
        self._prompt = counter("prompt_tokens", "Prompt tokens processed.")
        self._by_source = counter(
            "prompt_tokens_by_source", "Prompt tokens by source.", "source"
        )
        self._cached = counter("prompt_tokens_cached", "Prompt tokens found cached.")
        self._by_tier = counter(
            "prompt_tokens_cached_by_source", "Cached tokens by tier.", "source"
        )
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._success = counter("request_success", "Requests.", "finished_reason")
        self._num_prompt = histogram("request_prompt_tokens", "Prompts.", lengths)
        self._num_output = histogram("request_generation_tokens", "Answers.", lengths)
        self._iteration = histogram(
            "iteration_tokens_total", "Tokens of a step.", _ITERATION_TOKENS
        )
        self._num_most = histogram(
            "request_max_num_generation_tokens", "Longest of the samples.", lengths
        )
        self._n = histogram("request_params_n", "Samples asked for.", _SAMPLES)
        self._max_tokens = histogram(
            "request_params_max_tokens", "max_tokens asked for.", lengths
        )
        self._ttft = histogram("time_to_first_token_seconds", "TTFT.", TTFT_S)
        self._itl = histogram(
            "inter_token_latency_seconds", "Time between two tokens.", TOKEN_S
        )
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "TPOT.", TOKEN_S
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Latency.", REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "Queueing.", REQUEST_S)
        self._inference = histogram(
            "request_inference_time_seconds", "From admission to the end.", REQUEST_S
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "From admission to a token.", REQUEST_S
        )
        self._decode = histogram(
            "request_decode_time_seconds", "From the first token on.", REQUEST_S
        )
        self._num_preempted = histogram(
            "request_num_preemptions", "Preemptions of a request.", _PREEMPTIONS
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Tokens not found cached.", lengths
        )
        self._tier = _tier_of(live.config.engine)
        self._make_drafts(named)
        num_engines = len(live.run.engines)
        self._begin(named, num_engines)
        self._tell_cache(registry, live, num_engines)
        self._tell_rejections(registry)
        self._told: dict[tuple[int, str], int] = {}

    def _tell_rejections(self, registry: CollectorRegistry) -> None:
        rejections = Named(registry, "vllm:", ("model_name",)).counter(
            "admission_rejections", "Requests that a full queue refused.", "reason"
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            rejections.labels(self._model, reason)

    def _make_drafts(self, named: Named) -> None:
        self._drafts: tuple[Any, ...] = ()
        if self._live.config.engine.speculative is not None:
            counter = named.counter
            self._drafts = (
                counter("spec_decode_num_drafts", "Drafts that were verified."),
                counter("spec_decode_num_draft_tokens", "Their tokens."),
                counter("spec_decode_num_accepted_tokens", "Accepted of these."),
            )
            self._by_position = counter(
                "spec_decode_num_accepted_tokens_per_pos", "By position.", "position"
            )

    def _begin(self, named: Named, num_engines: int) -> None:
        """Show all series from the beginning, as the release does."""
        for engine in range(num_engines):
            for metric in named.plain:
                metric.labels(self._model, str(engine))
            for reason in _FINISHED:
                self._success.labels(self._model, str(engine), reason)
            for source in _SOURCES:
                self._by_source.labels(self._model, str(engine), source)
            for tier in _TIERS:
                self._by_tier.labels(self._model, str(engine), tier)
            for state in ("awake", "weights_offloaded", "discard_all"):
                value = float(state == "awake")
                self._sleep.labels(self._model, str(engine), state).set(value)

    def _tell_cache(
        self, registry: CollectorRegistry, live: LiveEngine, num_engines: int
    ) -> None:
        capacity, table = live.run.capacity, live.config.engine
        labels = _CACHE_CONFIG | {
            "block_size": str(capacity.block_size),
            "hash_block_size": str(capacity.block_size),
            "num_gpu_blocks": str(capacity.num_gpu_blocks),
            "num_cpu_blocks": str(capacity.num_cpu_blocks or None),
            "kv_cache_size_tokens": str(
                (capacity.num_gpu_blocks - 1) * capacity.block_size
            ),
            "gpu_memory_utilization": str(capacity.gpu_memory_utilization),
            "cache_dtype": str(table.kv_cache_dtype),
            "enable_prefix_caching": str(table.prefix_caching),
        }
        info = Named(registry, "vllm:", (*labels, "engine")).gauge(
            "cache_config_info", "The KV cache."
        )
        for engine in range(num_engines):
            info.labels(**labels, engine=str(engine)).set(1)

    def _of(self, metric: Any, engine: int, *more: str) -> Any:
        # Steps ask for the same ones again and again, and a look-up takes a lock.
        key = (metric, engine, more)
        if (child := self._children.get(key)) is None:
            child = metric.labels(self._model, str(engine), *more)
            self._children[key] = child
        return child

    def scheduled(self, engine: int, output: SchedulerOutput) -> None:
        if output.preemptions:
            self._of(self._preemptions, engine).inc(len(output.preemptions))
        num_tokens = output.shape.num_decodes + output.shape.num_prefill_tokens
        if num_tokens:
            self._of(self._iteration, engine).observe(num_tokens)

    def first_token(self, engine: int, request: Request, now_s: float) -> None:
        self._of(self._ttft, engine).observe(now_s - request.arrival_s)
        num_prompt, num_hits = request.num_prompt_tokens, request.num_cached_tokens
        self._of(self._prompt, engine).inc(num_prompt)
        self._of(self._cached, engine).inc(num_hits)
        self._of(self._by_source, engine, _SOURCES[0]).inc(num_prompt - num_hits)
        if not self._tier:  # else `state` tells hits of both
            self._of(self._by_source, engine, _SOURCES[1]).inc(num_hits)

    def tokens(self, engine: int, num_tokens: int, gaps_s: Sequence[float]) -> None:
        self._of(self._generated, engine).inc(num_tokens)
        observe = self._of(self._itl, engine).observe
        for gap_s in gaps_s:
            observe(gap_s)

    def ended(self, engine: int, request: Request, reason: str) -> None:
        num_output = request.num_output_tokens
        admitted_s, first_s = request.first_scheduled_s, request.first_token_s
        self._of(self._success, engine, reason).inc()
        decode_s = request.finish_s - first_s
        for metric, value in (
            (self._e2e, request.finish_s - request.arrival_s),
            (self._queue, admitted_s - request.arrival_s),
            (self._inference, request.finish_s - admitted_s),
            (self._prefill, first_s - admitted_s),
            (self._decode, decode_s),
            (self._num_preempted, request.num_preemptions),
            (self._computed, request.num_prompt_tokens - request.num_cached_tokens),
            (self._num_prompt, request.num_prompt_tokens),
            (self._num_output, num_output),
            (self._num_most, num_output),
            (self._n, self._live.run.taken[request.parent_id].best_of),
            (self._tpot, decode_s / (num_output - 1) if num_output > 1 else 0.0),
        ):
            self._of(metric, engine).observe(value)
        if request.max_output_tokens:
            self._of(self._max_tokens, engine).observe(request.max_output_tokens)

    def state(self, live: LiveEngine) -> None:
        for index, engine in enumerate(live.run.engines):
            scheduler = engine.scheduler
            num_waiting = scheduler.num_waiting + scheduler.num_swapped
            self._of(self._running, index).set(scheduler.num_running)
            self._of(self._waiting, index).set(num_waiting)
            self._of(self._by_reason, index, "capacity").set(num_waiting)
            self._of(self._by_reason, index, "deferred").set(0)
            usage = scheduler.cache_usage().kv_cache_usage
            self._of(self._usage, index).set(usage)
            told = scheduler.summary()
            hits = told.get("prefix_cache_hits", 0)
            self._raise(self._queries, index, told.get("prefix_cache_queries", 0))
            self._raise(self._hits, index, hits)
            self._raise(self._by_tier, index, hits, "device")
            if self._tier:
                self._tell_tier(index, hits, told)
            if self._drafts:
                self._tell_drafts(index, live.run.recorder.of_rank[index])
        self._raise(self._success, 0, live.num_aborted, "abort")

    def _tell_tier(self, engine: int, num_hits: int, told: Mapping[str, Any]) -> None:
        num_queries, num_outer = (
            told.get(f"external_prefix_cache_{name}", 0) for name in ("queries", "hits")
        )
        self._raise(self._outer_queries, engine, num_queries)
        self._raise(self._outer_hits, engine, num_outer)
        self._raise(self._by_tier, engine, num_outer, self._tier)
        self._raise(self._by_source, engine, num_hits, _SOURCES[1])
        self._raise(self._by_source, engine, num_outer, _SOURCES[2])

    def _tell_drafts(self, engine: int, recorder: Any) -> None:
        num_drafts, num_tokens, num_by_position = recorder.so_far()
        told = (num_drafts, num_tokens, sum(num_by_position))
        for metric, num in zip(self._drafts, told, strict=True):
            self._raise(metric, engine, num)
        for position, num in enumerate(num_by_position):
            self._raise(self._by_position, engine, num, str(position))

    def _raise(self, counter: Any, engine: int, value: int, *more: str) -> None:
        """Raise a counter to what another one has come to."""
        child = self._of(counter, engine, *more)
        key = (engine, counter._name + "".join(more))
        child.inc(max(0, value - self._told.get(key, 0)))
        self._told[key] = value


def _tier_of(table: EngineConfig) -> str:
    """Return the name of hits in memory behind the pool; empty without any."""
    connector = table.kv_transfer_config
    if connector is not None and connector.extra.secondary_tiers:
        return _TIERS[-1]  # which of them is not noted
    is_there = connector is not None or table.kv_offloading_size is not None
    return _TIERS[1] if is_there else ""
