"""``kvsim list`` and its short forms: what is bundled, with facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.cli import options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _short_form(kind: str, what: str, example: str) -> Callable[..., int]:
    """Return the command that lists one kind, with its help."""

    def listed(*words: str, json: options.Json = False) -> int:
        return _print(kind, words, as_json=json)

    listed.__doc__ = f"""List the {what}.

    Parameters
    ----------
    words
        List those only that have all of these words in their facts: {example}.
    """
    return listed


models = _short_form(
    "models", "bundled models: parameters, layers, KV cache and lengths", "qwen3 fp8"
)
gpus = _short_form(
    "gpus", "bundled GPUs: memory, bandwidth, FLOP/s by dtype and links", "h100 pcie"
)
schedulers = _short_form(
    "schedulers", "schedulers: releases that they cover, and what they do", "v1"
)
routers = _short_form(
    "routers", "routers of fleets, and how each chooses an engine", "prefix"
)
readers = _short_form("trace_readers", "readers of recorded traffic", "azure")


def list(kind: str = "", /, *words: str, json: options.Json = False) -> int:
    """List what is bundled of a kind; without one, the kinds.

    Parameters
    ----------
    kind
        Such as routers, evictors, victims, admission_rules or interconnects.
    words
        List those only that have all of these words in their facts.
    """
    return _print(kind, words, as_json=json) if kind else _print_kinds(as_json=json)


def _print(kind: str, words: tuple[str, ...], *, as_json: bool) -> int:
    from rich.text import Text

    from sim.cli.console import output_console, print_json
    from sim.views.bundled import BUNDLED_KINDS, bundled

    rows = bundled(kind, " ".join(words))
    if as_json:
        print_json(rows)
        return 0
    shown, console = BUNDLED_KINDS[kind], output_console()
    texts = [[text(row) for text in shown.columns.values()] for row in rows]
    _print_texts([*shown.columns], texts)
    note = f"; {shown.note}" if shown.note else ""
    what = f"{len(rows)} of {len(bundled(kind))} {kind.replace('_', ' ')}"
    console.print(Text(f"{what}, for {shown.key}{note}", style="dim"))
    return 0


def _print_texts(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table or, where that is wider than the terminal, lines a row."""
    from sim.cli.console import output_console, table_or_lines

    console = output_console()
    for part in table_or_lines(headings, rows, headings, console.width):
        console.print(part)


def _print_kinds(*, as_json: bool) -> int:
    from sim.cli.console import facts_table, output_console, print_json
    from sim.views.bundled import BUNDLED_KINDS

    if as_json:
        print_json({name: kind.key for name, kind in BUNDLED_KINDS.items()})
        return 0
    output_console().print(
        facts_table((name, kind.key) for name, kind in BUNDLED_KINDS.items())
    )
    return 0
