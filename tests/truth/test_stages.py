"""Runs of a real vLLM 0.15.1 on H100s, one of a mixture of experts, three on ranks.

Published are the engine's arguments, the KV blocks and how the traffic was made, so
that traffic of the same kind can be drawn. The client's clock, over HTTP, is in TTFT;
tokens after the first are the engine's.
"""

from __future__ import annotations

import pytest

from sim.simulation.simulate import simulate
from tests.truth.runs import STAGE_RUNS, StageRun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("run", STAGE_RUNS, ids=lambda run: run.name)
def test_tokens_of_experts_and_of_ranks(run: StageRun, tmp_path) -> None:
    # this release schedules beside the step: its host time does not show
    hidden = {"kind": "roofline", "step_overhead_s": 1e-6}
    for cost, most in (({"kind": "roofline"}, 35.0), (hidden, 12.0)):
        config = run.config(tmp_path, cost)
        for measured_ms, found_ms in zip(
            run.mean_tpot_ms, run.tpot_ms(simulate(config)), strict=True
        ):
            assert abs(100.0 * (found_ms / measured_ms - 1.0)) <= most
