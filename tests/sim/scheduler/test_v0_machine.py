"""The V0 scheduler under random traffic and rules (invariants 1, 2, 7 and 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cache.sequences import SequenceStatus
from sim.scheduler.base import PreemptionMode
from sim.scheduler.request import RequestStatus
from sim.scheduler.v0.scheduler import Scheduler
from tests.sim.scheduler import policies
from tests.sim.scheduler.group_steps import Steps, make

if TYPE_CHECKING:
    from sim.scheduler.groups.output import GroupSchedulerOutput, ScheduledSequenceGroup
    from sim.scheduler.request import Request

BLOCK_SIZE = 4
NUM_GPU_BLOCKS = 24
NUM_CPU_BLOCKS = 2_000
_RUNNING = SequenceStatus.RUNNING

RULES = st.fixed_dictionaries(
    {
        "preemption_mode": st.sampled_from([None, *PreemptionMode]),
        "watermark": st.sampled_from([0.0, 0.1]),
        "num_lookahead_slots": st.sampled_from([0, 0, 3, 6]),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "max_num_batched_tokens": st.sampled_from([16, 40]),
        "max_num_seqs": st.sampled_from([4, 9]),
        "delay_factor": st.sampled_from([0.0, 0.0, 3.0]),
        "preemption_victim": policies.victims(),
    }
)
CACHES = st.sampled_from(
    [{}, {"enable_prefix_caching": True}, {"sliding_window": 2 * BLOCK_SIZE}]
)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, step and are aborted; what is admitted comes to its end."""

    chunking = False

    def start_with(self, **rules: Any) -> None:
        self.run = Steps(
            make(
                Scheduler,
                num_gpu_blocks=NUM_GPU_BLOCKS,
                num_cpu_blocks=NUM_CPU_BLOCKS,
                enable_chunked_prefill=self.chunking,
                **rules,
            )
        )
        self.has_window = rules.get("sliding_window") is not None
        self.has_caching = rules.get("enable_prefix_caching", False)
        self.num_ahead = rules["num_lookahead_slots"]
        self.budget = rules["max_num_batched_tokens"]
        self.output: GroupSchedulerOutput | None = None
        self.served: list[Request] = []

    @rule(
        shared=st.integers(0, 2),
        num_shared_tokens=st.sampled_from([0, 0, 4, 9, 12]),
        num_own_tokens=st.integers(1, 24),
        num_output_tokens=st.integers(1, 14),
        width=st.sampled_from([1, 1, 2, 3]),
        early=st.lists(st.integers(1, 14), min_size=3, max_size=3),
        beam_percent=st.sampled_from([None, None, 50, 100]),
        priority=st.integers(0, 2),
    )
    def arrive(
        self,
        *,
        shared: int,
        num_shared_tokens: int,
        num_own_tokens: int,
        num_output_tokens: int,
        width: int,
        early: list[int],
        beam_percent: int | None,
        priority: int,
    ) -> None:
        beam = beam_percent is not None and width > 1
        branches = tuple(min(num_output_tokens, num) for num in early[:width])
        if beam or width == 1:
            branches = ()
        index = len(self.run.requests)
        prompt = ((10_000 + shared, num_shared_tokens), (2 * index, num_own_tokens))
        request = self.run.add(
            num_shared_tokens + num_own_tokens,
            num_output_tokens,
            width=width,
            branches=branches,
            use_beam_search=beam,
            beam_seed=index,
            beam_percent=beam_percent or 0,
            priority=priority,
            prompt=tuple(segment for segment in prompt if segment[1]),
        )
        if self.run.scheduler.admission_error(request) is not None:
            self.run.scheduler.abort(request)
        else:
            self.served.append(request)

    @precondition(lambda self: self.output is None)
    @rule()
    def schedule(self) -> None:
        scheduler = self.run.scheduler
        lengths = {
            seq.seq_id: seq.num_computed_tokens
            for queue in (scheduler.waiting, scheduler.running, scheduler.swapped)
            for group in queue
            for seq in group.get_unfinished_seqs()
        }
        self.output = self.run.call()
        entries = self.output.scheduled_seq_groups
        groups = [entry.seq_group for entry in entries]
        assert all(group in scheduler.running for group in groups)
        assert len(set(map(id, groups))) == len(groups)
        victims = {p.request for p in self.output.preemptions}
        swapped_back = {p.request for p in self.output.preemptions} & set(
            self.output.scheduled
        )
        assert not victims & swapped_back
        assert not self.output.ignored
        for entry in entries:
            self.chunk_is_next(entry, lengths)
        self.budget_is_kept(entries)
        self.slots_are_there(entries)

    def chunk_is_next(
        self, entry: ScheduledSequenceGroup, num_computed: dict[int, int]
    ) -> None:
        """A prefill goes on where it stood, and not beyond its end."""
        seqs = entry.seq_group.get_seqs(_RUNNING)
        if not entry.is_prefill:
            assert entry.token_chunk_size == len(seqs)
            return
        assert entry.token_chunk_size > entry.num_cached_tokens >= 0
        if len(seqs) > 1:
            assert all(seq.num_computed_tokens == seq.get_len() for seq in seqs)
            return
        (seq,) = seqs
        assert entry.num_computed_tokens == num_computed[seq.seq_id]
        after = entry.num_computed_tokens + entry.token_chunk_size
        assert seq.num_computed_tokens == after <= seq.get_len()

    def budget_is_kept(self, entries: list[ScheduledSequenceGroup]) -> None:
        costs = [entry.token_chunk_size - entry.num_cached_tokens for entry in entries]
        if self.chunking or any(entry.is_prefill for entry in entries):
            oversize = len(entries) == 1 and entries[0].seq_group.num_seqs() > 1
            assert sum(costs) <= self.budget or oversize
        if not self.chunking:
            assert len({entry.is_prefill for entry in entries}) <= 1

    def slots_are_there(self, entries: list[ScheduledSequenceGroup]) -> None:
        """Every decode has slots for its tokens, and writes to a block of its own."""
        manager = self.run.scheduler.block_manager
        written: list[int] = []
        for entry in entries:
            if entry.is_prefill:
                continue
            for seq in entry.seq_group.get_seqs(_RUNNING):
                table = manager.get_block_table(seq)
                num_slots = seq.get_len() + self.num_ahead
                assert num_slots <= len(table) * BLOCK_SIZE
                written.append(table[(seq.get_len() - 1) // BLOCK_SIZE])
        if not self.has_caching:
            assert len(set(written)) == len(written)

    @precondition(lambda self: self.output is not None)
    @rule()
    def emit(self) -> None:
        assert self.output is not None
        self.run.emit(self.output)
        self.output = None

    @precondition(lambda self: self.output is None)
    @rule()
    def step(self) -> None:
        self.schedule()
        self.emit()

    @precondition(lambda self: self.output is None)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        unfinished = [r for r in self.run.requests if not r.status.is_finished]
        if unfinished:
            request = data.draw(st.sampled_from(unfinished))
            self.run.scheduler.abort(request)
            self.run.scheduler.abort_seq_group(request.request_id)  # already gone

    @invariant()
    def requests_are_conserved(self) -> None:
        scheduler = self.run.scheduler
        scheduler.check()
        unfinished = [r for r in self.run.requests if not r.status.is_finished]
        assert scheduler.get_num_unfinished_seq_groups() == len(unfinished)
        statuses = [r.status for r in unfinished]
        assert scheduler.num_running == statuses.count(RequestStatus.RUNNING)
        assert scheduler.num_swapped == statuses.count(RequestStatus.SWAPPED)

    def teardown(self) -> None:
        if self.output is not None:
            self.run.emit(self.output)
        self.run.run(5_000)
        assert all(r.status is not RequestStatus.FINISHED_REJECTED for r in self.served)
        manager = self.run.scheduler.block_manager
        has_null = self.has_window and manager.block_allocator.has_null_block
        assert manager.get_num_free_gpu_blocks() == NUM_GPU_BLOCKS - has_null
        assert manager.get_num_free_cpu_blocks() == NUM_CPU_BLOCKS
        assert manager.num_logical_blocks == 0


class DefaultMachine(SchedulerMachine):
    @initialize(rules=RULES, cache=CACHES)
    def start(self, rules: dict[str, Any], cache: dict[str, Any]) -> None:
        self.start_with(**rules, **cache)


class ChunkedMachine(SchedulerMachine):
    chunking = True

    @initialize(
        rules=RULES,
        cache=CACHES,
        partial=st.sampled_from([(1, 1, 0), (2, 1, 8), (3, 2, 12), (3, 3, 0)]),
    )
    def start(
        self, rules: dict[str, Any], cache: dict[str, Any], partial: tuple[int, ...]
    ) -> None:
        num_partial, num_long, threshold = partial
        self.start_with(
            **rules,
            **cache,
            max_num_partial_prefills=num_partial,
            max_long_partial_prefills=num_long,
            long_prefill_token_threshold=threshold,
        )


_FEW = settings().max_examples // 3  # an example is a run of hundreds of steps
TestDefault = DefaultMachine.TestCase
TestDefault.settings = settings(stateful_step_count=30, max_examples=_FEW)
TestChunked = ChunkedMachine.TestCase
TestChunked.settings = settings(stateful_step_count=30, max_examples=_FEW)
