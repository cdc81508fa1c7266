"""Configurations: complete and typed, or refused in a line that names the key."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.config.files import override
from sim.config.idle_keys import idle_key_warnings
from sim.config.tables import RunConfig, load_config, parse_config
from sim.errors import ConfigError
from sim.scheduler.generations import OURS
from sim.simulation.run import Simulation
from sim.simulation.simulate import simulate
from sim.simulation.workload import make_workload
from tests.shared import ROOT
from workloads.plain import parse_yaml

if TYPE_CHECKING:
    from pathlib import Path


def minimal(**engine: Any) -> dict[str, Any]:
    return {
        "workload": {
            "synthetic": {
                "num_requests": 5,
                "arrivals": {"kind": "poisson", "rate": 8.0},
                "prompt_tokens": {"kind": "fixed", "tokens": 20},
                "output_tokens": {"kind": "fixed", "tokens": 3},
            }
        },
        "engine": {"model": "meta-llama/Llama-3.1-8B", "gpu": "h200_sxm"} | engine,
        "cost": {"kind": "constant", "step_s": 0.01},
    }


def changed(path: str, value: Any) -> dict[str, Any]:
    data = minimal()
    *tables, key = path.split(".")
    table = data
    for name in tables:
        table = table.setdefault(name, {})
    table[key] = value
    return data


def write(directory: Path, data: dict[str, Any]) -> Path:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "engine.block_size",
            0,
            "engine.block_size: .*equal to 1, got 0; its default is 16",
        ),
        ("engine.block_size", True, "engine.block_size: .*valid integer, got True"),
        ("engine.block_size", "16", "engine.block_size: .*valid integer, got '16'"),
        ("engine.max_num_seqs", "1e3", "got '1e3'; write 1000$"),
        ("engine.max_model_len", "8,192", "got '8,192'; write 8192$"),
        ("engine.max_num_seqs", "1,5", "got '1,5'; write it without quotes"),
        ("engine.gpu_memory_utilization", "0,9", "write 0.9, with a point$"),
        ("engine.kv_offloading_size", "1TB", "'1TB'; write the number alone, in GiB$"),
        ("engine.blok_size", 16, "unknown key; did you mean 'block_size'"),
        ("engin", {}, "engin: unknown key; did you mean 'engine'"),
        ("engine.kind", "sglang", "unknown key; did you mean 'engine.scheduler'"),
        ("engine.backend", "vllm", "unknown key; did you mean 'engine.scheduler'"),
        (
            "engine.rope_scaling",
            True,
            r"^engine.rope_scaling: unknown key; docs/configuration.md lists the "
            r"\d\d that engine has; take one of them, or leave it out$",
        ),
        ("engine.trust_remote_code", True, r"^engine.trust_remote_code: nothing that "),
        ("engine.enable_lora", True, r"^engine.enable_lora: is not simulated; leave "),
        (
            "workload.kind",
            "poisson",
            r"workload.kind: unknown key \(there are: trace, ",
        ),
        ("kind", "v1", r"kind: unknown key \(there are: workload, engine, "),
        ("engine.gpu_memory_utilization", math.nan, "finite number"),
        ("engine.gpu_memory_utilization", 1.2, "less than or equal to 1, got 1.2"),
        ("engine.pipeline_parallel_size", 0, "engine.pipeline_parallel_size: .*got 0"),
        ("engine.kv_transfer_config", {}, "kv_connector: must be named"),
        (
            "engine.engine_version",
            "0.34",
            r"engine.engine_version: the v1 .* 0.8 to 0.33, got '0.34'; .* for 0.33$",
        ),
        ("engine.engine_version", "0.7.3", "got '0.7.3'; .* or set scheduler to v0"),
        ("engine.engine_version", "0.5.10", "or set scheduler to sglang"),
        ("engine.engine_version", "newest", "covers 0.8 to 0.33, got 'newest'"),
        ("engine.engine_version", True, "engine_version: .*valid string, got True"),
        ("engine.preemption_mode", "swap", "by recomputation only.*got 'swap'"),
        (
            "engine.max_paddings",
            5,
            r"engine.max_paddings: the v1 .* \(v0_2 has it\); remove it, got 5",
        ),
        ("workload.best_of", "two", "workload.best_of: .* or shares.*, got 'two'$"),
        ("workload.best_of", True, "workload.best_of: .* or shares.*, got True$"),
        ("workload.best_of", 1.5, "workload.best_of: .* or shares.*, got 1.5$"),
        ("workload.priority", {"1": 1.0}, r"workload.priority: .*got \{'1': 1.0\}$"),
        ("workload.beam_width", {2: "x"}, r"workload.beam_width: .*got \{2: 'x'\}$"),
        ("workload.beam_switch_share", 1.5, "less than or equal to 1, got 1.5"),
        ("workload.max_tokens", 0, "workload.max_tokens: .*default is null"),
        ("workload.preset", {"name": "x"}, "exactly one of trace, synthetic,"),
        ("seed", -1, "seed: .*equal to 0, got -1; its default is 0"),
        ("workload.synthetic.rate_scale", 0, "greater than 0, got 0"),
    ],
)
def test_wrong_values_are_refused_with_key_rule_and_value(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(changed(path, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheduler", "key", "value", "message"),
    [
        ("cacheflow", "enable_prefix_caching", True, "cacheflow .* no prefix caching"),
        ("v0_2", "enable_prefix_caching", True, "enable_prefix_caching: the v0_2 "),
        ("cacheflow", "sliding_window", 64, r"\(v0_2, v0 and v1 have it\); remove"),
        ("v0_2", "scheduling_policy", "priority", r"\(v0 and v1 have it\); remove it"),
        (
            "v0",
            "max_num_active_seqs",
            3,
            r"engine.max_num_active_seqs: .*\(v1 has it\)",
        ),
        ("v0", "engine_version", "0.33", "the v0 generation covers 0.7, got '0.33'"),
        ("v0_2", "engine_version", "0.3.0", "covers 0.2, got '0.3.0'; .* for 0.2.7$"),
        ("cacheflow", "engine_version", "0.2.7", "covers 0.0 to 0.1.1, got '0.2.7'"),
    ],
)
@pytest.mark.parametrize("as_table", [False, True])
def test_what_a_generation_lacks_is_refused(
    scheduler: str, key: str, value: Any, message: str, *, as_table: bool
) -> None:
    kind = {"kind": scheduler} if as_table else scheduler
    parse_config(minimal(scheduler=kind))
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(minimal(scheduler=kind, **{key: value}))
    assert str(caught.value).startswith(f"engine.{key}: ")


@pytest.mark.parametrize("scheduler", OURS)
def test_a_table_with_a_kind_is_the_same_as_the_name(scheduler: str) -> None:
    name, table = (
        parse_config(minimal(scheduler=kind)).engine
        for kind in (scheduler, {"kind": scheduler})
    )
    assert name.generation is table.generation is OURS[scheduler]
    assert name.version == table.version == OURS[scheduler].engine_version
    assert name.prefix_caching == table.prefix_caching


@pytest.mark.parametrize(
    ("printed", "release"),
    [
        ("v0.9.1", "0.9.1"),
        ("0.8.5.post1", "0.8.5"),
        ("0.10.1.1", "0.10.1"),
        ("0.19.1rc1.dev339+gedc364896", "0.19.1"),
        ("0.20.1+cu128", "0.20.1"),
    ],
)
def test_a_release_as_an_engine_prints_it(printed: str, release: str) -> None:
    assert parse_config(minimal(engine_version=printed)).engine.version == release


@pytest.mark.parametrize(
    ("text", "quoted"), [("0.10", "0.10"), ("0.20", "0.20"), ("0.30", "0.30")]
)
def test_a_release_that_yaml_takes_for_a_number(text: str, quoted: str) -> None:
    def load(version: str) -> RunConfig:
        data = minimal()
        data["engine"]["engine_version"] = parse_yaml(version, "here")
        return parse_config(data)

    with pytest.raises(ConfigError, match=f"put {quoted} in quotes: YAML reads it as"):
        load(text)
    assert load(f"'{text}'").engine.version == quoted
    # What keeps its digits may stay without quotes.
    assert load("0.11").engine.version == "0.11"
    with pytest.raises(ConfigError, match=r"got '0.5'; leave it out for 0.33$"):
        load("0.5")
    old = minimal(scheduler="cacheflow", engine_version=0.1)
    assert parse_config(old).engine.version == "0.1"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            {"watermark": 0.1, "engine_version": "0.11"},
            "engine.watermark exists from 0.24 on, the engine_version is 0.11; leave",
        ),
        (
            {"max_num_active_seqs": 20, "max_num_seqs": 10},
            "engine.max_num_active_seqs must be at most max_num_seqs, which is 10, got",
        ),
        (
            {"enable_chunked_prefill": False, "engine_version": "0.9"},
            "engine.scheduler: before 0.11 only fcfs with chunked prefill",
        ),
        (
            {"scheduling_policy": "priority", "engine_version": "0.8.5"},
            "engine.scheduler: before 0.11 only fcfs",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
            "max_num_batched_tokens must be at least max_model_len",
        ),
        (
            {
                "scheduler": "v0",
                "max_num_partial_prefills": 2,
                "enable_chunked_prefill": False,
            },
            "engine.max_num_partial_prefills of 2 needs chunked prefill",
        ),
        (
            {"scheduler": "v0", "evictor": "lur"},
            "engine.evictor.kind: 'lur' is not built; did you mean 'lru'",
        ),
        ({"scheduler": "v0", "evictor": {"size": 3}}, "engine.evictor.kind: must name"),
    ],
)
def test_engines_that_do_not_fit_together_are_refused(
    engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Simulation(parse_config(minimal(**engine)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "workload.best_of",
            {1: 0.5, 2: 0.4},
            "best_of: shares must add up to 1, got 0.9",
        ),
        ("workload.beam_width", 1000, "beam_width must be between 1 and 256; got 1000"),
        ("workload.priority", {0: -1.0, 1: 2.0}, "priority: the share of 0 must be"),
        (
            "workload.synthetic.arrivals",
            {"kind": "poisson", "rate": math.nan},
            "workload.synthetic.arrivals.*rate",
        ),
        (
            "workload.synthetic.arrivals",
            {"kind": "poison", "rate": 1.0},
            "'poison' is not built; did you mean 'poisson'",
        ),
        (
            "workload.synthetic.arrivals",
            {"kind": "poisson", "rat": 1.0},
            "'poisson' has no such key; did you mean 'rate'",
        ),
        (
            "workload.synthetic.arrivals",
            {"kind": "poisson"},
            "arrivals.rate: 'poisson' needs this key",
        ),
        ("workload.synthetic.arrivals", {"rate": 1.0}, "arrivals.kind: must name one"),
        ("cost", {"kind": "constant", "step_s": 0.0}, "cost: .*step_s"),
        ("cost", {"kind": "constant", "step_s": "fast"}, "cost.step_s: .*'fast'"),
        ("engine.scheduler", "v2", "'v2' is not built; did you mean 'v0_2'"),
        ("engine.scheduler", "V1", "'V1' is not built; did you mean 'v1'"),
        ("engine.scheduler", "transformers", "not built; did you mean 'hf_fifo'"),
        ("engine.scheduler", 0.33, "got 0.33; write .* releases are engine_version"),
        ("engine.scheduler", {"kind": 3}, "engine.scheduler.kind: must name one of"),
        ("engine.scheduler", "nowhere.py:Mine", "there is no file 'nowhere.py'"),
        ("engine.model", "meta-llama/Llama-3.1-8C", "Llama-3.1-8B"),
        ("engine.gpu", "h300_sxm", "h200_sxm"),
        ("engine.model", "meta-llama/Llama-3.1-70B", "GiB"),
    ],
)
def test_parts_that_cannot_be_built_are_refused(
    path: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Simulation(parse_config(changed(path, value)))
    assert "\n" not in str(caught.value)


def test_set_overrides_in_order_and_in_yaml(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, minimal()),
        ["engine.block_size=32", "engine.max_num_seqs=4", "engine.block_size=64"],
    )
    assert config.engine.block_size == 64
    assert config.engine.max_num_seqs == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.block_size", "--set takes key.path=value"),
        ("engine..block_size=3", "--set takes key.path=value"),
        ("seed.x=3", "'seed' is not a table"),
        ("engine.block_size=[", "not YAML"),
        ("seed=2020-99-99", "put text in quotes"),
        ("seed=2020-01-01", "put text in quotes"),
        ("cost=&c {kind: constant, step_s: *c}", "put text in quotes"),
        ("cost={kind: a, kind: b}", "the key 'kind' stands twice"),
        ("engine.block_sise=16", "did you mean 'block_size'"),
    ],
)
def test_bad_overrides_are_refused(tmp_path: Path, override: str, message: str) -> None:
    data = minimal() | {"seed": 1}
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, data), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line 1"),
        ("- 1", "must hold the tables workload, engine"),
        ("", "must hold the tables"),
    ],
)
def test_files_that_are_no_configuration(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load_config(tmp_path / "nothing.yaml")


def test_a_dumped_configuration_is_the_same_configuration(tmp_path: Path) -> None:
    data = minimal(engine_version=0.11, scheduling_policy="priority")
    data["workload"] |= {
        "best_of": {1: 0.5, 4: 0.5},
        "beam_width": {1: 0.75, 2: 0.25},
        "priority": {-1: 0.25, 3: 0.75},
        "max_tokens": 40,
    }
    config = parse_config(data)
    path = tmp_path / "again.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config
    tables = [simulate(each) for each in (config, load_config(path))]
    for name in ("requests", "steps", "preemptions"):
        assert getattr(tables[0], name).equals(getattr(tables[1], name))
    # Samples and beams were there to differ in.
    assert tables[0].requests["parent_id"].nunique() == 5 < len(tables[0].requests)
    assert set(yaml.safe_load(config.to_yaml())["engine"]) == set(
        RunConfig.model_fields["engine"].annotation.model_fields  # type: ignore[union-attr]
    )


def test_a_trace_is_found_beside_its_configuration(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    data = minimal()
    data["workload"] = {"trace": {"kind": "azure", "path": "t.csv"}}
    config = load_config(write(tmp_path, data))
    assert config.workload.trace is not None
    assert config.workload.trace["path"] == str(trace)
    trace.unlink()
    with pytest.raises(ConfigError, match=r"there is no file 't.csv'.*workload fetch"):
        load_config(write(tmp_path, data))


def test_a_scheduler_of_the_users_own_takes_its_place(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "from sim.scheduler.v1 import V1Scheduler\n\n"
        "class LastInFirstOut(V1Scheduler):\n"
        "    def __init__(self, num_gpu_blocks, block_size, max_num_batched_tokens,\n"
        "                 max_num_seqs, max_model_len, patience: int = 3):\n"
        "        super().__init__(num_gpu_blocks, block_size, max_model_len=\n"
        "            max_model_len, max_num_seqs=max_num_seqs,\n"
        "            max_num_batched_tokens=max_num_batched_tokens)\n"
        "        self.patience = patience\n"
        "    def add_request(self, request):\n"
        "        self.waiting.appendleft(request)\n"
    )
    kind = f"{source}:LastInFirstOut"
    config = parse_config(minimal(scheduler={"kind": kind, "patience": 7}))
    simulation = Simulation(config)
    assert simulation.scheduler.patience == 7  # type: ignore[attr-defined]
    assert simulation.run().summary["completed"] == 5
    with pytest.raises(ConfigError, match="no such key; did you mean 'patience'"):
        Simulation(parse_config(minimal(scheduler={"kind": kind, "patiense": 7})))
    with pytest.raises(ConfigError, match="has no class 'Nobody'"):
        Simulation(parse_config(minimal(scheduler=f"{source}:Nobody")))


def test_user_code_that_does_not_import_is_named(tmp_path: Path) -> None:
    source = tmp_path / "broken.py"
    source.write_text("import no_such_module\n")
    with pytest.raises(ConfigError, match="cannot be imported: ModuleNotFoundError"):
        Simulation(parse_config(minimal(scheduler=f"{source}:Mine")))


OF_OTHER_COMMANDS = (
    "plan_",
    "prices",
    "speculative_plan",
    "speculative_sweep",
    "sweep_",
    "vllm_or_sglang",
)
RUNS = [
    path
    for path in sorted((ROOT / "examples").glob("*.yaml"))
    if not path.name.startswith(OF_OTHER_COMMANDS)
]


@pytest.mark.parametrize("path", RUNS)
def test_examples_are_configurations(path: Path) -> None:
    config = parse_config(yaml.safe_load(path.read_text()))
    # nor has a trace, which is read later, keys that are unknown
    make_workload(config.workload, config.seed)


def test_items_of_lists_are_set_by_number_or_name() -> None:
    pools = [{"name": "a", "replicas": 1}, {"name": "b", "replicas": 1}]
    data: dict[str, Any] = {"fleet": {"pools": pools, "rates": [1.0, 2.0]}}
    override(data, ["fleet.pools.0.replicas=3", "fleet.pools.b.engine.gpu=h200_sxm"])
    override(data, {"fleet.rates.1": 5.0})
    assert data["fleet"]["pools"] == [
        {"name": "a", "replicas": 3},
        {"name": "b", "replicas": 1, "engine": {"gpu": "h200_sxm"}},
    ]
    assert data["fleet"]["rates"] == [1.0, 5.0]
    for key, words in (
        ("fleet.pools.c.replicas", r"no item 'c' \(it has: a, b\)"),
        ("fleet.rates.2", r"no item '2' \(it has: 0 to 1\)"),
        ("fleet.pools.a.name.x", "'name' is not a table"),
    ):
        with pytest.raises(ConfigError, match=words):
            override(data, [f"{key}=1"])


def test_memory_that_no_host_has_is_warned_of() -> None:
    def said(**engine: Any) -> list[str]:
        return idle_key_warnings(parse_config(minimal(**engine)))

    connector = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = {"cpu_bytes_to_use": 10**14}
    for engine, words in (
        ({"kv_offloading_size": 100_000}, "97.66 TiB is .* the key is in GiB$"),
        ({"kv_transfer_config": connector}, "90.95 TiB .* the key is in bytes$"),
        (
            {"swap_space": 10_000, "scheduler": "v0", "tensor_parallel_size": 4},
            "39.06 TiB .* the key is in GiB, for each GPU$",
        ),
    ):
        (line,) = said(**engine)
        assert re.search(words, line), line
    assert not said(kv_offloading_size=2**15)
    assert not said(swap_space=8000, scheduler="v0", tensor_parallel_size=4)


def test_goodput_limits_are_counted_and_checked() -> None:
    data = minimal() | {"goodput": {"ttft_ms": 1e6, "tpot_ms": 1e-6}}
    summary = simulate(parse_config(data)).summary
    assert summary["goodput"] == data["goodput"]
    assert summary["goodput_share"] == summary["request_goodput"] == 0.0
    assert "goodput" not in simulate(parse_config(minimal())).summary
    for wrong, message in (
        ({}, "a latency at least"),
        ({"ttft_ms": 0.0}, "greater than 0"),
        ({"tfft_ms": 1.0}, "did you mean 'ttft_ms'"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(minimal() | {"goodput": wrong})


def test_the_format_of_a_trace_is_told_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    rows = "2023-11-16 18:15:46.680590,374,44\n2023-11-16 18:15:50.995111,396,109\n"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    data = minimal() | {"workload": {"trace": {"path": str(path)}}}
    config = parse_config(data)
    assert config.workload.trace is not None
    assert config.workload.trace["kind"] == "azure"
    assert simulate(config).summary["completed"] == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a,b", "looks like no known format"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens,arrived_at,num_prefill_tokens,"
            "num_decode_tokens",
            "looks like azure and vidur",
        ),
    ],
)
def test_a_format_that_the_file_does_not_tell_is_asked_for(
    tmp_path: Path, line: str, words: str
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{line}\n1,2\n")
    data = minimal() | {"workload": {"trace": {"path": str(path)}}}
    with pytest.raises(ConfigError) as refused:
        parse_config(data)
    told = str(refused.value)
    assert told.startswith("workload.trace: kind: left out, and not told by the file")
    assert words in told
    assert "name its kind (trace.kind, or --from): azure, " in told
    assert "\n" not in told
