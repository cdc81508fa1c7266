"""Four ways of routing, as llm-d's benchmarks compared them.

Two fleets of vLLM, groups of prompts that share a beginning. Published are the prompts,
the tokens of each cache and the routers' settings, not the release and, of the second
fleet, not the GPUs: so rates are compared with one another, never alone.
"""

from __future__ import annotations

import csv
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from tests.shared import shared
from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FOLDER: Final = "ground_truth/llmd_kvcache_routing"
PRECISE, APPROXIMATE, LOAD, RANDOM = "precise", "approximate", "load", "random"


def _weights(queue: float, kv_cache: float, prefix: float) -> dict[str, Any]:
    return {
        "kind": "llm_d",
        "queue_weight": queue,
        "kv_cache_weight": kv_cache,
        "prefix_weight": prefix,
    }


_DEFAULT_INDEX: Final = {
    "block_tokens": 16,
    "max_prefix_blocks": 256,
    "lru_capacity": 31_250,
}
"""Of the approximate index at that time: a block of 64 characters is some 16 tokens."""
_NAMES: Final = {"default": APPROXIMATE, "estimated": APPROXIMATE}
_PAUSE_S: Final = 500.0
"""Between stages: each begins when the last one is served, which takes less."""


class Groups(NamedTuple):
    """Groups of prompts that begin alike, asked for in turn, in an order drawn."""

    num_groups: int
    num_prompts: int
    """Of each group."""
    num_shared_tokens: int
    num_own_tokens: int
    num_output_tokens: int

    def specs(
        self, stages: Sequence[tuple[float, float]], *, is_poisson: bool
    ) -> Iterator[RequestSpec]:
        """Yield the requests of stages, a rate and seconds each, after another.

        Each begins so long after the one before that it finds the engines idle. The
        client states the length of its answers, and ignores stop tokens.
        """
        rng = np.random.default_rng(0)
        order = rng.permutation(self.num_groups * self.num_prompts)
        gaps_s: list[float] = []
        for rate, duration_s in stages:
            own_s = np.full(round(rate * duration_s), 1.0 / rate)
            own_s = rng.exponential(own_s) if is_poisson else own_s
            own_s[0] += _PAUSE_S
            gaps_s += own_s.tolist()
        first_own, first_output = 2 * self.num_groups, 2 * len(order) + 2_000
        for number, arrival_s in enumerate(np.cumsum(gaps_s).tolist()):
            place = int(order[number % len(order)])
            shared_text = 2 * (place // self.num_prompts)
            yield RequestSpec(
                request_id=number,
                arrival_s=arrival_s,
                prompt=(
                    (shared_text, self.num_shared_tokens),
                    (first_own + 2 * place, self.num_own_tokens),
                ),
                num_output_tokens=self.num_output_tokens,
                output_segment=2 * (first_output + number) + 1,
                ends_at_stop=False,
            )


ANY_TRAFFIC: Final = MappingProxyType(
    {
        "synthetic": {
            "num_requests": 1,
            "arrivals": {"kind": "poisson", "rate": 1.0},
            "prompt_tokens": {"kind": "fixed", "tokens": 1},
            "output_tokens": {"kind": "fixed", "tokens": 1},
        }
    }
)
"""Of a configuration whose requests are given."""


class Fleet(NamedTuple):
    """A benchmark: its engines, and its prompts."""

    number: str
    model: str
    tensor_parallel_size: int
    num_engines: int
    num_kv_tokens: int
    groups: Groups
    is_poisson: bool
    warm_up: tuple[float, float]
    """Rate and duration in seconds."""
    durations_s: Mapping[float, float]
    """Of stages, by their rate; in order, since caches and routers remember."""
    routers: Mapping[str, dict[str, Any]]

    def measured(self) -> dict[float, dict[str, float]]:
        """Return output tokens/s by rate and router.

        They were counted in text, by a tokenizer of the client's: some 914 of 1,000
        (inference-perf, pull request 83). Engines made all of them (`ignore_eos`).
        """
        found: dict[float, dict[str, float]] = {}
        with shared(f"{FOLDER}/per_qps.csv").open() as file:
            for row in csv.DictReader(file):
                if row["benchmark"] == self.number:
                    name = row["scheduling"].removesuffix("-scheduling")
                    of_rate = found.setdefault(float(row["qps_target"]), {})
                    of_rate[_NAMES.get(name, name)] = float(row["output_tok_s"])
        return found

    def simulated(self, router: str) -> dict[float, float]:
        """Return output tokens/s by rate, from the begin of a stage until its end."""
        stages = [self.warm_up, *self.durations_s.items()]
        specs = [*self.groups.specs(stages, is_poisson=self.is_poisson)]
        requests = Simulation(self._config(router), specs=specs).run().requests
        found = {}
        first = 0
        for rate, duration_s in stages:
            last = first + round(rate * duration_s)
            own = requests.iloc[first:last]
            length_s = float(own["finish_s"].max()) - specs[first].arrival_s
            found[rate] = float(own["num_output_tokens"].sum()) / length_s
            if last < len(specs):
                assert float(own["finish_s"].max()) < specs[last].arrival_s
            first = last
        return found

    def _config(self, router: str) -> Any:
        pools = [{"name": "main", "replicas": self.num_engines}]
        return parse_config(
            {
                "workload": dict(ANY_TRAFFIC),
                "engine": {
                    "model": self.model,
                    "gpu": "h100_sxm",
                    "tensor_parallel_size": self.tensor_parallel_size,
                    "num_gpu_blocks_override": self.num_kv_tokens // 16,
                    "max_model_len": 16_384,
                    "engine_version": "0.11.0",
                },
                "cost_intervals": False,
                "fleet": {"pools": pools, "router": self.routers[router]},
            }
        )


FOUR: Final = Fleet(
    *("37", "meta-llama/Llama-3.1-70B", 4, 4, 461_376),
    Groups(83, 3, 8_000, 1_000, 1_000),
    is_poisson=False,
    warm_up=(9.0, 30.0),
    durations_s={
        **{3.0: 210.0, 4.0: 180.0, 5.0: 120.0, 6.0: 120.0, 8.0: 90.0, 10.0: 70.0},
        **{12.0: 60.0, 15.0: 50.0, 20.0: 50.0},
    },
    routers={
        PRECISE: _weights(1.0, 1.0, 2.0) | {"precise": True},
        APPROXIMATE: _weights(1.0, 1.0, 2.0) | _DEFAULT_INDEX,
        LOAD: _weights(1.0, 1.0, 0.0),
        RANDOM: {"kind": "random"},
    },
)
"""Four engines of Llama-3.1-70B on four H100s each."""
EIGHT: Final = Fleet(
    *("73", "Qwen/Qwen3-32B", 2, 8, 307_328),
    Groups(150, 5, 6_000, 1_200, 1_000),
    is_poisson=True,
    warm_up=(15.001, 50.0),
    durations_s={
        **{3.0: 20.0, 10.0: 20.0, 15.0: 20.0, 20.0: 38.0, 22.0: 34.0, 25.0: 30.0},
        **{30.0: 25.0, 35.0: 21.0, 40.0: 38.0, 43.0: 36.0, 46.0: 33.0, 49.0: 30.0},
        **{52.0: 29.0, 55.0: 27.0, 57.0: 26.0, 60.0: 25.0},
    },
    routers={
        PRECISE: _weights(2.0, 2.0, 3.0) | {"precise": True},
        APPROXIMATE: _weights(1.0, 1.0, 1.0) | _DEFAULT_INDEX,
        LOAD: _weights(1.0, 1.0, 0.0),
        RANDOM: {"kind": "random"},
    },
)
"""Eight engines of Qwen3-32B, whose caches are those of two H100s each."""
