"""Decision workloads: requests by step, and the engine that they meet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from cache.errors import CacheError
from sim.config.plug import did_you_mean
from sim.errors import ConfigError
from sim.scheduler.generations import GENERATIONS, OURS
from sim.studies.conformance.drafts import Speculative  # noqa: TC001  # pydantic
from sim.studies.conformance.fields import (
    MAX_BLOCKS,
    Count,
    Positive,
    Share,
    Table,
    Whole,
    as_tuple,
    whole,
)
from sim.studies.conformance.kv_planning import KvCache  # noqa: TC001  # pydantic
from sim.studies.conformance.played_pair import (  # pydantic
    PairPace,
    PairSide,
)
from sim.studies.conformance.played_worker import (  # noqa: TC001  # pydantic
    OffloadTier,
    WorkerPace,
)

if TYPE_CHECKING:
    from collections.abc import Container

    from cache.v1.planning import KVCachePlan

COMMENTS = frozenset({"comment", "comments", "description", "note", "notes"})
"""Keys for people; they decide nothing."""

_REFERENCE = re.compile(
    r"(?:vllm|transformers)?[\s=_-]*v?([0-9]{1,3}(?:\.[0-9]{1,3}){1,3})(?:\.post[0-9]+)?(?:\+[\w.]+)?",
    re.IGNORECASE | re.ASCII,
)


def without_comments(data: Any, nulls: Container[str]) -> Any:
    """Return an object without comments, and without keys of `nulls` that are null.

    A key that is null says as much as one that is not there.
    """
    if not isinstance(data, dict):
        return data
    return {
        key: value
        for key, value in data.items()
        if key not in COMMENTS and (value is not None or key not in nulls)
    }


def release_of(reference: str) -> str:
    """Return the release in ``"vllm 0.33.0"``, ``"vLLM v0.33.0"`` or ``"0.33"``.

    So of ``"transformers 5.17.0"``.

    What is no release comes back as it is.
    """
    matched = _REFERENCE.fullmatch(reference.strip())
    return matched[1] if matched else reference


MAX_LEN = 1 << 40
"""Stands for no limit, where a release has none."""

# Far beyond any engine; a slip of the pen is refused rather than run out of memory.
MAX_PROMPT_TOKENS = 1 << 24
MAX_WIDTH = 1 << 10
MAX_STEP = 1 << 50

Step = Annotated[Count, Field(le=MAX_STEP)]
Segment = Annotated[
    tuple[Whole, Annotated[Whole, Field(ge=0, le=MAX_PROMPT_TOKENS)]],
    BeforeValidator(as_tuple),
]


class DecisionRequest(Table):
    """One request of a workload; its place in the list is its arrival time."""

    id: str
    arrival_step: Step
    prompt: Annotated[list[Segment], Field(min_length=1)]
    output_len: Positive
    out_seed: Whole
    n: Annotated[Positive, Field(le=MAX_WIDTH)] = 1
    branch_output_lens: list[Positive] | None = None
    beam: bool = False
    beam_seed: Whole = 0
    beam_pct: Annotated[Whole, Field(ge=0, le=100)] = 0
    priority: Whole = 0
    abort_step: Step | None = None
    stop_after: Positive | None = None
    route_delay: Count | None = None
    max_load_tokens: Count | None = None
    max_offload_tokens: Count | None = None
    acc_seed: Whole = 0
    acc_pct: Annotated[Whole, Field(ge=0, le=100)] = 0
    draft_pct: Annotated[Whole, Field(ge=0, le=100)] = 100

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return without_comments(data, nulls=cls.model_fields)

    @property
    def kv_transfer_params(self) -> dict[str, int] | None:
        """What the client says to a KV connector; None for nothing."""
        names = ("max_load_tokens", "max_offload_tokens")
        given = {name: getattr(self, name) for name in names}
        return {k: v for k, v in given.items() if v is not None} or None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(length for _, length in self.prompt)

    @model_validator(mode="after")
    def _consistent(self) -> DecisionRequest:
        if not 0 < self.num_prompt_tokens <= MAX_PROMPT_TOKENS:
            raise ValueError(
                f"the prompt of {self.id!r} must have 1 to {MAX_PROMPT_TOKENS:,} "
                f"tokens, got {self.num_prompt_tokens:,}"
            )
        lens = self.branch_output_lens
        if lens is not None and len(lens) != self.n:
            raise ValueError(
                f"branch_output_lens of {self.id!r} must name {self.n} lengths (n), "
                f"got {len(lens)}"
            )
        return self


class _Engine(Table):
    """Keys that all references have."""

    block_size: Positive
    num_gpu_blocks: Annotated[Positive, Field(le=MAX_BLOCKS)]
    max_num_batched_tokens: Positive
    max_num_seqs: Positive

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        return read_config(data)


class _TwoTiers(_Engine):
    num_cpu_blocks: Annotated[Count, Field(le=MAX_BLOCKS)]
    watermark: Share = 0.01
    preemption_mode: Literal["recompute", "swap"] | None = None


class CacheflowEngine(_TwoTiers):
    """vLLM 0.1.0 and 0.1.1."""


class V02Engine(_TwoTiers):
    """vLLM 0.2."""

    max_model_len: Positive
    max_paddings: Count = MAX_LEN  # a file without the key has no such limit
    sliding_window: Positive | None = None


class V0Engine(_TwoTiers):
    """vLLM 0.7, V0."""

    max_model_len: Positive
    chunked_prefill: bool = False
    enable_prefix_caching: bool = False
    policy: Literal["fcfs", "priority"] = "fcfs"
    sliding_window: Positive | None = None
    num_lookahead_slots: Count = 0
    delay_factor: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
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
    # Keys of later releases: a file without one means a release without it, so these
    # are what an older release does, not what a later one does by default.
    watermark: Share = 0.0
    scheduler_reserve_full_isl: bool = False
    long_prefill_token_threshold_adaptive: bool = False
    max_num_active_seqs: Positive | None = None
    prefill_schedule_interval: Positive = 1
    max_num_scheduled_tokens: Positive | None = None
    async_scheduling: bool = False
    pipeline_parallel_size: Positive = 1
    speculative: Speculative | None = None
    offload: OffloadTier | None = None
    worker: WorkerPace | None = None
    kv_transfer: PairSide | None = None

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that are in flight at a time."""
        return self.pipeline_parallel_size + self.async_scheduling


