"""Tables with `kind` inside others: built, refused with their path, found on disk."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from sim.cli.main import run as kvsim
from sim.config.plug import build
from sim.config.tables import load_config, parse_config
from sim.costs import COST_MODELS
from sim.errors import ConfigError
from sim.simulation.simulate import simulate
from sim.simulation.workload import make_workload
from tests.shared import ROOT
from tests.sim.commands import TRACE, files, refused
from tests.sim.config.test_config import minimal, write
from workloads.lengths import FixedLength, LognormalLength
from workloads.traces import AzureTraceReader

if TYPE_CHECKING:
    from pathlib import Path

    from workloads import RequestSpec


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "trace.csv").write_text(TRACE)
    return str(tmp_path / "trace.csv")


def synthetic(**changes: Any) -> dict[str, Any]:
    """Return a configuration whose synthetic traffic is changed; None leaves out."""
    data = minimal()
    data["workload"]["synthetic"] |= {"num_requests": 3} | changes
    return data


def in_pairs(lengths: Any, **changes: Any) -> dict[str, Any]:
    apart = {"prompt_tokens": None, "output_tokens": None}
    return synthetic(**apart, lengths=lengths, **changes)


def requests_of(data: dict[str, Any]) -> list[RequestSpec]:
    config = parse_config(data)
    return list(make_workload(config.workload, config.seed).requests())


def told(data: dict[str, Any]) -> list[tuple[float, int, int]]:
    return [
        (round(r.arrival_s, 3), r.num_prompt_tokens, r.num_output_tokens)
        for r in requests_of(data)
    ]


def test_a_kind_may_stand_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    fleet = {
        "pools": [
            {"name": name, "role": name, "replicas": 1}
            for name in ("prefill", "decode")
        ],
        "router": "session",
        "decode_router": "mine.py:Mine",
        "proxy": {"decider": "always"},
        "links": {"interconnect": "infiniband_ndr"},
    }
    path = write(tmp_path, minimal() | {"cost": "roofline", "fleet": fleet})
    config = load_config(path)
    assert config.cost == {"kind": "roofline"}
    assert config.fleet is not None
    assert config.fleet.router == {"kind": "session"}
    assert config.fleet.decode_router == {"kind": f"{tmp_path / 'mine.py'}:Mine"}
    assert config.fleet.proxy is not None
    assert config.fleet.proxy.decider == {"kind": "always"}
    with pytest.raises(ConfigError, match="router: should be a table of keys"):
        load_config(path, {"fleet.router": 3})


def test_a_trace_within_arrivals_and_lengths(trace: str) -> None:
    azure = {"kind": "azure", "path": trace}
    replay = {"kind": "replay", "trace": azure, "window": [4, None]}
    assert told(synthetic(arrivals=replay, num_requests=2)) == [
        (0.315, 20, 3),
        (0.542, 20, 3),
    ]
    outputs = {"kind": "trace", "trace": azure, "column": "output_tokens"}
    assert {
        n for _, _, n in told(synthetic(output_tokens=outputs, num_requests=99))
    } == {*(44, 55, 109)}
    joint = in_pairs({"kind": "joint_trace", "trace": azure}, num_requests=99)
    assert {pair for _, *pair in map(list, told(joint)) for pair in [tuple(pair)]} == {
        *((374, 44), (396, 109), (879, 55))
    }


def test_lengths_within_lengths() -> None:
    prompts = {"kind": "lognormal", "median": 100, "sigma": 1.0}
    outputs = {"kind": "uniform", "low": 1, "high": 90}
    coupled = {"kind": "coupled", "rank_correlation": 0.8}
    nested = in_pairs(coupled | {"prompt_tokens": prompts, "output_tokens": outputs})
    flat = synthetic(prompt_tokens=prompts, output_tokens=outputs, rank_correlation=0.8)
    assert told(nested) == told(flat)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "azure"}, r"\.trace\.path: 'azure' needs this key"),
        ({"kind": "azure", "path": 5}, r"\.trace\.path: "),
        (
            {"kind": "azure", "path": "a", "pat": 1},
            r"\.trace\.pat: 'azure' has no such key; did you mean 'path'",
        ),
        ({"kind": "azur", "path": "a"}, r"\.trace\.kind: 'azur' is .* mean 'azure'"),
        ({"path": "a"}, r"\.trace\.kind: must name one of azure,"),
        (
            "trace.csv",
            r"\.trace: must be a table with kind: one of azure, .*, got 'tra",
        ),
        (None, r"\.trace: must be a table with kind"),
        (["azure"], r"\.trace: must be a table with kind"),
        ({"kind": "nowhere.py:Own"}, r"\.trace\.kind: there is no file 'nowhere.py'"),
        (
            {"kind": "mooncake", "path": "a", "block_tokens": 0},
            r"\.trace: block_tokens",
        ),
    ],
)
def test_what_is_refused_names_its_path(table: Any, message: str) -> None:
    for where, data in (
        ("arrivals", synthetic(arrivals={"kind": "replay", "trace": table})),
        ("lengths", in_pairs({"kind": "joint_trace", "trace": table})),
    ):
        with pytest.raises(ConfigError, match=rf"^workload.synthetic.{where}{message}"):
            requests_of(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": {"kind": "joint_trace"}}, "got also prompt_tokens and output_tok"),
        ({"prompt_tokens": None}, "or lengths, got output_tokens"),
        ({"prompt_tokens": None, "output_tokens": None}, "or lengths, got none"),
        ({"lengths": 512}, "lengths: should be a table"),
    ],
)
def test_lengths_are_given_in_one_way(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"workload\.synthetic.*{message}"):
        parse_config(synthetic(**changes))
    both = in_pairs({"kind": "joint_trace"}, rank_correlation=0.1)
    with pytest.raises(ConfigError, match="got also rank_correlation; remove"):
        parse_config(both)


OWN = """
from __future__ import annotations
from collections.abc import Mapping, Sequence
from workloads.lengths import LengthDistribution
from workloads.traces import TraceReader

