"""Which drafts are proposed, and what the scheduler and the cache make of that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from sim.errors import SchedulerError


class SpeculativeMethod(Enum):
    """Where draft tokens come from, under vLLM's names."""

    NGRAM = "ngram"
    """Looked up in the request's own text: no cache, and as many as are found."""
    EAGLE = "eagle"
    """Layers on top of the target's last hidden states."""
    EAGLE3 = "eagle3"
    """The same, with hidden states of several layers."""
    MTP = "mtp"
    """The target's own layer for the token after the next."""
    DRAFT_MODEL = "draft_model"
    """A smaller model of its own."""

    @property
    def reads_hidden_states(self) -> bool:
        """Whether a drafter's cache at a position depends on the token behind it.

        It is built from the target's hidden state there and from that token.
        """
        return self not in (SpeculativeMethod.NGRAM, SpeculativeMethod.DRAFT_MODEL)

    @property
    def has_kv_cache(self) -> bool:
        """Whether the drafter keeps a cache."""
        return self is not SpeculativeMethod.NGRAM


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Speculative decoding as the scheduler is told of it, under vLLM's names.

    Parameters
    ----------
    method
        Where drafts come from.
    num_speculative_tokens
        Most drafts of a request in a step.
    disable_lookahead_block_hashes
        Let the key of a block not cover the token behind it; the last block of a hit is
        then computed again.
    disable_eagle_block_drop
        Use hits as they are.

    Raises
    ------
    SchedulerError
        Without a draft token.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/config/speculative.py`` and ``vllm/config/vllm.py``.
    """

    method: SpeculativeMethod
    num_speculative_tokens: int
    disable_lookahead_block_hashes: bool = False
    disable_eagle_block_drop: bool = False

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise SchedulerError(
                f"num_speculative_tokens must be at least 1, got "
                f"{self.num_speculative_tokens}; leave speculative_config out for none"
            )

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots that the drafter writes to behind the tokens of a step."""
        return self.num_speculative_tokens if self.method.has_kv_cache else 0

    @property
    def num_draft_slots(self) -> int:
        """Tokens that each request of a batch takes from its size beside its own."""
        return int(self.method is SpeculativeMethod.DRAFT_MODEL)

    @property
    def num_step_tokens(self) -> int:
        """Slots of a decode in a step: its token, its drafts, and the drafter's."""
        return 1 + self.num_speculative_tokens + self.num_lookahead_tokens

    def num_hash_lookahead_tokens(
        self, *, enable_prefix_caching: bool, has_connector: bool = False
    ) -> int:
        """Return how many tokens behind a block its key covers.

        None with a KV connector: others, too, must find what the key stands for.
        """
        heeds = self._heeds_boundaries and enable_prefix_caching and not has_connector
        return int(heeds and not self.disable_lookahead_block_hashes)

    def drops_eagle_block(
        self, *, enable_prefix_caching: bool, has_connector: bool = False
    ) -> bool:
        """Whether the last block of a hit is computed again, if there are hits."""
        return self._heeds_boundaries and not self.num_hash_lookahead_tokens(
            enable_prefix_caching=enable_prefix_caching, has_connector=has_connector
        )

    @property
    def _heeds_boundaries(self) -> bool:
        return self.method.reads_hidden_states and not self.disable_eagle_block_drop

    def limits(
        self, *, enable_prefix_caching: bool, has_connector: bool = False
    ) -> dict[str, Any]:
        """Return the part of `cache.v1.groups.kinds.EngineLimits` that drafts set."""
        keys = {
            "enable_prefix_caching": enable_prefix_caching,
            "has_connector": has_connector,
        }
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "num_lookahead_tokens": self.num_lookahead_tokens,
            "num_hash_lookahead_tokens": self.num_hash_lookahead_tokens(**keys),
            "drops_eagle_block": self.drops_eagle_block(**keys),
        }
