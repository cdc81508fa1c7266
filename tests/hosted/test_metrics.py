"""``/metrics`` of a served engine beside those that vLLM itself registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from sim.config.tables import load_config
from sim.scheduler.hosted.api import installed_version
from sim.serving.dialects import dialect_of
from sim.serving.live import LiveEngine
from sim.serving.metrics.engine import metrics_of
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

Facts = dict[str, tuple[str, frozenset[str], tuple[str, ...]]]


def facts(families: Iterable[Metric]) -> Facts:
    """Return type, labels and bounds of each family."""
    return {
        family.name: (
            family.type,
            frozenset(key for s in family.samples for key in s.labels if key != "le"),
            tuple(s.labels["le"] for s in family.samples if "le" in s.labels),
        )
        for family in families
        if family.name.startswith("vllm:")
    }


def test_names_types_labels_and_bounds_are_those_of_vllm() -> None:
    loggers: Any = pytest.importorskip("vllm.v1.metrics.loggers")
    if not installed_version().startswith("0.33"):
        pytest.skip("the served metrics are those of 0.33")
    from vllm.config import CacheConfig  # noqa: PLC0415

    config = load_config(ROOT / "examples/demo.yaml", ["workload.preset.duration_s=9"])
    live = LiveEngine(config)
    ours = metrics_of(live, dialect_of(live).metrics)
    cache = CacheConfig()
    logger = loggers.PrometheusStatLogger(
        SimpleNamespace(
            observability_config=SimpleNamespace(
                show_hidden_metrics=False,
                kv_cache_metrics=False,
                custom_histogram_buckets=None,
                enable_mfu_metrics=False,
            ),
            model_config=SimpleNamespace(
                served_model_name="m",
                max_model_len=live.max_model_len,
                is_diffusion=False,
            ),
            speculative_config=None,
            kv_transfer_config=None,
            ec_transfer_config=None,
            watermark_config=None,
            lora_config=None,
            cache_config=cache,
        )
    )
    logger.log_metrics_info("cache_config", cache)
    assert isinstance(ours, CollectorRegistry)
    assert facts(ours.collect()) == facts(REGISTRY.collect())
