"""Faults that change nothing that can be seen, each with the reason."""

from __future__ import annotations

from typing import Final

_FALSY = "callers ask whether it is true, and None is not"
_SAME_AT_THE_BOUND = "at the bound both ways give the same"
_A_CHECK = "a check of lengths that are equal"
_ONE_BY_ONE = "steps are taken one by one then, to the same end"

EQUIVALENT: Final[dict[str, str]] = {
    "cache/cacheflow/tier.py:Tier.num_stored_tokens: `0` changed (2)": (
        "the other number, of a block that is begun, is at least 1"
    ),
    "cache/sglang/radix_cache.py:RadixCache.__init__: `0` changed (5)": (
        "the root is neither ranked nor evicted"
    ),
    "cache/sglang/radix_cache.py:RadixCache._look: `1` changed": (
        "a clock of which only the order is read"
    ),
    "cache/v1/groups/decodes.py:BlockDecodes._go_on: `num_left > 1` by GtE": (
        "it is not 1 there"
    ),
    "cache/v1/groups/mamba.py:Checkpoints.within: `return 0` returns None": _FALSY,
    "cache/v1/groups/mamba.py:OneStateManager.phases: `return set()` returns None": (
        _FALSY
    ),
    "cache/v1/groups/window.py:SlidingWindowManager.num_passed_tokens: "
    "`num_tokens > 0` by GtE": _SAME_AT_THE_BOUND,
    "cache/v1/id_tables.py:IdTables.take: `num_blocks > len(free)` by GtE": (
        "ids that are not needed yet go below those that are taken"
    ),
    "cache/v1/policies/clairvoyant.py:Clairvoyant._next_reader: `0` changed": (
        "the first reader has begun when its content is cached"
    ),
    "cache/v1/runs/extents.py:ExtentQueue.__init__: `0` changed": (
        "nothing reads the sentinel's numbers"
    ),
    "sim/costs/measured/rest.py:MeasuredRest.head: `False` changed (3)": (
        "of the head only its seconds and its one width are asked"
    ),
    "sim/fleet/autoscaling/target_tracking.py:TargetTracking._changed: "
    "`s > now_s - span_s` by GtE": "each policy asks for changes within its own period",
    "sim/scheduler/groups/decodes.py:GroupDecodes.quiet_steps: "
    "`return 0` returns None (2)": _FALSY,
    "sim/engine/verification.py:SpeculativeSampler.__call__: "
    "`num_outputs <= num_room` by Lt": _SAME_AT_THE_BOUND,
    "sim/fleet/autoscaling/autoscaler.py:Autoscaler.reversals_s: "
    "`two.after > two.before` by GtE": "a change leaves no number as it was",
    "sim/fleet/routers/block_index.py:prompt_runs: `True` changed": _A_CHECK,
    "sim/fleet/routers/session.py:_point: `8` changed": (
        "another digest spreads sessions as evenly"
    ),
    "sim/hardware/capacity/activations.py:activation_peak_bytes: "
    "`compiling > stepping` by GtE": _SAME_AT_THE_BOUND,
    "sim/hardware/capacity/encoders.py:encoding_bytes: `0` changed": (
        "less than what images take, as a byte is"
    ),
    "sim/hardware/capacity/pool.py:_no_room: `0` changed (3)": "a byte of gigabytes",
    "sim/hardware/capacity/sglang.py:Launch.default_fraction: `10240` changed": (
        "the share is rounded to a thousandth"
    ),
    "sim/hardware/capacity/sglang.py:_num_prompt_graphs: `1` changed": (
        "sizes beyond are left out below"
    ),
    "sim/hardware/capacity/sglang.py:_num_prompt_graphs: `4097` changed": (
        "the next size is 4,352"
    ),
    "sim/scheduler/sglang/adder.py:PrefillAdder._all_expected: `left < most` by LtE": (
        _SAME_AT_THE_BOUND
    ),
    "sim/scheduler/sglang/clocked.py:ClockedSglangScheduler.__init__: "
    "`0` changed (2)": ("only which order is larger is asked"),
    "sim/scheduler/sglang/clocked.py:ClockedSglangScheduler.__init__: without "
    "`self._output = SglangOutput()`": "it is read behind `form`, which sets it",
    "sim/scheduler/sglang/clocked.py:ClockedSglangScheduler.advance: `1` changed": (
        "in pages of one token every decode opens one, counted either way"
    ),
    "sim/scheduler/sglang/holdings.py:Holdings.extend: `True` changed": _A_CHECK,
    "sim/scheduler/sglang/holdings.py:Holdings.grow: `True` changed": _A_CHECK,
    "sim/scheduler/sglang/policy.py:SchedulePolicy._match: `1` changed": (
        "no slot is taken there"
    ),
    "sim/scheduler/sglang/queue.py:WaitingQueue.withdraw: "
    "`return False` returns None": _FALSY,
    "sim/scheduler/sglang/requests.py:Entry.tokens: `64` changed": (
        "room for tokens to come"
    ),
    "sim/scheduler/sglang/scheduler.py:SglangScheduler._take_waiting: "
    "`each.slot >= 0` by Gt": "rows begin at 1 in the releases that come here",
    "sim/scheduler/sglang/state.py:SglangState.__init__: `0` changed": (
        "a step in which nothing has changed is told of the tree once more"
    ),
    "sim/scheduler/sglang/state.py:SglangState.__init__: `False` changed": (
        "the ratio that it resets is the first one yet"
    ),
    "sim/scheduler/sglang/clocked.py:ClockedSglangScheduler._prefill_batch: "
    "`self.running_batch.is_full or not self.queue.entries` by And": (
        "the method that it shortens says so itself, later"
    ),
    "sim/scheduler/sglang/holdings.py:Holdings._count: `sign > 0` by GtE": (
        "the sign is 1 or -1"
    ),
    "sim/scheduler/sglang/requests.py:Entry.tokens: "
    "without `self.num_known = num_tokens`": (
        "tokens that are known are written down once more, the same"
    ),
    "sim/scheduler/sglang/requests.py:Entry.__init__: `1` changed": (
        "any negative number is no slot"
    ),
    "sim/scheduler/sglang/requests.py:Entry.tokens: "
    "`num_tokens > self.num_known` by GtE": "no token is written then",
    "sim/scheduler/sglang/requests.py:SglangOutput.take: `0` changed": (
        "the budget of these counts is not asked"
    ),
    "sim/scheduler/v1/batch_queue.py:BatchQueueScheduler.__init__: "
    "without `self._some_left = False`": (
        "asked before the first call, a missing answer counts as no"
    ),
    "sim/scheduler/v1/connectors/pulling.py:ProducerConnector.is_quiet: "
    "`return not self._sends` returns None": _ONE_BY_ONE,
    "sim/scheduler/v1/connectors/scheduler.py:ConnectorScheduler._is_ready: "
    "`return False` returns None": _FALSY,
    "sim/scheduler/v1/connectors/scheduler.py:ConnectorScheduler.quiet_steps: "
    "`return super().quiet_steps(most)` returns None": _ONE_BY_ONE,
    "sim/scheduler/v1/plain_admission.py:PlainAdmission.admit: "
    "`num_tokens < num_whole` by LtE": _SAME_AT_THE_BOUND,
    "sim/scheduler/v1/scheduler.py:Scheduler._all_decodes_get_on: "
    "`return True` returns None": (
        "all that run are walked then, as if a decode might go without a token"
    ),
    "sim/scheduler/v1/scheduler.py:Scheduler._allocate_or_preempt: "
    "`return False` returns None (2)": _FALSY,
    "sim/scheduler/v1/speculative.py:SpeculativeScheduler.__init__: "
    "`num_slots // self.block_size` by Mult": (
        "an upper bound, above which blocks are counted one by one"
    ),
    "sim/scheduler/v1/speculative.py:SpeculativeScheduler.num_draft_blocks: "
    "`len(self.layout.groups) > 1` by GtE": (
        "of one group, blocks and entries are counted alike"
    ),
    "workloads/analysis/lru.py:TouchCounts.__init__: `0` changed": (
        "each place of the tree is written before it is read"
    ),
    "workloads/analysis/paths.py:runs: `1` changed": (
        "numbers of earlier blocks are hashed only, and a run of one has its own key"
    ),
    "workloads/arrivals/diurnal.py:DiurnalArrivals.times_s: `wanted / turn` by Mult": (
        "whole turns that are taken away come back; only rounding differs"
    ),
    "workloads/lengths/empirical.py:EmpiricalLength.__post_init__: `True` changed": (
        _A_CHECK
    ),
    "workloads/traces/mooncake.py:MooncakeTraceReader._chained: `1` changed (2)": (
        "numbers of outputs are given again when requests are in order"
    ),
    "workloads/traces/mooncake.py:MooncakeTraceWriter.lines: `True` changed": _A_CHECK,
}
