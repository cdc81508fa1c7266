"""How many drafted tokens a target model accepts: part of the traffic.

A kind of rates says how likely drafts are accepted, position by position;
`DrawnAcceptance` draws the answer for each.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from workloads.acceptance.base import Acceptance, AcceptanceRates
from workloads.acceptance.drawn import DrawnAcceptance
from workloads.acceptance.profiles import (
    AcceptanceProfile,
    ProfileRates,
    acceptance_profiles,
)
from workloads.acceptance.rates import (
    ClassRates,
    ConstantRate,
    LengthRates,
    PositionRates,
    RecordedRates,
    RequestCounts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

ACCEPTANCE: Mapping[str, type[AcceptanceRates]] = MappingProxyType(
    {
        "by_class": ClassRates,
        "by_request": RequestCounts,
        "constant": ConstantRate,
        "length": LengthRates,
        "per_position": PositionRates,
        "profile": ProfileRates,
        "recorded": RecordedRates,
    }
)
"""Acceptance rates by the ``kind`` of a configuration."""

__all__ = [
    "ACCEPTANCE",
    "Acceptance",
    "AcceptanceProfile",
    "AcceptanceRates",
    "ClassRates",
    "ConstantRate",
    "DrawnAcceptance",
    "LengthRates",
    "PositionRates",
    "ProfileRates",
    "RecordedRates",
    "RequestCounts",
    "acceptance_profiles",
]
