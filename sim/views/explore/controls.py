"""The controls of the page: made of the typed tables of a configuration.

A control knows what it takes. What the browser sends is one of these keys with a
number, a switch or one of the listed names: neither a path nor a class can come in.
"""

from __future__ import annotations

from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sim.config.engine import EngineConfig
from sim.config.fleet import FleetTable
from sim.config.offloading import KVTransferTable, OffloadingLinkTable
from sim.config.speculative import SpeculativeTable
from sim.config.tables import RunConfig
from sim.config.workload import SOURCES, WorkloadConfig
from sim.errors import ConfigError
from sim.scheduler.generations import GENERATION_KEYS, GENERATIONS
from sim.views.bundled import BUNDLED_KINDS, bundled
from sim.views.explore.control import Choice, Control, Slider, What
from sim.views.explore.meanings import Meaning, meaning_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

REPLICAS: Final = "fleet.replicas"
"""A control that is no key: engines that are alike, with a router before them."""

TRAFFIC: Final = "traffic"
"""A control that is no key: the kind of the table ``workload``."""

OBJECTIVES: Final = ("p95_ttft_ms", "p99_ttft_ms", "p95_tpot_ms", "p95_e2el_ms")
"""Objectives that can be set where a configuration has none."""

DTYPES: Final = {
    "engine.dtype": ("auto", "bfloat16", "float16"),
    "engine.kv_cache_dtype": ("auto", "bfloat16", "fp8"),
}
"""Texts whose values are few and known."""

BRIEF: Final = {"engine.gpu": ("GiB", "GB/s")}
"""Facts that stand in the list itself, by their heading in ``kvsim list``; such a list
is one to choose from, however long."""

SLIDERS: Final[Mapping[str, Slider]] = {
    "rate_scale": Slider(0.1, 4.0, 0.01),
    REPLICAS: Slider(1, 16, 1),
    "engine.tensor_parallel_size": Slider(1, 8, 1),
    "engine.gpu_memory_utilization": Slider(0.5, 0.98, 0.01),
    "engine.num_gpu_blocks_override": Slider(500, 200_000),
    "engine.max_num_seqs": Slider(1, 4096),
    "engine.max_num_batched_tokens": Slider(128, 65_536),
    "engine.kv_offloading_size": Slider(1, 2048),
    "engine.swap_space": Slider(0, 256, 1),
    "engine.watermark": Slider(0, 0.3, 0.005),
    "engine.block_size": Slider(1, 256),
    "engine.long_prefill_token_threshold": Slider(0, 16_384, 64),
    "engine.speculative_config.num_speculative_tokens": Slider(0, 8, 1),
    "workload.acceptance.rate": Slider(0.05, 0.95, 0.05),
    "load_bytes_per_s": Slider(1e9, 1e12),
    "store_bytes_per_s": Slider(1e9, 1e12),
    "workload.max_concurrent_users": Slider(1, 2000),
    "objectives": Slider(10, 60_000),
}
"""Of a key; of the last name of a key, or of its table, where the key has none."""

FIRST: Final = (
    TRAFFIC,
    "rate_scale",
    "engine.model",
    "engine.gpu",
    REPLICAS,
    "engine.gpu_memory_utilization",
    "engine.num_gpu_blocks_override",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
    "engine.enable_prefix_caching",
    "engine.preemption_victim",
    "engine.kv_offloading_size",
    "engine.swap_space",
    "engine.tensor_parallel_size",
)
"""The controls that matter first, in their order; of host memory one generation has
the one, and another the other."""

_RATE: Final = Meaning("How many times as often requests come.", "times")
_TRAFFIC: Final = Meaning("Requests in place of the configuration's own.")
_REPLICAS: Final = Meaning("Engines that are alike, behind a router.", "engines")
_PROMISE: Final = Meaning("What is promised; the run is judged by it.", "ms")

GROUPS: Final = (
    *("traffic", "objectives", "engine", "host memory", "drafts", "fleet", "cost"),
    "run",
)

