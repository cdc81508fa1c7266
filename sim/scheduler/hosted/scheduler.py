"""The real V1 scheduler of an installed vLLM, behind our protocol.

For engines that we do not have, such as a patched one, and for checking ours: see
`sim.scheduler.v1.scheduler` for the scheduler that is ours. What it decides is theirs;
requests are mirrored, so that clock, cost models, workloads and recorder are the usual
ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache.errors import require
from cache.stats import PrefixCacheStats
from sim.errors import SchedulerError
from sim.scheduler.base import (
    CacheUsage,
    Preemption,
    PreemptionMode,
    SchedulerOutput,
    check_queues,
    stored_tokens,
)
from sim.scheduler.batch import Batch
from sim.scheduler.hosted.api import load_api, nearest_release
from sim.scheduler.hosted.engine import STOP_TOKEN, HostedEngine, HostedTokens
from sim.scheduler.hosted.kv_caches import HostedTables
from sim.scheduler.request import Request, RequestStatus
from sim.scheduler.v1.limits import admission_error
from sim.scheduler.v1.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.scheduler.hosted.engine import HostedPreemption, HostedStep
    from sim.scheduler.settings import CacheConfig


@dataclass(frozen=True, slots=True)
class HostedSettings(Settings):
    """Settings of V1 under the installed release.

    `engine_version` is the release that is expected, or empty for any; afterwards it is
    the nearest release that we know.
    """

    engine_version: str = ""

    def __post_init__(self) -> None:
        installed = load_api().installed
        release = nearest_release(installed)
        wanted, found = self.engine_version.split("."), release.split(".")
        if self.engine_version and wanted != found[: len(wanted)]:
            raise SchedulerError(
                f"engine_version is {self.engine_version}, vLLM {installed} is "
                f"installed and hosted; leave engine_version out, or install "
                f"vllm=={self.engine_version}"
            )
        object.__setattr__(self, "engine_version", release)
        Settings.__post_init__(self)


class VllmScheduler:
    """vLLM's own V1 scheduler and KV-cache manager, whatever release is installed.

    It imports vLLM when it is made. A call takes tens of times as long as one of
    `V1Scheduler`: this is for checks and for engines that we do not have.
    """

    generation = "vllm"

    def __init__(self, settings: HostedSettings, cache: CacheConfig) -> None:
        api = load_api()
        self.installed: str = api.installed
        # The engine arguments, under the nearest release that we know.
        self.settings = settings
        self.block_size = cache.block_size
        self.num_usable_blocks = cache.num_gpu_blocks - 1  # one is the null block
        self.enable_caching = cache.enable_prefix_caching
        self.layout, self.has_layout = cache.groups, cache.layout is not None
        self.prefix_cache_stats = PrefixCacheStats()
        self.engine = engine = HostedEngine(api, self.settings, cache)
        self.groups = HostedTables(
            self.layout, lambda: (engine.tables(key) for key in engine.running())
        )
        self._requests: dict[str, Request] = {}
        self._num_running = 0
        self._tokens = HostedTokens(
            has_content=self.enable_caching or settings.offload is not None
        )
        self._step: HostedStep | None = None

    # -- queues ---------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    @property
    def num_swapped(self) -> int:
        return 0

    @property
    def running(self) -> list[Request]:
        """Requests that hold blocks, in vLLM's order."""
        return [self._requests[each] for each in self.engine.running()]

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait, in the order in which vLLM would take them."""
        return [self._requests[each] for each in self.engine.waiting()]

    def admission_error(self, request: Request) -> str | None:
        # By the rules of the nearest release that we know: vLLM's scheduler itself has
        # no such test.
        return admission_error(
            request, self.settings, self.num_usable_blocks, self.layout
        )

    def add_request(self, request: Request) -> None:
        key = request_key(request)
        self._requests[key] = request
        self.engine.add(
            key,
            self._tokens.prompt(request),
            # A prompt that fills max_model_len leaves no room, but vLLM wants one.
            max_tokens=max(1, request.max_num_tokens - request.num_prompt_tokens),
            # Ids follow arrivals; equal times would have vLLM compare objects.
            arrival_time=float(request.request_id),
            priority=request.priority,
            kv_transfer_params=self._parameters(request),
        )

    def _parameters(self, request: Request) -> Mapping[str, Any] | None:
        """Return the parameters that a client would have given a KV connector."""
        return request.kv_transfer_params

    def abort(self, request: Request) -> None:
        self._num_running -= request.status is RequestStatus.RUNNING
        request.move_to(RequestStatus.FINISHED_ABORTED)
        key = request_key(request)
        self.engine.abort(key)
        del self._requests[key]

    # -- a step ---------------------------------------------------------------

    def schedule(self, now_s: float) -> SchedulerOutput:
        output = SchedulerOutput()
        step = self._step = self.engine.schedule()
        for preemption in step.preemptions:
            victim = self._requests[preemption.request_id]
            if victim.status is RequestStatus.RUNNING:
                output.preemptions.append(self._mirror_preemption(victim, preemption))
        batch = Batch(0)
        for key, num_new_tokens in step.num_scheduled_tokens.items():
            self._mirror_entry(key, num_new_tokens, now_s, output, batch)
        if self._num_running != self.num_running:
            raise self._differs(
                f"{self.num_running} running requests", self._num_running
            )
        for key in self.engine.running():
            if key not in step.num_scheduled_tokens:
                self._requests[key].end_streak()
        output.shape = batch.shape()._replace(num_copied_blocks=len(step.copies))
        output.num_recomputed_tokens = batch.num_recomputed_tokens
        # As in `V1Scheduler`: nothing has moved, or the last one gave itself up.
        output.stuck = not output.scheduled and not (
            output.preemptions and self.num_running
        )
        return output

    def _mirror_preemption(
        self, victim: Request, preemption: HostedPreemption
    ) -> Preemption:
        self._num_running -= 1
        before, after = (
            preemption.num_free_blocks_before,
            preemption.num_free_blocks_after,
        )
        usable = self.num_usable_blocks
        return Preemption(
            request=victim,
            for_request=self._requests.get(preemption.for_request_id, victim),
            reason=f"vLLM {self.installed} took its blocks",
            mode=PreemptionMode.RECOMPUTE,
            num_tokens_lost=victim.preempt(),
            num_blocks_freed=after - before,
            num_blocks_moved=0,
            kv_cache_usage_before=(usable - before) / usable,
            kv_cache_usage_after=(usable - after) / usable,
        )

    def _mirror_entry(
        self,
        key: str,
        num_new_tokens: int,
        now_s: float,
        output: SchedulerOutput,
        batch: Batch,
    ) -> None:
        """Advance one request of the batch as vLLM has advanced its own."""
        request = self._requests[key]
        num_tokens, after = self.engine.num_tokens(key)
        name = f"request {request.request_id}"
        if num_tokens != request.num_tokens:
            raise self._differs(f"{num_tokens} tokens of {name}", request.num_tokens)
        before = after - num_new_tokens
        if request.status is not RequestStatus.RUNNING:
            self._admit(request, before, now_s)
            output.admitted.append(request)
        elif before != request.num_computed_tokens:
            raise self._differs(
                f"{before} computed tokens of {name}", request.num_computed_tokens
            )
        request.num_computed_tokens = after
        output.scheduled.append(request)
        output.num_scheduled_tokens.append(num_new_tokens)
        if before < request.num_recompute_tokens:
            num_again = min(after, request.num_recompute_tokens) - before
            request.num_recomputed_tokens += num_again
            batch.num_recomputed_tokens += num_again
        batch.add(num_new_tokens, after)

    def _admit(self, request: Request, num_hits: int, now_s: float) -> None:
        resumed = request.status is RequestStatus.PREEMPTED
        if self.enable_caching:
            self.prefix_cache_stats.record(
                request.num_tokens, num_hits, preempted=resumed
            )
        request.move_to(RequestStatus.RUNNING)
        self._num_running += 1
        if not resumed:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = num_hits

    def _differs(self, theirs: str, ours: object) -> SchedulerError:
        return SchedulerError(
            f"vLLM {self.installed} has {theirs}, the simulation {ours}: it does "
            f"something that hosting does not mirror (speculation, connectors, ...); "
            f"take scheduler v1"
        )

    def update(self, finished: Sequence[Request]) -> None:
        step = self._step
        if step is None:
            raise RuntimeError("update follows schedule")
        brings = {
            key
            for key in step.num_scheduled_tokens
            if self._requests[key].num_tokens > self.engine.num_tokens(key)[0]
        }
        self._finish(finished, brings)

    def _finish(self, finished: Sequence[Request], brings: set[str]) -> None:
        """Hand vLLM the outputs of the step that has ended."""
        step, self._step = self._step, None
        assert step is not None
        ended = {request_key(request) for request in finished}
        sampled = {key: self._sampled(key, is_last=key in ended) for key in brings}
        if ended:  # with steps in flight, some of them while they wait
            self._num_running -= len(ended.intersection(self.engine.running()))
        self.engine.update(step, sampled)
        for key in sampled:
            if self.engine.holds(key) == (key in ended):
                number = self._requests[key].request_id
                raise self._differs(f"another end of request {number}", "its own")
        for key in ended:
            del self._requests[key]

    def _sampled(self, key: str, *, is_last: bool) -> list[int]:
        """Return the outputs that the step brought a request."""
        request = self._requests[key]
        index = request.num_output_tokens - 1
        return [STOP_TOKEN if is_last else self._tokens.output(request, index)]

    # -- proof ----------------------------------------------------------------

    def block_ids(self, request: Request) -> list[int]:
        """Return the tables of all groups as physical block ids, 0 for the null block.

        One after the other, in the order of the groups.
        """
        return [block for ids in self.group_block_ids(request) for block in ids]

    def group_block_ids(self, request: Request) -> list[list[int]]:
        """Return each group's table as physical block ids."""
        return [
            [block.block_id for block in blocks]
            for blocks in self.engine.tables(request_key(request))
        ]

    def junction(self, request: Request) -> int:
        """Return the junction of a request, as it was last looked up, or 0."""
        return self.engine.junction(request_key(request))

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Blocks to copy before the step runs, source and target."""
        return [] if self._step is None else self._step.copies

    def cache_usage(self) -> CacheUsage:
        num_tokens = sum(
            self._requests[key].num_computed_tokens for key in self.engine.running()
        )
        num_logical_blocks, num_logical_tokens = self.groups.entries(num_tokens)
        num_physical_blocks = self.num_usable_blocks - self.engine.num_free_blocks
        num_stored_tokens = stored_tokens(
            num_logical_tokens, num_physical_blocks, num_logical_blocks, self.block_size
        )
        return CacheUsage(
            num_physical_blocks,
            num_logical_blocks,
            num_stored_tokens,
            num_logical_tokens,
            num_physical_blocks / self.num_usable_blocks,
            0.0,
        )

    def summary(self) -> dict[str, Any]:
        # vLLM does not count evictions.
        counters = self.prefix_cache_stats.summary(0)
        del counters["num_evictions"]
        return counters | {"hosted_vllm": self.installed}

    def check(self) -> None:
        running, waiting = self.running, self.waiting
        check_queues(running, waiting, self.settings.max_num_seqs)
        require(
            len(running) + len(waiting) == len(self._requests),
            f"{len(self._requests)} requests are unfinished, vLLM has {len(running)} "
            f"running and {len(waiting)} waiting",
        )
        held = set().union(*self.groups.held_by_group())
        num_used = self.num_usable_blocks - self.engine.num_free_blocks
        require(
            len(held) == num_used,
            f"tables hold {len(held)} blocks, {num_used} are not free",
        )


def request_key(request: Request) -> str:
    """Return the id that vLLM knows a request by; as text in the order of arrivals."""
    return f"{request.request_id:012d}"
