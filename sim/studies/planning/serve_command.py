"""The command that starts the engine of a configuration."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.config.tables import EngineConfig
    from sim.hardware.capacity import CapacityEstimate

_OURS = frozenset(
    {
        "model",
        "gpu",
        "scheduler",
        "engine_version",
        "admission",
        "admission_check",
        "evictor",
        "pipeline_parallel_size",
        "preemption_victim",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "enforce_eager",
        "max_paddings",
        "watermark",
        "sliding_window",
        "max_num_active_seqs",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold_adaptive",
        "prefill_schedule_interval",
        "scheduler_reserve_full_isl",
    }
)
"""Keys that are no plain option of the servers: said in words, or handled apart."""

_SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill")
_BEFORE_V1 = ("preemption_mode", "swap_space")


def serve_command(engine: EngineConfig, capacity: CapacityEstimate) -> str:
    """Return the shell command that serves this configuration, in one line.

    Limits that a release would choose by itself are written out, as the simulation took
    them. Before ``vllm serve`` (0.6) the servers are modules.

    Parameters
    ----------
    engine
        The engine's arguments.
    capacity
        The same, resolved.
    """
    words = [*_program(engine), *_plain(engine, capacity)]
    for key in _SWITCHES:
        words += _switch(engine, key)
    if engine.enforce_eager:
        words.append("--enforce-eager")
    return shlex.join(words)


def _program(engine: EngineConfig) -> list[str]:
    return [*engine.generation.server.command, engine.model]


def _plain(engine: EngineConfig, capacity: CapacityEstimate) -> list[str]:
    words: list[str] = []
    for key, field in type(engine).model_fields.items():
        value = _resolved(engine, capacity, key)
        if key in _OURS or value is None:
            continue
        if key in _BEFORE_V1 and key not in engine.generation.server.options:
            continue
        is_said = key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
        if value != field.default or is_said or key == "tensor_parallel_size":
            words += [f"--{key.replace('_', '-')}", _text(value)]
    return words


def _resolved(engine: EngineConfig, capacity: CapacityEstimate, key: str) -> Any:
    if key in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        return getattr(capacity, key)
    return getattr(engine, key)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _switch(engine: EngineConfig, key: str) -> list[str]:
    value = getattr(engine, key)
    if value is None:
        return []
    name = key.replace("_", "-")
    if key in engine.generation.server.valued_switches:
        return [f"--{name}={value}"]
    return [f"--{name}" if value else f"--no-{name}"]


def not_said(engine: EngineConfig) -> list[str]:
    """Return settings of the simulation that the command line does not carry."""
    told = {"model", "gpu", "scheduler", "engine_version", "admission_check"}
    found = []
    for key in sorted(_OURS - told - set(_SWITCHES) - {"enforce_eager"}):
        value = getattr(engine, key)
        if value not in (None, type(engine).model_fields[key].default):
            found.append(f"{key}={value}")
    options = engine.generation.server.options
    if engine.preemption_mode is not None and "preemption_mode" not in options:
        found.append(f"preemption_mode={engine.preemption_mode}")
    return found
