"""The metrics of SGLang 0.5.9 under its names, types, labels and bounds.

Source: SGLang 0.5.9, ``python/sglang/srt/metrics/collector.py``: the collectors of its
scheduler and of its tokenizer manager. Those of LoRA, storage behind the cache and
experts' balance are made only where these are switched on, and left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sim.serving.metrics.named import Named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client import CollectorRegistry

    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.serving.live import LiveEngine

_TTFT_S: Final = (
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400),
)
_E2E_S: Final = (*_TTFT_S, 600, 1200, 1800, 2400)
_ITL_S: Final = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040),
    *(0.060, 0.080, 0.100, 0.200, 0.400, 0.600, 0.800, 1, 2, 4, 6, 8),
)
_QUEUE_S: Final = (
    *(0.0, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90, 100),
    *(200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000),
    *(2500, 3000),
)
_STAGE_S: Final = tuple(0.001 * 1.62**power for power in range(30))
_COMPILED_S: Final = (
    *(0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 90, 120, 240),
)
_TRAVERSED_S: Final = (
    *(0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 90, 120, 240),
)
_SCHEMAS: Final = (
    *(0, 1, 2, 5, 10, 20, 30, 40, 60, 80, 100, 120, 140, 160, 180, 200, 300, 400, 500),
    *(700, 1000),
)
_EBNF_SIZES: Final = (
    *(0, 50, 100, 200, 300, 500, 1000, 2000, 3000, 5000, 10000, 20000, 30000, 50000),
    100000,
)
_RETRACTIONS: Final = (*range(11), 15, 20, 25, 30, 40, 50, 75, 100)
_DELAYED_PASSES: Final = (0, 5, 20, 29)
_DELAYED_S: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)

_EXECUTION: Final = ("gpu_execution_seconds", "category")
_OUTCOMES: Final = (
    *("input_estimation", "output_allow", "output_reason", "actual_execution"),
)
_STILL: Final = (
    *("pending_prealloc_token_usage", "swa_token_usage", "mamba_usage"),
    *("num_grammar_queue_reqs", "num_running_reqs_offline_batch"),
    *("spec_accept_length", "spec_accept_rate", "num_paused_reqs"),
    *("num_prefill_prealloc_queue_reqs", "num_prefill_inflight_queue_reqs"),
    *("num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"),
    *("kv_transfer_speed_gb_s", "kv_transfer_latency_ms", "kv_transfer_bootstrap_ms"),
    *("kv_transfer_alloc_ms", "kv_transfer_total_mb", "utilization"),
    *("engine_startup_time", "is_cuda_graph", "num_unique_running_routing_keys"),
)
"""Gauges of what no served engine has: they stay 0."""


class SglangMetrics:
    """See `sim.serving.metrics.engine.EngineMetrics`."""

    def __init__(self, registry: CollectorRegistry, live: LiveEngine) -> None:
        self._live = live
        model = live.config.engine.model
        num_engines = len(live.run.engines)
        # The release's scheduler gives its metrics more labels than its front end.
        common = {"model_name": model, "engine_type": "unified", "tp_rank": "0"}
        common |= {"pp_rank": "0", "moe_ep_rank": "0"}
        ranks: tuple[tuple[str, ...], ...] = (tuple(common.values()),)
        names = tuple(common)
        if num_engines > 1:
            ranks = tuple((*ranks[0], str(rank)) for rank in range(num_engines))
            names = (*names, "dp_rank")
        self._ranks, self._front = ranks, (model,)
        self._children: dict[tuple[Any, ...], Any] = {}
        named = Named(registry, "sglang:", names)
        gauge, counter = named.gauge, named.counter
        self._running = gauge("num_running_reqs", "Running requests.")
        self._queued = gauge("num_queue_reqs", "Requests in the waiting queue.")
        self._usage = gauge("token_usage", "Share of the tokens in use.")
        self._used = gauge("num_used_tokens", "Tokens in use.")
        self._decoded = gauge("decode_sum_seq_lens", "Tokens of those that decode.")
        self._throughput = gauge("gen_throughput", "Generated tokens a second.")
        self._hit_rate = gauge("cache_hit_rate", "Hit rate of the prefix cache.")
        self._most = gauge("max_total_num_tokens", "Tokens of the KV cache.")
        self._ratio = gauge("new_token_ratio", "Reserved share of coming tokens.")
        self._retracted = gauge("num_retracted_reqs", "Retracted since the last time.")
        for name in _STILL:
            gauge(name, "Always 0.")
        self._queue = named.histogram("queue_time_seconds", "Queueing.", _QUEUE_S)
        self._realtime = counter("realtime_tokens", "Tokens of steps.", "mode")
        self._retractions = (
            counter("num_retracted_requests", "Retracted requests."),
            counter("num_retracted_input_tokens", "Prompt tokens of these."),
            counter("num_retracted_output_tokens", "Output tokens of these."),
        )
        self._make_unserved(named)
        for metric in named.plain:
            for rank in ranks:
                metric.labels(*rank)
        self._tell_cache(registry)
        self._make_front(registry)
        self._num_aborted = 0
        self._num_retracted = [0] * num_engines
        self._recent = [(0, 0.0)] * num_engines  # tokens since, and that time
        self._num_output = [0] * num_engines

    @staticmethod
    def _make_unserved(named: Named) -> None:
        """Make the metrics of things that served engines lack or cannot know."""
        gauge, counter, histogram = named.gauge, named.counter, named.histogram
        # of an engine that is told what latencies to keep, and of starting
        gauge("max_running_requests_under_SLO", "Not known.")
        gauge("engine_load_weights_time", "Not known.")
        counter("num_bootstrap_failed_reqs", "Requests whose bootstrap failed.")
        counter("num_transfer_failed_reqs", "Requests whose transfer failed.")
        counter("num_prefill_retries", "Prefills begun again.")
        for name in ("cache_hit", "aborted", "timeout"):
            counter(f"num_grammar_{name}", "Of grammars, which are not served.")
        counter("num_grammar", "Requests with a grammar.")
        counter("cuda_graph_passes", "Steps by kind of graph.", "mode")
        counter(_EXECUTION[0], "Time of the GPU.", _EXECUTION[1])
        for name, label in (("realtime_tokens", "mode"), _EXECUTION):
            more = (label, "num_prefill_ranks")
            counter(f"dp_cooperation_{name}", "The same, by ranks.", *more)
        counter("prefill_delayer_outcomes", "Delayed prefills.", *_OUTCOMES)
        histogram("grammar_compilation_time_seconds", "Grammars.", _COMPILED_S)
        histogram("grammar_schema_count", "Grammars.", _SCHEMAS)
        histogram("grammar_ebnf_size", "Grammars.", _EBNF_SIZES)
        for name in ("avg", "max"):
            histogram(f"grammar_tree_traversal_time_{name}", "Grammars.", _TRAVERSED_S)
        histogram("per_stage_req_latency_seconds", "By stage.", _STAGE_S, "stage")
        name = "prefill_delayer_wait"
        histogram(f"{name}_forward_passes", "Delayed prefills.", _DELAYED_PASSES)
        histogram(f"{name}_seconds", "Delayed prefills.", _DELAYED_S)
        for name in ("running", "all"):
            gauge(f"routing_key_{name}_req_count", "By key.", "gt", "le")

    def _tell_cache(self, registry: CollectorRegistry) -> None:
        capacity = self._live.run.capacity
        size, num = capacity.block_size, capacity.num_gpu_blocks
        self._num_tokens = (num - 1) * size
        labels = ("page_size", "num_pages")
        info = Named(registry, "sglang:", labels).gauge("cache_config_info", "Cache.")
        info.labels(str(size), str(self._num_tokens // size)).set(1)

    def _make_front(self, registry: CollectorRegistry) -> None:
        """Make the metrics of the release's tokenizer manager."""
        named = Named(registry, "sglang:", ("model_name",))
        counter, histogram = named.counter, named.histogram
        self._prompt = counter("prompt_tokens", "Prompt tokens.")
        self._output = counter("generation_tokens", "Tokens.")
        self._cached = counter("cached_tokens", "Cached tokens.", "cache_source")
        self._requests = counter("num_requests", "Requests.")
        counter("num_so_requests", "Requests with structured output.")
        self._aborted = counter("num_aborted_requests", "Requests aborted.")
        self._ttft = histogram("time_to_first_token_seconds", "TTFT.", _TTFT_S)
        self._itl = histogram(
            "inter_token_latency_seconds", "Time between two tokens.", _ITL_S
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Latency.", _E2E_S)
        self._per_request = histogram(
            "num_retractions", "Retractions of a request.", _RETRACTIONS
        )

    def _of(self, metric: Any, rank: int | None = None, *more: str) -> Any:
        key = (metric, rank, more)
        if (child := self._children.get(key)) is None:
            common = self._front if rank is None else self._ranks[rank]
            child = self._children[key] = metric.labels(*common, *more)
        return child

    def scheduled(self, engine: int, output: SchedulerOutput) -> None:
        num_decodes, num_prefill = output.shape.num_decodes, 0
        if output.shape.num_prefill_tokens:
            num_prefill = output.shape.num_prefill_tokens
            self._of(self._realtime, engine, "prefill_compute").inc(num_prefill)
        if num_decodes:
            self._of(self._realtime, engine, "decode").inc(num_decodes)
            if not num_prefill:
                lengths = (
                    r.num_prompt_tokens + r.num_output_tokens for r in output.scheduled
                )
                self._of(self._decoded, engine).set(sum(lengths))
        for preemption in output.preemptions:
            request = preemption.request
            told = (1, request.num_prompt_tokens, request.num_output_tokens)
            for metric, num in zip(self._retractions, told, strict=True):
                self._of(metric, engine).inc(num)
            self._num_retracted[engine] += 1

    def first_token(self, engine: int, request: Request, now_s: float) -> None:
        self._of(self._ttft).observe(now_s - request.arrival_s)
        if request.num_cached_tokens:
            hits = self._of(self._realtime, engine, "prefill_cache")
            hits.inc(request.num_cached_tokens)

    def tokens(self, engine: int, num_tokens: int, gaps_s: Sequence[float]) -> None:
        self._num_output[engine] += num_tokens
        observe = self._of(self._itl).observe
        for gap_s in gaps_s:
            observe(gap_s)

    def ended(self, engine: int, request: Request, reason: str) -> None:
        del reason
        self._of(self._prompt).inc(request.num_prompt_tokens)
        self._of(self._output).inc(request.num_output_tokens)
        self._of(self._requests).inc()
        if request.num_cached_tokens:
            cached = self._of(self._cached, None, "device")
            cached.inc(request.num_cached_tokens)
        self._of(self._e2e).observe(request.finish_s - request.arrival_s)
        self._of(self._per_request).observe(request.num_preemptions)
        waited_s = request.first_scheduled_s - request.arrival_s
        self._of(self._queue, engine).observe(waited_s)

    def state(self, live: LiveEngine) -> None:
        now_s = live.run.env.now
        for rank, engine in enumerate(live.run.engines):
            scheduler: Any = engine.scheduler
            usage = scheduler.cache_usage().kv_cache_usage
            told = scheduler.summary()
            queries = told.get("prefix_cache_queries", 0)
            hits = told.get("prefix_cache_hits", 0)
            for metric, value in (
                (self._running, scheduler.num_running),
                (self._queued, scheduler.num_waiting),
                (self._usage, usage),
                (self._used, round(usage * self._num_tokens)),
                (self._most, self._num_tokens),
                (self._ratio, getattr(scheduler, "new_token_ratio", 0.0)),
                (self._hit_rate, hits / queries if queries else 0.0),
                (self._retracted, self._num_retracted[rank]),
            ):
                self._of(metric, rank).set(value)
            self._num_retracted[rank] = 0
            num, since_s = self._recent[rank]
            if now_s - since_s >= 1:
                rate = (self._num_output[rank] - num) / (now_s - since_s)
                self._of(self._throughput, rank).set(rate)
                self._recent[rank] = (self._num_output[rank], now_s)
        self._of(self._aborted).inc(live.num_aborted - self._num_aborted)
        self._num_aborted = live.num_aborted
