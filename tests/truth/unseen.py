"""Published runs that had no part in anything here: nothing is fitted to them.

``python -m tests.truth.unseen`` prints the table of the README.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from sim.config.tables import parse_config
from sim.simulation.simulate import simulate
from tests.truth.runs import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sim.config.tables import RunConfig

_AT_ONCE: Final = 1e6
"""Requests a second that are there from the start."""


def _fixed(num_tokens: int) -> dict[str, Any]:
    return {"kind": "fixed", "tokens": num_tokens}


@dataclass(frozen=True, slots=True)
class Point:
    """Traffic, and what was measured: the mean time of an output token, in ms."""

    num_requests: int
    prompt_tokens: Mapping[str, Any]
    output_tokens: Mapping[str, Any]
    measured: float
    rate: float = _AT_ONCE
    key: str = "mean_tpot_ms"
    """Or ``duration``: of the whole run, in seconds."""
    num_users: int | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


CHOICES: Final[Mapping[str, float]] = MappingProxyType(
    {"Qwen3-30B-A3B": 0.12, "gpt-oss-120b": 0.03}
)
"""`moe_routing_correlation` as published, by model; of gpt-oss-120b nothing is, and the
least of others that have dozens of experts stands for it."""


@dataclass(frozen=True, slots=True)
class Unseen:
    """A run: its engine, and points at which it was measured."""

    name: str
    engine: Mapping[str, Any]
    points: tuple[Point, ...]

    @property
    def correlation(self) -> float:
        """How alike tokens choose experts, by what is published; 0 if nothing is."""
        known = (own for model, own in CHOICES.items() if model in self.engine["model"])
        return next(known, 0.0)

    def config(self, point: Point, cost: Mapping[str, Any] = NOTHING) -> RunConfig:
        synthetic = {
            "num_requests": point.num_requests,
            "arrivals": {"kind": "poisson", "rate": point.rate},
            "prompt_tokens": dict(point.prompt_tokens),
            "output_tokens": dict(point.output_tokens),
        }
        workload: dict[str, Any] = {"synthetic": synthetic}
        if point.num_users is not None:
            workload["max_concurrent_users"] = point.num_users
        return parse_config(
            {
                "workload": workload,
                "engine": dict(self.engine) | dict(point.engine),
                "cost": {"kind": "roofline"} | dict(cost),
            }
        )

    def errors(self, cost: Mapping[str, Any] = NOTHING) -> list[float]:
        """Return the signed errors in percent, a point each."""
        return [
            100.0
            * (
                simulate(self.config(point, cost)).summary[point.key] / point.measured
                - 1.0
            )
            for point in self.points
        ]


def _batch(num_prompts: int, num_output_tokens: int, tpot_ms: float) -> Point:
    """So many prompts of 1,024 tokens at once; some answers ended before 1,024."""
    output = _fixed(round(num_output_tokens / num_prompts))
    return Point(num_prompts, _fixed(1021), output, tpot_ms)


def _a100(num_gpu_blocks: int, utilization: float, *points: Point) -> Unseen:
    engine = {
        "model": "Qwen/Qwen2.5-7B-Instruct",
        "gpu": "a100_sxm",
        "engine_version": "0.10",
        "max_model_len": 16_384,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 256,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": utilization,
        "num_gpu_blocks_override": num_gpu_blocks,
    }
    name = f"vLLM 0.10.1.1, Qwen2-7B, A100, {num_gpu_blocks:,} blocks"
    return Unseen(name, MappingProxyType(engine), points)


ROOMY: Final = _a100(
    29_053,
    0.5,
    _batch(1, 1_024, 11.75),
    _batch(10, 10_240, 13.47),
    _batch(20, 20_399, 14.12),
    _batch(30, 30_615, 14.93),
    _batch(50, 51_119, 18.47),
    _batch(75, 76_697, 22.21),
    _batch(100, 101_590, 25.26),
    _batch(200, 200_419, 40.34),
    _batch(500, 502_621, 52.41),
)
"""One at a time is this release's default. Arguments, blocks and results:
github.com/dennislee22/vLLM-benchmarking, commit b474d1e, test 5. Prompts repeat from
point to point, so first tokens are not compared. The model has the sizes of the
bundled Qwen2.5-7B."""
FULL: Final = _a100(
    5_867,
    0.25,
    _batch(1, 1_024, 11.76),
    _batch(10, 10_240, 13.46),
    _batch(20, 20_377, 14.36),
    _batch(30, 30_639, 15.19),
    _batch(50, 51_119, 18.46),
    _batch(75, 76_719, 24.02),
    _batch(100, 101_578, 28.69),
    _batch(200, 200_083, 29.87),
    _batch(500, 501_465, 31.56),
)
"""The same with a cache that is full from 50 prompts on: test 4."""
SMALL: Final = Unseen(
    "vLLM 0.19.0, Qwen3-0.6B, H100, 16 requests/s",
    MappingProxyType(
        {
            "model": "Qwen/Qwen3-0.6B",
            "gpu": "h100_sxm",
            "engine_version": "0.19",
            "gpu_memory_utilization": 0.5,
            "max_model_len": 2048,
        }
    ),
    (Point(500, _fixed(512), _fixed(128), 2.39, rate=16.0),),
)
"""The mean of three seeds, without its subject: kvcached, pull request 331, row F."""


def _oss(num_ranks: int, num_users: int, tpot_ms: float) -> Point:
    tokens = {"kind": "uniform", "low": 819, "high": 1024}
    engine = {"tensor_parallel_size": num_ranks, "max_num_seqs": num_users}
    return Point(
        *(10 * num_users, tokens, tokens, tpot_ms),
        num_users=num_users,
        engine=MappingProxyType(engine),
    )


OSS: Final = Unseen(
    "vLLM 0.15.1, gpt-oss-120b, H100, TP 8, 4 and 2",
    MappingProxyType(
        {
            "model": "openai/gpt-oss-120b",
            "gpu": "h100_sxm",
            "engine_version": "0.33",
            "gpu_memory_utilization": 0.9,
            "max_num_batched_tokens": 8192,
            "max_model_len": 10_240,
            "enable_prefix_caching": False,
        }
    ),
    (
        *(_oss(8, 4, 3.72), _oss(8, 8, 4.05), _oss(8, 16, 4.83), _oss(8, 32, 5.82)),
        *(_oss(8, 64, 7.36), _oss(4, 64, 9.89), _oss(2, 64, 15.21)),
    ),
)
"""A closed loop of 1,024 tokens in and out, a fifth fewer at least (InferenceX, issue
828; arguments by its ``gptoss_fp4_h100.sh`` of that day, which has the experts in
Marlin: prices are those of Triton's). Its release is not known here for windows; 0.33
is taken, with 0.9 of the memory, as up to 0.19."""


def _alone(prompt: int, output: int, num_requests: int, tpot_ms: float) -> Point:
    """One user that asks again at once."""
    return Point(num_requests, _fixed(prompt), _fixed(output), tpot_ms, num_users=1)


def _qwen(name: str, *points: Point) -> Unseen:
    engine = {"model": f"Qwen/{name}", "gpu": "a100_sxm", "engine_version": "0.9"}
    return Unseen(f"vLLM, {name}, A100, one user", MappingProxyType(engine), points)


QWEN_TINY: Final = _qwen(
    "Qwen3-0.6B",
    *(_alone(128, 128, 8, 4.2), _alone(128, 1024, 4, 4.2), _alone(1024, 128, 4, 4.4)),
)
"""Of June and July 2025 (tt-inference-server, issue 340). Release and form of the GPU
are not told: 0.9, the newest of those days, and SXM are taken."""
QWEN_SMALL: Final = _qwen(
    "Qwen3-1.7B",
    *(_alone(128, 128, 8, 4.6), _alone(128, 1024, 4, 4.7)),
    *(_alone(1024, 128, 4, 4.8), _alone(2048, 128, 4, 5.0)),
)
QWEN_MOE: Final = _qwen(
    "Qwen3-30B-A3B",
    *(_alone(128, 128, 8, 9.6), _alone(128, 1024, 4, 9.7), _alone(1024, 128, 4, 9.8)),
    *(_alone(4096, 128, 2, 10.3), _alone(8192, 128, 2, 10.6)),
)
QWEN_MOE_H100: Final = Unseen(
    "vLLM 0.10, Qwen3-30B-A3B, H100, 10 users",
    MappingProxyType(
        {
            "model": "Qwen/Qwen3-30B-A3B",
            "gpu": "h100_sxm",
            "engine_version": "0.10",
            "enable_prefix_caching": True,
        }
    ),
    (Point(100, _fixed(2048), _fixed(1016), 13.18, num_users=10),),
)
"""Of random tokens, with the release's default tiles (vLLM, pull request 23151, August
2025)."""
QWEN_4B: Final = Unseen(
    "vLLM, Qwen3-4B, H100, 80 users",
    MappingProxyType(
        {
            "model": "Qwen/Qwen3-4B",
            "gpu": "h100_sxm",
            "engine_version": "0.19",
            "gpu_memory_utilization": 0.85,
            "max_model_len": 8192,
        }
    ),
    (Point(1500, _fixed(512), _fixed(128), 10.17, num_users=80),),
)
"""The baseline of vLLM's pull request 38479, of its main branch on 2026-04-10; 0.19,
the newest release of that day, is taken."""


def _qps(rate: float, tpot_ms: float) -> Point:
    return Point(100, _fixed(233), _fixed(217), tpot_ms, rate=rate)


QWEN_PIECES: Final = Unseen(
    "vLLM, Qwen2.5-1.5B, A100 40 GB, 1 to 20 requests/s",
    MappingProxyType(
        {
            "model": "Qwen/Qwen2.5-1.5B-Instruct",
            "gpu": "a100_sxm_40gb",
            "engine_version": "0.9",
        }
    ),
    (_qps(1, 5.42), _qps(5, 5.69), _qps(10, 6.12), _qps(20, 6.69)),
)
"""ShareGPT, of which the mean lengths are told, in graphs in pieces: medians of vLLM's
pull request 20059, whose author's GPU its predecessor tells. With whole graphs these
were 5.02, 5.09, 5.39 and 6.14 ms."""
LLAMA_PIECES: Final = Unseen(
    "vLLM, Llama-3.1-8B, H100, one request/s",
    MappingProxyType(
        {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h100_sxm",
            "engine_version": "0.8",
        }
    ),
    (Point(50, _fixed(512), _fixed(256), 7.63, rate=1.11),),
)
"""In pieces, of April 2025 (vLLM, pull request 16072; whole graphs are 7 % shorter).
The GPU is not told: the graphs are of FlashAttention 3, which asks for Hopper."""


def _at_once(engine_version: str) -> Unseen:
    requests_per_s = {"0.10": 4.07, "0.11": 5.98}[engine_version]
    point = Point(10, _fixed(1024), _fixed(128), 10 / requests_per_s, key="duration")
    engine = {
        "model": "Qwen/Qwen3-30B-A3B-FP8",
        "gpu": "h100_sxm",
        "engine_version": engine_version,
    }
    graphs = "in pieces" if engine_version == "0.10" else "whole"
    name = f"vLLM, Qwen3-30B-A3B in FP8, H100, 10 requests at once, graphs {graphs}"
    return Unseen(name, MappingProxyType(engine), (point,))


PIECES: Final = _at_once("0.10")
WHOLE: Final = _at_once("0.11")
"""How long ten requests of random tokens took before and after whole graphs became the
default (vLLM, pull request 25444, September 2025). The model is Qwen3-Coder's of the
same sizes."""


def _tokens_per_s(num_users: int, tokens_per_s: float) -> Point:
    """Tokens of answers of a closed loop."""
    duration_s = 200 * 256 / tokens_per_s
    prompt, output = _fixed(128), _fixed(256)
    return Point(200, prompt, output, duration_s, num_users=num_users, key="duration")


OSS_H200: Final = Unseen(
    "vLLM, gpt-oss-120b in MXFP4, H200",
    MappingProxyType(
        {
            "model": "openai/gpt-oss-120b",
            "gpu": "h200_sxm",
            "engine_version": "0.33",
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": False,
        }
    ),
    (
        *(_tokens_per_s(4, 530), _tokens_per_s(8, 866)),
        *(_tokens_per_s(16, 1342), _tokens_per_s(32, 1996)),
    ),
)
"""Random tokens: the baseline of vLLM's pull request 35551, of February 2026; 0.33 as
for `OSS`."""
RUNS: Final = (
    *(ROOMY, FULL, SMALL, OSS),
    *(QWEN_TINY, QWEN_SMALL, QWEN_4B, QWEN_MOE, QWEN_MOE_H100),
    *(QWEN_PIECES, LLAMA_PIECES, PIECES, WHOLE, OSS_H200),
)


NO_NORM: Final = {"qk_norm_latency_s": 0.0}
NO_LAUNCHES: Final = {"launch_s": 0.0}
NO_PIECES: Final = {"piece_latency_s": 0.0}
WITHOUT: Final = (
    {"schedule_request_s": 0.0},
    {"moe_layer_latency_s": 0.0},
    NO_NORM,
    NO_LAUNCHES,
    NO_PIECES,
)
"""The scheduler's time, the start of the experts' kernels, the norm of queries and
keys, launches beyond and between graphs, and graphs in pieces."""


def rows() -> Iterator[str]:
    """Yield a line a run: signed errors, by default, without a term, with choices.

    The last column has experts chosen as published in place of freely, where they are.
    """
    for run in RUNS:
        costs = [NOTHING, *WITHOUT]
        if run.correlation:
            costs.append({"moe_routing_correlation": run.correlation})
        found = [run.errors(cost) for cost in costs]
        cells = [", ".join(f"{error:+.0f}" for error in errors) for errors in found]
        yield " | ".join(("", run.name, *cells, "")).strip()


if __name__ == "__main__":
    for line in rows():
        print(line, flush=True)
