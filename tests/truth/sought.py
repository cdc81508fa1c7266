"""Published runs that were sought where the others have none.

Full caches, host memory behind them, prefillers and decoders, GPUs without peer access,
experts at many requests. Nothing is fitted to them. ``python -m tests.truth.sought``
prints their errors, some minutes long.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from tests.truth.routing import ANY_TRAFFIC, EIGHT, Groups
from tests.truth.runs import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Errors = dict[str, float]
"""Signed errors in percent, by what was measured."""


def _apart(found: Mapping[str, float], measured: Mapping[str, float]) -> Errors:
    return {key: 100.0 * (found[key] / value - 1.0) for key, value in measured.items()}


@dataclass(frozen=True, slots=True)
class Case:
    """A run, and what was measured of it by keys of the summary."""

    name: str
    config: Mapping[str, Any]
    measured: Mapping[str, float]
    cost: Mapping[str, Any] = field(default_factory=dict)
    """Cost keys of its release's kernels, where another release stands in."""

    def errors(self, cost: Mapping[str, Any] = NOTHING) -> Errors:
        own = {"kind": "roofline"} | dict(self.cost) | dict(cost)
        told = {"cost": own, "cost_intervals": False}
        return _apart(
            simulate(parse_config(dict(self.config) | told)).summary, self.measured
        )


_AT_ONCE: Final = {"kind": "poisson", "rate": 1e6}


def _fixed(num_tokens: int) -> dict[str, Any]:
    return {"kind": "fixed", "tokens": num_tokens}


def _around(mean: int, share: float) -> dict[str, Any]:
    low, high = round(mean * (1.0 - share)), round(mean * (1.0 + share))
    return {"kind": "uniform", "low": low, "high": high}


def _like_chats(mean: float) -> dict[str, Any]:
    """ShareGPT's, of which totals are published: an exponential law is assumed."""
    return {"kind": "exponential", "mean": mean, "min": 4, "max": 1024}


def _case(  # noqa: PLR0917 - what a report tells, in its order
    name: str,
    engine: Mapping[str, Any],
    num_requests: int,
    prompt: Mapping[str, Any] | int,
    output: Mapping[str, Any] | int,
    measured: Mapping[str, float],
    num_users: int | None = None,
    arrivals: Mapping[str, Any] = _AT_ONCE,
    fleet: Mapping[str, Any] = NOTHING,
    prefixes: Mapping[str, Any] = NOTHING,
) -> Case:
    synthetic: dict[str, Any] = {
        "num_requests": num_requests,
        "arrivals": dict(arrivals),
        "prompt_tokens": _fixed(prompt) if isinstance(prompt, int) else prompt,
        "output_tokens": _fixed(output) if isinstance(output, int) else output,
    }
    if prefixes:
        synthetic["prefixes"] = prefixes
    workload: dict[str, Any] = {"synthetic": synthetic}
    if num_users is not None:
        workload["max_concurrent_users"] = num_users
    config = {"workload": workload, "engine": dict(engine), "front_end": {}}
    if fleet:
        config["fleet"] = dict(fleet)
    return Case(name, MappingProxyType(config), MappingProxyType(dict(measured)))


def _ahead(engine: Mapping[str, Any], *, ahead: bool) -> dict[str, Any]:
    return dict(engine) | {"async_scheduling": ahead}


# -- a full cache ------------------------------------------------------------------


def _watermark(
    share: float, num_preemptions: int, tokens_per_s: float, e2el_s: float | None
) -> Case:
    engine = {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "gpu": "gb200",
        "engine_version": "0.24",
        "max_model_len": 8192,
        "max_num_seqs": 256,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 16 << 30,
        "watermark": share,
    }
    measured = {
        "num_preemptions": float(num_preemptions),
        "output_throughput": tokens_per_s,
    }
    if e2el_s is not None:
        measured["median_e2el_ms"] = 1e3 * e2el_s
    lengths = _around(1_000, 0.2), _around(5_000, 0.2)
    return _case(f"watermark {share}", engine, 450, *lengths, measured, 128)


