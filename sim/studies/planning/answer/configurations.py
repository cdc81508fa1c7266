"""The configurations of a plan, ready for ``kvsim run``, and the servers' commands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sim.config.tables import parse_config
from sim.hardware.models.bundled import hub_name
from sim.studies.planning.answer.connectors import (
    KEYS,
    connector_not_said,
    connector_options,
    environment,
)
from sim.studies.planning.phases.replicas import fleet_table, is_alone
from sim.studies.planning.search.trial import split_table, with_scale

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.config.engine import EngineConfig
    from sim.config.tables import RunConfig
    from sim.hardware.capacity import CapacityEstimate
    from sim.studies.planning.answer.connectors import Side
    from sim.studies.planning.phases.outcome import CandidatePlan
    from sim.studies.planning.phases.study import Study


def config_path(each: CandidatePlan) -> str:
    """Return where its configuration lies, from the plan's folder."""
    return f"configs/{each.candidate.name}.yaml"


def configurations(study: Study, plans: Sequence[CandidatePlan]) -> dict[str, str]:
    """Return files by their path: YAML that ``kvsim run`` takes as it is.

    One engine at the highest rate that it holds and, where the plan's traffic takes
    several, the fleet behind the plan's first router; of engines that fleets are not
    built of, the first replica.
    """
    files = {}
    for each in plans:
        if each.found is None:
            continue
        run, rate = each.candidate.run, each.found.rate.value
        path = config_path(each)
        files[path] = _yaml(
            each,
            with_scale(run, rate / study.base_rate),
            f"at {rate:.4g} requests/s, the highest rate it holds",
        )
        if each.fleet is not None and each.fleet.num_replicas > 1:
            number = each.fleet.num_replicas
            if not is_alone(each):
                files[path.replace(".yaml", f".fleet_of_{number}.yaml")] = _yaml(
                    each,
                    {**run, "fleet": fleet_table(number, study.routers[0])},
                    f"x {number} under {study.target_rate:.4g} requests/s",
                    router_flags(study.routers[0], number),
                )
                continue
            split = split_table(number, 0, study.plan.replicas.by)
            files[path.replace(".yaml", f".replica_of_{number}.yaml")] = _yaml(
                each,
                {**run, "workload": {**run["workload"], "split": split}},
                f"as replica 0 of {number} under {study.target_rate:.4g} requests/s",
            )
    return files


def _yaml(each: CandidatePlan, run: dict[str, Any], said: str, router: str = "") -> str:
    config = parse_config(run)
    lines = [
        f"# {each.candidate.name} {said}.",
        "# To serve it:",
        f"#   {serve_command(config.engine, each.candidate.pool)}",
    ]
    if router:
        lines += ["# and before them:", f"#   {router}"]
    if missing := not_said(config.engine):
        lines.append(f"# The command does not say: {', '.join(missing)}")
    return "\n".join([*lines, config.to_yaml()])


_OURS = frozenset(
    {
        "model",
        "gpu",
        "scheduler",
        "engine_version",
        "admission",
        "admission_check",
        "disable_cascade_attn",
        "disable_hybrid_kv_cache_manager",
        "evictor",
        "pipeline_parallel_size",
        "preemption_victim",
        "async_scheduling",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "enforce_eager",
        "max_paddings",
        "watermark",
        "sliding_window",
        "max_num_active_seqs",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold_adaptive",
        "prefill_schedule_interval",
        "scheduler_reserve_full_isl",
    }
)
"""Keys that are no plain option of the servers: said in words, or handled apart."""

_SWITCHES = (
    "async_scheduling",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "disable_cascade_attn",
    "disable_hybrid_kv_cache_manager",
)
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
_POOLS = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
_BEFORE_V1 = ("preemption_mode", "swap_space")


def serve_command(
    engine: EngineConfig, capacity: CapacityEstimate, side: Side | None = None
) -> str:
    """Return the shell command that serves this configuration, in one line.

    Limits that a release would choose by itself are written out, as the simulation took
    them; `capacity` has them. `side` says which one of a prefiller and a decoder it is,
    if either. Before ``vllm serve`` (0.6) the servers are modules.
    """
    words = [*_program(engine), *_plain(engine, capacity)]
    words += connector_options(engine, side)
    for key in _SWITCHES:
        words += _switch(engine, key)
    if engine.enforce_eager:
        words.append(_option(engine.generation.server.eager))
    return " ".join([*environment(engine, side), shlex.join(words)])


