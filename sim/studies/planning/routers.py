"""Routers of a plan, and how the real ones are told to do the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def as_router(given: Any) -> dict[str, Any]:
    """Return the table of a router that may be named by its kind alone."""
    return dict(given) if isinstance(given, dict) else {"kind": given}


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
