"""From a configuration table with a ``kind`` to an object.

``kind`` names a built-in of the table at hand, or ``path/to/file.py:ClassName`` for
one of the user's own; the remaining keys are constructor arguments. An argument that is
itself a role of `sim.config.plug` is such a table again.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import sys
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from sim.config.plugins import refuse_plugins
from sim.config.trace_shelf import instead_of
from sim.errors import ConfigError, UserError
from workloads.acceptance import ACCEPTANCE, AcceptanceRates
from workloads.arrivals import ARRIVALS, ArrivalProcess
from workloads.draws.counts import COUNTS, CountDistribution
from workloads.draws.durations import DURATIONS, DurationDistribution
from workloads.errors import WorkloadError
from workloads.lengths import (
    LENGTH_PAIRS,
    LENGTHS,
    LengthDistribution,
    LengthPairs,
)
from workloads.prefixes import PREFIXES, PrefixStructure
from workloads.traces import TRACE_READERS, TraceReader

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


USER_MODULE_PREFIX = "kvsim_user_"
"""Start of the names of modules that hold users' own classes."""

_ALIASES = {"transformers": "hf_fifo"}
"""Words of other tools, and what the kind is called here."""

_MANY = 15
"""Choices of which a list helps less than the one that was meant."""
_MOST_LISTED = 25
"""Choices that a line still holds."""


def did_you_mean(word: object, choices: Iterable[object]) -> str:
    """Return ``"; did you mean 'x'?"`` for a near miss, else an empty string.

    A word that only one choice begins with is a near miss, too.

    Examples
    --------
    >>> did_you_mean("sglang", ["sglang_cache_aware", "llm_d"])
    "; did you mean 'sglang_cache_aware'?"
    """
    names = {str(each).lower(): str(each) for each in choices}
    word = str(word).lower()
    near = difflib.get_close_matches(word, names, n=1)
    longer = [name for name in names if name.startswith(f"{word}_")]
    if not near and len(longer) == 1:
        near = longer
    return f"; did you mean '{names[near[0]]}'?" if near else ""


def with_choices(hint: str, choices: Sequence[str], begin: str, owner: str) -> str:
    """Return a hint with all choices, where these help: at most a line of them.

    Examples
    --------
    >>> with_choices("", ["a", "b"], "it has", "x")
    ' (it has: a, b)'
    """
    if len(choices) <= (_MANY if hint else _MOST_LISTED):
        return f"{hint} ({begin}: {', '.join(choices) or 'none'})"
    return hint or (
        f"; docs/configuration.md lists the {len(choices)} that {owner} has; take one "
        f"of them, or leave it out"
    )


