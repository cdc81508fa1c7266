"""Which resource binds, on extremes where there is no doubt."""

from __future__ import annotations

from typing import Any

import pytest

from sim.results.summary.objectives import parse_objectives
from sim.studies.planning.search.binding import binding_of, worst
from sim.studies.planning.search.trial import Trial, perform

OBJECTIVES = parse_objectives({"p95_ttft_ms": 1000})


def extreme(rate: float, prompt: int, output: int, **engine: Any) -> tuple[str, str]:
    """Return what binds an engine at a rate, and the sentence."""
    run = {
        "workload": {
            "synthetic": {
                "num_requests": 400,
                "arrivals": {"kind": "poisson", "rate": rate},
                "prompt_tokens": {"kind": "fixed", "tokens": prompt},
                "output_tokens": {"kind": "fixed", "tokens": output},
            }
        },
        "engine": {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"} | engine,
    }
    seen = perform(Trial(run, OBJECTIVES), details=True)
    preempted = seen.values["preemptions_per_request"] or 0.0
    found = binding_of(seen.facts, preempted, worst(seen.margins), None)
    return found.resource, found.sentence


@pytest.mark.parametrize(
    ("resource", "words", "case"),
    [
        ("max_num_seqs", "of 4 max_num_seqs", {"max_num_seqs": 4}),
        ("kv_capacity", "cache of 400 blocks", {"num_gpu_blocks_override": 400}),
    ],
)
def test_room_binds(resource: str, words: str, case: dict[str, Any]) -> None:
    found, sentence = extreme(20.0, 200, 200, max_model_len=2000, **case)
    assert found == resource
    assert words in sentence
    assert "p95_ttft_ms fails first" in sentence


def test_long_prompts_bind_compute() -> None:
    found, sentence = extreme(8.0, 6000, 2)
    assert found == "compute"
    assert sentence.startswith("compute binds: ")


def test_long_answers_bind_memory_bandwidth() -> None:
    found, _ = extreme(1.0, 20, 800)
    assert found == "memory_bandwidth"


def test_prompts_between_decodes_bind_compute_though_the_host_is_most_of_the_time():
    """A tenth more compute raises this rate by 5.3 %, a tenth less host by 2.7 %."""
    run = {
        "workload": {
            "synthetic": {
                "num_requests": 400,
                "arrivals": {"kind": "poisson", "rate": 5.5},
                "prompt_tokens": {"kind": "fixed", "tokens": 6000},
                "output_tokens": {"kind": "fixed", "tokens": 150},
            }
        },
        "engine": {
            "model": "Qwen/Qwen3-8B",
            "gpu": "h100_sxm",
            "tensor_parallel_size": 4,
        },
    }
    seen = perform(Trial(run, parse_objectives({"p95_tpot_ms": 8.0})), details=True)
    facts, value_ms = seen.facts, seen.values["p95_tpot_ms"]
    assert facts["time_host"] == max(
        share for name, share in facts.items() if name.startswith("time_")
    )
    assert value_ms is not None
    assert 1e3 * facts["decode_step_s"] < 0.6 * value_ms
    found = binding_of(facts, 0.0, "p95_tpot_ms", value_ms)
    assert found.resource == "compute"
    assert "prompts beside decodes take" in found.sentence
    for objective in ("p95_ttft_ms", "goodput"):
        assert binding_of(facts, 0.0, objective, 1e3).resource == "host"


def test_swaps_over_a_slow_link_bind_it() -> None:
    run = {
        "workload": {
            "synthetic": {
                "num_requests": 150,
                "arrivals": {"kind": "poisson", "rate": 20.0},
                "prompt_tokens": {"kind": "fixed", "tokens": 200},
                "output_tokens": {"kind": "fixed", "tokens": 200},
            }
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h100_sxm",
            "scheduler": "v0",
            "num_gpu_blocks_override": 400,
            "max_model_len": 2000,
            "preemption_mode": "swap",
            "swap_space": 8.0,
        },
        "cost": {"kind": "roofline", "swap_call_s": 0.001},
    }
    seen = perform(Trial(run, OBJECTIVES), details=True)
    assert seen.facts["time_swap_bandwidth"] > 0.5
    found = binding_of(seen.facts, 0.0, None, None)
    assert found.resource == "swap_bandwidth"


def test_shares_of_time_add_up() -> None:
    run = {
        "workload": {"preset": {"name": "azure_conv_2023", "num_requests": 300}},
        "engine": {"model": "meta-llama/Llama-3.1-8B", "gpu": "a100_sxm"},
    }
    facts = perform(Trial(run, OBJECTIVES), details=True).facts
    times = [share for name, share in facts.items() if name.startswith("time_")]
    assert sum(times) == pytest.approx(1.0)
