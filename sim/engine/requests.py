"""Requests of the fast path, made of columns without a spec each."""

from __future__ import annotations

from itertools import chain
from math import nan
from typing import TYPE_CHECKING, Any

from cache.tokens import SegmentTokens
from sim.scheduler.request import Request, RequestStatus
from workloads.columns import RequestColumns, largest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from sim.engine.clients import RequestFactory
    from workloads.spec import RequestSpec

_CHUNK = 4096
_WAITING = RequestStatus.WAITING


class FastRequest(Request):
    """A request with a text of its own, and without what only other paths need.

    What the fast path never changes is its class's: a request is made in a fifth of the
    time. To write any of these to it raises.
    """

    __slots__ = ("text",)

    text: int
    """The ``i`` of its segments ``2 * i`` and ``2 * i + 1``; see `RequestColumns`."""

    block_table: Any = ()
    block_hashes: Any = ()
    num_cached_blocks = 0
    num_quiet_tokens = 0
    num_sequences = 1
    use_beam_search = False
    oracle_branch_num_tokens = ()
    beam_seed = 0
    beam_percent = 0
    num_generated_tokens = 0
    _streak_step = -1
    _streak_num_tokens = 0

    @property
    def tokens(self) -> SegmentTokens:  # type: ignore[override]
        """Identity of prompt and output; made anew when it is asked for."""
        segment = 2 * self.text
        return SegmentTokens(((segment, self.num_prompt_tokens),), segment + 1)


def requests_of(
    factory: RequestFactory, specs: Sequence[RequestSpec]
) -> Iterable[Request]:
    """Return the requests of a workload in order, each made when it is drawn.

    Parameters
    ----------
    factory
        Makes them, but for those that are columns of requests of one sample: these
        would be the same.
    specs
        The workload.
    """
    if (
        isinstance(specs, RequestColumns)
        and isinstance(specs.priority, int)
        and len(specs)
        and largest(specs, "best_of") == largest(specs, "beam_width") == 1
    ):
        return _made(specs, factory.max_model_len)
    return factory.stream(specs)


def _made(columns: RequestColumns, max_model_len: int) -> Iterator[FastRequest]:
    """Yield what `RequestFactory.stream` would; ids count from 0."""
    new = FastRequest.__new__
    priority, max_tokens = columns.priority, columns.max_tokens
    first_parent_id, first_text = columns.first_request_id, columns.first_text
    assert isinstance(priority, int)
    most = max_model_len if max_tokens is None else max_tokens  # of output
    every = columns.arrival_s, columns.num_prompt_tokens, columns.num_output_tokens
    rows = chain.from_iterable(
        zip(*(column[first : first + _CHUNK].tolist() for column in every), strict=True)
        for first in range(0, len(columns), _CHUNK)
    )
    for index, (arrival_s, num_prompt_tokens, num_output_tokens) in enumerate(rows):
        request = new(FastRequest)
        request.request_id = index
        request.arrival_s = arrival_s
        request.num_prompt_tokens = request.num_tokens = num_prompt_tokens
        request.text = first_text + index
        longest = num_prompt_tokens + most
        request.max_num_tokens = longest if longest < max_model_len else max_model_len
        request.oracle_num_tokens = num_prompt_tokens + num_output_tokens
        request.priority = priority
        request.max_output_tokens = max_tokens
        request.parent_id = first_parent_id + index
        request.status = _WAITING
        request.reason = ""
        request.num_computed_tokens = 0
        request.first_scheduled_s = nan
        request.first_token_s = nan
        request.finish_s = nan
        request.num_preemptions = 0
        request.num_cached_tokens = 0
        request.num_recompute_tokens = 0
        request.num_recomputed_tokens = 0
        request.on_end = None
        request.streaks = []
        request.table = None
        request.due_step = -1
        yield request
