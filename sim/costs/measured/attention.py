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
from sim.costs.widths import ESTIMATE, Widths, read_widths, wider

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
        prefill_s = decode_s = 0.0
        prefill_region = decode_region = 0
        if num_decodes:
            row = self._decode_rows.get(num_decodes) or self.decode.row(num_decodes)
            value, slope, start, beyond = row[
                bisect_right(self._contexts, decode_context // num_decodes)
            ]
            decode_s = value + slope * (decode_context - start)
            decode_region = 1 if beyond else 0
        if num_chunks and (num_tokens or num_decodes):
            row = self._prefill_rows.get(num_chunks) or self._prefill.row(num_chunks)
            value, slope, start, beyond = row[
                bisect_right(self._pairs, pairs // num_chunks)
            ]
            prefill_s = value + slope * (pairs - start)
            if context != num_tokens:
                if self._past is None:
                    prefill_region = GUESSED
                else:
                    chunk = mean_chunk(num_chunks, context, pairs, num_chunks)
                    factor, beyond = self._past.at(*chunk)
                    prefill_s *= factor
            if beyond and not prefill_region:
                prefill_region = 1
            read_s = self._key_s * context
            if read_s > prefill_s:  # noqa: PLR1730 - a call of `max` is slower
                prefill_s = read_s
            if num_decodes and self._beside is not None:
                chunk = mean_chunk(num_chunks, context, pairs, 1)
                factor, beyond = self._beside.at(*chunk, num_decodes, decode_context)
                prefill_s *= factor
                decode_s *= factor
                if beyond:
                    prefill_region = prefill_region or 1
                    decode_region = 1
        return prefill_s, decode_s, prefill_region, decode_region

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
