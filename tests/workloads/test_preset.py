from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.workloads.shared_traces import AZURE_CODE, AZURE_CONV, MOONCAKE, shared_trace
from workloads import PresetWorkload, WorkloadError, load_preset, preset_names
from workloads.derive_preset import derive_preset, main
from workloads.preset import _text
from workloads.spec import RequestSpec
from workloads.traces import AzureTraceReader

if TYPE_CHECKING:
    from pathlib import Path

NAME = "azure_conv_2023"


def columns(workload: PresetWorkload) -> tuple[Any, Any, Any]:
    requests = workload.requests()
    return (
        np.array([request.arrival_s for request in requests]),
        np.array([request.num_prompt_tokens for request in requests]),
        np.array([request.num_output_tokens for request in requests]),
    )


def test_names() -> None:
    assert preset_names() == (NAME,)


def test_facts() -> None:
    preset = load_preset(NAME)
    assert preset.name == NAME
    assert preset.num_requests == 19_366
    assert preset.span_s == 3501.72
    assert preset.source["licence"] == "CC-BY-4.0"
    assert "Splitwise" in preset.source["citation"]
    assert "b469a113cedca53ddc3bdea71a143dc4b7d8700c" in preset.source["url"]


def test_samples_have_the_statistics_of_the_trace() -> None:
    workload = PresetWorkload(NAME, num_requests=200_000)
    times_s, prompts, outputs = columns(workload)
    gaps_s = np.diff(times_s)
    assert len(times_s) / times_s[-1] == pytest.approx(5.530, rel=0.01)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(1.094, rel=0.01)
    assert prompts.mean() == pytest.approx(1154.7, rel=0.01)
    assert outputs.mean() == pytest.approx(211.1, rel=0.01)
    assert np.quantile(prompts, [0.5, 0.99]) == pytest.approx([1020, 4142], rel=0.02)
    assert np.quantile(outputs, [0.5, 0.99]) == pytest.approx([129, 601], rel=0.02)
    assert prompts.min() >= 2
    assert prompts.max() <= 14_050
    assert outputs.min() >= 7
    assert outputs.max() <= 1000
    ranks = [x.argsort(kind="stable").argsort() for x in (prompts, outputs)]
    assert np.corrcoef(ranks)[0, 1] == pytest.approx(0.0728, abs=0.01)


def minute_counts(times_s: Any) -> Any:
    num_minutes = int(times_s[-1] // 60)
    return np.histogram(times_s, 60.0 * np.arange(num_minutes + 1))[0]


def test_notes_tell_how_much_smoother_it_is_than_the_trace() -> None:
    draws = [minute_counts(columns(PresetWorkload(NAME, seed=i))[0]) for i in range(20)]
    ratio = np.mean([counts.var() / counts.mean() for counts in draws])
    peak = np.mean([counts.max() / 60 for counts in draws])
    notes = load_preset(NAME).notes
    assert f"variance/mean 16.1 in the trace, {ratio:.2g} here" in notes
    assert f"8.45 requests/s in the trace, {peak:.2g} here" in notes
    assert (f"{ratio:.2g}", f"{peak:.2g}") == ("1.1", "6.3")


def test_the_trace_has_the_figures_of_the_notes() -> None:
    requests = AzureTraceReader(path=shared_trace(AZURE_CONV)).read()
    counts = minute_counts(np.array([request.arrival_s for request in requests]))
    assert counts.var() / counts.mean() == pytest.approx(16.13, abs=0.005)
    assert counts.max() / 60 == pytest.approx(8.45)


def test_a_preset_may_come_without_notes(tmp_path: Path) -> None:
    facts = json.loads(_text(NAME))
    del facts["notes"]
    path = tmp_path / "own.json"
    path.write_text(json.dumps(facts))
    assert load_preset(str(path)).notes == ""


def test_overrides() -> None:
    assert len(PresetWorkload(NAME).requests()) == 19_366
    assert len(PresetWorkload(NAME, num_requests=7).requests()) == 7
    times_s, *_ = columns(PresetWorkload(NAME, duration_s=100))
    twice_s, *_ = columns(PresetWorkload(NAME, duration_s=100, rate_scale=2))
    assert times_s[-1] < 100
    assert twice_s[-1] < 100
    assert len(times_s) == pytest.approx(553, rel=0.2)
    assert len(twice_s) == pytest.approx(1106, rel=0.2)
    one = PresetWorkload(NAME, num_requests=7, seed=1).requests()
    assert one != PresetWorkload(NAME, num_requests=7, seed=2).requests()
    assert one == PresetWorkload(NAME, num_requests=7, seed=1).requests()


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"name": "azure_conv"}, "preset must be one of azure_conv_2023; got"),
        ({"name": "../preset"}, "preset must be one of"),
        ({"name": ""}, "preset must be one of"),
        ({"name": None}, "preset must be one of"),
        ({"name": "nowhere.json"}, "a preset must be JSON .*FileNotFoundError"),
        ({"num_requests": 5, "duration_s": 5.0}, "exactly one of num_requests"),
        ({"num_requests": 0}, "num_requests must be"),
        ({"duration_s": float("nan")}, "duration_s must be"),
        ({"rate_scale": 0.0}, "rate_scale must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bad_parameters(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^{rule}") as info:
        PresetWorkload(**({"name": NAME} | changes))
    assert "\n" not in str(info.value)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(_text(NAME).replace(NAME, "own"))
    assert load_preset(str(path)).name == "own"
    workload = PresetWorkload(str(path), num_requests=9)
    assert workload.requests() == PresetWorkload(NAME, num_requests=9).requests()


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts | {"format": "kvsim-preset/2"},
        lambda facts: {k: facts[k] for k in facts if k != "arrivals"},
        lambda facts: facts | {"arrivals": {"kind": "nothing"}},
        lambda facts: facts | {"arrivals": {"kind": "gamma", "speed": 3}},
        lambda facts: [],
    ],
)
def test_broken_files(change: Any, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(change(json.loads(_text(NAME)))))
    with pytest.raises(
        WorkloadError, match=r"^a preset must be JSON of format .*; der"
    ):
        load_preset(str(path))


