"""Predictions of a cost model for the steps that are executed."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from calibrate.graphs import GRAPH_SIZES, graph_rule
from calibrate.tabulate import with_tables
from calibrate.writing import write_profile
from sim.costs.measured import MeasuredCost
from sim.costs.measured.profile import read_profile
from sim.costs.roofline import RooflineCost

if TYPE_CHECKING:
    from sim.costs.base import CostModel, StepCost
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.generation import SwapRule

_NO_HOST: Final[dict[str, Any]] = {"step_overhead_s": 1e-12, "request_overhead_s": 0.0}


@dataclass(frozen=True, slots=True)
class Target:
    """A stack to be priced, and how it is run."""

    model: ModelArchitecture
    """With as many layers as the stack has."""
    gpu: GpuSpec
    block_size: int
    swap: SwapRule
    """Swaps are in series with the step, whatever the engine does."""
    uses_graphs: bool

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a cost model that an engine would inject."""
        return {
            "model": self.model,
            "gpu": self.gpu,
            "block_size": self.block_size,
            "swap_rule": replace(self.swap, overlap=False),
        }


class Prediction:
    """Prices of steps, with the host's part and without.

    Without a profile, the datasheet's roofline prices them.

    Attributes
    ----------
    name
        Of the profile's file, or "roofline".
    knows_host
        Whether host time was fitted to measured steps, so that whole steps can be
        judged; else it is an engine's, and only the device's part can.
    """

    def __init__(self, target: Target, profile: Path | None) -> None:
        self.name = profile.name if profile else "roofline"
        self.knows_host = False
        if profile is None:
            self._whole: CostModel = RooflineCost(**target.arguments())
            self._device: CostModel = RooflineCost(**target.arguments(), **_NO_HOST)
            return
        fitted = read_profile(profile)
        self.knows_host = "host" in fitted.fit
        arguments = target.arguments() | {
            "graph_rule": graph_rule(target.uses_graphs),
            "graph_sizes": GRAPH_SIZES if target.uses_graphs else (),
        }
        with tempfile.TemporaryDirectory() as folder:
            path = str(_for_layers(profile, target.model, Path(folder)))
            self._whole = MeasuredCost(path, **arguments)
            self._device = MeasuredCost(path, **arguments, **_NO_HOST)

    def whole(self, shape: BatchShape) -> StepCost:
        """Return the cost of a step, host time included."""
        return self._whole.step(shape)

    def device(self, shape: BatchShape) -> StepCost:
        """Return the cost of the GPU's work, and of launches that it waits for."""
        return self._device.step(shape)


def _for_layers(profile: Path, model: ModelArchitecture, folder: Path) -> Path:
    """Return a profile with tables for so many layers: fitted again if need be."""
    whole = read_profile(profile)
    layers = [
        entry.get("geometry", {}).get("num_layers")
        for entry in whole.fit.get("models") or []
    ]
    if model.num_hidden_layers in layers or not whole.ops:
        return profile
    fitted = with_tables(whole, whole, model)
    path = folder / profile.name
    write_profile(fitted, path)
    return path
