"""The engine's ``speculative_config``: which drafts are proposed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sim.config.types import ConfigTable

Drafts = Annotated[int, Field(ge=0, le=1024)]


class SpeculativeTable(ConfigTable):
    """Draft tokens, under vLLM's names; 0 of them is the same as no table."""

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"]
    num_speculative_tokens: Drafts
    model: str | None = None
    disable_lookahead_block_hashes: bool = False
    disable_eagle_block_drop: bool = False

    @model_validator(mode="after")
    def _model_of_the_drafter(self) -> SpeculativeTable:
        """Ask for the draft model where there is one, and only there."""
        if self.method == "draft_model" and self.model is None:
            raise ValueError(
                "model: a draft_model is a model of its own; name it, as engine.model"
            )
        if self.method != "draft_model" and self.model is not None:
            raise ValueError(
                f"model: drafts of {self.method} have no model of their own (a head "
                f"follows the target's layers), got {self.model!r}; remove it"
            )
        return self
