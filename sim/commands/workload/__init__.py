"""``kvsim workload``: traffic, described, made, converted and judged."""

from __future__ import annotations

from cyclopts import App

COMMANDS = {
    "convert": (
        "sim.commands.workload.convert:convert",
        "Write a trace in another format, and say what that loses.",
    ),
    "generate": (
        "sim.commands.workload.generate:generate",
        "Sample the traffic of a configuration and write it, to be replayed.",
    ),
    "describe": (
        "sim.commands.workload.describe:describe",
        "Say what traffic is like: rates, lengths, prefix sharing, sessions.",
    ),
    "curve": (
        "sim.commands.workload.curve:curve",
        "Say how much KV memory buys how many prefix hits, for every size.",
    ),
    "fetch": (
        "sim.commands.workload.fetch:fetch",
        "Download a public trace and verify its checksum.",
    ),
}
"""By name: where a command is, and what it does; none is imported before it runs."""

app = App(name="workload", help="Traffic: traces, their statistics, and new ones.")
for _name, (_target, _help) in COMMANDS.items():
    app.command(_target, name=_name, help=_help)
