"""``kvsim profile show --crossover``: swap or recompute, for a model on a GPU."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.profile_output import print_json
from sim.costs.crossover import crossover, shown
from sim.costs.measured import MeasuredCost
from sim.costs.roofline import RooflineCost
from sim.errors import UserError
from sim.hardware import load_gpu
from sim.model import load_model, resolved_model
from sim.profile import read_profile

if TYPE_CHECKING:
    from sim.costs.crossover import Crossover

_NUM_ROWS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be compared.

    Parameters
    ----------
    file
        A profile with tables of the model; None for the datasheet of `gpu`.
    gpu
        GPU name, or the path of a datasheet; None for the profile's.
    model
        Bundled name, or path to a config.json.
    tensor_parallel_size, block_size, max_num_batched_tokens, kv_cache_dtype
        As of the engine.
    """

    file: Path | None
    gpu: str | None
    model: str | None
    tensor_parallel_size: int = 1
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    kv_cache_dtype: str = "auto"


def show_crossover(
    question: Question, *, out: Path | None, json: bool, quiet: bool
) -> int:
    """Compare, print and draw.

    Raises
    ------
    UserError
        When something needed is missing or wrong; nothing is written then.
    """
    _check(question, out)
    cost = _cost(question)
    found = crossover(
        cost,
        block_size=question.block_size,
        max_num_batched_tokens=question.max_num_batched_tokens,
    )
    below = _below(question, cost)
    if out is not None:
        _draw(found, below, out)
    if json:
        print_json({"question": below, **found.to_json()})
    elif quiet:
        for name, words in found.sentences().items():
            print(f"{name}: {words}")
    else:
        _print(found, below, out)
    return 0


def _check(question: Question, out: Path | None) -> None:
    if question.model is None:
        raise UserError(
            "--crossover compares for a model; give --model, such as "
            "meta-llama/Llama-3.1-8B"
        )
    if (question.file is None) == (question.gpu is None):
        raise UserError(
            "--crossover takes a profile, or --gpu for a datasheet; give one of them"
        )
    for key, most in (("block_size", 2**16), ("max_num_batched_tokens", 2**24)):
        value = getattr(question, key)
        if not 1 <= value <= most:
            flag = key.replace("_", "-")
            raise UserError(f"--{flag} must be 1 to {most:,}; got {value:,}")
    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"--out is a figure and must end in .png; got '{out}'")


def _cost(question: Question) -> MeasuredCost | RooflineCost:
    engine: dict[str, Any] = {
        "model": resolved_model(load_model(str(question.model))),
        "tensor_parallel_size": question.tensor_parallel_size,
        "block_size": question.block_size,
        "kv_cache_dtype": question.kv_cache_dtype,
    }
    if question.file is None:
        return RooflineCost(gpu=load_gpu(str(question.gpu)), **engine)
    profile = read_profile(question.file)
    name = profile.fit.get("gpu") or profile.device.get("name")
    return MeasuredCost(str(question.file), gpu=load_gpu(str(name)), **engine)


def _below(question: Question, cost: MeasuredCost | RooflineCost) -> str:
    told = cost.describe()
    source = "datasheet" if question.file is None else f"profile {question.file.name}"
    return (
        f"{told['model']} on {told['gpu']} ({source}), TP "
        f"{question.tensor_parallel_size}, blocks of {question.block_size}, prompts in "
        f"chunks of {question.max_num_batched_tokens:,}"
    )


def _print(found: Crossover, below: str, out: Path | None) -> None:
    print(below)
    again = "recompute*" if found.extrapolated else "recompute"
    names = [f"{n}*" if swap.extrapolated else n for n, swap in found.swaps.items()]
    print("ms".ljust(8), *(f"{name:>11}" for name in (again, *names)))
    for place in shown(found.num_tokens, _NUM_ROWS).tolist():
        bands = (found.recompute, *(swap.band for swap in found.swaps.values()))
        cells = (f"{1e3 * band.seconds[place]:>11,.2f}" for band in bands)
        print(f"{found.num_tokens[place]:<8,}", *cells)
    for name, words in found.sentences().items():
        print(f"{name}: {words}")
    if found.extrapolated or any(swap.extrapolated for swap in found.swaps.values()):
        print("* in part or whole an estimate, not measured in this shape")
    if out is not None:
        print(f"drawn in {out}")


def _draw(found: Crossover, below: str, out: Path) -> None:
    """Write the figure, whole or not at all."""
    from sim.plots.crossover import swap_or_recompute  # noqa: PLC0415
    from sim.plots.style import to_png  # noqa: PLC0415

    pixels = to_png(swap_or_recompute(found, below))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    except OSError as error:
        raise UserError(
            f"--out: '{out}' cannot be written: {error.strerror}; give another path"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(pixels)
        Path(name).chmod(0o644)
        Path(name).replace(out)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise UserError(
            f"--out: '{out}' cannot be written: {error.strerror}; give another path"
        ) from error
