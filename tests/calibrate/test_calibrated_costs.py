"""From a calibration to the price of a step: what was timed is what a step costs."""

import json

import numpy as np
import pytest

from calibrate.estimators.points import aggregated
from calibrate.harness.dry_run import ideal_s
from calibrate.measurement import Point, curve
from calibrate.points import chosen, parse_variants, points_of
from calibrate.tables.fits import fit_operations
from calibrate.tables.steps import fit_steps
from calibrate.tabulate import measured_ranks, tabulated, with_tables
from calibrate.writing import build_profile, op_table, write_profile
from sim.cli.main import run
from sim.costs import MeasuredCost
from sim.costs.measured.profile import parse_profile
from sim.errors import ConfigError, UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.scheduler.batch import BatchShape
from tests.calibrate.calibrations import calibration
from tests.calibrate.synthetic import DEVICE

LLAMA_8B = load_model("meta-llama/Llama-3.1-8B")
H200 = load_gpu("h200_sxm")
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}


@pytest.fixture(scope="module")
def fitted():
    return with_tables(calibration(), calibration(), LLAMA_8B)


@pytest.fixture(scope="module")
def cost(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    write_profile(fitted, path)
    return MeasuredCost(str(path), model=LLAMA_8B, gpu=H200)


def timed(operation, *values):
    """Seconds that the dry run has for a call of attention."""
    return ideal_s(Point(curve(operation, "any", "bfloat16", HEADS), values))


def part(step):
    return step.prefill_attention_s / 32


def test_decodes_cost_what_was_timed(cost):
    for batch, context in ((64, 2048), (1, 512), (256, 512), (48, 3000)):
        step = cost.step(BatchShape(batch, batch * context, 0, 0, 0, 0))
        expected = timed("decode_attention", batch, batch * context, context)
        assert step.decode_attention_s / 32 == pytest.approx(expected, rel=0.05)
        assert not step.extrapolated


@pytest.mark.parametrize(
    ("query", "past"), [(2048, 0), (256, 8192), (1024, 1024), (2048, 32768)]
)
def test_a_chunk_with_a_past_costs_what_was_timed(cost, query, past):
    pairs = query * past + query * (query + 1) // 2
    step = cost.step(BatchShape(0, 0, 1, query, query + past, pairs))
    expected = timed("prefill_attention", query, past)
    assert part(step) == pytest.approx(expected, rel=0.03)
    assert not step.extrapolated


def test_a_past_that_was_not_timed_says_so(cost):
    query, past = 1024, 400_000
    pairs = query * past + query * (query + 1) // 2
    assert cost.step(BatchShape(0, 0, 1, query, query + past, pairs)).extrapolated


def test_a_chunk_beside_decodes_costs_what_was_timed(cost):
    query, past, batch, context = 2048, 1024, 32, 512
    pairs = query * past + query * (query + 1) // 2
    step = cost.step(BatchShape(batch, batch * context, 1, query, query + past, pairs))
    both = (step.prefill_attention_s + step.decode_attention_s) / 32
    expected = timed("mixed_attention", query, past, batch, batch * context)
    assert both == pytest.approx(expected, rel=0.05)


def test_a_calibration_is_of_its_ranks_and_of_our_gpu(fitted):
    assert measured_ranks(calibration()) == (1,)
    assert fitted.fit["gpu"] == "h200_sxm"
    entry = fitted.fit["models"][0]
    assert {"elementwise", "head", "sampler", "prefill_past", "mixed"} <= entry.keys()
    assert set(fitted.fit["transfers"]) == {"loop", "batch", "kernel"}
    assert set(fitted.fit["transfers"]["loop"]) == {"h2d", "d2h"}
    assert fitted.fit["copy"]["block_bytes"] == [2 * 32 * 32768]
    # 6 us a launch on the host, and no host time of whole steps
    assert fitted.fit["launch"]["eager_s"] == pytest.approx(6e-6, rel=0.05)
    assert "host" not in fitted.fit
    assert fitted.fit["interference"]["step_factor"] == pytest.approx(1.06, rel=0.02)


def test_swaps_cost_what_was_timed(fitted):
    for variant, call_s in (("loop", 2.5e-6), ("batch", 0.5e-6)):
        table = fitted.fit["transfers"][variant]["h2d"]
        size = table["page_bytes"].index(32768)
        place = table["num_descriptors"].index(1024)
        wire_s = 1024 * 32768 / 64e9 / 0.85
        expected = 5e-6 + np.hypot(wire_s, 6e-6 + call_s * 1024)
        assert table["time_s"][size][place] == pytest.approx(expected, rel=0.06)
        host_s = 6e-6 + call_s * 1024
        assert table["host_s"][size][place] == pytest.approx(host_s, rel=0.06)
        assert (np.diff(np.array(table["time_s"]), axis=0) >= 0).all()
        assert (np.diff(np.array(table["time_s"]), axis=1) >= 0).all()


def test_a_quick_calibration_is_enough(tmp_path):
    quick = calibration("quick")
    found = with_tables(quick, quick, LLAMA_8B)
    write_profile(found, tmp_path / "p.json")
    cost = MeasuredCost(str(tmp_path / "p.json"), model=LLAMA_8B, gpu=H200)
    step = cost.step(BatchShape(64, 64 * 2048, 0, 0, 0, 0))
    expected = timed("decode_attention", 64, 64 * 2048, 2048)
    assert step.decode_attention_s / 32 == pytest.approx(expected, rel=0.05)
    assert set(found.fit["transfers"]) == {"loop", "batch", "kernel"}


def test_of_several_variants_the_fastest_is_taken():
    def table(variant, factor):
        axes = {"batch": [1, 64, 64], "context": [2048, 2048, 8192]}
        constants = {key: HEADS[key] for key in ("num_heads", "num_kv_heads")}
        times = [1e-5, 1e-4 * factor, 1e-3 / factor]
        return op_table(
            "decode_attention", "bfloat16", axes, times,
            variant=variant, constants=constants,
        )  # fmt: skip

    provenance = {"date": "2026-01-01", "device": DEVICE.to_json(), "source": "a test"}
    found = build_profile("imported", provenance, [table("a", 1.0), table("b", 0.8)])
    tables = found.tables("decode_attention")
    # at 64 sequences of 2,048 tokens, whatever holds elsewhere
    assert [t.variant for t in chosen("decode_attention", tables, {})] == ["b"]
    wanted = {"decode_attention": "a"}
    assert [t.variant for t in chosen("decode_attention", tables, wanted)] == ["a"]
    with pytest.raises(UserError, match="no decode_attention of variant 'c'; it has a"):
        chosen("decode_attention", tables, {"decode_attention": "c"})
    (points,) = points_of(found)
    assert points.variants == ("b",)
    assert sorted(points.time_s) == pytest.approx([1e-5, 8e-5, 1.25e-3])


def test_a_variant_is_named_by_its_operation():
    assert parse_variants(["gemm=torch"]) == {"gemm": "torch"}
    for text in ("gemm", "gemm=", "swap=loop"):
        with pytest.raises(UserError, match="--variant must be OPERATION=VARIANT"):
            parse_variants([text])


@pytest.mark.slow
def test_variants_differ_in_the_tables():
    slow, fast = (
        tabulated(calibration(), LLAMA_8B, variants={"decode_attention": name})
        for name in ("split_kv", "paged_v2")
    )
    assert slow["variants"]["decode_attention"] == ["split_kv"]
    assert fast["variants"]["decode_attention"] == ["paged_v2"]


def test_layers_of_another_shape_are_not_taken():
    small = load_model("meta-llama/Llama-3.2-1B")
    entry = tabulated(calibration(), small)["models"][0]
    assert "elementwise" not in entry
    assert "sampler" not in entry
    assert entry["tokens"]["beyond"] == [1] * len(entry["tokens"]["beyond"])


# -- whole steps --------------------------------------------------------------------


def whole_steps(kernels_s, factor, step_s, request_s, count=16):
    random = np.random.default_rng(3)
    steps = []
    # contexts differ, or kernels could not be told from a host's time a request
    for batch, context in random.integers(1, [257, 9000], (count, 2)).tolist():
        shape = BatchShape(batch, batch * context, 0, 0, 0, 0)
        seconds = factor * kernels_s(shape) + step_s + request_s * batch
        named = {"num_decodes": batch, "num_decode_context_tokens": batch * context}
        steps.append({"shape": named, "p50_s": seconds * random.normal(1.0, 0.002)})
    return steps


def test_whole_steps_give_host_time_and_the_correction(cost, fitted, tmp_path):
    write_profile(fitted, tmp_path / "plain.json")
    idle = {"step_overhead_s": 1e-9, "request_overhead_s": 0.0}
    plain = MeasuredCost(str(tmp_path / "plain.json"), model=LLAMA_8B, gpu=H200, **idle)

    def kernels_s(shape):
        return plain.step(shape).total_s

    def default_s(shape):
        return cost.step(shape).total_s

    steps = whole_steps(kernels_s, 1.08, 4e-4, 3e-6)
    found = fit_steps(steps, kernels_s, default_s)
    assert found.factor == pytest.approx(1.08, rel=0.02)
    assert found.step_overhead_s == pytest.approx(4e-4, rel=0.25)
    assert found.request_overhead_s == pytest.approx(3e-6, rel=0.25)
    assert found.after_percent < 0.5 < found.before_percent
    assert found.num_steps == 16
    assert fit_steps(steps[:5], kernels_s, default_s) is None
    body = calibration().body
    kept = build_profile("measured", body["provenance"], body["ops"], steps=steps)
    fit = with_tables(kept, kept, LLAMA_8B).fit
    assert fit["step_correction"]["factor"] == pytest.approx(1.08, rel=0.02)
    assert fit["host"]["step_overhead_s"] == pytest.approx(4e-4, rel=0.25)
    write_profile(with_tables(kept, kept, LLAMA_8B), tmp_path / "p.json")
    corrected = MeasuredCost(str(tmp_path / "p.json"), model=LLAMA_8B, gpu=H200)
    for step in steps:
        shape = BatchShape(*step["shape"].values(), 0, 0, 0, 0)
        assert corrected.step(shape).total_s == pytest.approx(step["p50_s"], rel=0.02)
    assert corrected.describe()["step_correction"] == fit["step_correction"]


def test_a_correction_stays_within_its_bounds():
    def kernels_s(shape):
        return 1e-3 + 1e-4 * shape.num_decodes

    steps = whole_steps(kernels_s, 10.0, 0.0, 0.0)
    assert fit_steps(steps, kernels_s, kernels_s).factor <= 2.0


def test_a_step_of_unknown_fields_is_refused():
    for step in ({"shape": {"num_turtles": 1}, "p50_s": 1.0}, {"shape": {}}, 7):
        with pytest.raises(UserError, match="must hold shape"):
            fit_steps([step] * 6, lambda _: 1.0, lambda _: 1.0)


# -- the command --------------------------------------------------------------------


def test_a_calibration_ends_fitted(tmp_path, capsys):
    out = tmp_path / "dry.json"
    command = ["calibrate", "--model", LLAMA_8B.name, "--dry-run", "--preset", "quick"]
    assert run([*command, "--out", str(out), "--quiet"]) == 0
    assert "of made-up times" in capsys.readouterr().err
    profile = parse_profile(out.read_text())
    assert profile.kind == "dry-run"
    assert profile.fit["models"][0]["model"] == LLAMA_8B.name
    with pytest.raises(ConfigError, match="of a dry run, whose times are made up"):
        MeasuredCost(str(out), model=LLAMA_8B, gpu=H200)
    assert run(["profile", "show", str(out)]) == 0
    shown = capsys.readouterr()
    assert "warning: of a dry run" in shown.err
    assert "host time: the datasheet's default" in shown.out
    assert run(["profile", "validate", str(out)]) == 2
    assert "made up: no cost model takes them" in capsys.readouterr().err


def test_a_part_of_a_calibration_stays_unfitted_and_says_so(tmp_path, capsys):
    out = tmp_path / "dry.json"
    command = ["calibrate", "--model", LLAMA_8B.name, "--dry-run", "--ops", "swap"]
    assert run([*command, "--preset", "quick", "--out", str(out), "--quiet"]) == 0
    assert "no points of decode_attention" in capsys.readouterr().err
    assert json.loads(out.read_text())["fit"] == {}


def test_several_points_of_a_shape_count_once():
    fits = fit_operations(calibration("quick"))
    points = fits.points["decode_attention"]
    columns, time_s = aggregated(points.columns, points.time_s)
    assert len(time_s) == len(np.unique(np.stack(list(columns.values())), axis=1).T)


QWEN = load_model("Qwen/Qwen3-30B-A3B")
EXPERTS = {"hidden_size": 2048, "num_experts": 128, "experts_per_token": 8}


def experts_s(variant, dtype, constants, *values):
    """Seconds that the dry run has for a layer of routed experts."""
    at = curve("routed_experts", variant, dtype, constants)
    return ideal_s(Point(at, values))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """The cost of a mixture that was calibrated, and the seconds of its products."""
    whole = calibration("brief", QWEN.name)
    fitted = with_tables(whole, whole, QWEN)
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    write_profile(fitted, path)
    tokens = fitted.fit["models"][0]["tokens"]
    products = dict(zip(tokens["tokens"], tokens["gemm_s"], strict=True))
    return MeasuredCost(str(path), model=QWEN, gpu=H200), products


def test_experts_cost_what_was_timed(mixture):
    """Steps of a mixture that was calibrated are measured, experts and routers too."""
    cost, products = mixture
    sizes = EXPERTS | {"intermediate_size": 768}
    for batch, touched in ((1, 8), (16, 82.4), (64, 125.9), (256, 128)):
        step = cost.step(BatchShape(batch, batch * 2048, 0, 0, 0, 0))
        assert not step.extrapolated
        low, high = (
            experts_s("fused_moe", "bfloat16", sizes, batch, number)
            for number in (int(touched), int(touched) + (touched % 1 > 0))
        )
        expected = 48 * (low + (high - low) * (touched % 1))
        found = step.gemm_s - products[batch]
        assert found == pytest.approx(expected, rel=0.03)


def test_a_profile_without_experts_prices_them_from_the_datasheet(tmp_path):
    whole = calibration("brief", QWEN.name)
    body = json.loads(json.dumps(whole.body))
    ops = [op for op in body["ops"] if not op["operation"].startswith("moe")]
    assert len(ops) < len(body["ops"])
    bare = build_profile(whole.kind, whole.provenance, ops)
    path = tmp_path / "p.json"
    write_profile(with_tables(bare, bare, QWEN), path)
    cost = MeasuredCost(str(path), model=QWEN, gpu=H200)
    assert cost.step(BatchShape(16, 16 * 2048, 0, 0, 0, 0)).extrapolated


def test_the_faster_kernel_of_experts_is_taken_and_another_can_be():
    whole = calibration("quick", "openai/gpt-oss-20b")
    tables = [table for table in whole.ops if table.operation == "moe"]
    assert {table.variant for table in tables} == {"matmul_ogs", "marlin"}
    assert {table.variant for table in chosen("moe", tables, {"moe": "marlin"})} == {
        "marlin"
    }
    assert len({table.variant for table in chosen("moe", tables, {})}) == 1
    assert parse_variants(["moe=marlin"]) == {"moe": "marlin"}


def test_routers_are_a_layer_of_mixtures_only():
    whole = calibration("brief", QWEN.name)
    (router,) = [t for t in whole.tables("layer") if t.constants["layer"] == "router"]
    without = [
        op for op in whole.body["ops"] if op["constants"].get("layer") != "router"
    ]
    bare = build_profile(whole.kind, whole.provenance, without)
    tables = [
        tabulated(profile, QWEN)["models"][0]["elementwise"]
        for profile in (whole, bare)
    ]
    place = tables[0]["tokens"].index(64)
    more_s = tables[0]["time_s"][place] - tables[1]["time_s"][place]
    measured = router.quantiles["p50_s"][router.axes["tokens"].index(64)]
    assert more_s == pytest.approx(48 * measured, rel=0.02)
