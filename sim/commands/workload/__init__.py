"""``kvsim workload``: traffic, described, made, converted and judged."""

from __future__ import annotations

from cyclopts import App

COMMANDS = {
    "fetch": (
        "sim.commands.workload.fetch:fetch",
        "Download a public trace and verify its checksum.",
    ),
}
"""By name: where a command is, and what it does; none is imported before it runs."""

app = App(name="workload", help="Traffic: traces, their statistics, and new ones.")
for _name, (_target, _help) in COMMANDS.items():
    app.command(_target, name=_name, help=_help)
