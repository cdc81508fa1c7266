"""Profile files ``kvprofile/1``: measured kernel times with where they come from.

A profile is one JSON object::

    {"format": "kvprofile/1", "id": "sha256:...", "kind": "measured" | "imported" |
     "dry-run", "units": {"size": "byte", "time": "s"},
     "provenance": {...}, "ops": [...], "interference": {...}, "steps": [...],
     "fit": {...}}

`id` is the hash of everything else in canonical form, so that an edit shows. Keys that
are not known here are kept for the hash and ignored. Each entry of `ops` is a table of
one operation: ``operation``, ``variant``, ``dtype``, ``constants`` (what all points
share), ``axes`` (columns of exact integers, one entry a point), ``quantiles`` (columns
of seconds; `p50_s` at least) and optionally ``n`` (samples behind each point).

`sim` only reads; `calibrate` writes.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

NAME: Final = "kvprofile"
MAJOR: Final = 1
UNITS: Final = {"size": "byte", "time": "s"}
DRY_RUN: Final = "dry-run"
"""Kind of a profile whose times are made up: it can be looked at, not used."""
KINDS: Final = ("measured", "imported", DRY_RUN)
QUANTILES: Final = ("p10_s", "p50_s", "p90_s", "p99_s", "mean_s")
_PARTS: Final = {"interference": dict, "steps": list, "fit": dict}
_FACTS: Final = {"device": dict}
_FITTED: Final = {"models": list} | dict.fromkeys(
    (
        *("host", "intervals", "launch", "interference", "transfers", "copy"),
        *("step_correction", "variants"),
    ),
    dict,
)
"""Parts of a profile that may be left out, and what they are where they are not."""
_SECONDS: Final = (1e-8, 100.0)
"""Seconds that one call of a kernel may take; beyond them the unit is wrong."""

MIGRATIONS: Final[dict[int, Callable[[dict[str, Any]], dict[str, Any]]]] = {}
"""Major version to a pure function that lifts a profile to the next one.

Empty while 1 is the first: a change of format adds the function, and a file of the
old format to its tests."""


class ProfileError(UserError):
    """A profile that cannot be trusted or read; the message says why."""


@dataclass(frozen=True, slots=True)
class OpTable:
    """Points of one operation, as columns of the same length."""

    operation: str
    variant: str
    dtype: str
    constants: Mapping[str, Any]
    axes: Mapping[str, tuple[int, ...]]
    quantiles: Mapping[str, tuple[float, ...]]
    counts: tuple[int, ...] | None = None
    """Samples behind each point, where they are known."""

    @property
    def num_points(self) -> int:
        return len(self.quantiles["p50_s"])


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile as read, its hash checked."""

    id: str
    kind: str
    provenance: Mapping[str, Any]
    ops: tuple[OpTable, ...]
    interference: Mapping[str, Any]
    steps: tuple[Any, ...]
    fit: Mapping[str, Any]
    body: Mapping[str, Any]
    """The whole file as plain data."""

    @property
    def device(self) -> Mapping[str, Any]:
        """Facts of the device that was measured."""
        device: Mapping[str, Any] = self.provenance.get("device") or {}
        return device

    def tables(self, operation: str) -> tuple[OpTable, ...]:
        return tuple(table for table in self.ops if table.operation == operation)


