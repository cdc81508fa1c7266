"""The real continuous batching of transformers with a cache that is full.

Its watch counts steps, so that what is compared is decisions alone: with the engine's
blocks there is no error, with others there is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.studies.validation.readers import read
from sim.studies.validation.readers.requests_csv import read_timeseries
from sim.studies.validation.run import validate
from tests.conformance.hf_reference import why_missing
from tests.truth.hf_engine import (
    NUM_BLOCKS,
    TimedReference,
    config,
    decision_workload,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.config.tables import RunConfig
    from sim.studies.validation.observed import Observed

pytestmark = [
    pytest.mark.skipif(why_missing() is not None, reason=why_missing() or ""),
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the reference's own are none of ours
]


def in_steps(num_blocks: int) -> RunConfig:
    data = config(num_blocks=num_blocks)
    return parse_config(data | {"cost": {"kind": "constant", "step_s": 1.0}})


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    import torch  # noqa: PLC0415

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Observed:
    engine = TimedReference(decision_workload(in_steps(NUM_BLOCKS)), in_steps=True)
    engine.measure()
    requests, series = engine.write(tmp_path_factory.mktemp("measured"))
    return replace(read(requests), series=read_timeseries(series))


@pytest.fixture(scope="module")
def report(measured: Observed) -> dict[str, Any]:
    return validate(in_steps(NUM_BLOCKS), measured).to_dict()


def test_the_engine_had_a_full_cache(measured: Observed) -> None:
    assert measured.series is not None
    usage = measured.series.kv_cache_usage
    assert usage is not None
    assert float(np.mean(usage > 0.95)) > 0.5
    assert measured.requests is not None
    assert measured.requests.num_preemptions is not None
    assert measured.requests.num_preemptions.sum() >= 100


def test_with_its_blocks_every_request_is_predicted_to_the_step(
    report: dict[str, Any],
) -> None:
    errors = {
        name: found["error_pct"]
        for name, found in report["metrics"].items()
        if found["measured"] is not None
    }
    assert len(errors) == 20
    assert errors == pytest.approx(dict.fromkeys(errors, 0.0), abs=1e-9)
    for name in ("num_running", "num_waiting", "num_swapped", "kv_cache_usage"):
        assert report["curves"][name]["measured"] > 0.0
        assert report["curves"][name]["max_abs"] == pytest.approx(0.0, abs=1e-9)
    for found in report["per_request"].values():
        assert found["n"] >= 99
        assert found["mean_abs_pct"] == pytest.approx(0.0, abs=1e-9)


def test_with_more_blocks_the_report_shows_an_error(report: dict[str, Any]) -> None:
    sharpness = report["sharpness"]
    assert sharpness["is_sharp"]
    few, many = sharpness["more_blocks"]
    assert (few["num_gpu_blocks"], many["num_gpu_blocks"]) == (126, 156)
    for each, least in ((few, 2.0), (many, 15.0)):
        found = each["metrics"]
        assert found["mean_ttft_ms"]["error_pct"] < -least
        assert found["duration"]["error_pct"] < -least
        assert abs(found["num_preemptions"]["error_pct"]) > 5.0


@pytest.mark.parametrize("num_blocks", [114, 126])
def test_a_run_given_other_blocks_is_not_predicted(
    measured: Observed, num_blocks: int
) -> None:
    found = validate(in_steps(num_blocks), measured).to_dict()
    assert found["per_request"]["e2el"]["p50_abs_pct"] > 1.0
    assert found["curves"]["kv_cache_usage"]["mean_abs"] > 1.0
