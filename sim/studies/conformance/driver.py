"""The step loop of a decision workload: no clock, no cost, one call a step."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from cache.errors import CacheError, NoFreeBlocksError
from sim.engine.group_sampling import sampler_for
from sim.engine.sampling import InFlightSampler
from sim.engine.verification import SpeculativeSampler
from sim.errors import SchedulerError, SwapSpaceError
from sim.scheduler.generations import GENERATIONS, generation_behind
from sim.scheduler.hosted import VLLM
from sim.scheduler.log.lines import Line, StepLog, names_of, preemptions
from sim.scheduler.request import Request
from sim.scheduler.v1 import V1
from sim.studies.conformance.drafts import SeededAcceptance
from sim.studies.conformance.engines import MAX_LEN
from sim.studies.conformance.kv_planning import coordinator_of, header_of
from sim.studies.conformance.played_worker import PlayedWorker, Worker, WorkerPace
from sim.studies.conformance.stream_tokens import StreamTokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from sim.scheduler.base import Scheduler
    from sim.scheduler.log.transfers import TransferLines
    from sim.studies.conformance.requests import DecisionRequest
    from sim.studies.conformance.workload import DecisionWorkload

MOST_ROUNDS = 100
"""Queues that come back as often without a token in between come back for ever."""


class SteppedEngine:
    """An engine whose calls are made one by one, and logged.

    Parameters
    ----------
    workload
        Its configuration.
    scheduler
        What decides.
    requests
        All that may come, by name.
    is_left_alone
        Whether no arrival and no abort of an unfinished request is to come.
    check
        Whether the scheduler proves its invariants after every call.
    worker
        Plays the copies of a KV connector, where there is one.
    """

    def __init__(
        self,
        workload: DecisionWorkload,
        scheduler: Any,
        requests: Mapping[str, Request],
        *,
        is_left_alone: Callable[[], bool],
        check: bool = False,
        worker: Worker | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.names = list(requests)
        self.check = check
        self.num_steps = 0
        self.num_preemptions = 0
        self.step = 0
        # ``"done"``, ``"stalled"``, ``"swap_oom"`` or ``"no_room"``, once the log has
        # ended.
        self.ending = ""
        self._rounds: Counter[Any] = Counter()
        self._requests = requests
        self._is_left_alone = is_left_alone
        generation = generation_behind(self.scheduler)
        assert generation is not None
        self._log: StepLog = generation.parts().log(self.scheduler, self.names)
        speculative = getattr(workload.engine, "speculative", None)
        self._sample = sampler_for(
            self.scheduler,
            SeededAcceptance(
                workload.requests,
                finds_drafts=speculative is not None and speculative.finds_drafts,
            ),
        )
        self._worker = worker
        self._queue = deque[tuple[int, Any, Any]]()  # step, output, transfers
        self._max_queued = getattr(self.scheduler, "max_concurrent_batches", 1)

    @property
    def is_due(self) -> bool:
        """Whether the engine core would call the scheduler now."""
        return self._is_busy() or getattr(self.scheduler, "has_finish_notice", False)

    @property
    def awaits_output(self) -> bool:
        """Whether batches are in flight."""
        return bool(self._queue)

    def _is_busy(self) -> bool:
        scheduler = self.scheduler
        return bool(
            scheduler.num_waiting or scheduler.num_running or scheduler.num_swapped
        )

    def call(self, step: int, aborted: Sequence[str] = ()) -> Line:
        """Call the scheduler once; let an output appear, unless the queue has room.

        The names of requests that were `aborted` just before stand with the queues.
        """
        scheduler: Any = self.scheduler
        self.num_steps += 1
        self.step = step
        try:
            output = scheduler.schedule(float(step))
        except SwapSpaceError:
            self.ending = "swap_oom"
            return {
                "error": "swap_oom",
                "preempt": preemptions(scheduler.partial_output, self.names),
            }
        except NoFreeBlocksError as error:
            # Where a release's own tests overlook a block, it ends in the same way.
            raise SchedulerError(
                f"step {step}: the engine runs out of blocks where its tests saw room "
                f"({error}); raise num_gpu_blocks"
            ) from error
        self._prove()
        self.num_preemptions += len(output.preemptions)
        if getattr(output, "gives_up", False):
            self.ending = "no_room"
            return {"error": "no_room", "preempt": preemptions(output, self.names)}
        line = self._log.batch(output) | self._log.queues()
        if aborted:
            line["abort"] = list(aborted)
        self._queue.append((step, output, getattr(scheduler, "transfers", None)))
        has_room = len(self._queue) < self._max_queued
        if has_room and (output.scheduled or self.is_due):
            return line | {"free_end": self._log.free()}
        moves = any(_moves(each) for _, each, _ in self._queue) or getattr(
            scheduler, "awaits_transfers", False
        )
        line |= self.process(step)
        if not self._is_left_alone():
            self._rounds.clear()
        elif not moves and self._is_busy():
            line["stalled"] = True
            self.ending = "stalled"
        elif output.preemptions:
            self._refuse_rounds(step)
        return line

    def process(self, now: int) -> Line:
        """Let the output of the oldest batch appear, in iteration `now`."""
        scheduler: Any = self.scheduler
        step, output, transfers = self._queue.popleft()
        num_tokens = _num_tokens(output.scheduled)
        finished = self._sample(output, step, float(now))
        line: Line = {}
        if isinstance(self._sample, InFlightSampler):
            line = self._delivered(step, self._sample.delivery)
        scheduler.update(finished)
        if self._worker is not None:
            line |= self._transferred(step, transfers, self._worker)
        self._prove()
        if output.ignored or _num_tokens(output.scheduled) > num_tokens:
            self._rounds.clear()
        if finished:
            line["fin"] = names_of(finished, self.names)
        line["free_end"] = self._log.free()
        return line if self._worker is None else line | self._transfer_log.tier_end()

    @property
    def _transfer_log(self) -> TransferLines:
        log: Any = self._log
        return log.transfers  # type: ignore[no-any-return]

    def _transferred(self, step: int, transfers: Any, worker: Worker) -> Line:
        """Play the copies that a call asked for; return those that have ended."""
        scheduler: Any = self.scheduler
        report = worker.step(step, transfers)
        scheduler.receive(report)
        return self._transfer_log.ends(report)

    def _delivered(self, step: int, delivery: Any) -> Line:
        """Return the fate of the tokens of a batch that was in flight."""
        line: Line = {} if self._max_queued == 1 else {"upd": step}
        num_new_tokens = [1] * len(delivery.requests)
        if isinstance(self._sample, SpeculativeSampler):
            num_new_tokens = self._sample.num_new_tokens
            if verified := self._sample.verified:
                line["acc"] = [
                    [self.names[request.request_id], *numbers]
                    for request, *numbers in verified
                ]
        for key in ("wasted", "stale"):
            if requests := getattr(delivery, key):
                line[key] = names_of(requests, self.names)
        if delivery.requests:
            names = names_of(delivery.requests, self.names)
            line["out"] = [
                list(pair) for pair in zip(names, num_new_tokens, strict=True)
            ]
        return line

    def _refuse_rounds(self, step: int) -> None:
        """Raise if the queues were as now many times, and no token came meanwhile."""
        line = self._log.queues()
        state = (
            str(line),
            tuple(request.num_computed_tokens for request in self._unfinished(line)),
        )
        self._rounds[state] += 1
        if self._rounds[state] >= MOST_ROUNDS:
            names = ", ".join(line["running"] + line["waiting"])[:100]
            raise SchedulerError(
                f"step {step}: the engine would preempt and admit {names} for ever, "
                f"which needs more blocks than there are; raise num_gpu_blocks, or "
                f"abort it with abort_step"
            )

    def _unfinished(self, line: Line) -> list[Request]:
        return [
            self._requests[name]
            for queue in ("running", "waiting", "swapped")
            for name in line.get(queue, [])
        ]

    def _prove(self) -> None:
        if self.check:
            self.scheduler.check()


class DecisionDriver:
    """Steps a scheduler through a workload as the reference's driver does.

    Attributes
    ----------
    scheduler
        What decides.
    requests
        By name.
    """

    def __init__(
        self,
        workload: DecisionWorkload,
        *,
        check: bool = False,
        scheduler: Scheduler | None = None,
    ) -> None:
        self.scheduler = make_scheduler(workload) if scheduler is None else scheduler
        self._header = schedule_header(workload)
        self.requests = requests = requests_of(workload)
        self._arrivals = deque(
            (raw.arrival_step, request)
            for raw, request in zip(workload.requests, requests.values(), strict=True)
        )
        self._aborts = aborts_of(workload, requests)
        worker: PlayedWorker | None = None
        if getattr(self.scheduler, "transfers", None) is not None:
            pace = getattr(workload.engine, "worker", None)
            worker = PlayedWorker(pace or WorkerPace())
        self._engine = SteppedEngine(
            workload,
            self.scheduler,
            requests,
            is_left_alone=self._is_left_alone,
            check=check,
            worker=worker,
        )

    @property
    def names(self) -> list[str]:
        return self._engine.names

    @property
    def step(self) -> int:
        return self._engine.step

    @property
    def num_steps(self) -> int:
        return self._engine.num_steps

    @property
    def num_preemptions(self) -> int:
        return self._engine.num_preemptions

    @property
    def ending(self) -> str:
        return self._engine.ending

    def lines(self) -> Iterator[Line]:
        """Run the workload, and yield a line for each iteration of the engine core.

        Filling the queue of batches comes before waiting for the oldest one's output.
        With one batch at a time each is waited for at once.
        """
        if self._header is not None:
            yield {"header": self._header}
        engine, step = self._engine, 0
        while self._arrivals or engine.is_due or engine.awaits_output:
            if not (engine.is_due or engine.awaits_output):
                step = max(step, self._arrivals[0][0])
            while self._arrivals and self._arrivals[0][0] <= step:
                self.scheduler.add_request(self._arrivals.popleft()[1])
            aborted = self._abort_due(step)
            line = {"t": step} | ({"abort": aborted} if aborted else {})
            if engine.is_due:
                yield line | engine.call(step)
                if engine.ending:
                    return
            elif engine.awaits_output:
                yield line | engine.process(step)
            step += 1
        engine.ending = "done"

    def _abort_due(self, step: int) -> list[str]:
        aborted = []
        while self._aborts and self._aborts[0][0] <= step:
            name, request = self._aborts.popleft()[2:]
            if not request.status.is_finished:
                self.scheduler.abort(request)
                aborted.append(name)
        return aborted

    def _is_left_alone(self) -> bool:
        return not self._arrivals and all(
            request.status.is_finished for *_, request in self._aborts
        )


def requests_of(workload: DecisionWorkload) -> dict[str, Request]:
    """Construct the requests of a workload, by name and in order of arrival."""
    max_model_len = getattr(workload.engine, "max_model_len", MAX_LEN)
    return {
        raw.id: make_request(index, raw, max_model_len)
        for index, raw in enumerate(workload.requests)
    }


def aborts_of(
    workload: DecisionWorkload, requests: Mapping[str, Request]
) -> deque[tuple[int, int, str, Request]]:
    """Return step, step as written, name and request of each abort, in order."""
    dues = [
        (
            max(raw.abort_step, raw.arrival_step),
            raw.abort_step,
            raw.id,
            requests[raw.id],
        )
        for raw in workload.requests
        if raw.abort_step is not None
    ]
    return deque(sorted(dues, key=lambda due: due[:3]))


def _moves(output: Any) -> bool:
    return bool(output.scheduled or output.ignored or output.preemptions)


def _num_tokens(requests: Iterable[Request]) -> int:
    return sum(request.num_tokens for request in requests)


_ENGINE_KEYS = {
    "chunked_prefill": "enable_chunked_prefill",
    "delay_factor": "scheduler_delay_factor",
    "policy": "scheduling_policy",
}
"""Engine keys that decision workloads call otherwise."""


def make_scheduler(workload: DecisionWorkload, **more: Any) -> Any:
    """Construct the scheduler that a workload names; `more` are engine arguments."""
    release = {"engine_version": workload.engine_version}
    arguments = _arguments(workload) | release | more
    try:
        return GENERATIONS[workload.generation].make(arguments)
    except CacheError as error:
        raise SchedulerError(str(error)) from error


def hosted_scheduler(workload: DecisionWorkload) -> Any:
    """Construct the installed vLLM's own scheduler for a workload of V1.

    That of a pair is of one of its sides.
    """
    if workload.generation != V1.name:
        raise SchedulerError(
            f"a hosted vLLM takes workloads of V1, and the reference "
            f"{workload.reference!r} is of {workload.generation}; leave --scheduler out"
        )
    return VLLM.make(_arguments(workload))


def _arguments(workload: DecisionWorkload) -> dict[str, Any]:
    """Return the workload's engine in engine keys."""
    written = {"max_model_len": MAX_LEN, **workload.engine.model_dump()}
    arguments = {_ENGINE_KEYS.get(key, key): value for key, value in written.items()}
    if (speculative := getattr(workload.engine, "speculative", None)) is not None:
        arguments["speculative_config"] = speculative.config()
    if (offload := getattr(workload.engine, "offload", None)) is not None:
        arguments["offload"] = offload.settings()
    if (side := getattr(workload.engine, "kv_transfer", None)) is not None:
        arguments["kv_transfer"] = side.settings()
    if (plan := workload.plan) is not None and workload.kv is not None:
        arguments["layout"] = plan.layout
        key = "prefix_cache_retention_interval"
        arguments[key] = getattr(workload.kv, key)
    return arguments