DRAFTS: Final = "engine.speculative_config"
ACCEPTANCE: Final = "workload.acceptance"
RATE: Final = f"{ACCEPTANCE}.rate"
"""Of each draft, where the configuration says nothing of acceptance."""
_NO_DRAFTS: Final = SpeculativeTable(method="eagle3", num_speculative_tokens=0)
"""Where a configuration without drafts begins; its table needs both keys."""
_OF_A_CONNECTOR: Final = ("kv_role", "spec_name", "cpu_bytes_to_use")
"""Keys that `kv_offloading_size` says already; shown where a configuration has them."""
_ACCEPTED: Final = Meaning("Share of drafts that the model accepts, one after another.")


def controls_of(data: Mapping[str, Any], config: RunConfig) -> tuple[Control, ...]:
    """Return the controls of a configuration, those that matter first in front.

    Parameters
    ----------
    data
        The configuration as its file says it.
    config
        The same, complete.
    """
    found = [
        *_workload(data, config),
        *_objectives(data),
        *_engine(config),
        *_host_memory(config.engine),
        *_drafts(data, config),
        *_fleet(data),
        *_numbers(config.cost, "cost", "cost"),
        _typed("seed", "run", RunConfig.model_fields["seed"], config.seed, "run"),
    ]
    known = {each.key: each for each in found if each is not None}
    return tuple(sorted(known.values(), key=lambda each: _order(each.rank, each.group)))


def traffic_control(choices: Iterable[Choice]) -> Control:
    """Return the control of the traffic; the first choice is the configuration's."""
    names = tuple(choices)
    own = names[0].value
    return _made(TRAFFIC, "traffic", "choice", own, _TRAFFIC, choices=names)


def _order(rank: int | None, group: str) -> tuple[int, int]:
    return (len(FIRST) if rank is None else rank, GROUPS.index(group))


