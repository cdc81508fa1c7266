"""Attention of measured steps: decodes, chunks, and what they do to each other."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from sim.costs.measured.factors import mean_chunk, mean_chunks
from sim.costs.measured.reading import (
    beside_factor,
    decode_surface,
    kv_key_s,
    past_factor,
    prefill_surface,
)
from sim.costs.widths import ESTIMATE, Widths, read_widths, squares_of, wider

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from sim.costs.roofline import RooflineCost
    from sim.costs.widths import Width

    Counts = NDArray[np.int64]
    Seconds = NDArray[np.float64]
    Flags = NDArray[np.bool_]

GUESSED: Final = 2
"""Region of chunks with a past where no such chunk was measured; 0 is inside what was
measured and 1 beyond."""


class AttentionColumns(NamedTuple):
    """Of many steps: seconds of chunks and of decodes, and their regions."""

    prefill_s: Seconds
    decode_s: Seconds
    prefill_region: Counts
    decode_region: Counts


class Attention:
    """Seconds of attention, all layers.

    Parameters
    ----------
    fit, entry
        Of the profile, and of the model in it.
    rest
        The datasheet's prices.

    Attributes
    ----------
    decode
        Over decodes and their contexts.
    decode_widths, prefill_widths
        By region, in the order of their numbers.
    """

    def __init__(
        self, fit: Mapping[str, Any], entry: Mapping[str, Any], rest: RooflineCost
    ) -> None:
        self.decode = decode_surface(entry["decode"], rest)
        self._prefill = prefill_surface(entry["prefill"], rest)
        self._key_s = kv_key_s(rest)
        self._past = past_factor(entry, rest, self._prefill)
        self._beside = beside_factor(
            entry, rest, self._past, self._prefill, self.decode
        )
        self._decode_rows, self._contexts = self.decode.rows, self.decode.amounts
        self._prefill_rows, self._pairs = self._prefill.rows, self._prefill.amounts
        self.decode_widths: tuple[Width, ...] = read_widths(fit, "decode_attention")
        fresh: Widths = read_widths(fit, "prefill_attention")
        self.prefill_widths: tuple[Width, ...] = *fresh, wider(fresh.beyond, ESTIMATE)

    def at(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_chunks: int,
        num_tokens: int,
        context: int,
        pairs: int,
    ) -> tuple[float, float, int, int]:
        """Return seconds of chunks and of decodes, and the region of each.

        A step without tokens computes nothing, whatever requests it has.
        """
        decode_s, decode_region = 0.0, 0
        if num_decodes:
            row = self._decode_rows.get(num_decodes) or self.decode.row(num_decodes)
            value, slope, start, beyond = row[
                bisect_right(self._contexts, decode_context // num_decodes)
            ]
            decode_s = value + slope * (decode_context - start)
            decode_region = 1 if beyond else 0
        if not num_chunks or not (num_tokens or num_decodes):
            return 0.0, decode_s, 0, decode_region
        row = self._prefill_rows.get(num_chunks) or self._prefill.row(num_chunks)
        value, slope, start, beyond = row[
            bisect_right(self._pairs, pairs // num_chunks)
        ]
        prefill_s = value + slope * (pairs - start)
        region = 1 if beyond else 0
        query = None
        if context != num_tokens:
            region = GUESSED
            if self._past is not None:
                query, past = mean_chunk(num_chunks, context, pairs, num_chunks)
                factor, beyond = self._past.at(query, past)
                prefill_s *= factor
                region = 1 if beyond else 0
        read_s = self._key_s * context
        if read_s > prefill_s:  # noqa: PLR1730 - a call of `max` takes longer
            prefill_s = read_s
        if num_decodes and self._beside is not None:
            if query is None or num_chunks != 1:
                query, past = mean_chunk(num_chunks, context, pairs, 1)
            factor, beyond = self._beside.at(query, past, num_decodes, decode_context)
            prefill_s *= factor
            decode_s *= factor
            if beyond:
                region, decode_region = region or 1, 1
        return prefill_s, decode_s, region, decode_region

    def squares(
        self, prefill_s: float, decode_s: float, prefill_region: int, decode_region: int
    ) -> tuple[float, float]:
        """Return the squares of the width of both, down and up, in s²."""
        down = up = 0.0
        if prefill_s:
            share_down, share_up = self.prefill_widths[prefill_region]
            down = (prefill_s * share_down) * (prefill_s * share_down)
            up = (prefill_s * share_up) * (prefill_s * share_up)
        if decode_s:
            share_down, share_up = self.decode_widths[decode_region]
            down += (decode_s * share_down) * (decode_s * share_down)
            up += (decode_s * share_up) * (decode_s * share_up)
        return down, up

    def square_columns(self, found: AttentionColumns) -> Seconds:
        """Return `squares` of each row, (2, n)."""
        prefill = squares_of(self.prefill_widths, found.prefill_s, found.prefill_region)
        decode = squares_of(self.decode_widths, found.decode_s, found.decode_region)
        return prefill + decode

    def columns(self, shapes: Counts) -> AttentionColumns:
        """Return `at` of each row."""
        decodes, context, chunks, tokens = shapes[:, :4].T
        decode_s, flags = self.decode.column(decodes, context)
        chunks = np.where(decodes + tokens != 0, chunks, 0)
        prefill_s, prefill_region = self._chunk_columns(chunks, shapes)
        both = np.flatnonzero((decodes != 0) & (chunks != 0))
        decode_region = flags.astype(np.int64)
        if self._beside is not None and len(both):
            past, pairs = shapes[both, 4:6].T
            chunk = mean_chunks(chunks[both], past, pairs, 1)
            factor, beyond = self._beside.column(*chunk, decodes[both], context[both])
            prefill_s[both] *= factor
            decode_s[both] *= factor
            for region in (prefill_region, decode_region):
                region[both] = np.maximum(region[both], beyond)
        return AttentionColumns(prefill_s, decode_s, prefill_region, decode_region)

    def _chunk_columns(self, chunks: Counts, shapes: Counts) -> tuple[Seconds, Counts]:
        """Return seconds and regions of chunks without decodes."""
        tokens, context, pairs = shapes[:, 3:6].T
        seconds, flags = self._prefill.column(chunks, pairs)
        region = flags.astype(np.int64)
        own = np.flatnonzero((chunks != 0) & (context != tokens))
        if self._past is None:
            region[own] = GUESSED
        elif len(own):
            chunk = mean_chunks(chunks[own], context[own], pairs[own], chunks[own])
            factor, region[own] = self._past.column(*chunk)
            seconds[own] *= factor
        read_s = np.where(chunks != 0, self._key_s * context, 0.0)
        return np.maximum(seconds, read_s), region
