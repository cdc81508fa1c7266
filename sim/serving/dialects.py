"""What sets the API of one kind of server apart from that of another."""

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
    """

    owner: str
    metrics: Callable[[CollectorRegistry, LiveEngine], EngineMetrics]
    health: tuple[str, ...] = ()
    pages: Mapping[str, Page] = field(default_factory=dict)


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
        ),
    }
)
"""By the name that a generation's `Server` gives."""


def dialect_of(live: LiveEngine) -> Dialect:
    """Return the dialect of an engine's release."""
    return DIALECTS[live.config.engine.generation.server.dialect]
