"""The device of a checkpoint, where the one that was timed is no longer at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from calibrate.harness.device import Physics
from calibrate.harness.grid import Choice, Limits
from sim.errors import UserError
from sim.hardware.gpus import datasheet_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from calibrate.harness.checkpoint import Checkpoint
    from calibrate.harness.device import Check, Task
    from calibrate.harness.geometry import Geometry
    from calibrate.measurement import Curve, Point

_OF_SETTINGS = frozenset(
    {"geometry", "preset", "backend", "operations", "seed", "choices", "limits"}
)


class RecordedDevice:
    """Facts of the device that a checkpoint was begun on; it times nothing.

    Raises
    ------
    UserError
        When there is no such checkpoint, or no datasheet of its GPU is bundled.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        begun = checkpoint.fingerprint()
        self._choices: list[str] = begun["choices"]
        self.limits = Limits(*begun["limits"])
        self._facts = {
            name: found for name, found in begun.items() if name not in _OF_SETTINGS
        }
        name = self._facts["device"]["name"]
        sheet = datasheet_of(name, self._facts["device"]["memory_bytes"])
        if sheet is None:
            raise UserError(
                f"there is no datasheet of '{name}', whose peaks a profile must name;"
                " go on with --resume where the device is"
            )
        self.physics = Physics.of_sheet(sheet)

    def facts(self) -> dict[str, Any]:
        return self._facts

    def clocks(self) -> dict[str, Any]:
        return {}

    def now_s(self) -> float:
        return 0.0

    def date(self) -> str:
        self._times_nothing()

    def choices(self, backend: str, operations: Sequence[str]) -> list[Choice]:
        del backend, operations
        found = []
        for choice in self._choices:
            name, backend_name = choice.split(": ")
            operation, variant = name.split("/")
            found.append(Choice(operation, variant, backend_name))
        return found

    def check(self, geometry: Geometry, at: Curve, backend: str) -> Check:
        del geometry, at, backend
        self._times_nothing()

    def prepare(self, point: Point, backend: str, seed: int) -> Task:
        del point, backend, seed
        self._times_nothing()

    def overlap(
        self, points: Mapping[str, Point], backends: Mapping[str, str], seed: int
    ) -> dict[str, list[float]]:
        del points, backends, seed
        self._times_nothing()

    @staticmethod
    def _times_nothing() -> NoReturn:
        raise UserError("a checkpoint times nothing; go on with --resume on its GPU")
