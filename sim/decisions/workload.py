"""Decision workloads: requests by step, and the engine that they meet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sim.errors import ConfigError
from sim.plug import did_you_mean
from sim.scheduler.base import PreemptionMode

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Segment = tuple[int, Annotated[int, Field(ge=0)]]

MAX_LEN = 1 << 40
"""Stands for no limit, where a release has none."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DecisionRequest(_Model):
    """One request of a workload; its place in the list is its arrival time."""

    id: str
    arrival_step: Count
    prompt: Annotated[list[Segment], Field(min_length=1)]
    output_len: Positive
    out_seed: int
    n: Positive = 1
    branch_output_lens: list[Positive] | None = None
    beam: bool = False
    beam_seed: int = 0
    beam_pct: Annotated[int, Field(ge=0, le=100)] = 0
    priority: int = 0
    abort_step: Count | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(length for _, length in self.prompt)

    @model_validator(mode="after")
    def _consistent(self) -> DecisionRequest:
        if not self.num_prompt_tokens:
            raise ValueError(f"the prompt of {self.id!r} is empty; give it a token")
        lens = self.branch_output_lens
        if lens is not None and len(lens) != self.n:
            raise ValueError(
                f"branch_output_lens of {self.id!r} must name {self.n} lengths (n), "
                f"got {len(lens)}"
            )
        return self


class _Engine(_Model):
    """Keys that all references have."""

    block_size: Positive
    num_gpu_blocks: Positive
    max_num_batched_tokens: Positive
    max_num_seqs: Positive


class _TwoTiers(_Engine):
    num_cpu_blocks: Count
    watermark: Share = 0.01
    preemption_mode: Literal["recompute", "swap"] | None = None

    @property
    def forced_mode(self) -> PreemptionMode | None:
        """The preemption mode that the file forces."""
        mode = self.preemption_mode
        return None if mode is None else PreemptionMode(mode)


class CacheflowEngine(_TwoTiers):
    """vLLM 0.1.0 and 0.1.1."""


class V02Engine(_TwoTiers):
    """vLLM 0.2."""

    max_model_len: Positive
    max_paddings: Count = 256
    sliding_window: Positive | None = None


class V0Engine(_TwoTiers):
    """vLLM 0.7, V0."""

    max_model_len: Positive
    chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    sliding_window: Positive | None = None
    num_lookahead_slots: Count = 0
    delay_factor: Annotated[float, Field(ge=0)] = 0.0
    max_num_partial_prefills: Positive = 1
    max_long_partial_prefills: Positive = 1
    long_prefill_token_threshold: Count = 0


class V1Engine(_Engine):
    """vLLM 0.8 and later, V1; `num_gpu_blocks` includes the null block."""

    max_model_len: Positive
    chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: Count = 0
    sliding_window: Positive | None = None
    # keys of later releases; a file for an older one does not have them
    watermark: Share | None = None
    scheduler_reserve_full_isl: bool | None = None
    long_prefill_token_threshold_adaptive: bool | None = None
    max_num_active_seqs: Positive | None = None
    prefill_schedule_interval: Positive | None = None
    max_num_scheduled_tokens: Positive | None = None


Engine = CacheflowEngine | V02Engine | V0Engine | V1Engine

_ENGINES: dict[str, type[_Engine]] = {
    "cacheflow": CacheflowEngine,
    "v0_2": V02Engine,
    "v0": V0Engine,
    "v1": V1Engine,
}


class DecisionWorkload(_Model):
    """A workload file: the format of `kvsim decisions`."""

    schema_version: Literal[1] = Field(alias="schema")
    name: str
    reference: str
    seed: int = 0
    config: dict[str, Any]
    requests: list[DecisionRequest]

    @property
    def engine_version(self) -> str:
        """Release of the reference, such as ``"0.33.0"``."""
        return self.reference.removeprefix("vllm ")

    @property
    def generation(self) -> str:
        """Name of the generation that follows the reference."""
        return generation_of(self.engine_version)

    @property
    def engine(self) -> Engine:
        """The engine's configuration, typed."""
        model = _ENGINES[self.generation]
        engine: Engine = model.model_validate(self.config)  # type: ignore[assignment]
        return engine

    @model_validator(mode="after")
    def _consistent(self) -> DecisionWorkload:
        ids = [request.id for request in self.requests]
        if len(set(ids)) < len(ids):
            twice = next(name for name in ids if ids.count(name) > 1)
            raise ValueError(f"request ids must differ, {twice!r} stands twice")
        steps = [request.arrival_step for request in self.requests]
        if steps != sorted(steps):
            raise ValueError("requests must be in order of arrival_step; sort them")
        if self.generation == "v1":
            wide = [r.id for r in self.requests if r.n > 1 or r.beam]
            if wide:
                raise ValueError(
                    f"the v1 scheduler knows no n and no beams, {wide[0]!r} has them; "
                    f"write one request a sample"
                )
        return self


def generation_of(engine_version: str) -> str:
    """Return the generation that follows a vLLM release.

    Raises
    ------
    ValueError
        If none does.
    """
    try:
        numbers = tuple(int(part) for part in engine_version.split("."))
    except ValueError:
        numbers = ()
    if (0,) < numbers < (0, 1, 3):
        return "cacheflow"
    if (0, 1, 3) <= numbers < (0, 3):
        return "v0_2"
    if (0, 7) <= numbers < (0, 8):
        return "v0"
    if (0, 8) <= numbers < (1,):
        return "v1"
    raise ValueError(
        f"no generation follows {engine_version!r}; there are vllm 0.1.0 (cacheflow), "
        f"0.2 (v0_2), 0.7 (v0) and 0.8 to 0.33 (v1)"
    )


def load_workload(path: Path | str) -> DecisionWorkload:
    """Read a workload file.

    Raises
    ------
    ConfigError
        With the file, the key, the rule and the value.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a JSON file: {error}") from error
    return parse_workload(text, str(path))


def parse_workload(text: str, where: str) -> DecisionWorkload:
    """Read a workload from JSON text; `where` names it in errors.

    Raises
    ------
    ConfigError
        See `load_workload`.
    """
    try:
        workload = DecisionWorkload.model_validate_json(text)
        workload.engine  # noqa: B018  # validates the engine's keys
    except ValidationError as error:
        raise ConfigError(f"{where}: {_in_words(error)}") from error
    return workload


def _in_words(error: ValidationError) -> str:
    problem = error.errors()[0]
    keys = [str(part) for part in problem["loc"]]
    if error.title in {model.__name__ for model in _ENGINES.values()}:
        keys.insert(0, "config")
    key = ".".join(keys) or "workload"
    if problem["type"] == "extra_forbidden":
        model = next(
            (m for m in _ENGINES.values() if m.__name__ == error.title), None
        ) or (DecisionRequest if keys[0] == "requests" else DecisionWorkload)
        names = list(model.model_fields)
        return (
            f"{key}: this reference has no such key"
            f"{did_you_mean(keys[-1], names)} (it has: {', '.join(names)})"
        )
    if problem["type"] == "missing":
        return f"{key}: this key is needed; give it"
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = problem["input"]
    shown = "" if isinstance(value, dict | list) else f", got {value!r}"
    return f"{key}: {rule}{shown}"
