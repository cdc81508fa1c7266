"""Runs on a Ray cluster that exists already, and files of users on its nodes."""

from __future__ import annotations

import socket
import tempfile
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, Self

from sim.errors import ConfigError, UserError
from sim.results.summary.provenance import versions
from sim.studies.sweeps.job import Attempt, Attempts
from sim.studies.sweeps.supplies import NOTHING, Supplies
from sim.studies.sweeps.task import perform

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from sim.studies.sweeps.job import Job, Outcome, Task

_AHEAD = 2
"""Runs handed out for each processor: Ray's own queue is long enough with that."""
_POLL_S = 0.1
_COUNT_EVERY_S = 1.0
_KNOCK_S = 5.0
_LOST_S = 300.0
"""How long a cluster may be without the processors that it had: others may come."""


class RayExecutor:
    """Carries runs out as tasks of one processor each.

    Traces and users' files go into the object store once, from where each node takes
    them once. Runs of a worker or node that dies are tried again; see `Attempts`.

    Parameters
    ----------
    address
        ``"auto"`` on a node of the cluster, else ``HOST:PORT`` of its head.
    supplies
        Traces and files, read already.

    Raises
    ------
    ConfigError
        If Ray is not installed.
    """

    def __init__(self, address: str, supplies: Supplies = NOTHING) -> None:
        try:
            import ray  # noqa: PLC0415  (an extra)
        except ImportError as error:
            raise ConfigError(
                "--address: Ray is not installed; pip install 'kvsim[ray]', or leave "
                "it out to run on this machine"
            ) from error
        self._ray: Any = ray
        self._address = address
        self._supplies = supplies
        self._is_ours = False
        self._stopping = False
        self._outfit: list[Any] = []
        self._remote: Any = None
        self._going: dict[Any, tuple[Attempt, float]] = {}
        self._counted_s = -_COUNT_EVERY_S
        self._num_workers = 0
        self._last_seen_s: float | None = None
        """When there was a processor; None if there never was."""

    def __enter__(self) -> Self:
        ray = self._ray
        if not ray.is_initialized():
            try:
                _knock(self._address)
                ray.init(address=self._address, log_to_driver=False, logging_level=40)
            except (RuntimeError, ValueError, OSError) as error:
                raise UserError(
                    f"--address: there is no Ray cluster at '{self._address}' "
                    f"({' '.join(str(error).split())[:200]}); start one with "
                    f"'ray start --head', or leave it out to run on this machine"
                ) from error
            self._is_ours = True
        self._outfit = [ray.put(self._supplies)]
        self._remote = ray.remote(run_on_node).options(num_cpus=1, max_retries=0)
        return self

    def __exit__(self, *error: object) -> None:
        self._give_up()
        self._outfit = []
        if self._is_ours:
            self._ray.shutdown()

    @property
    def num_workers(self) -> int:
        """Processors of the cluster, as many as there are by now."""
        if (
            monotonic() - self._counted_s >= _COUNT_EVERY_S
            and self._ray.is_initialized()
        ):
            self._num_workers = int(self._ray.cluster_resources().get("CPU", 0))
            self._counted_s = monotonic()
            if self._num_workers:
                self._last_seen_s = self._counted_s
        return self._num_workers

    def stop(self) -> None:
        self._stopping = True

    def run(self, jobs: Iterable[Job], task: Task) -> Iterator[Outcome]:
        attempts = Attempts(jobs)
        try:
            while not self._stopping:
                self._hand_out(attempts, task)
                if not self._going:
                    return
                self._ray.wait(list(self._going), num_returns=1, timeout=_POLL_S)
                yield from self._collected(attempts)
                self._check_not_lost()
            yield from self._collected(attempts)
        finally:  # nothing will ask for what is still going on
            self._give_up()

    def _check_not_lost(self) -> None:
        """Refuse to wait for ever where all nodes are gone."""
        if self.num_workers or self._last_seen_s is None:
            return
        if monotonic() - self._last_seen_s > _LOST_S:
            raise UserError(
                f"--address: the Ray cluster at '{self._address}' has lost all its "
                f"processors, and none came back within {_LOST_S:g} s; start nodes, "
                f"and go on with --resume: what has ended is kept"
            )

    def _give_up(self) -> None:
        for ref in self._going:
            self._ray.cancel(ref, force=True)
        self._going.clear()

    def _hand_out(self, attempts: Attempts, task: Task) -> None:
        while len(self._going) < max(1, _AHEAD * self.num_workers):
            attempt = attempts.next()
            if attempt is None:
                return
            ref = self._remote.remote(self._outfit, attempt.job, task, versions())
            self._going[ref] = (attempt, perf_counter())

    def _collected(self, attempts: Attempts) -> Iterator[Outcome]:
        refs = list(self._going)
        if not refs:
            return
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            attempt, started_s = self._going.pop(ref)
            outcome = self._outcome(ref)
            if outcome is None:
                outcome = attempts.died(attempt, perf_counter() - started_s)
            else:
                attempts.ended()
            if outcome is not None:
                yield outcome

    def _outcome(self, ref: Any) -> Outcome | None:
        """Return the outcome of a run, or None if its worker or node is gone."""
        try:
            outcome: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error  # not of the run: ours, or the cluster's
        except self._ray.exceptions.RayError:
            return None
        return outcome


def _knock(address: str) -> None:
    """Raise OSError if nothing listens there: Ray would end this process then."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


def run_on_node(
    outfit: list[Any], job: Job, task: Task, expected: dict[str, str]
) -> Outcome:
    """Carry out a job on a node; refuse if its packages are not the `expected` ones.

    `outfit` is a reference to `Supplies`, in a list: a process that has them already
    need not fetch them.
    """
    for name, version in versions().items():
        if version != expected[name]:
            raise UserError(
                f"all nodes need the same packages: a node has {name} {version}, where "
                f"the sweep was started it is {expected[name]}; install that"
            )
    return _runner(outfit[0])(job, task)


@lru_cache(maxsize=1)
def _runner(ref: Any) -> Callable[[Job, Task], Outcome]:
    """Return the function that carries out jobs with these supplies."""
    import ray  # noqa: PLC0415  (an extra)

    supplies: Supplies = ray.get(ref)
    shelf = supplies.shelf()
    directory = tempfile.TemporaryDirectory(prefix="kvsim-")
    relocation = Relocation.into(Path(directory.name), supplies.files)
    if not relocation.places:
        directory.cleanup()

    def run(job: Job, task: Task, kept: object = directory) -> Outcome:
        del kept  # until this process ends
        with shelf.at_hand():
            return relocation.restored(perform(relocation.moved(job), task))

    return run


@dataclass(frozen=True, slots=True)
class Relocation:
    """Where the files that configurations name lie on this machine."""

    places: Mapping[str, str]
    """From the path where the sweep was started to the one here."""

    @classmethod
    def into(cls, directory: Path, files: Mapping[str, bytes]) -> Relocation:
        """Write the files, by absolute path, that are not here into `directory`."""
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
        return (
            replace(job, config=self._with_places(job.config)) if self.places else job
        )

    def restored(self, outcome: Outcome) -> Outcome:
        """Name the files in an outcome as they are where the sweep was started."""
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
