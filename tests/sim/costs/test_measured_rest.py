"""Swaps, copies, head, other kernels and launches, from the tables of a profile."""

import pytest

from sim.costs import MeasuredCost, RooflineCost
from sim.costs.pricing import batch_total_of
from sim.costs.roofline.graphs import rule_of
from sim.costs.sources import PIECE_LATENCY_S
from sim.costs.transfers import FEWEST_SMALL_PAGES
from sim.errors import ConfigError
from sim.scheduler.generation import GraphRule, SwapRule
from sim.scheduler.generations import OURS
from tests.sim.costs.test_costs import EMPTY, H200, LLAMA_8B, chunk, decodes
from tests.sim.costs.test_measured import entry, write
from tests.sim.costs.test_pricer import (
    GRID,
    assert_columns_are_steps,
    assert_decodes_are_steps,
)

NODES = [1, 64, 4096, 65536]
SIZES = [4096, 32768, 2**21]


def transfer_s(count, size, call_s, rate):
    return 1e-5 + call_s * count + count * size / rate


def transfer_table(call_s, rate, host_s=0.0, **changes):
    def rows(seconds):
        return [[seconds(count, size) for count in NODES] for size in SIZES]

    table = {
        "page_bytes": SIZES,
        "num_descriptors": NODES,
        "time_s": rows(lambda n, size: transfer_s(n, size, call_s, rate)),
        "host_s": rows(lambda n, size: host_s * n),
        "beyond": rows(lambda n, size: int(n == NODES[-1])),
        "interval": [5.0, 10.0],
    }
    return table | changes


TRANSFERS = {
    "loop": {
        "h2d": transfer_table(4e-6, 4e10, 4e-6),
        "d2h": transfer_table(5e-6, 5e10, 5e-6),
    },
    "batch": {
        "h2d": transfer_table(2e-6, 5e9),
        "d2h": transfer_table(2e-7, 5e10, 5e-7),
    },
    "kernel": {"h2d": transfer_table(1e-9, 3e10)},
}
COPY = {
    "block_bytes": [2**20, 2**22],
    "num_blocks": [1, 1024],
    "time_s": [[1e-5, 1e-3], [2e-5, 4e-3]],
    "beyond": [[0, 0], [0, 0]],
    "interval": [5.0, 10.0],
}
TOKENS = {"tokens": [1, 1024], "time_s": [4e-4, 2e-3], "beyond": [0, 0]}
HEAD = {"rows": [1, 512], "time_s": [3e-4, 6e-4], "beyond": [0, 0]}
SAMPLER = {"rows": [1, 512], "time_s": [2e-5, 1e-4], "beyond": [0, 0]}
PARTS = {
    key: table | {"interval": [5.0, 10.0]}
    for key, table in (("elementwise", TOKENS), ("head", HEAD), ("sampler", SAMPLER))
}
FIT = {
    "transfers": TRANSFERS,
    "copy": COPY,
    "interference": {"step_factor": 1.2, "transfer_factor": 1.5, "variant": "loop"},
    "launch": {"eager_s": 5e-6, "graph_s": 1e-6},
}
V0 = {"graph_rule": GraphRule(256)}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("profiles") / "p.json"
    return write(path, entry(LLAMA_8B, **PARTS), **FIT)


def measured(file, **keywords):
    return MeasuredCost(file, model=LLAMA_8B, gpu=H200, **V0 | keywords)


def loaded(count):
    return EMPTY._replace(num_swapped_in_blocks=count)


def stored(count):
    return EMPTY._replace(num_swapped_out_blocks=count)


def test_swaps_are_looked_up_by_pieces_and_their_size(file):
    cost = measured(file)
    # K and V of 32 layers are 64 pieces of 32 KiB a block
    step = cost.step(loaded(64))
    assert step.swap_s == pytest.approx(transfer_s(4096, 32768, 4e-6, 4e10))
    assert cost.step(stored(64)).swap_s == pytest.approx(
        transfer_s(4096, 32768, 5e-6, 5e10)
    )
    assert not step.extrapolated
    assert step.hi_s == pytest.approx(step.total_s + 0.05 * step.swap_s)


def test_sizes_between_rows_and_beyond_them(file):
    halves = measured(file, block_size=24)  # 48 KiB
    assert halves.step(loaded(64)).swap_s == pytest.approx(
        transfer_s(4096, 49152, 4e-6, 4e10)
    )
    assert not halves.step(loaded(64)).extrapolated
    large = measured(file, swap_layout="cross_layer", block_size=32)  # 4 MiB
    assert large.step(loaded(64)).swap_s == pytest.approx(
        2 * transfer_s(64, 2**21, 4e-6, 4e10)
    )
    assert large.step(loaded(64)).extrapolated
    small = measured(file, block_size=1)  # 2 KiB
    assert small.step(loaded(64)).swap_s == pytest.approx(
        transfer_s(4096, 4096, 4e-6, 4e10)
    )
    assert small.step(loaded(64)).extrapolated


