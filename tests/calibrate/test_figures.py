"""Figures of profiles: what they say, what they leave out, and that they are whole."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from matplotlib.colors import to_hex

from calibrate.estimators import ESTIMATORS
from calibrate.estimators.rows import unique_rows
from calibrate.figures.axes import LAYOUTS, axis_label, fixed_label, value_text
from calibrate.figures.coverage import NUM_PANELS, coverage, panels_of
from calibrate.figures.drawing import draw_profile
from calibrate.figures.fitted import LOOKS, measured_and_fitted
from calibrate.figures.placement import (
    best_bandwidth,
    best_flops,
    clouds_of,
    roofline_placement,
)
from calibrate.figures.subject import NUM_CURVES, Subject, source_line, subjects
from calibrate.fit_report import operation_report
from calibrate.writing import build_profile, op_table, write_profile
from sim.cli.main import run
from sim.errors import UserError
from tests.calibrate.synthetic import DEVICE, decode_columns, decode_seconds, grid
from tests.sim.views.plots.tables import pixels_of, texts_of

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from sim.costs.measured.profile import Profile

PROVENANCE = {
    "date": "2026-01-01",
    "device": DEVICE.to_json(),
    "source": {"name": "synthetic"},
}
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128]
CONTEXTS = [512, 1024, 2048, 4096, 8192, 16384]
TOKENS = [1, 4, 16, 64, 256, 1024, 4096]


def decode_table(scale: float = 1.0) -> dict[str, object]:
    table = decode_columns(*grid(BATCHES, CONTEXTS))
    names = ("num_heads", "num_kv_heads", "batch", "context")
    constants = {"head_dim": 128, "kv_itemsize": 2, "window": 0}
    return op_table(
        "decode_attention",
        "bfloat16",
        {name: table[name] for name in names},
        decode_seconds(table) * scale,
        constants=constants,
    )


def gemm_table(n: int, k: int) -> dict[str, object]:
    seconds = [
        4e-6 + 2 * n * k / 4e12 + 2.0 * m * n * k / (0.7 * DEVICE.flops_per_s)
        for m in TOKENS
    ]
    constants = {"n": n, "k": k, "weight_bits": 16}
    return op_table("gemm", "bfloat16", {"m": TOKENS}, seconds, constants=constants)


def swap_table() -> dict[str, object]:
    blocks, sizes = grid([1, 4, 16, 64], [4096, 32768, 262144])
    axes = {"num_blocks": blocks, "block_bytes": sizes, "num_descriptors": 4 * blocks}
    seconds = 1e-5 + blocks * sizes / 5e10
    return op_table("swap", "uint8", axes, seconds, variant="loop")


def a_profile(*tables: dict[str, object]) -> Profile:
    found = tables or (decode_table(), gemm_table(4096, 4096), gemm_table(6144, 4096))
    return build_profile("imported", PROVENANCE, [*found])


@pytest.fixture(scope="module")
def profile() -> Profile:
    return a_profile()


@pytest.fixture(scope="module")
def drawn(profile: Profile) -> dict[str, Subject]:
    return {subject.name: subject for subject in subjects(profile)[0]}


def markers(axes: Axes) -> list[str]:
    """Legend labels of lines that are markers."""
    return [
        str(line.get_label())
        for line in axes.get_lines()
        if line.get_linestyle() == "None" and not str(line.get_label()).startswith("_")
    ]


def test_a_curve_for_each_of_six_batches_with_the_points_measured(
    drawn: dict[str, Subject],
) -> None:
    figure = measured_and_fitted(drawn["decode_attention"], "here")
    above, below = figure.axes
    labels = ["batch 1", "batch 2", "batch 8", "batch 16", "batch 64", "batch 128"]
    assert markers(above) == labels
    assert len(labels) == NUM_CURVES == len(LOOKS)
    first = next(line for line in above.get_lines() if line.get_label() == "batch 1")
    assert np.asarray(first.get_xdata()).tolist() == CONTEXTS
    table = decode_columns(np.ones(6), np.array(CONTEXTS))
    expected = 1e6 * decode_seconds(table)
    assert np.asarray(first.get_ydata()) == pytest.approx(expected, rel=1e-6)
    assert above.get_xscale() == above.get_yscale() == "log"
    assert above.get_ylabel() == "time of one call"
    ticks = [text.get_text() for text in above.get_yticklabels()]
    assert {"100 µs", "1 ms"} <= set(ticks)
    assert below.get_xlabel() == "context of each sequence (tokens)"
    assert below.get_ylabel() == "predicted / measured - 1 (%)"


def test_fits_go_through_the_points_and_are_dashed_beyond_them(
    drawn: dict[str, Subject],
) -> None:
    above = measured_and_fitted(drawn["decode_attention"], "here").axes[0]
    own = [line for line in above.get_lines() if to_hex(line.get_color()) == "#0072b2"]
    points, fit, further = own
    x, y = (np.asarray(data, dtype=float) for data in fit.get_data())
    known = np.isfinite(y)
    assert (x[known].min(), x[known].max()) == (512, 16384)
    at = np.interp(CONTEXTS, x[known], y[known])
    assert at == pytest.approx(np.asarray(points.get_ydata()), rel=0.02)
    x, y = (np.asarray(data, dtype=float) for data in further.get_data())
    assert x[np.isfinite(y)].min() == 16384
    assert x[np.isfinite(y)].max() == 4 * 16384


def test_titles_tell_the_errors_on_points_held_out(drawn: dict[str, Subject]) -> None:
    subject = drawn["decode_attention"]
    title = texts_of(measured_and_fitted(subject, "here"))[0]
    errors = subject.errors
    assert title == (
        f"Decode attention: {errors.mape():.1f} % off on points held out "
        f"(p90 {errors.p90():.1f} %), {errors.mape(beyond=True):.1f} % "
        "beyond the lengths it saw"
    )


def test_errors_are_those_that_fit_prints() -> None:
    """Another split of the points, so near each other and not equal."""
    rng = np.random.default_rng(1)
    table = decode_columns(*grid(2 ** np.arange(8), 2 ** np.arange(6, 17)))
    seconds = decode_seconds(table) * rng.lognormal(0.0, 0.05, len(table["batch"]))
    subject = subjects(
        a_profile(op_table("decode_attention", "bfloat16", table, seconds))
    )[0][0]
    report = operation_report(subject.estimator, subject.columns, subject.time_s)
    assert 3.0 < subject.errors.mape() < 7.0
    assert subject.errors.mape() == pytest.approx(report.mape_inside, rel=0.2)
    assert subject.errors.mape(beyond=True) == pytest.approx(report.mape_beyond)
    assert subject.errors.p90(beyond=True) == pytest.approx(report.p90_beyond)


def test_no_point_is_predicted_by_a_fit_that_saw_it() -> None:
    """One point is wrong by half; a fit that saw it would be near it."""
    table = decode_columns(*grid(BATCHES, CONTEXTS))
    seconds = decode_seconds(table)
    seconds[20] *= 1.5
    subject = subjects(
        a_profile(op_table("decode_attention", "bfloat16", table, seconds))
    )[0][0]
    wrong = np.nanargmax(np.abs(subject.errors.inside))
    assert subject.time_s[wrong] == pytest.approx(seconds[20], rel=1e-6)
    assert subject.errors.inside[wrong] == pytest.approx(-100 / 3, abs=3.0)


def test_a_large_table_is_drawn_by_the_fit_that_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the line errs as the points held out say, and reaches as far as all points."""
    monkeypatch.setattr("calibrate.figures.subject.num_splits", lambda _count: 1)
    rng = np.random.default_rng(2)
    table = decode_columns(*grid(BATCHES, CONTEXTS))
    seconds = decode_seconds(table) * rng.lognormal(0.0, 0.1, len(table["batch"]))
    subject = subjects(
        a_profile(op_table("decode_attention", "bfloat16", table, seconds))
    )[0][0]
    held = np.isfinite(subject.errors.inside)
    assert 0.1 < held.mean() <= 0.2
    off = 100 * (subject.estimator.predict(subject.columns) / subject.time_s - 1)
    assert off[held] == pytest.approx(subject.errors.inside[held])
    assert not subject.estimator.extrapolated(subject.columns).any()


