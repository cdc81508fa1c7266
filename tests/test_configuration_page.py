"""`docs/configuration.md` says what the code does: keys, defaults, examples, terms."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from cache.v1.policies import CACHE_POLICIES
from sim.cli.main import run as kvsim
from sim.config.autoscaling import AutoscalerTable, BehaviourTable, PolicyTable
from sim.config.fleet import EventTable, FleetTable, PoolTable, PricesTable
from sim.config.front_end import FrontEndConfig
from sim.config.offloading import (
    ConnectorExtraTable,
    KVTransferTable,
    OffloadingLinkTable,
)
from sim.config.pairs import ConnectorTable, LinksTable, ProxyTable
from sim.config.plug import ROLES
from sim.config.speculative import SpeculativeTable
from sim.config.tables import (
    EngineConfig,
    RunConfig,
    load_config,
    parse_config,
)
from sim.config.workload import (
    SOURCES,
    ClientConfig,
    PresetConfig,
    ResampleConfig,
    SplitConfig,
    SyntheticConfig,
    WorkloadConfig,
)
from sim.costs import COST_MODELS
from sim.costs.roofline.parameters import RooflineParameters
from sim.errors import ConfigError
from sim.fleet.deciders import DECIDERS
from sim.fleet.routers import ROUTERS
from sim.hardware.capacity import constants, estimate_capacity
from sim.hardware.gpus import GpuSpec, load_gpu
from sim.hardware.interconnects import load_interconnect
from sim.results.schema import PREEMPTIONS, STEPS
from sim.scheduler.admission import ADMISSION_RULES
from sim.scheduler.victims import VICTIMS
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.simulation.workload import _SESSION_KEYS, TRACE_KEYS
from tests.shared import ROOT
from tests.sim.config.test_config import minimal, write
from workloads.acceptance import ACCEPTANCE
from workloads.plain import parse_yaml
from workloads.preset import preset_names
from workloads.sessions import SESSIONS, SessionWorkload
from workloads.traces import TRACE_READERS
from workloads.workload import TraceWorkload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pydantic import BaseModel

    from sim.results.run import Results

PATH = ROOT / "docs/configuration.md"
PAGE = PATH.read_text(encoding="utf-8")
FLAT = " ".join(PAGE.split())

Keys = dict[tuple[str, str, str], Any]
"""Default, or `REQUIRED`, of each (section, kind, key)."""

REQUIRED = "required, whatever the type"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


EXAMPLES = [text for text in blocks("yaml") if "workload:" in text]
DATASHEET, LINK = (text for text in blocks("yaml") if "workload:" not in text)
(PLUGINS,) = blocks("python")
(LOOP,) = blocks("sh")


# -- tables ---------------------------------------------------------------------


def rows(page: str) -> Iterator[tuple[str, tuple[str, ...], list[str]]]:
    """Yield the section, header and cells of every row of every table."""
    section, header = "run", None
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip("`")
        if not line.startswith("|"):
            header = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if header is None:
            header = tuple(cells)
        elif set(line) != set("|-"):
            assert len(cells) == len(header), line
            yield section, header, cells


def documented(page: str) -> Keys:
    found: Keys = {}

    def note(section: str, kinds: str, keys: str, default: str) -> None:
        value = re.fullmatch(r"`(.*)`.*", default)
        assert value or default == "required", default
        for kind in re.findall(r"`(.*?)`", kinds) or [kinds]:
            for key in re.findall(r"`(.*?)`", keys):
                assert (section, kind, key) not in found, f"{kind}.{key} stands twice"
                found[section, kind, key] = (
                    yaml.safe_load(value[1]) if value else REQUIRED
                )

    for section, header, cells in rows(page):
        if header[0] == "roofline key":
            note(section, "roofline", cells[0], cells[1])
            note(section, "roofline", cells[2], cells[3])
            continue
        assert header[-1] == "meaning", header
        assert cells[-1].endswith("."), cells
        kinds = "" if header[0] == "key" else cells[0]
        note(section, kinds, *(cells[header.index(n)] for n in ("key", "default")))
    return found


def arguments(cls: type, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {
        name: REQUIRED if p.default is p.empty else p.default
        for name, p in inspect.signature(cls).parameters.items()
        if name not in leave_out
    }


def fields(model: type[BaseModel]) -> dict[str, Any]:
    return {
        name: REQUIRED
        if field.is_required()
        else field.get_default(call_default_factory=True)
        for name, field in model.model_fields.items()
    }


GIVEN = frozenset({"graph_rule"}).union(
    f.name for f in dataclasses.fields(RooflineParameters) if not f.metadata
)
"""What the engine gives to a cost model."""


TOLD = frozenset(
    {
        *("env", "loads", "num_engines", "stream"),
        *("num_gpu_blocks", "block_size", "session_of", "cached_blocks", "turn_of"),
    }
)
"""What the run gives to a router."""


def built() -> Keys:
    trace, sessions = arguments(TraceWorkload), arguments(SessionWorkload)
    sources: list[tuple[str, str, Mapping[str, Any]]] = [
        ("run", "", fields(RunConfig)),
        ("front_end", "", fields(FrontEndConfig)),
        ("fleet", "fleet", fields(FleetTable)),
        ("fleet", "pools", fields(PoolTable)),
        ("fleet", "events", fields(EventTable)),
        ("fleet", "proxy", fields(ProxyTable)),
        ("fleet", "connector", fields(ConnectorTable)),
        ("fleet", "links", fields(LinksTable)),
        ("fleet", "autoscaler", fields(AutoscalerTable)),
        ("fleet", "scale_up", fields(BehaviourTable)),
        ("fleet", "scale_down", fields(BehaviourTable)),
        ("fleet", "policies", fields(PolicyTable)),
        ("fleet", "prices", fields(PricesTable)),
        ("engine", "", fields(EngineConfig)),
        (
            "workload",
            "",
            {k: v for k, v in fields(WorkloadConfig).items() if k not in SOURCES},
        ),
        ("workload", "synthetic", fields(SyntheticConfig)),
        ("workload", "preset", fields(PresetConfig)),
        ("workload", "resample", fields(ResampleConfig)),
        ("workload", "split", fields(SplitConfig)),
        ("workload", "client", fields(ClientConfig)),
        ("engine", "speculative_config", fields(SpeculativeTable)),
        ("engine", "kv_offloading_link", fields(OffloadingLinkTable)),
        ("engine", "kv_transfer_config", fields(KVTransferTable)),
        ("engine", "kv_connector_extra_config", fields(ConnectorExtraTable)),
        ("workload", "trace", {key: trace[key] for key in TRACE_KEYS}),
        ("workload", "sessions", {key: sessions[key] for key in _SESSION_KEYS}),
    ]
    sources += [
        ("workload.acceptance", k, arguments(cls)) for k, cls in ACCEPTANCE.items()
    ]
    of_traffic = [each for each in ROLES.values() if each is not ACCEPTANCE]
    for registry in (*of_traffic, SESSIONS):
        sources += [("workload", k, arguments(cls)) for k, cls in registry.items()]
    sources += [("cost", k, arguments(cls, GIVEN)) for k, cls in COST_MODELS.items()]
    sources += [
        ("fleet", k, arguments(cls, TOLD)) for k, cls in {**ROUTERS, **DECIDERS}.items()
    ]
    for policies in (ADMISSION_RULES, VICTIMS):
        sources += [("engine", k, arguments(cls)) for k, cls in policies.items()]
    given = frozenset({"num_blocks", "future"})
    sources += [("engine", k, arguments(c, given)) for k, c in CACHE_POLICIES.items()]
    return {(s, k, key): v for s, k, keys in sources for key, v in keys.items()}


def differences(page: str) -> list[str]:
    said, there = documented(page), built()
    wrong = [f"{'.'.join(key)}: not on the page" for key in there.keys() - said.keys()]
    wrong += [f"{'.'.join(key)}: invented" for key in said.keys() - there.keys()]
    for key in said.keys() & there.keys():
        # 1, 1.0 and True are equal to Python, but not to the configuration.
        if (type(said[key]), said[key]) != (type(there[key]), there[key]):
            wrong.append(f"{'.'.join(key)}: {said[key]!r}, in the code {there[key]!r}")
    return sorted(wrong)


def test_keys_and_defaults_are_those_of_the_code() -> None:
    assert differences(PAGE) == []
    assert len(built()) > 80


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        (r"\| `block_size` .*\n", "", "engine..block_size: not on the page"),
        ("`swap_space`", "`swap_spice`", "engine..swap_spice: invented"),
        (
            r"\| `16` \| Tokens",
            "| `32` | Tokens",
            "engine..block_size: 32, in the code 16",
        ),
        (r"\| `4\.0` \|", "| `4` |", "engine..swap_space: 4, in the code 4.0"),
        ("`burstiness` (.*)`1.0`", r"`burstiness` \1required", "workload.gamma.burst"),
        ("`low`, `high`", "`low`", "workload.uniform.high: not on the page"),
        ("`low`, `high`", "`low`, `high`, `mid`", "workload.uniform.mid: invented"),
        ("`0.45`", "`0.55`", "cost.roofline.swap_kernel_efficiency: 0.55"),
        (r"`step_s` \| number", "`step_ms` | number", "cost.constant.step_ms: inv"),
        (r"\| `seed` .*\n", "", "run..seed: not on the page"),
        (r"\| `best_of` .*\n", "", "workload..best_of: not on the page"),
        (r"\| `0\.35` \|", "| `0.5` |", "workload..beam_switch_share: 0.5, in the"),
        (r"\| `max_paddings` ", "| `max_padding` ", "engine..max_padding: invented"),
        (
            r"`synthetic`, `preset` \| `num",
            "`synthetic` | `num",
            "workload.preset.num_requests: not",
        ),
    ],
)
def test_a_page_that_differs_is_found_out(old: str, new: str, difference: str) -> None:
    changed = re.sub(old, new, PAGE, count=1)
    assert changed != PAGE
    assert any(line.startswith(difference) for line in differences(changed))


def test_names_in_the_text_are_those_of_the_code() -> None:
    policies = (*VICTIMS, *ADMISSION_RULES)
    fields_and_kinds = (*WorkloadConfig.model_fields, *preset_names(), *TRACE_READERS)
    for name in (*fields_and_kinds, *policies):
        assert f"`{name}`" in PAGE, name
    sentence = re.search(r"A cost model that names (.*?) is given", FLAT)
    assert sentence
    assert set(re.findall(r"`(\w+)`", sentence[1])) == GIVEN
    for batch in (constants.WIDE_BATCH, constants.DEFAULT_BATCH):
        assert "{:,} and {:,}".format(*batch) in FLAT
    assert f"GPUs of {constants.WIDE_MEMORY_GIB} GiB or more but the A100" in FLAT


def test_the_page_is_narrow_and_its_links_lead_somewhere() -> None:
    assert max(map(len, PAGE.splitlines())) <= 100
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert links
    for link in links:
        assert (PATH.parent / link).exists(), link


# -- examples -------------------------------------------------------------------


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the classes of the page and a trace for their reader."""
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    name = re.match(r"# (\w+\.py)\n", PLUGINS)
    assert name
    (tmp_path / name[1]).write_text(PLUGINS)
    (tmp_path / "my_trace.txt").write_text("0.0 30 4\n0.5 70 3\n0.5 20 2\n")
    return tmp_path


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_configuration_on_the_page_runs(text: str, plugins: Path) -> None:
    parse_config(parse_yaml(text, "the page"))
    path = plugins / "run.yaml"
    path.write_text(text)
    if "sessions" in yaml.safe_load(text)["workload"]:
        config = load_config(path, ["workload.sessions.num_sessions=4"])
        summary = simulate(config).summary
        assert summary["sessions"]["num_completed"] == 4
        assert summary["completed"] == summary["num_requests"] > 4
    else:
        config = load_config(path, ["workload.synthetic.num_requests=12"])
        assert simulate(config).summary["completed"] == 12


