"""Look-ups of waiting heads in a CPU tier, over all KV cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cache.tiers.places import Lot
from sim.scheduler.v1.connectors.offload import limit_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cache.tiers import CPUTier, TierHierarchy
    from sim.scheduler.v1.connectors.base import TransferJob
    from sim.scheduler.v1.connectors.offload import GroupOffload, Offload
    from sim.scheduler.v1.connectors.offload_groups import OffloadGroup, OffloadGroups


class OffloadLookup:
    """Finds how much of a head the tier has, in all groups together.

    Groups of full attention are asked for the longest prefix, then those with windows
    for the last window in it. Each may shorten the hit, which others must confirm; so
    they are asked again until the hit stays.

    Parameters
    ----------
    groups
        Of the engine.
    tier, behind
        The host's tier, and those behind it, or None.

    Notes
    -----
    Source: vLLM 0.33,
    ``vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``
    (`_lookup_complete_chunks`).
    """

    def __init__(
        self, groups: OffloadGroups, tier: CPUTier, behind: TierHierarchy | None
    ) -> None:
        self._groups = groups
        self._tier = tier
        self._behind = behind

    def num_found(
        self, offload: Offload, num_local: int, loading: Iterable[TransferJob]
    ) -> int | None:
        """Return how many tokens beyond the local hit can be loaded, if it is known.

        Parameters
        ----------
        offload, num_local
            The head, and its local hit.
        loading
            Loads of others, whose end it is to wait for.
        """
        num_tokens = self._num_there(offload, num_local)
        if num_tokens and any(
            _has_in_common(job, lot)
            for job in loading
            for lot in self._lots(offload, num_local, num_tokens)
        ):
            return None
        return num_tokens

    def _num_there(self, offload: Offload, num_local: int) -> int | None:
        request, every = offload.request, self._groups.in_order
        windows = self._groups.with_windows
        limit = limit_of(request, "max_load_tokens")
        most = request.num_tokens if limit is None else num_local + limit
        # A window of the last token is computed for its output.
        most = min(most, request.num_tokens) - bool(windows)
        num_found, waits = 0, False
        pending: Sequence[OffloadGroup] = every
        while pending:
            asked, pending, has_window = pending, (), False
            for group in asked:
                own, size = offload.groups[group.number], group.chunk_tokens
                own.know_keys(request.num_tokens)
                most = min(most, own.keys.stop * size)
                if limit is not None:
                    most -= most % size
                if most - num_local < size:
                    return 0
                first = num_local // size
                num_chunks, is_ready = self._found(offload, own, first, most)
                if is_ready:  # as it is where nothing is found
                    most = min(most, (first + num_chunks) * size)
                else:
                    waits = True
                if most - num_local < size:
                    return 0  # a part of a chunk is not loaded alone
                if most - num_local < num_found:
                    if waits:
                        waits, pending = False, every
                    elif has_window and not pending:
                        pending = windows
                has_window |= group.has_window
                num_found = most - num_local
        return None if waits else num_found

    def _found(
        self, offload: Offload, own: GroupOffload, first: int, most: int
    ) -> tuple[int, bool]:
        """Return how many chunks of a group are found, and whether none is written."""
        group, keys = own.group, own.keys
        stop = min(-(-most // group.chunk_tokens), keys.stop)
        if group.has_window:
            end = min(most, stop * group.chunk_tokens)
            return self._tier.last_window(
                *(keys, first, stop), group.window_chunks, group.loaded_chunks(end)
            )
        if self._behind is not None:
            return self._behind.longest_prefix(keys, offload.access, first, stop)
        return self._tier.longest_prefix(keys, first, stop)

    def _lots(self, offload: Offload, num_local: int, num_tokens: int) -> Iterable[Lot]:
        """Return the chunks that a hit consists of."""
        num_cached = num_local + num_tokens
        for own in offload.groups:
            group = own.group
            first = num_local // group.chunk_tokens
            stop = min(-(-num_cached // group.chunk_tokens), own.keys.stop)
            if group.has_window:
                first = max(first, stop - group.loaded_chunks(num_cached))
            yield Lot(own.keys, first, stop)


def _has_in_common(job: TransferJob, lot: Lot) -> bool:
    """Whether a job has some chunks of a lot."""
    for other in job.lots:
        if other.keys.group == lot.keys.group:
            # Keys chain: two prompts that part never meet again.
            at = max(lot.first, other.first)
            if at < min(lot.stop, other.stop) and lot.keys.has_in_common(
                at, other.keys
            ):
                return True
    return False