def test_distinct_rows_are_those_of_numpy() -> None:
    rng = np.random.default_rng(3)
    for shape in ((0, 3), (1, 2), (500, 3), (800, 1), (40, 0)):
        table = rng.integers(-3, 4, shape)
        rows, places = unique_rows(table)
        expected, where = np.unique(table, axis=0, return_inverse=True)
        assert np.array_equal(rows, expected)
        assert np.array_equal(places, where)


def test_too_few_points_to_hold_any_out_are_said_to_be() -> None:
    """All curves lose a point, and a curve of two cannot."""
    layers = [
        op_table(
            "layer", "bfloat16", {"tokens": [1, 64]}, [1e-5, 2e-5],
            constants={"layer": name},
        )
        for name in ("norm", "rope", "act", "add", "head", "emb")
    ]  # fmt: skip
    (subject,), _ = subjects(a_profile(*layers))
    assert np.isnan(subject.errors.inside).all()
    texts = texts_of(measured_and_fitted(subject, "here"))
    assert texts[0] == "Other layers: 12 points, too few to hold any out"
    assert "Too few points to hold any out" in texts


def test_errors_far_out_are_drawn_at_the_edge_and_counted() -> None:
    table = decode_columns(*grid(BATCHES, CONTEXTS))
    seconds = decode_seconds(table)
    seconds[20] *= 3.0
    subject = subjects(
        a_profile(op_table("decode_attention", "bfloat16", table, seconds))
    )[0][0]
    below = measured_and_fitted(subject, "here").axes[1]
    top = below.get_ylim()[1] / 1.06
    drawn = np.concatenate(
        [np.asarray(line.get_ydata(), dtype=float) for line in below.get_lines()]
    )
    assert np.nanmax(np.abs(drawn)) == pytest.approx(top)
    beyond = sum(
        int((np.abs(errors) > top).sum())
        for errors in (subject.errors.inside, subject.errors.beyond)
    )
    assert beyond
    (note,) = [text for text in markers(below) if "drawn at the edge" in text]
    assert note == f"{beyond:,} errors above {top:.0f} %, drawn at the edge"


