"""Suggestions for mistyped keys, and for files that another command reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from sim.config.plug import did_you_mean
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ALIASES = {
    "dp": "data_parallel_size",
    "gpu_memory": "gpu_memory_utilization",
    "max_batch_size": "max_num_seqs",
    "max_batch_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "num_blocks": "num_gpu_blocks_override",
    "num_gpu_blocks": "num_gpu_blocks_override",
    "pp": "pipeline_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
}
"""Words of other tools, and what vLLM calls the same."""

_RATES = frozenset({"rate", "request_rate", "qps", "rps"})
_MANY = 15
"""Choices of which a list helps less than the one that was meant."""

_COMMANDS = {
    "plan": "a plan",
    "sweep": "a sweep",
    "run": "the configuration of a run",
}


def meant_key(path: str, tables: Mapping[str, type[BaseModel]]) -> str:
    """Return what an unknown key was meant to be, and the choices where they help.

    Parameters
    ----------
    path
        The key, with dots.
    tables
        Types of all tables by their path; the outermost has an empty one.
    """
    table, _, key = path.rpartition(".")
    # A table in a list, such as a pool, is at the path of the list.
    table = ".".join(name for name in table.split(".") if not name.isdigit())
    choices = list(tables[table].model_fields if table in tables else ())
    listed = f" (there are: {', '.join(choices)})"
    word = key.lower().replace("-", "_")
    word = _ALIASES.get(word, word)
    if word in _RATES:
        return (
            "; the rate is workload.synthetic.arrivals.rate or, of a trace or a "
            "preset, its rate_scale"
        )
    if word in choices:
        return f"; did you mean '{f'{table}.{word}' if table else word}'?"
    for other, model in tables.items():
        if word in model.model_fields:
            return f"; did you mean '{f'{other}.{word}' if other else word}'?"
    hint = did_you_mean(word, choices)
    return hint if hint and len(choices) > _MANY else hint + listed


def tables_of(root: type[BaseModel], path: str = "") -> dict[str, type[BaseModel]]:
    """Return the types of a configuration's tables by their path, the outermost first.

    Examples
    --------
    >>> from sim.config.tables import RunConfig
    >>> list(tables_of(RunConfig))[:2]
    ['', 'workload']
    """
    found = {path: root}
    for name, field in root.model_fields.items():
        for each in (field.annotation, *get_args(field.annotation)):
            if isinstance(each, type) and issubclass(each, BaseModel):
                found |= tables_of(each, f"{path}.{name}".removeprefix("."))
    return found


def share_hint(value: object) -> str:
    """Return how a percentage is written where a share is wanted, such as of 90."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 1 < float(str(value)) <= 100:
        return f"; write {float(str(value)) / 100:g} for {value} %"
    return ""


def refuse_other_kind(data: Mapping[str, Any], path: Path, wanted: str) -> None:
    """Refuse the file of another command: ``run``, ``plan`` or ``sweep``.

    Raises
    ------
    ConfigError
        With the command that takes it.
    """
    found = ""
    if "candidates" in data:
        found = "plan"
    elif "base" in data:
        found = "sweep"
    elif "engine" in data and "workload" in data and "prices" not in data:
        found = "run"
    if found and found != wanted:
        raise ConfigError(
            f"'{path}' is {_COMMANDS[found]}, not {_COMMANDS[wanted]}; try 'kvsim "
            f"{found} {path}'"
        )
