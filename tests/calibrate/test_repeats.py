"""The error that no fit can be below, and decodes of uneven lengths."""

import numpy as np
import pytest

from calibrate.fit_report import EVEN, SKEWED, fit_report, floor_percent, uneven_decodes
from calibrate.importers.llmservingsim import import_llmservingsim
from calibrate.points import points_of
from calibrate.writing import build_profile, op_table, write_profile
from sim.cli.main import run
from tests.calibrate.synthetic import DEVICE, decode_columns, decode_seconds, grid
from tests.shared import shared

PROVENANCE = {"date": "2026-01-01", "device": DEVICE.to_json(), "source": "a test"}
CONSTANTS = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "kv_itemsize": 2,
    "window": 0,
}
TABLE = decode_columns(*grid([16, 64, 256], [2048, 8192, 16384, 32768]))


def decodes(noise, repeats=1, spread=None):
    """Even decodes, each so often, with normal noise and a p10 to p90 of `spread`."""
    random = np.random.default_rng(7)
    axes = {key: np.tile(TABLE[key], repeats) for key in ("batch", "context")}
    times = np.tile(decode_seconds(TABLE), repeats)
    times = times * (1.0 + random.normal(0.0, noise, len(times)))
    table = op_table("decode_attention", "bfloat16", axes, times, constants=CONSTANTS)
    if spread is not None:
        half = spread / 2.0
        table["quantiles"] |= {
            "p10_s": [float(t * (1 - half)) for t in table["quantiles"]["p50_s"]],
            "p90_s": [float(t * (1 + half)) for t in table["quantiles"]["p50_s"]],
        }
    return table


def floor_of(table):
    (points,) = points_of(build_profile("imported", PROVENANCE, [table]))
    return floor_percent(points)


@pytest.mark.parametrize("repeats", [2, 5])
def test_repeats_say_how_far_one_measurement_is_off(repeats):
    # the mean distance of a normal variable from its mean is 0.8 deviations
    tables = decodes(0.05, repeats=repeats * 20)
    assert floor_of(tables) == pytest.approx(4.0, rel=0.1)
    assert floor_of(decodes(0.0, repeats=repeats)) == 0.0


def test_quantiles_say_it_where_nothing_was_repeated():
    assert floor_of(decodes(0.0)) is None
    # p10 to p90 of a normal distribution are 2.56 deviations
    assert floor_of(decodes(0.0, spread=0.1282)) == pytest.approx(4.0, rel=0.01)
    # repeats say more than the calls of one point
    assert floor_of(decodes(0.0, repeats=2, spread=0.1)) == 0.0


def skewed(variant="default", slower=1.1):
    num_seqs, short = np.array([16, 64, 64]), np.array([2048, 4096, 8192])
    total = num_seqs * short
    even = decode_columns(num_seqs, short)
    axes = {
        "num_seqs": num_seqs,
        "context_tokens": total,
        "longest_context_tokens": total // 2,
    }
    seconds = decode_seconds(even) * slower
    return op_table(
        SKEWED, "bfloat16", axes, seconds, variant=variant, constants=CONSTANTS
    )


def test_uneven_decodes_are_judged_by_the_fit_of_even_ones(tmp_path, capsys):
    profile = build_profile("imported", PROVENANCE, [decodes(0.0), skewed()])
    row = fit_report(profile).operations[SKEWED]
    # a tenth slower than even ones of the same sum: 1 / 1.1 of it is predicted
    assert row.n == 3
    assert row.mape_inside == pytest.approx(100 * (1 - 1 / 1.1), abs=1.0)
    assert row.bias == pytest.approx(-row.mape_inside)
    only = fit_report(profile, only=("decode_attention",)).operations
    assert set(only) == {"decode_attention"}
    write_profile(profile, tmp_path / "p.json")
    assert run(["profile", "fit", str(tmp_path / "p.json")]) == 0
    out = capsys.readouterr().out
    assert "floor" in out
    assert SKEWED in out


def test_uneven_decodes_of_the_fitted_variant_are_taken():
    ops = [decodes(0.0), skewed(), skewed("other", slower=3.0)]
    profile = build_profile("imported", PROVENANCE, ops)
    (points,) = points_of(profile)
    found = uneven_decodes(profile, points)
    assert found.points.variants == ("default",)
    assert len(found.points.time_s) == 3
    assert found.even_s is None
    assert uneven_decodes(profile, None) is None


def test_even_decodes_timed_beside_uneven_ones_are_what_they_are_compared_with():
    # both took three times as long as the table of even ones says
    twin = skewed(slower=3.0) | {"operation": EVEN}
    ops = [decodes(0.0), skewed(slower=3.3), twin]
    row = fit_report(build_profile("imported", PROVENANCE, ops)).operations[SKEWED]
    assert row.mape_inside == pytest.approx(100 * (1 - 1 / 1.1))


def test_published_uneven_decodes():
    folder = shared("profiles/llmservingsim/RTXPRO6000/Llama-3.1-8B")
    report = fit_report(import_llmservingsim(folder), only=(SKEWED,))
    row = report.operations[SKEWED]
    assert row.n == 327
    assert row.mape_inside == pytest.approx(3.7, abs=0.05)
