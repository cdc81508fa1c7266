"""The V1 scheduler by keyword: what schedulers of users' own derive from."""

from __future__ import annotations

from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

from sim.errors import SchedulerError
from sim.scheduler.settings import CacheConfig
from sim.scheduler.v1.scheduler import Scheduler
from sim.scheduler.v1.settings import Settings

if TYPE_CHECKING:
    from cache.v1.specs import KVCacheLayout

_PLAIN = {
    "async_scheduling": False,
    "offload": None,
    "pipeline_parallel_size": 1,
    "speculative_config": None,
}
"""Settings with which it is `Scheduler` itself that serves, and no class behind it."""


class V1Scheduler(Scheduler):
    """`Scheduler`, constructed by keyword: schedulers of users' own derive from it.

    Parameters
    ----------
    num_gpu_blocks, block_size, enable_prefix_caching, sliding_window, evictor, \
    layout, prefix_cache_retention_interval
        See `sim.scheduler.settings.CacheConfig`; prefix caching is on by default.
    **settings
        The fields of `Settings`.

    Raises
    ------
    SchedulerError
        If these need another class of the generation; see `Parts.construct`.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        sliding_window: int | None = None,
        evictor: Any = None,
        layout: KVCacheLayout | None = None,
        prefix_cache_retention_interval: int | None = 0,
        **settings: Any,
    ) -> None:
        cache = CacheConfig(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            sliding_window=sliding_window,
            enable_prefix_caching=enable_prefix_caching,
            evictor=evictor,
            layout=layout,
            prefix_cache_retention_interval=prefix_cache_retention_interval,
        )
        for key, plain in _PLAIN.items():
            if settings.get(key, plain) not in (None, plain):
                raise SchedulerError(
                    f"{key}: V1Scheduler forms one step at a time, without drafts and "
                    f"tiers; leave it out, or let V1.parts().construct(settings, "
                    f"cache) choose the class, got {settings[key]!r}"
                )
        super().__init__(Settings(**settings), cache)

    __init__.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            *list(Signature.from_callable(__init__).parameters.values())[:-1],
            *(
                Parameter(
                    each.name,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty
                    if each.default is MISSING
                    else each.default,
                )
                for each in fields(Settings)
                if each.init
            ),
        ]
    )
