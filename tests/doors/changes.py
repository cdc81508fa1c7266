"""Faults in a file: values, keys and bytes that do not belong there."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

ODD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63), 10**30),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *(
        "",
        " ",
        "x",
        "1",
        "-1",
        "1e3",
        "nan",
        "null",
        "\x00",
        "\U0001f642",
        "../..",
        "~",
    ),
    *("9" * 400, "a" * 300, "a.py:B", "${HOME}", "<b>", "2023-11-16 18:15:46"),
    *([], {}, [None], [[]], [1, 2], {"kind": "x"}, {"": ""}, {"a": {"b": []}}),
)
"""Values that a user might give for another."""

_BITS: Final = (
    *(b"\x00", b"\xff\xfe", b"\n", b",", b'"', b"{", b"}", b"[", b":", b"- ", b"\t"),
    *(b"1e999", b"-", b"NaN", b"\xf0\x9f\x99\x82", b"&a ", b"*a", b"!!python/x ", b"#"),
)


def changed_data(data: Any, random: Random) -> Any:
    """Return plain data with one to three things wrong."""
    data = deepcopy(data)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(data))
        if not places:
            return random.choice(ODD)
        table, key = random.choice(places)
        what = random.random()
        if what < 0.6:
            table[key] = deepcopy(random.choice(ODD))
        elif what < 0.7:
            del table[key]
        elif what < 0.8 and isinstance(table, dict):
            table[random.choice(("x", "", f"{key}s"))] = table[key]
        elif what < 0.9 and isinstance(table[key], int | float):
            table[key] *= random.choice((-1, 0, 1.5, 1000, 10**9))
        else:
            other = random.choice(places)
            table[key] = deepcopy(other[0].get(other[1]) if isinstance(other[0], dict)
                                  else None)  # fmt: skip
    return data


def changed_bytes(content: bytes, random: Random) -> bytes:
    """Return bytes of which some are others, more, fewer or elsewhere."""
    for _ in range(random.choice((1, 1, 2, 4))):
        place = random.randrange(len(content) + 1)
        what = random.random()
        length = random.choice((1, 1, 2, 8, 64))
        if what < 0.3:
            content = content[:place] + random.choice(_BITS) + content[place:]
        elif what < 0.5:
            content = content[:place] + content[place + length :]
        elif what < 0.65:
            content = (
                content[:place] + bytes([random.randrange(256)]) + content[place + 1 :]
            )
        elif what < 0.75:
            content = content[:place]
        else:
            lines = content.splitlines(keepends=True) or [b""]
            index = random.randrange(len(lines))
            if what < 0.85:
                lines.insert(random.randrange(len(lines)), lines[index])
            elif what < 0.95:
                cells = lines[index].split(b",")
                cell = random.randrange(len(cells))
                cells[cell] = str(random.choice(ODD)).encode()
                lines[index] = b",".join(cells)
            else:
                del lines[index]
            content = b"".join(lines)
    return content


def as_json(data: Any) -> bytes:
    return json.dumps(data).encode()


def changed_json(content: bytes, random: Random) -> bytes:
    """Return JSON with odd values, or one that is broken."""
    if random.random() < 0.2:
        return changed_bytes(content, random)
    return as_json(changed_data(json.loads(content), random))


def changed_json_lines(content: bytes, random: Random) -> bytes:
    """Return lines of JSON, one of them with odd values, or broken ones."""
    if random.random() < 0.3:
        return changed_bytes(content, random)
    lines = content.splitlines()
    index = random.randrange(len(lines))
    lines[index] = as_json(changed_data(json.loads(lines[index]), random))
    return b"\n".join(lines) + b"\n"


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(data, dict | list):
        keys = list(data) if isinstance(data, dict) else range(len(data))
        for key in keys:
            yield data, key
            yield from _places(data[key])