def _program(engine: EngineConfig) -> list[str]:
    return [*engine.generation.server.command, _checkpoint(engine.model)]


def _checkpoint(model: str) -> str:
    """Return a name or folder from which the server can load the model's weights."""
    path = Path(model)
    if path.suffix == ".json":
        return str(path.parent)
    return model if path.is_dir() else hub_name(model) or model


def _plain(engine: EngineConfig, capacity: CapacityEstimate) -> list[str]:
    words: list[str] = []
    server = engine.generation.server
    for key, field in type(engine).model_fields.items():
        value = _resolved(engine, capacity, key)
        if key in _OURS | KEYS or value is None:
            continue
        if key in _BEFORE_V1 and key not in engine.generation.server.options:
            continue
        is_said = key in _LIMITS
        default = engine.generation.defaults.get(key, field.default)
        if key == "gpu_memory_utilization" and key in capacity.defaults:
            default = value  # as the release does by itself
        if value == default and not is_said and key != "tensor_parallel_size":
            continue
        if key in _POOLS and server.pool_in_tokens:
            num_tokens = capacity.num_gpu_blocks * engine.block_size
            words += [_option(server.pool_in_tokens), str(num_tokens)]
        else:
            words += _said(engine, key, value)
    return words


def _said(engine: EngineConfig, key: str, value: Any) -> list[str]:
    """Return a key and its value as the server takes them."""
    server = engine.generation.server
    option = _option(server.names.get(key, key))
    if isinstance(value, bool):
        return [option] if value else [f"--no-{option[2:]}"]
    if key == "max_num_batched_tokens" and engine.enable_chunked_prefill is False:
        value = -1 if key in server.names else value  # whole prompts
    return [option, "None" if value == "dense" else _text(value)]  # vLLM's own word


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _resolved(engine: EngineConfig, capacity: CapacityEstimate, key: str) -> Any:
    if key in _LIMITS:
        return getattr(capacity, key)
    if key == "speculative_config":
        drafts = engine.speculative
        return drafts and json.dumps(drafts.model_dump(exclude_defaults=True))
    if key == "override_generation_config":
        given = engine.override_generation_config
        return given and json.dumps(given.model_dump(exclude_defaults=True))
    return getattr(engine, key)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _switch(engine: EngineConfig, key: str) -> list[str]:
    value = getattr(engine, key)
    if value is None:
        return []
    name, server = key.replace("_", "-"), engine.generation.server
    if server.off_switches:
        off = server.off_switches.get(key)
        return [] if value or off is None else [_option(off)]
    if key in server.valued_switches:
        return [f"--{name}={value}"]
    return [f"--{name}" if value else f"--no-{name}"]


def not_said(engine: EngineConfig) -> list[str]:
    """Return settings of the simulation that the command line does not carry."""
    told = {"model", "gpu", "scheduler", "engine_version", "admission_check"}
    found = []
    if "/" not in _checkpoint(engine.model) and not Path(engine.model).exists():
        found.append(
            f"the owner of {engine.model} on the hub, a name that kvsim does not know"
        )
    for key in sorted(_OURS - told - set(_SWITCHES) - {"enforce_eager"}):
        value = getattr(engine, key)
        if value not in (None, type(engine).model_fields[key].default):
            found.append(f"{key}={value}")
    options = engine.generation.server.options
    if engine.preemption_mode is not None and "preemption_mode" not in options:
        found.append(f"preemption_mode={engine.preemption_mode}")
    found += connector_not_said(engine)
    drafts = engine.speculative
    if drafts is not None and drafts.method in ("eagle", "eagle3"):
        found.append("speculative_config.model, the checkpoint of the head")
    return found


# -- routers -------------------------------------------------------------------------

