"""The table ``fleet.autoscaler``: how many replicas a pool has, and when."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from sim.config.types import ConfigTable, Whole

_Above = Annotated[float, Field(gt=0)]
_Period = Annotated[float, Field(ge=1e-3)]
_Span = Annotated[float, Field(ge=0)]
METRICS: Final = (
    "waiting_requests",
    "kv_cache_usage",
    "requests_in_flight",
    "tokens_in_flight",
)
POLICY_KINDS: Final = ("pods", "percent")
SELECTS: Final = ("max", "min", "disabled")


class PolicyTable(ConfigTable):
    """How much may change within a period."""

    kind: str
    value: _Above
    period_s: _Above

    @model_validator(mode="after")
    def _built(self) -> PolicyTable:
        if self.kind not in POLICY_KINDS:
            raise ValueError(
                f"kind: must be one of {', '.join(POLICY_KINDS)}, got {self.kind!r}"
            )
        return self


class BehaviourTable(ConfigTable):
    """How fast replicas come, or go; what is left out is Kubernetes' default."""

    stabilization_s: _Span | None = None
    select: str = "max"
    policies: Annotated[list[PolicyTable], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _built(self) -> BehaviourTable:
        if self.select not in SELECTS:
            raise ValueError(
                f"select: must be one of {', '.join(SELECTS)}, got {self.select!r}"
            )
        return self


class AutoscalerTable(ConfigTable):
    """Keeps metrics of a pool at their targets by starting and draining replicas."""

    targets: Annotated[dict[str, _Above], Field(min_length=1)]
    max_replicas: Annotated[int, Field(ge=1, le=10_000)]
    min_replicas: Whole = 1
    pool: str | None = None
    start_s: _Span = 120.0
    interval_s: _Period = 15.0
    scrape_interval_s: _Period = 15.0
    tolerance: _Span = 0.1
    cooldown_s: _Span = 300.0
    drain_s: _Above | None = None
    scale_up: BehaviourTable | None = None
    scale_down: BehaviourTable | None = None

    @model_validator(mode="after")
    def _fits(self) -> AutoscalerTable:
        for name, target in self.targets.items():
            if name not in METRICS:
                raise ValueError(
                    f"targets: must be of {', '.join(METRICS)}, got {name!r}"
                )
            if name == "kv_cache_usage" and target > 1:
                raise ValueError(
                    f"targets: kv_cache_usage is a share of the blocks, at most 1, "
                    f"got {target}; write 0.7 for 70 %"
                )
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas: must not be above max_replicas, got "
                f"{self.min_replicas} and {self.max_replicas}; swap them"
            )
        return self


def as_list(given: Any) -> Any:
    """Return the autoscalers of a fleet: one table stands for a list of one."""
    return [given] if isinstance(given, dict) else given
