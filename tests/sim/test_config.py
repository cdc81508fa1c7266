"""Configurations: complete and typed, or refused in a line that names the key."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.config import RunConfig, load_config, parse_config
from sim.errors import ConfigError
from sim.simulate import Simulation
from tests.shared import ROOT

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
        ("engine.blok_size", 16, "unknown key; did you mean 'block_size'"),
        ("engin", {}, "engin: unknown key; did you mean 'engine'"),
        ("engine.gpu_memory_utilization", math.nan, "finite number"),
        ("engine.gpu_memory_utilization", 1.2, "less than or equal to 1, got 1.2"),
        ("engine.pipeline_parallel_size", 2, "engine.pipeline_parallel_size: .*got 2"),
        ("engine.speculative_config", {}, "speculative decoding is not built"),
        ("engine.kv_offloading_size", 4, "KV offloading of v1 is not built"),
        ("engine.engine_version", "0.33", "only the 0.11 dialect .*got '0.33'"),
        ("engine.preemption_mode", "swap", "by recomputation only.*got 'swap'"),
        ("engine.enable_chunked_prefill", False, "enable_chunked_prefill: .*False"),
        ("workload.preset", {"name": "x"}, "exactly one of trace, synthetic and"),
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
    ("path", "value", "message"),
    [
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
        ("engine.scheduler", "v2", "engine.scheduler.kind: 'v2' is not built"),
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
    config = parse_config(minimal(engine_version=0.11))
    path = tmp_path / "again.yaml"
    path.write_text(config.to_yaml())
    assert load_config(path) == config
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


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")))
def test_examples_are_configurations(path: Path) -> None:
    parse_config(yaml.safe_load(path.read_text()))
