"""Descriptions of traces, in the figures that are published beside them."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from tests.workloads.analysis.plain_caches import request
from tests.workloads.shared_traces import (
    AZURE_CODE,
    AZURE_CONV,
    MOONCAKE,
    SHAREGPT,
    shared_trace,
)
from workloads.analysis import Description, describe, description
from workloads.analysis.description import (
    arrival_statistics,
    rank_correlation,
    window_counts,
)
from workloads.analysis.sharing import own_block_size
from workloads.errors import WorkloadError
from workloads.requests.columns import RequestColumns
from workloads.traces import (
    AzureTraceReader,
    LlmServingSimTraceReader,
    MooncakeTraceReader,
    TraceReader,
)
from workloads.workload import TraceWorkload


def described(reader: TraceReader) -> Description:
    return describe(TraceWorkload(reader).requests())


def published(found: Description) -> list[str]:
    """Return the figures as traces/README.md prints them."""
    a, p, o = found.arrivals, found.prompts, found.outputs
    peak = "-" if a.peak_rate is None else f"{a.peak_rate:.2f}"
    return [
        f"{a.num_requests:,}",
        f"{a.span_s:,.1f}",
        f"{a.mean_rate:.4g}",
        peak,
        f"{a.gap_cv:.3g}",
        f"{p.mean:.1f} / {p.p50:g} / {p.p99:.0f} / {p.max}",
        f"{o.mean:.1f} / {o.p50:g} / {o.p99:.0f} / {o.max}",
    ]


def test_azure_code() -> None:
    found = described(AzureTraceReader(shared_trace(AZURE_CODE)))
    assert published(found) == [
        "8,819", "3,435.9", "2.566", "10.53", "13.2",
        "2047.8 / 1469 / 7436 / 7437", "27.9 / 13 / 251 / 1899",
    ]  # fmt: skip
    assert found.sharing == ()
    assert found.sessions is None


def test_azure_conversation() -> None:
    found = described(AzureTraceReader(shared_trace(AZURE_CONV)))
    assert published(found) == [
        "19,366", "3,501.7", "5.53", "8.45", "1.09",
        "1154.7 / 1020 / 4142 / 14050", "211.1 / 129 / 601 / 1000",
    ]  # fmt: skip
    # As the preset of this trace says.
    assert found.arrivals.dispersion["60"] == pytest.approx(16.1, abs=0.05)


def test_mooncake() -> None:
    found = described(MooncakeTraceReader(shared_trace(MOONCAKE)))
    assert published(found) == [
        "12,031", "3,537.0", "3.401", "4.12", "3.03",
        "12035.1 / 6909 / 85400 / 126195", "342.6 / 350 / 1119 / 2000",
    ]  # fmt: skip
    pieces, blocks = (sharing.statistics for sharing in found.sharing)
    assert pieces.block_size == 512
    assert (pieces.num_blocks, pieces.num_distinct_blocks) == (288_500, 182_790)
    assert f"{pieces.block_hit_rate:.2%}" == "36.64%"
    assert f"{pieces.token_hit_rate:.2%}" == "37.36%"
    assert (pieces.num_requests_hit, pieces.num_requests) == (12_030, 12_031)
    assert blocks.block_size == 16
    assert blocks.num_hit_tokens <= pieces.num_hit_tokens


def test_sharegpt() -> None:
    found = described(LlmServingSimTraceReader(shared_trace(SHAREGPT)))
    assert published(found) == [
        "300", "29.1", "10.26", "-", "0.942",
        "857.5 / 731.5 / 2765 / 3998", "652.5 / 632 / 784 / 1021",
    ]  # fmt: skip
    (blocks,) = (sharing.statistics for sharing in found.sharing)
    assert (blocks.num_blocks, blocks.num_distinct_blocks) == (15_942, 14_722)
    assert f"{blocks.block_hit_rate:.2%}" == "7.65%"
    assert f"{blocks.token_hit_rate:.2%}" == "7.59%"
    assert (blocks.num_hit_tokens, blocks.num_prompt_tokens) == (19_520, 257_239)
    assert f"{blocks.num_requests_hit / blocks.num_requests:.1%}" == "10.7%"


def test_sharing_counts_leading_blocks_of_earlier_prompts() -> None:
    requests = [
        request([(0, 8), (2, 8)], 9, 1),
        request([(0, 8), (4, 8), (2, 8)], 9, 3),
        request([(0, 8), (2, 8), (1, 4)], 9, 5),
        request([(0, 8), (2, 6)], 9, 7),
    ]
    pieces, blocks = (s.statistics for s in describe(requests, 4).sharing)
    assert (pieces.num_blocks, pieces.num_distinct_blocks) == (10, 6)
    # One piece of the second; both of the third, the answer not; one of the last,
    # whose (2, 6) is no piece of the others.
    assert (pieces.num_hit_blocks, pieces.num_hit_tokens) == (4, 32)
    # In blocks of 4 that last piece shares its first block.
    assert (blocks.num_blocks, blocks.num_hit_blocks) == (18, 2 + 4 + 3)
    assert blocks.num_requests_hit == 3


def test_pieces_of_different_lengths_are_no_blocks() -> None:
    requests = [request([(0, 8), (2, 9)]), request([(0, 8), (4, 3)])]
    (only,) = describe(requests, 4).sharing
    assert only.statistics.unit == "full blocks"


def test_sessions_are_chains() -> None:
    first = request([(0, 10)], 5, 1)._replace(session_id=7)
    second = request([(0, 10), (1, 5), (2, 4)], 5, 3)._replace(
        request_id=1, arrival_s=3.0, session_id=7, previous_id=0, delay_s=3.0
    )
    alone = request([(4, 10)], 5, 5)._replace(request_id=2, arrival_s=4.0)
    third = request([(6, 8)], 5, 7)._replace(
        request_id=3, arrival_s=8.0, session_id=7, previous_id=1, delay_s=5.0
    )
    shape = describe([first, second, alone, third]).sessions
    assert shape is not None
    assert sorted(shape.turns.tolist()) == [1, 3]
    assert (shape.num_chained, shape.quoted) == (2, 1)
    assert shape.delays_s.tolist() == [3.0, 5.0]
    assert shape.growth_tokens.tolist() == [9, -11]


def test_sampling_parameters_are_counted_where_there_are_any() -> None:
    requests = [
        request([(2 * i, 9)])._replace(
            request_id=i, arrival_s=float(i), best_of=1 + i % 2, slo_class="ab"[i == 0]
        )
        for i in range(5)
    ]
    found = describe(requests).to_dict()
    assert found["sampling"] == {
        "best_of": {"1": 3, "2": 2},
        "slo_class": {"a": 4, "b": 1},
    }
    json.dumps(found, allow_nan=False)


def test_columns_are_described_as_their_list_is() -> None:
    columns = RequestColumns(
        np.array([0.0, 1.0, 1.5]), np.array([5, 7, 9]), np.array([1, 2, 2]),
        priority=np.array([0, 1, 1]),
    )  # fmt: skip
    own, plain = describe(columns).to_dict(), describe(list(columns)).to_dict()
    assert own["prefix_sharing"] == []
    assert own | {"prefix_sharing": 0} == plain | {"prefix_sharing": 0}
    assert own["sampling"] == {"priority": {"1": 2, "0": 1}}


def test_one_request_and_one_instant_have_no_rate() -> None:
    for requests in ([request([(0, 3)])], [request([(0, 3)]), request([(2, 3)])]):
        found = describe(requests)
        assert found.arrivals.mean_rate is None
        assert found.arrivals.gap_cv is None
        json.dumps(found.to_dict(), allow_nan=False)
    with pytest.raises(WorkloadError, match="needs a request"):
        describe([])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3))
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    first, second = np.array(pairs).T
    if first.std() == 0 or second.std() == 0:
        assert rank_correlation(first, second) is None
    else:
        expected = spearmanr(first, second).statistic
        assert rank_correlation(first, second) == pytest.approx(expected)


def test_windows_are_whole_ones() -> None:
    arrival_s = np.array([1.0, 1.2, 2.5, 2.9, 4.0, 4.9])
    assert window_counts(arrival_s, 1.0).tolist() == [2, 2, 0]
    assert arrival_statistics(arrival_s).dispersion == {}


def test_poisson_arrivals_have_unit_burstiness() -> None:
    times_s = np.cumsum(np.random.default_rng(1).exponential(0.1, 50_000))
    found = arrival_statistics(times_s)
    assert found.gap_cv == pytest.approx(1.0, abs=0.02)
    assert found.dispersion["1"] == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("span_s", [1e9, 5e16])
def test_a_span_of_ages_takes_the_memory_of_its_requests(span_s: float) -> None:
    arrival_s = np.array([0.0, 0.5, 70.0, 71.0, span_s])
    tracemalloc.start()
    try:
        found = arrival_statistics(arrival_s)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1e6
    assert found.peak_rate == 2 / 60
    # Four arrivals in windows of a second, one of which has two.
    mean = 4 / span_s
    expected = (2**2 + 1 + 1) / span_s / mean - mean
    assert found.dispersion["1"] == pytest.approx(expected)


@given(st.lists(st.floats(0.0, 400.0), min_size=2, max_size=40))
def test_few_windows_and_many_are_counted_alike(times_s: list[float]) -> None:
    arrival_s = np.array([0.0, *sorted(times_s), 400.0])
    usual = arrival_statistics(arrival_s)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(description, "MOST_WINDOWS", 0)
        sparse = arrival_statistics(arrival_s)
    assert sparse.peak_rate == usual.peak_rate
    assert sparse.dispersion == pytest.approx(usual.dispersion)


def test_a_prompt_of_one_piece_does_not_say_how_long_pieces_are() -> None:
    short, cut, odd = [(1, 3)], [(1, 16), (2, 16), (3, 5)], [(1, 16), (2, 20)]
    assert own_block_size([request(short), request(cut)]) == 16
    assert own_block_size([request(short)]) is None
    assert own_block_size([request(cut), request(odd)]) is None
