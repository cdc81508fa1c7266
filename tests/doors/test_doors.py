"""A slice of the fuzzer, and that it sends whole files through the doors, too."""

from __future__ import annotations

from contextlib import chdir
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.doors.__main__ import fuzz, through
from tests.doors.doors import doors

if TYPE_CHECKING:
    from pathlib import Path

_REFUSED = {"plan"}
"""Doors behind which a plan would be solved: the place is taken."""


@pytest.mark.slow
def test_whole_files_are_read(tmp_path: Path) -> None:
    with chdir(tmp_path):
        for door in doors(tmp_path):
            whole = replace(door, change=lambda content, _: content)
            outcome, details = through(whole, Random(0), tmp_path)
            if door.name == "model":  # some fit no GPU
                assert outcome in ("read", "refused"), details
            else:
                wanted = "refused" if door.name in _REFUSED else "read"
                assert outcome == wanted, (door.name, door.words, details)


def test_a_slice_of_malformed_files_is_read_or_refused(tmp_path: Path) -> None:
    outcomes, faults = fuzz(50, 5, tmp_path, without="plot")
    assert not faults
    assert sum(outcomes.values()) == 50


@pytest.mark.slow
def test_more_malformed_files(tmp_path: Path) -> None:
    _, faults = fuzz(1_500, 6, tmp_path)
    assert not faults