def build(
    table: Mapping[str, type],
    config: Mapping[str, Any],
    where: str,
    context: Mapping[str, Any] | Callable[[type], Mapping[str, Any]] | None = None,
    more_keys: Iterable[str] = (),
) -> Any:
    """Construct what `config` describes.

    Parameters
    ----------
    table
        Built-in classes by kind.
    config
        ``kind`` and constructor arguments.
    where
        Path of the table in the configuration, for messages.
    context
        Arguments that the engine provides to constructors that name them, or what
        returns them for a class; ``**more`` stands for what the next constructor in
        line names.
    more_keys
        Keys of the same table that others read, for the messages.

    Raises
    ------
    ConfigError
        For an unknown kind, an argument that does not exist, is missing or has the
        wrong type, and for what the constructor itself refuses.
    """
    kind = config.get("kind")
    if not isinstance(kind, str):
        raise ConfigError(
            f"{where}.kind: must name one of {', '.join(table)}, or file.py:Class"
        )
    cls = table[kind] if kind in table else _load(kind, table, where)
    given = {key: value for key, value in config.items() if key != "kind"}
    context = context(cls) if callable(context) else context or {}
    parameters = _parameters(cls)
    settable = [name for name in parameters if name not in context]
    if not _takes_any(parameters):
        _refuse_unknown(given, [*settable, *more_keys], where, kind)
    _refuse_missing(given, settable, parameters, where, kind)
    arguments = _typed(cls, given, where)
    wanted = _wanted(cls)
    arguments |= {n: v for n, v in context.items() if wanted is None or n in wanted}
    try:
        return instead_of(config, cls(**arguments))
    except (UserError, WorkloadError) as error:
        raise ConfigError(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        if kind in table:
            raise  # a fault of ours
        raise ConfigError(
            f"{where}: '{kind}' cannot be made: {type(error).__name__}: {error}; mend "
            f"your class or its arguments"
        ) from error


def _wanted(cls: type) -> set[str] | None:
    """Return the arguments that a constructor names, or None where it takes any.

    A constructor with ``**more`` is taken to hand them on to the next one in line, as
    ``super().__init__(*args, **more)`` does.
    """
    parameters = _parameters(cls)
    names = _named(parameters)
    if not _takes_any(parameters):
        return names
    for base in cls.__mro__[:-1]:  # the last is object
        own = vars(base).get("__init__")
        if own is None:
            continue
        parameters = _parameters(own)
        names |= _named(parameters)
        if not _takes_any(parameters):
            return names
    return None


@lru_cache(maxsize=256)
def _parameters(source: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(source).parameters


def _named(parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    several = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return {name for name, each in parameters.items() if each.kind not in several}


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def fault_in_user_code(error: BaseException) -> str | None:
    """Return where and how a user's own class failed, in a line, or None.

    SimPy raises a copy of what failed in one of its processes, as its cause. Code of
    ours that a class of the user's inherits fails by what it was given there.
    """
    found = None
    cause: BaseException | None = error
    while cause is not None:
        place, frame, own = None, cause.__traceback__, getattr(cause, "obj", None)
        while frame is not None:
            module = frame.tb_frame.f_globals.get("__name__", "")
            if module.startswith(USER_MODULE_PREFIX):
                file_name = Path(frame.tb_frame.f_code.co_filename).name
                place = f"{file_name}:{frame.tb_lineno}"
            if frame.tb_next is None:
                own = own or frame.tb_frame.f_locals.get("self")
            frame = frame.tb_next
        if place is None and type(own).__module__.startswith(USER_MODULE_PREFIX):
            place = type(own).__name__
        if place is not None:
            found = f"{place}: {type(cause).__name__}: {cause}; mend your class"
        cause = cause.__cause__
    return found


def _refuse_unknown(
    given: Mapping[str, Any], settable: list[str], where: str, kind: str
) -> None:
    for key in given:
        if key not in settable:
            raise ConfigError(
                f"{where}.{key}: '{kind}' has no such key"
                + with_choices(did_you_mean(key, settable), settable, "it has", kind)
            )


def _refuse_missing(
    given: Mapping[str, Any],
    settable: list[str],
    parameters: Mapping[str, inspect.Parameter],
    where: str,
    kind: str,
) -> None:
    for name in settable:
        parameter = parameters[name]
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not optional and name not in given:
            raise ConfigError(f"{where}.{name}: '{kind}' needs this key; give it")


def _typed(cls: type, given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Check plain types, so that ``limit: many`` is refused with its key."""
    hints = _hints(cls)
    typed: dict[str, Any] = {}
    for name, value in given.items():
        typed[name] = value
        if name not in hints:
            continue
        if _roles_in(hints[name]):
            typed[name] = _filled(hints[name], value, f"{where}.{name}")
            continue
        adapter = _adapter(cls, name)
        if adapter is None:
            continue  # not a plain type: the constructor will judge
        try:
            # As JSON, a list may stand for a tuple, but never a bool for a number.
            typed[name] = adapter.validate_json(json.dumps(value), strict=True)
        except (ValidationError, TypeError) as error:
            rule = (
                error.errors()[0]["msg"]
                if isinstance(error, ValidationError)
                else str(error)
            )
            hint = ""
            if isinstance(value, str):
                is_flag = hints[name] is bool
                written = "true or false" if is_flag else "numbers as 16 or 1.0e-3"
                hint = f"; write {written}"
            raise ConfigError(f"{where}.{name}: {rule}, got {value!r}{hint}") from error
    return typed


@lru_cache(maxsize=1024)
def _adapter(cls: type, name: str) -> TypeAdapter[Any] | None:
    """Return how an argument is checked, or None where its type is not a plain one."""
    try:
        return TypeAdapter(_hints(cls)[name])
    except (PydanticUserError, PydanticSchemaGenerationError):
        return None


def _roles_in(hint: Any) -> list[Any]:
    """Return the roles that an annotation names, at any depth."""
    if isinstance(hint, type) and hint in ROLES:
        return [hint]
    return [role for part in typing.get_args(hint) for role in _roles_in(part)]


def _filled(hint: Any, value: Any, where: str) -> Any:
    """Return a value whose tables with `kind` are objects, by an annotation."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _filled_choice(parts, value, where)
    if origin is None:
        if not isinstance(value, Mapping):
            kinds = f"kind: one of {', '.join(ROLES[hint])}, or file.py:Class"
            raise ConfigError(f"{where}: must be a table with {kinds}, got {value!r}")
        return build(ROLES[hint], value, where)
    wanted, word = (Mapping, "table") if issubclass(origin, Mapping) else (list, "list")
    if not isinstance(value, wanted):
        raise ConfigError(f"{where}: must be a {word} of tables, got {value!r}")
    if isinstance(value, Mapping):
        return {k: _filled(parts[-1], v, f"{where}.{k}") for k, v in value.items()}
    return [_filled(parts[0], v, f"{where}[{i}]") for i, v in enumerate(value)]


def _filled_choice(parts: tuple[Any, ...], value: Any, where: str) -> Any:
    """Do as `_filled`, for an annotation of several types."""
    if value is None and types.NoneType in parts:
        return None
    fillable = [part for part in parts if _roles_in(part)]
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if kind is None and len(fillable) + (types.NoneType in parts) < len(parts):
        return value  # another of the types: the constructor will judge
    is_name = isinstance(kind, str)
    named = [part for part in fillable if is_name and kind in ROLES.get(part, ())]
    return _filled((named or fillable)[0], value, where)


@lru_cache(maxsize=256)
def _hints(cls: type) -> Mapping[str, Any]:
    """Annotations of the constructor's arguments, as far as they resolve."""
    hints: dict[str, Any] = {}
    for source in (cls, getattr(cls, "__init__")):  # noqa: B009
        try:
            hints |= typing.get_type_hints(source)
        except (NameError, TypeError):
            hints |= _resolved(source)
    return hints


def _resolved(source: Any) -> dict[str, Any]:
    """Return those annotations that are not imported for type checkers only."""
    names = vars(sys.modules.get(source.__module__, typing))
    found: dict[str, Any] = {}
    for name, hint in getattr(source, "__annotations__", {}).items():
        one = types.SimpleNamespace(__annotations__={name: hint})
        try:
            found |= typing.get_type_hints(one, globalns=names)
        except (NameError, TypeError):
            continue
    return found


def _load(kind: str, table: Mapping[str, type], where: str) -> type:
    """Import ``path/to/file.py:ClassName``."""
    file_name, colon, class_name = kind.rpartition(":")
    if not colon or not file_name.endswith(".py"):
        raise ConfigError(
            f"{where}.kind: '{kind}' is not built"
            f"{did_you_mean(_ALIASES.get(kind.lower(), kind), table)} "
            f"(there are: {', '.join(table)}; your own: path/to/file.py:ClassName)"
        )
    refuse_plugins(kind, f"{where}.kind")
    path = Path(file_name)
    if not path.is_file():
        raise ConfigError(f"{where}.kind: there is no file '{file_name}'")
    # Two files may share a stem; the module is found again by its whole path.
    name = f"{USER_MODULE_PREFIX}{crc32(bytes(path.resolve())):08x}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{where}.kind: '{file_name}' cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        raise ConfigError(f"{where}.kind: '{file_name}' has no class '{class_name}'")
    return cls


ROLES: Mapping[Any, Mapping[str, type]] = MappingProxyType(
    {
        AcceptanceRates: ACCEPTANCE,
        ArrivalProcess: ARRIVALS,
        CountDistribution: COUNTS,
        DurationDistribution: DURATIONS,
        LengthDistribution: LENGTHS,
        LengthPairs: LENGTH_PAIRS,
        PrefixStructure: PREFIXES,
        TraceReader: TRACE_READERS,
    }
)
"""Built-in classes by kind, for each role."""
