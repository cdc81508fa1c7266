"""Sessions from a configuration: refused in a line, or run, shown and described."""

from __future__ import annotations

import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.config.tables import load_config, parse_config
from sim.errors import ConfigError
from sim.results.summary.rows import summary_rows
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.simulation.workload import make_workload
from tests.shared import ROOT
from tests.sim.closed_loops import chat_config
from tests.sim.config.test_config import minimal, write

if TYPE_CHECKING:
    from pathlib import Path


def changed(path: str, value: Any) -> dict[str, Any]:
    data = chat_config()
    *tables, key = path.split(".")
    table = data
    for name in tables:
        table = table.setdefault(name, {})
    if value is None:
        del table[key]
    else:
        table[key] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("workload.sessions.kind", "chats", "kind: 'chats' is not built.*'chat'"),
        ("workload.sessions.kind", None, "workload.sessions.kind: must name one of"),
        ("workload.sessions.arrivals", None, "workload.sessions.arrivals: .*needed"),
        ("workload.sessions.arrivals", 3, "arrivals: .*needed; give a table, got 3$"),
        ("workload.sessions.turn", 3, "workload.sessions.turn: 'chat' has no such key"),
        ("workload.sessions.turns", 3, "workload.sessions.turns: must be a table"),
        (
            "workload.sessions.turns",
            {"kind": "fixed"},
            "workload.sessions.turns.number: 'fixed' needs this key",
        ),
        (
            "workload.sessions.think_s",
            {"kind": "exponential", "mean_s": -1.0},
            "workload.sessions.think_s: mean_s must be between 0",
        ),
        (
            "workload.sessions.prefixes",
            {"kind": "system_prompts", "num_groups": 2, "tokens": {"kind": "normal"}},
            r"workload.sessions.prefixes.tokens.mean: 'normal' needs this key",
        ),
        ("workload.sessions.duration_s", 3.0, "workload.sessions: exactly one of"),
        ("workload.sessions.num_sessions", 0, "num_sessions must be between 1"),
        ("workload.sessions.rate_scale", 0, "rate_scale must be > 0"),
        ("workload.max_concurrent_users", 0, "workload.max_concurrent_users: .*1"),
        ("workload.slo_class", 3, "workload.slo_class: should be a name, or shares"),
        ("workload.slo_class", {1: 1.0}, r"slo_class: .*got \{1: 1.0\}"),
        ("workload.slo_class", {"a": 0.5}, "slo_class: shares must add up to 1"),
        ("workload.preset", {"name": "azure_conv_2023"}, "got preset and sessions"),
    ],
)
def test_mistakes_are_refused_with_their_key(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Simulation(parse_config(changed(path, value)))


_DOCUMENTS = {
    "kind": "documents",
    "num_documents": 2,
    "tokens": {"kind": "fixed", "tokens": 400},
    "per_prompt": {"kind": "fixed", "number": 3},
}


def test_what_only_shows_when_drawing_names_its_table() -> None:
    few = "per_prompt must be at most num_documents=2; got 3"
    long = "max_context_tokens must exceed what prompts share"
    one = {"per_prompt": {"kind": "fixed", "number": 1}}
    for documents, message in ((_DOCUMENTS, few), (_DOCUMENTS | one, long)):
        with pytest.raises(ConfigError, match=f"^workload.sessions: {message}"):
            Simulation(parse_config(changed("workload.sessions.prefixes", documents)))
    data = minimal()
    data["workload"]["synthetic"]["prefixes"] = _DOCUMENTS
    with pytest.raises(ConfigError, match=f"^workload.synthetic: {few}"):
        Simulation(parse_config(data))


def test_prefixes_of_synthetic_traffic_and_of_presets() -> None:
    prompts = {"kind": "system_prompts", "num_groups": 1, "share": 0.5}
    prompts["tokens"] = {"kind": "fixed", "tokens": 320}
    data = minimal(num_gpu_blocks_override=500)
    data["workload"]["synthetic"]["num_requests"] = 40
    plain = simulate(parse_config(data))
    data["workload"]["synthetic"]["prefixes"] = prompts
    shared = simulate(parse_config(data))
    longer = shared.requests["num_prompt_tokens"] - plain.requests["num_prompt_tokens"]
    assert set(longer) == {0, 320}
    # All but the first find the whole prompt: 20 blocks.
    first, *later = longer[longer > 0].index
    assert shared.requests["num_cached_tokens"][first] == 0
    assert set(shared.requests["num_cached_tokens"][later]) == {320}
    assert shared.summary["path"] == "fast"
    preset = {"name": "azure_conv_2023", "num_requests": 20, "prefixes": prompts}
    data["workload"] = {"preset": preset}
    data["engine"] |= {"num_gpu_blocks_override": 5000}
    assert simulate(parse_config(data)).summary["prefix_cache_hits"] >= 320
    data["workload"]["preset"]["prefixes"] = {"kind": "none"}
    assert simulate(parse_config(data)).summary["prefix_cache_hits"] == 0


def test_the_terminal_tells_of_sessions_and_service_levels() -> None:
    workload = {"slo_class": {"chat": 0.9, "batch": 0.1}, "max_concurrent_users": 4}
    summary = simulate(parse_config(chat_config(workload=workload))).summary
    assert summary["title"].endswith("chat sessions, poisson 25/s at 1 x rate, 4 users")
    rows = dict(summary_rows(summary))
    assert rows["sessions"].startswith("25 of 25 completed, ")
    assert rows["sessions"].endswith(" turns on average")
    number = summary["by_slo_class"]["chat"]["completed"]
    assert rows["class chat"].startswith(f"{number} completed; TTFT p50 ")
    json.dumps(summary, allow_nan=False)


def test_a_class_that_nobody_served_is_told_without_latencies() -> None:
    data = chat_config(workload={"slo_class": {"a": 0.5, "b": 0.5}})
    simulation = Simulation(parse_config(data))
    simulation.engine.observe(1, lambda _: simulation.stop())
    summary = simulation.run().summary
    rows = dict(summary_rows(summary))
    classes = [name for name in rows if name.startswith("class ")]
    assert all(rows[name].startswith("0 of ") for name in classes)
    assert "unsent" in rows["requests"]
    assert summary["sessions"]["num_completed"] == 0
    assert summary["sessions"]["mean_duration_s"] is None
    json.dumps(summary, allow_nan=False)


def test_a_kind_of_the_users_own_is_found_beside_the_configuration(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(
        "from workloads.draws.counts import CountDistribution\n"
        "from workloads.spec import RequestSpec\n"
        "class Pairs:\n"
        "    def __init__(self, tokens: int, pairs: CountDistribution):\n"
        "        self.tokens, self.pairs = tokens, pairs\n"
        "    def requests(self, arrivals_s, streams):\n"
        "        for i, time_s in enumerate(arrivals_s):\n"
        "            yield RequestSpec(2 * i, time_s, ((4 * i, self.tokens),), 5,\n"
        "                4 * i + 1, session_id=i)\n"
        "            text = ((4 * i + 2, self.tokens),)\n"
        "            yield RequestSpec(2 * i + 1, 0.0, text, 5, 4 * i + 3,\n"
        "                session_id=i, previous_id=2 * i, delay_s=1.0)\n"
    )
    data = chat_config()
    data["workload"]["sessions"] = {
        "kind": "own.py:Pairs",
        "tokens": 20,
        "pairs": {"kind": "fixed", "number": 1},
        "num_sessions": 6,
        "arrivals": {"kind": "constant", "rate": 1.0},
    }
    summary = simulate(load_config(write(tmp_path, data))).summary
    assert summary["sessions"]["num_turns"] == 12


@pytest.mark.parametrize("name", ["chat_sessions", "agents"])
def test_examples_run_in_small(name: str, tmp_path: Path) -> None:
    path = ROOT / f"examples/{name}.yaml"
    key = "num_sessions=12" if name == "chat_sessions" else "duration_s=100"
    out = tmp_path / "out"
    command = ["run", str(path), "--out", str(out), "--no-figures", "--quiet"]
    assert kvsim([*command, "--set", f"workload.sessions.{key}"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["completed"] == summary["num_requests"] > 12
    hits = summary["prefix_cache_hits"] / summary["prefix_cache_queries"]
    assert hits > 0.5
    # What was written runs again.
    again = yaml.safe_load((out / "config.yaml").read_text())
    assert simulate(parse_config(again)).summary["duration"] == summary["duration"]


def test_the_more_urgent_class_waits_less(tmp_path: Path) -> None:
    data = chat_config(
        workload={
            "slo_class": {"gold": 0.3, "bronze": 0.7},
            "priority": {"gold": 0, "bronze": 1},
        },
        engine={"scheduling_policy": "priority", "max_num_seqs": 4},
    )
    results = simulate(load_config(write(tmp_path, data)))
    levels = results.summary["by_slo_class"]
    gold, bronze = (levels[name]["mean_ttft_ms"] for name in ("gold", "bronze"))
    assert gold < bronze / 2
    ranks = results.requests.groupby("slo_class")["priority"].unique()
    assert {name: list(values) for name, values in ranks.items()} == {
        "gold": [0],
        "bronze": [1],
    }
    data["workload"]["priority"] = {"gold": 0, "bronze": "high"}
    with pytest.raises(ConfigError, match=r"workload.priority: should give each"):
        load_config(write(tmp_path, data))


def test_requests_of_sessions_are_held_once() -> None:
    """Put in order and sampled without copies, a text for each service level."""
    setting = {"workload.sessions.num_sessions": 150}
    config = load_config(ROOT / "examples/chat_sessions.yaml", setting)
    workload = make_workload(config.workload, config.seed)
    workload.requests()  # imports are done
    tracemalloc.start()
    requests = workload.requests()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({id(request.slo_class) for request in requests}) == 2
    assert kept < 450 * len(requests)
    assert peak < 700 * len(requests)
