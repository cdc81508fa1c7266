"""A run's workload, made from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sim.config.files import Overrides, override
from sim.config.plug import build
from sim.config.tables import load_traffic
from sim.config.workload import WorkloadConfig
from sim.errors import ConfigError
from workloads.arrivals import ARRIVALS
from workloads.errors import TraceFormatError, WorkloadError
from workloads.lengths import LENGTH_PAIRS, LENGTHS
from workloads.prefixes import PREFIXES, PrefixedWorkload
from workloads.preset import PresetWorkload
from workloads.sessions import SESSIONS, SessionWorkload
from workloads.traces import TRACE_READERS, guess_kind
from workloads.transforms.resampling import Resampling
from workloads.transforms.sampling import SampledWorkload
from workloads.transforms.splitting import SplitWorkload
from workloads.workload import SyntheticWorkload, TraceWorkload, Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from workloads.spec import RequestSpec

T = TypeVar("T")

TRACE_KEYS = ("rate_scale", "window", "limit", "scale_by", "copies_share_text")
"""Keys of a trace's table that are no arguments of its reader."""

_SYNTHETIC_TABLES: Mapping[str, Mapping[str, type]] = {
    "arrivals": ARRIVALS,
    "prompt_tokens": LENGTHS,
    "output_tokens": LENGTHS,
    "lengths": LENGTH_PAIRS,
}
_SESSION_KEYS = ("arrivals", "num_sessions", "duration_s", "rate_scale")


def make_workload(config: WorkloadConfig, seed: int) -> Workload:
    """Construct the workload."""
    # Last, so that a replica sees what it would see of the whole.
    return _split(_sampled(_source(config, seed), config, seed), config, seed)


def _sampled(workload: Workload, config: WorkloadConfig, seed: int) -> Workload:
    """Draw what requests ask for besides, if there is anything."""
    sampling = {
        "best_of": config.best_of,
        "beam_width": config.beam_width,
        "priority": config.priority,
        "max_tokens": config.max_tokens,
        "slo_class": config.slo_class,
        "output_end": config.output_end,
    }
    if list(sampling.values()) == [1, 1, 0, None, "", None]:
        return workload
    return _refusing(
        "workload",
        SampledWorkload,
        workload=workload,
        beam_switch_share=config.beam_switch_share,
        seed=seed,
        **sampling,
    )


def _split(workload: Workload, config: WorkloadConfig, seed: int) -> Workload:
    """Keep the share of one replica, if the traffic is split."""
    if config.split is None:
        return workload
    split = _refusing(
        "workload.split",
        SplitWorkload,
        workload=workload,
        seed=seed,
        **dict(config.split),
    )
    return _Placed(split, "workload.split")


def _source(config: WorkloadConfig, seed: int) -> Workload:
    """Construct what arrives, without what is drawn on top."""
    if config.trace is not None:
        common = {key: config.trace[key] for key in TRACE_KEYS if key in config.trace}
        own = {key: v for key, v in config.trace.items() if key not in TRACE_KEYS}
        reader = build(TRACE_READERS, own, "workload.trace", more_keys=TRACE_KEYS)
        if config.resample is not None:
            # Resampled where the trace is read: before its rate is scaled.
            common["resampling"] = _refusing(
                "workload.resample", Resampling, **dict(config.resample)
            )
        return _refusing(
            "workload.trace", TraceWorkload, reader=reader, seed=seed, **common
        )
    if config.synthetic is not None:
        where = "workload.synthetic"
        settings = dict(config.synthetic)
        prefixes = settings.pop("prefixes")
        for key, table in _SYNTHETIC_TABLES.items():
            if settings[key] is not None:
                settings[key] = build(table, settings[key], f"{where}.{key}")
        workload: Workload = _refusing(where, SyntheticWorkload, seed=seed, **settings)
        return _prefixed(workload, prefixes, f"{where}.prefixes", seed)
    if config.sessions is not None:
        return _sessions(config.sessions, seed)
    assert config.preset is not None
    where = "workload.preset"
    settings = dict(config.preset)
    prefixes = settings.pop("prefixes")
    workload = _refusing(where, PresetWorkload, seed=seed, **settings)
    return _prefixed(workload, prefixes, f"{where}.prefixes", seed)


