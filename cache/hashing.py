"""Chained hashes of full blocks.

A block's key depends on all tokens before it as well: key = H(parent key, content).
Equal keys therefore mean equal prefixes, and a lookup walks the chain to the first
miss. The real engine hashes token ids with SHA-256; the content here is symbolic
(`cache.tokens`), and the key is Python's 64-bit tuple hash, which for integers does
not depend on the process. Among ten million distinct blocks two keys collide with a
probability of about 3 in a million.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

NONE_HASH = 0
"""Parent key of a request's first block."""


def hash_block(parent: int, content: Hashable) -> int:
    """Return the key of a full block."""
    return hash((parent, content))
