"""Rules of the V1 scheduler that differ from release to release.

Everything that is not named here is the same in all releases. Every switch says its
rule and where it came or went; `dialect_of` is the one place that knows the releases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cache.v1.specs import AttentionSpec, MambaSpec
from sim.errors import SchedulerError

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout

LAST_MINOR = 33
"""Newest release whose decisions were recorded: 0.33."""

FIRST_GROUPS_MINOR = 30
"""The first release that is known to manage windows of several layers as 0.33."""

FIRST_ASYNC_MINOR = 14
"""The first release that schedules ahead unless told otherwise: 0.14.

The argument exists from 0.10 on (vLLM pull request 19970), off up to 0.13 (27614 turned
it on; release notes of 0.14.0: with structured output, 29821, and with EAGLE and MTP,
31998; without pipelines and other drafts). 0.24, 0.26 and 0.28 to 0.33:
``vllm/config/vllm.py``.
"""

_FIRST_AHEAD_IN_STAGES_MINOR = 24
"""0.24 and later schedule ahead in pipelines, too.

From 0.31 on only the first model runner does not, and from 0.29 on the second one is
the default of all models.
"""

_AHEAD_OF_DRAFTS_SINCE = {
    "eagle": 14,
    "eagle3": 14,
    "mtp": 14,
    "draft_model": 28,
    "ngram": 33,
}
"""The minor release from which on a step is scheduled ahead of these drafts."""

_FIRST_MINOR = 8
_LAST_CASCADE_MINOR = 31
_LAST_CASCADE_DEFAULT_MINOR = 17
_VERSION = re.compile(r"v?(\d{1,3})\.(\d{1,3})(\.[0-9a-z.+]{1,40})?")

KEYS_SINCE: dict[str, int] = {
    "max_num_scheduled_tokens": 17,
    "scheduler_reserve_full_isl": 20,
    "watermark": 24,
    "prefill_schedule_interval": 24,
    "max_num_active_seqs": 31,
    "long_prefill_token_threshold_adaptive": 31,
}
"""The minor release from which on an engine argument exists.

