"""Prices of steps whose requests share a prefix that is read once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.costs.base import ReadsPrefixesOnce
from sim.scheduler.batch import BatchShape, SharingShape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sim.costs.base import CostModel
    from sim.results.recording.step_log import StepLog

Shape = tuple[int, ...]


class CommonPrefixes:
    """Tells the step log which prefix tokens a step reads once for all requests.

    It does so before a step is priced: of the batch that was formed, or of decodes
    whose quiet steps follow, during which it stays as it is.

    Parameters
    ----------
    prefix
        The scheduler's; see `sim.scheduler.v1.common_prefix`.
    model
        Prices steps.
    log
        Is told from which row on how much is read once.

    Attributes
    ----------
    model
        See above.
    num_once
        Tokens that are read once, as noted last.
    """

    def __init__(self, prefix: Any, model: ReadsPrefixesOnce, log: StepLog) -> None:
        self._prefix = prefix
        self.model = model
        self._log = log
        self._num_common = self.num_once = 0

    @classmethod
    def of(cls, owner: Any) -> CommonPrefixes | None:
        """Return an engine's if its scheduler tells and its cost model asks, else None.

        Not of one that is told when its steps end, or with something beside them.
        """
        tell = getattr(owner.scheduler, "tell_common_prefixes", None)
        model, log = owner.cost_model, owner.recorder.steps
        if (
            tell is None
            or not isinstance(model, ReadsPrefixesOnce)
            or not model.reads_prefixes_once
            or owner.pace is not None
            or owner.beside is not None
        ):
            return None
        tell()
        return cls(getattr(owner.scheduler, "common_prefix", None), model, log)

    def note_batch(self, shape: BatchShape) -> None:
        """Note what the batch shares that comes next in the log, if it says so."""
        self._note(shape, getattr(shape, "num_common_tokens", 0))

    def note_decodes(self, num_decodes: int) -> None:
        """Note what all decodes share, whose quiet steps come next."""
        self._note((num_decodes, 0, 0), self._prefix.of_decodes())

    def noting(self, form: Callable[[float], Shape]) -> Callable[[float], Shape]:
        """Return what forms a batch and notes what its requests share."""
        of_batch, note = self._prefix.of_batch, self._note

        def formed(now_s: float) -> Shape:
            shape = form(now_s)
            note(shape, of_batch())
            return shape

        return formed

    def _note(self, shape: Sequence[int], num_common_tokens: int) -> None:
        self._num_common = num_common_tokens
        self.num_once = 0
        if num_common_tokens:
            self.num_once = self.model.num_read_once(
                num_common_tokens, shape[0], shape[2]
            )
        self._log.note_read_once(self.num_once)

    def shape(self, shape: Sequence[int]) -> BatchShape:
        """Return a shape with what was noted."""
        if not self._num_common:
            return BatchShape(*shape)
        return SharingShape.of(shape, self._num_common)


class ByCommonPrefix:
    """A function, or a table, by what is read once: that of what was noted last.

    Parameters
    ----------
    prefixes
        Know what that is.
    make
        From a model of steps that read so much once to the function or table.
    """

    def __init__(
        self, prefixes: CommonPrefixes, make: Callable[[CostModel], Any]
    ) -> None:
        self._prefixes = prefixes
        self._make = make
        self._made: dict[int, Any] = {}

    def _current(self) -> Any:
        num_once = self._prefixes.num_once
        found = self._made.get(num_once)
        if found is None:
            model = self._prefixes.model.reading_once(num_once)
            found = self._made[num_once] = self._make(model)
        return found

    def __call__(self, *shape: int) -> Any:
        return self._current()(*shape)

    def __getitem__(self, num_decodes: int) -> Any:
        return self._current()[num_decodes]
