"""Real text as numbers of tokens and as identities of blocks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Protocol

from sim.errors import ConfigError
from sim.serving.filler import MOST_WORDS, NUMBERS, Filler, is_word

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from workloads.spec import Segment

CHARACTERS_PER_TOKEN: Final = 4
"""Of English text, as a rule of thumb."""

FIRST_ANSWER: Final = 1 << 62
"""Segment of the first answer; those of prompts are below."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine sees it.

    Parameters
    ----------
    num_tokens
        Its length.
    segments
        Its identity: equal where the text is equal, block by block.
    ids
        Returns its token ids, for observers of the cache.
    """

    num_tokens: int
    segments: tuple[Segment, ...]
    ids: Callable[[], Sequence[int]]


class Tokens(Protocol):
    """How text becomes tokens.

    Attributes
    ----------
    filler
        Text of answers; each of its words is a token.
    """

    filler: Filler

    def count(self, text: str) -> int:
        """Return a number of tokens that `text` has at least."""
        ...

    def prompt(self, text: str, block_size: int) -> Prompt:
        """Return a prompt of at least one token."""
        ...


class CharacterTokens:
    """Every four characters are a token, the rest another one."""

    filler = NUMBERS

    def count(self, text: str) -> int:
        return max(1, -(-len(text) // CHARACTERS_PER_TOKEN))

    def prompt(self, text: str, block_size: int) -> Prompt:
        size = block_size * CHARACTERS_PER_TOKEN
        num_tokens = self.count(text)
        segments = []
        for start in range(0, max(len(text), 1), size):
            piece = text[start : start + size]
            name = _named(piece.encode("utf-8", "surrogatepass"), b"text")
            segments.append((name, self.count(piece)))
        return Prompt(num_tokens, tuple(segments), partial(_ids_of_text, text))


class FileTokens:
    """Tokens of a ``tokenizer.json``.

    Parameters
    ----------
    path
        The file, or the folder that it lies in.

    Raises
    ------
    ConfigError
        If it cannot be read, or the package for it is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415 - only for such a file
        except ModuleNotFoundError as error:
            raise ConfigError(
                "--tokenizer needs tokenizers; pip install 'kvsim[serve]'"
            ) from error
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:
            raise ConfigError(
                f"--tokenizer '{file}' cannot be read: {error}; give a tokenizer.json"
            ) from error

        self.filler = self._words() or NUMBERS

    def _words(self) -> Filler | None:
        """Return words that are a token each, also in a row; None without any."""
        encode = self._tokenizer.encode
        found: dict[int, str] = {}
        for token, number in sorted(
            self._tokenizer.get_vocab().items(), key=itemgetter(1)
        ):
            if is_word(token):
                word = f" {token[1:]}"
                if encode(word * 3, add_special_tokens=False).ids == [number] * 3:
                    found[number] = word
            if len(found) == MOST_WORDS:
                break
        text = "".join(found.values())
        is_sure = encode(text, add_special_tokens=False).ids == [*found]
        return Filler([*found.values()]) if found and is_sure else None

    def count(self, text: str) -> int:
        return 1  # known only when it is cut

    def ids(self, text: str) -> tuple[list[int], list[str]]:
        """Return the ids and the texts of its tokens."""
        found = self._tokenizer.encode(text)
        return found.ids, found.tokens

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def prompt(self, text: str, block_size: int) -> Prompt:
        return prompt_of_ids(self.ids(text)[0] or [0], block_size)


def prompt_of_ids(ids: Sequence[int], block_size: int) -> Prompt:
    """Return the prompt of tokens that are given by their ids."""
    segments = []
    for start in range(0, len(ids), block_size):
        piece = array("q", ids[start : start + block_size])
        segments.append((_named(piece.tobytes(), b"ids"), len(piece)))
    return Prompt(len(ids), tuple(segments), lambda: ids)


def _ids_of_text(text: str) -> Sequence[int]:
    """Return made-up ids of four characters each, equal where these are equal."""
    size = CHARACTERS_PER_TOKEN
    pieces = (text[at : at + size] for at in range(0, max(len(text), 1), size))
    return [
        _named(piece.encode("utf-8", "surrogatepass"), b"token") & 0x7FFF_FFFF
        for piece in pieces
    ]


def _named(content: bytes, kind: bytes) -> int:
    """Return the segment of a block's content; nothing is kept of what was named."""
    digest = blake2b(content, digest_size=8, person=kind).digest()
    return int.from_bytes(digest, "big") >> 2
