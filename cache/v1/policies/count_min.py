"""How often content was seen lately, in a few bits each."""

from __future__ import annotations

_MASK = 2**64 - 1
# Odd numbers without a pattern (fractions of square roots), one for each row.
_FACTORS = (
    0x9E3779B97F4A7C15,
    0x6A09E667F3BCC909,
    0xBB67AE8584CAA73B,
    0x3C6EF372FE94F82B,
)
MOST_COUNTED = 15
"""A counter has four bits."""
_HALVES = bytes(count // 2 for count in range(256))


class CountMinSketch:
    """Approximate counts that grow old: all are halved now and then.

    A content has a counter in each of four rows, chosen by multiplying its key; its
    count is the smallest of them, and only the smallest grow (minimal increment).
    Counts are too high where keys share all their counters, and never too low but for
    the aging. The same calls give the same counts in every process.

    Parameters
    ----------
    num_counters
        Counters of a row, rounded up to a power of two.
    sample_size
        Additions after which all counts are halved.

    Notes
    -----
    Source: Cormode and Muthukrishnan, An improved data stream summary: the count-min
    sketch, J. Algorithms 55(1), 2005; aging, size of counters and minimal increment as
    in Einziger, Friedman and Manes, TinyLFU, ACM Trans. Storage 13(4), 2017.
    """

    def __init__(self, num_counters: int, sample_size: int) -> None:
        bits = max(num_counters - 1, 1).bit_length()
        self._shift = 64 - bits
        self._rows = [bytearray(1 << bits) for _ in _FACTORS]
        self._sample_size = sample_size
        self._num_added = 0

    def add(self, content: int) -> None:
        """Count a content once more. O(1), and O(num_counters) at times."""
        places = self._places(content)
        count = min(row[i] for row, i in zip(self._rows, places, strict=True))
        if count < MOST_COUNTED:
            for row, i in zip(self._rows, places, strict=True):
                if row[i] == count:
                    row[i] = count + 1
        self._num_added += 1
        if self._num_added >= self._sample_size:
            self._num_added //= 2
            self._rows = [row.translate(_HALVES) for row in self._rows]

    def count(self, content: int) -> int:
        """Return about how often a content was added, at most 15."""
        places = self._places(content)
        return min(row[i] for row, i in zip(self._rows, places, strict=True))

    def _places(self, content: int) -> list[int]:
        shift = self._shift
        return [((content * factor) & _MASK) >> shift for factor in _FACTORS]
