"""What ``kvsim size`` shows: the verdict, then what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from sim.cli.console import output_console

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from sim.studies.planning.verdict import Verdict


def print_size(
    verdict: Verdict,
    plan: Mapping[str, Any],
    misfits: Sequence[str],
    explained: str,
    kept: Path | None,
) -> None:
    console = output_console()
    console.print(Text(verdict.answer, style="bold"))
    for heading, lines in _sections(verdict, plan, misfits):
        console.print(Text(heading, style="dim"))
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 2)))
    if verdict.command:
        console.print(Text("To serve an engine:", style="dim"))
        console.print(Text(f"  {verdict.command}"), soft_wrap=True)
    if explained:
        console.print(Text("The plan that was run:", style="dim"))
        console.print(Text(explained.rstrip()), soft_wrap=True)
    if kept is not None:
        console.print(Text(f"The plan is in {kept}: kvsim plan {kept}"), soft_wrap=True)


def _sections(
    verdict: Verdict, plan: Mapping[str, Any], misfits: Sequence[str]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield headings and the lines under them, those that have any."""
    prices = plan["prices"]
    said = "; ".join(filter(None, (prices["date"], prices["note"])))
    for heading, lines in (
        ("Margin:", [*filter(None, [verdict.one_engine]), *verdict.margin]),
        ("What binds:", [verdict.binds]),
        ("Alternatives:", verdict.alternatives),
        ("What would change the answer:", verdict.changes),
        ("How sure:", [verdict.confidence]),
        ("Left out:", [*misfits, *verdict.left_out]),
        ("Prices:", [said]),
    ):
        if shown := [line for line in lines if line]:
            yield heading, shown
