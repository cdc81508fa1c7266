"""The scheduler of V1 engines with a KV connector: requests that wait for blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.v1.tables import NOTHING_FOUND
from sim.scheduler.request import RequestStatus
from sim.scheduler.v1.connectors.base import StepPulls, StepTransfers, no_blocks
from sim.scheduler.v1.connectors.choice import check_layout, connector_of
from sim.scheduler.v1.connectors.head_blocks import HeadBlocks
from sim.scheduler.v1.connectors.heads import ExternalStats, Head, Heads
from sim.scheduler.v1.connectors.loads import Loads
from sim.scheduler.v1.connectors.queues import HoldingQueues
from sim.scheduler.v1.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from cache.v1.block_tables import BlockTables
    from cache.v1.id_tables import IdTables
    from cache.v1.runs.tables import RunTables
    from sim.scheduler.base import SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.connectors.base import TransferReport
    from sim.scheduler.v1.connectors.exchange import Exchange, GroupBlockIds
    from sim.scheduler.v1.connectors.heads import Look
    from sim.scheduler.v1.scheduler import Shape
    from sim.scheduler.v1.settings import Settings

_LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS
_PREEMPTED, _RUNNING = RequestStatus.PREEMPTED, RequestStatus.RUNNING
_WAITING = RequestStatus.WAITING


class ConnectorScheduler(Scheduler):
    """`Scheduler` with a KV connector, which may have more of a request than the pool.

    What is different follows from requests that hold blocks and do not run:

    - The head of the queue is looked up in the pool, then by the connector. What that
      has is loaded into blocks of the head, which waits for them and is promoted when a
      scan reaches it again: then its blocks can be found by others.
    - A head that loads takes no part of the budget, and leaves enough free blocks to
      all prompts that are under way.
    - A request that ends while blocks of it are being filled keeps them until then.

    Parameters
    ----------
    settings, cache
        See `Scheduler`.

    Attributes
    ----------
    waiting
        Two queues; see `HoldingQueues`.
    connector
        What may be loaded, and is stored.
    transfers, looks
        What the latest call asks of the workers, and its look-ups, in order.
    delayed
        Requests that have ended and still hold blocks.
    received, failed
        Requests whose load the latest report has ended, and ended with an error.
    has_ended_requests
        Whether some have ended that the next call settles: they may have to store.
    external_stats
        Queries and hits of the connector, beyond local hits.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/core/sched/scheduler.py``, synchronous scheduling; what
    steps in flight change is in `sim.scheduler.v1.connectors.in_flight`.
    """

    tables: BlockTables | IdTables | RunTables
    waiting: HoldingQueues  # type: ignore[assignment]  # a queue, too

    def __init__(self, settings: Settings, cache: CacheConfig) -> None:
        check_layout(settings, cache.groups)
        super().__init__(settings, cache)
        self.connector: Any = connector_of(*(settings, cache, self.layout, self.tables))
        given = settings.kv_transfer or settings.offload
        assert given is not None
        self._recomputes = given.kv_load_failure_policy == "recompute"
        # A tier's hit of a head may change, but not that it lacks blocks as a whole.
        self.gate.keeps_heads &= self.gate.reserves_all and self.connector.keeps_still
        self.gate.keeps_needs = False
        self._head_blocks = HeadBlocks(
            *(self.gate, self.tables, self.running, self._most_slots),
            has_groups=self.groups is not None,
        )
        self.now_s = 0.0
        self.waiting = HoldingQueues(settings.scheduling_policy)
        self._admit_waiting = self._schedule_waiting
        self.transfers: StepTransfers | StepPulls = (
            StepPulls() if settings.offload is None else StepTransfers()
        )
        block_size = self.layout.scheduler_block_size
        self._heads = Heads(self.tables, self.connector, self._hit_tokens, block_size)
        self.looks: list[Look] = []
        self.delayed: dict[Request, None] = {}
        self.received: list[Request] = []
        self.failed: list[Request] = []
        self._free = self._let_go
        self._kept: set[Request] = set()  # leave, and their blocks are in use still
        self.has_ended_requests = False
        self.external_stats = ExternalStats()
        self._loads = Loads()
        self._passed_over: set[Request] = set()  # waiting, and set aside by a scan

    @property
    def has_finish_notice(self) -> bool:
        """Whether the engine must step, whatever the queues hold."""
        return bool(self.has_ended_requests or self.delayed or self.awaits_transfers)

    @property
    def awaits_transfers(self) -> bool:
        """Whether jobs in flight will change what can be scheduled."""
        return bool(self.connector.has_pending_work)

    # -- a call ---------------------------------------------------------------

    @property
    def add_request(self) -> Callable[[Request], None]:
        return self._add_request

    def _add_request(self, request: Request) -> None:
        self.connector.on_new_request(request)
        self.waiting.add_request(request)

    def refuse(self, request: Request) -> None:
        """Let the connector give up what is held for a request that is never added.

        Source: vLLM 0.33.0, ``entrypoints/generate/base/serving.py``: what the server
        refuses is added and aborted at once, for the connector's sake.
        """
        self.connector.on_new_request(request)
        self.connector.request_finished(request, no_blocks, 0)
        self.has_ended_requests = True

    def form(self, now_s: float) -> Shape:
        self.now_s = now_s
        self.looks = self._heads.looks = []
        self.has_ended_requests = False
        shape = super().form(now_s)
        self.transfers = self.connector.build_connector_meta(self)
        return shape

    def form_nothing(self, connector: Any = None) -> None:
        """Do as a call that finds no request: `transfers` are what is left to store."""
        self.has_ended_requests = False
        self.preemptions, self.passed_over, self.prompts = [], [], []
        self.transfers = (connector or self.connector).build_connector_meta(self)

    def form_between(self) -> None:
        """Do so before quiet steps: chunks run yet, the next call tells others."""
        prompts = self.prompts
        self.form_nothing(self.connector.offloading)
        self.prompts = prompts

    def output(self, shape: Shape) -> SchedulerOutput:
        output = super().output(shape)
        if self.preemptions and self.waiting.holding:
            output.stuck = False  # what has loaded may go on in the next call
        failed, self.failed = self.failed, []
        return replace(output, ignored=failed) if failed else output

    def _num_backlog(self) -> int:
        return len(self.waiting) - len(self._passed_over)

    def _schedule_waiting(self, budget: int, now_s: float) -> None:
        queues, running = self.waiting, self.running
        holding: list[Request] = []
        fresh: list[Request] = []
        self.gate.look_again()
        self._is_admitting = True
        while len(queues) and budget and len(running) < self._most_running:
            request = queues.peek_request()
            head = self._head(request) if self._is_ready(request) else None
            if head is None:
                queues.pop_request()
                (holding if request.status is _LOADING else fresh).append(request)
                self._passed_over.add(request)
                continue
            if head.is_async:
                fits = self._head_blocks.fits_load
                if not fits(request, head, self.step, self._under_way()):
                    break
                queues.pop_request()
                self._begin_load(request, head)
                holding.append(request)
                continue
            num_computed = head.num_computed_tokens
            num_new_tokens = self._chunks.first(request, num_computed, budget)
            if not (
                num_new_tokens and self._begin_table(request, head, num_new_tokens)
            ):
                break
            queues.pop_request()
            self._admit(request, num_computed, now_s)
            self._chunks.carries_prefill |= request.num_tokens - num_computed > 1
            budget = self._left(budget, request, num_new_tokens)
            self.compute(request, num_new_tokens)
        queues.set_aside(holding, fresh)
        self._is_admitting = False

    def _is_ready(self, request: Request) -> bool:
        """Whether a head loads no more; it is promoted when that is seen."""
        if request.status is not _LOADING:
            return True
        if not self._loads.has_received(request):
            return False
        num_computed_tokens = request.num_computed_tokens
        if self._loads.take(request):
            self.tables.free(request)  # and it is looked up anew
        else:
            self.tables.register(request, num_computed_tokens)
        if num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1  # the last one is computed for its output
        request.move_to(_PREEMPTED if request.num_preemptions else _WAITING)
        return True

    def _head(self, request: Request) -> Head | None:
        """Look up a head; None to ask again in another call."""
        num_computed, has_table = request.num_computed_tokens, request.table is not None
        if has_table and (num_computed or self.connector.keeps_loads(request)):
            return Head(NOTHING_FOUND, num_computed, 0, False, is_looked_up=False)
        return self._heads.look_up(request)

    # -- blocks of heads ------------------------------------------------------

    def _begin_table(self, request: Request, head: Head, num_new_tokens: int) -> bool:
        """Give a head its slots, if they fit; say whether they do."""
        num_tokens = min(head.num_computed_tokens + num_new_tokens, self._most_slots)
        has_slots = self._head_blocks.begin(request, head, num_tokens, self.step)
        if has_slots:
            self._note_blocks(request, head)
        return has_slots

    def _in_mid_way(self) -> dict[Request, None]:
        """Return the running requests that have a part of their prompt to compute."""
        return self.prefilling

    def _under_way(self) -> dict[Request, int]:
        """Return them and those that load, and what was computed before the call."""
        before = {request: num_computed for request, num_computed, _ in self.prompts}
        return {
            each: before.get(each, each.num_computed_tokens)
            for each in self._loads.begun | self._in_mid_way()
        }

    def _begin_load(self, request: Request, head: Head) -> None:
        num_tokens = head.num_computed_tokens
        self.tables.begin(
            request, num_tokens, head.found, num_tokens_to_cache=head.num_local_tokens
        )
        request.num_computed_tokens = num_tokens
        request.move_to(_LOADING)
        self._loads.begin(request)
        self._passed_over.add(request)
        self._note_blocks(request, head)

    def _note_blocks(self, request: Request, head: Head) -> None:
        """Count what was found of a head that has its blocks; tell the connector."""
        if head.is_looked_up:
            self.external_stats.note(request, head)
        if head.is_looked_up and self.enable_caching:
            self.prefix_cache_stats.record(
                *(request.num_tokens, head.num_local_tokens),
                preempted=request.num_preemptions > 0,
            )
        self.connector.update_state_after_alloc(
            request, partial(self.block_ids, request), head.num_external_tokens
        )

    def _admit(self, request: Request, num_hits: int, now_s: float) -> None:
        if request.status is not _PREEMPTED:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = num_hits
        request.status = _RUNNING
        request.num_computed_tokens = num_hits
        request.order = self.num_admitted
        self.num_admitted += 1
        self.num_chunk_tokens += num_hits
        self.running[request] = self.prefilling[request] = None
        self._leave_queue(request)

    def _leave_queue(self, request: Request) -> None:
        self._loads.end(request)
        self._passed_over.discard(request)

    # -- what the connector asks of a call (`connectors.base.Batch`) ------------

    def preempted(self) -> Iterable[Request]:
        return [each.request for each in self.preemptions]

    def num_tokens_after(self, requests: Iterable[Request]) -> dict[Request, int]:
        asked = sorted(requests, key=attrgetter("order"))
        if not asked:
            return {}
        chunks = {request: after for request, _, after in self.prompts}
        idle = {*self.passed_over, *self.prefilling}
        return {
            each: chunks[each] if each in chunks else self.num_computed_tokens(each)
            for each in asked
            if each in chunks or each not in idle
        }

    def new_block_ids(self) -> Iterable[list[int]]:
        sizes = [group.spec.block_size for group in self.layout.groups]
        step = self.step - 1
        prompts = (
            self.block_ids(request, -(-before // size), group=group)
            for request, before, _ in self.prompts
            if request.order < self._first_admitted
            for group, size in enumerate(sizes)
        )
        clock, idle = self.clock, set(self.passed_over)
        decodes = (
            self.block_ids(
                *(request, (self.num_computed_tokens(request) - 1) // size),
                group=group,
            )
            for group, size in enumerate(sizes)
            for phase in range(0, clock.block_size, size)
            for request in clock.opening(step - phase)
            if request not in idle
        )
        return chain(prompts, decodes)

    def block_ids(
        self,
        request: Request,
        first: int = 0,
        stop: int | None = None,
        *,
        group: int | None = None,
    ) -> list[int]:
        if group is None or self.groups is None:
            tables: Any = self.tables
            found: list[int] = tables.block_ids(request, first, stop)
            return found
        if request.table is None:
            return []
        ids: list[int] = request.table.ids_of(group)
        return ids[first:stop]

    def offered(self, request: Request) -> GroupBlockIds:
        """Return the blocks of a prompt that a producer holds for others, by group."""
        exchange: Exchange = self.connector.pairing.exchange
        return exchange.offered(request)

    # -- ends -----------------------------------------------------------------

    def abort(self, request: Request) -> None:
        if request in self.running and request not in self.prefilling:
            self.clock.settle(request, self.step)
        loads = request.status is _LOADING and not self._loads.has_received(request)
        runs = request in self.running
        self.tables.leave_behind(request, self._num_processed_tokens(request))
        keeps = self.connector.request_finished(
            request,
            partial(self.block_ids, request) if runs else no_blocks,
            request.num_computed_tokens,
        )
        if loads or keeps:
            self._kept.add(request)
        super().abort(request)
        self._end(request)

    def _end(self, request: Request) -> None:
        """Forget a request that leaves, wherever it stands."""
        self.has_ended_requests = True
        self._leave_queue(request)
        self._loads.forget(request)

    def _num_processed_tokens(self, request: Request) -> int:
        """Return the computed tokens of a request, of steps that have ended."""
        return request.num_computed_tokens

    def _let_go(self, request: Request) -> int:
        """Free the blocks of a request that leaves or is preempted, or keep them."""
        if request.status.is_finished:
            num_tokens, pairing = request.num_prompt_tokens, self.connector.pairing
            if pairing is not None:  # it may have ended while it loaded
                num_tokens = pairing.exchange.num_handed_on(num_tokens)
            self.tables.leave_behind(request, max(num_tokens, request.num_tokens - 1))
        return self._free_or_keep(request)

    def _free_or_keep(self, request: Request) -> int:
        """Free the blocks of a request that leaves, unless they are in use."""
        if request in self._kept:
            self._kept.remove(request)
            self.delayed[request] = None
            return 0
        return self.tables.free(request)

    def update(self, finished: Sequence[Request]) -> None:
        for request in finished:
            self.has_ended_requests = True
            num_tokens = max(request.num_prompt_tokens, request.num_tokens - 1)
            block_ids = partial(self.block_ids, request)
            if self.connector.request_finished(request, block_ids, num_tokens):
                self._kept.add(request)
        super().update(finished)

    def receive(self, report: TransferReport) -> None:
        """Note the report of the workers with the output of a step, after `update`."""
        if report.invalid_block_ids or report.failed:
            self._note_failures(set(report.invalid_block_ids), report.failed)
        self.received = self.connector.update_connector_output(report)
        if self.received:
            self.gate.look_again()
        for request in self.received:
            if request.status is _LOADING:
                self._loads.receive(request)
            else:
                del self.delayed[request]
                self._free_or_keep(request)  # what was behind was left at the end

    def _note_failures(self, invalid: set[int], failed: Sequence[Request]) -> None:
        """Let loading requests compute what was not filled, or end them."""
        loading = [each for each in self.waiting.holding if each.status is _LOADING]
        cut = partial(self._loads.cut, invalid=invalid, failed=failed)
        for request in loading:
            is_cut = cut(request, self.block_ids(request), self.block_size)
            if is_cut and not self._recomputes:
                self._fail(request)

    def _fail(self, request: Request) -> None:
        self.waiting.remove(request)
        request.move_to(RequestStatus.FINISHED_ERROR)
        request.reason = "its blocks could not be read (kv_load_failure_policy: fail)"
        self.connector.request_finished(request, no_blocks, request.num_computed_tokens)
        self._end(request)
        self.delayed[request] = None
        self.failed.append(request)

    # -- counts and proof -----------------------------------------------------

    def quiet_steps(self, most: int) -> int:
        asks = self.has_ended_requests and not self.connector.ends_quietly
        if self._loads.are_unseen or asks or not self.connector.is_quiet:
            return 0
        return super().quiet_steps(most)

    def _num_steps_shut(self, most: int) -> int:
        waiting = self.waiting
        is_loading = not (len(waiting.fresh) or self._chunks.are_spaced)
        if is_loading and all(each.status is _LOADING for each in waiting.holding):
            return most  # none has loaded that is unseen
        return super()._num_steps_shut(most)

    def usage_facts(self) -> tuple[int, int, int]:
        num_physical, num_logical, num_tokens = super().usage_facts()
        return num_physical, num_logical, num_tokens + self.num_held_tokens

    @property
    def num_held_tokens(self) -> int:
        """Tokens in blocks of requests that do not run, in all groups."""
        num_tokens = sum(each.num_computed_tokens for each in self._holders())
        groups = self.groups
        if groups is None:
            return num_tokens
        return groups.num_stored_tokens(num_tokens) - groups.num_stored_tokens(0)

    def summary(self) -> dict[str, Any]:
        external = self.external_stats.external_summary()
        return {**super().summary(), **external, **self.connector.summary()}

    def _holders(self) -> list[Request]:
        waiting = [each for each in self.waiting.holding if each.table is not None]
        return [*waiting, *self.delayed]

    def _fresh(self) -> Iterable[Request]:
        return self.waiting.fresh

    def _check_blocks(self, request: Request) -> None:
        if request in self.prefilling:
            self._head_blocks.check_prompt(request)
        else:
            super()._check_blocks(request)

    def check(self) -> None:
        super().check()
        self.connector.check()
        for request in self.waiting.holding:
            self._head_blocks.check_loaded(request)
        require(
            all(each.status.is_finished for each in self.delayed),
            "a request keeps blocks as if it had ended",
        )
