"""Both 2023 schedulers under random traffic (invariants 1, 2 and 9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from sim.scheduler.block_space import cacheflow, v0_2
from sim.scheduler.request import RequestStatus
from tests.sim.scheduler import policies
from tests.sim.scheduler.group_steps import Steps, make

if TYPE_CHECKING:
    from sim.scheduler.groups.output import GroupSchedulerOutput
    from sim.scheduler.victims import VictimPolicy

NUM_GPU_BLOCKS = 16
MAX_BUDGET = 48
SWAP = PreemptionMode.SWAP


class SchedulerMachine(RuleBasedStateMachine):
    """Requests arrive, step and are aborted; what is admitted comes to its end."""

    kind: type[cacheflow.Scheduler] | type[v0_2.Scheduler]

    @initialize(
        mode=st.sampled_from([None, *PreemptionMode]),
        watermark=st.sampled_from([0.0, 0.13]),
        window=st.sampled_from([None, None, 8]),
        victim=policies.victims(),
    )
    def start(
        self,
        mode: PreemptionMode | None,
        watermark: float,
        window: int | None,
        victim: VictimPolicy | None,
    ) -> None:
        if self.kind is cacheflow.Scheduler:
            window = None
        self.run = Steps(
            make(
                self.kind,
                num_gpu_blocks=NUM_GPU_BLOCKS,
                num_cpu_blocks=200,
                watermark=watermark,
                max_num_batched_tokens=MAX_BUDGET,
                max_num_seqs=8,
                preemption_mode=mode,
                sliding_window=window,
                preemption_victim=victim,
            )
        )
        self.output: GroupSchedulerOutput | None = None

    @rule(
        lengths=st.tuples(st.integers(1, 17), st.integers(1, 14)),
        width=st.sampled_from([1, 1, 2, 3]),
        beam_percent=st.sampled_from([None, 0, 50, 100]),
        seed=st.integers(0, 9),
        early=st.lists(st.integers(1, 14), min_size=3, max_size=3),
    )
    def arrive(
        self,
        lengths: tuple[int, int],
        width: int,
        beam_percent: int | None,
        seed: int,
        early: list[int],
    ) -> None:
        num_prompt_tokens, num_output_tokens = lengths
        beam = beam_percent is not None and width > 1
        branches = tuple(min(num_output_tokens, n) for n in early[:width])
        recomputes = self.run.scheduler.scheduler_config.preemption_mode is not SWAP
        # 0.2.7 loses blocks when it admits a group with finished sequences again, see
        # test_a_group_with_finished_sequences_loses_blocks_as_the_release_does.
        if beam or width == 1 or (recomputes and self.kind is v0_2.Scheduler):
            branches = ()
        if self.run.scheduler.cache_config.sliding_window is not None:
            # It loses blocks of forked tables that go round, too.
            width, beam, branches = 1, False, ()
        request = self.run.add(
            num_prompt_tokens,
            num_output_tokens,
            width=width,
            branches=branches,
            use_beam_search=beam,
            beam_seed=seed,
            beam_percent=beam_percent or 0,
        )
        if self.run.scheduler.admission_error(request) is not None:
            self.run.scheduler.abort(request)

    @precondition(lambda self: self.output is None)
    @rule()
    def schedule(self) -> None:
        scheduler = self.run.scheduler
        running = {r.request_id for r in self.run.requests if not self.is_done(r)}
        self.output = self.run.call()
        assert {r.request_id for r in self.output.scheduled} <= running
        entries = self.output.scheduled_seq_groups
        batch = [entry.seq_group for entry in entries]
        assert batch == [group for group in scheduler.running if group in batch]
        budget = sum(e.token_chunk_size for e in entries if e.is_prefill)
        assert budget <= MAX_BUDGET
        victims = {p.request for p in self.output.preemptions}
        assert not victims & set(self.output.scheduled)
        self.slots_are_there()

    def slots_are_there(self) -> None:
        """Every running sequence has blocks for its tokens, and writes alone."""
        manager = self.run.scheduler.block_manager
        writers = []
        for entry in [] if self.output is None else self.output.scheduled_seq_groups:
            if entry.is_prefill:
                continue
            for seq in entry.seq_group.get_seqs(SequenceStatus.RUNNING):
                table = manager.get_block_table(seq)
                short = seq.get_len() > 4 * len(table)
                # Revived sequences may wait for their blocks (a wart of 0.1.0).
                assert not short or self.kind is cacheflow.Scheduler
                writers.append(table[-1])
        assert len(set(writers)) == len(writers)

    @precondition(lambda self: self.output is not None)
    @rule()
    def emit(self) -> None:
        assert self.output is not None
        self.run.emit(self.output)
        self.output = None

    @precondition(lambda self: self.output is None)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        unfinished = [r for r in self.run.requests if not self.is_done(r)]
        if unfinished:
            request = data.draw(st.sampled_from(unfinished))
            self.run.scheduler.abort(request)
            self.run.scheduler.abort_seq_group(request.request_id)  # already gone

    @staticmethod
    def is_done(request: object) -> bool:
        return request.status.is_finished  # type: ignore[attr-defined, no-any-return]

    @invariant()
    def requests_are_conserved(self) -> None:
        scheduler = self.run.scheduler
        scheduler.check()
        unfinished = [r for r in self.run.requests if not self.is_done(r)]
        assert scheduler.get_num_unfinished_seq_groups() == len(unfinished)
        statuses = [r.status for r in unfinished]
        assert scheduler.num_running == statuses.count(RequestStatus.RUNNING)
        assert scheduler.num_swapped == statuses.count(RequestStatus.SWAPPED)

    def teardown(self) -> None:
        if self.output is not None:
            self.run.emit(self.output)
        self.run.run(5_000)
        manager = self.run.scheduler.block_manager
        assert manager.get_num_free_gpu_blocks() == NUM_GPU_BLOCKS
        assert manager.num_logical_blocks == 0


class CacheflowMachine(SchedulerMachine):
    kind = cacheflow.Scheduler


class V02Machine(SchedulerMachine):
    kind = v0_2.Scheduler


TestCacheflow = CacheflowMachine.TestCase
TestCacheflow.settings = settings(stateful_step_count=40)
TestV02 = V02Machine.TestCase
TestV02.settings = settings(stateful_step_count=40)
