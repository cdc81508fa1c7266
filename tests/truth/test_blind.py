"""Runs that were predicted blind: how near, and where we are wrong."""

from __future__ import annotations

from statistics import median

import pytest

from tests.truth.blind import (
    A100,
    A100_40,
    A100_40_AWQ,
    A100_PAIR,
    COOKBOOK,
    H100,
    H100_TOO_QUICK,
    L4,
    L40S,
    Case,
)


def of_all(cases: tuple[Case, ...], key: str) -> list[float]:
    errors = [case.errors() for case in cases]
    return [found[key] for found in errors if key in found]


def middle(errors: list[float]) -> float:
    return median(map(abs, errors))


def test_dense_models_on_an_h100_take_what_they_took() -> None:
    """Of one to 16 users, on one GPU and on four."""
    tokens, first = of_all(H100, "median_tpot_ms"), of_all(H100, "median_ttft_ms")
    assert middle(tokens) <= 2.5
    assert max(map(abs, tokens)) <= 5.0
    assert middle(first) <= 15.0
    assert -28.0 <= min(first) <= max(first) <= 10.0
    assert max(map(abs, of_all(H100, "median_e2el_ms"))) <= 2.5


def test_two_small_models_were_slower_than_their_weights() -> None:
    assert all(-16.0 <= of <= -12.0 for of in of_all(H100_TOO_QUICK, "median_tpot_ms"))


@pytest.mark.slow
def test_chats_and_shared_prefixes_on_an_l40s_take_what_they_took() -> None:
    """In 16 bits and in AWQ; they were run when all was mended."""
    assert all(2.0 <= of <= 4.5 for of in of_all(L40S, "mean_itl_ms"))
    assert all(-4.0 <= of <= -2.0 for of in of_all(L40S, "output_throughput"))
    assert middle(of_all(L40S, "mean_ttft_ms")) <= 7.0
    assert max(of_all(L40S, "mean_ttft_ms")) <= 21.0


@pytest.mark.slow
def test_one_l4_is_near_and_a_pair_too_quick() -> None:
    one, *pair = of_all(L4, "mean_itl_ms")
    assert -7.0 <= one <= -5.0
    assert all(-20.0 <= of <= -15.0 for of in pair)


@pytest.mark.slow
def test_an_a100_is_somewhat_too_quick() -> None:
    assert all(-11.5 <= of <= -4.0 for of in of_all(A100_40, "median_tpot_ms"))
    assert all(-9.0 <= of <= -7.0 for of in of_all(A100, "mean_tpot_ms"))


@pytest.mark.slow
def test_weights_of_four_bits_on_an_a100_are_too_quick() -> None:
    *few, many = of_all(A100_40_AWQ, "median_tpot_ms")
    assert all(-14.0 <= of <= -12.0 for of in few)
    assert -25.5 <= many <= -23.5


@pytest.mark.slow
def test_pairs_without_peer_access_are_too_quick() -> None:
    assert all(-24.0 <= of <= -9.0 for of in of_all(A100_PAIR, "duration"))


@pytest.mark.slow
def test_eight_ranks_of_sglang_are_too_quick() -> None:
    assert all(-35.0 <= of <= -17.0 for of in of_all(COOKBOOK, "mean_tpot_ms"))
    assert all(-35.0 <= of <= -28.0 for of in of_all(COOKBOOK, "median_itl_ms"))