def own_parts() -> dict[str, dict[str, Any]]:
    """Return the tables that name classes of the page, by class."""
    (text,) = (text for text in EXAMPLES if "my_parts.py" in text)
    trace = re.search(r"# or trace: ({.*})", text)
    evictor = re.search(r"# evictor: ({.*})", text)
    assert trace
    assert evictor
    data = yaml.safe_load(text)
    synthetic = data["workload"]["synthetic"]
    return {
        table["kind"].rpartition(":")[2]: table
        for table in (
            data["cost"],
            data["engine"]["scheduler"],
            data["engine"]["evictor"],
            synthetic["arrivals"],
            synthetic["prompt_tokens"],
            yaml.safe_load(trace[1]),
            yaml.safe_load(evictor[1]),
        )
    }


def own_run(plugins: Path, changes: dict[str, Any]) -> Results:
    """Simulate a small configuration with some of its tables replaced."""
    data = minimal(num_gpu_blocks_override=500)
    data["workload"]["synthetic"]["num_requests"] = 3
    for dotted, value in changes.items():
        *tables, key = dotted.split(".")
        table = data
        for name in tables:
            table = table[name]
        table[key] = value
    results = Simulation(load_config(write(plugins, data))).run(check_every=1)
    assert results.summary["completed"] == results.summary["num_requests"] > 0
    return results


