"""``kvsim workload``: traffic, described, made, converted and judged."""

from __future__ import annotations

from cyclopts import App

from sim.cli.examples import epilogue

COMMANDS = {
    "convert": "Write a trace in another format, and say what that loses.",
    "generate": "Sample the traffic of a configuration and write it, to be replayed.",
    "describe": "Say what traffic is like: rates, lengths, prefix sharing, sessions.",
    "curve": "Say how much KV memory buys how many prefix hits, for every size.",
    "fetch": "Download a public trace and verify its checksum.",
}
"""Each is in the module of its name, which is not imported before the command runs."""

workload = App(
    help_epilogue=epilogue("workload"),
    name="workload",
    help="Traffic: traces, their statistics, and new ones.",
)
for _name, _help in COMMANDS.items():
    workload.command(
        f"sim.cli.workload.{_name}:{_name}",
        name=_name,
        help=_help,
        help_epilogue=epilogue(f"workload {_name}"),
    )