@pytest.mark.slow
def test_many_points_are_drawn_as_quantiles() -> None:
    rng = np.random.default_rng(0)
    subject = subjects(
        a_profile(
            *(
                op_table(
                    "layer", "bfloat16", {"tokens": np.arange(1, 301)},
                    np.arange(1, 301) * 1e-7 * rng.lognormal(0, 0.02, 300),
                    constants={"layer": f"layer {i}"},
                )
                for i in range(5)
            )
        )
    )[0][0]  # fmt: skip
    below = measured_and_fitted(subject, "here").axes[1]
    labels = below.get_legend_handles_labels()[1]
    assert "p5 to p95 held out" in labels
    assert "p25 to p75" in labels
    assert max(len(line.get_xdata()) for line in below.get_lines()) < 30


def test_matrices_are_curves_of_a_product(drawn: dict[str, Subject]) -> None:
    above, below = measured_and_fitted(drawn["gemm"], "here").axes
    assert markers(above) == ["4096 x 4096", "6144 x 4096"]
    assert below.get_xlabel() == "tokens of the step (m)"


def test_descriptors_follow_the_blocks_of_a_swap() -> None:
    (subject,), _ = subjects(a_profile(swap_table()))
    family = subject.leading()
    columns = family.columns(
        list(subject.columns), family.curves[0], np.array([2.0, 8.0])
    )
    assert columns["num_descriptors"].tolist() == [8, 32]
    above = measured_and_fitted(subject, "here").axes[0]
    assert markers(above) == ["4 KiB", "32 KiB", "256 KiB"]
    assert texts_of(above.get_figure())[0].startswith("Swap (loop): ")


def test_the_roofline_places_a_known_call(drawn: dict[str, Subject]) -> None:
    (cloud,) = clouds_of(drawn["gemm"])
    own = np.flatnonzero(
        (drawn["gemm"].columns["m"] == 1024) & (drawn["gemm"].columns["n"] == 4096)
    )
    flops = 2.0 * 1024 * 4096 * 4096
    moved = 2 * (1024 * 4096 * 2 + 4096 * 4096)
    assert cloud.flops[own] == pytest.approx([flops])
    assert cloud.intensity[own] == pytest.approx([flops / moved])
    seconds = 4e-6 + 2 * 4096 * 4096 / 4e12 + flops / (0.7 * DEVICE.flops_per_s)
    assert cloud.rate[own] == pytest.approx([flops / seconds])