def checked_settings(
    controls: Mapping[str, Control], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return settings by key that the configuration may take.

    Those that are as given in the configuration are left out.

    Raises
    ------
    ConfigError
        If a key is not one of the page's, or a value not one that it takes.
    """
    found = {}
    for key, told in given.items():
        if key not in controls:
            raise ConfigError(f"'{key[:60]}' is not a setting of this page; leave it")
        value = controls[key].checked(told)
        if value != controls[key].value:
            found[key] = value
    return dict(sorted(found.items()))


# -- tables -------------------------------------------------------------------------


def _workload(data: Mapping[str, Any], config: RunConfig) -> Iterator[Control | None]:
    workload: Mapping[str, Any] = data.get("workload") or {}
    source = next(name for name in SOURCES if workload.get(name) is not None)
    table = getattr(config.workload, source)
    where = f"workload.{source}"
    scale = (
        table.get("rate_scale", 1.0) if isinstance(table, dict) else table.rate_scale
    )
    yield _made(
        f"{where}.rate_scale",
        "traffic",
        "number",
        scale,
        _RATE,
        low=0.0,
        is_open=True,
    )
    if isinstance(table, BaseModel):
        for name, field in type(table).model_fields.items():
            value = getattr(table, name)
            if isinstance(value, dict):
                yield from _numbers(value, f"{where}.{name}", "traffic")
            elif name != "rate_scale":
                yield _typed(f"{where}.{name}", "traffic", field, value, source)
    else:
        rest = {name: value for name, value in table.items() if name != "rate_scale"}
        yield from _numbers(rest, where, "traffic")
    for name, field in WorkloadConfig.model_fields.items():
        value = getattr(config.workload, name)
        if name in SOURCES or isinstance(value, dict | BaseModel):
            continue
        yield _typed(f"workload.{name}", "traffic", field, value, "")


def _objectives(data: Mapping[str, Any]) -> Iterator[Control]:
    given = data.get("objectives") or {}
    for name in dict.fromkeys((*given, *OBJECTIVES)):
        value = given.get(name)
        if not isinstance(value, dict):
            yield _made(
                f"objectives.{name}",
                "objectives",
                "number",
                None if value is None else float(value),
                _PROMISE,
                is_optional=True,
                low=0.0,
                is_open=True,
            )


def _engine(config: RunConfig) -> Iterator[Control | None]:
    for name, field in EngineConfig.model_fields.items():
        value = getattr(config.engine, name)
        if not isinstance(value, dict | BaseModel | list):
            yield _typed(f"engine.{name}", "engine", field, value, "")


def _host_memory(engine: EngineConfig) -> Iterator[Control | None]:
    """Yield controls of what `kv_offloading_size` is one key of."""
    connector = engine.kv_transfer_config or KVTransferTable()
    for name, table in (
        ("kv_offloading_link", engine.kv_offloading_link or OffloadingLinkTable()),
        ("kv_transfer_config", connector),
        ("kv_transfer_config.kv_connector_extra_config", connector.extra),
    ):
        yield from _keys_of(table, f"engine.{name}", "host memory")


def _drafts(data: Mapping[str, Any], config: RunConfig) -> Iterator[Control | None]:
    yield from _keys_of(
        config.engine.speculative_config or _NO_DRAFTS, DRAFTS, "drafts"
    )
    given = (data.get("workload") or {}).get("acceptance")
    if isinstance(given, dict):
        yield from _numbers(given, ACCEPTANCE, "drafts")
    else:
        facts: dict[str, Any] = {"is_optional": True, "low": 0.0, "high": 1.0}
        yield _made(RATE, "drafts", "number", None, _ACCEPTED, **facts)


def _keys_of(table: BaseModel, where: str, group: str) -> Iterator[Control | None]:
    """Yield a control for each key of a table but tables in it and lists."""
    kind = where.rpartition(".")[2]
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, dict | BaseModel | list):
            continue
        if name not in _OF_A_CONNECTOR or value != field.default:
            yield _typed(f"{where}.{name}", group, field, value, kind)


def _fleet(data: Mapping[str, Any]) -> Iterator[Control | None]:
    fleet = data.get("fleet")
    if fleet is None:
        yield _made(REPLICAS, "fleet", "whole", 1, _REPLICAS, low=1, high=64)
        return
    for place, pool in enumerate(fleet["pools"]):
        yield _made(
            f"fleet.pools.{place}.replicas",
            "fleet",
            "whole",
            pool["replicas"],
            meaning_of("fleet", "pools", "replicas"),
            label=f"{pool['name']} replicas",
            rank=FIRST.index(REPLICAS) if place == 0 else None,
            low=1,
            high=64,
        )
    router = fleet.get("router") or FleetTable.model_fields["router"].get_default(
        call_default_factory=True
    )
    names = [Choice(row["name"], row["does"]) for row in bundled("routers")]
    choices = _with_own(names, router["kind"])
    said = meaning_of("fleet", "fleet", "router")
    value = router["kind"]
    yield _made("fleet.router.kind", "fleet", "choice", value, said, choices=choices)


def _numbers(
    table: Mapping[str, Any], where: str, group: str
) -> Iterator[Control | None]:
    """Yield a control for each number and switch of a table of some kind."""
    kind = table.get("kind")
    for name, value in table.items():
        key = f"{where}.{name}"
        said = meaning_of(where.partition(".")[0], str(kind), name)
        if isinstance(value, dict):
            yield from _numbers(value, key, group)
        elif isinstance(value, bool):
            yield _made(key, group, "switch", value, said)
        elif isinstance(value, int | float):
            yield _made(key, group, "number", value, said)


# -- one control --------------------------------------------------------------------


def _typed(
    key: str, group: str, field: FieldInfo, value: Any, kind: str
) -> Control | None:
    """Return the control of a typed key; None for texts and tables of any content."""
    section = key.partition(".")[0]
    name = key.rpartition(".")[2]
    said = (
        meaning_of("run", "", key)
        if "." not in key
        else meaning_of(section, kind, name)
    )
    types, bounds = _unfolded(field)
    facts: dict[str, Any] = {"is_optional": NoneType in types} | _limits(bounds)
    if key == f"engine.{name}" and name in GENERATION_KEYS:
        facts["lacking"] = tuple(
            each.name for each in GENERATIONS.values() if name not in each.keys
        )
    of_types: tuple[tuple[type, What], ...] = (
        (bool, "switch"),
        (int, "whole"),
        (float, "number"),
    )
    for type_, what in of_types:
        if type_ in types:
            is_shown = value is None or not isinstance(value, str)
            return _made(key, group, what, value, said, **facts) if is_shown else None
    if names := _names_of(key, types):
        choices = _with_own(names, value)
        return _made(key, group, "choice", value, said, choices=choices, **facts)
    return None


def _unfolded(field: FieldInfo) -> tuple[set[Any], list[Any]]:
    """Return the types of a field, and what bounds its values, whatever wraps them."""
    types: set[Any] = set()
    bounds = [*field.metadata]
    left: list[Any] = [field.annotation]
    while left:
        each = left.pop()
        if isinstance(each, FieldInfo):
            bounds += each.metadata
        elif get_origin(each) is Literal:
            types |= {("one of", name) for name in get_args(each)}
        elif get_origin(each) in (dict, list):
            continue
        elif inner := get_args(each):
            left += inner
        else:
            types.add(each)
    return types, bounds


def _limits(bounds: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in bounds:
        if isinstance(each, Ge | Gt):
            found["low"] = each.ge if isinstance(each, Ge) else each.gt
            found["is_open"] = isinstance(each, Gt)
        elif isinstance(each, Le | Lt):
            found["high"] = each.le if isinstance(each, Le) else each.lt
    return found


def _names_of(key: str, types: Collection[Any]) -> list[Choice]:
    """Return the names that a key takes: its literals, or what is bundled for it."""
    literals = [each[1] for each in types if isinstance(each, tuple)]
    if literals:
        return [Choice(name) for name in sorted(map(str, literals))]
    if str not in types:
        return []
    if key == f"{DRAFTS}.model":
        return [*_bundled_names("engine.model")]
    if key in DTYPES:
        return [Choice(name) for name in DTYPES[key]]
    return [*_bundled_names(key)]


@cache
def _bundled_names(key: str) -> tuple[Choice, ...]:
    """Return the bundled names for a key, with their facts."""
    for kind in BUNDLED_KINDS.values():
        if kind.key == key:
            _, *others = kind.columns.items()
            return tuple(
                Choice(
                    row["name"],
                    "; ".join(f"{name}: {of(row)}" for name, of in others),
                    ", ".join(
                        f"{dict(others)[n](row)} {n}" for n in BRIEF.get(key, ())
                    ),
                )
                for row in kind.rows()
            )
    return ()


def _with_own(names: Iterable[Choice], value: str | None) -> tuple[Choice, ...]:
    """Return the names, and the configuration's own where that is another."""
    choices = tuple(names)
    if value is None or any(each.value == value for each in choices):
        return choices
    return (Choice(value, "as in your configuration"), *choices)


def _made(
    key: str,
    group: str,
    what: What,
    value: Any,
    said: Meaning,
    *,
    label: str = "",
    rank: int | None = None,
    **facts: Any,
) -> Control:
    name = key.rpartition(".")[2]
    own = key if key in FIRST else name
    if rank is None and own in FIRST and (own != "rate_scale" or group == "traffic"):
        rank = FIRST.index(own)
    names = (key, name, key.partition(".")[0])
    slider = next((SLIDERS[each] for each in names if each in SLIDERS), None)
    return Control(
        key=key,
        label=label or _label(key, group),
        group=group,
        what=what,
        value=value,
        meaning=said.sentence,
        unit=said.unit,
        rank=rank,
        slider=slider if what in ("number", "whole") else None,
        **facts,
    )


def _label(key: str, group: str) -> str:
    """Return the name of a key without its table, which the group says."""
    parts = key.split(".")
    if group in ("host memory", "drafts") and key.startswith("engine."):
        return parts[-1]
    if group == "traffic" and len(parts) > 2:
        return ".".join(parts[2:])
    return ".".join(parts[1:]) or key
