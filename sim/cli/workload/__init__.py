"""``kvsim workload``: traffic, described, made, converted and judged."""

from __future__ import annotations

from cyclopts import App

COMMANDS = {
    "convert": (
        "sim.cli.workload.convert:convert",
        "Write a trace in another format, and say what that loses.",
    ),
    "generate": (
        "sim.cli.workload.generate:generate",
        "Sample the traffic of a configuration and write it, to be replayed.",
    ),
    "describe": (
        "sim.cli.workload.describe:describe",
        "Say what traffic is like: rates, lengths, prefix sharing, sessions.",
    ),
    "curve": (
        "sim.cli.workload.curve:curve",
        "Say how much KV memory buys how many prefix hits, for every size.",
    ),
    "fetch": (
        "sim.cli.workload.fetch:fetch",
        "Download a public trace and verify its checksum.",
    ),
}
"""By name: where a command is, and what it does; none is imported before it runs."""

app = App(name="workload", help="Traffic: traces, their statistics, and new ones.")
for _name, (_target, _help) in COMMANDS.items():
    app.command(_target, name=_name, help=_help)