def schedule_header(workload: DecisionWorkload) -> dict[str, Any] | None:
    """Return the first line's content, where the pool is planned from layers."""
    plan, kv = workload.plan, workload.kv
    if plan is None or kv is None:
        return None
    caches = workload.config.get("enable_prefix_caching", True)
    header = header_of(plan, kv.available_bytes) | coordinator_of(
        plan, enable_prefix_caching=caches
    )
    num_batches = getattr(workload.engine, "max_concurrent_batches", 1)
    speculative = getattr(workload.engine, "speculative", None)
    if speculative is None:
        queue = {} if num_batches == 1 else {"batch_queue_size": num_batches}
        return header | queue
    config = speculative.config()
    return header | {
        "batch_queue_size": num_batches,
        "num_lookahead_tokens": config.num_lookahead_tokens,
        "num_hash_lookahead_tokens": config.num_hash_lookahead_tokens(
            enable_prefix_caching=caches
        ),
        "eagle_block_drop": config.drops_eagle_block(enable_prefix_caching=caches),
    }


def make_request(index: int, raw: DecisionRequest, max_model_len: int) -> Request:
    """Construct the engine's request; its arrival time is its place in the list."""
    length = raw.num_prompt_tokens
    branches = raw.branch_output_lens or [raw.output_len] * raw.n
    return Request(
        request_id=index,
        arrival_s=float(index),
        num_prompt_tokens=length,
        tokens=StreamTokens(raw.prompt, raw.out_seed),
        max_num_tokens=min(length + raw.output_len, max_model_len),
        oracle_num_tokens=length + (raw.stop_after or raw.output_len),
        priority=raw.priority,
        max_output_tokens=None,
        num_sequences=raw.n,
        use_beam_search=raw.beam,
        oracle_branch_num_tokens=tuple(length + own for own in branches),
        beam_seed=raw.beam_seed,
        beam_percent=raw.beam_pct,
        kv_transfer_params=raw.kv_transfer_params,
    )
