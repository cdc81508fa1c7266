"""The scheduler of an installed vLLM without the engine around it.

Made from the same configuration objects that the engine makes it from, with stubs for
the model and for structured output, and advanced as the engine's core does: one call of
``schedule``, then one of ``update_from_output``. Nothing of it is modified; two
methods of its cache manager are listened to, which tells preemptions in their order.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cache.tokens import TokenRuns
from sim.scheduler.hosted.kv_caches import (
    cache_settings,
    hash_block_size,
    kv_cache_config,
    kv_transfer_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sim.scheduler.hosted.api import VllmApi
    from sim.scheduler.request import Request
    from sim.scheduler.settings import CacheConfig
    from sim.scheduler.v1.settings import Settings

STOP_TOKEN = 1 << 62
"""The token that ends an output; no workload has it."""

_SEGMENT_BITS = 40
"""Tokens of a segment that are told apart, as a power of two."""

_WAITING = ("kv_holding_waiting", "skipped_waiting", "waiting")
"""Their queues of requests that do not run, in the order in which they are looked at;
the last one is there in every release."""


class HostedPreemption(NamedTuple):
    """A request that lost its blocks inside a scheduler call."""

    request_id: str
    for_request_id: str
    """The request for which slots were asked last before."""
    num_free_blocks_before: int
    num_free_blocks_after: int


class HostedStep(NamedTuple):
    """Decisions of one scheduler call."""

    output: Any
    """vLLM's own, for the update that follows."""
    num_scheduled_tokens: dict[str, int]
    """By request, in the order of the batch."""
    preemptions: list[HostedPreemption]
    copies: list[tuple[int, int]]
    """Blocks to be copied before the step runs, source and target."""


class _Model:
    """A text-only decoder: it has a longest sequence, and every flag is off."""

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len

    def get_total_num_kv_heads(self) -> int:
        """Return that there is one, as in `sim.scheduler.hosted.kv_caches`."""
        return 1

    def __getattr__(self, name: str) -> bool:
        if name.startswith("_"):
            raise AttributeError(name)
        return False


class _NoGrammar:
    """No request has a grammar: the hook under its names in all releases."""

    def should_advance(self, *args: Any, **kwargs: Any) -> bool:
        """Answer that no grammar has to take a token (up to 0.2x)."""
        del args, kwargs
        return False

    def accept_tokens(self, *args: Any, **kwargs: Any) -> bool:
        """Answer that the tokens are fine (later releases)."""
        del args, kwargs
        return True

    def validate_tokens(self, request: Any, tokens: list[int]) -> list[int]:
        """Answer that all drafts are fine."""
        del request
        return tokens


