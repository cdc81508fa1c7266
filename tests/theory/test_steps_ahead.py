"""Steps ahead against steps in turn, where steps have one length and the host none."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from sim.config.tables import parse_config
from sim.simulation.run import Simulation
from tests.identity.random_configs import LISTED_TRACE

STEP_S = 0.03125
"""A power of two, so that ends of steps are exact."""
NUM_REQUESTS = 200


def served(*, ahead: bool, output_end: str, **engine: Any) -> Any:
    """Serve requests beside one that lasts from the beginning to the end."""
    rng = Random(7)
    others = [
        {
            "at": rng.uniform(1e-3, 20.0),
            "prompt": [[i, rng.randint(1, 400)]],
            "out": rng.randint(1, 60),
            "seg": NUM_REQUESTS + i,
        }
        for i in range(1, NUM_REQUESTS)
    ]
    others.sort(key=lambda request: float(request["at"]))  # type: ignore[arg-type]
    lasting = {"at": 0.0, "prompt": [[0, 10]], "out": 900, "seg": NUM_REQUESTS}
    config = {
        "workload": {
            "trace": {"kind": LISTED_TRACE, "requests": [lasting, *others]},
            "output_end": output_end,
        },
        "engine": {
            "model": "meta-llama/Llama-3.1-8B",
            "gpu": "h200_sxm",
            "num_gpu_blocks_override": 20_000,
            "max_num_seqs": NUM_REQUESTS,
            "async_scheduling": ahead,
        }
        | engine,
        "cost": {"kind": "constant", "step_s": STEP_S},
    }
    return Simulation(parse_config(config)).run()


@pytest.mark.parametrize("output_end", ["stop", "length"])
@pytest.mark.parametrize("tier", [{}, {"kv_offloading_size": 1.0}])
def test_a_busy_engine_serves_all_one_step_later(
    output_end: str, tier: dict[str, Any]
) -> None:
    """The step at whose end an arrival is seen is formed before it has begun.

    That is the only shift where blocks and slots suffice: tokens then come one a step,
    and a slot that is wasted takes nothing from others.
    """
    if tier:  # whose copies take no time
        link = {"load_bytes_per_s": 1e30, "store_bytes_per_s": 1e30}
        tier = tier | {"kv_offloading_link": link}
    in_turn, ahead = (
        served(ahead=each, output_end=output_end, **tier).requests
        for each in (False, True)
    )
    for column in ("first_token_s", "finish_s"):
        steps = (ahead[column] - in_turn[column]).to_numpy() / STEP_S
        assert steps[0] == 0
        assert np.all(steps[1:] == 1), steps
