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
from sim.studies.conformance.engines import (
    CONFIG_KEYS,
    ENGINES,
    Engine,
    PlannedEngine,
)
from sim.studies.conformance.fields import Table, whole
from sim.studies.conformance.kv_planning import KvCache  # noqa: TC001  # pydantic
from sim.studies.conformance.played_pair import PairPace
from sim.studies.conformance.requests import DecisionRequest, without_comments

if TYPE_CHECKING:
    from cache.v1.planning import KVCachePlan

_REFERENCE = re.compile(
    r"(?:vllm|transformers|sglang)?[\s=_-]*v?([0-9]{1,3}(?:\.[0-9]{1,3}){1,3})(?:\.post[0-9]+)?(?:\+[\w.]+)?",
    re.IGNORECASE | re.ASCII,
)


def release_of(reference: str) -> str:
    """Return the release in ``"vllm 0.33.0"``, ``"vLLM v0.33.0"`` or ``"0.33"``.

    So of ``"transformers 5.17.0"`` and ``"sglang 0.5.10.post1"``.

    What is no release comes back as it is.
    """
    matched = _REFERENCE.fullmatch(reference.strip())
    return matched[1] if matched else reference


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
        """How engines of a pair work together; None for a single one."""
        return (
            PairPace.model_validate(self.config["pd"]) if "pd" in self.config else None
        )

    def sides(self, name: str) -> list[DecisionWorkload]:
        """Return the engines that prefill, or decode, each as if it were alone.

        Raises
        ------
        ConfigError
            If the file does not say what its engines are.
        """
        pair, given = self.pair, self.config.get(name)
        configs: list[Any] = given if isinstance(given, list) else [given]
        if pair is None or not configs or not all(isinstance(c, dict) for c in configs):
            raise ConfigError(
                f"config.{name}: a pair needs this engine; give its keys, or a list "
                f"with those of several"
            )
        transfer = pair.side(name).model_dump()
        return [self._side(config | {"kv_transfer": transfer}) for config in configs]

    def _side(self, config: dict[str, Any]) -> DecisionWorkload:
        """Return one engine of several; of planned pools it says how large its is."""
        kv = self.kv
        if kv is not None and "num_gpu_blocks" in config:
            config = dict(config)
            size = {"num_gpu_blocks_override": config.pop("num_gpu_blocks")}
            kv = kv.model_copy(update=size)
        return self.model_copy(update={"config": config, "kv": kv})

    @property
    def engine(self) -> Engine:
        """The engine's configuration, typed; those of a pair are its `sides`."""
        model = ENGINES[self.generation]
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
        engine = PlannedEngine.model_validate(self.config)
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
        """Refuse sizes that `kv` has, too, and generations that plan no pool."""
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
    """Return the generation that follows a release of an engine."""
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
        raise ConfigError(
            f"{path}: {error.strerror or error}; name a file that can be read"
        ) from error
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
    prefill, decode = (workload.sides(name) for name in ("prefill", "decode"))
    for key, engines in (
        ("block_size", prefill + decode),
        ("max_model_len", prefill),
        ("max_model_len", decode),
    ):
        found = {each.config.get(key) for each in engines}
        if len(found) > 1:
            raise ConfigError(
                f"config: engines of a pair need the same {key}, got "
                f"{' and '.join(sorted(map(str, found)))}; give one"
            )
    return prefill + decode


def in_words(error: ValidationError) -> str:
    """Return the first problem of a file in one line."""
    problem = error.errors()[0]
    keys = [str(part) for part in problem["loc"]]
    if error.title in {model.__name__ for model in ENGINES.values()}:
        keys.insert(0, "config")
    key = ".".join(keys) or "workload"
    if problem["type"] == "extra_forbidden":
        model = next(
            (m for m in ENGINES.values() if m.__name__ == error.title), None
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
