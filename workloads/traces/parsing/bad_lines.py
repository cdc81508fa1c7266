"""Malformed lines: refused at the first, or left out, counted and reported."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Self

from workloads.errors import WorkloadWarning
from workloads.traces.parsing.files import format_error

if TYPE_CHECKING:
    from pathlib import Path


class BadLines:
    """What becomes of the malformed lines of one file; `report` is called at the end.

    Parameters
    ----------
    path
        The file, for messages.
    skip
        Leave them out; otherwise the first is refused.
    """

    def __init__(self, path: str | Path, skip: bool) -> None:
        self.path = path
        self.skip = skip
        self.num_skipped = 0
        self.first = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.report()  # after an error, too: none may be left for what was left out

    def refuse(self, line_number: int, problem: str) -> None:
        """Refuse a line, or count it.

        Raises
        ------
        TraceFormatError
            If malformed lines are not to be left out.
        """
        error = format_error(self.path, line_number, problem)
        if not self.skip:
            raise error
        if not self.num_skipped:
            self.first = str(error)
        self.num_skipped += 1

    def report(self) -> None:
        """Warn if lines were left out.

        Warns
        -----
        WorkloadWarning
            How many, and the first with its reason.
        """
        if self.num_skipped:
            lines = "line" if self.num_skipped == 1 else "lines"
            warn(
                f"{self.path}: left out {self.num_skipped} malformed {lines}; "
                f"the first: {self.first}"
            )


def warn(message: str) -> None:
    """Warn whoever called the reader, however deep in this package it is found."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        level += 1
    warnings.warn(message, WorkloadWarning, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.startswith("workloads.traces.")