def canonical_json(content: Any) -> str:
    """Return the one spelling of plain data that is hashed and written."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def profile_id(body: Mapping[str, Any]) -> str:
    """Return the hash of a profile: everything in it but its `id`."""
    rest = {key: value for key, value in body.items() if key != "id"}
    digest = hashlib.sha256(canonical_json(rest).encode()).hexdigest()
    return f"sha256:{digest}"


def read_profile(path: Path | str) -> Profile:
    """Read a profile from a file.

    Parameters
    ----------
    path
        A kvprofile/1 file, in JSON.

    Returns
    -------
    Profile
        Its tables, and what they were measured on.

    Raises
    ------
    ProfileError
        As `parse_profile`, and when there is no readable file.

    Examples
    --------
    >>> from kvsim import read_profile
    >>> profile = read_profile("tests/sim/costs/golden/kvprofile_1.json")
    >>> profile.kind, profile.device["name"]
    ('imported', 'h200_sxm')
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ProfileError(
            f"there is no profile '{path}'; make one with 'kvsim profile import' or "
            "'kvsim calibrate'"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(
            f"'{path}' is no readable profile: {error}; give a {NAME}/{MAJOR} file"
        ) from error
    return parse_profile(text, f"'{path}'")


def parse_profile(text: str, where: str = "the profile") -> Profile:
    """Return the profile that `text` holds.

    Parameters
    ----------
    text
        JSON.
    where
        Start of messages.

    Raises
    ------
    ProfileError
        When it is cut off or no JSON, of another format or a later major version,
        edited by hand (its hash differs), in other units, or lacks or misspells a part.
    """
    try:
        body = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        line = " ".join(str(error).split())[:120]
        raise ProfileError(
            f"{where} is cut off or no JSON ({line}); copy or make it again"
        ) from error
    if not isinstance(body, dict):
        raise ProfileError(f"{where} must hold a JSON object; make the profile again")
    major = _major(body.get("format"), where)
    if major > MAJOR:
        raise ProfileError(
            f"{where} has format {body['format']}, but this kvsim reads up to "
            f"{NAME}/{MAJOR}; upgrade kvsim"
        )
    _check_id(body, where)
    body = migrated(body, major)
    return _profile(body, where)


def migrated(
    body: dict[str, Any],
    major: int,
    migrations: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Return `body` lifted from `major` to the version that is read here."""
    migrations = MIGRATIONS if migrations is None else migrations
    for version in range(major, MAJOR):
        if version not in migrations:
            raise ProfileError(
                f"nothing reads {NAME}/{version} any more; make the profile again"
            )
        body = migrations[version](body)
    return body


def _major(name: Any, where: str) -> int:
    family, _, version = str(name).partition("/")
    major = version.partition(".")[0]
    if family != NAME or not (major.isascii() and major.isdigit()):
        raise ProfileError(
            f"{where} is no profile: format must be {NAME}/{MAJOR}, got "
            f"{str(name)[:40]!r}"
        )
    return int(major[:9])


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _check_id(body: dict[str, Any], where: str) -> None:
    expected = profile_id(body)
    found = body.get("id")
    if found != expected:
        raise ProfileError(
            f"{where} was changed after it was written: its id is "
            f"{str(found)[:19]}..., its content hashes to {expected[:19]}...; make it "
            "again rather than edit it"
        )


def _profile(body: dict[str, Any], where: str) -> Profile:
    units = body.get("units")
    if units != UNITS:
        raise ProfileError(
            f"{where} must be in units {canonical_json(UNITS)}; got "
            f"{str(units)[:60]}: convert the times to seconds and write it again"
        )
    kind = body.get("kind")
    if kind not in KINDS:
        raise ProfileError(
            f"{where}: kind must be {' or '.join(KINDS)}; got {str(kind)[:40]!r}"
        )
    for key, expected in (("provenance", dict), ("ops", list)):
        if not isinstance(body.get(key), expected):
            raise ProfileError(f"{where} has no {key}; make the profile again")
    _check_kinds(body, _PARTS, where)
    _check_kinds(body["provenance"], _FACTS, f"{where}: provenance")
    fit = body.get("fit") or {}
    _check_kinds(fit, _FITTED, f"{where}: fit")
    transfers = fit.get("transfers") or {}
    _check_kinds(transfers, dict.fromkeys(transfers, dict), f"{where}: fit.transfers")
    for index, entry in enumerate(fit.get("models") or ()):
        if not isinstance(entry, dict) or not isinstance(entry.get("geometry"), dict):
            raise ProfileError(
                f"{where}: fit.models[{index}] has no geometry; fit the profile again"
            )
        for name, table in entry.items():
            kinds = list if name == "estimated" else dict | str | None
            if not isinstance(table, kinds):
                raise ProfileError(
                    f"{where}: fit.models[{index}].{name} is no table; fit the profile "
                    "again"
                )
    return Profile(
        id=body["id"],
        kind=kind,
        provenance=body["provenance"],
        ops=tuple(_table(op, f"{where}: ops[{i}]") for i, op in enumerate(body["ops"])),
        interference=body.get("interference") or {},
        steps=tuple(body.get("steps") or ()),
        fit=fit,
        body=body,
    )


def _check_kinds(
    table: Mapping[str, Any], kinds: Mapping[str, type], where: str
) -> None:
    for key, kind in kinds.items():
        if table.get(key) and not isinstance(table[key], kind):
            name = "an object" if kind is dict else "a list"
            raise ProfileError(
                f"{where}.{key} must be {name}, not {str(table[key])[:40]!r}; make the "
                "profile again"
            )


def _table(op: Any, where: str) -> OpTable:
    if not isinstance(op, dict):
        raise ProfileError(f"{where} must be an object")
    for key in ("operation", "variant", "dtype"):
        if not isinstance(op.get(key), str):
            raise ProfileError(f"{where}.{key} must be a text; got {op.get(key)!r}")
    where = f"{where} ({op['operation'][:40]})"
    quantiles, axes = op.get("quantiles"), op.get("axes")
    if not isinstance(quantiles, dict) or "p50_s" not in quantiles:
        given = sorted(quantiles) if isinstance(quantiles, dict) else quantiles
        raise ProfileError(
            f"{where}.quantiles must hold seconds as p50_s; got {str(given)[:80]}"
        )
    if not isinstance(axes, dict):
        raise ProfileError(f"{where}.axes must be an object of columns")
    for key in quantiles:
        if key not in QUANTILES:
            raise ProfileError(
                f"{where}.quantiles.{key}: times are in seconds and named "
                f"{', '.join(QUANTILES)}"
            )
    counts = op.get("n")
    length = len(quantiles["p50_s"]) if isinstance(quantiles["p50_s"], list) else -1
    return OpTable(
        operation=op["operation"],
        variant=op["variant"],
        dtype=op["dtype"],
        constants=op.get("constants") or {},
        axes={
            key: _counts(values, length, f"{where}.axes.{key}")
            for key, values in axes.items()
        },
        quantiles={
            key: _seconds(values, length, f"{where}.quantiles.{key}")
            for key, values in quantiles.items()
        },
        counts=None if counts is None else _counts(counts, length, f"{where}.n"),
    )


def _counts(values: Any, length: int, where: str) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) != length:
        raise ProfileError(f"{where} must be a column of {length} integers")
    for value in values:
        if type(value) is not int or value < 0:
            raise ProfileError(f"{where} must hold integers >= 0; got {value!r}")
    return tuple(values)


def _seconds(values: Any, length: int, where: str) -> tuple[float, ...]:
    if not isinstance(values, list) or len(values) != length:
        raise ProfileError(f"{where} must be a column of {length} numbers")
    low, high = _SECONDS
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not low <= value <= high:
            raise ProfileError(
                f"{where} must hold seconds from {low:g} to {high:g}; got {value!r}: "
                "the unit is wrong or the point is"
            )
    return tuple(map(float, values))
