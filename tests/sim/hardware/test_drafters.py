"""Drafters: their layers, their weights, and the pool beside them."""

from __future__ import annotations

import pytest

from sim.errors import CapacityError
from sim.hardware.capacity import estimate_capacity
from sim.hardware.gpus import GIB
from sim.hardware.models.bundled import load_model
from sim.hardware.models.drafters import drafter_of

LLAMA = "meta-llama/Llama-3.1-8B"


def test_a_head_is_a_layer_and_a_projection() -> None:
    target = load_model(LLAMA)
    drafter = drafter_of(target, "eagle")
    assert drafter is not None
    # As published heads of this model: 218 million in the layer, 2 x 4096 x 4096 more.
    num_bytes = drafter.weight_bytes(1, 2, None)
    assert num_bytes / 2 == pytest.approx(218.1e6 + 33.6e6, rel=0.07)
    assert drafter.is_head


def test_a_head_of_mtp_has_experts_where_the_target_has() -> None:
    target = load_model("deepseek-ai/DeepSeek-V3")
    heads = {name: drafter_of(target, name) for name in ("eagle", "mtp")}
    dense, sparse = heads["eagle"], heads["mtp"]
    assert dense is not None
    assert sparse is not None
    assert dense.model.num_experts == 0
    # DeepSeek-V3's own module has 11.5 billion parameters of its own.
    assert sparse.weight_bytes(1, 2, None) / 2 == pytest.approx(11.5e9, rel=0.02)


def test_the_pool_holds_the_layers_of_the_drafter() -> None:
    plain = estimate_capacity(LLAMA, "h200_sxm", engine_version="0.33")
    pools = {
        method: estimate_capacity(
            LLAMA,
            "h200_sxm",
            engine_version="0.33",
            num_speculative_tokens=3,
            speculative_method=method,
            draft_model=model,
        )
        for method, model in (
            ("ngram", None),
            ("eagle", None),
            ("draft_model", "meta-llama/Llama-3.2-1B"),
        )
    }
    assert pools["ngram"] == plain
    assert pools["eagle"].block_bytes * 32 == plain.block_bytes * 33
    # 16 layers with half the width of a head.
    assert pools["draft_model"].block_bytes * 32 == plain.block_bytes * 40
    more = pools["draft_model"].weights_bytes - plain.weights_bytes
    assert more / GIB == pytest.approx(2.3, abs=0.05)


@pytest.mark.parametrize(
    ("method", "model", "message"),
    [
        ("draft_model", None, "method draft_model needs the model that drafts"),
        ("ngram", LLAMA, "takes no model; got 'meta-llama/Llama-3.1-8B': leave it"),
    ],
)
def test_drafters_have_the_model_that_they_need(
    method: str, model: str | None, message: str
) -> None:
    with pytest.raises(CapacityError, match=message):
        drafter_of(load_model(LLAMA), method, model)
