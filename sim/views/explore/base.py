"""Where a page starts: a configuration, and how it was named on the command line."""

from __future__ import annotations

import copy
import shlex
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from sim.config.files import find_files, override, put, read_yaml
from sim.config.tables import RunConfig, load_data, parse_config
from sim.errors import ConfigError
from sim.results.folder import kind_of
from sim.simulation.pools import pools_of
from sim.studies.planning.phases.candidates import candidates_of
from sim.studies.planning.spec import load_plan
from sim.studies.sweeps.job import Job
from sim.studies.sweeps.supplies import gather
from sim.views.explore.control import Choice, Control
from sim.views.explore.controls import (
    ACCEPTANCE,
    DRAFTS,
    RATE,
    REPLICAS,
    TRAFFIC,
    checked_settings,
    controls_of,
    traffic_control,
)
from sim.views.explore.traffic import (
    AS_GIVEN,
    Traffic,
    bundled_traffic,
    described,
    traffic_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Settings = dict[str, Any]
"""Values by key of a control; those of the configuration are left out."""

DEMO: Final[Mapping[str, Any]] = {
    "workload": {
        "preset": {"name": "azure_conv_2023", "duration_s": 3600, "rate_scale": 1.1}
    },
    "engine": {
        "model": "Qwen/Qwen3-32B",
        "gpu": "h200_sxm",
        "enable_prefix_caching": False,
    },
    "cost": {"kind": "roofline"},
    "seed": 0,
}
"""The configuration of a page that is given none: that of ``examples/demo.yaml``."""


@dataclass(frozen=True)
class Base:
    """A configuration that settings are put upon.

    Parameters
    ----------
    name
        What the page is called.
    data
        The configuration as its file says it.
    words
        How ``kvsim run`` is told of it; empty where it has no file.
    traffics
        What can stand in the place of its traffic.
    """

    name: str
    data: Mapping[str, Any]
    words: tuple[str, ...] = ()
    traffics: tuple[Traffic, ...] = field(default_factory=bundled_traffic)
    config: RunConfig = field(init=False)
    _others: dict[str, Base] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", parse_config(dict(self.data)))

    def of(self, settings: Mapping[str, Any]) -> Base:
        """Return the base whose traffic settings have chosen: this, or another.

        Raises
        ------
        ConfigError
            If there is no such traffic.
        """
        name = settings.get(TRAFFIC, AS_GIVEN)
        if not isinstance(name, str) or name not in self.traffic_names:
            raise ConfigError(
                "traffic: the page lists no such traffic; choose another, or start "
                "kvsim explore with --traffic FILE"
            )
        if name == AS_GIVEN:
            return self
        if name not in self._others:
            chosen = next(each for each in self.traffics if each.name == name)
            workload = chosen.in_place_of(self.data["workload"])
            said = ("--set", f"workload={_told(workload)}") if self.words else ()
            data = {**self.data, "workload": workload}
            other = Base(self.name, data, (*self.words, *said), self.traffics)
            self._others[name] = other
        return self._others[name]

    @cached_property
    def traces(self) -> Mapping[str, bytes]:
        """The traces that its runs may read, as of `Supplies.traces`."""
        files = (each.name for each in self.traffics if each.is_file)
        all_ = (self, *(self.of({TRAFFIC: name}) for name in files))
        jobs = [Job(n, {}, each.config.to_data()) for n, each in enumerate(all_)]
        return gather(jobs, at_least=1).traces

    @cached_property
    def _traffic(self) -> Control:
        own = Choice(AS_GIVEN, described(self.data["workload"]))
        others = (Choice(each.name, each.facts) for each in self.traffics)
        return traffic_control((own, *others))

    @property
    def traffic_names(self) -> list[str]:
        """The traffic that can be chosen, that of the configuration first."""
        return [each.value for each in self._traffic.choices]

    @cached_property
    def controls(self) -> Mapping[str, Control]:
        """The controls by key, in their order, while the traffic is its own."""
        found = (self._traffic, *controls_of(self.data, self.config))
        return {each.key: each for each in found}

    def control(self, key: object, settings: Settings) -> Control:
        """Return the control of a key that came from outside, beside settings."""
        controls = self.of(settings).controls
        if not isinstance(key, str) or key not in controls:
            raise ConfigError("key: should be that of a setting of this page")
        return controls[key]

    def checked(self, given: object) -> Settings:
        """Return settings that came from outside, see `checked_settings`."""
        if not isinstance(given, dict):
            raise ConfigError("settings: should be a table of values by key")
        return checked_settings(self.of(given).controls, given)

    def moved(self, settings: Settings, key: str, value: Any) -> Settings:
        """Return settings with one of them moved; other traffic begins as it is."""
        if key == TRAFFIC:
            settings = {k: v for k, v in settings.items() if not _is_of_traffic(k)}
        return self.checked({**settings, key: value})

    def completed(self, settings: Settings) -> Settings:
        """Return settings with the keys that their tables need beside them."""
        found, base = dict(settings), self.of(settings)
        if base.config.engine.speculative_config is None:
            drafts = {key for key in found if key.startswith(f"{DRAFTS}.")}
            if not found.get(f"{DRAFTS}.num_speculative_tokens"):
                found = {k: v for k, v in found.items() if k not in drafts}
            else:
                key = f"{DRAFTS}.method"
                found.setdefault(key, base.controls[key].value)
        if RATE in found and not base.data["workload"].get("acceptance"):
            found[f"{ACCEPTANCE}.kind"] = "constant"
        return found

    def with_settings(self, settings: Settings) -> dict[str, Any]:
        """Return the configuration with settings, as plain data."""
        data = copy.deepcopy(dict(self.of(settings).data))
        for key, value in self.completed(settings).items():
            if key == TRAFFIC:
                continue  # is in the data
            if key == REPLICAS:
                put(data, "fleet", _fleet_of(value))
            elif key.startswith("objectives.") and value is None:
                data.get("objectives", {}).pop(key.partition(".")[2], None)
            else:
                put(data, key, value)
        if data.get("objectives") == {}:
            del data["objectives"]  # the last one is gone
        return data

    def command(self, settings: Settings) -> str:
        """Return the ``kvsim run`` that does the same as the page.

        A configuration without a file is one that was downloaded.
        """
        if not self.words:
            return "kvsim run explored.yaml"
        words = ["kvsim", "run", *self.of(settings).words]
        removed = [k for k, v in settings.items() if v is None and "objectives." in k]
        for key, value in self.completed(settings).items():
            if key == REPLICAS:
                words += ["--set", f"fleet={_told(_fleet_of(value))}"]
            elif key != TRAFFIC and key not in removed:
                words += ["--set", f"{key}={_told(value)}"]
        if removed:  # a key cannot be taken away: the table is said anew
            left = self.with_settings(settings).get("objectives")
            words += ["--set", f"objectives={_told(left)}"]
        return shlex.join(words)


def _fleet_of(replicas: int) -> dict[str, Any]:
    return {"pools": [{"name": "all", "replicas": replicas}]}


def _is_of_traffic(key: str) -> bool:
    return key.startswith("workload.") and not key.startswith(f"{ACCEPTANCE}.")


def _told(value: Any) -> str:
    """Return a value in YAML, in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def base_of(
    path: Path | None, overrides: Sequence[str] = (), traffic: Sequence[Path] = ()
) -> Base:
    """Return where a page starts.

    Parameters
    ----------
    path
        A configuration, the folder of a run's results, or a plan, whose first
        candidate it is; the demo's configuration without one.
    overrides
        As of `sim.config.tables.load_config`.
    traffic
        Files whose traffic can be chosen, see `sim.views.explore.traffic.traffic_of`.

    Raises
    ------
    ConfigError, ResultsError, CapacityError
        If there is no such thing, it cannot be read, or its engine cannot be.
    """
    base = _read(path, overrides)
    base = replace(base, traffics=(*base.traffics, *traffic_of(traffic)))
    pools_of(base.config)  # refused here, before a page is opened
    return base


def _read(path: Path | None, overrides: Sequence[str]) -> Base:
    if path is None:
        data = copy.deepcopy(dict(DEMO))
        override(data, overrides)
        find_files(data, Path())
        return Base("demo", data)
    if path.is_dir():
        if (kind := kind_of(path)) != "run":
            raise ConfigError(
                f"'{path}' holds a {kind}, and the page explores one run; give a "
                f"configuration, or the --out of a 'kvsim run'"
            )
        path = path / "config.yaml"
    elif path.is_file() and "candidates" in read_yaml(path):
        return _of_plan(path, overrides)
    data = load_data(path, overrides)
    sets = [word for each in overrides for word in ("--set", each)]
    name = path.parent.name if path.name == "config.yaml" else path.stem
    return Base(name, data, (str(path), *sets))


def _of_plan(path: Path, overrides: Sequence[str]) -> Base:
    """Return the first candidate of a plan that can run, with its objectives."""
    plan = load_plan(path, overrides)
    first = next(each for each in candidates_of(plan) if not each.reason)
    return Base(path.stem, {**first.run, "objectives": dict(plan.objectives)})
