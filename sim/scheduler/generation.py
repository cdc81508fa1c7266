"""A generation of engines: one object that says everything about it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from sim.scheduler.settings import CacheConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


SwapVariant = Literal["loop", "batch", "kernel"]
"""One call a piece of a block, one for all pieces, or a kernel that copies."""
KvLayout = Literal["separate", "joined", "cross_layer"]
"""Whether a block is two pieces a layer (K and V), one a layer, or one."""


@dataclass(frozen=True, slots=True)
class SwapRule:
    """How an engine moves blocks between host and GPU, for the cost models.

    Parameters
    ----------
    variant, layout
        See `sim.costs.transfers`.
    overlap
        Whether transfers run beside the step rather than before it.
    """

    variant: SwapVariant = "loop"
    layout: KvLayout = "separate"
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class GraphRule:
    """Which steps an engine replays as CUDA graphs, so that it launches no kernels.

    Parameters
    ----------
    max_tokens
        Tokens of a step, prompts and decodes, at most; 0 without graphs.
    only_decodes
        Whether a step with a prompt is never one.
    piece_launches
        What the host launches for each layer of a step with prompts that is one: graphs
        in pieces, with attention between them. 0 where it is one graph.
    has_whole_decodes
        Whether a step of decodes alone is one graph all the same.
    """

    max_tokens: int = 0
    only_decodes: bool = True
    piece_launches: int = 0
    has_whole_decodes: bool = True

    def replays(self, num_tokens: int, num_prefills: int) -> bool:
        """Whether a step of so many tokens and prompts is a graph."""
        return num_tokens <= self.max_tokens and not (
            self.only_decodes and num_prefills
        )

    def cuts(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens is graphs in pieces, even of decodes."""
        return not self.has_whole_decodes and self.replays(num_tokens, 0)


@dataclass(frozen=True, slots=True)
class HostRule:
    """Seconds of the host that a scheduler takes of each request of a step.

    Parameters
    ----------
    schedule_request_s
        Seconds a request of a step, to form the step and to process its output.
    is_hidden
        Whether that runs beside the GPU, for another step.
    """

    schedule_request_s: float = 0.0
    is_hidden: bool = False


SCHEDULE_REQUEST_S: Final = 15e-6
"""Of V1: 8 to 10 us in a call of the scheduler and 5 to 7 us to process the output, of
0.33's own, with 8 to 256 requests, on one core of an AMD EPYC; 25 us a step beside it
are within `step_overhead_s`. Two A100 whose scheduler ran beside the GPU took 10.6 to
13.3 us a request and step less (vLLM, pull request 23914; 32 to 256 at once)."""
ONE_BY_ONE = "decodes are looked at one by one"


@dataclass(frozen=True, slots=True)
class Parts:
    """The code of a generation, imported when it is asked for.

    Parameters
    ----------
    scheduler
        Constructed as ``scheduler(settings, cache)``.
    queued
        In its place where settings have several steps in flight
        (``max_concurrent_batches``), or None.
    ahead
        In place of that where one step is scheduled ahead and decodes stay on a clock;
        its ``reason_not_to(settings, cache)`` says where that is not built. Or None.
    speculative, speculative_connected
        In place of all where settings have a ``speculative_config``, without and with a
        KV connector, or None.
    clocked
        In place of `scheduler` where decodes are to stay on a clock; it has a
        ``reason_not_to``, too. Or None: `scheduler` does that by itself, or never.
    connected, queued_connected, ahead_connected
        In place of `scheduler`, `queued` and `ahead` where settings have a KV connector
        (``has_connector``), or None. The first may be a function.
    settings
        A frozen dataclass: what the generation is configured with. A field whose
        engine key has another name says so in its metadata, as ``key``.
    log
        Constructed as ``log(scheduler, names)``: a `sim.scheduler.log.lines.StepLog`.
    evictors
        Eviction policies by the name that ``engine.evictor`` takes.
    evictor_role
        The class that all of them are derived of.
    """

    scheduler: type
    settings: type
    log: type
    evictors: Mapping[str, type] = field(default_factory=dict)
    evictor_role: type | None = None
    queued: type | None = None
    ahead: Any = None
    speculative: type | None = None
    speculative_connected: type | None = None
    connected: Callable[..., Any] | None = None
    queued_connected: Callable[..., Any] | None = None
    ahead_connected: Any = None
    clocked: Any = None

    def construct(
        self, settings: Any, cache: CacheConfig, *, on_clock: bool = False
    ) -> Any:
        """Construct the scheduler.

        Of those with several steps in flight, one that keeps decodes on a clock is
        taken if that is asked for and known of these settings.
        """
        if self.speculative is not None and settings.speculative_config is not None:
            speculative = self.speculative
            if self.speculative_connected is not None and settings.has_connector:
                speculative = self.speculative_connected
            return speculative(settings, cache)
        is_queued = self.queued is not None and settings.max_concurrent_batches > 1
        why = "several steps are in flight" if is_queued else ONE_BY_ONE
        kind: Any = self.queued if is_queued else self.scheduler
        clocked = self.ahead if is_queued else self.clocked
        if self.connected is not None and settings.has_connector:
            kind = self.queued_connected if is_queued else self.connected
            clocked = self.ahead_connected if is_queued else None
        if clocked is None or not on_clock:
            return kind(settings, cache)
        why_stepwise = clocked.reason_not_to(settings, cache)
        if not why_stepwise:
            return clocked(settings, cache)
        scheduler = kind(settings, cache)
        scheduler.stepwise_reason = f"{why} {why_stepwise}"
        return scheduler

    def settings_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of an engine's arguments that are settings, by field.

        What is None is left to the default.
        """
        names = {
            each.metadata.get("key", each.name): each.name
            for each in fields(self.settings)
            if each.init
        }
        return {
            names[key]: value
            for key, value in arguments.items()
            if key in names and value is not None
        }


def cache_of(arguments: Mapping[str, Any]) -> CacheConfig:
    """Return the KV cache that an engine's arguments describe."""
    names = {each.name for each in fields(CacheConfig)}
    dense = {"prefix_cache_retention_interval"}  # None is a value of its own
    return CacheConfig(
        **{
            key: value
            for key, value in arguments.items()
            if key in names and (value is not None or key in dense)
        }
    )


