"""Every length distribution against its law, and what couples two lengths.

A distribution is its inverse, so its law can be read off without drawing: the share of
probabilities whose length is at most ``k`` is the distribution function at ``k``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import gammainc, ndtr

from tests.workloads.laws import spearman, variation
from tests.workloads.shared_traces import (
    AZURE_CODE,
    AZURE_CONV,
    MOONCAKE,
    shared_trace,
)
from workloads import LengthDistribution, Streams, SyntheticWorkload, TraceReader
from workloads.arrivals import PoissonArrivals, ReplayArrivals
from workloads.lengths import (
    CoupledLengths,
    EmpiricalLength,
    ExponentialLength,
    GammaLength,
    JointTraceLengths,
    LognormalLength,
    NormalLength,
    QuantileLength,
    TraceLength,
    UniformLength,
    ZipfLength,
)
from workloads.traces import AzureTraceReader, MooncakeTraceReader

ZIPF = np.arange(3.0, 501.0) ** -1.3
LAWS: list[tuple[LengthDistribution, Any]] = [
    (UniformLength(5, 24), lambda k: ((k - 4) / 20).clip(0, 1)),
    (
        LognormalLength(median=90, sigma=0.8, max=400),
        lambda k: np.where(k < 400, ndtr(np.log((k + 0.5) / 90) / 0.8), 1.0),
    ),
    (
        NormalLength(mean=60, std=40, min=11, max=150),
        lambda k: (
            (ndtr((k.clip(10, 150) + 0.5 - 60) / 40) - ndtr((10.5 - 60) / 40))
            / (ndtr((150.5 - 60) / 40) - ndtr((10.5 - 60) / 40))
        ),
    ),
    (ExponentialLength(mean=70.0), lambda k: 1 - (1 - 1 / 70) ** k),
    (
        GammaLength(mean=80.0, cv=0.6),
        lambda k: gammainc(1 / 0.36, (k + 0.5) / (80 * 0.36)),
    ),
    (
        GammaLength(mean=80.0, cv=2.0),
        lambda k: gammainc(0.25, (k + 0.5) / (80 * 4)),
    ),
    (
        ZipfLength(exponent=1.3, min=3, max=500),
        lambda k: np.concatenate([[0, 0], ZIPF.cumsum()])[k - 1] / ZIPF.sum(),
    ),
    (
        QuantileLength([0, 0.2, 1], [10, 50, 210]),
        lambda k: np.interp(k + 0.5, [10, 50, 210], [0, 0.2, 1]),
    ),
    (
        EmpiricalLength([40, 7, 40, 90], [1, 5, 2, 2]),
        lambda k: 0.5 * (k >= 7) + 0.3 * (k >= 40) + 0.2 * (k >= 90),
    ),
]


@pytest.mark.parametrize(("distribution", "law"), LAWS)
def test_a_distribution_has_its_law(distribution: LengthDistribution, law: Any) -> None:
    u = (np.arange(400_000) + 0.5) / 400_000
    tokens = distribution.quantile(u)
    lengths = np.arange(1, 260)
    shares = np.searchsorted(tokens, lengths, side="right") / len(u)
    assert shares == pytest.approx(law(lengths), abs=2e-5)
    assert 0 < shares[100] <= 1


UNIFORMS = Streams(3).generator("lengths").random(400_000)


@pytest.mark.parametrize(
    ("distribution", "mean", "cv"),
    [
        (ExponentialLength(mean=200.0), 200, math.sqrt(1 - 1 / 200)),
        (ExponentialLength(mean=3.0), 3, math.sqrt(1 - 1 / 3)),
        (GammaLength(mean=500.0, cv=0.5), 500, 0.5),
        (GammaLength(mean=500.0, cv=2.0), 500, 2.0),
        (NormalLength(mean=900.0, std=90.0), 900, 0.1),
        # Half a normal law: mean std * sqrt(2 / pi) beyond its end.
        (
            NormalLength(mean=1000.5, std=300.0, min=1001),
            1000.5 + 300 * math.sqrt(2 / math.pi),
            300 * math.sqrt(1 - 2 / math.pi) / (1000.5 + 300 * math.sqrt(2 / math.pi)),
        ),
        (LognormalLength(1000, 0.5), 1000 * math.exp(0.125), 0.53294),
    ],
)
def test_means_and_variations_are_those_stated(
    distribution: LengthDistribution, mean: float, cv: float
) -> None:
    tokens = distribution.quantile(UNIFORMS)
    assert tokens.mean() == pytest.approx(mean, rel=0.01)
    assert variation(tokens) == pytest.approx(cv, rel=0.01)


# -- two lengths -------------------------------------------------------------------


def drawn(lengths: Any, num_requests: int = 100_000) -> tuple[Any, Any]:
    arrivals = PoissonArrivals(rate=1.0)
    workload = SyntheticWorkload(arrivals, num_requests=num_requests, lengths=lengths)
    requests = workload.requests()
    return requests.num_prompt_tokens, requests.num_output_tokens


@pytest.mark.parametrize("rho", [-0.8, -0.3, 0.0, 0.2, 0.6, 0.95])
def test_coupling_reproduces_the_rank_correlation(rho: float) -> None:
    prompts, outputs = LognormalLength(2000, 1.0), GammaLength(500, 1.2)
    found = drawn(CoupledLengths(prompts, outputs, rho))
    assert spearman(*found) == pytest.approx(rho, abs=0.01)
    assert found[1].mean() == pytest.approx(500, rel=0.02)  # the margin stays


TRACES = {
    AZURE_CONV: AzureTraceReader,
    AZURE_CODE: AzureTraceReader,
    MOONCAKE: MooncakeTraceReader,
}


def reader_of(name: str) -> TraceReader:
    return TRACES[name](shared_trace(name))


def lengths_of(reader: TraceReader) -> tuple[Any, Any]:
    pairs = [(r.num_prompt_tokens, r.num_output_tokens) for r in reader.read()]
    prompts, outputs = np.array(pairs).T
    return prompts, outputs


@pytest.mark.parametrize("name", TRACES)
def test_pairs_of_a_trace_keep_what_couples_them(name: str) -> None:
    reader = reader_of(name)
    recorded = lengths_of(reader)
    rho = spearman(*recorded)
    assert abs(rho) > 0.02  # there is something to keep
    joint = drawn(JointTraceLengths(reader))
    assert spearman(*joint) == pytest.approx(rho, abs=0.012)
    # The product, too, which no copula of ranks fixes.
    product = (recorded[0] * recorded[1]).mean()
    assert (joint[0] * joint[1]).mean() == pytest.approx(product, rel=0.05)
    assert set(zip(*joint, strict=True)) <= set(zip(*recorded, strict=True))
    # Drawn apart they have the same margins, and nothing couples them.
    sides = [TraceLength(reader, f"{side}_tokens") for side in ("prompt", "output")]  # type: ignore[arg-type]
    apart = drawn(CoupledLengths(*sides))
    assert spearman(*apart) == pytest.approx(0, abs=0.012)
    assert apart[0].tolist() == joint[0].tolist()
    for found, seen in zip((*joint, *apart), (*recorded, *recorded), strict=True):
        assert found.mean() == pytest.approx(seen.mean(), rel=0.03)
        assert np.median(found) == pytest.approx(np.median(seen), rel=0.02)
        assert set(found.tolist()) <= set(seen.tolist())


def test_a_trace_redrawn_at_its_own_times() -> None:
    reader = reader_of(AZURE_CONV)
    workload = SyntheticWorkload(
        ReplayArrivals(reader), num_requests=19_366, lengths=JointTraceLengths(reader)
    )
    recorded_s = [request.arrival_s for request in reader.read()]
    assert workload.requests().arrival_s.tolist() == recorded_s
