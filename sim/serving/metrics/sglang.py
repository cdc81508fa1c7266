"""The metrics of SGLang under its names.

Source: SGLang, ``python/sglang/srt/observability/metrics_collector.py``. What routers,
autoscalers and dashboards read is here; gauges of pools that a plain model has not,
of disaggregation, grammars and LoRA are left out.
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


class SglangMetrics:
    """See `sim.serving.metrics.engine.Dialect`."""

    def __init__(self, registry: CollectorRegistry, live: LiveEngine) -> None:
        self._values = {
            "model_name": live.config.engine.model,
            "engine_type": "unified",
            "tp_rank": "0",
            "pp_rank": "0",
        }
        named = Named(registry, "sglang:", tuple(self._values))
        gauge, counter, histogram = named.gauge, named.counter, named.histogram
        self._running = gauge("num_running_reqs", "Running requests.")
        self._queued = gauge("num_queue_reqs", "Requests in the waiting queue.")
        self._usage = gauge("token_usage", "Share of the tokens in use.")
        self._full = gauge("full_token_usage", "The same, of full attention.")
        self._used = gauge("num_used_tokens", "Tokens in use.")
        self._throughput = gauge("gen_throughput", "Generated tokens a second.")
        self._hit_rate = gauge("cache_hit_rate", "Hit rate of the prefix cache.")
        capacity = live.run.capacity
        self._num_tokens = (capacity.num_gpu_blocks - 1) * capacity.block_size
        most = gauge("max_total_num_tokens", "Tokens of the KV cache.")
        most.labels(**self._values).set(self._num_tokens)
        self._prompt = counter("prompt_tokens", "Prompt tokens.", "is_streaming")
        self._output = counter("generation_tokens", "Tokens.", "is_streaming")
        self._cached = counter("cached_tokens", "Cached tokens.", "cache_source")
        self._requests = counter("num_requests", "Requests.", "is_streaming")
        self._aborted = counter("num_aborted_requests", "Requests aborted.")
        self._ttft = histogram(
            "time_to_first_token_seconds", "TTFT.", _TTFT_S, "is_streaming"
        )
        self._itl = histogram(
            "inter_token_latency_seconds", "Time between two tokens.", _ITL_S
        )
        self._e2e = histogram(
            "e2e_request_latency_seconds", "Latency.", _E2E_S, "is_streaming"
        )
        self._queue = histogram("queue_time_seconds", "Queueing.", _TTFT_S)
        self._num_aborted = 0
        self._recent = (0, 0.0)  # tokens since, and that time
        self._num_output = 0

    def _of(self, metric: Any, **more: str) -> Any:
        return metric.labels(**self._values, **more)

    def scheduled(self, engine: int, output: SchedulerOutput) -> None:
        """Count nothing: SGLang counts requests when they have ended."""

    def first_token(self, engine: int, request: Request, now_s: float) -> None:
        del engine
        told = self._of(self._ttft, is_streaming="true")
        told.observe(now_s - request.arrival_s)

    def tokens(self, engine: int, num_tokens: int, gaps_s: Sequence[float]) -> None:
        del engine
        self._num_output += num_tokens
        observe = self._of(self._itl).observe
        for gap_s in gaps_s:
            observe(gap_s)

    def ended(self, engine: int, request: Request, reason: str) -> None:
        del engine, reason
        stream = {"is_streaming": "true"}
        self._of(self._prompt, **stream).inc(request.num_prompt_tokens)
        self._of(self._output, **stream).inc(request.num_output_tokens)
        self._of(self._requests, **stream).inc()
        cached = self._of(self._cached, cache_source="device")
        cached.inc(request.num_cached_tokens)
        self._of(self._e2e, **stream).observe(request.finish_s - request.arrival_s)
        self._of(self._queue).observe(request.first_scheduled_s - request.arrival_s)

    def state(self, live: LiveEngine) -> None:
        schedulers = [engine.scheduler for engine in live.run.engines]
        self._of(self._running).set(sum(each.num_running for each in schedulers))
        self._of(self._queued).set(sum(each.num_waiting for each in schedulers))
        usages = [each.cache_usage().kv_cache_usage for each in schedulers]
        usage = sum(usages) / len(usages)
        self._of(self._usage).set(usage)
        self._of(self._full).set(usage)
        self._of(self._used).set(round(usage * self._num_tokens))
        told = [each.summary() for each in schedulers]
        queries = sum(each.get("prefix_cache_queries", 0) for each in told)
        hits = sum(each.get("prefix_cache_hits", 0) for each in told)
        self._of(self._hit_rate).set(hits / queries if queries else 0.0)
        num, since_s = self._recent
        now_s = live.run.env.now
        if now_s - since_s >= 1:
            rate = (self._num_output - num) / (now_s - since_s)
            self._of(self._throughput).set(rate)
            self._recent = (self._num_output, now_s)
        self._of(self._aborted).inc(live.num_aborted - self._num_aborted)
        self._num_aborted = live.num_aborted