def test_measured_ceilings_leave_out_what_the_cache_holds(
    drawn: dict[str, Subject],
) -> None:
    """Of decode: batch 128 at 16,384 tokens reads 8.6 GB, the longest of all."""
    clouds = [cloud for subject in drawn.values() for cloud in clouds_of(subject)]
    keys = 128 * 16384 * 8 * 128 * 4
    expected = keys / (1e-5 + 2e-8 * 128 * 8 + keys / 3.84e12)
    assert best_bandwidth(clouds, DEVICE) == pytest.approx(expected, rel=1e-6)
    flops = 2.0 * 4096 * 6144 * 4096
    seconds = 4e-6 + 2 * 6144 * 4096 / 4e12 + flops / (0.7 * DEVICE.flops_per_s)
    assert best_flops(clouds, 16) == pytest.approx(flops / seconds, rel=1e-6)
    assert best_flops(clouds, 8) is None


def test_the_roofline_shows_both_roofs_and_each_operation(
    profile: Profile, drawn: dict[str, Subject]
) -> None:
    figure = roofline_placement(profile, list(drawn.values()), source_line(profile))
    (axes,) = figure.axes
    labels = axes.get_legend_handles_labels()[1]
    assert {"Decode attention", "GEMM, 16 bits", "datasheet", "best measured"} <= set(
        labels
    )
    assert axes.get_ylabel() == "achieved TFLOP/s"
    roof = next(line for line in axes.get_lines() if line.get_label() == "datasheet")
    x, y = (np.asarray(data, dtype=float) for data in roof.get_data())
    assert y.max() == pytest.approx(DEVICE.flops_per_s / 1e12)
    assert y[0] / x[0] == pytest.approx(DEVICE.bandwidth_bytes_per_s / 1e12)
    assert texts_of(figure)[:2] == [
        "Roofline: at best 3.79 TB/s (79% of the datasheet) and 656 TFLOP/s in 16 bits "
        "(66%)",
        "h200_sxm; imported from synthetic",
    ]


def test_a_profile_of_transfers_has_nothing_to_place() -> None:
    profile = a_profile(swap_table())
    figure = roofline_placement(profile, subjects(profile)[0], "here")
    assert "No table of attention or matrix products" in texts_of(figure)


def test_maps_show_the_points_and_where_a_fit_extrapolates(
    drawn: dict[str, Subject],
) -> None:
    subject = drawn["decode_attention"]
    (panel,) = panels_of([subject])
    assert panel == (subject, ("context", "batch"))
    (axes,) = coverage([panel], "here").axes
    assert axes.get_title(loc="left") == "Decode attention: 48 of 48 points"
    assert axes.get_xlabel() == axis_label("context")
    assert axes.get_ylabel() == "sequences"
    (points,) = axes.get_lines()
    assert len(points.get_xdata()) == len(BATCHES) * len(CONTEXTS)
    low, high = axes.get_xlim()
    assert low <= 512
    assert high >= 4 * 16384


def test_rows_stand_for_what_has_no_order(drawn: dict[str, Subject]) -> None:
    (axes,) = coverage(panels_of([drawn["gemm"]]), "here").axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert labels == ["4096 x 4096", "6144 x 4096"]


def test_a_past_of_nothing_has_a_place_on_its_map() -> None:
    query, past = grid([16, 64, 256, 1024], [0, 512, 4096])
    axes = {"batch": np.ones(12), "query": query, "past": past}
    constants = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "kv_itemsize": 2}
    seconds = 1e-5 + (query * past + query * query / 2) * 32 * 128 * 4 / 5e14
    table = op_table(
        "prefill_attention", "bfloat16", axes, seconds, constants=constants
    )
    (subject,), _ = subjects(a_profile(table))
    assert [panel[1] for panel in panels_of([subject])] == [("query", "past")]
    (drawn,) = coverage(panels_of([subject]), "here").axes
    ticks = [text.get_text() for text in drawn.get_yticklabels()]
    assert ticks[0] == "0"
    (points,) = drawn.get_lines()
    assert np.asarray(points.get_ydata()).min() == drawn.get_yticks()[0] > 0


