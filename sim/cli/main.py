"""The command line: thin commands, and what becomes of an error.

Exit status: 0 for success, 2 for a mistake of the user's (one line), 1 for a fault of
ours, 130 for Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import ExitStack
from io import TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import App

COMMAND_GROUP = "kvsim.commands"
"""Entry-point group through which other packages add commands."""

EXIT_OK, EXIT_FAULT, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_DIFFERENT = 1
"""Of `decisions` and `conform`: two schedules differ."""

NO_PLUGINS_OPTION = "--no-plugins"
"""Of every command: what may be run is no matter of one of them."""

HELP = """Simulate KV-cache scheduling of LLM serving engines.

How will this KV cache behave under this traffic: preemptions, cache usage,
latencies and capacity, before anyone rents the GPU.

A configuration may name classes in files (kind: file.py:Class), which are run.
--no-plugins, anywhere in a command, refuses them.
"""

COMMANDS = {
    "run": "Run one simulation: summary, results and figures.",
    "explore": "Open a live page: move a setting, see the curves move.",
    "serve": "Put the simulated engine behind an OpenAI-compatible server.",
    "sweep": "Run a configuration many times, on this machine or on a Ray cluster.",
    "plan": "Find the cheapest way to serve traffic, and how much a configuration "
    "holds.",
    "size": "Say what to buy to serve traffic within objectives.",
    "capacity": "Predict the number of KV blocks, explained GiB by GiB.",
    "decisions": "Write a schedule step by step, or show where two part.",
    "conform": "Compare our scheduler with the installed engine's own, decision by "
    "decision.",
    "validate": "Simulate a run that was measured, and report the errors.",
    "plot": "Draw figures of runs, of a sweep or of a plan.",
    "advise": "Try what would help a run, and print the three remedies that help most.",
    "report": "Write one page to look at: a run, several compared, a sweep or a plan.",
    "export": "Results as a trace for Perfetto, vLLM's benchmark JSON, Prometheus "
    "text, CSV.",
    "workload": "Traffic: statistics, generation, conversion, miss-ratio curves.",
    "list": "List what is bundled: policies, cost models, links and more.",
}
"""Each is in the module of its name, which is not imported before the command runs."""

LISTS = {
    "models": "List the bundled models, with facts.",
    "gpus": "List the bundled GPUs, with facts.",
    "schedulers": "List the schedulers, and the releases that they cover.",
    "routers": "List the routers of fleets, with facts.",
    "readers": "List the readers of recorded traffic, with facts.",
}
"""Short forms of `list`, in its module."""


def build_app() -> App:
    """Put the command line together."""
    from importlib.metadata import entry_points, version

    from cyclopts import App

    from sim.cli.examples import epilogue

    app = App(
        name="kvsim",
        help=HELP,
        version=lambda: version("kvsim"),
        version_flags=["--version"],
        help_epilogue=epilogue(""),
        result_action="return_value",
        suppress_keyboard_interrupt=False,  # `run` below says so, and with which status
    )
    for name, help_line in COMMANDS.items():
        # An App of its own, as of workload, has its examples.
        own = {} if name == "workload" else {"help_epilogue": epilogue(name)}
        app.command(f"sim.cli.{name}:{name}", name=name, help=help_line, **own)
    for name, help_line in LISTS.items():
        app.command(
            f"sim.cli.list:{name}",
            name=name,
            help=help_line,
            help_epilogue=epilogue(name),
        )
    app.register_install_completion_command(
        help="Let the shell complete commands and options, from its next start on."
    )
    for point in sorted(entry_points(group=COMMAND_GROUP), key=lambda p: p.name):
        # Loaded for its help line: such a module must import nothing heavy.
        app.command(point.load(), name=point.name)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``kvsim`` and leave with its exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed, as where a service starts it
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be bytes
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run ``kvsim`` with `arguments` and return the exit status."""
    rest = [each for each in arguments if each != NO_PLUGINS_OPTION]
    try:
        with ExitStack() as stack:
            if len(rest) < len(arguments):
                from sim.config.plugins import without_plugins

                stack.enter_context(without_plugins())
            status = build_app()(rest, exit_on_error=False, print_error=False)
    except KeyboardInterrupt:
        print("kvsim: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        line = _users_mistake(error)
        if line is None:
            raise
        print(f"kvsim: {' '.join(line.split())}", file=sys.stderr)
        return EXIT_USER
    return status if isinstance(status, int) else EXIT_OK


def _users_mistake(error: Exception) -> str | None:
    """Return the message to the user, or None where the fault is ours."""
    from cyclopts import CycloptsError
    from cyclopts.exceptions import UnusedCliTokensError

    from sim.config.plug import fault_in_user_code
    from sim.errors import UserError
    from workloads.errors import WorkloadError

    if isinstance(error, UnusedCliTokensError):
        words = " ".join(error.unused_tokens or ())
        return (
            f"nothing takes '{words}'; write a value behind its option (--help lists "
            f"them)"
        )
    if isinstance(error, UserError | WorkloadError | CycloptsError):
        return f"{error}{_meant(error)}"
    # An OSError that got this far is a full disk or a closed terminal.
    if isinstance(error, OSError):
        is_full = error.errno in {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}
        return f"{error}; make room and try again" if is_full else str(error)
    if isinstance(error, MemoryError):
        return (
            "there is not enough memory; take fewer requests (workload.trace.limit), "
            "shorter traffic, fewer --workers or a smaller pool"
        )
    return fault_in_user_code(error)


def _meant(error: Exception) -> str:
    """Return how an engine argument is given, where one was taken for an option."""
    from cyclopts.exceptions import UnknownOptionError

    if not isinstance(error, UnknownOptionError):
        return ""
    from sim.config.engine import EngineConfig

    option = (error.token.keyword or error.token.value).partition("=")[0]
    key = option.lstrip("-").replace("-", "_")
    takes_keys = any("--set" in each.names for each in error.argument_collection)
    if key not in EngineConfig.model_fields or not takes_keys:
        return ""
    return f" Keys of the configuration are set by --set engine.{key}=VALUE."
