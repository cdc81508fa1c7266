"""Prefix identity from token ids: equal leading tokens, equal leading segments."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.spec import Segment

Tokens = array  # of 'q', signed 64-bit: compared and cut in C
"""Token ids of one text."""

_ROOT = -1
_FIRST_STRIDE = 64


class TokenTrie:
    """All texts seen, as a tree of segments that branch where texts part.

    A text is a path from the root. Where it leaves what is known, at whatever token,
    the rest becomes a segment of its own; so a segment is quoted from its start, up to
    where a text left it. Two texts have as many equal leading tokens as their paths
    have in common. Each token is compared and stored once: time and memory are linear.
    """

    def __init__(self) -> None:
        self._labels: dict[int, Tokens[int]] = {}
        # By segment, tokens of it that were read, and the token after them.
        self._children: dict[tuple[int, int, int], int] = {}
        self._num_texts = 0

    def new_segment(self) -> int:
        """Return the id of a prompt's text that is in no other."""
        segment = 2 * self._num_texts
        self._num_texts += 1
        return segment

    def add_prompt(self, tokens: Tokens[int]) -> tuple[Segment, ...]:
        """Return the segments of a prompt, which is known from now on."""
        path: list[Segment] = []
        place, read = (_ROOT, 0), 0
        while read < len(tokens):
            child = self._children.get((*place, tokens[read]))
            if child is None:
                child = self.new_segment()
                self._add(place, child, tokens[read:])
            num = _num_equal(self._labels[child], tokens, read)
            read += num
            place = (child, num)
            path.append(place)
        return tuple(path)

    def add_output(
        self, prompt: tuple[Segment, ...], segment: int, tokens: Tokens[int]
    ) -> None:
        """Let later prompts quote a text that was generated after `prompt`.

        Where a prompt is known already that goes on like the output, what is known
        stays: a text has the id of its first occurrence.
        """
        place = prompt[-1]
        label, read = self._labels[place[0]], place[1]
        goes_on = read < len(label) and label[read] == tokens[0]
        if not goes_on and (*place, tokens[0]) not in self._children:
            self._add(place, segment, tokens)

    def _add(self, place: tuple[int, int], segment: int, tokens: Tokens[int]) -> None:
        self._labels[segment] = tokens
        self._children[(*place, tokens[0])] = segment


def _num_equal(label: Tokens[int], tokens: Tokens[int], start: int) -> int:
    """Return how many leading tokens of `label` are those from `start` on.

    By strides that double, then halve: linear in the answer, compared in C.
    """
    most = min(len(label), len(tokens) - start)
    num, stride = 0, _FIRST_STRIDE
    while num < most:
        end = min(num + stride, most)
        if label[num:end] != tokens[start + num : start + end]:
            other = tokens[start + num : start + end]
            return num + _num_equal_of(label[num:end], other)
        num, stride = end, 2 * stride
    return num


def _num_equal_of(one: Tokens[int], other: Tokens[int]) -> int:
    """Return the position of the first difference of two texts that differ."""
    low, high = 0, len(one)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