def test_everything_is_written_with_its_numbers(tmp_path: Path) -> None:
    profile = a_profile(decode_table(), gemm_table(4096, 4096), swap_table())
    names, left_out = draw_profile(profile, tmp_path / "new" / "f", overwrite=False)
    assert names == [
        "figures/fitted_decode_attention.png",
        "figures/fitted_swap.loop.png",
        "figures/roofline.png",
        "figures/coverage.png",
        "errors.json",
    ]
    assert left_out == ["gemm is not drawn: 7 different shapes, 10 are needed"]
    for name in names[:-1]:
        grey = pixels_of((tmp_path / "new" / "f" / name).read_bytes())
        assert grey.shape == (900, 1600)
        assert grey.std() > 5.0
        edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        assert (edge == 255.0).all(), f"{name} is cut off at its edge"
    numbers = json.loads((tmp_path / "new" / "f" / "errors.json").read_text())
    assert numbers["profile"] == profile.id
    assert numbers["operations"]["decode_attention"]["num_points"] == 48
    draw_profile(profile, tmp_path / "again", overwrite=False)
    for name in names:
        again = (tmp_path / "again" / name).read_bytes()
        assert (tmp_path / "new" / "f" / name).read_bytes() == again


def test_seven_maps_take_two_figures() -> None:
    tables = [decode_table(), swap_table(), *(gemm_table(n, 4096) for n in (64, 128))]
    found, _ = subjects(a_profile(*tables))
    figure = coverage((panels_of(found) * 3)[:NUM_PANELS], "here")
    assert len(figure.axes) == NUM_PANELS
    assert all(axes.get_title(loc="left") for axes in figure.axes)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_profile(a_profile(), tmp_path / "p.json")
    return tmp_path / "p.json"


def test_the_command_writes_a_folder_and_replaces_its_own(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "drawn"
    asked = ["profile", "plot", str(file), "--out", str(out), "--op", "gemm"]
    assert run(asked) == 0
    assert "figures/fitted_gemm.png" in capsys.readouterr().out
    assert run(asked) == 2
    assert "exists already" in capsys.readouterr().err
    assert run([*asked, "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in out.rglob("*.png")) == [
        "coverage.png",
        "fitted_gemm.png",
        "roofline.png",
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--op", "swap"],
            "--op swap is no operation of this profile that is fitted; ",
        ),
        (["--op", "nothing"], "it has decode_attention, gemm"),
    ],
)
def test_mistakes_are_told_in_a_line_and_leave_nothing(
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    said: str,
) -> None:
    asked = ["profile", "plot", str(file), "--out", str(tmp_path / "drawn"), *more]
    assert run(asked) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_of_something_else_is_not_replaced(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    asked = ["profile", "plot", str(file), "--out", str(tmp_path / "mine")]
    assert run([*asked, "--overwrite"]) == 2
    assert "will not be overwritten" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "dear"


def test_too_few_points_of_everything_are_refused(tmp_path: Path) -> None:
    profile = a_profile(gemm_table(64, 64))
    with pytest.raises(UserError, match="10 shapes of one operation at least"):
        draw_profile(profile, tmp_path / "f", overwrite=False)
    assert not (tmp_path / "f").exists()


def test_every_operation_that_is_fitted_can_be_drawn() -> None:
    assert set(LAYOUTS) == set(ESTIMATORS)
    for operation, layout in LAYOUTS.items():
        columns = set(ESTIMATORS[operation].columns)
        named = {layout.along, *sum(layout.by, ()), *sum(layout.maps, ())}
        assert named <= columns


def test_values_are_said_in_units() -> None:
    assert value_text("bytes", 96 << 10) == "96 KiB"
    assert value_text("context", 16384) == "16,384"
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "window": 0}
    assert fixed_label(heads | {"kv_itemsize": 2}, {}) == "32/8 heads of 128, KV of 2 B"


def test_commands_are_found_without_matplotlib() -> None:
    code = "import sys, calibrate.cli.profile; print('matplotlib' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "False\n"
