"""Pools of hybrid and latent-attention models against what engines printed."""

from __future__ import annotations

from statistics import median

import pytest

from sim.hardware.capacity import estimate_capacity
from sim.hardware.gpus import GIB
from sim.hardware.models.bundled import load_model
from tests.sim.hardware.capacity.hybrid_points import (
    CAUSES,
    NOT_COUNTED,
    NOT_JUDGED,
    POOLS,
    RATIOS,
    WHOLE,
    planned,
    rows,
    whole,
)
from tests.sim.hardware.capacity.points import CAUSES_COUNTED, architecture, judge_all

REFUSED = 1033


def test_every_row_is_judged_or_named() -> None:
    known = set(POOLS) | set(RATIOS) | set(NOT_JUDGED) | {REFUSED}
    assert known == set(rows())
    assert len(POOLS) + len(RATIOS) + 1 + len(NOT_JUDGED) == len(known)


def test_printed_tokens_concurrency_and_blocks() -> None:
    """From the memory for the cache to what the engine printed of it."""
    errors = []
    print()
    for number in sorted(POOLS):
        row = rows()[number]
        pool = planned(row)
        pairs = [(pool.kv_cache_size_tokens, float(row["kv_cache_tokens"]))]
        if row["max_concurrency"]:
            pairs.append((pool.max_concurrency, float(row["max_concurrency"])))
        if row["num_gpu_blocks"]:
            pairs.append((pool.num_gpu_blocks, float(row["num_gpu_blocks"])))
        worst = max(abs(ours / theirs - 1) for ours, theirs in pairs)
        errors.append(worst)
        print(f"{number} {row['model'][:40]:<40} {worst:8.3%}  {POOLS[number].because}")
        assert worst < 0.003, (number, pairs)
    print(f"median {median(errors):.3%}, largest {max(errors):.3%}")
    assert median(errors) < 0.001


def test_tokens_length_and_concurrency_agree() -> None:
    for number, (model, block_size) in RATIOS.items():
        row = rows()[number]
        tokens, length = int(row["kv_cache_tokens"]), int(row["max_model_len"])
        result = estimate_capacity(
            load_model(model),
            "b200_sxm",
            tensor_parallel_size=int(row["tp"]),
            block_size=block_size,
            max_model_len=length,
            num_gpu_blocks_override=tokens // block_size,
            weights_gib=1.0,
        )
        concurrency = float(row["max_concurrency"])
        assert result.max_concurrency == pytest.approx(concurrency, abs=0.01), number


def test_the_start_that_the_engine_refused_does_not_fit() -> None:
    row = rows()[REFUSED]
    result = estimate_capacity(
        "openai/gpt-oss-120b",
        "h100_sxm",
        engine_version="0.11",
        max_num_batched_tokens=int(row["max_num_batched_tokens"]),
        kv_cache_memory_bytes=round(float(row["available_kv_gib"]) * GIB),
        weights_gib=60.0,
    )
    assert result.max_model_len < int(row["max_model_len"])


@pytest.mark.parametrize(
    ("weights_given", "median_limit"), [(True, 0.01), (False, 0.02)]
)
def test_the_whole_sum_of_hybrid_and_latent_models(
    weights_given: bool, median_limit: float
) -> None:
    """GPU, release and arguments only; the rows of both files."""
    errors = {}
    for number in WHOLE:
        if not weights_given and number in NOT_COUNTED:
            continue
        row = rows()[number]
        ours = whole(row, weights_given=weights_given).available_kv_bytes / GIB
        errors[number] = ours / float(row["available_kv_gib"]) - 1
    judged, _ = judge_all(weights_given=weights_given)
    for point in judged:
        model = architecture({"model": point.group[0]})
        assert model is not None
        if model.mixed_layer_kinds or model.kv_lora_rank:
            errors[point.row_id] = point.error
    print()
    for number, error in errors.items():
        print(f"{number:>5} {error:+8.2%}  {(CAUSES_COUNTED | CAUSES).get(number, '')}")
    sizes = [abs(error) for error in errors.values()]
    odd = {number for number, error in errors.items() if abs(error) > 0.05}
    of_all = len(odd) / (len(sizes) + len(POOLS))
    print(f"{len(sizes)} rows: median {median(sizes):.2%}; beyond 5 %: {sorted(odd)},")
    print(f"{of_all:.0%} of these and the {len(POOLS)} with the pool's bytes given")
    assert median(sizes) <= median_limit
    assert of_all <= 0.1
    assert odd <= {*CAUSES, *CAUSES_COUNTED}
