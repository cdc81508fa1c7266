"""Attention time of a model whose layers differ: windows, chunks, states.

A step's shape holds sums over its requests. They are taken for equal requests: a *mean
decode* has the mean context, a *mean chunk* the mean query and the mean past. What such
a one sees of a window, or of a chunk of fixed position, is then exact, so that a step
with one chunk is, too, and one with several as far as they are alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from numpy import ndarray

from sim.costs.parts import Count, Line, Memo, Seconds, larger, smaller, where
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Sequence


class LayerGroup(NamedTuple):
    """Attention layers of one kind, all of them together."""

    kv_token_s: float
    """Seconds to read keys and values of a token."""
    pair_s: float
    """Seconds of a query-key pair of a chunk."""
    window: int = 0
    """Keys that a query sees at most; 0 for all."""
    is_chunked: bool = False
    """Whether it sees those of its chunk instead, `window` tokens of fixed position."""
    dense_pair_s: float = 0.0
    """Seconds of a pair where all keys are read, of layers that choose `window` keys a
    query (sparse attention); 0 for others."""

    @property
    def decode_limit(self) -> int:
        """Keys that a decode reads at most; 0 for all.

        Where a decode stands in its chunk is not known: it has read half of one.
        """
        return (self.window + 1) // 2 if self.is_chunked else self.window

    def chunks_s(
        self,
        count: Count,
        num_tokens: Count,
        context: Count,
        num_pairs: Count,
        tile_tokens: float,
    ) -> tuple[Seconds, Seconds]:
        """Return seconds to multiply, and to read, what chunks see.

        Where keys are chosen, chunks may read all of them instead, which is quicker
        where there are few; what is chosen fills no tile in vain.
        """
        keys, pairs = self.seen(count, num_tokens, context, num_pairs)
        if not self.dense_pair_s:
            compute_s = self.pair_s * (pairs + tile_tokens * keys)
            return compute_s, self.kv_token_s * keys
        dense_s = self.dense_pair_s * (num_pairs + tile_tokens * context)
        read_s = self.kv_token_s * smaller(context, pairs)
        return smaller(self.pair_s * pairs, dense_s), read_s

    def seen(
        self, count: Count, num_tokens: Count, context: Count, num_pairs: Count
    ) -> tuple[Seconds, Seconds]:
        """Return keys before and in `count` chunks that are read, and pairs."""
        if not self.window:
            return context, num_pairs
        if self.is_chunked:
            keys, pairs = self._in_chunks(count, num_tokens, context)
        else:
            keys, pairs = self._in_window(count, num_tokens, context)
        return smaller(keys, context), smaller(pairs, num_pairs)

    def _in_window(
        self, count: Count, num_tokens: Count, context: Count
    ) -> tuple[Seconds, Seconds]:
        window, query = self.window, num_tokens / count
        past = context / count - query
        # queries that see all before them, then those that see a window full
        ramp = smaller(larger(window - past, 0.0), query)
        pairs = ramp * past + ramp * (ramp + 1.0) / 2.0 + (query - ramp) * window
        return num_tokens + count * (window - 1), count * pairs

    def _in_chunks(
        self, count: Count, num_tokens: Count, context: Count
    ) -> tuple[Seconds, Seconds]:
        past = (context - num_tokens) // count
        end = past + num_tokens // count
        pairs = self._pairs_up_to(end) - self._pairs_up_to(past)
        return num_tokens + count * (past % self.window), count * pairs

    def _pairs_up_to(self, position: Count) -> Count:
        """Return pairs of all queries before a position; each chunk starts anew."""
        whole, rest = position // self.window, position % self.window
        full = self.window * (self.window + 1) // 2
        return whole * full + rest * (rest + 1) // 2


class StateLayers(NamedTuple):
    """Layers with a state, all of them together, in seconds."""

    sequence_s: float = 0.0
    """To read and write the states of a sequence."""
    token_s: float = 0.0
    """Of a prompt's token, where all of the GPU computes."""
    token_memory_s: float = 0.0
    """Of a prompt's token in the convolution before."""
    full_count: float = 1.0
    """Chunks that keep all of the GPU busy: each scans its tokens head by head, one
    after the other."""

    def prefill_s(self, count: Count, num_tokens: Count) -> Seconds:
        idle = larger(self.full_count / count, 1.0)
        scan_s = self.token_s * num_tokens * idle
        return scan_s + self.token_memory_s * num_tokens + self.sequence_s * count


