"""Our V1 scheduler under vLLM's names: what the hosting is tested with everywhere.

It has the shape of vLLM's V1 API, and as little of it as hosting uses. What it decides
is ours, so a hosted one must decide as ours does.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from cache.tokens import ListTokens
from sim.scheduler.hosted.api import VllmApi
from sim.scheduler.request import Request as OurRequest
from sim.scheduler.request import RequestStatus as OurStatus
from tests.oracles.v1 import V1Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sim.scheduler.base import Preemption, SchedulerOutput


class SchedulerConfig:
    def __init__(
        self,
        *,
        max_model_len: int,
        is_encoder_decoder: bool,
        async_scheduling: bool = True,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 128,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        enable_chunked_prefill: bool = True,
        watermark: float = 0.0,
        scheduler_reserve_full_isl: bool = True,
        long_prefill_token_threshold_adaptive: bool = False,
        max_num_active_seqs: int | None = None,
        prefill_schedule_interval: int = 1,
        max_num_scheduled_tokens: int | None = None,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least\nmax_num_seqs")
        assert not is_encoder_decoder
        assert not async_scheduling
        self.arguments: dict[str, Any] = {
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "scheduling_policy": policy,
            "long_prefill_token_threshold": long_prefill_token_threshold,
            "enable_chunked_prefill": enable_chunked_prefill,
            "watermark": watermark,
            "scheduler_reserve_full_isl": scheduler_reserve_full_isl,
            "long_prefill_token_threshold_adaptive": (
                long_prefill_token_threshold_adaptive
            ),
            "max_num_active_seqs": max_num_active_seqs,
            "prefill_schedule_interval": prefill_schedule_interval,
            "max_num_scheduled_tokens": max_num_scheduled_tokens,
        }


class OldSchedulerConfig(SchedulerConfig):
    """Of a release without the later keys."""

    def __init__(
        self,
        *,
        max_model_len: int,
        is_encoder_decoder: bool = False,
        async_scheduling: bool = False,
        max_num_batched_tokens: int = 2048,
        max_num_seqs: int = 128,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        enable_chunked_prefill: bool = True,
    ) -> None:
        super().__init__(
            max_model_len=max_model_len,
            is_encoder_decoder=is_encoder_decoder,
            async_scheduling=async_scheduling,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            policy=policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduler_reserve_full_isl=False,
        )


class CacheConfig:
    def __init__(self, block_size: int = 16) -> None:
        assert block_size == 16  # as in releases that know a few sizes only
        self.block_size = block_size


class VllmConfig:
    def __init__(self, device_config: Any = None) -> None:
        self.device_config = device_config
        self.scheduler_config: Any = None
        self.cache_config: Any = None
        self.model_config: Any = None


@dataclass
class Spec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any


@dataclass
class WindowSpec(Spec):
    sliding_window: int


@dataclass
class KVCacheGroupSpec:
    layer_names: list[str]
    kv_cache_spec: Spec


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list[Any]
    kv_cache_groups: list[KVCacheGroupSpec]


@dataclass
class SamplingParams:
    max_tokens: int = 16
    stop_token_ids: list[int] = field(default_factory=list)


class RequestStatus(enum.Enum):
    FINISHED_ABORTED = 1


class Request:
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        sampling_params: SamplingParams,
        pooling_params: None,
        arrival_time: float,
        priority: int = 0,
        block_hasher: Callable[[Request], list[bytes]] | None = None,
        eos_token_id: int | None = None,
    ) -> None:
        assert pooling_params is None
        assert eos_token_id is None
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.token_ids = list(prompt_token_ids)
        self.block_hasher = block_hasher
        length = len(prompt_token_ids)
        self.ours = OurRequest(
            request_id=int(request_id),
            arrival_s=arrival_time,
            num_prompt_tokens=length,
            tokens=ListTokens(self.token_ids, length),
            max_num_tokens=length + sampling_params.max_tokens,
            oracle_num_tokens=1 << 40,
            priority=priority,
        )

    def is_finished(self) -> bool:
        return self.ours.status.is_finished

    @property
    def num_tokens(self) -> int:
        return self.ours.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.ours.num_computed_tokens


@dataclass
class ArrayOutput:
    """With arrays, as in 0.11.2."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[np.ndarray]
    logprobs: None
    prompt_logprobs_dict: dict[str, None]
    pooler_output: None


@dataclass
class ListOutput:
    """With lists, as in 0.33."""

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)


class Manager:
    """The part of vLLM's KVCacheManager that hosting looks at."""

    def __init__(self, inner: Inner) -> None:
        self._inner = inner
        pool = inner.kv_cache_manager.block_pool
        self.block_pool = SimpleNamespace(
            get_num_free_blocks=lambda: pool.num_free_blocks,
            cached_block_hash_to_block=pool.cached_blocks,
        )

    def allocate_slots(self, request: Request) -> None:
        del request

    def free(self, request: Request) -> None:
        self._inner.release_now(request.ours)

    def get_blocks(self, request_id: str) -> Any:
        table = self._inner.outer.requests[request_id].ours.block_table
        null = self._inner.kv_cache_manager.block_pool.null_block
        blocks = [
            SimpleNamespace(block_id=block.block_id, is_null=block is null)
            for block in table
        ]
        return SimpleNamespace(blocks=(blocks,))


class Queue:
    def __init__(self, outer: Scheduler) -> None:
        self._outer = outer

    def prepend_request(self, request: Request) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        return self._outer.inner.num_waiting

    def __iter__(self) -> Iterator[Request]:
        return (self._outer.of(each) for each in self._outer.inner.waiting)


