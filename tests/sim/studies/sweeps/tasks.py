"""Tasks for workers: this module imports little, for they have to import it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping


def add_one(config: Mapping[str, Any]) -> dict[str, Any]:
    """A task that simulates nothing."""
    return {"seed_and_one": config["seed"] + 1}


def with_a_number(config: Mapping[str, Any]) -> dict[str, Any]:
    """A task that goes wrong in as many ways as there are."""
    seed = config["seed"]
    if seed == 1:
        raise UserError("no\nroom")
    if seed == 2:
        raise ValueError("nobody expected this")
    if seed == 3:
        raise SystemExit(4)
    if seed == 4:
        os._exit(5)
    if seed == 5:
        return {"number": float("nan")}
    if seed == 6:
        return {"number": object()}
    return {"number": seed}


def tell_pid(config: Mapping[str, Any]) -> dict[str, Any]:
    time.sleep(0.002)
    return {"pid": os.getpid(), "parent": config["seed"]}


def leave_a_mark_and_sleep(config: Mapping[str, Any]) -> dict[str, Any]:
    Path(config["mark"]).touch()
    time.sleep(600)
    return {}


def die_when_watched(config: Mapping[str, Any]) -> dict[str, Any]:
    """Die if another run goes on at the same time, as in too little memory."""
    directory = Path(config["directory"])
    mark = directory / str(config["seed"])
    mark.touch()
    time.sleep(0.05)
    others = len(list(directory.iterdir())) - 1
    if config["seed"] == 0 and others:
        mark.unlink()
        os._exit(1)
    time.sleep(0.05)
    mark.unlink()
    return {"others": others if config["seed"] == 0 else None}


def die_at(config: Mapping[str, Any]) -> dict[str, Any]:
    """End the process where the seed says so."""
    if config["seed"] == config["dies_at"]:
        os._exit(3)
    return {}


def leave_a_mark(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make a file as the last thing."""
    Path(config["mark"]).touch()
    return {}
