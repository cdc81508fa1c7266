"""Packages that a hosted vLLM is given beside its wheel."""

from __future__ import annotations

from tests.hosted.requirements import LIGHT, TORCH, requirements

ASKED = [
    "numpy",
    "transformers<6,>=4.56.0",
    "fastapi[standard]<0.137.0,>=0.133.0",
    'protobuf!=6.30.*,>=5.29.6; platform_machine != "s390x"',
    'protobuf==7.36.1; platform_machine == "s390x"',
    'scipy==0.1; extra == "bench"',
    "prometheus_client>=0.18.0",
    "torch==2.14.0",
    "flashinfer-python==0.7.2",
]


def test_a_release_gets_the_light_ones_as_it_asks_for_them() -> None:
    found = requirements(ASKED, 33)
    assert len(found) == len(LIGHT) + 1
    assert found[-1] == TORCH
    assert {
        "numpy",
        "transformers<6,>=4.56.0",
        "fastapi<0.137.0,>=0.133.0",
        "protobuf!=6.30.*,>=5.29.6",
        "scipy",
        "prometheus-client>=0.18.0",
    } < set(found)


def test_an_old_release_gets_what_was_there_then() -> None:
    assert {"numpy<2.3", "transformers<6,>=4.56.0,<5"} < set(requirements(ASKED, 11))
