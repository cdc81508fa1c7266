"""The doors: commands that read a file, each with a whole one of its kind."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from sim.cli.main import run as kvsim
from sim.costs.measured.profile import profile_id
from sim.hardware.gpus import GPUS
from tests.doors import changes
from tests.identity.measured_profile import measured_profile
from tests.shared import ROOT
from tests.sim.commands import TRACE
from tests.sim.studies.planning.plans import small
from tests.sim.studies.sweeps.files import tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from random import Random

WRITTEN = ("burstgpt", "kvsim", "llmservingsim", "mooncake", "vidur", "vllm_bench")
MODEL = "meta-llama/Llama-3.1-8B"
MEASURED = (
    b"request_id,arrival_s,prompt_tokens,output_tokens,first_token_s,last_token_s\n"
)
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "What is a block?"},
            {"from": "gpt", "value": "Sixteen tokens."},
        ],
    }
] * 3


@dataclass(frozen=True, slots=True)
class Door:
    """A command, the file that it is given, and how that goes wrong."""

    name: str
    words: tuple[str, ...]
    """The command; the path of the file takes the place of ``{}``."""
    suffix: str
    content: bytes
    change: Callable[[bytes, Random], bytes]

    def arguments(self, path: Path) -> list[str]:
        return [word.replace("{}", str(path)) for word in self.words]


def doors(place: Path) -> list[Door]:
    """Return all doors; `place` is for what they lead to."""
    out = ("--out", str(place / "out"), "--overwrite")
    judged = ("--out", str(place / "judged"), "--overwrite", "--no-figures")
    run = ("run", "{}", "--no-figures", "--quiet", *out)
    found = [
        _yaml("configuration", run, tiny()),
        _yaml("sessions", run, _sessions()),
        _yaml("sweep", ("sweep", "{}", "--dry-run"), _sweep()),
        _yaml("plan", ("plan", "{}", "--out", str(place)), small()),
        _yaml("traffic", ("workload", "describe", "{}"), tiny()),
    ]
    (place / "run.yaml").write_text(yaml.safe_dump(tiny()))
    found += _traces(place)
    sheet = {
        key: value
        for key, value in _plain(GPUS["h200_sxm"]).items()
        if key not in ("is_judged", "name")
    }
    gpu = ("capacity", "--model", MODEL, "--gpu", "{}")
    found.append(_yaml("GPU", gpu, sheet))
    found.append(
        Door("GPU", gpu, ".json", changes.as_json(sheet), changes.changed_json)
    )
    for config in _models():
        words = ("capacity", "--model", "{}", "--gpu", "h200_sxm")
        found.append(Door("model", words, ".json", config, changes.changed_json))
    found += _profiles(place)
    found += _results(place)
    even = tiny()
    even["workload"]["synthetic"] |= {
        "prompt_tokens": {"kind": "uniform", "low": 20, "high": 20},
        "output_tokens": {"kind": "uniform", "low": 3, "high": 3},
    }
    (place / "even.yaml").write_text(yaml.safe_dump(even))
    found.append(
        Door(
            "measured run",
            ("validate", str(place / "even.yaml"), "--measured", "{}", *judged),
            ".csv",
            MEASURED
            + b"".join(f"{i},{i}.0,20,3,{i}.5,{i}.9\n".encode() for i in range(12)),
            changes.changed_bytes,
        )
    )
    workload = (ROOT / "examples/decisions.workload.json").read_bytes()
    decide = ("decisions", "{}")
    found.append(Door("decisions", decide, ".json", workload, changes.changed_json))
    log = place / "log.jsonl"
    source = str(ROOT / "examples/decisions.workload.json")
    assert kvsim(["decisions", source, "--out", str(log), "--quiet"]) == 0
    words = ("decisions", "--diff", str(log), "{}")
    lines = log.read_bytes()
    found.append(Door("log", words, ".jsonl", lines, changes.changed_json_lines))
    return found


def _yaml(name: str, words: tuple[str, ...], data: Any) -> Door:
    def change(content: bytes, random: Random) -> bytes:
        if random.random() < 0.25:
            return changes.changed_bytes(content, random)
        odd = changes.changed_data(yaml.safe_load(content), random)
        return yaml.safe_dump(odd, sort_keys=False).encode()

    return Door(name, words, ".yaml", yaml.safe_dump(data).encode(), change)


def _sessions() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(
        (ROOT / "examples/chat_sessions.yaml").read_text()
    )
    data["workload"]["sessions"]["num_sessions"] = 3
    return data


def _sweep() -> dict[str, Any]:
    ranges = {"workload.synthetic.num_requests": {"choice": [5, 9]}}
    return {
        "base": tiny(),
        "grid": {"engine.max_num_seqs": [4, 8], "engine.block_size": [16, 32]},
        "random": {"num_runs": 2, "ranges": ranges},
        "repeats": 2,
    }


def _traces(place: Path) -> Iterator[Door]:
    found = {"azure": TRACE.encode(), "sharegpt": changes.as_json(SHAREGPT)}
    for kind in (
        "burstgpt",
        "kvsim",
        "llmservingsim",
        "mooncake",
        "vidur",
        "vllm_bench",
    ):
        path = place / f"{kind}.trace"
        source = str(place / "run.yaml")
        words = ["workload", "generate", source, "--to", kind, "--out", str(path)]
        if kvsim([*words, "--quiet"]) == 0:
            found[kind] = path.read_bytes()
    for kind, content in found.items():
        lengths = ("--set", "tokens_per_character=0.25")
        more = lengths if kind == "sharegpt" else ()
        is_json = content.lstrip()[:1] in (b"{", b"[")
        change = changes.changed_bytes
        if is_json:
            one = len(content.splitlines()) == 1 or kind in ("sharegpt", "vllm_bench")
            change = changes.changed_json if one else changes.changed_json_lines
        for words in (
            ("workload", "describe", "{}", "--from", kind, *more),
            ("workload", "convert", "{}", *more, "--to", "kvsim", "--out",
             str(place / "converted"), "--overwrite"),
        ):  # fmt: skip
            yield Door(f"trace of {kind}", words, ".trace", content, change)


def _plain(spec: Any) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def _models() -> Iterator[bytes]:
    for path in sorted((ROOT / "sim/hardware/models/configs").glob("*.json"))[::9]:
        yield path.read_bytes()


def _profiles(place: Path) -> Iterator[Door]:
    """Yield profiles whose identity is right, so that what is inside is read."""
    with open(measured_profile(MODEL), encoding="utf-8") as file:
        whole = json.load(file)
    device: dict[str, Any] = {
        "name": "h200_sxm",
        "bandwidth_bytes_per_s": 4e12,
        "flops_per_s": 9e14,
        "l2_bytes": 5e7,
    }
    told = {
        "date": "2026-01-01",
        "tool": "test",
        "device": device,
    }
    whole["provenance"] = whole.get("provenance", {}) | told
    whole["id"] = profile_id(whole)
    content = changes.as_json(whole)

    def change(given: bytes, random: Random) -> bytes:
        odd = changes.changed_data(json.loads(given), random)
        if isinstance(odd, dict) and random.random() < 0.95:
            with suppress(ValueError):  # what is not finite has no identity
                odd["id"] = profile_id(odd)
        return changes.as_json(odd)

    run = place / "priced.yaml"
    data = tiny() | {"cost": {"kind": "measured", "profile": "none"}}
    run.write_text(yaml.safe_dump(data))
    out = ("--out", str(place / "out"), "--overwrite", "--no-figures", "--quiet")
    words = ("run", str(run), "--set", "cost.profile={}", *out)
    yield Door("profile", ("profile", "validate", "{}"), ".json", content, change)
    yield Door("priced", words, ".json", content, change)


def _results(place: Path) -> Iterator[Door]:
    """Yield files of results, each put back into its folder."""
    done = place / "done"
    words = ["run", str(place / "run.yaml"), "--quiet", "--no-figures"]
    assert kvsim([*words, "--itl", "exact", "--out", str(done)]) == 0
    for name in ("summary.json", "config.yaml", "requests.parquet", "steps.parquet"):
        content = (done / name).read_bytes()
        is_json = name.endswith(".json")
        change = changes.changed_json if is_json else changes.changed_bytes
        export = ("export", str(done), "--overwrite", "--to")
        ways = [
            (*export, "prometheus", "--out", str(place / "p")),
            (*export, "csv", "--out", str(place / "csv")),
        ]
        if is_json:
            words = ("plot", str(done), "--figure", "latency_cdfs", "--overwrite")
            ways.append((*words, "--out", str(place / "figures")))
        for way in ways:
            yield Door(f"results: {name}", way, f"@{done / name}", content, change)
