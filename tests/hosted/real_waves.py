"""Data-parallel ranks of an installed vLLM that divide experts, on a simulated clock.

The busy loop of each rank, its scheduler and the coordinator are theirs, unmodified.
Fakes are the GPU, on which a step of all ranks takes a second, the all-reduce, and the
queues between them, which take no time. Each loop has a thread; one runs at a time.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import simpy
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType, coordinator, core
from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState
from vllm.v1.serial_utils import MsgpackEncoder

from sim.engine.group_sampling import sampler_for
from sim.engine.lock_step import DP_SYNC_INTERVAL
from sim.scheduler.v1.connectors.base import TransferReport

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from sim.scheduler.request import Request

STEP_S = 1.0


class Actor:
    """A blocking loop on the clock: it runs until it waits for an event."""

    def __init__(self, env: simpy.Environment, run: Callable[[Actor], object]) -> None:
        self._goes, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._event: Any = None
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._main, args=(run,), daemon=True)
        self._thread.start()
        env.process(self._on_clock())

    def _main(self, run: Callable[[Actor], object]) -> None:
        self._goes.acquire()
        try:
            run(self)
        except SystemExit:
            pass
        except BaseException as error:
            self._error = error
        self._event = None
        self._waits.release()

    def _on_clock(self) -> Generator[simpy.Event, Any, None]:
        while True:
            self._goes.release()
            self._waits.acquire()
            if self._error is not None:
                raise self._error
            if self._event is None:
                return
            yield self._event

    def wait(self, event: simpy.Event) -> None:
        """Let others run until an event; called by the loop."""
        self._event = event
        self._waits.release()
        self._goes.acquire()
        if self._is_over:
            raise SystemExit

    def end(self) -> None:
        """Let the loop end where it waits."""
        self._is_over = True
        self._goes.release()
        self._thread.join(10)


class Inbox:
    """A queue whose reader waits on the clock."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._items: deque[Any] = deque()
        self._came = env.event()
        self.actor: Actor | None = None

    def put_nowait(self, item: Any) -> None:
        self._items.append(item)
        if not self._came.triggered:
            self._came.succeed()

    def empty(self) -> bool:
        return not self._items

    def get(self, *, block: bool = True) -> Any:
        while not self._items:
            if not block:
                raise queue.Empty
            self._came = self._env.event()
            assert self.actor is not None
            self.actor.wait(self._came)
        return self._items.popleft()

    get_nowait = get


class Gpus:
    """Steps of all ranks: each begins when all have joined, and the last has ended."""

    def __init__(self, env: simpy.Environment, num_ranks: int) -> None:
        self._env, self._num_ranks = env, num_ranks
        self._num_joined = [0] * num_ranks
        self._steps: list[tuple[list[int], simpy.Event, simpy.Event]] = []
        self.begun: list[tuple[float, list[int]]] = []
        self._last_s = self._before_s = 0.0

    def join(self, rank: int, num_tokens: int) -> tuple[simpy.Event, simpy.Event]:
        """Return when the step of all has been launched, and its end."""
        number = self._num_joined[rank]
        self._num_joined[rank] += 1
        if number == len(self._steps):
            tokens = [-1] * self._num_ranks
            self._steps.append((tokens, self._env.event(), self._env.event()))
        tokens, launched, end = self._steps[number]
        tokens[rank] = num_tokens
        if -1 not in tokens:
            now_s = self._env.now
            self.begun.append((now_s, tokens))
            end_s = max(now_s, self._last_s) + STEP_S
            launched_s = max(now_s, self._before_s)
            self._before_s, self._last_s = self._last_s, end_s
            _happen(self._env, launched, launched_s)
            _happen(self._env, end, end_s)
        return launched, end


def _happen(env: simpy.Environment, event: simpy.Event, time_s: float) -> None:
    def at() -> Generator[simpy.Event, Any, None]:
        yield env.timeout(time_s - env.now)
        event.succeed()

    env.process(at())


class AllReduce:
    """Tells all ranks, once all have asked, whether one of them has work."""

    def __init__(self, env: simpy.Environment, num_ranks: int) -> None:
        self._env, self._num_ranks = env, num_ranks
        self._asked = 0
        self._has_work = False
        self._answer = env.event()

    def ask(self, actor: Actor, *, has_work: bool) -> bool:
        self._asked += 1
        self._has_work |= has_work
        answer = self._answer
        if self._asked == self._num_ranks:
            answer.succeed(self._has_work)
            self._asked, self._has_work, self._answer = 0, False, self._env.event()
        actor.wait(answer)
        return bool(answer.value)


