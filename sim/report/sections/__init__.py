"""The sections of a page, each a file: from results to sentences, tables and figures.

To add one, write a function from what is shown to its blocks, and name it in
`RUN_SECTIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from sim.report.sections.batch import batch
from sim.report.sections.blocks import blocks
from sim.report.sections.cache import cache
from sim.report.sections.capacity import capacity
from sim.report.sections.configuration import configuration
from sim.report.sections.latency import latency
from sim.report.sections.provenance import provenance
from sim.report.sections.step_time import step_time
from sim.report.sections.summary import summary
from sim.report.sections.waterfall import waterfall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sim.report.charts import Chart
    from sim.report.html import Markup
    from sim.report.source import Run

    Blocks: TypeAlias = Iterable[Markup | Chart]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page.

    Parameters
    ----------
    key
        Its anchor: letters and hyphens.
    title
        Its heading.
    blocks
        From the runs to its contents in order.
    """

    key: str
    title: str
    blocks: Callable[[Sequence[Run]], Blocks]


RUN_SECTIONS: Final = (
    Section("summary", "What matters first", summary),
    Section("cache", "KV cache and preemptions", cache),
    Section("batch", "Queues and batches", batch),
    Section("latency", "Latency", latency),
    Section("blocks", "Life of blocks", blocks),
    Section("waterfall", "Slowest requests", waterfall),
    Section("step-time", "Time of a step", step_time),
    Section("capacity", "Capacity explained", capacity),
    Section("configuration", "Configuration", configuration),
    Section("provenance", "What this rests on", provenance),
)
"""In the order of the page."""
