"""The requests of decision workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from sim.studies.conformance.fields import (
    Count,
    Positive,
    Table,
    Whole,
    as_tuple,
)

if TYPE_CHECKING:
    from collections.abc import Container

COMMENTS = frozenset({"comment", "comments", "description", "note", "notes"})
"""Keys for people; they decide nothing."""


def without_comments(data: Any, nulls: Container[str]) -> Any:
    """Return an object without comments, and without keys of `nulls` that are null.

    A key that is null says as much as one that is not there.
    """
    if not isinstance(data, dict):
        return data
    return {
        key: value
        for key, value in data.items()
        if key not in COMMENTS and (value is not None or key not in nulls)
    }


# Far beyond any engine; a slip of the pen is refused rather than run out of memory.
MAX_PROMPT_TOKENS = 1 << 24
MAX_WIDTH = 1 << 10
MAX_STEP = 1 << 50

Step = Annotated[Count, Field(le=MAX_STEP)]
Segment = Annotated[
    tuple[Whole, Annotated[Whole, Field(ge=0, le=MAX_PROMPT_TOKENS)]],
    BeforeValidator(as_tuple),
]


class DecisionRequest(Table):
    """One request of a workload; its place in the list is its arrival time.

    Where prefillers and decoders are apart, a decoder computes the prompt itself if not
    `remote_prefill`.
    """

    id: str
    arrival_step: Step
    prompt: Annotated[list[Segment], Field(min_length=1)]
    output_len: Positive
    out_seed: Whole
    n: Annotated[Positive, Field(le=MAX_WIDTH)] = 1
    branch_output_lens: list[Positive] | None = None
    beam: bool = False
    beam_seed: Whole = 0
    beam_pct: Annotated[Whole, Field(ge=0, le=100)] = 0
    priority: Whole = 0
    ignore_eos: bool = False
    abort_step: Step | None = None
    stop_after: Positive | None = None
    route_delay: Count | None = None
    transfer_delay: Count | None = None
    remote_prefill: bool = True
    max_load_tokens: Count | None = None
    max_offload_tokens: Count | None = None
    acc_seed: Whole = 0
    acc_pct: Annotated[Whole, Field(ge=0, le=100)] = 0
    draft_pct: Annotated[Whole, Field(ge=0, le=100)] = 100

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return without_comments(data, nulls=cls.model_fields)

    @property
    def kv_transfer_params(self) -> dict[str, int] | None:
        """The client's parameters for a KV connector; None without any."""
        names = ("max_load_tokens", "max_offload_tokens")
        given = {name: getattr(self, name) for name in names}
        return {k: v for k, v in given.items() if v is not None} or None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(length for _, length in self.prompt)

    @model_validator(mode="after")
    def _consistent(self) -> DecisionRequest:
        if not 0 < self.num_prompt_tokens <= MAX_PROMPT_TOKENS:
            raise ValueError(
                f"the prompt of {self.id!r} must have 1 to {MAX_PROMPT_TOKENS:,} "
                f"tokens, got {self.num_prompt_tokens:,}"
            )
        lens = self.branch_output_lens
        if lens is not None and len(lens) != self.n:
            raise ValueError(
                f"branch_output_lens of {self.id!r} must name {self.n} lengths (n), "
                f"got {len(lens)}"
            )
        return self