class Future:
    """An output that is there at an event."""

    def __init__(self, actor: Actor, event: simpy.Event | None) -> None:
        self._actor, self._event = actor, event

    def result(self) -> Any:
        if self._event is not None and not self._event.processed:
            self._actor.wait(self._event)
        return SimpleNamespace()


class RankScheduler:
    """Their scheduler, and what a worker would tell it of outputs."""

    pause_state = PauseState.UNPAUSED

    def __init__(self, env: simpy.Environment, hosted: Any, pull_s: float) -> None:
        self._env, self._hosted, self._pull_s = env, hosted, pull_s
        self._pulling: deque[tuple[float, Request]] = deque()
        self._theirs = hosted.engine.scheduler
        self._sample = sampler_for(hosted)
        self._num_steps = 0
        self.has_requests = self._theirs.has_requests
        self.has_unfinished_requests = self._theirs.has_unfinished_requests
        self.ends_s: dict[int, float] = {}

    def add_request(self, request: Any) -> None:
        self._hosted.add_request(request.ours)

    def schedule(self, throttles: bool) -> Any:
        assert not throttles
        output = self._hosted.schedule(self._env.now)
        self._num_steps += 1
        return SimpleNamespace(
            ours=output,
            report=self._worked(),
            number=self._num_steps,
            total_num_scheduled_tokens=sum(
                self._hosted._step.num_scheduled_tokens.values()
            ),
            pending_structured_output_tokens=False,
        )

    def _worked(self) -> TransferReport:
        """Begin the pulls that a call asks for; return what is seen to have ended."""
        now_s, pulling = self._env.now, self._pulling
        for pull in getattr(getattr(self._hosted, "transfers", None), "pulls", ()):
            if pull.waits:
                pulling.append((now_s + self._pull_s, pull.request))
        moved = []
        while pulling and pulling[0][0] <= now_s:
            moved.append(pulling.popleft()[1])
        return TransferReport(moved=moved)

    def get_grammar_bitmask(self, output: Any) -> None:
        del output

    def update_from_output(self, output: Any, model_output: Any) -> dict[int, Any]:
        del model_output
        finished = self._sample(output.ours, output.number, self._env.now)
        self._hosted.update(finished)
        if hasattr(self._hosted, "receive"):
            self._hosted.receive(output.report)
        for request in finished:
            self.ends_s[request.request_id] = self._env.now
        return {}


class RankExecutor:
    """The worker of a rank."""

    is_sleeping = False

    def __init__(self, gpus: Gpus, rank: int, *, ahead: bool) -> None:
        self._gpus, self._rank, self._ahead = gpus, rank, ahead
        self.actor: Any = None
        self._latest: Any = None

    def execute_model(self, output: Any, *, non_block: bool) -> Future:
        assert non_block
        end = None
        if num_tokens := output.total_num_scheduled_tokens:
            _, end = self._gpus.join(self._rank, num_tokens)
        self._latest = Future(self.actor, end)
        return self._latest

    def sample_tokens(self, grammar: Any, *, non_block: bool = False) -> Future:
        del grammar
        assert non_block
        return self._latest

    def execute_dummy_batch(self) -> None:
        launched, end = self._gpus.join(self._rank, 0)
        self.actor.wait(launched if self._ahead else end)


