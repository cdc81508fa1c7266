"""The sections of a page, each a file: from results to sentences, tables and figures.

To add one, write a function from what is shown to its blocks, and name it in
`RUN_SECTIONS` or, for fleets, `FLEET_SECTIONS`.
"""

from __future__ import annotations

from typing import Final

from sim.views.report.page import Section
from sim.views.report.sections.batch import show_batch
from sim.views.report.sections.blocks import show_blocks
from sim.views.report.sections.cache import show_cache
from sim.views.report.sections.capacity import show_capacity
from sim.views.report.sections.drafts import has_drafts, show_drafts
from sim.views.report.sections.fleet import (
    has_pools,
    has_series,
    show_engines,
    show_fleet_summary,
    show_pools,
    show_series,
)
from sim.views.report.sections.latency import show_latency
from sim.views.report.sections.provenance import show_configuration, show_provenance
from sim.views.report.sections.step_time import show_step_time
from sim.views.report.sections.summary import show_summary
from sim.views.report.sections.tiers import has_tiers, show_tiers
from sim.views.report.sections.waterfall import show_waterfall

RUN_SECTIONS: Final = (
    Section("summary", "What matters first", show_summary),
    Section("cache", "KV cache and preemptions", show_cache),
    Section("batch", "Queues and batches", show_batch),
    Section("tiers", "Behind the pool", show_tiers, has_tiers),
    Section("drafts", "Speculative decoding", show_drafts, has_drafts),
    Section("latency", "Latency", show_latency),
    Section("blocks", "Life of blocks", show_blocks),
    Section("waterfall", "Slowest requests", show_waterfall),
    Section("step-time", "Time of a step", show_step_time),
    Section("capacity", "Capacity explained", show_capacity),
    Section("configuration", "Configuration", show_configuration),
    Section("provenance", "What this rests on", show_provenance),
)
"""In the order of the page."""

FLEET_SECTIONS: Final = (
    Section("summary", "What matters first", show_fleet_summary),
    Section("engines", "Engines beside each other", show_engines),
    Section("pools", "Pools against each other", show_pools, has_pools),
    Section("replicas", "Replicas against traffic", show_series, has_series),
    Section("tiers", "Behind the pools", show_tiers, has_tiers),
    Section("latency", "Latency", show_latency),
    Section("waterfall", "Slowest requests", show_waterfall),
    Section("configuration", "Configuration", show_configuration),
    Section("provenance", "What this rests on", show_provenance),
)
"""Of several engines behind a router."""
