"""Policies of a scheduler that a configuration names: victims and admission rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.config.plug import build
from sim.errors import ConfigError
from sim.scheduler.admission import ADMISSION_RULES, AdmissionRule
from sim.scheduler.victims import VICTIMS, VictimPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.config.tables import EngineConfig

_ROLES: Mapping[str, tuple[Mapping[str, type], Any, str]] = {
    "preemption_victim": (VICTIMS, VictimPolicy, "choose(running, needs)"),
    "admission": (ADMISSION_RULES, AdmissionRule, "admits(head, engine)"),
}


def make_policies(config: EngineConfig) -> dict[str, Any]:
    """Construct the policies that are asked for, new ones each time: some learn.

    Returns
    -------
    dict
        By engine key; without those that are left to the generation.

    Raises
    ------
    ConfigError
        If one cannot be made, or is no such policy.
    """
    return {
        key: _make(key, getattr(config, key))
        for key in _ROLES
        if getattr(config, key) is not None
    }


def _make(key: str, given: str | dict[str, Any]) -> Any:
    table = {"kind": given} if isinstance(given, str) else given
    kinds, role, method = _ROLES[key]
    policy = build(kinds, table, f"engine.{key}")
    if not isinstance(policy, role):
        raise ConfigError(
            f"engine.{key}: '{table['kind']}' needs a method {method}; mend your class"
        )
    return policy