class HostedEngine:
    """vLLM's V1 scheduler and KV-cache manager, one request id at a time."""

    def __init__(
        self, api: VllmApi, settings: Settings, cache_config: CacheConfig
    ) -> None:
        self.api = api
        self.scheduler = _make_scheduler(api, settings, cache_config)
        self._manager = api.attribute(self.scheduler, "kv_cache_manager")
        self._pool = api.attribute(self._manager, "block_pool")
        self._hashes = api.attribute(self._pool, "cached_block_hash_to_block")
        self._queues = [
            getattr(self.scheduler, name)
            for name in _WAITING
            if hasattr(self.scheduler, name)
        ]
        api.attribute(self.scheduler, "waiting.prepend_request")
        self._hasher = (
            _block_hasher(api, settings, cache_config, self.scheduler)
            if cache_config.enable_prefix_caching or settings.offload is not None
            else None
        )
        # The report of the workers of a KV connector with the next output, or None.
        self.kv_connector_output: Any = None
        annotations = getattr(api.ModelRunnerOutput, "__annotations__", {})
        self._wants_arrays = "ndarray" in str(annotations.get("sampled_token_ids"))
        self._preemptions: list[HostedPreemption] = []
        self._asking = ""
        self._listen()

    def _listen(self) -> None:
        """Note requests that ask for slots or are freed, in the course of a call."""
        allocate = self.api.attribute(self._manager, "allocate_slots")
        free = self.api.attribute(self._manager, "free")

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._asking = request.request_id
            return allocate(request, *args, **kwargs)

        def free_and_note(request: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.num_free_blocks
            result = free(request, *args, **kwargs)
            self._preemptions.append(
                HostedPreemption(
                    request.request_id, self._asking, before, self.num_free_blocks
                )
            )
            return result

        self._manager.allocate_slots = allocate_slots
        self._manager.free = free_and_note

    # -- requests -------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        arrival_time: float,
        priority: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue a request with the token ids of its prompt."""
        api = self.api
        params = api.call(
            "SamplingParams", {"max_tokens": max_tokens, "stop_token_ids": [STOP_TOKEN]}
        )
        request = api.call(
            "Request",
            {
                "request_id": request_id,
                "prompt_token_ids": prompt,
                "sampling_params": params,
                "arrival_time": arrival_time,
                "priority": priority,
                "block_hasher": self._hasher,
            },
            {"pooling_params": None, "eos_token_id": None},
        )
        if kv_transfer_params is not None:
            request.kv_transfer_params = dict(kv_transfer_params)
        with api.speaking("Scheduler.add_request"):
            self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """Withdraw a request, wherever it stands."""
        status = self.api.attribute(self.api.RequestStatus, "FINISHED_ABORTED")
        with self.api.speaking("Scheduler.finish_requests"):
            self.scheduler.finish_requests(request_id, status)

    # -- a step ---------------------------------------------------------------

    def schedule(self) -> HostedStep:
        """Let vLLM decide on the next step."""
        self._preemptions = []
        self._asking = ""
        with self.api.speaking("Scheduler.schedule"):
            output = self.scheduler.schedule()
        scheduled = dict(self.api.attribute(output, "num_scheduled_tokens"))
        preemptions, self._preemptions = self._preemptions, []
        copies = getattr(output, "kv_cache_block_copies", None) or ()
        pairs = [(copied.src_block_id, copied.dst_block_id) for copied in copies]
        return HostedStep(output, scheduled, preemptions, pairs)

    def update(self, step: HostedStep, sampled: Mapping[str, list[int]]) -> None:
        """Hand vLLM the step's output: tokens for each request in `sampled`."""
        request_ids = list(step.num_scheduled_tokens)
        tokens: list[Any] = [sampled.get(request_id, []) for request_id in request_ids]
        if self._wants_arrays:
            tokens = [np.array(each, np.int64) for each in tokens]
        output = self.api.call(
            "ModelRunnerOutput",
            {
                "req_ids": request_ids,
                "req_id_to_index": {each: i for i, each in enumerate(request_ids)},
                "sampled_token_ids": tokens,
            },
            {
                "spec_token_ids": None,
                "logprobs": None,
                "prompt_logprobs_dict": {},
                "pooler_output": None,
                "kv_connector_output": self.kv_connector_output,
            },
        )
        with self.api.speaking("Scheduler.update_from_output"):
            self.scheduler.update_from_output(step.output, output)

    def worker_output(self, **what: Any) -> Any:
        """Return the report of a KV connector's workers that comes with an output."""
        return self.api.call("KVConnectorOutput", what)

    # -- drafts ---------------------------------------------------------------

    def num_drafts(self, step: HostedStep) -> dict[str, int]:
        """Return the draft tokens of each request of a step that has some."""
        drafts = self.api.attribute(step.output, "scheduled_spec_decode_tokens")
        return {request_id: len(tokens) for request_id, tokens in drafts.items()}

    def propose(self, num_tokens: Mapping[str, int]) -> None:
        """Hand vLLM drafts for the next step of requests; it drops those of others."""
        drafts = self.api.call(
            "DraftTokenIds",
            {
                "req_ids": list(num_tokens),
                "draft_token_ids": [[0] * number for number in num_tokens.values()],
            },
        )
        with self.api.speaking("Scheduler.update_draft_token_ids"):
            self.scheduler.update_draft_token_ids(drafts)

    def stop_at(self, request_id: str, token: int) -> None:
        """Let a request end with its next token of this id."""
        params = self.scheduler.requests[request_id].sampling_params
        params.stop_token_ids = [token]

    # -- state ----------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, in any of their queues."""
        return sum(len(queue) for queue in self._queues)

    def running(self) -> Iterator[str]:
        """Walk the running requests in order."""
        for request in self.scheduler.running:
            yield request.request_id

    def waiting(self) -> Iterator[str]:
        """Walk the waiting requests in the order in which they are looked at."""
        for queue in self._queues:
            for request in queue:
                yield request.request_id

    def num_tokens(self, request_id: str) -> tuple[int, int]:
        """Return all tokens and the computed tokens of an unfinished request."""
        request = self.scheduler.requests[request_id]
        return request.num_tokens, request.num_computed_tokens

    def is_chunk(self, request_id: str) -> bool:
        """Whether the latest tokens of a request are a part of what it must compute."""
        return bool(self.scheduler.requests[request_id].is_prefill_chunk)

    def is_stale(self, request_id: str) -> bool:
        """Whether tokens are in flight from before a preemption."""
        return bool(self.scheduler.requests[request_id].num_stale_output_tokens)

    def drops_output(self, request_id: str) -> bool:
        """Whether tokens in flight from before a preemption are dropped."""
        request = self.scheduler.requests[request_id]
        is_stale = bool(request.num_stale_output_tokens)
        return is_stale and bool(getattr(request, "drop_stale_output", False))

    def num_placeholders(self, request_id: str) -> int:
        """Return how many outputs of steps in flight a request awaits."""
        awaited: int = self.scheduler.requests[request_id].num_output_placeholders
        return awaited

    @property
    def has_finish_notice(self) -> bool:
        """Whether the workers are to be told of requests that have left."""
        return bool(self.scheduler.finished_req_ids)

    def holds(self, request_id: str) -> bool:
        """Whether a request has not ended for vLLM; its blocks may be held longer."""
        request = self.scheduler.requests.get(request_id)
        return request is not None and not request.is_finished()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        free: int = self._pool.get_num_free_blocks()
        return free

    @property
    def num_cached_hashes(self) -> int:
        """Distinct block hashes of the prefix cache."""
        return len(self._hashes)

    def tables(self, request_id: str) -> Sequence[Sequence[Any]]:
        """Return the blocks of a request by group; null blocks where none is needed."""
        tables: Sequence[Sequence[Any]] = self._manager.get_blocks(request_id).blocks
        return tables

    def junction(self, request_id: str) -> int:
        """Return the junction that a request was found to have, or 0."""
        request = self.scheduler.requests[request_id]
        return getattr(request, "shared_prefix_boundary", 0)


def _make_scheduler(api: VllmApi, settings: Settings, cache_config: CacheConfig) -> Any:
    """Construct their scheduler from their configuration objects."""
    config = copy.copy(_base_config(api))
    config.scheduler_config = _scheduler_config(api, settings, cache_config)
    hash_size = hash_block_size(settings, cache_config)
    config.cache_config = cache_settings(api, settings, cache_config)
    config.model_config = _Model(settings.max_model_len)
    config.speculative_config = _speculative_config(api, settings)
    if settings.has_connector:
        config.kv_transfer_config = kv_transfer_config(api, settings, cache_config)
    layout = cache_config.groups
    needed = {
        "vllm_config": config,
        "kv_cache_config": kv_cache_config(api, cache_config),
        "structured_output_manager": _NoGrammar(),
    }
    if hash_size != layout.scheduler_block_size:
        needed["hash_block_size"] = hash_size
    also = {"block_size": layout.scheduler_block_size, "log_stats": False}
    kind = "AsyncScheduler" if settings.async_scheduling else "Scheduler"
    return api.call(kind, needed, also)


@cache
def _base_config(api: VllmApi) -> Any:
    """Return the configuration of an engine on a CPU; made once, then copied."""
    device = api.call("DeviceConfig", {"device": "cpu"})
    return api.call("VllmConfig", {"device_config": device})


def _scheduler_config(
    api: VllmApi, settings: Settings, cache_config: CacheConfig
) -> Any:
    """Return their scheduler configuration."""
    needed: dict[str, Any] = {
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
        "long_prefill_token_threshold": settings.long_prefill_token_threshold,
        "enable_chunked_prefill": settings.enable_chunked_prefill,
        "policy": settings.scheduling_policy,
    }
    also: dict[str, Any] = {
        "is_encoder_decoder": False,
        "async_scheduling": settings.async_scheduling,
    }
    for key, idle in (
        ("watermark", 0.0),
        ("scheduler_reserve_full_isl", False),
        ("long_prefill_token_threshold_adaptive", False),
        ("max_num_active_seqs", None),
        ("prefill_schedule_interval", 1),
        ("max_num_scheduled_tokens", None),
    ):
        value = cache_config.watermark if key == "watermark" else getattr(settings, key)
        if value is None:
            continue  # the release's own default
        # At a value that does nothing, a release without the key does the same.
        (also if value == idle else needed)[key] = value
    return api.call("SchedulerConfig", needed, also)


def _speculative_config(api: VllmApi, settings: Settings) -> Any:
    """Return their configuration of drafts, without the model of a drafter."""
    drafts = settings.speculative_config
    if drafts is None:
        return None
    config = api.call(
        "SpeculativeConfig",
        {
            "method": "ngram",
            "num_speculative_tokens": drafts.num_speculative_tokens,
            "prompt_lookup_max": 1,
            "disable_eagle_block_drop": drafts.disable_eagle_block_drop,
            "disable_lookahead_block_hashes": drafts.disable_lookahead_block_hashes,
        },
    )
    config.method = drafts.method.value  # set rather than given: it names no model
    return config


def _block_hasher(
    api: VllmApi, settings: Settings, cache_config: CacheConfig, scheduler: Any
) -> Any:
    """Return the function that gives requests of a scheduler the keys of blocks."""
    api.call("init_none_hash", {"hash_fn": _hash})
    size = "block_size"
    if not api.takes("get_request_block_hasher", size):
        size = "hash_block_size"
    hash_size = hash_block_size(settings, cache_config)
    needed: dict[str, Any] = {size: hash_size, "caching_hash_fn": _hash}
    if settings.speculative_config is not None:
        key = "num_hash_lookahead_tokens"
        needed[key] = api.attribute(scheduler, key)
    return api.call("get_request_block_hasher", needed)


def _hash(value: Any) -> bytes:
    """Return a key of a block's content; only equality matters."""
    return hashlib.sha256(
        pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    ).digest()


class HostedTokens:
    """Ids that are equal where the tokens of a workload are.

    A segment is numbered when it is first met, so that ids of any two differ.
    """

    def __init__(self, *, has_content: bool) -> None:
        self._has_content = has_content
        self._segments: dict[int, int] = {}

    def prompt(self, request: Request) -> list[int]:
        """Return the ids of a prompt."""
        if not self._has_content:
            return [0] * request.num_prompt_tokens
        prompt = request.tokens.prompt()
        if not isinstance(prompt, TokenRuns):
            return list(prompt)
        ids: list[int] = []
        for segment_id, offset, num_tokens in prompt.pieces:
            start = self._token_id(segment_id, offset)
            ids += range(start, start + num_tokens)
        return ids

    def output(self, request: Request, index: int) -> int:
        """Return the id of a generated token."""
        if not self._has_content:
            return 0
        token = request.tokens.output(0, index)
        return token if isinstance(token, int) else self._token_id(*token)

    def _token_id(self, segment_id: int, offset: int) -> int:
        serial = self._segments.setdefault(segment_id, len(self._segments))
        return (serial << _SEGMENT_BITS) + offset
