"""Who lets the loop of `sim.engine.loop` write into its books."""

from __future__ import annotations


def may_write_books(*owners: object) -> bool:
    """Whether all of them say so by ``books``: the methods that the loop stands for.

    A subclass that redefines one of these must say so again: what it inherits speaks
    for another method.
    """
    return all(_says_so(type(owner)) for owner in owners)


def _says_so(owner: type) -> bool:
    books: frozenset[str] | None = getattr(owner, "books", None)
    if not books:
        return False
    for kind in owner.__mro__:
        if "books" in vars(kind):
            return True
        if books & vars(kind).keys():
            return False
    return False
