"""From a workload that shows something to a small one that still does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.studies.conformance.played_pair import ROLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sim.studies.conformance.kv_planning import KvCache
    from sim.studies.conformance.requests import DecisionRequest
    from sim.studies.conformance.workload import DecisionWorkload

MOST_TRIES = 1000

_SIMPLE: dict[str, Any] = {
    "enable_prefix_caching": False,
    "policy": "fcfs",
    "chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "watermark": 0.0,
    "long_prefill_token_threshold_adaptive": False,
    "prefill_schedule_interval": 1,
    "scheduler_reserve_full_isl": False,
    "sliding_window": None,
    "max_num_active_seqs": None,
    "max_num_scheduled_tokens": None,
    "async_scheduling": None,
    "speculative": None,
    "offload": None,
}
"""Settings at which a rule does nothing."""

_SIMPLE_WAY: dict[str, Any] = {
    "route_delay": 0,
    "lost": None,
    "fail_pulls": None,
    "router": None,
    "decode_router": None,
    "order": None,
    "asks_tier_first": None,
}
"""The same of the way between prefillers and decoders."""

_PLAIN_KV = (
    "disable_hybrid_kv_cache_manager",
    "prefix_match_unit",
    "prefix_cache_retention_interval",
)
"""Keys of the pool that may be left out."""


def shrunk(
    workload: DecisionWorkload,
    shows: Callable[[DecisionWorkload], bool],
    most_tries: int = MOST_TRIES,
) -> DecisionWorkload:
    """Return a part of `workload` that still shows what it shows.

    Fewer requests first, then simpler settings, then shorter and plainer requests,
    until nothing can be left out.
    """
    num_tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for part in _smaller(workload):
            if num_tries >= most_tries:
                return workload
            num_tries += 1
            if shows(part):
                workload, is_smaller = part, True
                break
    return workload


def _smaller(workload: DecisionWorkload) -> Iterator[DecisionWorkload]:
    requests = workload.requests
    size = len(requests) // 2
    while size:
        for start in range(0, len(requests), size):
            rest = requests[:start] + requests[start + size :]
            if rest:
                yield workload.model_copy(update={"requests": rest})
        size //= 2
    if first := requests[0].arrival_step:
        yield workload.model_copy(
            update={"requests": [_earlier(request, first) for request in requests]}
        )
    for config in _plainer_configs(workload):
        yield workload.model_copy(update={"config": config})
    if workload.kv is not None:
        for kv in _fewer_layers(workload.kv, workload.config):
            yield workload.model_copy(update={"kv": kv})
    for index, request in enumerate(requests):
        earliest = requests[index - 1].arrival_step if index else 0
        for changes in _plainer(request, earliest):
            changed = request.model_copy(update=changes)
            rest = [*requests[:index], changed, *requests[index + 1 :]]
            yield workload.model_copy(update={"requests": rest})


def _plainer_configs(workload: DecisionWorkload) -> Iterator[dict[str, Any]]:
    """Return configurations of which a key is plainer, in one of the engines."""
    config = workload.config
    if workload.pair is None:
        yield from _plainer_keys(config, _SIMPLE)
        return
    for plainer in _plainer_keys(config["pd"], _SIMPLE_WAY):
        yield config | {"pd": plainer}
    for pool in ROLES:
        for fewer in _plainer_pools(config[pool]):
            yield config | {pool: fewer}


def _plainer_pools(pool: dict[str, Any] | list[dict[str, Any]]) -> Iterator[Any]:
    """Return fewer engines that prefill, or decode, and plainer ones."""
    if isinstance(pool, dict):
        yield from _plainer_keys(pool, _SIMPLE)
        return
    for place, side in enumerate(pool):
        before, after = pool[:place], pool[place + 1 :]
        if before or after:
            yield before + after
        for plainer in _plainer_keys(side, _SIMPLE):
            yield [*before, plainer, *after]


def _plainer_keys(
    config: dict[str, Any], simple: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for key, value in simple.items():
        if key in config and config[key] != value:
            plainer = {k: v for k, v in config.items() if k != key}
            yield plainer if value is None else plainer | {key: value}


def _fewer_layers(kv: KvCache, config: dict[str, Any]) -> Iterator[KvCache]:
    """Return caches of fewer layers, and plainer ones; the largest changes first."""
    if (layers := kv.layers) is None:
        caching = config.get("enable_prefix_caching", True)
        yield kv.spelled_out(enable_prefix_caching=caching)
        return
    kinds = layers.repeated
    unlike = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    for fewer in (unlike, *(kinds[:i] + kinds[i + 1 :] for i in range(len(kinds)))):
        if 0 < len(fewer) < len(kinds):
            each = layers.model_copy(
                update={"num_layers": len(fewer), "repeated": fewer}
            )
            yield kv.model_copy(update={"layers": each})
    for num_layers in (len(kinds), layers.num_layers - 1):
        if len(kinds) <= num_layers < layers.num_layers:
            each = layers.model_copy(update={"num_layers": num_layers})
            yield kv.model_copy(update={"layers": each})
    for name in _PLAIN_KV:
        plain = type(kv).model_fields[name].default
        if getattr(kv, name) != plain:
            yield kv.model_copy(update={name: plain})


def _earlier(request: DecisionRequest, num_steps: int) -> DecisionRequest:
    """Return a request that comes, and is withdrawn, so many steps earlier."""
    changes = {"arrival_step": request.arrival_step - num_steps}
    if request.abort_step is not None:
        changes["abort_step"] = max(0, request.abort_step - num_steps)
    return request.model_copy(update=changes)


def _plainer(request: DecisionRequest, earliest: int) -> Iterator[dict[str, Any]]:
    """Return changes that make a request plainer, the largest first."""
    if request.arrival_step > earliest:
        yield {"arrival_step": earliest}
    if request.abort_step is not None:
        yield {"abort_step": None}
    if request.priority:
        yield {"priority": 0}
    for key in ("route_delay", "transfer_delay"):
        if getattr(request, key) is not None:
            yield {key: None}
    if not request.remote_prefill:
        yield {"remote_prefill": True}
    if request.stop_after is not None:
        yield {"stop_after": None}
    for output_len in (1, request.output_len // 2, request.output_len - 1):
        if 0 < output_len < request.output_len:
            yield {"output_len": output_len}
    if len(request.prompt) > 1:
        yield {"prompt": [(request.prompt[0][0], request.num_prompt_tokens)]}
        yield {"prompt": request.prompt[:-1]}
    *before, (seed, length) = request.prompt
    for shorter in (1, length // 2, length - 1):
        if 0 < shorter < length:
            yield {"prompt": [*before, (seed, shorter)]}