class RealRanks:
    """Ranks that step together, and their coordinator.

    Parameters
    ----------
    hosted
        The scheduler of each.
    ahead
        Whether they schedule a step ahead.
    pull_s
        How long blocks are read from prefillers, where these are decoders.

    Attributes
    ----------
    num_waves
        That the coordinator began.
    """

    def __init__(
        self, hosted: Sequence[Any], *, ahead: bool, pull_s: float = 0.0
    ) -> None:
        self.env = env = simpy.Environment()
        self.gpus = Gpus(env, len(hosted))
        self.num_waves = 0
        self._asks = AllReduce(env, len(hosted))
        self._to_coordinator = Inbox(env)
        self._inboxes = [Inbox(env) for _ in hosted]
        self.schedulers = [RankScheduler(env, each, pull_s) for each in hosted]
        self._actors: list[Actor] = []
        for rank in range(len(hosted)):
            loop = self._core(rank, len(hosted), ahead=ahead)
            actor = Actor(env, lambda actor, loop=loop: loop.run_busy_loop())
            loop.model_executor.actor = self._inboxes[rank].actor = actor
            self._actors.append(actor)
        self._to_coordinator.actor = Actor(env, self._coordinate)
        self._actors.append(self._to_coordinator.actor)

    def _core(self, rank: int, num_ranks: int, *, ahead: bool) -> Any:
        loop: Any = object.__new__(DPEngineCoreProc)
        executor = RankExecutor(self.gpus, rank, ahead=ahead)

        def sync_dp_state(
            group: Any, *, has_unfinished: bool, pending_pause: bool
        ) -> Any:
            del group
            assert not pending_pause
            return self._asks.ask(executor.actor, has_work=has_unfinished), False

        def tell(told: tuple[int, EngineCoreOutputs]) -> None:
            client, outputs = told
            if client == -1:
                outputs.engine_index = rank
                self._to_coordinator.put_nowait(MsgpackEncoder().encode(outputs))

        vars(loop).update(
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(sync_dp_state=sync_dp_state),
                observability_config=SimpleNamespace(
                    enable_logging_iteration_details=False
                ),
            ),
            scheduler=self.schedulers[rank],
            model_executor=executor,
            input_queue=self._inboxes[rank],
            output_queue=SimpleNamespace(put_nowait=tell),
            aborts_queue=queue.Queue(),
            process_input_queue_block=True,
            shutdown_state=EngineShutdownState.RUNNING,
            enable_fault_tolerance=False,
            dp_rank=rank,
            dp_group=None,
            engine_index=rank,
            has_coordinator=True,
            engines_running=False,
            reject_new_requests=False,
            publish_dp_lb_stats=False,
            step_counter=0,
            current_wave=0,
            pending_pause=False,
            ignore_start_dp_wave=False,
            eep_scaling_state=None,
            prefill_schedule_interval=1,
            dp_sync_interval=DP_SYNC_INTERVAL,
            log_stats=False,
            check_for_draft_tokens=False,
            async_scheduling=ahead,
            is_mm_encoder_only=False,
            is_pooling_model=False,
            batch_queue=deque(maxlen=2) if ahead else None,
            batch_queue_size=2 if ahead else 1,
            _idle_state_callbacks=[],
        )
        loop.step_fn = loop.step_with_batch_queue if ahead else loop.step
        return loop

    # -- the coordinator ------------------------------------------------------

    def _coordinate(self, actor: Actor) -> None:
        """Let theirs read what ranks tell, through sockets that are none."""
        del actor
        inbox, inboxes = self._to_coordinator, self._inboxes
        ranks = self

        class Back:  # from ranks
            def recv(self) -> Any:
                return b"".join(map(bytes, inbox.get()))

        class Publish:  # to ranks
            num_subscribed = 0

            def recv(self) -> bytes:
                return b"\x01"

            def send(self, message: bytes) -> None:
                assert message == b"READY"

            def send_multipart(self, message: tuple[bytes, bytes]) -> None:
                kind, wave = message
                assert kind == EngineCoreRequestType.START_DP_WAVE.value
                ranks.num_waves += 1
                told = coordinator.msgspec.msgpack.decode(wave)
                for each in inboxes:
                    each.put_nowait((EngineCoreRequestType.START_DP_WAVE, told))

        class Front:  # to front ends, which hear of waves
            def send(self, message: bytes) -> None:
                pass

        back, publish = Back(), Publish()
        sockets = {"front": Front(), "out": back, "publish": publish}

        class Poller:
            def register(self, *_: Any) -> None:
                pass

            def poll(self, **_: Any) -> list[tuple[Any, int]]:
                item = inbox.get()
                inbox._items.appendleft(item)
                return [(back, 1)]

        coordinator.make_zmq_socket = lambda *, path, **_: nullcontext(sockets[path])
        coordinator.zmq.Poller = Poller
        theirs: Any = object.__new__(DPCoordinatorProc)
        theirs.ctx = None
        theirs.engines = [None] * len(inboxes)
        theirs.stats_update_interval_ms, theirs.enable_wave_coordination = 100, True
        theirs.process_input_socket("front", "out", "publish")

    # -- a run ----------------------------------------------------------------

    def ends_s(self) -> dict[int, float]:
        """Return when each request has ended, by its number."""
        return {
            number: time_s
            for each in self.schedulers
            for number, time_s in each.ends_s.items()
        }

    def run(self, arrivals: Sequence[tuple[float, int, Request]]) -> None:
        """Take requests at their times, each at its rank, until all has ended."""
        self.env.process(self._arrive(arrivals))
        try:
            self.env.run()
        finally:
            for actor in self._actors:
                actor.end()

    def _arrive(
        self, arrivals: Sequence[tuple[float, int, Request]]
    ) -> Generator[simpy.Event, Any, None]:
        for time_s, rank, request in arrivals:
            yield self.env.timeout(time_s - self.env.now)
            told = SimpleNamespace(
                request_id=str(request.request_id),
                ours=request,
                pooling_params=None,
                kv_transfer_params=None,
                ec_transfer_params=None,
                abort_immediately=False,
            )
            self._inboxes[rank].put_nowait((EngineCoreRequestType.ADD, (told, 0)))


core.time.sleep = lambda seconds: None
