"""A line on each mistake in a configuration, with the remedy."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from sim.config.plug import did_you_mean, with_choices
from sim.config.types import shortened
from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

_ALIASES = {
    "dp": "data_parallel_size",
    "gpu_memory": "gpu_memory_utilization",
    "max_batch_size": "max_num_seqs",
    "max_batch_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "context_length": "max_model_len",
    "num_blocks": "num_gpu_blocks_override",
    "num_gpu_blocks": "num_gpu_blocks_override",
    "pp": "pipeline_parallel_size",
    "tensor_parallel": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
}
"""Words of other tools, and what vLLM calls the same."""

_OF_AN_ENGINE = {
    "backend": "scheduler",
    "engine": "scheduler",
    "generation": "scheduler",
    "kind": "scheduler",
    "type": "scheduler",
}
"""Other words for the key that names an engine."""

_WITHOUT_EFFECT = {
    "mamba_block_size": "blocks of states are as long as those of attention",
    "mamba_cache_mode": "enable_prefix_caching says when states are kept",
}
"""Keys that 0.33 overwrites or ignores, and what holds instead."""

_DECIDES_NOTHING = frozenset(
    {"download_dir", "hf_token", "host", "load_format", "logprobs_mode"}
    | {"max_log_len", "port", "reasoning_parser", "revision"}
    | {"served_model_name", "tokenizer", "tokenizer_mode"}
    | {"enable_auto_tool_choice", "tool_call_parser", "trust_remote_code"}
)
"""Arguments of ``vllm serve`` that no decision or time here depends on."""

_NOT_BUILT = frozenset(
    {"attention_backend", "compilation_config", "cpu_offload_gb", "enable_dbo"}
    | {"decode_context_parallel_size", "enable_eplb", "enable_lora", "max_loras"}
    | {"prefill_context_parallel_size"}
)
"""Arguments of ``vllm serve`` that would matter, and are not simulated."""

_UNITS = {"kv_offloading_size": "GiB", "swap_space": "GiB"}
"""Of vLLM's keys that do not name theirs."""

_WITH_A_UNIT = re.compile(r"[\d.]+\s*[A-Za-z%/]+")
"""Such as 256GiB."""

_RATES = frozenset({"rate", "request_rate", "qps", "rps"})

# Names that pydantic puts into a path to tell the branches of a union apart.
_TYPE_NAMES = ("str", "dict[str,any]", "[key]")

_COMMANDS = {
    "plan": "a plan",
    "sweep": "a sweep",
    "run": "the configuration of a run",
}


def one_line(error: ValidationError, root: type[BaseModel]) -> str:
    """Return the first problem of a configuration in a line.

    Key, rule, value, remedy; `root` is the type of the outermost table.
    """
    problems = error.errors()
    problem = _first_of(problems)
    path = ".".join(str(part) for part in problem["loc"] if part not in _TYPE_NAMES)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        return _unknown_key(path, root) + more
    if problem["type"] == "missing":
        return f"{path}: this key is needed; give it{more}"
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if problem["type"] in {"model_type", "dict_type"}:
        rule = f"should be a table of keys, such as {{{_a_key(path, root)}: ...}}"
    key, colon, _ = rule.partition(": ")
    if colon and key.partition(".")[0] in _table_at(path, root).model_fields:
        return f"{path}.{rule}{more}".removeprefix(".")
    value = problem["input"]
    shown = "" if isinstance(value, dict) else f", got {shortened(value)}"
    if problem["type"].startswith(("greater_than", "less_than", "finite")):
        is_share = (problem.get("ctx") or {}).get("le") == 1
        hint = share_hint(value) if is_share else ""
        shown += hint or _default_of(path, root)
    if problem["type"] == "string_type" and isinstance(value, int | float):
        shown += "; write a name, or the number in quotes"
        if path.endswith("engine.scheduler"):
            shown += "; releases are engine_version"
    if problem["type"] in {"float_type", "int_type"} and isinstance(value, str):
        unit = _UNITS.get(path.rpartition(".")[2], "the unit of the key")
        is_int = problem["type"] == "int_type"
        shown += _number_hint(value.strip(), unit, is_int=is_int)
    return f"{path or 'configuration'}: {rule}{shown}{more}"


