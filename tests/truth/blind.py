"""Published runs that were predicted blind: inputs were written down before a run.

Nothing is fitted to them; one rule that they suggested is named in this folder's page.
``python -m tests.truth.blind`` prints their errors, seconds long.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tests.truth.sought import Case

if TYPE_CHECKING:
    from collections.abc import Mapping

_AT_ONCE: Final = 1e6
"""Requests a second of clients that state users alone."""


def _fixed(num_tokens: int) -> dict[str, Any]:
    return {"kind": "fixed", "tokens": num_tokens}


def _of_groups(num_groups: int, num_tokens: int) -> dict[str, Any]:
    tokens = _fixed(num_tokens)
    return {"kind": "system_prompts", "num_groups": num_groups, "tokens": tokens}


def _case(  # noqa: PLR0917 - what a report tells, in its order
    name: str,
    engine: Mapping[str, Any],
    traffic: Mapping[str, Any],
    num_users: int,
    measured: Mapping[str, float],
    ends: str = "length",
) -> Case:
    workload = {"synthetic": dict(traffic), "max_concurrent_users": num_users}
    workload["output_end"] = ends
    config = {"workload": workload, "engine": dict(engine), "front_end": {}}
    return Case(name, MappingProxyType(config), MappingProxyType(dict(measured)))


def _traffic(
    num_requests: int, prompt: int, output: int, rate: float = _AT_ONCE
) -> dict[str, Any]:
    return {
        "num_requests": num_requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": _fixed(prompt),
        "output_tokens": _fixed(output),
    }


# -- H100 --------------------------------------------------------------------------


def _h100(
    model: str,
    num_users: int,
    measured: tuple[float, ...],
    num_ranks: int = 1,
    version: str = "0.21",
) -> Case:
    """Five prompts of about 40 tokens in turn, answers of 128: 20 requests a user."""
    engine = {
        "model": model,
        "gpu": "h100_sxm",
        "engine_version": version,
        "max_model_len": 4096,
        "tensor_parallel_size": num_ranks,
    }
    traffic = _traffic(20 * num_users, 8, 128) | {"prefixes": _of_groups(5, 32)}
    keys = ("median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
    found = dict(zip(keys, measured, strict=False))
    name = f"{model.rpartition('/')[2]}, {num_users} users"
    return _case(name, engine, traffic, num_users, found)


_QWEN_72B: Final = "Qwen/Qwen2.5-72B-Instruct"
H100: Final = (
    _h100("meta-llama/Llama-3.1-8B-Instruct", 1, (13.98, 6.48)),
    _h100("meta-llama/Llama-3.1-8B-Instruct", 4, (22.75, 6.59)),
    _h100("Qwen/Qwen2.5-7B-Instruct", 4, (26.84, 6.267)),
    _h100("Qwen/Qwen2.5-Coder-7B-Instruct", 4, (26.43, 6.261)),
    _h100("meta-llama/Llama-3.1-70B-Instruct", 4, (46.74, 15.862), 4),
    _h100(_QWEN_72B, 1, (24.21, 16.054, 2_061.99), 4, "0.22"),
    _h100(_QWEN_72B, 4, (46.34, 16.426, 2_130.02), 4, "0.22"),
    _h100(_QWEN_72B, 16, (47.83, 17.300, 2_239.5), 4, "0.22"),
)
H100_TOO_QUICK: Final = (
    _h100("mistralai/Mistral-7B-Instruct-v0.3", 4, (20.77, 7.04)),
    _h100("microsoft/Phi-3.5-mini-instruct", 4, (18.41, 4.662)),
)
"""vLLM 0.21 and 0.22.1 on four H100 (yobitelcomm/bench on GitHub)."""


# -- L40S and L4 -------------------------------------------------------------------

_KEYS: Final = ("mean_ttft_ms", "mean_itl_ms")
_14B: Final = "Qwen/Qwen3-14B"


def _card(  # noqa: PLR0917 - what a report tells, in its order
    gpu: str,
    model: str,
    traffic: Mapping[str, Any],
    measured: tuple[float, float],
    throughput: Mapping[str, float],
    num_ranks: int = 1,
    num_users: int = 10,
) -> Case:
    engine: dict[str, Any] = {"model": model, "gpu": gpu, "engine_version": "0.28.0"}
    if num_ranks > 1:
        engine |= {"tensor_parallel_size": num_ranks, "interconnect": "pcie4_no_peer"}
    name = f"{model.rpartition('/')[2]}, {num_ranks} {gpu}, {num_users} users"
    found = dict(zip(_KEYS, measured, strict=True)) | dict(throughput)
    return _case(name, engine, traffic, num_users, found, "stop")


def _like_chats(rate: float) -> dict[str, Any]:
    """ShareGPT's, of which totals are published: an exponential law is assumed."""
    law = {"kind": "exponential", "min": 4, "max": 1024}
    lengths = {"prompt_tokens": law | {"mean": 225.6}}
    lengths["output_tokens"] = law | {"mean": 206.8}
    return _traffic(2_000, 1, 1, rate) | lengths