WATERMARKS: Final = (
    _watermark(0.0, 1_065, 11_582, 51.6),
    _watermark(0.02, 400, 12_134, 48.4),
    _watermark(0.05, 187, 12_167, 47.9),
    _watermark(0.10, 168, 11_835, 48.6),
    _watermark(0.15, 168, 11_635, None),
)
"""vLLM, pull request 44594, which added the key: its main branch of June 2026; 0.24,
the first release that has it, is taken."""


# -- long contexts -----------------------------------------------------------------

_LLAMA: Final = {
    "model": "meta-llama/Llama-3.1-8B",
    "gpu": "h100_sxm",
    "engine_version": "0.19",
    "enable_prefix_caching": False,
}
_OSS_20B: Final = _LLAMA | {
    "model": "openai/gpt-oss-20b",
    "engine_version": "0.33",
    "gpu_memory_utilization": 0.9,  # as 0.19 takes
}
_FP8: Final = {"kv_cache_dtype": "fp8"}


def _alone(
    name: str, engine: Mapping[str, Any], base_ms: float, token_ms: float
) -> tuple[Case, ...]:
    """One user, by the line that the report fitted to its inter-token latencies."""
    return tuple(
        _case(
            f"{name}, {length:,} tokens",
            *(engine, 4, length, 128),
            {"median_itl_ms": base_ms + token_ms * length},
            1,
        )
        for length in (256, 8_192, 32_768, 125_000)
    )


LONG_ALONE: Final = (
    *_alone("Llama-3.1-8B", _LLAMA, 6.44, 4.37e-5),
    *_alone("Llama-3.1-8B, FP8 cache", _LLAMA | _FP8, 6.58, 2.37e-5),
)
_LONG_ROUTING: Final = MappingProxyType(
    {"moe_layer_latency_s": 35.5e-6 + (4.32e-3 - 3.22e-3) / 24}
)
"""The default start of MXFP4 experts on an H100, and what Triton's kernels of 3.6 take
longer to route than those of 3.5: from 0.17 to 0.21 (vLLM, pull request 43135, by the
model of 24 layers that `TRITON_KERNELS` replays)."""


