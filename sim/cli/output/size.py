"""Terminal output of ``kvsim size``: the verdict, then the plan behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from sim.cli.console import output_console

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from sim.studies.planning.answer.verdict import Verdict


def print_size(
    verdict: Verdict,
    plan: Mapping[str, Any],
    misfits: Sequence[str],
    explained: str,
    kept: Path | None,
) -> None:
    console = output_console()
    for part in verdict_parts(verdict, plan["prices"], misfits):
        console.print(part, soft_wrap=getattr(part, "no_wrap", None) is True)
    if explained:
        console.print(Text("The plan that was run:", style="dim"))
        console.print(Text(explained.rstrip()), soft_wrap=True)
    if kept is not None:
        console.print(Text(f"The plan is in {kept}: kvsim plan {kept}"), soft_wrap=True)


def verdict_parts(
    verdict: Verdict, prices: Mapping[str, Any], misfits: Sequence[str] = ()
) -> Iterator[Text | Padding]:
    """Yield the answer, what it rests on under headings, and the server's command."""
    yield Text(verdict.answer, style="bold")
    for heading, lines in _sections(verdict, prices, misfits):
        yield Text(heading, style="dim")
        for line in lines:
            yield Padding(Text(line), (0, 0, 0, 2))
    if verdict.command:
        yield Text("To serve an engine:", style="dim")
        yield Text(f"  {verdict.command}", no_wrap=True)
        if verdict.not_said:
            missing = ", ".join(verdict.not_said)
            yield Padding(Text(f"The command does not say: {missing}"), (0, 0, 0, 2))
    if verdict.router:
        yield Text("Before the engines:", style="dim")
        yield Text(f"  {verdict.router}", no_wrap=True)


def _sections(
    verdict: Verdict, prices: Mapping[str, Any], misfits: Sequence[str]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield headings and the lines under them, those that have any."""
    said = "; ".join(filter(None, (prices["date"], prices["note"])))
    for heading, lines in (
        ("Margin:", [*filter(None, [verdict.one_engine]), *verdict.margin]),
        ("What binds:", [verdict.binds]),
        ("Alternatives:", verdict.alternatives),
        ("What the router is worth:", verdict.routers),
        ("What host memory is worth:", verdict.host_memory),
        ("Fleets that the plan names:", verdict.fleets),
        ("What would change the answer:", verdict.changes),
        ("How sure:", [verdict.confidence]),
        ("Left out:", [*misfits, *verdict.left_out]),
        ("Prices:", [said]),
    ):
        if shown := [line for line in lines if line]:
            yield heading, shown