_CHATS: Final = _like_chats(10.0)
_PREFIXES: Final = _traffic(1_000, 256, 128, 5.0) | {"prefixes": _of_groups(10, 256)}
L40S: Final = (
    _card("l40s", _14B, _CHATS, (146.9, 43.1), {"output_throughput": 228.1}),
    _card("l40s", f"{_14B}-AWQ", _CHATS, (74.7, 15.6), {"output_throughput": 625.2}),
    _card("l40s", _14B, _PREFIXES, (144.1, 43.7), {"output_throughput": 223.7}),
    _card("l40s", f"{_14B}-AWQ", _PREFIXES, (83.1, 17.1), {"output_throughput": 562.5}),
)
_TOTAL: Final = "total_token_throughput"
L4: Final = (
    _card("l4", f"{_14B}-AWQ", _CHATS, (235.0, 42.9), {_TOTAL: 437.5}),
    _card("l4", f"{_14B}-AWQ", _CHATS, (160.8, 29.5), {_TOTAL: 642.6}, 2),
    _card(
        "l4", f"{_14B}-AWQ", _like_chats(32.0), (175.7, 41.6), {_TOTAL: 1_356.5}, 2, 32
    ),
)
"""`vllm bench serve` of 0.28.0 (a Korean blog's, jinwoong). What joins two L4 is not
told: that they have no peer access is assumed."""


# -- A100 --------------------------------------------------------------------------