class HfFifoEngine(_Engine):
    """transformers 5.17, continuous batching."""

    num_cpu_blocks: Annotated[Count, Field(le=MAX_BLOCKS)] = 0
    max_model_len: Positive = MAX_LEN
    enable_prefix_caching: bool = True
    safety_margin: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.15
    max_blocks_per_request: Count = 0  # no block table, as on the CPU


class _Planned(V1Engine):
    """`V1Engine` before its pool is planned."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    block_size: None = None  # type: ignore[assignment]
    num_gpu_blocks: None = None  # type: ignore[assignment]


Engine = CacheflowEngine | V02Engine | V0Engine | V1Engine | HfFifoEngine

_ENGINES: dict[str, type[_Engine]] = {
    "cacheflow": CacheflowEngine,
    "v0_2": V02Engine,
    "v0": V0Engine,
    "v1": V1Engine,
    "hf_fifo": HfFifoEngine,
}


CONFIG_KEYS = frozenset(
    key for model in _ENGINES.values() for key in model.model_fields
)


def read_config(data: Any) -> Any:
    """Return a configuration under this format's names, without what is null.

    A null says that there is no such thing, of a key that another reference has, too.
    ``enable_chunked_prefill`` is read as its short form.
    """
    if not isinstance(data, dict):
        return data
    short, long = "chunked_prefill", "enable_chunked_prefill"
    data = {k: v for k, v in data.items() if v is not None or k not in CONFIG_KEYS}
    if long in data and short not in data:
        data[short] = data.pop(long)
    return data


class DecisionWorkload(Table):
    """A workload file: the format of `kvsim decisions`.

    Keys beside these say how a file came about, and are not read.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    schema_version: Annotated[Literal[1], BeforeValidator(whole)] = Field(
        alias="schema"
    )
    name: str = ""
    reference: str
    config: dict[str, Any]
    kv: KvCache | None = None
    requests: list[DecisionRequest]

    @property
    def engine_version(self) -> str:
        """Release of the reference, such as ``"0.33.0"``."""
        return release_of(self.reference)

    @property
    def generation(self) -> str:
        """Name of the generation that follows the reference."""
        return generation_of(self.engine_version)

    @property
    def pair(self) -> PairPace | None:
        """How a pair of engines works together; None for a single one."""
        return (
            PairPace.model_validate(self.config["pd"]) if "pd" in self.config else None
        )

    def side(self, name: str) -> DecisionWorkload:
        """Return one engine of a pair as if it were alone: ``prefill`` or ``decode``.

        Raises
        ------
        ConfigError
            If the file does not say what its engine is.
        """
        pair = self.pair
        if pair is None or not isinstance(self.config.get(name), dict):
            raise ConfigError(f"config.{name}: a pair needs this engine; give its keys")
        config = self.config[name] | {"kv_transfer": pair.side(name).model_dump()}
        return self.model_copy(update={"config": config})

    @property
    def engine(self) -> Engine:
        """The engine's configuration, typed; that of a pair is its `side`."""
        model = _ENGINES[self.generation]
        plan = self.plan
        planned = {}
        if plan is not None:
            num_blocks = plan.layout.num_blocks
            planned = {"block_size": plan.block_size, "num_gpu_blocks": num_blocks}
        engine: Engine = model.model_validate(self.config | planned)  # type: ignore[assignment]
        return engine

    @property
    def plan(self) -> KVCachePlan | None:
        """Groups and pool, where the layers are given by `kv`.

        Raises
        ------
        ConfigError
            When the release plans no such pool.
        """
        if self.kv is None:
            return None
        engine = _Planned.model_validate(self.config)
        try:
            return self.kv.plan(
                max_model_len=engine.max_model_len,
                max_in_flight_tokens=engine.max_num_batched_tokens
                * engine.max_concurrent_batches,
                enable_prefix_caching=engine.enable_prefix_caching,
                num_speculative_tokens=(
                    0
                    if engine.speculative is None
                    else engine.speculative.num_speculative_tokens
                ),
            )
        except CacheError as error:
            raise ConfigError(f"kv: {error}") from error

    @field_validator("reference")
    @classmethod
    def _known(cls, reference: str) -> str:
        generation_of(release_of(reference))
        return reference

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in data:
            if key in CONFIG_KEYS and data[key] is not None:
                raise ValueError(f"{key!r} is the engine's; it belongs under 'config'")
            if key in DecisionRequest.model_fields and data[key] is not None:
                raise ValueError(f"{key!r} is a request's; it belongs in 'requests'")
        return without_comments(data, nulls=cls.model_fields)

    @model_validator(mode="after")
    def _consistent(self) -> DecisionWorkload:
        seen: set[str] = set()
        for request in self.requests:
            if request.id in seen:
                raise ValueError(
                    f"request ids must differ, {request.id!r} stands twice"
                )
            seen.add(request.id)
        self._refuse_sizes()
        steps = [request.arrival_step for request in self.requests]
        if steps != sorted(steps):
            raise ValueError("requests must be in order of arrival_step; sort them")
        if not GENERATIONS[self.generation].schedules_groups:
            self._refuse_groups()
        return self

    def _refuse_sizes(self) -> None:
        """Refuse what `kv` says, too, and generations that plan no pool."""
        if self.kv is None:
            return
        if self.generation != "v1":
            raise ValueError(
                f"kv: KV caches are planned from layers in V1, and the reference "
                f"{self.reference!r} is of {self.generation}; give block_size and "
                f"num_gpu_blocks in config"
            )
        for key in ("block_size", "num_gpu_blocks", "sliding_window"):
            if self.config.get(key) is not None:
                raise ValueError(f"{key!r} follows from 'kv'; leave it out of config")

    def _refuse_groups(self) -> None:
        for request in self.requests:
            if request.n > 1:
                raise ValueError(
                    f"the {self.generation} scheduler knows no n and no beams, "
                    f"{request.id!r} has n = {request.n}; write one request a sample"
                )
            if request.branch_output_lens not in (None, [request.output_len]):
                raise ValueError(
                    f"the {self.generation} scheduler knows no branches, "
                    f"{request.id!r} has branch_output_lens; give output_len"
                )


