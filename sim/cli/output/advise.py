"""Terminal output of ``kvsim advise``: the bottleneck, and the measured remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.padding import Padding
from rich.text import Text

from sim.cli.console import output_console
from sim.studies.advice.words import advice_lines, best_rows, tried_lines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def print_advice(advice: Mapping[str, Any], path: Path | None) -> None:
    """Print advice, and where it is kept, if it is."""
    console = output_console()
    answer, *lines = advice_lines(advice)
    console.print(Text(answer, style="bold"))
    for line in lines:
        console.print(Text(line))
    for name, *facts in best_rows(advice):
        console.print(Text(name))
        for fact in filter(None, facts):
            console.print(Padding(Text(fact), (0, 0, 0, 3)))
    if tried := list(tried_lines(advice)):
        console.print(Text("Tried besides:", style="dim"))
        for line in tried:
            console.print(Padding(Text(line), (0, 0, 0, 2)))
    kept = f"kept in {path}" if path else "not kept: --set makes another run of this"
    console.print(Text(kept), soft_wrap=True)