def test_the_last_nodes_are_beyond(file):
    cost = measured(file)
    step = cost.step(loaded(512))
    assert step.extrapolated
    assert step.hi_s == pytest.approx(step.total_s + 0.1 * step.swap_s)


def test_small_loads_go_by_the_kernel_in_batches(file):
    batch = measured(file, swap_variant="batch", block_size=8)  # 16 KiB
    assert batch.step(loaded(64)).swap_s == pytest.approx(
        transfer_s(4096, 16384, 1e-9, 3e10)
    )
    assert batch.step(stored(64)).swap_s == pytest.approx(
        4096 * 5e-7 + transfer_s(4096, 16384, 2e-7, 5e10)  # submitted first
    )
    assert FEWEST_SMALL_PAGES <= 64
    large = measured(file, swap_variant="batch")  # 32 KiB
    assert large.step(loaded(64)).swap_s == pytest.approx(
        transfer_s(4096, 32768, 2e-6, 5e9)
    )


def test_a_direction_without_a_table_is_the_datasheets(file):
    cost = measured(file, swap_variant="kernel")
    rest = RooflineCost(model=LLAMA_8B, gpu=H200, swap_variant="kernel")
    assert cost.step(stored(8)).swap_s == rest.step(stored(8)).swap_s
    assert cost.step(stored(8)).extrapolated
    assert not cost.step(loaded(8)).extrapolated


def test_what_runs_beside_the_step_uses_the_measured_factors(file):
    shape = decodes(64, 2048)._replace(num_swapped_out_blocks=4)
    serial, beside = measured(file), measured(file, swap_overlap=True)
    moved_s, host_s = serial.step(shape).swap_s, 5e-6 * 256
    rest_s = moved_s - host_s
    assert rest_s > 0.0
    expected = host_s + rest_s * 1.5 * (1 - 1 / 1.2)
    assert beside.step(shape).swap_s == pytest.approx(expected)
    # no table of the host: everything is beside
    free = measured(file, swap_overlap=True, swap_rule=SwapRule("kernel"))
    assert free.step(loaded(1)._replace(**_fields(64, 2048))).swap_s < moved_s


def _fields(num, context):
    return {"num_decodes": num, "num_decode_context_tokens": num * context}


def test_copies_head_and_kernels_are_looked_up(file):
    cost = measured(file, step_overhead_s=1e-3, request_overhead_s=0.0)
    copies = cost.step(EMPTY._replace(num_copied_blocks=1024))
    # 2 MiB: a third of the way from 1 to 4
    assert copies.copy_s == pytest.approx(1e-3 + (4e-3 - 1e-3) / 3)
    assert not copies.extrapolated
    step = cost.step(decodes(512, 100))
    assert step.head_s == pytest.approx(6e-4 + 1e-4)
    assert step.host_s == pytest.approx(
        1e-3 + 4e-4 + (2e-3 - 4e-4) * 511 / 1023 + _late(step, 512)
    )


def _late(step, num_tokens):
    """Seconds by which 324 launches of 5 us outlast the kernels of a step."""
    kernels_s = 4e-4 + (2e-3 - 4e-4) * (num_tokens - 1) / 1023
    gpu_s = step.gemm_s + step.decode_attention_s + step.prefill_attention_s
    return max(0.0, 324 * 5e-6 - gpu_s - step.head_s - kernels_s)


def test_launches_bound_steps_that_are_no_graphs(tmp_path):
    slow = FIT | {"launch": {"eager_s": 1e-4}}
    file = write(tmp_path / "p.json", entry(LLAMA_8B, **PARTS), **slow)
    launches_s = (10 * 32 + 4) * 1e-4
    for num, rule, launched in (
        (256, GraphRule(256), False),
        (257, GraphRule(256), True),
        (1, GraphRule(), True),
    ):
        cost = measured(file, graph_rule=rule, request_overhead_s=0.0)
        total_s = cost.step(decodes(num, 16)).total_s
        assert (total_s == pytest.approx(launches_s + 1.5e-3)) is launched
    prompt = measured(file).step(chunk(16)).total_s
    assert prompt == pytest.approx(launches_s + 1.5e-3 + 5e-6)
    v1 = measured(file, graph_rule=OURS["v1"].graphs)
    assert v1.step(chunk(16)).total_s < launches_s
    assert measured(file).step(EMPTY).total_s == 1.5e-3


@pytest.mark.parametrize("parts", [PARTS, {}])
def test_graphs_in_pieces_take_longer_than_the_tables_of_kernels_say(tmp_path, parts):
    """With element-wise kernels of a table, and without."""
    file = write(tmp_path / "p.json", entry(LLAMA_8B, **parts))
    cut, whole = (rule_of(OURS["v1"].graphs, each) for each in ("0.10", "0.11"))
    more_s = [
        measured(file, graph_rule=rule, launch_s=0.0).step(shape).total_s
        - measured(file, graph_rule=whole, launch_s=0.0).step(shape).total_s
        for rule in (cut, whole)
        for shape in (decodes(8, 512), chunk(512), chunk(513))
    ]
    pieces_s = 32 * PIECE_LATENCY_S
    assert more_s == pytest.approx([pieces_s, pieces_s, 0.0, 0.0, 0.0, 0.0])
    told = measured(file, graph_rule=cut, piece_latency_s=1e-5).describe()
    assert told["parameters"]["piece_latency_s"]["value"] == 1e-5


