"""The workload's part of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from sim.config_types import (
    ConfigTable,
    Count,
    Kind,
    Names,
    Positive,
    Priority,
    Shares,
)


class SyntheticConfig(ConfigTable):
    """Requests drawn from distributions: two lengths apart, or both together."""

    num_requests: Positive | None = None
    duration_s: Annotated[float, Field(gt=0)] | None = None
    arrivals: Kind
    prompt_tokens: Kind | None = None
    output_tokens: Kind | None = None
    lengths: Kind | None = None
    rank_correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0
    rate_scale: Annotated[float, Field(gt=0)] = 1.0
    prefixes: Kind | None = None

    @model_validator(mode="after")
    def _one_way_of_lengths(self) -> SyntheticConfig:
        apart = ("prompt_tokens", "output_tokens")
        given = [name for name in apart if getattr(self, name) is not None]
        if self.lengths is None and len(given) < 2:
            raise ValueError(
                "give prompt_tokens and output_tokens, or lengths, got "
                f"{' and '.join(given) or 'none'}"
            )
        if self.rank_correlation != 0:
            given.append("rank_correlation")
        if self.lengths is not None and given:
            raise ValueError(
                "lengths stands for both lengths and what couples them, got also "
                f"{' and '.join(given)}; remove one or the other"
            )
        return self


class PresetConfig(ConfigTable):
    """A bundled synthetic workload, fitted to a published trace."""

    name: str
    num_requests: Positive | None = None
    duration_s: Annotated[float, Field(gt=0)] | None = None
    rate_scale: Annotated[float, Field(gt=0)] = 1.0
    prefixes: Kind | None = None


SOURCES = ("trace", "synthetic", "preset", "sessions")
"""Keys of a workload that each say where requests come from."""


class WorkloadConfig(ConfigTable):
    """Where requests come from: exactly one of `SOURCES`; and what they ask for."""

    trace: Kind | None = None
    synthetic: SyntheticConfig | None = None
    preset: PresetConfig | None = None
    sessions: Kind | None = None
    max_concurrent_users: Positive | None = None
    best_of: Shares = 1
    beam_width: Shares = 1
    beam_switch_share: Annotated[float, Field(ge=0, le=1)] = 0.35
    priority: Priority = 0
    max_tokens: Count | None = None
    slo_class: Names = ""

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadConfig:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            *others, last = SOURCES
            raise ValueError(
                f"give exactly one of {', '.join(others)} and {last}, got "
                f"{' and '.join(given) or 'none'}"
            )
        return self
