"""Whether the head of the waiting queue may join those that run: one rule a file."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.scheduler.admission.base import AdmissionRule
from sim.scheduler.admission.conservative import Conservative
from sim.scheduler.admission.full_prompt import FullPrompt
from sim.scheduler.admission.past_future import PastFuture
from sim.scheduler.admission.watermark import Watermark

if TYPE_CHECKING:
    from collections.abc import Mapping

ADMISSION_RULES: Mapping[str, type[AdmissionRule]] = MappingProxyType(
    {
        "conservative": Conservative,
        "full_prompt": FullPrompt,
        "past_future": PastFuture,
        "watermark": Watermark,
    }
)
"""Admission rules by the ``kind`` of ``engine.admission``."""

__all__ = [
    "ADMISSION_RULES",
    "AdmissionRule",
    "Conservative",
    "FullPrompt",
    "PastFuture",
    "Watermark",
]
