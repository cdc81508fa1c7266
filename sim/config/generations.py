"""What each generation of engines is configured with: releases, keys and defaults.

`sim.config.tables` refuses what the chosen generation does not have;
`sim.simulation.assemble` builds it from what is left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sim.costs.base import GraphRule, SwapRule

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation, as a configuration names it.

    Parameters
    ----------
    engine_version
        The release that it follows; the default of ``engine_version``.
    versions
        Pattern of the releases that may be named.
    versions_in_words
        The same for messages.
    keys
        Engine keys that this generation has and others may lack.
    enable_prefix_caching
        Its default; None where it has no prefix caching.
    has_cpu_tier
        Whether blocks can be swapped out.
    schedules_groups
        Whether the samples of a prompt are one scheduled unit; if not, each is a
        request of its own.
    swap
        How blocks are swapped.
    graphs
        What runs as CUDA graphs, unless ``enforce_eager``. Sources: vLLM 0.2.7 and
        0.7.3 ``worker/model_runner.py`` (decodes of up to 256 sequences), V1's
        ``max_cudagraph_capture_size`` (512 tokens; a step with prompts is cut at its
        attention, which is launched).
    defaults
        Of engine keys whose default is another one than elsewhere.
    is_hosted
        Whether the scheduler is that of an installed engine, whose release is the
        default of ``engine_version``.
    """

    engine_version: str
    versions: str
    versions_in_words: str
    keys: frozenset[str]
    enable_prefix_caching: bool | None
    has_cpu_tier: bool
    schedules_groups: bool
    swap: SwapRule = SwapRule()  # noqa: RUF009 - frozen
    graphs: GraphRule = GraphRule()  # noqa: RUF009 - frozen
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_hosted: bool = False

    def takes(self, engine_version: str) -> bool:
        """Whether the generation covers a release."""
        return re.fullmatch(self.versions, engine_version) is not None


POLICY_KEYS = frozenset({"admission", "evictor", "preemption_victim"})
"""Policies of one's own; an engine that is run as it is installed takes none."""

_EVERYWHERE = frozenset({"preemption_victim"})
_TWO_TIERS = _EVERYWHERE | {"watermark"}

_V1 = Generation(
    engine_version="0.33",
    versions=r"0\.(8|9|[12]\d|3[0-3])(\.\d{1,3})?",
    versions_in_words="0.8 to 0.33",
    keys=_EVERYWHERE
    | {
        "admission",
        "enable_chunked_prefill",
        "evictor",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "max_num_active_seqs",
        "max_num_scheduled_tokens",
        "prefill_schedule_interval",
        "scheduler_reserve_full_isl",
        "scheduling_policy",
        "sliding_window",
        "watermark",
    },
    enable_prefix_caching=True,
    has_cpu_tier=False,
    schedules_groups=False,
    swap=SwapRule("batch", "joined", overlap=True),
    graphs=GraphRule(512, only_decodes=False),
)

GENERATIONS: Mapping[str, Generation] = MappingProxyType(
    {
        "cacheflow": Generation(
            engine_version="0.1.0",
            versions=r"0\.(0(\.\d+)?|1(\.[01])?)",
            versions_in_words="0.0 to 0.1.1",
            keys=_TWO_TIERS,
            enable_prefix_caching=None,
            has_cpu_tier=True,
            schedules_groups=True,
        ),
        "v0_2": Generation(
            engine_version="0.2.7",
            versions=r"0\.2(\.\d{1,3})?",
            versions_in_words="0.2",
            keys=_TWO_TIERS | {"max_paddings", "sliding_window"},
            enable_prefix_caching=None,
            has_cpu_tier=True,
            schedules_groups=True,
            graphs=GraphRule(256),
        ),
        "v0": Generation(
            engine_version="0.7.3",
            versions=r"0\.7(\.\d{1,3})?",
            versions_in_words="0.7",
            keys=_TWO_TIERS
            | {
                "enable_chunked_prefill",
                "evictor",
                "long_prefill_token_threshold",
                "max_long_partial_prefills",
                "max_num_partial_prefills",
                "num_lookahead_slots",
                "scheduler_delay_factor",
                "scheduling_policy",
                "sliding_window",
            },
            enable_prefix_caching=False,
            has_cpu_tier=True,
            schedules_groups=True,
            graphs=GraphRule(256),
        ),
        "v1": _V1,
        "hf_fifo": Generation(
            engine_version="5.17",
            versions=r"5\.17(\.\d{1,3})?",
            versions_in_words="transformers 5.17",
            keys=_EVERYWHERE | {"max_blocks_per_request", "safety_margin"},
            enable_prefix_caching=True,
            has_cpu_tier=True,
            schedules_groups=False,
            # gathers blocks on the GPU, then copies contiguous pieces, before the step
            swap=SwapRule("batch"),
            defaults=MappingProxyType({"block_size": 256, "swap_space": 0.0}),
        ),
        "vllm": replace(
            _V1,
            engine_version="the installed release",
            versions=r"0\.(1[1-9]|2\d|3[0-3])(\.\d{1,3})?",
            versions_in_words="0.11 to 0.33",
            keys=_V1.keys - POLICY_KEYS,
            is_hosted=True,
        ),
    }
)
"""Generations by the name that ``engine.scheduler`` takes."""

OURS: Mapping[str, Generation] = MappingProxyType(
    {name: each for name, each in GENERATIONS.items() if not each.is_hosted}
)
"""Those that need no installed engine."""

DEFAULT_GENERATION = GENERATIONS["v1"]
"""Stands in for a user's own scheduler that names no release."""

GENERATION_KEYS = frozenset().union(*(g.keys for g in GENERATIONS.values()))
"""Keys that some generation lacks."""


def owners(key: str) -> str:
    """Return which generations have `key`, as a clause for messages.

    A hosted engine has the keys of the generation that it hosts.
    """
    *others, last = (name for name, g in OURS.items() if key in g.keys)
    return f"{', '.join(others)} and {last} have it" if others else f"{last} has it"


def generation_of(engine_version: str | None) -> Generation:
    """Return the generation of a release; the newest for none, or an unknown one."""
    for generation in OURS.values():
        if engine_version is not None and generation.takes(engine_version):
            return generation
    return DEFAULT_GENERATION