def _a100_40(model: str, num_users: int, measured: tuple[float, ...]) -> Case:
    """A hundred prompts of 44 tokens, answers of 128."""
    engine = {
        "model": model,
        "gpu": "a100_sxm_40gb",
        "engine_version": "0.20.1",
        "max_num_seqs": 64,
    }
    keys = ("median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
    name = f"{model.rpartition('/')[2]}, {num_users} users"
    found = dict(zip(keys, measured, strict=True))
    return _case(name, engine, _traffic(100, 44, 128), num_users, found)


_7B: Final = "Qwen/Qwen2.5-7B-Instruct"
A100_40: Final = (
    _a100_40(_7B, 1, (25.1, 12.4, 1_600.2)),
    _a100_40(_7B, 16, (73.2, 12.6, 1_676.7)),
    _a100_40(_7B, 64, (173.2, 15.2, 2_096.5)),
)
A100_40_AWQ: Final = (
    _a100_40(f"{_7B}-AWQ", 1, (19.2, 5.5, 718.7)),
    _a100_40(f"{_7B}-AWQ", 16, (59.4, 6.0, 819.2)),
    _a100_40(f"{_7B}-AWQ", 64, (170.7, 10.0, 1_435.5)),
)
"""vLLM 0.20.1 (ree2raz/inference-bench on GitHub)."""


def _a100(
    model: str,
    num_ranks: int,
    share: float,
    num_requests: int,
    measured: tuple[float, ...],
) -> Case:
    """Prompts and answers of 1,024, all at once."""
    engine: dict[str, Any] = {
        "model": model,
        "gpu": "a100_pcie",
        "engine_version": "0.10.1.1",
        "max_model_len": 16_384,
        "gpu_memory_utilization": share,
        "tensor_parallel_size": num_ranks,
    }
    if num_ranks > 1:
        engine["interconnect"] = "pcie4_no_peer"
    keys = ("mean_tpot_ms", "median_itl_ms", "duration")
    name = f"{model.rpartition('/')[2]}, {num_ranks} ranks, {num_requests} at once"
    traffic = _traffic(num_requests, 1_021 if num_requests > 10 else 1_024, 1_024)
    found = dict(zip(keys, measured, strict=True))
    return _case(name, engine, traffic, num_requests, found)


A100: Final = (
    _a100("Qwen/Qwen2.5-32B", 1, 0.9, 10, (51.64, 50.97, 54.96)),
    _a100("Qwen/Qwen2.5-32B", 1, 0.9, 50, (79.95, 55.95, 160.30)),
    _a100("Qwen/Qwen2.5-32B", 1, 0.9, 100, (77.73, 55.94, 282.30)),
)
A100_PAIR: Final = (
    _a100("Qwen/Qwen2.5-32B", 2, 0.5, 1, (29.21, 29.10, 29.94)),
    _a100("Qwen/Qwen2.5-32B", 2, 0.5, 10, (39.38, 38.12, 42.22)),
    _a100("Qwen/Qwen2.5-32B", 2, 0.5, 30, (50.04, 46.29, 56.86)),
    _a100("Qwen/Qwen2-72B", 2, 0.95, 1, (58.00, 57.57, 59.43)),
    _a100("Qwen/Qwen2-72B", 2, 0.95, 10, (73.04, 70.93, 78.74)),
)
"""vLLM 0.10.1.1 on cards of 80 GB without peer access (dennislee22/vLLM-benchmarking
on GitHub). That they are PCIe's is assumed; the blind prediction took NVLink's."""


# -- SGLang ------------------------------------------------------------------------


def _cookbook(num_requests: int, num_users: int, measured: tuple[float, ...]) -> Case:
    """`bench_serving` of random lengths up to 1,000, of which totals agree."""
    engine = {
        "model": "meta-llama/Llama-3.1-70B",
        "gpu": "a100_sxm",
        "scheduler": "sglang",
        "engine_version": "0.5.9",
        "tensor_parallel_size": 8,
    }
    law = {"kind": "uniform", "low": 1, "high": 1_000}
    lengths = {"prompt_tokens": law, "output_tokens": law}
    keys = ("mean_tpot_ms", "median_itl_ms")
    found = dict(zip(keys, measured, strict=False))
    traffic = _traffic(num_requests, 1, 1) | lengths
    return _case(f"eight A100, {num_users} users", engine, traffic, num_users, found)


COOKBOOK: Final = (
    _cookbook(10, 1, (18.63,)),
    _cookbook(80, 16, (26.09, 23.95)),
    _cookbook(500, 100, (47.19, 33.46)),
)
"""The cookbook of sgl-project; its release is not told."""

ALL: Final = {
    "H100, dense": H100,
    "H100, too quick": H100_TOO_QUICK,
    "L40S": L40S,
    "L4": L4,
    "A100 of 40 GB": A100_40,
    "A100 of 40 GB, AWQ": A100_40_AWQ,
    "A100": A100,
    "A100, two without peer access": A100_PAIR,
    "SGLang, eight A100": COOKBOOK,
}


def main() -> None:
    for group, cases in ALL.items():
        print(group)
        for case in cases:
            errors = case.errors()
            told = ", ".join(f"{key} {error:+.1f} %" for key, error in errors.items())
            print(f"  {case.name}: {told}")


if __name__ == "__main__":
    main()