_SGLANG: Final = (
    "python -m sglang_router.launch_router --worker-urls URL... --policy {}"
)
_STACK: Final = "vllm-router --service-discovery static --static-backends URL,... {}"
_AIBRIX: Final = "the AIBrix gateway, with the header routing-strategy: {}"

_FLAGS: Final[Mapping[str, str]] = {
    "round_robin": _SGLANG.format("round_robin"),
    "random": _SGLANG.format("random"),
    "power_of_two": _SGLANG.format("power_of_two"),
    "sglang_cache_aware": _SGLANG.format("cache_aware"),
    "least_requests": _AIBRIX.format("least-request"),
    "aibrix_prefix": _AIBRIX.format("prefix-cache"),
    "session": _STACK.format("--routing-logic session --session-key x-user-id"),
    "production_stack_prefix": _STACK.format("--routing-logic prefixaware"),
    "dynamo_kv": "python -m dynamo.frontend --router-mode kv",
    "ray_prefix": (
        "Ray Serve LLM, with deployment_config.request_router_config: "
        "{request_router_class: ray.serve.llm.request_router."
        "PrefixCacheAffinityRouter}"
    ),
}
_LLM_D: Final = {
    "queue_weight": ("queue-scorer", 2.0),
    "kv_cache_weight": ("kv-cache-utilization-scorer", 2.0),
    "prefix_weight": ("prefix-cache-scorer", 3.0),
}
_DYNAMO: Final = {
    "overlap_score_credit": "--router-kv-overlap-score-credit",
    "prefill_load_scale": "--router-prefill-load-scale",
    "decode_active_request_weight": "--router-decode-active-request-weight",
}


def router_flags(router: Mapping[str, Any], num_replicas: int) -> str:
    """Return how to start the real router, in a line.

    Parameters
    ----------
    router
        The table ``fleet.router``.
    num_replicas
        Engines behind it.
    """
    kind = str(router["kind"])
    if kind == "llm_d":
        scorers = ", ".join(
            f"{name} {router.get(key, weight):g}"
            for key, (name, weight) in _LLM_D.items()
        )
        return f"llm-d-router, with the scorers and weights {scorers}, max-score-picker"
    if kind == "vllm_dp":
        servers = router.get("num_servers", 1)
        return (
            f"vllm serve --data-parallel-size {num_replicas} --api-server-count "
            f"{servers}, which is router and engines in one"
        )
    words = [_FLAGS.get(kind, f"a class of your own, {kind}")]
    if kind == "dynamo_kv":
        words += [
            f"{flag} {router[key]:g}" for key, flag in _DYNAMO.items() if key in router
        ]
    return " ".join(words)


_PAIRED: Final = {
    "sglang": (
        "python -m sglang_router.launch_router --pd-disaggregation "
        "--prefill URL PORT... --decode URL..."
    ),
    "v1": "vllm-router --vllm-pd-disaggregation --prefill URL... --decode URL...",
}
_POLICIES: Final = {
    "round_robin": "round_robin",
    "random": "random",
    "power_of_two": "power_of_two",
    "sglang_cache_aware": "cache_aware",
}
"""Of SGLang's gateway, and of vLLM's router, which began as a copy of it."""


def flags_of_fleet(config: RunConfig) -> str:
    """Return how to start what stands before a fleet, in a line.

    Source: the gateway of SGLang 0.5.9 and vLLM's router, their README files.
    """
    fleet = config.fleet
    assert fleet is not None
    number = fleet.num_engines
    if all(pool.role == "serve" for pool in fleet.pools):
        return router_flags(fleet.router, number)
    decode = fleet.decode_router or {"kind": "round_robin"}
    kinds = [str(router["kind"]) for router in (fleet.router, decode)]
    if all(kind in _POLICIES for kind in kinds):
        prefill_policy, decode_policy = (_POLICIES[kind] for kind in kinds)
        return (
            f"{_PAIRED[config.engine.scheduler_kind]} --prefill-policy "
            f"{prefill_policy} --decode-policy {decode_policy}"
        )
    return (
        f"a proxy that takes each request to both; before prefillers: "
        f"{router_flags(fleet.router, number)}; before decoders: "
        f"{router_flags(decode, number)}"
    )
