"""The configuration of a run: typed, complete, refused with the path of the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from sim.errors import ConfigError
from sim.files import find_files, parse_yaml, read_yaml
from sim.plug import did_you_mean

NOT_BUILT = {
    "speculative_config": "speculative decoding",
    "num_speculative_tokens": "speculative decoding",
    "num_lookahead_slots": "speculative decoding",
    "kv_offloading_size": "KV offloading of v1",
    "kv_transfer_config": "disaggregation",
    "data_parallel_size": "data parallelism",
    "async_scheduling": "asynchronous scheduling",
    "enable_expert_parallel": "expert parallelism",
    "watermark": "the watermark of later releases",
    "scheduling_policy": "priority scheduling",
    "policy": "priority scheduling",
    "sliding_window": "sliding-window layers",
}
"""Keys that engines have and this simulator does not, and what they stand for."""

Positive = Annotated[int, Field(ge=1)]
Kind = dict[str, Any]


Count = Annotated[int, Field(ge=1, le=10**9)]


class _Table(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False
    )


class SyntheticConfig(_Table):
    """Requests drawn from distributions."""

    num_requests: Positive | None = None
    duration_s: Annotated[float, Field(gt=0)] | None = None
    arrivals: Kind
    prompt_tokens: Kind
    output_tokens: Kind
    rank_correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0
    rate_scale: Annotated[float, Field(gt=0)] = 1.0


class PresetConfig(_Table):
    """A bundled synthetic workload, fitted to a published trace."""

    name: str
    num_requests: Positive | None = None
    duration_s: Annotated[float, Field(gt=0)] | None = None
    rate_scale: Annotated[float, Field(gt=0)] = 1.0


class WorkloadConfig(_Table):
    """Where requests come from: exactly one of the three."""

    trace: Kind | None = None
    synthetic: SyntheticConfig | None = None
    preset: PresetConfig | None = None

    @model_validator(mode="after")
    def _one_source(self) -> WorkloadConfig:
        sources = ("trace", "synthetic", "preset")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of trace, synthetic and preset, got "
                f"{' and '.join(given) or 'none'}"
            )
        return self


class EngineConfig(_Table):
    """The serving engine, in vLLM's engine arguments."""

    model: str
    gpu: str
    tensor_parallel_size: Positive = 1
    pipeline_parallel_size: Literal[1] = 1
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    scheduler: str | Kind = "v1"
    block_size: Annotated[int, Field(ge=1, le=2**16)] = 16
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    num_gpu_blocks_override: Annotated[int, Field(ge=2)] | None = None
    kv_cache_memory_bytes: Positive | None = None
    swap_space: Annotated[float, Field(ge=0)] = 4.0
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    long_prefill_token_threshold: Annotated[int, Field(ge=0)] = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: Literal[True] = True
    enforce_eager: bool = False
    engine_version: str = "0.11"
    preemption_mode: Literal["recompute", "swap"] | None = None
    admission_check: bool = True

    @field_validator("pipeline_parallel_size", mode="before")
    @classmethod
    def _no_pipeline(cls, value: object) -> object:
        if value != 1:
            raise ValueError("pipeline parallelism is not built; leave it at 1")
        return value

    @field_validator("enable_chunked_prefill", mode="before")
    @classmethod
    def _chunked(cls, value: object) -> object:
        if value is not True:
            raise ValueError("scheduling without chunks is not built; leave it true")
        return value

    @field_validator("engine_version", mode="before")
    @classmethod
    def _version_as_text(cls, value: object) -> object:
        # YAML reads an unquoted 0.11 as a number.
        return repr(value) if isinstance(value, float) else value

    @field_validator("engine_version")
    @classmethod
    def _built_version(cls, value: str) -> str:
        if not re.fullmatch(r"0\.11(\.\d{1,3})?", value):
            raise ValueError(
                "only the 0.11 dialect of the v1 scheduler is built; set it to '0.11'"
            )
        return value

    @field_validator("preemption_mode")
    @classmethod
    def _built_mode(cls, value: str | None) -> str | None:
        if value == "swap":
            raise ValueError(
                "the v1 generation preempts by recomputation only; use recompute or "
                "null"
            )
        return value