``scheduler_reserve_full_isl`` is absent in 0.16.0 and present in 0.20.0; in between
it is taken as absent. ``max_num_scheduled_tokens`` was merged between 0.16 and 0.17
(vLLM pull request 34898).
"""


@dataclass(frozen=True, slots=True)
class V1Dialect:
    """The rules of one range of releases.

    Parameters
    ----------
    minor
        The release asked for: 33 for 0.33.
    has_priority_policy
        Whether ``scheduling_policy="priority"`` and chunked prefill switched off are
        known to be scheduled as here. V1 of 0.8 has no priority policy and another
        rule without chunking.
    skips_over_budget_heads
        Chunking off, and the head of the queue needs more than the budget that is
        left: set it aside and look at the next one; after the scan those set aside go
        back to the front in reverse order. Up to 0.11; from 0.12 on the scan stops.
    reserves_full_isl
        Default of ``scheduler_reserve_full_isl``: a request is admitted only if all
        its known tokens fit. On from 0.20 on, where the key appears.
    puts_unhashed_blocks_first
        Of blocks that are freed, those without a hash are reused next, ahead of
        everything in the free queue, since no hit can come of them. From 0.24 on;
        before, all join the back.
    puts_unhashed_window_blocks_first
        The same where attention has a sliding window: from 0.23 on.
    puts_blocks_first_without_caching
        Whether that holds without prefix caching, too, where no block has a hash. Not
        in 0.27: all join the back there.
    spares_lone_requests
        ``long_prefill_token_threshold`` does not apply in a call that starts with one
        request in the engine, as no other is there to wait. From 0.31 on.
    passes_over_self_preempted
        Priority policy, and a running request gives up its own blocks, being the
        least urgent: the next running request is tried, as from 0.33 on, rather than
        the running part ended.
    steps_back_for_unplanned_victims
        Priority policy, and the victim stands ahead of the request that needs blocks,
        but got no token in this call: the next running request has its turn all the
        same, as from 0.28 on. Up to 0.27 the position moves back for planned victims
        only, so the request behind the one served is passed over in that call.
    knows_async_scheduling, knows_pipelines
        Whether steps in flight, one ahead or in a pipeline, are known to be
        scheduled as here: from 0.28 on (before, output of a preempted request was
        awaited in another way), and from 0.32 on.
    knows_drafts
        Whether speculative decoding is known to be as here: in 0.33.
    knows_offloading
        Whether a CPU tier is known to be stored to and loaded from as here: in 0.33.
    has_tiers_as_here
        Whether a CPU tier is simulated by the rules of 0.33, with a warning in others:
        from 0.28 on, the first whose steps in flight are known.
    preempts_what_is_written
        Steps are scheduled ahead, a connector fills blocks, and the victim has tokens
        in the step in flight: it is preempted all the same. Its blocks come free when
        that step has ended, so that the next victim goes at once, down to the request
        that needs a block. From 0.24 to 0.29 (vLLM issue 49674); from 0.30 on no
        request behind gets a token in that call instead (pull request 49675).
    counts_refused_heads
        Of the requests that are to share a prefix, those count, too, that wait and were
        refused blocks: asking for these left them an empty table. From 0.11.1 to 0.13.
    spaces_prefills
        ``prefill_schedule_interval`` acts. From 0.33 on; in 0.24 to 0.32 the key
        exists, but acts between data-parallel ranks only
        (`Scheduler.space_prefills_by`, from 0.24 on).
    """

    minor: int
    has_priority_policy: bool
    skips_over_budget_heads: bool
    reserves_full_isl: bool
    puts_unhashed_blocks_first: bool
    puts_unhashed_window_blocks_first: bool
    puts_blocks_first_without_caching: bool
    spares_lone_requests: bool
    passes_over_self_preempted: bool
    steps_back_for_unplanned_victims: bool
    spaces_prefills: bool
    knows_async_scheduling: bool
    knows_pipelines: bool
    knows_drafts: bool
    knows_offloading: bool
    has_tiers_as_here: bool
    preempts_what_is_written: bool
    counts_refused_heads: bool

    def schedules_ahead(
        self, *, pipeline_parallel_size: int = 1, draft_method: str | None = None
    ) -> bool:
        """Whether `async_scheduling` is on where it is left out.

        Parameters
        ----------
        pipeline_parallel_size
            Stages.
        draft_method
            ``method`` of the ``speculative_config``, or None without one.

        Notes
        -----
        Source: `FIRST_ASYNC_MINOR`. Executors of one's own, pooling models and the CPU
        backend, where it is off too, are not simulated.
        """
        is_staged = pipeline_parallel_size > 1
        first = _FIRST_AHEAD_IN_STAGES_MINOR if is_staged else FIRST_ASYNC_MINOR
        since = _AHEAD_OF_DRAFTS_SINCE.get(draft_method or "", first)
        return self.minor >= max(first, since)

    @property
    def release(self) -> str:
        """The release, as users write it: ``0.33``."""
        return f"0.{self.minor}"

    def reuses_unhashed_first(self, *, caching: bool, windowed: bool) -> bool:
        """Whether freed blocks without a hash are the next to be reused.

        Parameters
        ----------
        caching
            Whether prefix caching is on.
        windowed
            Whether attention has a sliding window.
        """
        if not caching and not self.puts_blocks_first_without_caching:
            return False
        if windowed:
            return self.puts_unhashed_window_blocks_first
        return self.puts_unhashed_blocks_first

    def check_layout(self, layout: KVCacheLayout, *, caching: bool) -> None:
        """Refuse KV caches of several kinds where a release is not known to be as 0.33.

        Attention of one block size is managed alike from 0.30 on, and of several sizes,
        with prefix caching, from 0.32 on. States differ: up to 0.32 one that is hit may
        count as written in the same call, and earlier ones are chosen otherwise.

        Raises
        ------
        SchedulerError
            With the first release that is known to.
        """
        specs = [group.spec for group in layout.groups]
        sizes = {spec.block_size for spec in specs if isinstance(spec, AttentionSpec)}
        first, kinds = FIRST_GROUPS_MINOR, "layers that need KV caches of several kinds"
        if caching and len(sizes) > 1:
            first, kinds = 32, "prefix hits in blocks of several sizes"
        if any(isinstance(spec, MambaSpec) for spec in specs):
            first, kinds = LAST_MINOR, "layers with a state"
        if self.minor < first:
            raise SchedulerError(
                f"engine_version must be 0.{first} or later for {kinds}, whose rules "
                f"are not known of releases before, got {self.release}"
            )

    @property
    def has_cascade(self) -> bool:
        """Whether a prefix that all requests share may be read once: up to 0.31.

        Source: 0.31.0 and 0.32.0 ``vllm/v1/worker/gpu_model_runner.py``.
        """
        return self.minor <= _LAST_CASCADE_MINOR

    @property
    def cascades_by_default(self) -> bool:
        """Whether it is, with no word on ``disable_cascade_attn``: up to 0.17.

        Source: 0.17.1 and 0.18.0 ``vllm/config/model.py``; pull request 36318.
        """
        return self.minor <= _LAST_CASCADE_DEFAULT_MINOR

    def has_key(self, key: str) -> bool:
        """Whether the release has this engine argument."""
        return self.minor >= KEYS_SINCE[key]

    def refuse_key(self, key: str) -> SchedulerError:
        """Return the error of a key that the release does not have."""
        return SchedulerError(
            f"{key} exists from 0.{KEYS_SINCE[key]} on, the engine_version is "
            f"{self.release}; leave the key out, or raise engine_version"
        )


def dialect_of(engine_version: str) -> V1Dialect:
    """Return the rules of a release.

    Releases that were hosted on the conformance workloads are 0.8.5, 0.11.2, 0.12,
    0.13, 0.16, 0.20, 0.22, 0.24, 0.26 and 0.29 to 0.33; on random ones 0.15, 0.17,
    0.18, 0.23, 0.27 and 0.28 as well. One in between follows the older neighbour where
    the two differ: 0.9 and 0.10 are as 0.8.

    Parameters
    ----------
    engine_version
        A vLLM release from 0.8 to 0.33, such as ``"0.33"`` or ``"0.11.2"``; ``"0.11"``
        is the last of its patches, as it is for capacity.

    Raises
    ------
    SchedulerError
        If it is no such release.

    Notes
    -----
    Source: conformance/README.md beside the decision logs, sections 7 and 9 ("Which
    release follows which rules").
    """
    matched = _VERSION.fullmatch(str(engine_version).strip()[:60])
    if not matched:
        raise SchedulerError(
            f"engine_version must be a vLLM release such as '0.33' or '0.11.2', got "
            f"{str(engine_version)[:40]!r}"
        )
    major, minor = int(matched[1]), int(matched[2])
    if major or not _FIRST_MINOR <= minor <= LAST_MINOR:
        raise SchedulerError(
            f"engine_version must be from 0.{_FIRST_MINOR} to 0.{LAST_MINOR}, the "
            f"releases whose V1 scheduler is known, got {str(engine_version)[:40]!r}"
        )
    return V1Dialect(
        minor=minor,
        has_priority_policy=minor >= 11,
        skips_over_budget_heads=minor <= 11,
        reserves_full_isl=minor >= KEYS_SINCE["scheduler_reserve_full_isl"],
        puts_unhashed_blocks_first=minor >= 24,
        puts_unhashed_window_blocks_first=minor >= 23,
        puts_blocks_first_without_caching=minor != 27,
        spares_lone_requests=minor >= 31,
        passes_over_self_preempted=minor >= 33,
        steps_back_for_unplanned_victims=minor >= 28,
        spaces_prefills=minor >= 33,
        knows_async_scheduling=minor >= 28,
        knows_pipelines=minor >= 32,
        knows_drafts=minor >= 33,
        knows_offloading=minor >= 33,
        has_tiers_as_here=minor >= 28,
        preempts_what_is_written=24 <= minor <= 29,
        counts_refused_heads=minor in {12, 13} or (minor == 11 and matched[3] != ".0"),
    )
