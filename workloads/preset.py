"""Presets: traffic like that of a public trace, where the trace is not at hand.

A preset is a JSON file in ``workloads/presets/`` of derived facts: rate, burstiness,
quantiles of the lengths, their rank correlation. Its tables carry ``kind`` and the
same keys as a configuration. `workloads.derive_preset` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.arrivals import ARRIVALS
from workloads.errors import WorkloadError
from workloads.lengths import LENGTHS
from workloads.plain import parse_json
from workloads.workload import SyntheticWorkload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workloads.arrivals import ArrivalProcess
    from workloads.lengths import LengthDistribution
    from workloads.requests.columns import RequestColumns

PRESET_FORMAT = "kvsim-preset/1"
"""Value of the key ``format`` in files of this version."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Derived facts of one trace.

    Parameters
    ----------
    name
        Its name for `load_preset`.
    source
        Source of the facts: URL, checksum, licence, citation.
    num_requests
        Requests in the trace.
    span_s
        Seconds from its first to its last arrival.
    arrivals
        A process of the same rate and burstiness.
    prompt_tokens, output_tokens
        Distributions of the same lengths.
    rank_correlation
        Spearman's rho between them.
    notes
        Differences between preset and trace, in figures; empty where none is known.
    """

    name: str
    source: Mapping[str, str]
    num_requests: int
    span_s: float
    arrivals: ArrivalProcess
    prompt_tokens: LengthDistribution
    output_tokens: LengthDistribution
    rank_correlation: float
    notes: str = ""


@dataclass(frozen=True, slots=True)
class PresetWorkload:
    """Synthetic traffic like that of a public trace.

    Gaps are independent of each other: a trace's slow swings of rate are not in a
    preset, nor is any prefix reuse. `Preset.notes` says how much smoother it is.

    Parameters
    ----------
    name
        A packaged preset, or the path of a ``.json`` file of the same format.
    num_requests, duration_s
        Where to stop, at most one of them; with neither, as many requests as the
        trace has. ``duration_s`` is in seconds of the workload (after scaling).
    rate_scale
        Arrival times are divided by it: 2 doubles the rate.
    seed
        Seed of all random streams.

    Raises
    ------
    WorkloadError
        If the preset does not exist or a parameter is out of range.
    """

    name: str
    num_requests: int | None = None
    duration_s: float | None = None
    rate_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.synthetic()

    def requests(self) -> RequestColumns:
        return self.synthetic().requests()

    def synthetic(self) -> SyntheticWorkload:
        """Return the workload that the preset stands for, to look at or to vary."""
        preset = load_preset(self.name)
        num_requests = self.num_requests
        if num_requests is None and self.duration_s is None:
            num_requests = preset.num_requests
        return SyntheticWorkload(
            arrivals=preset.arrivals,
            prompt_tokens=preset.prompt_tokens,
            output_tokens=preset.output_tokens,
            num_requests=num_requests,
            duration_s=self.duration_s,
            rank_correlation=preset.rank_correlation,
            rate_scale=self.rate_scale,
            seed=self.seed,
        )


def preset_names() -> tuple[str, ...]:
    """Return the names of the packaged presets, sorted."""
    files = resources.files("workloads").joinpath("presets").iterdir()
    return tuple(
        sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))
    )


def load_preset(name: str) -> Preset:
    """Load a packaged preset, or the ``.json`` file of the same format at a path."""
    try:
        return _preset(parse_json(_text(name)))
    except WorkloadError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WorkloadError(
            f"a preset must be JSON of format {PRESET_FORMAT}; got {name!r} "
            f"({type(error).__name__}: {error}); derive it anew: "
            "python -m workloads.derive_preset"
        ) from None


def _text(name: str) -> str:
    if isinstance(name, str) and name.endswith(".json"):
        return Path(name).expanduser().read_text(encoding="utf-8")
    names = preset_names()
    if name not in names:
        known = ", ".join(names)
        raise WorkloadError(f"preset must be one of {known}; got {name!r}; choose one")
    file = resources.files("workloads").joinpath("presets", f"{name}.json")
    return file.read_text(encoding="utf-8")


def _preset(facts: dict[str, Any]) -> Preset:
    if facts["format"] != PRESET_FORMAT:
        raise ValueError(f"format {facts['format']!r}")
    return Preset(
        name=facts["name"],
        source=facts["source"],
        num_requests=facts["num_requests"],
        span_s=facts["span_s"],
        arrivals=_built(ARRIVALS, facts["arrivals"]),
        prompt_tokens=_built(LENGTHS, facts["prompt_tokens"]),
        output_tokens=_built(LENGTHS, facts["output_tokens"]),
        rank_correlation=facts["rank_correlation"],
        notes=facts.get("notes", ""),
    )


def _built(registry: Mapping[str, Any], table: dict[str, Any]) -> Any:
    arguments = {key: value for key, value in table.items() if key != "kind"}
    return registry[table["kind"]](**arguments)