class RunConfig(_Table):
    """One simulation."""

    workload: WorkloadConfig
    engine: EngineConfig
    cost: Kind = Field(default_factory=lambda: {"kind": "roofline"})
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    def to_yaml(self) -> str:
        """Return the complete configuration, runnable again."""
        dumped = self.model_dump(mode="json")
        workload = dumped["workload"]
        dumped["workload"] = {k: v for k, v in workload.items() if v is not None}
        return yaml.safe_dump(dumped, sort_keys=False)


def load_config(path: Path | str, overrides: list[str] | None = None) -> RunConfig:
    """Read a configuration file.

    Parameters
    ----------
    path
        YAML file.
    overrides
        ``key.path=value`` assignments, values in YAML, applied in order.

    Raises
    ------
    ConfigError
        With the path of the key, the rule, the value and the remedy.
    """
    path = Path(path)
    data = read_yaml(path)
    for override in overrides or []:
        _assign(data, override)
    find_files(data, path.parent)
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> RunConfig:
    """Validate a configuration given as plain data.

    Raises
    ------
    ConfigError
        See `load_config`.
    """
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from error


def _assign(data: dict[str, Any], override: str) -> None:
    """Apply one ``key.path=value``."""
    key, equals, text = override.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set takes key.path=value, got '{override}'")
    value = parse_yaml(text, f"--set {key}")
    table = data
    for name in names[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {key}: '{name}' is not a table")
        table = inner
    table[names[-1]] = value


def _one_line(error: ValidationError) -> str:
    """Return the first problem in a line: key, rule, value, remedy."""
    problems = error.errors()
    problem = problems[0]
    path = ".".join(str(part) for part in problem["loc"] if part not in _TYPE_NAMES)
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        return _unknown_key(path) + more
    if problem["type"] == "missing":
        return f"{path}: this key is needed; give it{more}"
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if problem["type"] in {"model_type", "dict_type"}:
        rule = "should be a table of keys, such as {kind: ...}"
    value = problem["input"]
    shown = "" if isinstance(value, dict) else f", got {_shortened(value)}"
    if problem["type"].startswith(("greater_than", "less_than", "finite")):
        shown += _default_of(path)
    if problem["type"] in {"float_type", "int_type"} and isinstance(value, str):
        shown += "; write it without quotes, as 16 or 1.0e-3"
    return f"{path or 'configuration'}: {rule}{shown}{more}"


def _default_of(path: str) -> str:
    """Return the remedy for a number out of range: what the key is otherwise."""
    table, _, key = path.rpartition(".")
    model = _TABLES.get(table.rpartition(".")[2], RunConfig)
    default = model.model_fields[key].default
    return f"; its default is {'null' if default is None else default}"


def _shortened(value: object, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _unknown_key(path: str) -> str:
    table, _, key = path.rpartition(".")
    if key in NOT_BUILT:
        return f"{path}: {NOT_BUILT[key]} is not built; remove this key"
    model: type[BaseModel] = RunConfig
    for name in table.split(".") if table else []:
        model = _TABLES.get(name, model)
    choices = list(model.model_fields)
    return (
        f"{path}: unknown key{did_you_mean(key, choices)} "
        f"(there are: {', '.join(choices)})"
    )


# What pydantic puts into a path to tell the branches of a union apart.
_TYPE_NAMES = ("str", "dict[str,any]", "[key]")

_TABLES: dict[str, type[BaseModel]] = {
    "workload": WorkloadConfig,
    "synthetic": SyntheticConfig,
    "preset": PresetConfig,
    "engine": EngineConfig,
}
