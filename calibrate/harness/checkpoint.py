"""Finished blocks on disk, a line each, from which a calibration resumes.

The file begins with the calibration's *fingerprint*, then has one line for each
finished block, flushed to the disk before the next begins, and one for whatever
broke the device: the process ends with it, and the next leaves that point out. A line
that a kill cut short is dropped. A calibration resumes only into the same plan, on the
same device.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from calibrate.measurement import canonical
from sim.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "kvsim-calibration/1"


@dataclass(frozen=True, slots=True)
class Resumed:
    """The contents of a checkpoint."""

    started: str
    """When the calibration began, UTC."""
    blocks: list[dict[str, Any]]
    """Finished blocks, in order."""
    faults: dict[str, str]
    """Points, or curves of the gate, that broke the device, and how."""


class Checkpoint:
    """A growing file of finished blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, fingerprint: dict[str, Any], started: str) -> None:
        first = {"format": FORMAT, "fingerprint": fingerprint, "started": started}
        self.path.write_text("", encoding="utf-8")
        self.append(first)

    def append(self, block: dict[str, Any]) -> None:
        """Add a line, and see to it that it is on the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(canonical(block) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the calibration that began the file."""
        lines, _ = self._lines()
        found: dict[str, Any] = lines[0]["fingerprint"]
        return found

    def resume(self, fingerprint: dict[str, Any]) -> Resumed:
        """Read the finished blocks, and cut off a line that a kill cut short.

        A checkpoint of another calibration raises UserError, which names the first
        difference.
        """
        lines, num_bytes = self._lines()
        self._compare(lines[0]["fingerprint"], fingerprint)
        with self.path.open("r+b") as file:
            file.truncate(num_bytes)
        return Resumed(
            started=lines[0]["started"],
            blocks=[line for line in lines[1:] if "block" in line],
            faults={line["fault"]: line["reason"] for line in lines if "fault" in line},
        )

    def _lines(self) -> tuple[list[dict[str, Any]], int]:
        """Return the whole lines, the first with the format, and their bytes."""
        if not self.path.is_file():
            raise UserError(
                f"there is no checkpoint at '{self.path}' to go on from; start without"
                " --resume and --finish"
            )
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        lines = [self._parsed(line) for line in whole.splitlines()]
        if not lines or lines[0].get("format") != FORMAT:
            raise UserError(
                f"'{self.path}' is no checkpoint of the format {FORMAT}; start without"
                " --resume"
            )
        return lines, len(whole)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            content = json.loads(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise UserError(
                f"'{self.path}' is damaged in a line that was finished; start without"
                " --resume"
            )
        return content

    def _compare(self, then: dict[str, Any], now: dict[str, Any]) -> None:
        found = _difference(then, json.loads(canonical(now)))
        if found is not None:
            name, before, after = found
            raise UserError(
                f"'{self.path}' belongs to another calibration: {name} was"
                f" {_short(before)}, now it is {_short(after)}; repeat the same"
                " command, or start without --resume"
            )


def _difference(then: object, now: object, name: str = "") -> tuple[Any, ...] | None:
    """Return where two plain values first differ: dotted name, and both sides."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(then.keys() | now.keys()):
            inner = f"{name}.{key}".lstrip(".")
            found = _difference(then.get(key), now.get(key), inner)
            if found is not None:
                return found
        return None
    return None if then == now else (name, then, now)


def _short(value: object) -> str:
    text = canonical(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