class Inner(V1Scheduler):
    """Ours, which asks and frees through the manager that hosting listens to."""

    outer: Scheduler

    def _preempt(self, victim: OurRequest, for_request: OurRequest) -> Preemption:
        self.outer.kv_cache_manager.allocate_slots(self.outer.of(for_request))
        return super()._preempt(victim, for_request)

    def _release(self, request: OurRequest) -> int:
        before = self.kv_cache_manager.block_pool.num_free_blocks
        self.outer.kv_cache_manager.free(self.outer.of(request))
        return self.kv_cache_manager.block_pool.num_free_blocks - before

    def release_now(self, request: OurRequest) -> None:
        super()._release(request)


class Scheduler:
    engine_version = "0.33"

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: Any,
        block_size: int,
        log_stats: bool = True,
    ) -> None:
        assert not log_stats
        assert not vllm_config.model_config.is_encoder_decoder
        assert structured_output_manager.accept_tokens(None, [1])
        assert not structured_output_manager.should_advance(None)
        assert not structured_output_manager.should_advance(None, new_token_ids=[1])
        cache = vllm_config.cache_config
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        assert cache.block_size == block_size == spec.block_size
        self.inner = Inner(
            kv_cache_config.num_blocks,
            block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            sliding_window=getattr(spec, "sliding_window", None),
            engine_version=self.engine_version,
            **vllm_config.scheduler_config.arguments,
        )
        self.inner.outer = self
        self.requests: dict[str, Request] = {}
        self.kv_cache_manager = Manager(self.inner)
        self.waiting = Queue(self)
        self._output: SchedulerOutput | None = None

    def of(self, ours: OurRequest) -> Request:
        return self.requests[f"{ours.request_id:012d}"]

    @property
    def running(self) -> list[Request]:
        return [self.of(each) for each in self.inner.running]

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        ours, most = request.ours, self.inner.max_model_len
        ours.max_num_tokens = min(ours.max_num_tokens, most)
        self.inner.add_request(ours)

    def finish_requests(self, request_id: str, status: RequestStatus) -> None:
        assert status is RequestStatus.FINISHED_ABORTED
        self.inner.abort(self.requests[request_id].ours)
        del self.requests[request_id]

    def schedule(self) -> Any:
        output = self._output = self.inner.schedule(0.0)
        scheduled = zip(output.scheduled, output.num_scheduled_tokens, strict=True)
        return SimpleNamespace(
            num_scheduled_tokens={self.of(r).request_id: n for r, n in scheduled}
        )

    def update_from_output(self, output: Any, ran: Any) -> None:
        ended: list[Request] = []
        for request_id in output.num_scheduled_tokens:
            tokens = ran.sampled_token_ids[ran.req_id_to_index[request_id]]
            assert isinstance(tokens, np.ndarray) == isinstance(ran, ArrayOutput)
            request = self.requests[request_id]
            assert len(tokens) <= 1
            ended += [request for token in tokens if self._append(request, int(token))]
        self.inner.update([request.ours for request in ended])
        for request in ended:
            del self.requests[request.request_id]

    def _append(self, request: Request, token: int) -> bool:
        ours = request.ours
        assert ours.num_computed_tokens == ours.num_tokens
        request.token_ids.append(token)
        ours.num_tokens += 1
        stops = token in request.sampling_params.stop_token_ids
        if stops or ours.num_tokens >= ours.max_num_tokens:
            ours.move_to(OurStatus.FINISHED_STOPPED)
            return True
        return False


def init_none_hash(hash_fn: Callable[[Any], bytes]) -> None:
    assert hash_fn((None, (1, 2), None)) != hash_fn((None, (1, 3), None))


def get_request_block_hasher(
    block_size: int, caching_hash_fn: Callable[[Any], bytes]
) -> Callable[[Request], list[bytes]]:
    del block_size, caching_hash_fn
    return lambda _: []


def modules(release: str = "0.33") -> dict[str, ModuleType]:
    """The modules of a release that decides as ours does for it."""
    is_old = int(release.split(".")[1]) < 20
    kind = type("Scheduler", (Scheduler,), {"engine_version": release})
    contents: dict[str, dict[str, Any]] = {
        "torch": {"float16": "float16"},
        "vllm.v1.core.sched.scheduler": {"Scheduler": kind},
        "vllm.config": {
            "VllmConfig": VllmConfig,
            "SchedulerConfig": OldSchedulerConfig if is_old else SchedulerConfig,
            "CacheConfig": CacheConfig,
            "DeviceConfig": lambda device: device,
        },
        "vllm.v1.kv_cache_interface": {
            "KVCacheConfig": KVCacheConfig,
            "KVCacheGroupSpec": KVCacheGroupSpec,
            "FullAttentionSpec": Spec,
            "SlidingWindowSpec": WindowSpec,
        },
        "vllm.v1.request": {"Request": Request, "RequestStatus": RequestStatus},
        "vllm.v1.outputs": {"ModelRunnerOutput": ArrayOutput if is_old else ListOutput},
        "vllm.sampling_params": {"SamplingParams": SamplingParams},
        "vllm.v1.core.kv_cache_utils": {
            "get_request_block_hasher": get_request_block_hasher,
            "init_none_hash": init_none_hash,
        },
    }
    made = {}
    for name, names in contents.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(names)
    return made


def load_from(
    known: dict[str, ModuleType], missing: Sequence[str] = ()
) -> Callable[[str], ModuleType]:
    """Return what imports from `known`; a module in `missing` needs another package."""

    def load(name: str) -> ModuleType:
        if name in missing:
            raise ModuleNotFoundError("No module named 'blake3'", name="blake3")
        if name not in known:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return known[name]

    return load


def fake_api(release: str = "0.33", installed: str | None = None) -> VllmApi:
    """The API of a vLLM whose scheduler is ours for `release`."""
    return VllmApi(installed or f"{release}.0", load_from(modules(release)))