def _prefixed(
    workload: Workload, prefixes: Mapping[str, Any] | None, where: str, seed: int
) -> Workload:
    """Put what prompts share in front of them, if they share anything."""
    if prefixes is None or prefixes.get("kind") == "none":
        return workload
    structure = build(PREFIXES, prefixes, where)
    prefixed = _refusing(
        where, PrefixedWorkload, workload=workload, prefixes=structure, seed=seed
    )
    # Of the whole table: what comes before the prefixes may fail as well.
    return _Placed(prefixed, where.removesuffix(".prefixes"))


def _sessions(config: Mapping[str, Any], seed: int) -> Workload:
    """Construct sessions, whose table also says when they begin, and how many."""
    where = "workload.sessions"
    common = {key: config[key] for key in _SESSION_KEYS if key in config}
    own = {key: value for key, value in config.items() if key not in _SESSION_KEYS}
    kind = build(SESSIONS, own, where, more_keys=_SESSION_KEYS)
    arrivals = common.get("arrivals")
    if not isinstance(arrivals, dict):
        got = "" if arrivals is None else f", got {arrivals!r}"
        raise ConfigError(f"{where}.arrivals: this key is needed; give a table{got}")
    common["arrivals"] = build(ARRIVALS, arrivals, f"{where}.arrivals")
    workload = _refusing(where, SessionWorkload, sessions=kind, seed=seed, **common)
    return _Placed(workload, where)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A workload that names its table in what only shows when it is drawn."""

    workload: Workload
    where: str

    def requests(self) -> Sequence[RequestSpec]:
        try:
            return self.workload.requests()
        except TraceFormatError:
            raise  # names its file and line
        except WorkloadError as error:
            raise ConfigError(f"{self.where}: {error}") from error


def _refusing(where: str, make: Callable[..., T], **arguments: Any) -> T:
    """Call `make`; name the table in what it refuses."""
    try:
        return make(**arguments)
    except WorkloadError as error:
        raise ConfigError(f"{where}: {error}") from error


CONFIG_SUFFIXES = (".yaml", ".yml")


def read_requests(
    path: Path | str, overrides: Overrides = (), *, kind: str | None = None
) -> Sequence[RequestSpec]:
    """Return the requests of a trace file, or of a configuration's workload.

    Parameters
    ----------
    path
        A trace, or a configuration (``*.yaml``): a whole one, or its ``workload``
        table with a ``seed``.
    overrides
        Of a trace, arguments of its reader, ``limit``, ``window`` and so on; of a
        configuration, changes as of `sim.config.tables.load_config`.
    kind
        A trace's format; told by its content unless given.

    Returns
    -------
    sequence of RequestSpec
        In order of arrival.

    Raises
    ------
    ConfigError, WorkloadError
        If the file cannot be read, or an override does not fit.

    Examples
    --------
    >>> from kvsim import read_requests
    >>> requests = read_requests("examples/demo.yaml", {"seed": 1})
    >>> len(requests), requests[0].num_prompt_tokens
    (21930, 414)
    """
    path = Path(path)
    if path.suffix.lower() in CONFIG_SUFFIXES:
        if kind is not None:
            raise ConfigError(
                f"kind is for traces; '{path}' is a configuration, which names its own"
            )
        return configured_requests(path, overrides)
    table: dict[str, Any] = {}
    override(table, overrides)
    return recorded_requests(path, kind or guess_kind(path), table)


def configured_requests(path: Path, overrides: Overrides) -> Sequence[RequestSpec]:
    """Return the requests of a configuration's workload; see `read_requests`."""
    traffic = load_traffic(path, overrides)
    return make_workload(traffic.workload, traffic.seed).requests()


def recorded_requests(
    path: Path, kind: str, table: Mapping[str, Any]
) -> Sequence[RequestSpec]:
    """Return the requests of a trace, its format known; see `read_requests`."""
    trace = {"kind": kind, "path": str(path), **table}
    return make_workload(WorkloadConfig(trace=trace), seed=0).requests()
