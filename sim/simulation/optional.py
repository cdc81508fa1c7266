"""Numbers of the summary that only some runs have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.config.front_end import NOT_LOOKED_AT
from sim.fleet.engines import Engines
from sim.results.metrics import goodput
from sim.results.recording.drafts import DraftRecorder, draft_numbers
from sim.results.recording.recorder import Recorder, Recording
from sim.results.recording.transfers import OffloadRecorder, transfer_numbers
from sim.results.summary.verdict import judged
from sim.simulation import ranks
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.tables import RunConfig
    from sim.engine.lock_step import LockStep
    from sim.engine.loop import Engine
    from sim.hardware.capacity import CapacityEstimate
    from sim.results.fleet.ranks import RankRecorders
    from sim.results.recording.transfers import TransferLog
    from sim.results.summary.objectives import Objective


def all_of(engine: Engine | Engines) -> list[Engine]:
    """Return the engines of a run, and those that others have taken the place of."""
    if not isinstance(engine, Engines):
        return [engine]
    places = range(len(engine.engines))
    return [each for place in places for each in engine.all_at(place)]


def counters(  # noqa: PLR0917 - the parts of a run
    recorder: Recorder | RankRecorders,
    engine: Engine | Engines,
    recording: Recording,
    num_usable_blocks: int,
    now_s: float,
    lock: LockStep | None,
) -> dict[str, Any]:
    """Return the counters of schedulers, and the numbers of drafts or ranks."""
    schedulers = [each.scheduler for each in all_of(engine)]
    recorders = [recorder] if isinstance(recorder, Recorder) else recorder.of_rank
    drafting = [each for each in recorders if isinstance(each, DraftRecorder)]
    told = ranks.merged_counters([scheduler.summary() for scheduler in schedulers])
    if logs := _transfer_logs(recorder):  # an engine's place has one host at a time
        told["num_tier_chunks"] = sum(log.num_chunks for log in logs)
    told |= _tiers_behind(engine)
    if drafting:
        told |= draft_numbers(drafting, num_usable_blocks, now_s)
    if isinstance(recorder, Recorder) or recorder.part == "engine":
        return told
    return told | ranks.numbers_of_ranks(recording, recorder, schedulers, now_s, lock)


def _tiers_behind(engine: Engine | Engines) -> dict[str, Any]:
    """Return the numbers of the tiers behind the hosts of several engines.

    Of those that others have taken the place of, what they did, not what they held.
    """
    every = all_of(engine)
    if len(every) == 1:
        return {}
    present = engine.engines if isinstance(engine, Engines) else [engine]
    found: dict[str, dict[str, Any]] = {}
    for each in every:
        scheduler: Any = each.scheduler
        offloading = getattr(getattr(scheduler, "connector", None), "offloading", None)
        if offloading is None or (behind := offloading.behind) is None:
            continue
        told = scheduler.connector.summary()["secondary_tiers"]
        for name, numbers in told.items():
            is_shared = behind.tiers[name].is_shared
            whole = found.setdefault(name, {"is_shared": is_shared})
            for key, number in numbers.items():
                if key in _HELD and each not in present:
                    continue
                if is_shared and key not in _OF_ENGINES:  # all tell of the same
                    whole[key] = number
                else:
                    whole[key] = whole.get(key, 0) + number
    return {"secondary_tiers": found} if found else {}


_HELD = ("num_chunks", "num_used_chunks")
_OF_ENGINES = ("num_loaded_tokens", "num_promoted_chunks")


def tier(
    recorder: Recorder | RankRecorders, recording: Recording, now_s: float
) -> dict[str, Any]:
    """Return the numbers of the tier behind the pool, where there is one."""
    if not (logs := _transfer_logs(recorder)):
        return {}
    return transfer_numbers(recording, sum(log.num_chunks for log in logs), now_s)


def _transfer_logs(recorder: Recorder | RankRecorders) -> list[TransferLog]:
    recorders = [recorder] if isinstance(recorder, Recorder) else recorder.of_rank
    return [each.transfers for each in recorders if isinstance(each, OffloadRecorder)]


def steps_in_flight(engine: Engine | Engines) -> dict[str, Any]:
    """Return the gain and waste of steps side by side, over ranks, if there are any.

    Ranks that step together have none.
    """
    schedulers: list[Any] = [each.scheduler for each in all_of(engine)]
    ahead = [
        (each.batches.overlapped_s, scheduler.num_wasted_tokens)
        for each, scheduler in zip(all_of(engine), schedulers, strict=True)
        if each.batches is not None
    ]
    if not ahead:
        return {}
    overlapped_s, num_wasted_tokens = zip(*ahead, strict=True)
    return {
        "overlapped_s": added(overlapped_s),
        "num_wasted_tokens": sum(num_wasted_tokens),
    }


def front_end(config: RunConfig) -> dict[str, Any]:
    """Return the latency of the front end beside the engine's."""
    if config.front_end is None:
        return {"front_end": NOT_LOOKED_AT}
    return {"front_end": config.front_end.describe(config.engine.version)}


def pool_in_tokens(config: RunConfig, capacity: CapacityEstimate) -> dict[str, Any]:
    """Return the pool in tokens, and bytes a GPU, where the engine counts no blocks."""
    if not config.engine.generation.server.pool_in_tokens:
        return {}
    found = {
        "max_total_num_tokens": capacity.num_gpu_blocks * capacity.block_size,
        "kv_cache_bytes": capacity.num_gpu_blocks * capacity.block_bytes,
    }
    if capacity.swa_max_total_num_tokens:
        found["swa_max_total_num_tokens"] = capacity.swa_max_total_num_tokens
        found["kv_cache_bytes"] = sum(
            kind["num_blocks"] * num_layers * page_bytes
            for kind in capacity.kv_cache_groups
            for num_layers, page_bytes, _ in kind["pages"]
        )
    return found


def within_limits(
    config: RunConfig, recording: Recording, num_requests: int, now_s: float
) -> dict[str, Any]:
    """Return the goodput within the limits, if the configuration has any."""
    if config.goodput is None:
        return {}
    limits_ms = config.goodput.limits_ms
    return goodput(recording.request_table, limits_ms, num_requests, now_s)


def verdict(
    objectives: Sequence[Objective],
    recording: Recording,
    numbers: dict[str, Any],
    num_requests: int,
) -> dict[str, Any]:
    """Return whether the run kept what it promised, if it promised anything."""
    if not objectives:
        return {}
    return {"verdict": judged(objectives, recording, numbers, num_requests).to_dict()}
