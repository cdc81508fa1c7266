"""Which engines were sent which prompts: a radix tree over pieces of segments."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from cache.errors import require
from cache.tokens import TokenRuns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from cache.tokens import Piece, TokenSlice


class _Node:
    """Tokens that follow those of its parent.

    Attributes
    ----------
    pieces, num_tokens
        Them.
    children
        By the first token of each: its segment and place there.
    used
        By place, when a prompt went through it to that engine.
    """

    __slots__ = ("children", "num_tokens", "parent", "pieces", "used")

    def __init__(self, pieces: list[Piece], parent: _Node | None) -> None:
        self.pieces = pieces
        self.num_tokens = sum(length for *_, length in pieces)
        self.parent = parent
        self.children: dict[tuple[int, int], _Node] = {}
        self.used: dict[int, int] = {}


def pieces_of(prompt: TokenSlice) -> tuple[Piece, ...]:
    """Return the pieces of a prompt; of plain token ids, one a token."""
    if isinstance(prompt, TokenRuns):
        return prompt.pieces
    return tuple((token, 0, 1) for token in prompt)


class PrefixTree:
    """Remembers prompts by the engine that they were sent to.

    Two tokens are equal if they stand at the same place of the same segment.

    Parameters
    ----------
    most_tokens
        What is remembered of an engine before `evict` takes the oldest ends.
    is_shared
        Whether that is the limit of all engines together.

    Attributes
    ----------
    num_tokens
        By place, remembered tokens; a prefix that several prompts share counts once.

    Notes
    -----
    Source: sglang-router 0.3.2 (tree of characters per model, its nodes with the
    workers that were sent them, and when); of SMG the one limit (its string tree's
    ``evict_tenant_by_size``).
    """

    def __init__(self, most_tokens: int, *, is_shared: bool = False) -> None:
        self.most_tokens = most_tokens
        self.is_shared = is_shared
        self.num_tokens: dict[int, int] = {}
        self._root = _Node([], None)
        self._ticks = count(1)

    def match(self, pieces: Sequence[Piece]) -> tuple[int, list[int]]:
        """Return how many leading tokens are known, and the engines that know them all.

        Engines are in the order of their places; none where nothing is known.
        """
        num_tokens, node, places = 0, self._root, list[int]()
        rest = list(pieces)
        while rest:
            child = node.children.get(rest[0][:2])
            if child is None or not child.used:
                break
            num_common = _num_common(child.pieces, rest)
            num_tokens += num_common
            places = sorted(child.used)
            if num_common < child.num_tokens:
                break
            rest = _behind(rest, num_common)
            node = child
        return num_tokens, places

    def insert(self, pieces: Sequence[Piece], place: int) -> None:
        """Remember that a prompt went to the engine at `place`."""
        tick = next(self._ticks)
        node, rest = self._root, [piece for piece in pieces if piece[2]]
        while rest:
            key = rest[0][:2]
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(rest, node)
            else:
                num_common = _num_common(child.pieces, rest)
                if num_common < child.num_tokens:
                    child = _parted(child, num_common)
            if place not in child.used:
                known = self.num_tokens.get(place, 0)
                self.num_tokens[place] = known + child.num_tokens
            child.used[place] = tick
            rest = _behind(rest, child.num_tokens)
            node = child

    def evict(self) -> None:
        """Forget the least recently used ends beyond `most_tokens`."""
        if self.is_shared:
            self._evict_from(self.num_tokens)
            return
        for place in self.num_tokens:
            self._evict_from((place,))

    def forget(self, place: int) -> None:
        """Forget all that the engine at `place` was sent."""
        self.num_tokens.pop(place, None)
        for node in reversed([*self._nodes()]):
            node.used.pop(place, None)
            if not (node.used or node.children):
                assert node.parent is not None
                del node.parent.children[node.pieces[0][:2]]

    def _evict_from(self, places: Collection[int]) -> None:
        """Forget the oldest ends of some engines until they are within the limit."""
        left = sum(self.num_tokens[place] for place in places) - self.most_tokens
        if left <= 0:
            return
        # No two ends were used at one tick: a prompt has one.
        ends = [
            (tick, place, node)
            for node in self._nodes()
            for place, tick in node.used.items()
            if place in places and not self._is_inside(node, place)
        ]
        heapify(ends)
        while left > 0:
            _, place, node = heappop(ends)
            parent = node.parent
            assert parent is not None
            del node.used[place]
            self.num_tokens[place] -= node.num_tokens
            left -= node.num_tokens
            if not (node.used or node.children):
                del parent.children[node.pieces[0][:2]]
            if place in parent.used and not self._is_inside(parent, place):
                heappush(ends, (parent.used[place], place, parent))

    @staticmethod
    def _is_inside(node: _Node, place: int) -> bool:
        return any(place in child.used for child in node.children.values())

    def _nodes(self) -> Iterator[_Node]:
        found = [self._root]
        while found:
            node = found.pop()
            children = node.children.values()
            yield from children
            found += children

    def check(self) -> None:
        """Prove that what leads to a remembered end is remembered.

        Raises
        ------
        InvariantError
            With the rule that is broken.
        """
        counted = dict.fromkeys(self.num_tokens, 0)
        for node in self._nodes():
            parent = node.parent
            require(
                parent is self._root
                or (parent is not None and node.used.keys() <= parent.used.keys()),
                "prefix tree: an engine knows an end, but not what leads to it",
            )
            require(bool(node.num_tokens), "prefix tree: a node without tokens")
            for place in node.used:
                counted[place] += node.num_tokens
        require(counted == self.num_tokens, "prefix tree: tokens are miscounted")


def _num_common(left: Sequence[Piece], right: Sequence[Piece]) -> int:
    """Return how many leading tokens are equal."""
    num_tokens = 0
    mine, theirs = iter(left), iter(right)
    one, other = next(mine, None), next(theirs, None)
    while one is not None and other is not None and one[:2] == other[:2]:
        length = min(one[2], other[2])
        num_tokens += length
        one = _rest_of(one, length) or next(mine, None)
        other = _rest_of(other, length) or next(theirs, None)
    return num_tokens


def _rest_of(piece: Piece, num_tokens: int) -> Piece | None:
    segment, offset, length = piece
    if length == num_tokens:
        return None
    return segment, offset + num_tokens, length - num_tokens


def _behind(pieces: Sequence[Piece], num_tokens: int) -> list[Piece]:
    """Return the pieces behind the first `num_tokens`."""
    for index, piece in enumerate(pieces):
        if num_tokens < piece[2]:
            rest = _rest_of(piece, num_tokens)
            assert rest is not None
            return [rest, *pieces[index + 1 :]]
        num_tokens -= piece[2]
    return []


def _parted(node: _Node, num_tokens: int) -> _Node:
    """Part a node behind so many of its tokens; return the first part."""
    parent = node.parent
    assert parent is not None
    head_pieces, left = list[tuple[int, int, int]](), num_tokens
    for segment, offset, length in node.pieces:
        if not left:
            break
        taken = min(length, left)
        head_pieces.append((segment, offset, taken))
        left -= taken
    head = _Node(head_pieces, parent)
    head.used = dict(node.used)
    parent.children[head_pieces[0][:2]] = head
    node.pieces = _behind(node.pieces, num_tokens)
    node.num_tokens -= num_tokens
    node.parent = head
    head.children[node.pieces[0][:2]] = node
    return head
