"""When attention reads a prefix that all requests of a step share once."""

from __future__ import annotations

from collections.abc import Callable  # noqa: TC003 - see below
from dataclasses import dataclass, field
from typing import Any, Final

from sim.costs.parts import Memo  # noqa: TC001 - `sim.config.plug` resolves them
from sim.scheduler.generation import GraphRule  # noqa: TC001 - see above

SOURCE: Final = "vLLM 0.8.5 to 0.31.0, use_cascade_attention"
_LEAST_TOKENS: Final = 256
_LEAST_REQUESTS: Final = 8
_TILE: Final = 128
"""Queries, and keys, of a thread block, as the rule takes them."""


@dataclass(frozen=True, slots=True)
class CascadeRule:
    """When attention reads a common prefix once.

    Parameters
    ----------
    num_query_heads, num_kv_heads
        Of a rank.
    num_sms
        Streaming multiprocessors of the GPU.
    reading
        From a cost model to that of steps that read so many tokens once.
    replays_decodes
        Whether decodes alone are replayed as one graph whatever they share, so that
        they never do, up to as many tokens as graphs hold: so in 0.11.0 (vLLM 23046).

    Notes
    -----
    Source: vLLM 0.8.5 to 0.31.0, ``v1/attention/backends/flash_attn.py``
    (`use_cascade_attention`), the same in all of them.
    """

    num_query_heads: int
    num_kv_heads: int
    num_sms: int
    reading: Callable[[Any, int], Any] = field(repr=False, compare=False)
    replays_decodes: bool = False

    def described(self) -> dict[str, Any]:
        """Return it with its source, JSON-ready."""
        return {
            "num_query_heads": self.num_query_heads,
            "num_kv_heads": self.num_kv_heads,
            "num_sms": self.num_sms,
            "source": SOURCE,
        }

    def is_used(
        self, num_common_tokens: int, num_requests: int, *, has_chunks: bool
    ) -> bool:
        """Whether a step does so.

        Parameters
        ----------
        num_common_tokens
            Of the prefix, in whole blocks that each request had computed before.
        num_requests
            Of the step.
        has_chunks
            Whether one of them has a query of more than one token.
        """
        if num_common_tokens < _LEAST_TOKENS or num_requests < _LEAST_REQUESTS:
            return False
        queries_per_kv = self.num_query_heads // self.num_kv_heads
        if queries_per_kv == 1 or has_chunks:
            return True
        # Decodes are split along their keys instead: waves of either are compared.
        num_tiles = -(-num_common_tokens // _TILE)
        num_blocks = self.num_query_heads * -(-num_requests // _TILE)
        own = num_requests * self.num_kv_heads * -(-queries_per_kv // _TILE)
        num_waves = -(-num_blocks // self.num_sms)
        return num_waves * num_tiles < -(-own * num_tiles // self.num_sms)


class ReadsOnce:
    """The part of a roofline that knows prefixes of all requests."""

    __slots__ = ()
    cascade_rule: CascadeRule | None
    graph_rule: GraphRule
    _reading: Memo[Any]

    @property
    def reads_prefixes_once(self) -> bool:
        """See `sim.costs.base.ReadsPrefixesOnce`."""
        return self.cascade_rule is not None

    def num_read_once(
        self, num_common_tokens: int, num_decodes: int, num_prefills: int
    ) -> int:
        """See `sim.costs.base.ReadsPrefixesOnce`."""
        rule, has_chunks = self.cascade_rule, num_prefills > 0
        num_requests = num_decodes + num_prefills
        if rule is None or not rule.is_used(
            num_common_tokens, num_requests, has_chunks=has_chunks
        ):
            return 0
        if rule.replays_decodes and self.graph_rule.replays(num_decodes, 0):
            return num_common_tokens * has_chunks
        return num_common_tokens

    def reading_once(self, num_tokens: int) -> Any:
        """See `sim.costs.base.ReadsPrefixesOnce`."""
        if not num_tokens:
            return self
        assert self.cascade_rule is not None
        return self._reading.get(num_tokens) or self._reading.keep(
            num_tokens, self.cascade_rule.reading(self, num_tokens)
        )