class Own:
    def __init__(
        self,
        one: LengthDistribution,
        some: Sequence[LengthDistribution] = (),
        named: Mapping[str, LengthDistribution] = {},
        maybe: TraceReader | None = None,
        tokens: int | LengthDistribution = 5,
    ):
        self.parts = one, list(some), dict(named), maybe, tokens
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:Own"


def parts(**arguments: Any) -> Any:
    return build({}, arguments, "here").parts


FIVE = {"kind": "fixed", "tokens": 5}
NINE = {"kind": "fixed", "tokens": 9}


def test_roles_in_a_users_own_class(own: str) -> None:
    assert parts(kind=own, one=FIVE) == (FixedLength(5), [], {}, None, 5)
    found = parts(
        kind=own,
        one={"kind": "lognormal", "median": 9, "sigma": 1},
        some=[FIVE, NINE],
        named={"a": FIVE, "b": NINE},
        maybe={"kind": "azure", "path": "t.csv"},
        tokens=NINE,
    )
    assert found == (
        LognormalLength(9, 1),
        [FixedLength(5), FixedLength(9)],
        {"a": FixedLength(5), "b": FixedLength(9)},
        AzureTraceReader("t.csv"),
        FixedLength(9),
    )
    assert parts(kind=own, one=FIVE, maybe=None, tokens=7)[3:] == (None, 7)
    assert parts(kind=own, one={"kind": own, "one": FIVE} | {"some": []})[1] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"some": [FIVE, {"kind": "fixd"}]}, r"some\[1\]\.kind: 'fixd' is not built"),
        ({"some": [FIVE, {"kind": "fixed"}]}, r"some\[1\]\.tokens: .* needs this key"),
        ({"some": FIVE}, r"some: must be a list of tables, got \{"),
        (
            {"named": {"a": 5}},
            r"named\.a: must be a table with kind: one of emp.*got 5",
        ),
        ({"named": [FIVE]}, r"named: must be a table of tables, got \["),
        ({"maybe": 5}, r"maybe: must be a table with kind: one of azure"),
        ({"tokens": {"kind": "fixed", "tokens": 0}}, r"tokens: tokens must be between"),
    ],
)
def test_what_is_refused_of_a_users_own_class(
    own: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^here\.{message}"):
        parts(kind=own, one=FIVE, **arguments)


def test_nested_files_are_found_beside_the_configuration(
    tmp_path: Path, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    azure = {"kind": "azure", "path": "trace.csv"}
    data = in_pairs(
        {"kind": "joint_trace", "trace": azure},
        arrivals={"kind": "replay", "trace": dict(azure)},
    )
    path = write(tmp_path, data)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert kvsim(["run", str(path), "--out", "a", "--no-figures", "--quiet"]) == 0
    written = yaml.safe_load((tmp_path / "elsewhere/a/config.yaml").read_text())
    found = written["workload"]["synthetic"]
    assert found["arrivals"]["trace"]["path"] == trace
    assert found["lengths"]["trace"]["path"] == trace
    monkeypatch.chdir("a")
    again = ["run", "config.yaml", "--out", "../b", "--no-figures", "--quiet"]
    assert kvsim(again) == 0
    first, second = files(tmp_path / "elsewhere/a"), files(tmp_path / "elsewhere/b")
    del first["run.json"], second["run.json"]
    assert first == second


def test_a_nested_file_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    azure = {"kind": "azure", "path": "none.csv"}
    path = write(tmp_path, synthetic(arrivals={"kind": "replay", "trace": azure}))
    line = refused(["run", str(path), "--out", str(tmp_path / "o")], capsys, tmp_path)
    where = r"workload\.synthetic\.arrivals\.trace\.path"
    assert re.search(rf"{where}: there is no file 'none.csv'; .* --set {where}=F", line)


def test_user_classes_and_traces_within_lists_are_found(
    tmp_path: Path, trace: str, own: str
) -> None:
    data = minimal()
    data["workload"] = {
        "trace": {
            "kind": "own.py:Own",
            "some": [{"kind": "own.py:Own", "path": "trace.csv"}],
        }
    }
    config = load_config(write(tmp_path, data))
    assert config.workload.trace == {
        "kind": own,
        "some": [{"kind": own, "path": trace}],
    }


def test_a_trace_by_superposition(trace: str) -> None:
    table = {"kind": "azure", "path": trace, "rate_scale": 2.0}
    data = minimal()
    data["workload"] = {"trace": table | {"scale_by": "superposition"}}
    copies = told(data)
    assert len(copies) == 6
    assert told(data | {"seed": 1}) != copies  # the seed of the run shifts copies
    title = simulate(parse_config(data)).summary["title"]
    assert title.endswith("trace.csv at 2 x rate by superposition")
    data["workload"] = {"trace": table}
    title = simulate(parse_config(data)).summary["title"]
    assert title.endswith("trace.csv at 2 x rate")
    assert told(data) == told(data | {"seed": 1})
    data["workload"]["trace"] = table | {"scale_by": "both"}
    with pytest.raises(ConfigError, match=r"^workload\.trace: scale_by must be one of"):
        told(data)


def test_a_kind_that_is_no_text_is_refused() -> None:
    """The fuzzer of inputs found a list there, which no table of kinds can be asked."""
    chat = ROOT / "examples/chat_sessions.yaml"
    path = "workload.sessions.first_prompt_tokens"
    for odd in ([None], {"a": 1}, 5):
        with pytest.raises(ConfigError, match=rf"{path}.kind"):
            simulate(load_config(chat, {f"{path}.kind": odd}))


def test_many_keys_are_named_by_their_page() -> None:
    table = {"kind": "roofline", "gemm": 0.7}
    with pytest.raises(ConfigError, match=r"lists the \d\d that roofline has; take"):
        build(COST_MODELS, table, "cost")
    table["gemm_compute_eff"] = table.pop("gemm")
    with pytest.raises(ConfigError, match=r"mean 'gemm_compute_efficiency'\?$"):
        build(COST_MODELS, table, "cost")
