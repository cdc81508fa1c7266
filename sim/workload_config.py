"""The workload's part of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from sim.config_types import ConfigTable, Count, Kind, Positive, Shares


class SyntheticConfig(ConfigTable):
    """Requests drawn from distributions."""

    num_requests: Positive | None = None
    duration_s: Annotated[float, Field(gt=0)] | None = None
    arrivals: Kind
    prompt_tokens: Kind
    output_tokens: Kind
    rank_correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0
    rate_scale: Annotated[float, Field(gt=0)] = 1.0


class PresetConfig(ConfigTable):
    """A bundled synthetic workload, fitted to a published trace."""

    name: str
    num_requests: Positive | None = None
    duration_s: Annotated[float, Field(gt=0)] | None = None
    rate_scale: Annotated[float, Field(gt=0)] = 1.0


class WorkloadConfig(ConfigTable):
    """Where requests come from: exactly one of the three."""

    trace: Kind | None = None
    synthetic: SyntheticConfig | None = None
    preset: PresetConfig | None = None
    best_of: Shares = 1
    beam_width: Shares = 1
    beam_switch_share: Annotated[float, Field(ge=0, le=1)] = 0.35
    priority: Shares = 0
    max_tokens: Count | None = None

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadConfig:
        sources = ("trace", "synthetic", "preset")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of trace, synthetic and preset, got "
                f"{' and '.join(given) or 'none'}"
            )
        return self
