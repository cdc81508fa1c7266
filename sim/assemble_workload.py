"""A run's workload, made from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.errors import ConfigError
from sim.plug import build
from workloads.arrivals import ARRIVALS
from workloads.errors import WorkloadError
from workloads.lengths import LENGTHS
from workloads.preset import PresetWorkload
from workloads.sampling import SampledWorkload
from workloads.traces import TRACE_READERS
from workloads.workload import SyntheticWorkload, TraceWorkload, Workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.workload_config import WorkloadConfig

_TRACE_KEYS = ("rate_scale", "window", "limit")


def make_workload(config: WorkloadConfig, seed: int) -> Workload:
    """Construct the workload.

    Raises
    ------
    ConfigError, WorkloadError
        With the path of the key.
    """
    workload = _source(config, seed)
    sampling = {
        "best_of": config.best_of,
        "beam_width": config.beam_width,
        "priority": config.priority,
        "max_tokens": config.max_tokens,
    }
    if list(sampling.values()) == [1, 1, 0, None]:
        return workload
    return _refusing(
        "workload",
        SampledWorkload,
        workload=workload,
        beam_switch_share=config.beam_switch_share,
        seed=seed,
        **sampling,
    )


def _source(config: WorkloadConfig, seed: int) -> Workload:
    """Construct what arrives, without what is drawn on top."""
    if config.trace is not None:
        common = {key: config.trace[key] for key in _TRACE_KEYS if key in config.trace}
        own = {key: v for key, v in config.trace.items() if key not in _TRACE_KEYS}
        reader = build(TRACE_READERS, own, "workload.trace", more_keys=_TRACE_KEYS)
        return _refusing("workload.trace", TraceWorkload, reader=reader, **common)
    if config.synthetic is not None:
        where = "workload.synthetic"
        settings = dict(config.synthetic)
        tables = {"arrivals": ARRIVALS, "prompt_tokens": LENGTHS}
        tables["output_tokens"] = LENGTHS
        for key, table in tables.items():
            settings[key] = build(table, settings[key], f"{where}.{key}")
        return _refusing(where, SyntheticWorkload, seed=seed, **settings)
    assert config.preset is not None
    return _refusing(
        "workload.preset", PresetWorkload, seed=seed, **dict(config.preset)
    )


def _refusing(where: str, make: Callable[..., Workload], **arguments: Any) -> Workload:
    """Call `make`; name the table in what it refuses."""
    try:
        return make(**arguments)
    except WorkloadError as error:
        raise ConfigError(f"{where}: {error}") from error
