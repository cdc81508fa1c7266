"""Extents: neighbouring chunks of a prompt that a tier keeps as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from cache.errors import require
from cache.tiers.places import column_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cache.tiers.places import Ints, Keys, Span


class Owner(Protocol):
    """Ranks extents: a request, as `cache.tiers.lru` sees it."""

    rank: int

    def list(self, chunks: Chunks) -> None:
        """List chunks with those that it ranks."""
        ...


class Extent:
    """Successive chunks that were stored together, and share their fate so far.

    Attributes
    ----------
    keys, first, stop
        The prompt that they were stored of, and from which position on, before which.
    ids
        Places in the tier, in the prompt's order.
    is_written
        Whether they are not there yet.
    holds
        Jobs that write or read them: without any they may go.
    owner, position
        The policy's own: the request that ranks them, and where they begin in it.
    session
        The policy's own.
    """

    __slots__ = (
        "first",
        "holds",
        "ids",
        "is_written",
        "keys",
        "owner",
        "position",
        "session",
        "stop",
    )

    def __init__(self, keys: Keys, first: int, stop: int, ids: Ints) -> None:
        self.keys = keys
        self.first = first
        self.stop = stop
        self.ids = ids
        self.is_written = False
        self.holds: list[Hold] = []
        self.owner: Owner | None = None
        self.position = first
        self.session = 0

    def __len__(self) -> int:
        return self.stop - self.first

    def numbers(self) -> list[int]:
        """Return the number of each chunk."""
        return self.keys.numbers(self.first, self.stop)

    def runs(self) -> list[int]:
        """Return the runs of its chunks."""
        keys = self.keys
        return keys.runs[keys.piece_of(self.first) : keys.piece_of(self.stop - 1) + 1]

    def find(self, run: int, index: int) -> int:
        """Return the position of a chunk of one of its runs, -1 if it is not here."""
        keys = self.keys
        piece = keys.pieces[run]
        position = keys.starts[piece] + index
        is_here = self.first <= position < self.stop
        return position if is_here and position < keys.starts[piece + 1] else -1


class Hold:
    """Chunks that a job writes or reads.

    Attributes
    ----------
    extents
        In order; those that were cut since stand there in parts.
    chunk_ids
        Their places.
    """

    __slots__ = ("chunk_ids", "extents")

    def __init__(self, extents: list[Extent], chunk_ids: Ints) -> None:
        self.extents = extents
        self.chunk_ids = chunk_ids

    def numbers(self) -> list[int]:
        """Return the number of each chunk."""
        return [number for each in self.extents for number in each.numbers()]


class Chunks(NamedTuple):
    """An extent, and where it begins in a request."""

    extent: Extent
    position: int

    @property
    def span(self) -> Span:
        """Positions in the request."""
        return self.position, self.position + len(self.extent)


class Part(NamedTuple):
    """Successive chunks that a request shares with an extent.

    Attributes
    ----------
    position
        Of the first one in the request.
    extent, first, stop
        The extent, and which positions of its own prompt they are.
    """

    position: int
    extent: Extent
    first: int
    stop: int

    @property
    def span(self) -> Span:
        """Positions in the request."""
        return self.position, self.position + self.stop - self.first

    def between(self, first: int, stop: int) -> Part:
        """Return the part from a position of the request on and before another."""
        shift = self.first - self.position
        return Part(first, self.extent, first + shift, stop + shift)


class ExtentIndex:
    """Extents by the runs of their chunks.

    A run mostly belongs to one extent. Where an extent was cut inside a run, it belongs
    to both parts.
    """

    def __init__(self) -> None:
        self._by_run: dict[int, list[Extent]] = {}

    def find(self, run: int, index: int) -> tuple[Extent, int] | None:
        """Return the extent of a chunk of a run, and the position in its prompt."""
        for extent in self._by_run.get(run, ()):
            at = extent.find(run, index)
            if at >= 0:
                return extent, at
        return None

    def parts(self, keys: Keys, first: int, stop: int) -> list[Part]:
        """Return the parts of a prompt that it has between two positions.

        O(extents, and runs that are missing).
        """
        runs, starts, by_run = keys.runs, keys.starts, self._by_run
        piece, position = keys.piece_of(first), first
        found: list[Part] = []
        while position < stop:
            end = starts[piece + 1]
            if position >= end:
                piece += 1
                continue
            run = runs[piece]
            extents = by_run.get(run)
            if extents is None:
                last = keys.piece_of(stop - 1) + 1
                if by_run.keys().isdisjoint(runs[piece:last]):
                    break  # mostly
                position = end
                continue
            index = position - starts[piece]
            nearest = end
            for extent in extents:
                at = extent.find(run, index)
                if at >= 0:
                    break
                begin = extent.first - extent.keys.starts[extent.keys.pieces[run]]
                if begin > index:
                    nearest = min(nearest, position - index + begin)
            else:
                position = nearest
                continue
            number = min(extent.stop - at, stop - position)
            if extent.keys is not keys:
                number = _num_common(keys, position, extent.keys, at, number)
            found.append(Part(position, extent, at, at + number))
            position += number
            piece = keys.piece_of(position) if position < stop else piece
        return found

    def add(self, extent: Extent) -> None:
        """Let an extent be found."""
        by_run = self._by_run
        for run in extent.runs():
            extents = by_run.get(run)
            if extents is None:
                by_run[run] = [extent]
            else:
                extents.append(extent)

    def remove(self, extent: Extent) -> None:
        """Forget an extent."""
        for run in extent.runs():
            self._forget(run, extent)

    def _forget(self, run: int, extent: Extent) -> None:
        extents = self._by_run[run]
        if len(extents) > 1:
            extents.remove(extent)
        else:
            del self._by_run[run]

    def take_out(self, extent: Extent, at: int) -> Extent:
        """Forget an extent from a position of its prompt on; return that part."""
        if at <= extent.first:
            self.remove(extent)
            return extent
        keys, number = extent.keys, at - extent.first
        gone = Extent(keys, at, extent.stop, extent.ids[number:])
        extent.stop, extent.ids = at, extent.ids[:number]
        runs = gone.runs()
        if keys.starts[keys.pieces[runs[0]]] < at:
            del runs[0]  # the rest of that run stays
        for run in runs:
            self._forget(run, extent)
        return gone

    def split(self, extent: Extent, at: int) -> Extent:
        """Cut an extent in front of a position of its prompt; return the rest."""
        keys, number = extent.keys, at - extent.first
        rest = Extent(keys, at, extent.stop, extent.ids[number:])
        extent.stop, extent.ids = at, extent.ids[:number]
        rest.is_written = extent.is_written
        rest.session, rest.position = extent.session, extent.position + number
        for hold in extent.holds:
            rest.holds.append(hold)
            hold.extents.insert(hold.extents.index(extent) + 1, rest)
        rest.owner = extent.owner
        if rest.owner is not None:
            rest.owner.list(Chunks(rest, rest.position))
        by_run = self._by_run
        runs = rest.runs()
        if keys.starts[keys.pieces[runs[0]]] < at:  # it was cut inside a run
            by_run[runs[0]].append(rest)
            del runs[0]
        for run in runs:
            extents = by_run[run]
            extents[extents.index(extent)] = rest
        return rest

    def cut(self, part: Part) -> Extent:
        """Return the part of an extent as an extent of its own."""
        extent = part.extent
        if part.first > extent.first:
            extent = self.split(extent, part.first)
        if part.stop < extent.stop:
            self.split(extent, part.stop)
        return extent

    def cut_out(self, chunks: Iterable[tuple[int, int]]) -> Ints:
        """Forget chunks; return their places, in order. O(neighbours in this order).

        Parameters
        ----------
        chunks
            By number, and run.
        """
        ids: list[Ints] = []
        extent: Extent | None = None
        low = high = step = start = end = own_run = 0
        for number, run in chunks:
            if extent is not None:
                if run != own_run:
                    start, end = extent.keys.bounds_of(run)
                    own_run = run
                at = start + number - run
                if at == high < min(end, extent.stop) and step >= 0:
                    high, step = high + 1, 1
                    continue
                if at == low - 1 >= extent.first and at < end and step <= 0:
                    low, step = low - 1, -1
                    continue
                ids.append(self._cut_out(extent, low, high, step))
            found = self.find(run, number - run)
            assert found is not None
            extent, low = found
            high, step = low + 1, 0
            start, end = extent.keys.bounds_of(run)
            own_run = run
        if extent is not None:
            ids.append(self._cut_out(extent, low, high, step))
        return column_of(ids)

    def _cut_out(self, extent: Extent, first: int, stop: int, step: int) -> Ints:
        gone = self.cut(Part(first, extent, first, stop))
        self.remove(gone)
        return gone.ids[::-1] if step < 0 else gone.ids

    def extents(self) -> dict[Extent, None]:
        """Return all extents. O(n)."""
        lists = self._by_run.values()
        return dict.fromkeys([each for extents in lists for each in extents])

    def check(self) -> None:
        """Prove that each chunk is found where it is, and nothing else. O(n).

        Raises
        ------
        InvariantError
            With the extent.
        """
        known = {run: list(extents) for run, extents in self._by_run.items()}
        for extent in self.extents():
            first, stop = extent.first, extent.stop
            require(
                first < stop <= extent.keys.stop and len(extent.ids) == stop - first,
                "tier: an extent of chunks {} to {} has {} places",
                first,
                stop,
                len(extent.ids),
            )
            for run in extent.runs():
                require(extent in known[run], "tier: run {} misses an extent", run)
                known[run].remove(extent)
        require(not any(known.values()), "tier: a run knows an extent that is not its")
        numbers = [number for each in self.extents() for number in each.numbers()]
        require(len(numbers) == len(set(numbers)), "tier: a chunk is there twice")


def _num_common(keys: Keys, position: int, others: Keys, at: int, most: int) -> int:
    """Return how many chunks two prompts share, from one on that both have.

    Parameters
    ----------
    keys, others
        The prompts.
    position, at
        Of the chunk in each.
    most
        How many are asked for.
    """
    piece, its = keys.piece_of(position), others.piece_of(at)
    end = others.piece_of(at + most - 1) + 1
    ours, theirs = keys.runs[piece : piece + end - its], others.runs[its:end]
    if ours != theirs:
        end = its
        for run, other in zip(ours, theirs, strict=False):
            if run != other:
                break
            end += 1
    piece += end - its
    return min(most, keys.starts[piece] - position, others.starts[end] - at)
