"""The workload's part of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from sim.config.types import (
    ConfigTable,
    Count,
    Kind,
    Names,
    Positive,
    Priority,
    Shares,
    Whole,
)
from workloads.errors import WorkloadError
from workloads.traces.detect import guess_kind


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


class ResampleConfig(ConfigTable):
    """Windows of a trace that are drawn at random with the seed."""

    window_s: Annotated[float, Field(gt=0)]
    num_windows: Positive | None = None


class SplitConfig(ConfigTable):
    """The share of one of several engines in the traffic."""

    num_replicas: Positive
    replica: Whole = 0
    by: Literal["random", "round_robin"] = "random"


class ClientConfig(ConfigTable):
    """How long clients wait for an answer, and how often they ask again."""

    timeout_s: Annotated[float, Field(gt=0, le=1e9)]
    max_retries: Annotated[int, Field(ge=0, le=1000)] = 0
    retry_delay_s: Annotated[float, Field(ge=0, le=1e6)] = 0.5


SOURCES = ("trace", "synthetic", "preset", "sessions")
"""Keys of a workload that each say where requests come from."""


class WorkloadConfig(ConfigTable):
    """Where requests come from: exactly one of `SOURCES`; and what they ask for."""

    trace: Kind | None = None
    synthetic: SyntheticConfig | None = None
    preset: PresetConfig | None = None
    sessions: Kind | None = None
    resample: ResampleConfig | None = None
    split: SplitConfig | None = None
    max_concurrent_users: Positive | None = None
    client: ClientConfig | None = None
    best_of: Shares = 1
    beam_width: Shares = 1
    beam_switch_share: Annotated[float, Field(ge=0, le=1)] = 0.35
    priority: Priority = 0
    max_tokens: Count | None = None
    slo_class: Names = ""
    output_end: Names | None = None
    acceptance: Kind | None = None

    @field_validator("trace")
    @classmethod
    def _kind_by_content(cls, trace: Kind | None) -> Kind | None:
        """Name the format of a trace that is left out, where its file tells it."""
        path = None if trace is None or "kind" in trace else trace.get("path")
        if trace is None or not isinstance(path, str) or not Path(path).is_file():
            return trace
        try:
            return {"kind": guess_kind(path), **trace}
        except WorkloadError as error:
            raise ValueError(
                f"kind: left out, and not told by the file: {error}"
            ) from error

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

    @model_validator(mode="after")
    def _only_traces_are_resampled(self) -> WorkloadConfig:
        if self.resample is not None and self.trace is None:
            raise ValueError(
                "resample: draws windows of a trace; what is drawn anyway is other "
                "traffic with another seed; remove it"
            )
        return self

    @model_validator(mode="after")
    def _users_are_not_split(self) -> WorkloadConfig:
        if self.split is not None and self.max_concurrent_users is not None:
            raise ValueError(
                "split: users in a closed loop wait for their own answers, so a "
                f"router has none of {self.max_concurrent_users} to share out; give "
                "each engine its max_concurrent_users instead"
            )
        return self