@dataclass(frozen=True, slots=True)
class Mixture:
    """Seconds of attention and states over all layers of a model."""

    groups: Sequence[LayerGroup]
    states: StateLayers
    decode_sequence_s: float
    """Of a decode, beside what it reads of keys and states."""
    tile_tokens: float
    """Query rows that a chunk wastes, each against all that the chunk sees."""
    decode_compute: float
    """Times that a key of a decode takes longer to multiply than to read."""
    mixed_decode_compute: float
    """The same in a batch with chunks."""
    _kept: Memo[list[tuple[int, float, float]]] = field(
        init=False, repr=False, compare=False, default_factory=Memo
    )
    """Lines by the number of decodes."""

    def lines(self, num_decodes: Count) -> list[tuple[Count, Seconds, float]]:
        """Return context, seconds and slope where each line of decodes begins.

        Beyond as many tokens as the decodes may see of a kind its layers read no more.
        """
        sequence_s = self.decode_sequence_s + self.states.sequence_s
        value_s: Seconds = sequence_s * num_decodes
        slope_s = added(group.kv_token_s for group in self.groups)
        found = [(0 * num_decodes, value_s, slope_s)]
        for limit in sorted({g.decode_limit for g in self.groups if g.decode_limit}):
            first, start = num_decodes * limit, found[-1][0]
            value_s = value_s + slope_s * (first - start)
            slope_s = added(
                group.kv_token_s
                for group in self.groups
                if not group.decode_limit or group.decode_limit > limit
            )
            found.append((first, value_s, slope_s))
        return found

    def steady(self, num_decodes: int) -> list[Line] | None:
        """Return the lines of decodes alone; None where computing outlasts reading."""
        if self.decode_compute > 1.0:
            return None
        return [
            Line(first, value_s, slope_s, first)
            for first, value_s, slope_s in self._lines(num_decodes)
        ]

    def _lines(self, num_decodes: int) -> list[tuple[int, float, float]]:
        return self._kept.get(num_decodes) or self._kept.keep(
            num_decodes, self.lines(num_decodes)
        )

    def decode_s(
        self, num_decodes: Count, num_context_tokens: Count, num_prefills: Count
    ) -> Seconds:
        if num_decodes.__class__ is ndarray:
            lines = self.lines(num_decodes)
            decode_s: Seconds = 0.0
            for first, value_s, slope_s in lines:
                beyond_s = value_s + slope_s * (num_context_tokens - first)
                decode_s = where(num_context_tokens >= first, beyond_s, decode_s)
        else:
            lines = self._lines(num_decodes)
            place = -1
            while lines[place][0] > num_context_tokens:
                place -= 1
            first, value_s, slope_s = lines[place]
            decode_s = value_s + slope_s * (num_context_tokens - first)
        sequences_s = lines[0][1]
        if self.mixed_decode_compute <= 1.0:
            return decode_s
        times = where(num_prefills, self.mixed_decode_compute, self.decode_compute)
        return larger(decode_s, times * (decode_s - sequences_s))

    def prefill_s(
        self,
        num_prefills: Count,
        num_tokens: Count,
        num_context_tokens: Count,
        num_pairs: Count,
    ) -> Seconds:
        count = larger(num_prefills, 1)  # columns have steps without a chunk
        compute_s: Seconds = 0.0
        read_s: Seconds = 0.0
        for group in self.groups:
            of_group = group.chunks_s(
                count, num_tokens, num_context_tokens, num_pairs, self.tile_tokens
            )
            compute_s = compute_s + of_group[0]
            read_s = read_s + of_group[1]
        return larger(compute_s, read_s) + self.states.prefill_s(count, num_tokens)
