"""The sweep file: a base, and the values that are varied over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from sim.config.files import Overrides, override, read_yaml
from sim.config.hints import refuse_other_kind
from sim.config.plug import did_you_mean
from sim.config.tables import RunConfig
from sim.config.types import ConfigTable, Positive, shortened
from sim.errors import ConfigError
from sim.studies.sweeps.ranges import distinct, parse_range, parse_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def _parsed_ranges(value: object) -> object:
    return _each(value, parse_range)


def _parsed_values(value: object) -> object:
    return _each(value, parse_values)


def _each(value: object, parse: Any) -> object:
    """Parse the value of each key; name the key in a refusal."""
    if not isinstance(value, dict) or not value:
        raise ValueError("should be a table from keys to values, not empty")
    parsed = {}
    for key, each in value.items():
        try:
            parsed[str(key)] = parse(each)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
    return parsed


def _listed(value: object) -> object:
    for each in distinct(value):
        if not isinstance(each, dict) or not each:
            raise ValueError(
                f"should be a list of tables such as {{engine.gpu: h200_sxm}}, got "
                f"{shortened(each)}"
            )
    return value


class DrawnBlock(ConfigTable):
    """Runs whose values are drawn: ``random`` or ``latin_hypercube``."""

    num_runs: Positive
    ranges: Annotated[dict[str, Any], BeforeValidator(_parsed_ranges)]
    """From key to `Range`."""


class SweepSpec(ConfigTable):
    """A sweep file; runs are all combinations of its blocks, each `repeats` times."""

    base: str | dict[str, Any]
    grid: Annotated[dict[str, Any], BeforeValidator(_parsed_values)] | None = None
    list: Annotated[Any, BeforeValidator(_listed)] | None = None
    random: DrawnBlock | None = None
    latin_hypercube: DrawnBlock | None = None
    repeats: Positive = 1
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    common_random_numbers: bool = True

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that are varied, in the order of the blocks."""
        return tuple(dict.fromkeys(key for block in self._blocks() for key in block))

    def _blocks(self) -> Iterator[Sequence[str]]:
        """Yield the keys of each block; those of the list's entries together."""
        yield tuple(dict.fromkeys(key for entry in self.list or () for key in entry))
        yield tuple(self.grid or ())
        for block in (self.random, self.latin_hypercube):
            yield tuple(block.ranges if block else ())

    @model_validator(mode="after")
    def _keys_once(self) -> SweepSpec:
        """Refuse keys that are set twice, and a key inside another."""
        keys = [key for block in self._blocks() for key in block]
        if not keys and self.repeats == 1:
            raise ValueError(
                "nothing is varied; give grid, list, random, latin_hypercube or repeats"
            )
        for key in keys:
            if not all(str(key).split(".")) or not isinstance(key, str):
                raise ValueError(f"'{key}' is no key such as engine.max_num_seqs")
            if keys.count(key) > 1:
                raise ValueError(f"'{key}' is varied by two blocks; leave it in one")
            for other in keys:
                if str(other).startswith(f"{key}."):
                    raise ValueError(f"'{other}' is part of '{key}'; vary one of them")
        if "seed" in keys and (self.repeats > 1 or not self.common_random_numbers):
            raise ValueError(
                "'seed' is varied, and set by repeats or common_random_numbers, too; "
                "leave one out"
            )
        return self


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A sweep as it was read."""

    spec: SweepSpec
    base: Mapping[str, Any]
    """The configuration that is varied, as plain data."""
    directory: Path
    """Where relative paths are looked for, after the working directory."""
    given: Mapping[str, Any]
    """The file's own data, with `base` in place of its path: runs again as it is."""


def load_sweep(path: Path | str, overrides: Overrides = ()) -> SweepFile:
    """Read a sweep file and its base.

    Parameters
    ----------
    path
        YAML file; see docs/sweeps.md.
    overrides
        Changes to the base, as of `sim.config.tables.load_config`.

    Raises
    ------
    ConfigError
        In a line: the path of the key, the rule, the value and the remedy.
    """
    path = Path(path)
    data = read_yaml(path)
    refuse_other_kind(data, path, "sweep")
    try:
        spec = SweepSpec.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_line(error)) from error
    if isinstance(spec.base, str):
        file = _base_file(spec.base, path.parent)
        base, directory = read_yaml(file), file.parent
    else:
        base, directory = spec.base, path.parent
    for each in overrides:
        _check_reach(each, path)
    override(base, overrides)
    return SweepFile(spec, base, directory, data | {"base": base})


def _check_reach(assignment: str, path: Path) -> None:
    """Refuse to set a key of the sweep itself."""
    name = assignment.partition("=")[0].partition(".")[0]
    if name in set(SweepSpec.model_fields) - set(RunConfig.model_fields):
        raise ConfigError(
            f"--set {name}: --set reaches the base configuration, not the sweep; "
            f"write {name} in '{path}'"
        )


def _base_file(name: str, directory: Path) -> Path:
    """Return the base's path: from the working directory, or beside the sweep."""
    given = Path(name).expanduser()
    return given if given.is_file() else directory / given


_TYPE_NAMES = ("str", "dict[str,any]")


def _one_line(error: ValidationError) -> str:
    """Return the first problem in a line."""
    # A key that is misspelt is missing, too: the spelling is what to mend.
    problem = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    path = ".".join(str(part) for part in problem["loc"] if part not in _TYPE_NAMES)
    table, _, key = path.rpartition(".")
    if problem["type"] == "extra_forbidden":
        choices = list((DrawnBlock if table else SweepSpec).model_fields)
        hint = did_you_mean(key, choices)
        return f"{path}: unknown key{hint} (there are: {', '.join(choices)})"
    if problem["type"] == "missing":
        return f"{path}: this key is needed; give it (see docs/sweeps.md)"
    if problem["type"] == "model_type":
        return f"{path}: should be a table with num_runs and ranges"
    rule = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if path == "base":
        rule = "should be a configuration's path, or the configuration itself"
    if problem["type"] == "value_error":
        return f"{path or 'sweep'}: {rule}".replace(": should", " should", not path)
    return f"{path}: {rule}, got {shortened(problem['input'])}"