def _routing_long(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    return tuple(replace(case, cost=_LONG_ROUTING) for case in cases)


OSS_ALONE: Final = _routing_long(_alone("gpt-oss-20b", _OSS_20B, 4.05, 8.94e-6))
TRITON_KERNELS: Final = tuple(
    _case(
        f"gpt-oss-20b, kernels of Triton {name}",
        *(_OSS_20B, 4, 1_024, 1_024, {"median_itl_ms": itl_ms}, 1),
    )
    for name, itl_ms in (("3.5.1", 3.22), ("3.6.0", 4.32))
)
"""One user of an H100, in 0.16.0 (3.23 ms) and from 0.22 on, and between (vLLM, pull
request 43135). By the wheels 0.17.1 to 0.21 have the second, all others to 0.33 the
first; both are priced as 0.33's."""


def _eight(name: str, engine: Mapping[str, Any], ttft_ms: float, itl_ms: float) -> Case:
    measured = {"median_ttft_ms": ttft_ms, "median_itl_ms": itl_ms}
    lengths = _around(20_000, 0.15), _around(2_000, 0.15)
    return _case(f"{name}, 8 users", engine, 150, *lengths, measured, 8)


LONG_OF_EIGHT: Final = (
    _eight("Llama-3.1-8B", _LLAMA, 763.6, 15.18),
    _eight("Llama-3.1-8B, FP8 cache", _LLAMA | _FP8, 742.8, 12.93),
    *_routing_long(
        (
            _eight("gpt-oss-20b", _OSS_20B, 468.9, 8.09),
            _eight("gpt-oss-20b, FP8 cache", _OSS_20B | _FP8, 451.7, 7.90),
        )
    ),
)
"""vLLM 0.19.1, H100: vLLM's page on FP8 caches of 2026-04-22
(github.com/vllm-project/vllm-project.github.io, commit c3a01c4)."""


def _of_two(prompt: int, ttft_ms: float, tpot_ms: float) -> Case:
    engine = {
        "model": "Qwen/Qwen2.5-72B",
        "gpu": "h100_sxm",
        "tensor_parallel_size": 2,
        "engine_version": "0.8",
        "max_model_len": 16_384,
        "gpu_memory_utilization": 0.95,
    }
    measured = {"mean_ttft_ms": ttft_ms, "mean_tpot_ms": tpot_ms}
    name = f"Qwen2.5-72B, two H100, {prompt:,} tokens"
    return _case(name, engine, 8, prompt, 128, measured, 1)


TWO_H100: Final = (
    _of_two(128, 41.1, 30.9),
    _of_two(1_024, 129.2, 31.0),
    _of_two(4_096, 505.1, 31.1),
    _of_two(8_192, 1_063.8, 31.3),
)
"""Of April 2025 (tt-inference-server, issue 143). Release and share of the memory are
not told; first tokens of 2,048 and 3,072 come sooner than those of 1,024 would let
them, and are left out."""


# -- prompts that come all at once -------------------------------------------------


def _burst(
    name: str,
    engine: Mapping[str, Any],
    points: tuple[tuple[int, int, int, float, float], ...],
) -> tuple[Case, ...]:
    """Points: requests, prompt and output tokens, seconds, mean TPOT in ms."""
    return tuple(
        _case(
            f"{name}, prompts of {prompt:,}",
            *(engine, num_requests, prompt + 8, output),
            {"duration": duration_s, "mean_tpot_ms": tpot_ms},
        )
        for num_requests, prompt, output, duration_s, tpot_ms in points
    )


def _dense(model: str, gpu: str) -> dict[str, Any]:
    return {"model": f"Qwen/{model}", "gpu": gpu, "engine_version": "0.11.0"}


DENSE_A100: Final = (
    *_burst(
        "Qwen3-14B, A100",
        _dense("Qwen3-14B", "a100_sxm"),
        (
            (100, 32_000, 99, 724.56, 445.58),
            (500, 4_000, 200, 407.05, 254.61),
            (500, 2_000, 100, 175.66, 301.73),
        ),
    ),
    *_burst(
        "Qwen3-32B, A100",
        _dense("Qwen3-32B", "a100_sxm"),
        (
            (100, 32_000, 77, 1_783.59, 67.87),
            (500, 4_000, 200, 1_141.94, 96.19),
            (500, 2_000, 100, 415.71, 143.23),
        ),
    ),
)
DENSE_H100: Final = (
    *_burst(
        "Qwen3-14B, H100",
        _dense("Qwen3-14B", "h100_sxm"),
        (
            (100, 32_000, 99, 386.80, 277.44),
            (500, 4_000, 200, 227.57, 132.45),
            (500, 2_000, 100, 98.91, 206.51),
        ),
    ),
    *_burst(
        "Qwen3-32B, H100",
        _dense("Qwen3-32B", "h100_sxm"),
        (
            (100, 32_000, 77, 1_157.25, 43.42),
            (500, 4_000, 200, 976.29, 66.61),
            (500, 2_000, 100, 328.04, 86.62),
        ),
    ),
)
"""vLLM 0.11.0 with its defaults, a GPU each (github.com/gpustack/gpustack, commit
47277d7, ``docs/performance-lab``, as all of this part). Prompts went through a chat's
template: eight tokens more are taken."""


def _experts(model: str, gpu: str, num_gpus: int) -> dict[str, Any]:
    engine = _dense("", gpu) | {"model": model}
    return engine | {"tensor_parallel_size": num_gpus}


EXPERTS: Final = (
    *_burst(
        "GLM-4.5-Air, four A100",
        _experts("zai-org/GLM-4.5-Air", "a100_sxm", 4),
        (
            (100, 32_000, 100, 498.76, 305.47),
            (500, 4_000, 199, 300.98, 267.38),
            (500, 2_000, 100, 121.41, 204.31),
        ),
    ),
    *_burst(
        "GLM-4.6, eight H200",
        _experts("zai-org/GLM-4.6", "h200_sxm", 8),
        ((100, 32_000, 94, 213.02, 479.17), (500, 2_000, 100, 60.96, 269.75)),
    ),
    *_burst(
        "DeepSeek-R1, eight H200",
        _experts("deepseek-ai/DeepSeek-R1", "h200_sxm", 8),
        (
            (100, 32_000, 100, 206.90, 365.79),
            (500, 4_000, 200, 132.68, 164.23),
            (500, 2_000, 100, 59.26, 237.02),
        ),
    ),
)


def _sinks(name: str) -> dict[str, Any]:
    return {
        "model": f"openai/{name}",
        "gpu": "a100_sxm",
        "engine_version": "0.33",
        "gpu_memory_utilization": 0.9,
        "async_scheduling": False,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "max_model_len": 33_000,
    }


SINKS_A100: Final = (
    *_burst(
        "gpt-oss-20b, A100",
        _sinks("gpt-oss-20b"),
        ((100, 32_000, 95, 440.85, 268.03), (500, 2_000, 94, 58.06, 100.32)),
    ),
    *_burst(
        "gpt-oss-120b, A100",
        _sinks("gpt-oss-120b"),
        ((100, 32_000, 100, 740.1, 224.58), (500, 2_000, 98, 123.94, 131.94)),
    ),
)
"""Of 0.11.0, whose windows are not known here; 0.33 is taken, with its share of the
memory."""


def _few(num_users: int, duration_s: float, tpot_ms: float) -> Case:
    measured = {"mean_tpot_ms": tpot_ms, "duration": duration_s}
    engine = _dense("Qwen3-8B", "h100_sxm")
    lengths = _like_chats(240.0), _like_chats(220.6)
    name = f"Qwen3-8B, H100, {num_users} users"
    return _case(name, engine, 100, *lengths, measured, num_users)


FEW_USERS: Final = (
    _few(1, 166.04, 7.28),
    _few(2, 85.78, 7.37),
    _few(4, 44.40, 7.38),
    _few(8, 24.05, 7.71),
)


# -- GPUs without peer access ------------------------------------------------------


def _cards(
    model: str, num_gpus: int, num_users: int, e2el_ms: float, *, cascade: bool
) -> Case:
    """All prompts are one text of 1,201 tokens, in rounds of all users at once.

    `cascade`: whether steps read it once by the rule of 0.13, which says so of 32 users
    on one card, and not of two and four, where it is as many waves either way.
    """
    engine = {
        "model": f"Qwen/{model}",
        "gpu": "rtx_4090",
        "engine_version": "0.13",
        "tensor_parallel_size": num_gpus,
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.85 if "32B-" in model else 0.9,
        "disable_cascade_attn": not cascade,
    }
    if num_gpus == 2:  # a server of eight such cards
        engine["interconnect"] = "pcie4_no_peer"
    text = {
        "kind": "system_prompts",
        "num_groups": 1,
        "tokens": _fixed(1_200),
    }
    how = "" if cascade else ", each reads the text"
    name = f"{model}, {num_gpus} x RTX 4090, {num_users} users{how}"
    measured = {"median_e2el_ms": e2el_ms}
    count = 10 if num_users == 1 else 2 * num_users
    return _case(name, engine, count, 1, 256, measured, num_users, prefixes=text)


def _both(*run: Any) -> tuple[Case, Case]:
    return _cards(*run, cascade=True), _cards(*run, cascade=False)


NO_PEER: Final = (
    *_both("Qwen2.5-14B-Instruct-AWQ", 1, 1, 2_994.7),
    *_both("Qwen2.5-14B-Instruct-AWQ", 1, 32, 4_513.4),
    *_both("Qwen2.5-14B", 2, 1, 4_711.7),
    *_both("Qwen2.5-14B", 2, 32, 7_001.1),
    *_both("Qwen2.5-32B-Instruct-AWQ", 2, 1, 3_631.3),
    *_both("Qwen2.5-32B-Instruct-AWQ", 2, 32, 5_918.8),
    *_both("Qwen2.5-32B", 4, 32, 8_388.0),
)
"""vLLM 0.13.0, a server of eight RTX 4090, December 2025: a report in a public
repository, "Baseline Benchmark Report: Qwen2.5-14B and 32B-Instruct"."""


# -- several engines ---------------------------------------------------------------


def _offloading(shared: int, e2el_s: float, tokens_per_s: float, *, host: bool) -> Case:
    engine: dict[str, Any] = {
        "model": "Qwen/Qwen3-32B",
        "gpu": "h100_sxm",
        "tensor_parallel_size": 2,
        "engine_version": "0.33",
        "async_scheduling": False,
        "num_gpu_blocks_override": 9_271,
    }
    if host:
        engine["kv_offloading_size"] = 100e9 / 2**30
    measured = {"mean_e2el_ms": 1e3 * e2el_s, "total_token_throughput": tokens_per_s}
    prefixes = {
        "kind": "system_prompts",
        "num_groups": 45,
        "tokens": _fixed(shared),
        "zipf": 0.0,
    }
    pools = [{"name": "main", "replicas": 8}]
    return _case(
        f"groups of {shared:,}, {'host memory' if host else 'GPUs alone'}",
        *(engine, 450, 256, 1_024, measured, 45),
        fleet={"pools": pools, "router": {"kind": "llm_d"}},
        prefixes=prefixes,
    )


OFFLOADING: Final = (
    _offloading(30_000, 37.8, 38_534.8, host=False),
    _offloading(30_000, 31.0, 46_662.5, host=True),
    _offloading(8_000, 18.4, 23_389.6, host=False),
    _offloading(8_000, 18.6, 23_032.6, host=True),
)
"""Eight engines of Qwen3-32B on two H100 each, 45 users, November 2025, one step at a
time (github.com/llm-d/llm-d, commit 35b5cfb, ``guides/tiered-prefix-cache/cpu``). How
many requests were sent is not told: each prompt once is taken."""
_OSS_120B: Final = {
    "model": "openai/gpt-oss-120b",
    "gpu": "h200_sxm",
    "engine_version": "0.33",
    "gpu_memory_utilization": 0.9,
    "block_size": 128,
    "prefix_cache_retention_interval": "dense",
}
_PAIRS: Final = MappingProxyType(
    {
        "pools": [
            {"name": "prefill", "replicas": 8, "role": "prefill"},
            {
                "name": "decode",
                "replicas": 2,
                "role": "decode",
                "engine": {
                    "tensor_parallel_size": 4,
                    "gpu_memory_utilization": 0.92,
                },
            },
        ],
        "router": {"kind": "llm_d", "precise": True},
        "decode_router": {"kind": "least_requests"},
        "proxy": {"order": "decode_first"},
        "links": {"interconnect": "infiniband_ndr"},
    }
)
_GUIDE: Final = {"kind": "constant", "rate": 45.0}
APART: Final = (
    _case(
        "gpt-oss-120b, 8 prefill and 2 decode",
        *(_OSS_120B, 5_400, 5_000, 250),
        {"mean_e2el_ms": 2_355.0, "p95_e2el_ms": 2_900.0, "request_throughput": 44.27},
        arrivals=_GUIDE,
        fleet=_PAIRS,
    ),
    _case(
        "gpt-oss-120b, 16 that do both",
        _ahead(_OSS_120B | {"block_size": 16}, ahead=False),
        *(5_400, 5_000, 250),
        {"mean_e2el_ms": 6_700.0, "p95_e2el_ms": 10_200.0},
        arrivals=_GUIDE,
        fleet={
            "pools": [{"name": "main", "replicas": 16}],
            "router": {"kind": "random"},
        },
    ),
)
"""Sixteen H200; the first of vLLM 0.27.1, the second of an older release that is not
told, behind a Kubernetes service (llm-d, commits 3cfabd6 and 027a053,
``guides/pd-disaggregation``). The manifest of prefillers says 0.9 of the memory, that
of decoders nothing (commits f679742 and 34272a6)."""


_RATES: Final = (5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0)


@dataclass(frozen=True, slots=True)
class Ladder:
    """Stages of Poisson arrivals; every rate finds engines idle."""

    name: str
    engine: Mapping[str, Any]
    fleet: Mapping[str, Any]
    groups: Groups
    measured: Mapping[float, Mapping[str, float]]
    """By rate: requests or tokens a second, seconds."""
    stages: Sequence[tuple[float, float]] = tuple((rate, 60.0) for rate in _RATES)
    """Rate and seconds of each, in order; of a rate's two, the last is compared."""

    def simulated(self) -> dict[float, dict[str, float]]:
        specs = [*self.groups.specs(self.stages, is_poisson=True)]
        told = {"workload": dict(ANY_TRAFFIC), "cost_intervals": False, "front_end": {}}
        config = parse_config(
            told | {"engine": dict(self.engine), "fleet": dict(self.fleet)}
        )
        rows = Simulation(config, specs=specs).run().requests
        num_tokens = (
            self.groups.num_shared_tokens
            + self.groups.num_own_tokens
            + self.groups.num_output_tokens
        )
        found = {}
        first = 0
        for rate, duration_s in self.stages:
            last = first + round(rate * duration_s)
            own = rows.iloc[first:last]
            e2el_s = own["finish_s"] - own["arrival_s"]
            ttft_s = own["first_token_s"] - own["arrival_s"]
            per_s = len(own) / (own["finish_s"].max() - own["arrival_s"].min())
            found[rate] = {
                "requests/s": float(per_s),
                "tokens/s": float(per_s) * num_tokens,
                "output/s": float(per_s) * self.groups.num_output_tokens,
                "TTFT": float(ttft_s.mean()),
                "p90 TTFT": float(np.quantile(ttft_s, 0.9)),
                "E2E": float(e2el_s.mean()),
                "p90 E2E": float(np.quantile(e2el_s, 0.9)),
            }
            first = last
        return found

    def errors(self) -> dict[float, Errors]:
        found = self.simulated()
        return {rate: _apart(found[rate], own) for rate, own in self.measured.items()}


def _by_rate(
    keys: Sequence[str], points: Mapping[float, Sequence[float]]
) -> dict[float, dict[str, float]]:
    return {rate: dict(zip(keys, own, strict=True)) for rate, own in points.items()}


def _behind(router: Mapping[str, Any], replicas: int = 8) -> dict[str, Any]:
    pools = [{"name": "main", "replicas": replicas}]
    return {"pools": pools, "router": dict(router)}


def _tiers(
    measured: Mapping[float, tuple[float, float, float]], *, host: bool
) -> Ladder:
    engine: dict[str, Any] = {
        "model": "Qwen/Qwen3-32B",
        "gpu": "h100_sxm",
        "tensor_parallel_size": 2,
        "engine_version": "0.33",
        "num_gpu_blocks_override": 298_000 // 16 + 1,
    }
    router: dict[str, Any] = {"kind": "llm_d", "queue_weight": 1.0}
    router |= {"kv_cache_weight": 1.0, "prefix_weight": 1.0}
    if host:  # scores of both tiers are one here, by the larger index
        engine["kv_offloading_size"] = 200.0
        router |= {"prefix_weight": 2.0, "lru_capacity": 82_000}
    return Ladder(
        f"Qwen3-32B, {'host memory' if host else 'GPUs alone'}",
        engine,
        _behind(router),
        Groups(250, 5, 16_000, 256, 256),
        _by_rate(("tokens/s", "TTFT", "E2E"), measured),
    )


TIERS: Final = (
    _tiers(
        {
            5.0: (74_638.5, 1.62, 11.98),
            10.0: (122_387.7, 8.08, 26.28),
            20.0: (114_663.2, 43.67, 62.29),
            40.0: (115_645.0, 115.57, 134.78),
        },
        host=False,
    ),
    _tiers(
        {
            5.0: (82_880.0, 1.17, 11.49),
            10.0: (167_027.5, 0.41, 6.97),
            20.0: (300_749.2, 0.89, 9.03),
            40.0: (331_212.6, 25.38, 33.95),
        },
        host=True,
    ),
)
"""Eight engines on two H100 each, 298,000 tokens of cache, 200 GiB of host memory; the
release is not told (llm-d, commit 05126b7, ``guides/tiered-prefix-cache``)."""
EVICTION: Final = Ladder(
    "gpt-oss-120b, 8 prefill and 2 decode",
    _OSS_120B,
    _PAIRS,
    Groups(1_000, 5, 16_000, 256, 256),
    _by_rate(
        ("requests/s", "p90 E2E"),
        {
            5.0: (4.81, 2.050),
            10.0: (9.10, 2.149),
            15.0: (14.01, 2.381),
            20.0: (18.52, 3.217),
            25.0: (23.18, 4.576),
            30.0: (26.52, 8.491),
            35.0: (23.91, 23.027),
            40.0: (22.10, 40.267),
        },
    ),
)
"""vLLM 0.27.1 on sixteen H200, prompts 1.3 times what the prefillers' caches hold; that
release kept windows at every place (llm-d, commit 3cfabd6)."""
_LONGER: Final = ((15.0, 50.0), *EIGHT.durations_s.items())
"""The stages of `EIGHT`, after those that warm its caches."""


def _alike(
    router: Mapping[str, Any],
    measured: Mapping[float, tuple[float, float]],
    *,
    is_sglang: bool = False,
) -> Ladder:
    engine: dict[str, Any] = {"model": "Qwen/Qwen3-32B", "gpu": "h100_sxm"}
    engine["tensor_parallel_size"] = 2
    if is_sglang:
        engine |= {"scheduler": "sglang", "mem_fraction_static": 0.9}
    else:
        engine |= {"gpu_memory_utilization": 0.95, "block_size": 64}
        engine["engine_version"] = "0.19"
    first_token = "p90 TTFT" if is_sglang else "TTFT"
    return Ladder(
        f"Qwen3-32B{' on SGLang' if is_sglang else ''}, routed by {router['kind']}",
        engine,
        _behind(router),
        Groups(150, 5, 6_000, 1_200, 1_000),
        _by_rate(("output/s", first_token), measured),
        _LONGER,
    )


ROUTED: Final = (
    _alike(
        {"kind": "random"},
        {
            3.0: (1_797, 0.415),
            10.0: (4_215, 0.630),
            15.0: (5_381, 0.881),
            20.0: (6_205, 18.103),
            22.0: (5_517, 20.171),
            25.0: (5_965, 21.842),
            30.0: (5_702, 24.597),
            35.0: (5_890, 24.162),
            40.0: (6_336, 68.673),
            43.0: (6_588, 72.429),
            46.0: (6_459, 70.084),
            49.0: (6_265, 70.659),
            52.0: (6_303, 74.326),
            55.0: (6_290, 72.564),
            57.0: (6_089, 72.329),
            60.0: (6_551, 75.586),
        },
    ),
    _alike(
        {
            "kind": "llm_d",
            "precise": True,
            "queue_weight": 2.0,
            "kv_cache_weight": 2.0,
            "prefix_weight": 3.0,
        },
        {
            3.0: (1_707, 0.155),
            10.0: (4_904, 0.150),
            15.0: (6_887, 0.155),
            20.0: (11_224, 0.206),
            22.0: (11_980, 0.152),
            25.0: (12_548, 0.158),
            30.0: (13_507, 0.155),
            35.0: (13_803, 0.157),
            40.0: (15_593, 0.494),
            43.0: (15_612, 0.422),
            46.0: (15_462, 0.257),
            49.0: (15_607, 0.200),
            52.0: (15_728, 0.208),
            55.0: (15_612, 0.199),
            57.0: (15_667, 0.211),
            60.0: (15_733, 0.214),
        },
    ),
)
"""Eight engines on two H100 each, behind a Kubernetes service, which chooses for each
connection, and llm-d's router; its fourth score, for engines that were long without a
miss, is not built (llm-d, commit 0aa9f33, ``guides/precise-prefix-cache-routing``). The
release is that of its tokenizer."""
SGLANG_ROUTED: Final = (
    _alike(
        {"kind": "random"},
        {
            3.0: (1_647, 0.867),
            10.0: (4_644, 1.656),
            15.0: (5_740, 1.396),
            20.0: (6_018, 33.849),
            22.0: (5_843, 35.845),
            25.0: (5_906, 39.469),
            30.0: (5_831, 43.176),
            35.0: (5_746, 47.802),
            40.0: (6_629, 119.486),
            43.0: (6_828, 151.379),
            46.0: (6_686, 125.039),
            49.0: (6_285, 126.431),
            52.0: (6_488, 131.208),
            55.0: (5_855, 129.790),
            57.0: (5_769, 129.604),
            60.0: (5_642, 172.690),
        },
        is_sglang=True,
    ),
    _alike(
        {
            "kind": "llm_d",
            "queue_weight": 2.0,
            "kv_cache_weight": 2.0,
            "prefix_weight": 3.0,
        },
        {
            3.0: (1_536, 0.148),
            10.0: (4_838, 0.161),
            15.0: (7_056, 0.173),
            20.0: (11_077, 0.244),
            22.0: (11_693, 0.152),
            25.0: (12_063, 0.157),
            30.0: (12_675, 0.161),
            35.0: (13_066, 0.156),
            40.0: (14_463, 0.303),
            43.0: (14_399, 0.222),
            46.0: (14_561, 0.236),
            49.0: (14_493, 0.212),
            52.0: (14_578, 0.217),
            55.0: (14_711, 0.231),
            57.0: (14_954, 0.413),
            60.0: (14_839, 0.437),
        },
        is_sglang=True,
    ),
)
"""The same eight and the same traffic with SGLang (llm-d, commit 17e359c,
``guides/optimized-baseline``). Its share of the memory is its manifest's (commit
83bb7c1). The release is not told: a table of the repository has 0.5.13.post1, 0.5.9
stands in. The router that was measured filters by prefixes and by tokens in flight,
which is not built: the weights of `ROUTED` with an approximate index stand in. Of
requests that failed behind the service, 199 of all, the rates are not told."""
OSS_ROUTED: Final = Ladder(
    "gpt-oss-120b, routed by random",
    _OSS_120B
    | {
        "gpu": "h100_sxm",
        "gpu_memory_utilization": 0.95,
        "num_gpu_blocks_override": 1_934,
    },
    _behind({"kind": "random"}, 16),
    Groups(150, 5, 6_000, 500, 500),
    _by_rate(
        ("output/s", "TTFT"),
        {
            3.0: (1_160, 0.176),
            10.0: (4_836, 0.180),
            15.0: (6_986, 0.184),
            20.0: (9_077, 0.243),
            22.0: (9_346, 0.245),
            25.0: (10_579, 0.263),
            30.0: (12_211, 0.285),
            35.0: (11_861, 0.598),
            40.0: (13_889, 2.588),
            43.0: (14_089, 2.664),
            46.0: (14_603, 3.545),
            49.0: (14_562, 4.727),
            52.0: (15_158, 5.238),
            55.0: (14_644, 5.735),
            57.0: (15_330, 5.630),
            60.0: (13_234, 7.194),
        },
    ),
    _LONGER,
)
"""Sixteen engines on an H100 each, behind a Kubernetes service; the release is not told
(llm-d, commit 17e359c, ``guides/optimized-baseline``). Its manifest (commit 7e1d578)
says that 0.9 of a GPU leaves 0.01 GiB less than a request of 131,072 tokens needs:
1,934 blocks at 0.95, where `kvsim capacity` has 1,330 (867 to 1,794)."""
CASES: Final = (
    *(*WATERMARKS, *LONG_ALONE, *OSS_ALONE, *LONG_OF_EIGHT, *TWO_H100),
    *TRITON_KERNELS,
    *(*DENSE_A100, *DENSE_H100, *EXPERTS, *SINKS_A100, *FEW_USERS),
    *(*NO_PEER, *OFFLOADING, *APART),
)


def rows() -> Iterator[str]:
    """Yield a line a case and a stage: what was measured, and signed errors in %."""
    for case in CASES:
        yield _line(case.name, case.errors())
    for ladder in (*TIERS, EVICTION, *ROUTED, *SGLANG_ROUTED, OSS_ROUTED):
        for rate, errors in ladder.errors().items():
            yield _line(f"{ladder.name}, {rate:.0f} requests/s", errors)


def _line(name: str, errors: Errors) -> str:
    return f"{name}: " + ", ".join(f"{k} {v:+.1f}" for k, v in errors.items())


if __name__ == "__main__":
    for line in rows():
        print(line, flush=True)