def _number_hint(text: str, unit: str, *, is_int: bool) -> str:
    """Return how to write the number that a text stands for.

    Examples
    --------
    >>> _number_hint("0,9", "s", is_int=False), _number_hint("1,024", "", is_int=True)
    ('; write 0.9, with a point', '; write 1024')
    >>> _number_hint("1e3", "", is_int=True)
    '; write 1000'
    >>> _number_hint("1TB", "GiB", is_int=False)
    '; write the number alone, in GiB'
    """
    if _WITH_A_UNIT.fullmatch(text):
        return f"; write the number alone, in {unit}"
    if not is_int and re.fullmatch(r"-?\d+,\d+", text):
        return f"; write {text.replace(',', '.')}, with a point"
    if is_int and re.fullmatch(r"\d{1,3}(,\d{3})+|\d(\.0*)?[eE]\+?\d{1,2}", text):
        return f"; write {float(text.replace(',', '')):.0f}"
    return "; write it without quotes, as 16 or 1.0e-3"


def _first_of(problems: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the first problem; of a missing key, an unknown one beside it instead."""
    first = problems[0]
    if first["type"] != "missing":
        return first
    table = first["loc"][:-1]
    beside = (
        each
        for each in problems
        if each["type"] == "extra_forbidden" and each["loc"][:-1] == table
    )
    return next(beside, first)


def _a_key(path: str, root: type[BaseModel]) -> str:
    """Return a key that a table has: one that it needs, if there is such a one."""
    table = tables_of(root).get(_without_places(path))
    fields = table.model_fields if table else {}
    needed = (name for name, field in fields.items() if field.is_required())
    return next(needed, next(iter(fields), "kind"))


def _without_places(path: str) -> str:
    """Return the path of a table in a list, such as a pool: that of the list."""
    return ".".join(name for name in path.split(".") if not name.isdigit())


def _default_of(path: str, root: type[BaseModel]) -> str:
    """Return the remedy for a number out of range: what the key is otherwise."""
    table, _, key = path.rpartition(".")
    field = _table_at(table, root).model_fields.get(key)
    if field is None or field.is_required():
        return ""
    return f"; its default is {'null' if field.default is None else field.default}"


def _unknown_key(path: str, root: type[BaseModel]) -> str:
    key = path.rpartition(".")[2]
    if key in _WITHOUT_EFFECT:
        return f"{path}: no effect in 0.33, {_WITHOUT_EFFECT[key]}; remove this key"
    if path.rpartition(".")[0] == "engine":
        word = key.replace("-", "_")
        if word in _DECIDES_NOTHING:
            return f"{path}: nothing that is simulated depends on it; leave it out"
        if word in _NOT_BUILT:
            return f"{path}: is not simulated; leave it out for an engine without it"
    return f"{path}: unknown key{meant_key(path, tables_of(root))}"


def _table_at(path: str, root: type[BaseModel]) -> type[BaseModel]:
    """Return the type of the table at a path; the last one on the way that has one."""
    table = root
    for name in path.split("."):
        field = table.model_fields.get(name)
        for each in _tables_in(field.annotation if field else None):
            table = each
    return table


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the types of tables that a key may hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _tables_in(each)


def meant_key(path: str, tables: Mapping[str, type[BaseModel]]) -> str:
    """Return the key that an unknown one was meant to be, with choices if they help.

    Parameters
    ----------
    path
        The key, with dots.
    tables
        Types of all tables by their path; the outermost has an empty one.
    """
    table, _, key = path.rpartition(".")
    table = _without_places(table)
    choices = list(tables[table].model_fields if table in tables else ())
    word = key.lower().replace("-", "_")
    word = _ALIASES.get(word, word)
    if table.rpartition(".")[2] == "engine":
        word = _OF_AN_ENGINE.get(word, word)
    if word in _RATES:
        return (
            "; the rate is workload.synthetic.arrivals.rate or, of a trace or a "
            "preset, its rate_scale"
        )
    if word in choices:
        return f"; did you mean '{f'{table}.{word}' if table else word}'?"
    if f"{word}s" in choices or word.removesuffix("s") in choices:
        return did_you_mean(word, choices)
    others = [each for each, model in tables.items() if word in model.model_fields]
    if len(others) == 1:
        (other,) = others
        return f"; did you mean '{f'{other}.{word}' if other else word}'?"
    return with_choices(did_you_mean(word, choices), choices, "there are", table)


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
        for each in _tables_in(field.annotation):
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