def test_every_class_on_the_page_is_shown_in_use() -> None:
    assert set(own_parts()) == set(re.findall(r"^class (\w+)", PLUGINS, re.MULTILINE))


def test_the_cost_model_on_the_page(plugins: Path) -> None:
    run = own_run(plugins, {"cost": own_parts()["PerToken"] | {"token_s": 0.5}})
    first = run.steps.iloc[0]
    assert first["latency_s"] == pytest.approx(0.01 + 0.5 * first["num_batched_tokens"])
    assert run.summary["cost"]["token_s"] == 0.5


def test_the_scheduler_on_the_page(plugins: Path) -> None:
    part = own_parts()["ShortestFirst"]
    (plugins / "my_trace.txt").write_text(
        "0 50 4\n0.001 90 4\n0.002 30 4\n0.003 60 4\n"
    )
    order = {}
    for patience_s in (part["patience_s"], 0.001):
        changes = {
            "workload": {"trace": own_parts()["Lines"]},
            "engine.max_num_seqs": 1,
            "engine.scheduler": part | {"patience_s": patience_s},
        }
        by_time = own_run(plugins, changes).requests.sort_values("first_scheduled_s")
        order[patience_s] = by_time["num_prompt_tokens"].tolist()
    assert order[2.0] == [50, 30, 60, 90]
    assert order[0.001] == [50, 90, 30, 60]  # all are late, hence in order


