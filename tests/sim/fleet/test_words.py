"""Fleets take names as users spell them, and summaries describe each engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.cli.output.run import print_summary
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.results.fleet.summary import fleet_title
from sim.results.summary.compared import short_names
from sim.results.summary.rows import summary_rows
from sim.simulation.run import Simulation
from sim.studies.planning.spec import parse_prices
from sim.views.plots.accessor import figures_of
from sim.views.plots.run.fleets import engines_figure, pool_places
from tests.sim.config.test_config import minimal
from tests.sim.fleet.test_run import TIGHT, data_of, fleet_of

if TYPE_CHECKING:
    from pathlib import Path


def priced(gpu: str, prices: dict[str, float]) -> dict[str, Any]:
    fleet = fleet_of(2, "round_robin") | {"prices": {"per_gpu_hour": prices}}
    return data_of(TIGHT | {"gpu": gpu}, fleet, 8)


@pytest.mark.parametrize(
    ("gpu", "name"), [("H100", "h100_sxm"), ("h100_sxm", "H100"), ("H100", "H100")]
)
def test_a_price_holds_however_its_gpu_is_spelled(gpu: str, name: str) -> None:
    summary = Simulation(parse_config(priced(gpu, {name: 3.0}))).run().summary
    assert summary["cost_of_gpus"] == pytest.approx(3.0 * summary["gpu_hours"])
    plans = parse_prices({"per_gpu_hour": {name: 3.0}})
    plans.check([gpu])
    assert plans.per_hour(gpu, 2) == 6.0


def test_a_gpu_has_one_price() -> None:
    prices = {"H100": 3.0, "h100_sxm": 2.0}
    message = r"prices\.per_gpu_hour: h100_sxm has several prices, .*; keep one"
    with pytest.raises(ConfigError, match=message):
        parse_config(priced("h100_sxm", prices))
    with pytest.raises(ConfigError, match=message):
        parse_prices({"per_gpu_hour": prices})


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        (
            {"pools": [{"name": "main", "replica": 8}]},
            r"pools.0.replica: unknown key; did you mean 'replicas'\?",
        ),
        (
            fleet_of(2, "llm_d") | {"prices": 3},
            r"fleet.prices: should be .* such as \{per_gpu_hour: ...\}, got 3",
        ),
        (
            fleet_of(2, "llm_d") | {"router": 3},
            r"fleet.router: should be .* such as \{kind: ...\}, got 3",
        ),
        (
            fleet_of(2, "llm_d")
            | {"events": [{"time_s": "1h", "kind": "die", "engine": 0}]},
            "time_s: .*got '1h'; write the number alone, in the unit of the key",
        ),
    ],
)
def test_a_mistake_is_answered_by_what_was_meant(
    fleet: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(minimal() | {"fleet": fleet})


def test_the_beginning_of_a_kind_is_enough_to_name_it() -> None:
    config = parse_config(data_of(TIGHT, fleet_of(2, "sglang")))
    with pytest.raises(ConfigError, match=r"did you mean 'sglang_cache_aware'\?"):
        Simulation(config)


def test_the_title_counts_the_gpus_of_an_engine() -> None:
    config = parse_config(
        data_of({"gpu": "h100_sxm", "tensor_parallel_size": 4}, fleet_of(8, "llm_d"))
    )
    assert fleet_title(config) == "8 engines of 4 x h100_sxm behind llm_d"


@pytest.mark.parametrize("is_spread", [False, True])
def test_rounded_times_are_told_to_whoever_compares_routers(
    tmp_path: Path, *, is_spread: bool
) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 600, "output_length": 4}
    rows = [row | {"timestamp": 3000 * (i // 4), "hash_ids": [0, i]} for i in range(16)]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = {"kind": "mooncake", "path": str(path), "spread_arrivals": is_spread}
    data = data_of({}, fleet_of(2, "llm_d")) | {"workload": {"trace": trace}}
    told = [each for each in Simulation(parse_config(data)).warnings if "times" in each]
    wanted = "the trace's times are rounded: 16 requests arrive at 4 times, "
    assert [each.startswith(wanted) for each in told] == [True] * (not is_spread)
    for other in ({"fleet": None}, {"fleet": fleet_of(1, "llm_d")}):
        assert not Simulation(parse_config(data | other)).warnings


def test_pools_that_share_a_prompt_say_apart_what_they_found() -> None:
    fleet = {
        "pools": [
            {"name": "first", "replicas": 1, "role": "prefill"},
            {"name": "second", "replicas": 1, "role": "decode"},
        ],
        "router": {"kind": "round_robin"},
        "links": {"bytes_per_s": 5.0e10},
    }
    results = Simulation(parse_config(data_of({}, fleet))).run()
    (found,) = (t for n, t in summary_rows(results.summary) if n == "prefix cache")
    of_each = int(results.requests["num_prompt_tokens"].sum())
    assert f"of {of_each:,} prompt tokens hit in pool first, " in found
    assert f"of {of_each:,} prompt tokens hit in pool second" in found


def test_the_usage_of_engines_that_were_there() -> None:
    events = [{"time_s": 0.5, "kind": "die", "engine": 1}]
    fleet = fleet_of(2, "round_robin") | {"events": events}
    engine = TIGHT | {"async_scheduling": False}
    results = Simulation(parse_config(data_of(engine, fleet))).run()
    summary, steps = results.summary, results.steps
    used_s = float((steps["kv_cache_usage"] * steps["latency_s"]).sum())
    there_s = sum(summary["up_s"])
    assert there_s < 2 * summary["duration"]
    assert summary["kv_cache_usage_mean_up"] == pytest.approx(used_s / there_s)
    rows = dict(summary_rows(summary))
    assert (
        f"({summary['kv_cache_usage_mean_up']:.1%} of what was there)"
        in rows["KV cache"]
    )
    assert summary["engine_busy_share_up"] == pytest.approx(
        steps["latency_s"].sum() / there_s
    )
    for part in (*summary["engines"][1:], *summary["pools"]):
        up_s = summary["up_s"][1] if "engine" in part else there_s
        own_s = part["kv_cache_usage_mean"] * part["duration"]
        own_s *= 1 if "engine" in part else 2
        assert part["kv_cache_usage_mean_up"] == pytest.approx(own_s / up_s)
    assert "kv_cache_usage_mean_up" not in summary["engines"][0]
    whole = Simulation(parse_config(data_of(TIGHT, fleet_of(2, "round_robin")))).run()
    assert "kv_cache_usage_mean_up" not in whole.summary
    assert "engine_busy_share_up" not in whole.summary


def test_an_engine_that_was_there_for_half_of_the_time_is_not_idle() -> None:
    """One of them dies midway, another one never starts: each rate is what counts."""
    fleet = fleet_of(2, "least_requests") | {
        "autoscaler": {
            "targets": {"requests_in_flight": 1000},
            "min_replicas": 2,
            "max_replicas": 6,
        }
    }
    results = Simulation(parse_config(data_of(TIGHT, fleet))).run()
    told = results.summary
    assert [up_s > 0.0 for up_s in told["up_s"]] == [True] * 2 + [False] * 4
    assert all(1.0 <= share < 1.3 for share in told["imbalance"].values())
    rows = dict(summary_rows(told))
    assert rows["engines"].startswith("2 of 6 at most behind least_requests, with ")
    dies = [{"time_s": 1.0, "kind": "die", "engine": 1}]
    fleet = fleet_of(2, "least_requests") | {"events": dies}
    told = Simulation(parse_config(data_of(TIGHT, fleet, 120))).run().summary
    of = [each["num_requests"] for each in told["engines"]]
    rates = np.array(of) / told["up_s"]
    mean = sum(of) / sum(told["up_s"])
    assert told["imbalance"]["requests"] == pytest.approx(max(rates) / mean)
    assert max(of) / (sum(of) / 2) > told["imbalance"]["requests"]


def test_curves_are_of_engines_that_were_there() -> None:
    fleet = fleet_of(2, "least_requests") | {
        "autoscaler": {
            "targets": {"requests_in_flight": 1000},
            "min_replicas": 2,
            "max_replicas": 20,
        }
    }
    results = Simulation(parse_config(data_of(TIGHT, fleet))).run()
    figures, found = figures_of(results)
    assert [run.label for run in found] == ["engine 0", "engine 1"]
    title = figures["kv_cache_usage"](found).texts
    assert any("2 of 20 engines are drawn" in each.get_text() for each in title)
    load = engines_figure(results).axes[1]
    patches: Any = load.patches
    assert sum(bar.get_width() for bar in patches) == pytest.approx(2)


def mixed() -> Any:
    pools = [
        {"name": "main", "replicas": 1},
        {"name": "big", "replicas": 1, "engine": {"num_gpu_blocks_override": 90}},
    ]
    fleet = fleet_of(1, "round_robin") | {"pools": pools}
    return Simulation(parse_config(data_of(TIGHT, fleet))).run()


def test_pools_of_several_sizes_are_both_told() -> None:
    rows = dict(summary_rows(mixed().summary))
    assert rows["KV cache"].startswith(
        "70 blocks of 16 tokens and 90 blocks of 16 tokens; "
    )
    assert rows["pool big"].startswith("1 engine of 90 blocks of 16 tokens, ")


def test_an_interrupted_run_counts_what_it_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = mixed().summary | {"unsent": 40}
    print_summary(summary, tmp_path, 0.5)
    assert "0.50 s (40 requests/s)" in capsys.readouterr().out  # 20 of 60


def test_a_difference_is_named_so_that_one_knows_of_what() -> None:
    keys = ["fleet.router.kind", "fleet.pools.0.replicas", "fleet.pools.1.replicas"]
    assert short_names(keys) == {
        "fleet.router.kind": "router.kind",
        "fleet.pools.0.replicas": "pools.0.replicas",
        "fleet.pools.1.replicas": "pools.1.replicas",
    }


def test_a_flag_is_told_to_be_true_or_false() -> None:
    trace = {"kind": "mooncake", "path": "t.jsonl", "spread_arrivals": "maybe"}
    config = parse_config(
        {
            "workload": {"trace": trace},
            "engine": {"model": "meta-llama/Llama-3.1-8B", "gpu": "h100_sxm"},
        }
    )
    with pytest.raises(ConfigError, match="got 'maybe'; write true or false"):
        Simulation(config)


def test_little_traffic_is_told_in_digits_that_differ() -> None:
    data = data_of(TIGHT, fleet_of(2, "round_robin"), 8)
    summary = dict(Simulation(parse_config(data)).run().summary)
    summary |= {"request_throughput": 0.0144, "request_rate": 0.0146}
    summary |= {"output_throughput": 6.088, "gpu_hours": 0.1119}
    told = dict(summary_rows(summary))
    assert told["throughput"].startswith("0.0144 requests/s of 0.0146 offered, 6.1 out")
    assert told["GPU hours"].startswith("0.1119 h")


def test_axes_of_engines_name_their_pools() -> None:
    one = [{"pool": "main", "engine": place} for place in range(3)]
    assert pool_places(one) == "engine"
    two = [*one, {"pool": "old", "engine": 3}]
    assert pool_places(two) == "engine (main 0 to 2, old 3)"
    many = [{"pool": str(place), "engine": place} for place in range(9)]
    assert pool_places(many) == "engine"


def test_no_mean_is_told_of_no_request() -> None:
    fleet = {"pools": [{"name": name, "replicas": 1} for name in ("one", "other")]}
    run = Simulation(parse_config(data_of(TIGHT, fleet, 1))).run()
    told = dict(summary_rows(run.summary))
    assert "1 completed; mean TTFT" in told["pool one"]
    assert "0 completed, KV cache usage" in told["pool other"]
