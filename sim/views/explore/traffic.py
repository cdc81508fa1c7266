"""Traffic that a page offers beside that of its configuration.

Traffic is a ``workload`` table: one of those below, a bundled preset, or what a file
says that was named on the command line. The browser chooses among their names.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sim.config.files import find_files, read_yaml
from sim.config.workload import SOURCES
from sim.errors import ConfigError
from sim.simulation.workload import (
    CONFIG_SUFFIXES,
    configured_requests,
    read_requests,
)
from workloads.errors import WorkloadError
from workloads.preset import load_preset, preset_names
from workloads.traces import guess_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workloads.spec import RequestSpec

AS_GIVEN: Final = "as given"
"""The traffic of the configuration itself."""

KEPT: Final = ("acceptance", "slo_class")
"""Keys that stay whatever the traffic is, for drafts and objectives of classes."""

_HOUR_S: Final = 3600


def _lognormal(median: int, sigma: float, most: int) -> dict[str, Any]:
    return {"kind": "lognormal", "median": median, "sigma": sigma, "max": most}


_CHAT: Final[Mapping[str, Any]] = {
    "sessions": {
        "kind": "chat",
        "duration_s": _HOUR_S,
        "arrivals": {"kind": "poisson", "rate": 0.4},
        "turns": {"kind": "geometric", "mean": 5.0, "max": 40},
        "first_prompt_tokens": _lognormal(350, 1.1, 8000),
        "prompt_tokens": _lognormal(90, 1.0, 4000),
        "output_tokens": _lognormal(280, 0.7, 2000),
        "think_s": {"kind": "lognormal", "median_s": 20, "sigma": 0.9, "max_s": 300},
        "prefixes": {
            "kind": "system_prompts",
            "num_groups": 8,
            "tokens": {"kind": "uniform", "low": 200, "high": 1500},
        },
        "max_context_tokens": 16_384,
    }
}

_LONG_PROMPTS: Final[Mapping[str, Any]] = {
    "synthetic": {
        "duration_s": _HOUR_S,
        "arrivals": {"kind": "poisson", "rate": 0.9},
        "prompt_tokens": _lognormal(60, 0.8, 2000),
        "output_tokens": _lognormal(250, 0.6, 2000),
        "prefixes": {
            "kind": "documents",
            "num_documents": 2000,
            "tokens": _lognormal(900, 0.6, 4000),
            "per_prompt": {"kind": "fixed", "number": 5},
            "system_tokens": 400,
        },
    }
}

_AGENTS: Final[Mapping[str, Any]] = {
    "sessions": {
        "kind": "agent",
        "duration_s": _HOUR_S,
        "arrivals": {"kind": "poisson", "rate": 0.08},
        "tool_calls": {"kind": "geometric", "mean": 15.0, "max": 80},
        "task_tokens": _lognormal(500, 1.0, 8000),
        "call_tokens": _lognormal(60, 0.6, 600),
        "result_tokens": _lognormal(700, 1.3, 10_000),
        "answer_tokens": _lognormal(600, 0.6, 4000),
        "tool_s": {"kind": "lognormal", "median_s": 1.5, "sigma": 1.2, "max_s": 120},
        "prefixes": {
            "kind": "system_prompts",
            "num_groups": 1,
            "tokens": {"kind": "fixed", "tokens": 6000},
        },
        "max_context_tokens": 32_768,
    }
}

_BATCH: Final[Mapping[str, Any]] = {
    "synthetic": {
        "num_requests": 4000,
        "arrivals": {"kind": "burst", "burst_size": 4000, "interval_s": 1.0},
        "prompt_tokens": _lognormal(900, 0.8, 8000),
        "output_tokens": _lognormal(300, 0.6, 2000),
    }
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests that a page can be given in place of the configuration's.

    Parameters
    ----------
    name
        What the page calls it.
    facts
        What is to be known of it, in a line.
    workload
        The table of a configuration.
    is_file
        Whether it was named on the command line.
    """

    name: str
    facts: str
    workload: Mapping[str, Any]
    is_file: bool = False

    def in_place_of(self, workload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the table that stands for a configuration's own."""
        kept = {key: workload[key] for key in KEPT if key in workload}
        return {**self.workload, **kept}


_OURS: Final = (
    Traffic(
        "chat",
        "chats that begin at 0.4/s for an hour, five turns each on average: about "
        "7,000 requests, prompts of 2,900 tokens and outputs of 280 (medians)",
        _CHAT,
    ),
    Traffic(
        "long prompts",
        "questions about five of 2,000 documents, as in retrieval, at 0.9/s for an "
        "hour: about 3,200 requests, prompts of 5,800 tokens and outputs of 250 "
        "(medians)",
        _LONG_PROMPTS,
    ),
    Traffic(
        "agents",
        "tasks of agents that begin at 0.08/s for an hour, 15 calls of tools each on "
        "average: about 3,100 requests, prompts of 15,000 tokens and outputs of 63 "
        "(medians)",
        _AGENTS,
    ),
    Traffic(
        "batch",
        "a list that is there at the start: 4,000 requests, prompts of 880 tokens and "
        "outputs of 300 (medians)",
        _BATCH,
    ),
)


def bundled_traffic() -> tuple[Traffic, ...]:
    """Return the traffic that every page offers."""
    return (*_OURS, *map(_preset, preset_names()))


def _preset(name: str) -> Traffic:
    preset = load_preset(name)
    rate = preset.num_requests / preset.span_s
    facts = f"drawn like the trace of that name, {rate:.2g} requests/s for an hour"
    return Traffic(name, facts, {"preset": {"name": name, "duration_s": _HOUR_S}})


def traffic_of(paths: Sequence[Path]) -> tuple[Traffic, ...]:
    """Return the traffic of files: traces, or configurations for their workload.

    Raises
    ------
    ConfigError, WorkloadError
        If one cannot be read, or is given twice.
    """
    names = Counter(path.name for path in paths)
    names.update((AS_GIVEN, *(each.name for each in bundled_traffic())))
    found = {}
    for path in paths:
        name = path.name if names[path.name] == 1 else str(path.absolute())
        if name in found:
            raise ConfigError(f"traffic {name}: is given twice; give each file once")
        found[name] = _of_file(path, name)
    return tuple(found.values())


def _of_file(path: Path, name: str) -> Traffic:
    try:
        if path.suffix.lower() in CONFIG_SUFFIXES:
            specs = configured_requests(path, ())
            data = read_yaml(path)
            find_files(data, path.parent)
            table = data["workload"]
        else:
            table = {"trace": {"kind": guess_kind(path), "path": str(path.resolve())}}
            specs = read_requests(path)
    except (ConfigError, WorkloadError) as error:
        where = "" if str(path) in str(error) else f" {path}"
        raise ConfigError(f"traffic{where}: {error}") from error
    return Traffic(name, measured(specs), table, is_file=True)


def measured(specs: Sequence[RequestSpec]) -> str:
    """Return how many requests come, how fast, and how long they are, in a line.

    Examples
    --------
    >>> from workloads.spec import RequestSpec
    >>> measured([RequestSpec(0, 0.0, 100, 10), RequestSpec(1, 60.0, 140, 30)])
    '2 requests in 60 s, prompts of 120 tokens and outputs of 20 (medians)'
    """
    prompt, output = (
        statistics.median(getattr(each, name) for each in specs)
        for name in ("num_prompt_tokens", "num_output_tokens")
    )
    last_s = specs[-1].arrival_s
    return (
        f"{len(specs):,} requests in {last_s:,.0f} s, prompts of {prompt:,.0f} tokens "
        f"and outputs of {output:,.0f} (medians)"
    )


def described(workload: Mapping[str, Any]) -> str:
    """Return which traffic a configuration has, in a few words."""
    source = next(name for name in SOURCES if workload.get(name) is not None)
    table = workload[source]
    name = table.get("name") or table.get("path") or table.get("kind")
    told = "" if name is None else f" {Path(str(name)).name}"
    return f"that of your configuration: {source}{told}"