@pytest.mark.parametrize(
    ("scheduler", "kind", "key", "kept"),
    [("v1", "KeepStarts", "keep_blocks", 2), ("v0", "MostRecent", "keep_tokens", 32)],
)
def test_the_evictors_on_the_page(
    plugins: Path, scheduler: str, kind: str, key: str, kept: int
) -> None:
    # Six prompts of four blocks in turn: more than the cache holds, so that the least
    # recently used block is always the one that is needed next.
    lines = [
        {
            "timestamp": 1000 * i,
            "input_length": 64,
            "output_length": 2,
            "hash_ids": [4 * (i % 6) + depth for depth in range(4)],
        }
        for i in range(30)
    ]
    trace = plugins / "turns.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    table = {"kind": "mooncake", "path": "turns.jsonl", "block_tokens": 16}

    def num_cached_tokens(evictor: object) -> int:
        changes = {
            "workload": {"trace": table},
            "engine.scheduler": scheduler,
            "engine.enable_prefix_caching": True,
            "engine.num_gpu_blocks_override": 21,
            "engine.max_model_len": 128,
            "engine.evictor": evictor,
        }
        return int(own_run(plugins, changes).requests["num_cached_tokens"].sum())

    part = own_parts()[kind]
    least_recent = num_cached_tokens("lru")
    assert num_cached_tokens(None) == least_recent
    bare = num_cached_tokens(f"my_parts.py:{kind}")
    assert bare == num_cached_tokens(part | {key: 0})
    assert bare != num_cached_tokens(part | {key: kept}) > least_recent


