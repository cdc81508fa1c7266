"""Dialects: the differences between the APIs of the kinds of server."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from sim.serving.metrics.sglang import SglangMetrics
from sim.serving.metrics.vllm import VllmMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import CollectorRegistry

    from sim.serving.live import LiveEngine
    from sim.serving.metrics.engine import EngineMetrics

    Page = Callable[[LiveEngine], Any]
    Action = Callable[[LiveEngine], tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of a server.

    Parameters
    ----------
    owner
        What ``/v1/models`` says.
    metrics
        Makes what ``/metrics`` tells.
    health
        Where it tells that it is well, beside ``/health`` and ``/ping``.
    pages
        What else it tells, by path.
    actions
        What can be ordered, by path; each returns a status and what is said.
    keyed, open
        How paths begin that need the key where there is one; those that do not, though
        they begin so.
    """

    owner: str
    metrics: Callable[[CollectorRegistry, LiveEngine], EngineMetrics]
    health: tuple[str, ...] = ()
    pages: Mapping[str, Page] = field(default_factory=dict)
    actions: Mapping[str, Action] = field(default_factory=dict)
    keyed: str = "/v1"
    open: tuple[str, ...] = ()

    def is_keyed(self, path: str) -> bool:
        """Whether a path needs the key where there is one."""
        return path.startswith(self.keyed) and not path.startswith(self.open)


def _server_info(live: LiveEngine) -> dict[str, Any]:
    capacity, table = live.run.capacity, live.config.engine
    num_tokens = (capacity.num_gpu_blocks - 1) * capacity.block_size
    states = [
        {"memory_usage": {"token_capacity": num_tokens}} for _ in live.run.engines
    ]
    return {
        "model_path": table.model,
        "served_model_name": table.model,
        "tp_size": table.tensor_parallel_size,
        "dp_size": table.data_parallel_size,
        "max_total_num_tokens": num_tokens,
        "context_length": live.max_model_len,
        "page_size": capacity.block_size,
        "version": table.version,
        "status": "ready",
        "internal_states": states,
    }


def _model_info(live: LiveEngine) -> dict[str, Any]:
    model = live.config.engine.model
    return {
        "model_path": model,
        "tokenizer_path": model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "max_model_len": live.max_model_len,
    }


def _load(live: LiveEngine) -> list[dict[str, Any]]:
    num_tokens = (live.run.capacity.num_gpu_blocks - 1) * live.block_size
    found = []
    for rank, engine in enumerate(live.run.engines):
        scheduler = engine.scheduler
        usage = scheduler.cache_usage().kv_cache_usage
        found.append(
            {
                "dp_rank": rank,
                "num_reqs": scheduler.num_running + scheduler.num_waiting,
                "num_waiting_reqs": scheduler.num_waiting,
                "num_tokens": round(usage * num_tokens),
                "ts_tic": live.run.env.now,
            }
        )
    return found


def _flush_cache(live: LiveEngine) -> tuple[int, str]:
    """Forget all prefixes, if nothing runs or waits, as the release does."""
    schedulers: list[Any] = [engine.scheduler for engine in live.run.engines]
    if any(each.num_running or each.num_waiting for each in schedulers):
        return 400, "Requests are running or waiting: the cache is as it was.\n"
    for each in schedulers:
        each.tree.evict(each.tree.num_evictable_tokens)
    live.num_flushes += 1
    return 200, "Cache flushed.\n"


DIALECTS: Final[Mapping[str, Dialect]] = MappingProxyType(
    {
        "vllm": Dialect("vllm", VllmMetrics),
        "sglang": Dialect(
            "sglang",
            SglangMetrics,
            health=("/health_generate",),
            pages=MappingProxyType(
                {
                    "/get_server_info": _server_info,
                    "/server_info": _server_info,
                    "/get_model_info": _model_info,
                    "/model_info": _model_info,
                    "/get_load": _load,
                }
            ),
            actions=MappingProxyType({"/flush_cache": _flush_cache}),
            keyed="/",
            open=("/health", "/metrics"),
        ),
    }
)
"""By the name that a generation's `Server` gives."""


def dialect_of(live: LiveEngine) -> Dialect:
    """Return the dialect of an engine's release."""
    return DIALECTS[live.config.engine.generation.server.dialect]
