"""Sizing cases: which pool a release plans, without a schedule."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from cache.errors import CacheConfigError
from sim.errors import ConfigError
from sim.scheduler.v1 import V1
from sim.studies.conformance.fields import Positive, Table, whole
from sim.studies.conformance.kv_planning import KvCache, header_of
from sim.studies.conformance.workload import (
    generation_of,
    in_words,
    read_text,
    release_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sim.scheduler.log.lines import Line


class SizingEngine(Table):
    """The arguments of an engine that its plan depends on; others are not read."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    max_num_batched_tokens: Positive
    max_model_len: Positive
    enable_prefix_caching: bool = True
    async_scheduling: bool = False


class SizingCase(Table):
    """One question."""

    name: str
    config: SizingEngine
    kv: KvCache

    def line(self) -> Line:
        """Return the answer: a header, or the words in which the engine refuses."""
        try:
            plan = self.kv.plan(
                max_model_len=self.config.max_model_len,
                max_in_flight_tokens=self.config.max_num_batched_tokens
                * (1 + self.config.async_scheduling),
                enable_prefix_caching=self.config.enable_prefix_caching,
            )
        except CacheConfigError as error:
            return {"name": self.name, "error": str(error)}
        return {"name": self.name, "header": header_of(plan, self.kv.available_bytes)}


class SizingCases(Table):
    """A file of sizing cases."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    schema_version: Annotated[Literal[1], BeforeValidator(whole)] = Field(
        alias="schema"
    )
    reference: str
    cases: Annotated[list[SizingCase], Field(min_length=1)]

    @field_validator("reference")
    @classmethod
    def _of_v1(cls, reference: str) -> str:
        if generation_of(release_of(reference)) != V1.name:
            raise ValueError("sizing cases need a release of vLLM's V1 engine")
        return reference

    def lines(self) -> Iterator[Line]:
        """Yield the answers, a line a case."""
        for case in self.cases:
            yield case.line()


def load_sizing_cases(path: Path) -> SizingCases | None:
    """Return the sizing cases of a file; None if it holds a schedule's workload."""
    return parse_sizing_cases(read_text(path), str(path))


def parse_sizing_cases(text: str, where: str) -> SizingCases | None:
    """Return the sizing cases in a file's text; None if it holds no cases."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or "cases" not in data:
        return None
    try:
        return SizingCases.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {in_words(error)}") from error