def test_derived_literal() -> None:
    requests = [
        RequestSpec(i, time_s, ((2 * i, prompt),), output, 2 * i + 1)
        for i, (time_s, prompt, output) in enumerate(
            [(0, 10, 4), (1, 20, 3), (4, 20, 2), (8, 30, 1)]
        )
    ]
    facts = derive_preset("name", requests, {"trace": "file"})
    assert "notes" not in facts  # too short for counts per minute
    # Gaps 1, 3, 4: mean 8/3, variance 14/9; ranks 1, 2.5, 2.5, 4 against 4, 3, 2, 1.
    assert facts["span_s"] == 8
    assert facts["arrivals"] == {"kind": "gamma", "rate": 0.375, "burstiness": 4.57143}
    assert facts["rank_correlation"] == -0.948683
    table = dict(
        zip(
            facts["prompt_tokens"]["probabilities"],
            facts["prompt_tokens"]["values"],
            strict=True,
        )
    )
    assert [table[p] for p in (0, 0.1, 0.5, 0.9, 1)] == [10, 13, 20, 27, 30]


@pytest.mark.parametrize("num_requests", [0, 1, 2, 5])
def test_a_trace_too_even_for_a_preset(num_requests: int) -> None:
    requests = [RequestSpec(i, float(i), ((2 * i, 5),), 5, 1) for i in range(5)]
    with pytest.raises(WorkloadError, match="varied gaps and lengths"):
        derive_preset("name", requests[:num_requests], {})


def test_the_packaged_preset_is_what_the_trace_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([NAME, str(shared_trace(AZURE_CONV))]) == 0
    assert capsys.readouterr().out == _text(NAME)


def test_other_traces_give_presets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["code", str(shared_trace(AZURE_CODE))]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["arrivals"]["burstiness"] == pytest.approx(13.2**-2, rel=0.01)
    assert main(["mooncake", str(shared_trace(MOONCAKE)), "--kind=mooncake"]) == 0
    path = tmp_path / "mooncake.json"
    path.write_text(capsys.readouterr().out)
    preset = load_preset(str(path))
    assert preset.source["trace"] == "mooncake_conversation"
    assert len(PresetWorkload(str(path), num_requests=10).requests()) == 10


def test_a_mistake_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([NAME, str(tmp_path / "nowhere.csv")]) == 2
    assert "a trace must exist" in capsys.readouterr().err
