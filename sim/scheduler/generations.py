"""All generations, by name, by release and by scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from sim.scheduler.block_space import CACHEFLOW, V0_2
from sim.scheduler.hf_fifo import HF_FIFO
from sim.scheduler.hosted import VLLM
from sim.scheduler.sglang import SGLANG
from sim.scheduler.v0 import V0
from sim.scheduler.v1 import V1

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sim.scheduler.generation import Generation

GENERATIONS: Mapping[str, Generation] = MappingProxyType(
    {each.name: each for each in (CACHEFLOW, V0_2, V0, V1, HF_FIFO, SGLANG, VLLM)}
)
"""Generations by the name that ``engine.scheduler`` takes."""

OURS: Mapping[str, Generation] = MappingProxyType(
    {name: each for name, each in GENERATIONS.items() if not each.is_hosted}
)
"""Those that need no installed engine."""

DEFAULT_GENERATION = V1
"""Stands in for a user's own scheduler that names no release."""

GENERATION_KEYS = frozenset().union(*(g.keys for g in GENERATIONS.values()))
"""Keys that some generation lacks."""


class _Schedulers(Mapping[str, type]):
    """The scheduler classes, imported when they are asked for."""

    def __getitem__(self, name: str) -> type:
        return GENERATIONS[name].parts().scheduler

    def __iter__(self) -> Iterator[str]:
        return iter(GENERATIONS)

    def __len__(self) -> int:
        return len(GENERATIONS)


SCHEDULERS: Mapping[str, type] = _Schedulers()
"""Built-in schedulers by the name that ``engine.scheduler`` takes."""


def owners(key: str) -> str:
    """Return which generations have `key`, as a clause for messages.

    A hosted engine has the keys of the generation that it hosts.
    """
    *others, last = (name for name, g in OURS.items() if key in g.keys)
    return f"{', '.join(others)} and {last} have it" if others else f"{last} has it"


def generation_of(engine_version: str | None) -> Generation:
    """Return the generation of a release; the newest for none, or an unknown one."""
    for generation in OURS.values():
        if engine_version is not None and generation.takes(engine_version):
            return generation
    return DEFAULT_GENERATION


def generation_behind(scheduler: object) -> Generation | None:
    """Return the generation of a scheduler or its class; a user's own may have none.

    Classes of schedulers say it by an attribute `generation`.
    """
    cls = scheduler if isinstance(scheduler, type) else type(scheduler)
    return GENERATIONS.get(getattr(cls, "generation", ""))