def test_the_arrival_process_on_the_page(plugins: Path) -> None:
    table = own_parts()["Ramp"] | {"growth": 5.0}
    where = "workload.synthetic.arrivals"
    count = {"workload.synthetic.num_requests": 40}
    gaps_s = own_run(plugins, {where: table} | count).requests["arrival_s"].diff()[1:]
    assert gaps_s[:10].sum() > gaps_s[-10:].sum() > 0


def test_the_length_distribution_on_the_page(plugins: Path) -> None:
    table = own_parts()["Exponential"] | {"mean": 40.0}
    where = "workload.synthetic.prompt_tokens"
    count = {"workload.synthetic.num_requests": 500}
    lengths = own_run(plugins, {where: table} | count).requests["num_prompt_tokens"]
    assert lengths.min() >= 1
    assert lengths.mean() == pytest.approx(40, rel=0.15)


def test_the_trace_reader_on_the_page(plugins: Path) -> None:
    table = own_parts()["Lines"] | {"rate_scale": 2.0}
    requests = own_run(plugins, {"workload": {"trace": table}}).requests
    assert requests["arrival_s"].tolist() == [0.0, 0.25, 0.25]
    assert requests["num_prompt_tokens"].tolist() == [30, 70, 20]
    assert requests["num_output_tokens"].tolist() == [4, 3, 2]


def test_the_datasheet_on_the_page(tmp_path: Path) -> None:
    name = re.match(r"# (\w+\.yaml)\n", DATASHEET)
    assert name
    path = tmp_path / name[1]
    path.write_text(DATASHEET)
    whole = load_gpu(path)
    said = yaml.safe_load(DATASHEET)
    assert list(said)[-7:] == [
        *("name", "source", "family", "fp4_flops_per_s", "consumer", "is_desktop_card"),
        "num_sms",
    ]
    told = {field.name for field in dataclasses.fields(GpuSpec)} - {"is_judged"}
    assert set(said) == told
    needed = {key: said[key] for key in list(said)[:-7]}
    path.write_text(yaml.safe_dump(needed))
    assert load_gpu(path) == whole
    for key in needed:
        path.write_text(yaml.safe_dump({k: v for k, v in needed.items() if k != key}))
        with pytest.raises(ConfigError, match=key):
            load_gpu(path)


def test_the_link_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "my_link.yaml"
    path.write_text(LINK)
    nvlink4 = load_interconnect("nvlink4")
    as_read = dataclasses.replace(nvlink4, name="my_link", source="user")
    assert load_interconnect(str(path)) == as_read


def overrides(text: str) -> list[str]:
    words = shlex.split(text)
    return [value for word, value in pairwise(words) if word == "--set"]


def test_overrides_in_the_text_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(EXAMPLES[0])
    spans = [s for s in re.findall(r"`(--set [^`]*)`", FLAT) if "key.path" not in s]
    config = load_config(path, overrides(" ".join(spans).replace("seed=N", "seed=7")))
    assert config.seed == 7
    assert config.engine.max_num_seqs == 64
    assert config.cost == {"kind": "constant", "step_s": 0.02}


def test_the_loop_over_rates_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    command = re.search(r"kvsim (.*?) \| grep -E '(.*?)'", LOOP, re.DOTALL)
    rates = re.search(r"for rate in (.*);", LOOP)
    assert command
    assert rates
    out = tmp_path / "rate"
    line = command[1].replace("\\\n", " ").replace("results/rate_$rate", str(out))
    line = line.replace("$rate", rates[1].split()[-1])
    shorter = ["--set", "workload.preset.duration_s=20"]
    assert kvsim([*shlex.split(line), *shorter]) == 0
    printed = re.findall(rf"^(?:{command[2]})", capsys.readouterr().out, re.MULTILINE)
    assert set(printed) == set(command[2].split("|"))
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert config["workload"]["preset"]["rate_scale"] == 1.2


# -- what is said of keys and terms ---------------------------------------------