def generation_of(engine_version: str) -> str:
    """Return the generation that follows a release of vLLM or transformers."""
    for name, generation in OURS.items():
        if generation.takes(engine_version):
            return name
    known = ", ".join(f"{g.versions_in_words} ({n})" for n, g in OURS.items())
    raise ValueError(
        f"no generation follows {engine_version[:40]!r}; give a vLLM release out of "
        f"{known}, such as 'vllm 0.33.0'"
    )


def load_workload(path: Path | str) -> DecisionWorkload:
    """Read a workload file."""
    return parse_workload(read_text(Path(path)), str(path))


def read_text(path: Path) -> str:
    """Return the text of a file, and refuse what is none in one line."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a JSON file: {error}") from error


def parse_workload(text: str, where: str) -> DecisionWorkload:
    """Read a workload from JSON text; `where` names it in errors."""
    try:
        workload = DecisionWorkload.model_validate_json(text)
        for engine in _engines_of(workload):
            engine.engine  # noqa: B018  # validates the engine's keys
    except ValidationError as error:
        raise ConfigError(f"{where}: {in_words(error)}") from error
    return workload


def _engines_of(workload: DecisionWorkload) -> list[DecisionWorkload]:
    if workload.pair is None:
        return [workload]
    if workload.generation != "v1":
        raise ConfigError(
            f"pairs of engines are known of vLLM 0.33, the reference is "
            f"{workload.reference!r}; leave pd out of config"
        )
    return [workload.side(name) for name in ("prefill", "decode")]


def in_words(error: ValidationError) -> str:
    """Return the first problem of a file in one line."""
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
    if problem["type"] == "json_invalid":
        return f"not a JSON file: {problem['msg']}"
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    value = problem["input"]
    shown = "" if isinstance(value, dict | list) else f", got {_short(value)}"
    return f"{key}: {rule}{shown}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
