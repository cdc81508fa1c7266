"""The first difference of two decision logs, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim.scheduler.log.lines import NO_DECISIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sim.scheduler.log.lines import Line

_EMPTY: tuple[Any, ...] = ([], {}, 0, False, None, "")
_STATE = (
    "error",
    "sched",
    "preempt",
    "swap_out",
    "swap_in",
    "copy",
    "bt",
    "waiting",
    "running",
    "swapped",
    "free",
    "hashes",
)
_MEANING = {
    "name": "the sizing cases answered",
    "header": "groups, pages and blocks",
    "t": "the steps taken",
    "e": "the engine: P, P1, ... prefill, D, D1, ... decode",
    "dropped": "requests withdrawn from the queue",
    "reject": "requests that the queue's limit turned away",
    "retract": "requests that found no slot to decode",
    "mode": "what the batch computes",
    "batch": "the batch: request, tokens, tokens before, request slot",
    "kv": "slots or pages: [entries kept, ids behind them]",
    "chunked": "the request whose prefill goes on",
    "full": "whether nothing more is admitted",
    "ratio": "new_token_ratio",
    "nodes": "nodes of the radix tree",
    "abort": "requests aborted before the call",
    "kind": "prompt step or decode step",
    "sched": "the batch: request, tokens, kind, computed tokens",
    "nbt": "number of batched tokens",
    "cached": "prefix-cache hits in tokens",
    "preempt": "preempted requests and how",
    "ignored": "requests refused by the scheduler",
    "swap_in": "blocks swapped in: [cpu, gpu]",
    "swap_out": "blocks swapped out: [gpu, cpu]",
    "copy": "blocks copied on write: [from, to]",
    "look": "look-ups of waiting heads: [request, hit, tokens of the tier]",
    "load": "loads: [job, request, first block, blocks, chunks]",
    "store": "stores: [job, request, first block, blocks, chunks]",
    "flush": "jobs that must end before the step",
    "refuse": "stores without room: [request, chunks]",
    "send": "blocks held for the consumer: [request, step in which the lease ends]",
    "pull": "blocks read: [request, own blocks, the producer's, whether it waits]",
    "heartbeat": "requests whose leases are to be extended",
    "below": "chunks offered too seldom",
    "evict": "chunks evicted from the tier",
    "bt": "block tables: [entries kept, ids behind them]",
    "waiting": "the waiting queue",
    "holding": "requests that wait and hold blocks",
    "running": "the running queue",
    "delayed": "finished requests that hold blocks",
    "swapped": "the swapped queue",
    "free": "free blocks after the call",
    "hashes": "block hashes in the prefix cache",
    "cpu": "chunks of the tier: in use, evictable, being written",
    "arc": "sizes of T1, T2, B1, B2, target of T1",
    "done": "jobs that ended with the step",
    "expired": "requests whose blocks were not read in time",
    "sent": "requests whose blocks are held no more",
    "recv": "requests whose load was among them",
    "bad": "blocks that loads failed to fill",
    "errors": "requests finished with an error",
    "fin": "requests finished by the step's output",
    "free_end": "free blocks after the step's output",
    "cpu_end": "chunks of the tier after the step's output",
    "error": "how the engine ended",
    "stalled": "whether nothing can move any more",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two logs part.

    Parameters
    ----------
    line
        From 1.
    step
        Step `t` of the line in A (in B if A has ended); for a line that is no step, the
        name of its sizing case, or "header".
    field
        First field that differs, in the order of the format; None if one log ended.
    expected, got
        Its values in A and B; None where it is absent.
    before
        The last line that both agree on, if any.
    here
        The line in A and in B.
    """

    line: int
    step: int | str
    field: str | None
    expected: Any
    got: Any
    before: Line | None
    here: tuple[Line | None, Line | None]

    def in_words(self, names: tuple[str, str] = ("A", "B")) -> str:
        """Return the difference, and the state around it, in a few lines."""
        first, second = names
        if self.field is None:
            ended, other = (first, second) if self.here[0] is None else (second, first)
            lines = [
                f"line {self.line}: {ended} has ended, {other} goes on with "
                f"{_named(self.step)}"
            ]
        else:
            lines = [
                f"{_named(self.step)} (line {self.line}), field '{self.field}' "
                f"({_MEANING.get(self.field, 'unknown to this format')}):",
                f"  expected ({first}): {_shown(self.expected)}",
                f"  got      ({second}): {_shown(self.got)}",
                *(f"  {note}" for note in _notes(self.expected, self.got)),
            ]
        if self.before is not None:
            before = _named(_step_of(self.before))
            lines.append(f"before, after {before} (equal in both):")
            lines += _state(self.before)
        for name, line in zip(names, self.here, strict=True):
            if line is not None and "t" in line:
                lines.append(f"after the call of step {line['t']} in {name}:")
                lines += _state(line)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain data, JSON-ready."""
        return {
            "line": self.line,
            "step": self.step,
            "field": self.field,
            "expected": self.expected,
            "got": self.got,
            "before": self.before,
            "a": self.here[0],
            "b": self.here[1],
        }


def first_difference(
    expected: Iterable[Line], got: Iterable[Line]
) -> Difference | None:
    """Return where two logs part, or None if they are equal.

    An absent field counts as empty, and the order of fields does not matter. Times of
    recorded schedules are no decisions and may differ.
    """
    ours, theirs = iter(expected), iter(got)
    before: Line | None = None
    number = 0
    while True:
        number += 1
        here = next(ours, None), next(theirs, None)
        first, second = here
        if first is None and second is None:
            return None
        if first is None or second is None:
            step = _step_of(first or second or {})
            return Difference(number, step, None, None, None, before, here)
        for field in _fields(first, second):
            mine, other = first.get(field), second.get(field)
            if mine != other and not (mine in _EMPTY and other in _EMPTY):
                step = _step_of(first)
                return Difference(number, step, field, mine, other, before, here)
        before = first


def _step_of(line: Line) -> int | str:
    return line["t"] if "t" in line else str(line.get("name", "header"))


def _named(step: int | str) -> str:
    if isinstance(step, int):
        return f"step {step}"
    return "the header" if step == "header" else f"case {step}"


def _fields(first: Line, second: Line) -> list[str]:
    """Return the decisions of two lines, in the order of the format."""
    known = [field for field in _MEANING if field in first or field in second]
    return known + sorted((first.keys() | second.keys()) - {*known, *NO_DECISIONS})


def _notes(expected: Any, got: Any) -> list[str]:
    """Tell the parts that differ, where the values are long."""
    if isinstance(expected, list) and isinstance(got, list):
        for index, (mine, other) in enumerate(zip(expected, got, strict=False)):
            if mine != other:
                return [f"entry {index}: expected {mine}, got {other}"]
        longer, name = (
            (expected, "expected") if len(expected) > len(got) else (got, "got")
        )
        shorter = min(len(expected), len(got))
        return [f"only {name}, from entry {shorter} on: {_shown(longer[shorter:])}"]
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in [*expected, *(key for key in got if key not in expected)]:
            if expected.get(key) != got.get(key):
                return [
                    f"{key}: expected {expected.get(key, 'no change')}, got "
                    f"{got.get(key, 'no change')}"
                ]
    return []


def _state(line: Line) -> list[str]:
    return [f"  {name}: {_shown(line[name])}" for name in _STATE if name in line]


def _shown(value: Any, most: int = 400) -> str:
    if value is None:
        return "nothing"
    text = str(value).replace("'", "")
    return text if len(text) <= most else f"{text[:most]}... ({len(value)} entries)"