@dataclass(frozen=True, slots=True)
class Server:
    """How the release's own server is started, and what it calls what it tells.

    Parameters
    ----------
    command
        What stands before the model.
    options
        Engine keys beside the common ones that it has an option for.
    valued_switches
        Switches that are written ``--key=True``: there is no ``--no-key``.
    names
        Its own options, by the keys that mean the same.
    off_switches
        Options that turn a key off, by the key: there is none that turns it on.
    eager
        The option that leaves CUDA graphs out.
    pool_in_tokens
        The option that says how many tokens the pool has, where blocks are not said.
    dialect
        The server whose names its metrics and pages have; see `sim.serving.dialects`.
    """

    command: tuple[str, ...] = ("vllm", "serve")
    options: frozenset[str] = frozenset()
    valued_switches: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    off_switches: Mapping[str, str] = field(default_factory=dict)
    eager: str = "enforce_eager"
    pool_in_tokens: str = ""
    dialect: str = "vllm"


_SWAP, _GRAPHS, _SERVER = SwapRule(), GraphRule(), Server()


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation, as a configuration names it.

    Parameters
    ----------
    name
        What ``engine.scheduler`` calls it.
    parts
        Imports its code.
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
    watermark
        Share of the GPU pool that admissions leave free unless ``watermark`` is set.
    swap
        How blocks are swapped.
    graphs
        What runs as CUDA graphs, unless ``enforce_eager``. Sources: vLLM 0.2.7 and
        0.7.3 ``worker/model_runner.py`` (decodes of up to 256 sequences), V1's
        ``max_cudagraph_capture_size`` (512 tokens; a step with prompts is cut at its
        attention, which is launched).
    schedule_request_s
        What its scheduler takes of each request of a step; 0 where no public figure is
        known.
    defaults
        Of engine keys whose default is another one than elsewhere.
    budget_follows_length
        Whether ``max_num_batched_tokens`` is by default what the longest prompt needs,
        unless prompts are cut into chunks.
    always_chunks
        Whether prompts are always cut into chunks; elsewhere ``enable_chunked_prefill``
        and the release decide.
    fills_last_block
        Whether one sequence may have all blocks of the pool; elsewhere one stays out of
        reach, such as V1's null block.
    keeps_decode_clock
        Whether its scheduler leaves decodes on a clock, so that steps may be taken in
        stretches.
    has_batch_queue
        Whether its scheduler may have several steps in flight, as pipelines do.
    has_pipelines
        Whether it may be a pipeline.
    has_ranks, has_drafts
        Whether it may be one of several data-parallel ranks, and verify draft tokens.
    has_kv_cache_groups
        Whether layers of several kinds share its pool.
    has_kv_connectors
        Whether blocks may come from a tier behind the pool, or another engine.
    kv_flow
        How its prefillers hand prompts to decoders (``fleet.connector.kind``); empty if
        they do not.
    always_ahead
        Whether all its releases form a step ahead by default.
    ahead_in_words
        What its releases call that.
    heeds_priority_in_chunks
        Whether the priority policy acts with chunked prefill, too.
    release
        Returns the installed release, which is the default of ``engine_version``;
        only where the scheduler is that of an installed engine.
    server
        How the release's own server is started.
    """

    name: str
    parts: Callable[[], Parts]
    engine_version: str
    versions: str
    versions_in_words: str
    keys: frozenset[str]
    enable_prefix_caching: bool | None
    has_cpu_tier: bool
    schedules_groups: bool
    watermark: float = 0.0
    swap: SwapRule = _SWAP
    graphs: GraphRule = _GRAPHS
    schedule_request_s: float = 0.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    budget_follows_length: bool = False
    always_chunks: bool = False
    fills_last_block: bool = False
    keeps_decode_clock: bool = False
    has_batch_queue: bool = False
    has_pipelines: bool = True
    has_ranks: bool = False
    has_drafts: bool = False
    has_kv_cache_groups: bool = False
    has_kv_connectors: bool = False
    kv_flow: str = ""
    always_ahead: bool = False
    ahead_in_words: str = "asynchronous scheduling"
    heeds_priority_in_chunks: bool = True
    release: Callable[[], str] | None = None
    server: Server = _SERVER

    @property
    def is_hosted(self) -> bool:
        """Whether the scheduler is that of an installed engine."""
        return self.release is not None

    def takes(self, engine_version: str) -> bool:
        """Whether the generation covers a release."""
        return re.fullmatch(self.versions, engine_version) is not None

    def longest_sequence(self, num_gpu_blocks: int, block_size: int) -> int:
        """Return how many tokens of one sequence a pool may ever hold."""
        return (num_gpu_blocks - (not self.fills_last_block)) * block_size

    def make(self, arguments: Mapping[str, Any]) -> Any:
        """Construct the scheduler from an engine's arguments; it takes its own.

        Raises
        ------
        SchedulerError, CacheError
            If the arguments do not fit together.
        """
        parts = self.parts()
        settings = parts.settings(**parts.settings_of(arguments))
        return parts.construct(settings, cache_of(arguments))
