"""YAML and JSON that users write: a key stands once, aliases stay bounded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import yaml

from workloads.errors import PlainDataError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from pathlib import Path

MOST_BY_ALIASES = 100_000
"""How many values aliases may add to those that are written."""


def parse_yaml(text: str, where: str) -> Any:
    """Return the plain data that `text` spells: tables, lists, numbers and text.

    Raises
    ------
    PlainDataError
        Where it is no YAML, or says more than that; `where` begins the message.
    """
    try:
        loader = _Loader(text)
        try:
            data = loader.get_single_data()
        finally:
            loader.dispose()
        json.dumps(data)  # dates, loops and the like are YAML, but no configuration
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "a character is not allowed"
        raise PlainDataError(f"{where}{line}: not YAML: {problem}; mend it") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise PlainDataError(
            f"{where}: a value is no plain number, text, list or table ({error}); "
            "put text in quotes"
        ) from error
    return data


def parse_file(text: str, path: Path) -> Any:
    """Return the value that a file of YAML or, by its name, of JSON spells."""
    where = f"{path} must hold YAML or JSON"
    if path.suffix != ".json":
        return parse_yaml(text, where)
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise PlainDataError(f"{where}; {str(error)[:200]}") from error


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a file that holds a table, YAML or JSON."""
    try:
        data = parse_file(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise PlainDataError(
            f"'{path}' cannot be read: {error}; put it there"
        ) from error
    if not isinstance(data, dict):
        raise PlainDataError(f"'{path}' must hold a table of keys and values")
    return data


class _Loader(yaml.SafeLoader):
    """Plain YAML, in which a key stands once and aliases are bounded."""

    def get_single_node(self) -> yaml.Node | None:
        """Read all nodes; refuse aliases before they are written out."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            sizes: dict[int, int] = {}
            added = _expanded_size(node, sizes) - len(sizes)
            if added > MOST_BY_ALIASES:
                raise yaml.composer.ComposerError(
                    problem=f"aliases (*name) stand for {_shown(added)} values more "
                    f"than are written, of at most {MOST_BY_ALIASES:,}"
                )
        return node

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        """Refuse a key that stands twice; the first would be lost in silence."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        problem=f"the key '{key_node.value}' stands twice",
                        problem_mark=key_node.start_mark,
                    )
                seen.add(key_node.value)
        table: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        # Tables are compared, sorted and written down by their keys.
        if len({_kind(key) for key in table}) > 1:
            odd = next(key for key in table if not isinstance(key, str))
            raise yaml.constructor.ConstructorError(
                problem=f"the key {odd!r} is no text, as others are; put it in quotes",
                problem_mark=node.start_mark,
            )
        return table


def _kind(key: object) -> type:
    return float if isinstance(key, int | float) else type(key)


def _expanded_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many nodes there are with each alias written out.

    `sizes` has those of nodes that were seen; one that holds itself counts as 0 there,
    and is refused later.
    """
    known = sizes.get(id(node))
    if known is not None:
        return known
    sizes[id(node)] = 0
    size = 1
    if isinstance(node, yaml.SequenceNode):
        size += sum(_expanded_size(each, sizes) for each in node.value)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            size += _expanded_size(key, sizes) + _expanded_size(value, sizes)
    sizes[id(node)] = size
    return size


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**12 else "over a trillion"


def parse_json(text: str) -> Any:
    """Return the value that `text` spells; a ValueError tells its fault."""
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice; the first would be lost in silence."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key '{key}' stands twice; remove one")
        table[key] = value
    return table
