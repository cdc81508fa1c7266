"""Small engines for tests, put together from parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.costs.constant import ConstantCost
from sim.engine.clients import FanOutClient, open_loop
from sim.engine.clock import Clock
from sim.engine.loop import Engine
from sim.engine.requests import RequestFactory
from sim.engine.sessions import SessionClient
from sim.results.recording.recorder import Recorder, Recording
from sim.scheduler.v1 import V1Scheduler
from workloads.requests.chains import has_chains
from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import CostModel
    from sim.scheduler.request import Request


def spec(
    request_id: int,
    arrival_s: float,
    num_prompt_tokens: int,
    num_output_tokens: int,
    **more: Any,
) -> RequestSpec:
    """A request whose prompt nobody shares, unless `prompt` says otherwise."""
    facts: dict[str, Any] = {
        "request_id": request_id,
        "arrival_s": arrival_s,
        "prompt": ((2 * request_id, num_prompt_tokens),),
        "num_output_tokens": num_output_tokens,
        "output_segment": 2 * request_id + 1,
    }
    return RequestSpec(**(facts | more))


def request_from_spec(spec: RequestSpec, max_model_len: int) -> Request:
    """The engine's request, numbered as the workload's."""
    request = RequestFactory(max_model_len).group(spec)
    request.request_id = spec.request_id
    return request


def scheduler(**changes: Any) -> V1Scheduler:
    """A V1 scheduler of a thousand blocks, unless said otherwise."""
    arguments: dict[str, Any] = {
        "num_gpu_blocks": 1001,
        "block_size": 16,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "max_model_len": 8192,
        "enable_prefix_caching": False,
    }
    return V1Scheduler(**(arguments | changes))


class Run:
    """An engine and its clients on a clock of their own, checked at every step.

    Requests that wait for one another, or for a user, are sent by a `SessionClient`.
    """

    def __init__(
        self,
        specs: Sequence[RequestSpec],
        cost_model: CostModel | None = None,
        *,
        admission_check: bool = True,
        check: bool = True,
        max_concurrent_users: int | None = None,
        **changes: Any,
    ) -> None:
        self.env = Clock()
        self.scheduler = scheduler(**changes)
        self.recorder = Recorder()
        self.engine = Engine(
            self.env,
            self.scheduler,
            cost_model or ConstantCost(step_s=1.0),
            self.recorder,
            admission_check=admission_check,
        )
        client = FanOutClient(RequestFactory(self.scheduler.max_model_len))
        if max_concurrent_users is None and not has_chains(specs):
            self.env.process(open_loop(self.env, self.engine, specs, client))
        else:
            sessions = SessionClient(
                self.env, self.engine, specs, client, max_concurrent_users
            )
            self.env.process(sessions.run())
        if check:
            self.engine.observe(1, lambda _: self.check())

    def check(self) -> None:
        """Prove invariants 1 and 2."""
        self.scheduler.check()
        self.recorder.check(self.scheduler)

    def go(self) -> Recording:
        """Run to the end."""
        self.env.run(until=self.engine.done)
        return self.recorder.finish(self.env.now)
