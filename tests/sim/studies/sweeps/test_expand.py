"""From a sweep file to its runs: which, with what seeds, and what is refused."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml

from sim.config.files import put
from sim.config.tables import parse_config
from sim.errors import ConfigError
from sim.studies.sweeps.expand import Sweep, check_runs, check_size, value_at
from sim.studies.sweeps.spec import load_sweep
from tests.sim.studies.sweeps.files import sweep_of, tiny, write_sweep

if TYPE_CHECKING:
    from pathlib import Path

SEQS, BLOCK = "engine.max_num_seqs", "engine.block_size"
RATE = "workload.synthetic.rate_scale"


def test_blocks_are_combined_the_last_one_changing_first(tmp_path: Path) -> None:
    sweep = sweep_of(
        tmp_path,
        list=[{BLOCK: 8}, {BLOCK: 32, "engine.enable_prefix_caching": True}],
        grid={SEQS: [4, 8], "engine.watermark": [None]},
        random={"num_runs": 3, "ranges": {RATE: {"uniform": [0.5, 2.0]}}},
        repeats=2,
    )
    jobs = list(sweep.jobs())
    assert sweep.num_runs == len(jobs) == 2 * 2 * 3 * 2
    assert [job.index for job in jobs] == list(range(24))
    found = [(j.overrides[BLOCK], j.overrides[SEQS], j.overrides[RATE]) for j in jobs]
    rates = list(dict.fromkeys(rate for *_, rate in found))
    assert len(rates) == 3
    assert all(0.5 <= rate <= 2.0 for rate in rates)
    expected = [
        key for key in itertools.product([8, 32], [4, 8], rates) for _ in range(2)
    ]
    assert found == expected
    for job in jobs:
        assert parse_config(dict(job.config)).to_data() == job.config
        for key, value in job.overrides.items():
            assert value_at(job.config, key) == value
        assert job.config["engine"]["enable_prefix_caching"] == (
            True if job.overrides[BLOCK] == 32 else None
        )
    assert list(sweep.jobs()) == jobs


def test_common_random_numbers_give_every_point_the_same_seeds(tmp_path: Path) -> None:
    def seeds(**spec: Any) -> list[int]:
        sweep = sweep_of(tmp_path, grid={SEQS: [4, 8]}, **spec)
        return [job.config["seed"] for job in sweep.jobs()]

    assert seeds(repeats=3) == [0, 1, 2] * 2
    assert seeds(repeats=3, seed=7) == [7, 8, 9] * 2
    assert seeds(repeats=3, base=tiny() | {"seed": 40}) == [40, 41, 42] * 2
    assert seeds(repeats=3, common_random_numbers=False) == [0, 1, 2, 3, 4, 5]
    assert seeds(common_random_numbers=False, seed=5) == [5, 6]
    assert seeds() == [0, 0]


def test_a_latin_hypercube_has_one_value_in_each_part(tmp_path: Path) -> None:
    ranges = {RATE: {"uniform": [0.0, 1.0]}, SEQS: {"int": [1, 20]}}
    spec = {"latin_hypercube": {"num_runs": 20, "ranges": ranges}}
    # A rate of 0 is refused, which a draw from (0, 1) never is.
    jobs = list(sweep_of(tmp_path, **spec).jobs())
    rates = [job.overrides[RATE] for job in jobs]
    assert sorted(int(20 * rate) for rate in rates) == list(range(20))
    assert sorted(job.overrides[SEQS] for job in jobs) == list(range(1, 21))
    again = list(sweep_of(tmp_path, **spec, seed=1).jobs())
    assert [job.overrides[RATE] for job in again] != rates


def test_drawn_keys_do_not_disturb_each_other(tmp_path: Path) -> None:
    alone = {RATE: {"log": [0.5, 2.0]}}
    both = {SEQS: {"log_int": [2, 512]}} | alone

    def rates(ranges: Any, num_runs: int) -> list[float]:
        sweep = sweep_of(tmp_path, random={"num_runs": num_runs, "ranges": ranges})
        return [job.overrides[RATE] for job in sweep.jobs()]

    drawn = rates(alone, 200)
    assert rates(both, 200) == drawn
    assert rates(alone, 50) == drawn[:50]
    assert 0.45 < np.mean(np.array(drawn) < 1.0) < 0.55


def test_a_base_by_name_and_changed_in_passing(tmp_path: Path) -> None:
    write_sweep(tmp_path, base="base.yaml", grid={SEQS: [4, 8]})
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tiny()))
    file = load_sweep(tmp_path / "sweep.yaml", ["engine.block_size=8"])
    jobs = list(Sweep(file).jobs())
    assert [job.config["engine"]["block_size"] for job in jobs] == [8, 8]
    # What is kept in the results needs no other file.
    (tmp_path / "kept.yaml").write_text(yaml.safe_dump(dict(file.given)))
    assert list(Sweep(load_sweep(tmp_path / "kept.yaml")).jobs()) == jobs


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "sweep: nothing is varied; give grid, list"),
        ({"grid": {}}, "grid: should be a table from keys to values"),
        ({"grid": {SEQS: []}}, f"grid: {SEQS}: should be a list of values, not empty"),
        ({"grid": {RATE: {"log": [2, 1], "num": 3}}}, "the range is empty"),
        ({"gird": {SEQS: [1]}}, "gird: unknown key; did you mean 'grid'?"),
        (
            {"random": {"ranges": {BLOCK: {"int": [1, 9]}}}},
            "random.num_runs: this key is needed",
        ),
        ({"random": {"num_run": 5, "ranges": {}}}, "did you mean 'num_runs'?"),
        ({"random": 5}, "random: should be a table with num_runs and ranges"),
        (
            {"latin_hypercube": {"num_runs": 0, "ranges": {}}},
            "latin_hypercube.num_runs",
        ),
        ({"repeats": 0}, "repeats: should be greater than or equal to 1, got 0"),
        ({"repeats": "two"}, "repeats: should be a valid integer, got 'two'"),
        ({"list": [{}]}, "list: should be a list of tables such as"),
        ({"list": [{BLOCK: 8}], "grid": {BLOCK: [8]}}, "is varied by two blocks"),
        (
            {"grid": {"engine": [{}], BLOCK: [8]}},
            "'engine.block_size' is part of 'engine'; vary one of them",
        ),
        ({"grid": {"seed": [1, 2]}, "repeats": 2}, "'seed' is varied, and set by"),
        ({"grid": {"engine..x": [1, 2]}}, "'engine..x' is no key such as"),
        ({"base": 5, "repeats": 2}, "base: should be a configuration's path"),
        ({"base": "none.yaml", "repeats": 2}, "there is no configuration file"),
    ],
)
def test_bad_sweeps(spec: Any, message: str, tmp_path: Path) -> None:
    path = write_sweep(tmp_path, **spec)
    with pytest.raises(ConfigError) as refused:
        load_sweep(path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("engine.max_num_seq", [1], "engine.max_num_seq: unknown key; did you mean"),
        ("engin.max_num_seqs", [1], "engin: unknown key; did you mean 'engine'?"),
        (SEQS, [4, "many"], "run 1: engine.max_num_seqs: should be a valid integer"),
        (SEQS, [4, 0], "run 1: engine.max_num_seqs: should be greater than or equal"),
        ("engine.model.size", [1], "engine.model.size: 'model' is not a table"),
        ("workload.trace.path", ["no.csv"], "there is no file 'no.csv'"),
        ("cost.step_ss", [0.1], "cost.step_ss: 'constant' has no such key; did you"),
        ("cost.kind", ["constant", "rooflin"], "'rooflin' is not built; did you mean"),
        ("engine.gpu", ["h200_sxm", "h20_sxm"], "run 1: "),
        (
            "workload.synthetic.arrivals.rate",
            [-1.0],
            "workload.synthetic.arrivals: rate",
        ),
        ("engine.preemption_mode", ["swap"], "no run of the sweep can start: engine."),
    ],
)
def test_mistakes_of_the_whole_sweep(
    key: str, values: list[Any], message: str, tmp_path: Path
) -> None:
    sweep = sweep_of(tmp_path, grid={key: values})
    with pytest.raises(ConfigError) as refused:
        check_runs(list(sweep.runs()))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_keys_that_contradict_each_other_in_some_runs_are_left_to_them(
    tmp_path: Path,
) -> None:
    grid = {"engine.scheduler": ["v0", "v1"], "engine.preemption_mode": ["swap"]}
    runs = list(sweep_of(tmp_path, grid=grid).runs())
    check_runs(runs)
    assert runs[0].refusal is None
    assert runs[1].refusal is not None
    assert "the v1 generation preempts by recomputation only" in runs[1].refusal


def test_a_sweep_larger_than_meant_is_asked_about(tmp_path: Path) -> None:
    ranges = {SEQS: {"int": [1, 500]}}
    spec = {"random": {"num_runs": 10_001, "ranges": ranges}}
    sweep = sweep_of(tmp_path, **spec)
    check_size(sweep, confirmed=True)
    with pytest.raises(ConfigError, match="has 10,001 runs; more than 10,000"):
        check_size(sweep, confirmed=False)


def test_put_makes_tables_and_keeps_values_apart() -> None:
    data: dict[str, Any] = {"workload": None}
    value = {"kind": "poisson"}
    put(data, "workload.synthetic.arrivals", value)
    put(data, "workload.synthetic.arrivals.rate", 2.0)
    assert data["workload"]["synthetic"]["arrivals"] == {"kind": "poisson", "rate": 2.0}
    assert value == {"kind": "poisson"}
    assert value_at(data, "workload.nothing.there") is None


def test_an_item_of_a_list_has_its_value_by_number_and_by_name() -> None:
    """Columns of `fleet.pools.0.replicas` were null, and its points one."""
    data: dict[str, Any] = {"pools": [{"name": "a"}, {"name": "b", "replicas": 3}]}
    assert value_at(data, "pools.1.replicas") == 3
    assert value_at(data, "pools.b.replicas") == 3
    assert value_at(data, "pools.b") == {"name": "b", "replicas": 3}
    for nowhere in ("pools.a.replicas", "pools.2.replicas", "pools.c", "pools.b.x.y"):
        assert value_at(data, nowhere) is None