def meanings() -> dict[str, str]:
    return {
        cells[0].strip("`"): cells[-1]
        for section, header, cells in rows(PAGE)
        if section == "engine" and header[0] == "key"
    }


def test_keys_with_one_value_are_those_that_the_page_names() -> None:
    said = {k for k, t in meanings().items() if re.search(r"only .* built\.$", t)}
    assert said == set()
    with pytest.raises(ConfigError, match="pipelines are built for v1 only"):
        parse_config(minimal(scheduler="v0", pipeline_parallel_size=2))


def test_batch_defaults_are_those_of_the_page() -> None:
    for gpu, batch in (
        ("h200_sxm", constants.WIDE_BATCH),
        ("a100_sxm", constants.DEFAULT_BATCH),
        ("l40s", constants.DEFAULT_BATCH),
    ):
        capacity = estimate_capacity("meta-llama/Llama-3.1-8B", gpu)
        assert (capacity.max_num_batched_tokens, capacity.max_num_seqs) == batch


def test_the_admission_check_does_what_the_page_says() -> None:
    def summary(**engine: Any) -> dict[str, Any]:
        data = minimal(num_gpu_blocks_override=11, **engine)
        lengths = {"kind": "uniform", "low": 10, "high": 300}
        data["workload"]["synthetic"] |= {"prompt_tokens": lengths, "num_requests": 20}
        return simulate(parse_config(data)).summary

    on = summary(max_model_len=1000)
    off = summary(max_model_len=1000, admission_check=False)
    assert on["max_model_len"] == 160
    assert on["rejected"] > 0
    assert on["completed"] + on["rejected"] == 20
    assert any("max_model_len is 160" in line for line in on["warnings"])
    assert not on["stalled"]
    assert off["stalled"]
    assert off["completed"] < 20
    # Beyond a max_model_len that the cache does hold, outputs end with the prompt.
    beyond = summary(admission_check=False)
    assert (beyond["max_model_len"], beyond["stalled"]) == (160, False)
    assert beyond["completed"] == 20
    assert beyond["length_capped"] == on["rejected"]
    with pytest.raises(ValueError, match="max_model_len must fit"):
        simulate(parse_config(minimal(kv_cache_memory_bytes=2**25, max_model_len=1000)))


@pytest.mark.parametrize("caching", [False, True])
def test_terms_mean_what_the_page_says(caching: bool) -> None:
    data = minimal(num_gpu_blocks_override=40, enable_prefix_caching=caching)
    data["goodput"] = {"ttft_ms": 1000.0}
    data["workload"]["synthetic"] |= {
        "num_requests": 40,
        "prompt_tokens": {"kind": "uniform", "low": 40, "high": 120},
        "output_tokens": {"kind": "fixed", "tokens": 60},
    }
    results = simulate(parse_config(data))
    summary = results.summary
    lost = results.preemptions["num_tokens_lost"].sum()
    assert lost > 0
    if caching:
        assert summary["recomputed_tokens"] < lost
        assert summary["prefix_cache_preempted_hits"] > 0
    else:
        assert summary["recomputed_tokens"] == lost
    queues = summary["num_running_mean"] + summary["num_waiting_mean"]
    assert queues < summary["num_in_system_mean"]
    assert summary["num_in_system_mean"] == pytest.approx(
        summary["mean_e2el_ms"] / 1e3 * summary["request_throughput"]
    )
    last_s = results.requests["arrival_s"].max()
    assert summary["request_rate"] == pytest.approx(40 / last_s)
    assert (summary["path"], summary["profile"]) == ("fast", None)
    assert summary["extrapolated_share"] == 0
    for part in re.split(r"^- ", PAGE.partition("## Terms")[2], flags=re.MULTILINE)[1:]:
        for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", part.partition("\n\n")[0]):
            known = {*summary, *summary["capacity"], *PREEMPTIONS, *STEPS, "max_tokens"}
            known |= {*RunConfig.model_fields}
            assert name in known, name


def test_requests_cut_short_are_length_capped() -> None:
    summary = simulate(parse_config(minimal(max_model_len=22))).summary
    assert summary["length_capped"] == summary["completed"] == 5
