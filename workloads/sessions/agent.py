"""Agents: models that call tools, many short outputs over a long growing context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from workloads.draws.by_position import check_quantile
from workloads.draws.counts import CountDistribution
from workloads.draws.durations import DurationDistribution
from workloads.lengths import LengthDistribution
from workloads.prefixes import PrefixStructure, check_prefixes
from workloads.sessions.transcript import Transcript, by_depth, check_context, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from workloads.draws.by_position import Draws
    from workloads.draws.streams import Streams
    from workloads.spec import RequestSpec


class _Call(NamedTuple):
    """One tool call: its text, the tool's result and time, or sub-agents instead."""

    call_tokens: int
    result_tokens: int
    tool_s: float
    sub_agents: list[tuple[int, int]]
    """Task and answer of each, in tokens."""


class _Task(NamedTuple):
    """All that is drawn for one session."""

    task_tokens: int
    answer_tokens: int
    think_s: float
    calls: list[_Call]


@dataclass(frozen=True, slots=True)
class Agent:
    """Tasks that a model works on by calling tools.

    A turn's output is a call; when the tool is done, its result is appended and the
    next turn is sent. After the last call comes the answer, a longer output. In place
    of a tool, a call may start sub-agents: requests side by side, each with all that
    was said so far and a task of its own. The agent goes on when the sub-agent with the
    longest answer has ended, and reads the answers of all.

    Parameters
    ----------
    tool_calls
        Calls before the answer.
    task_tokens
        The user's task; also that of a sub-agent.
    call_tokens
        Outputs that call a tool.
    result_tokens
        Results of tools.
    answer_tokens
        The last output; also that of a sub-agent.
    tool_s
        Seconds that a tool takes, or that collecting from sub-agents takes.
    sub_agents
        Sub-agents of a call, 0 for a tool; None for tools only.
    think_s
        Seconds before a task, of a user that has just become free (see
        `RequestSpec.delay_s`); None for none.
    prefixes
        Beginnings of prompts, such as the descriptions of tools; None for none.
    max_context_tokens
        A session ends before the turn whose prompt and output would be longer than
        this together; a sub-agent that would be is left out. A first turn is cut to
        fit. None for no limit.

    Raises
    ------
    WorkloadError
        If a parameter is out of range.
    """

    tool_calls: CountDistribution
    task_tokens: LengthDistribution
    call_tokens: LengthDistribution
    result_tokens: LengthDistribution
    answer_tokens: LengthDistribution
    tool_s: DurationDistribution
    sub_agents: CountDistribution | None = None
    think_s: DurationDistribution | None = None
    prefixes: PrefixStructure | None = None
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("task", "call", "result", "answer"):
            value = getattr(self, f"{name}_tokens")
            check_quantile(f"{name}_tokens", value, LengthDistribution)
        check_quantile("tool_calls", self.tool_calls, CountDistribution)
        check_quantile("tool_s", self.tool_s, DurationDistribution)
        if self.sub_agents is not None:
            check_quantile("sub_agents", self.sub_agents, CountDistribution)
        if self.think_s is not None:
            check_quantile("think_s", self.think_s, DurationDistribution)
        if self.prefixes is not None:
            check_prefixes(self.prefixes)
        check_context(self.max_context_tokens)

    def requests(
        self, arrivals_s: Sequence[float], streams: Streams
    ) -> Iterator[RequestSpec]:
        for transcript, task in told(
            arrivals_s, streams, self.prefixes, self.max_context_tokens, self._drawn
        ):
            yield from _worked(transcript, task)

    def _drawn(self, draws: Draws) -> Iterator[_Task]:
        calls = self._calls(draws)
        tasks = draws.lengths("sessions/task_tokens", self.task_tokens).tolist()
        answers = draws.lengths("sessions/answer_tokens", self.answer_tokens).tolist()
        thoughts = [0.0] * draws.num_draws
        if self.think_s is not None:
            thoughts = draws.seconds("sessions/think_s", self.think_s).tolist()
        for task, answer, think_s, own in zip(
            tasks, answers, thoughts, calls, strict=True
        ):
            yield _Task(task, answer, think_s, own)

    def _calls(self, draws: Draws) -> Iterator[list[_Call]]:
        numbers = draws.counts("sessions/tool_calls", self.tool_calls)
        depth = int(numbers.max())

        def lengths(name: str, distribution: LengthDistribution) -> NDArray[Any]:
            def draw(call: int) -> Any:
                return draws.lengths(f"sessions/{name}/{call}", distribution)

            return by_depth(draws, depth, draw)

        def seconds(call: int) -> Any:
            return draws.seconds(f"sessions/tool_s/{call}", self.tool_s)

        texts = lengths("call_tokens", self.call_tokens)
        results = lengths("result_tokens", self.result_tokens)
        tools_s = by_depth(draws, depth, seconds)
        asides = [self._sub_agents(draws, call) for call in range(depth)]
        for row, number in enumerate(numbers.tolist()):
            columns = [t[row, :number].tolist() for t in (texts, results, tools_s)]
            subs = [aside[row] for aside in asides[:number]]
            yield [_Call(*each) for each in zip(*columns, subs, strict=True)]

    def _sub_agents(self, draws: Draws, call: int) -> list[list[tuple[int, int]]]:
        """Return task and answer of each sub-agent of a call, for each session."""
        if self.sub_agents is None:
            return [[]] * draws.num_draws
        numbers = draws.counts(f"sessions/sub_agents/{call}", self.sub_agents)
        depth = int(numbers.max())

        def lengths(name: str, distribution: LengthDistribution) -> NDArray[Any]:
            def draw(sub: int) -> Any:
                name_of_sub = f"sessions/sub_agents/{call}/{name}/{sub}"
                return draws.lengths(name_of_sub, distribution)

            return by_depth(draws, depth, draw)

        tasks = lengths("task_tokens", self.task_tokens).tolist()
        answers = lengths("answer_tokens", self.answer_tokens).tolist()
        return [
            list(zip(task[:number], answer[:number], strict=True))
            for task, answer, number in zip(
                tasks, answers, numbers.tolist(), strict=True
            )
        ]


def _worked(transcript: Transcript, task: _Task) -> Iterator[RequestSpec]:
    """Yield the requests of one session, as far as they fit."""
    outputs = [*(call.call_tokens for call in task.calls), task.answer_tokens]
    yield transcript.first(task.task_tokens, outputs[0], task.think_s)
    for call, output in zip(task.calls, outputs[1:], strict=True):
        asides = [
            transcript.aside(*sub_agent, 0.0)
            for sub_agent in call.sub_agents
            if transcript.fits(sum(sub_agent))
        ]
        yield from asides
        for aside in asides:
            transcript.quote(aside)
        result = 0 if asides else call.result_tokens
        if asides:
            longest = max(asides, key=lambda aside: aside.num_output_tokens)
            transcript.previous_id = longest.request_id
        if not transcript.fits(result + output):
            return
        yield transcript.turn(result, output, call.tool_s)
