"""The numbers of ``../shared/traces/README.md``, through our readers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.shared import shared
from tests.workloads.traces.samples import read

# Rows, span in s, mean rate, peak rate of 60 s, CV of gaps; mean, p50, p99 and max of
# prompts and of outputs.
NUMBERS = {
    "azure_llm_2023_code.csv": (
        ("azure", 8819, 3435.9, 2.566, 10.53, 13.2),
        (2047.8, 1469, 7436, 7437),
        (27.9, 13, 251, 1899),
    ),
    "azure_llm_2023_conv.csv": (
        ("azure", 19366, 3501.7, 5.530, 8.45, 1.09),
        (1154.7, 1020, 4142, 14050),
        (211.1, 129, 601, 1000),
    ),
    "mooncake_fast25_conversation.jsonl": (
        ("mooncake", 12031, 3537.0, 3.401, 4.12, 3.0),
        (12035.1, 6909, 85400, 126195),
        (342.6, 350, 1119, 2000),
    ),
    "llmservingsim_sharegpt_llama31_300_sps10.jsonl.gz": (
        ("llmservingsim", 300, 29.1, 10.26, None, 0.94),
        (857.5, 731.5, 2765, 3998),
        (652.5, 632, 784, 1021),
    ),
}


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_published_numbers(name: str) -> None:
    (kind, rows, span_s, rate, peak, cv), prompts, outputs = NUMBERS[name]
    requests = read(kind, shared(f"traces/{name}"))
    times_s = np.array([request.arrival_s for request in requests])
    assert len(requests) == rows
    assert times_s[0] == 0.0
    assert times_s[-1] == pytest.approx(span_s, abs=0.051)
    assert (rows - 1) / times_s[-1] == pytest.approx(rate, abs=0.006)
    gaps_s = np.diff(times_s)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, abs=0.051)
    if peak is not None:
        counts = np.bincount((times_s // 60).astype(int))
        assert counts.max() / 60 == pytest.approx(peak, abs=0.006)
    for column, (mean, p50, p99, most) in (
        ([request.num_prompt_tokens for request in requests], prompts),
        ([request.num_output_tokens for request in requests], outputs),
    ):
        assert np.mean(column) == pytest.approx(mean, abs=0.051)
        assert np.median(column) == p50
        assert np.percentile(column, 99) == pytest.approx(p99, rel=0.005)
        assert max(column) == most