@pytest.mark.parametrize("eager_s", [0.0, 5e-6, 3e-5])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_ways_to_price_agree(tmp_path, eager_s, overlap):
    fit = FIT | {"launch": {"eager_s": eager_s}}
    fit["step_correction"] = {"factor": 1.07, "num_steps": 12}
    file = write(tmp_path / "p.json", entry(LLAMA_8B, **PARTS), **fit)
    v1 = OURS["v1"].graphs
    for rule in (GraphRule(64), v1, rule_of(v1, "0.10")):
        cost = measured(file, swap_overlap=overlap, graph_rule=rule)
        assert_columns_are_steps(cost, GRID)
        assert_decodes_are_steps(cost, 77, range(77 * 16 - 3, 77 * 16 + 3))
        assert_decodes_are_steps(cost, 7, range(7, 7 * 100, 7))
        for shape in GRID:
            step = cost.step(shape)
            assert step.total_s == sum(step.parts) > 0.0
            assert 0.0 < step.lo_s <= step.total_s <= step.hi_s
            if not any(shape[6:]):
                assert batch_total_of(cost)(*shape[:6]) == step.total_s


def test_kernels_behind_the_launches_widen_nothing(tmp_path):
    """A step that waits for its launches gets no shorter when kernels do."""
    bounds = {}
    for eager_s in (0.0, 2e-5, 1e-4):
        fit = FIT | {"launch": {"eager_s": eager_s}}
        file = write(tmp_path / f"{eager_s}.json", entry(LLAMA_8B, **PARTS), **fit)
        bounds[eager_s] = measured(file, graph_rule=GraphRule()).step(decodes(8, 512))
    free, near, far = bounds.values()
    assert far.lo_s == far.total_s == far.hi_s
    launches_s = (10 * 32 + 4) * 2e-5
    host_s = 1.5e-3 + 8 * 5e-6
    assert near.lo_s == pytest.approx(launches_s + host_s)
    assert near.hi_s == pytest.approx(max(free.hi_s, launches_s + host_s))


def test_a_correction_multiplies_what_the_gpu_does(tmp_path):
    plain = write(tmp_path / "a.json", entry(LLAMA_8B))
    more = write(tmp_path / "b.json", entry(LLAMA_8B), step_correction={"factor": 1.25})
    shape = decodes(64, 8192)
    one, other = (measured(file).step(shape) for file in (plain, more))
    for part in ("gemm_s", "decode_attention_s", "head_s"):
        assert getattr(other, part) == pytest.approx(1.25 * getattr(one, part))
    host_s = 1.5e-3 + 64 * 5e-6
    assert other.host_s - host_s == pytest.approx(1.25 * (one.host_s - host_s))
    assert measured(more).describe()["step_correction"] == {"factor": 1.25}


def test_describe_says_what_was_measured(file):
    rest = measured(file).describe()["rest"]
    assert rest["measured"] == ["copy", "elementwise", "head", "launches", "sampler"]
    assert "loop.d2h" in rest["swaps_measured"]
    assert rest["swap_step_factor"] == 1.2


BAD = {
    "rows": ("transfers", {"loop": {"h2d": transfer_table(0, 1e9, page_bytes=[1, 2])}}),
    "sizes": (
        "transfers",
        {"loop": {"h2d": transfer_table(0, 1e9, page_bytes=[3, 2, 1])}},
    ),
    "descending": (
        "transfers",
        {"loop": {"d2h": transfer_table(0, 1e9, num_descriptors=[4, 3, 2, 1])}},
    ),
    "no time": ("copy", COPY | {"time_s": [[0.0, 1.0], [1.0, 1.0]]}),
    "no rows": ("copy", {"block_bytes": [1]}),
    "factor": ("interference", {"step_factor": 0.9}),
    "launch": ("launch", {"eager_s": -1.0}),
    "correction": ("step_correction", {"factor": 9.0}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_tables_are_refused(tmp_path, name):
    key, table = BAD[name]
    file = write(tmp_path / "p.json", entry(LLAMA_8B), **{key: table})
    with pytest.raises(ConfigError, match=r"fit .*again") as caught:
        measured(file)
    assert "\n" not in str(caught.value)


def test_graphs_are_those_of_the_release():
    replays = {
        name: (
            generation.graphs.replays(256, 0),
            generation.graphs.replays(257, 0),
            generation.graphs.replays(256, 1),
        )
        for name, generation in OURS.items()
    }
    assert replays["cacheflow"] == (False, False, False)
    assert replays["v0_2"] == replays["v0"] == (True, False, False)
    assert replays["v1"] == (True, True, True)
