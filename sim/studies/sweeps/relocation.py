"""Files of users on a machine that has them not, or elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.studies.sweeps.job import Job, Outcome


@dataclass(frozen=True, slots=True)
class Relocation:
    """Where the files that configurations name lie on this machine.

    Parameters
    ----------
    places
        From the path where the sweep was started to the one here.
    """

    places: Mapping[str, str]

    @classmethod
    def into(cls, directory: Path, files: Mapping[str, bytes]) -> Relocation:
        """Write the files that are not here, or not the same, into `directory`.

        Parameters
        ----------
        directory
            For this process alone; left as it is where all files are here.
        files
            Contents by absolute path.
        """
        places = {}
        for name, content in files.items():
            path = Path(name)
            if _holds(path, content):
                continue
            here = directory.joinpath(*path.parts[1:])  # whose name may be told
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_bytes(content)
            places[name] = str(here)
            if path.name == "config.json":  # a model may be named by its folder
                places[str(path.parent)] = str(here.parent)
        return cls(places)

    def moved(self, job: Job) -> Job:
        """Return a job that names the files here."""
        return (
            replace(job, config=self._with_places(job.config)) if self.places else job
        )

    def restored(self, outcome: Outcome) -> Outcome:
        """Return an outcome that names the files where the sweep was started."""
        if not self.places:
            return outcome
        error = outcome.error
        return replace(
            outcome,
            summary=self._with_names(outcome.summary),
            error=None if error is None else self._with_names(error),
        )

    def _with_places(self, value: Any) -> Any:
        if isinstance(value, str):
            name, colon, cls = value.rpartition(":")
            if colon and name in self.places:
                return f"{self.places[name]}:{cls}"
            return self.places.get(value, value)
        return _each(value, self._with_places)

    def _with_names(self, value: Any) -> Any:
        if isinstance(value, str):
            for name, here in self.places.items():
                value = value.replace(here, name)
            return value
        return _each(value, self._with_names)


def _each(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: change(each) for key, each in value.items()}
    return [change(each) for each in value] if isinstance(value, list) else value


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
