"""The engine's requests, made of a workload's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from math import nan
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from cache.prompt_tree import PromptTree
from cache.tokens import OwnTokens, RunTokens, SegmentTokens
from sim.scheduler.request import Request, RequestStatus
from workloads.requests.columns import RequestColumns, largest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from cache.tokens import TokenRuns
    from workloads.spec import RequestSpec

_CHUNK = 4096
_WAITING = RequestStatus.WAITING

Row = TypeVar("Row")
_Lengths = tuple[int, float, int, int, int | None, int]


class RequestFactory:
    """Turns a workload's requests into the engine's.

    Requests are numbered in the order in which they are made, which is the order of
    their arrival.

    Parameters
    ----------
    max_model_len
        Longest sequence of the engine; bounds the output where the client states no
        ``max_tokens``.
    tree
        Of their prompts, if each shares text by the segment; see `SegmentTokens`.
    """

    def __init__(self, max_model_len: int, tree: PromptTree | None = None) -> None:
        self.max_model_len = max_model_len
        self._tree = tree
        self._next_id = 0

    def group(self, spec: RequestSpec) -> Request:
        """Return one request for all continuations of the prompt."""
        request = self._request(spec, spec.output_segment)
        request.num_sequences = spec.num_sequences
        request.use_beam_search = spec.beam_width > 1
        request.beam_seed = spec.request_id
        request.beam_percent = round(100 * spec.beam_switch_share)
        return request

    def samples(self, spec: RequestSpec) -> list[Request]:
        """Return a request for each sample, as V1 fans them out.

        Source: vLLM 0.11.2, ``vllm/v1/engine/parallel_sampling.py``
        (`ParentRequest`).
        """
        first = self._request(spec, spec.output_segment)
        if spec.best_of == 1:
            return [first]
        return [first] + [
            self._request(spec, first.tokens.output(branch, 0)[0])  # type: ignore[index]
            for branch in range(1, spec.best_of)
        ]

    def stream(self, specs: Iterable[RequestSpec]) -> Iterator[Request]:
        """Yield the samples of each in turn."""
        for spec in specs:
            if spec.best_of == 1:
                yield self._request(spec, spec.output_segment)
            else:
                yield from self.samples(spec)

    def beam_step(
        self, spec: RequestSpec, runs: TokenRuns, arrival_s: float
    ) -> Request:
        """Return the request that asks for the next token of one beam."""
        length = len(runs)
        request = Request(
            request_id=self._next_id,
            arrival_s=arrival_s,
            num_prompt_tokens=length,
            tokens=RunTokens(runs.copy()),
            max_num_tokens=min(self.max_model_len, length + 1),
            oracle_num_tokens=length + 1,
            priority=spec.priority,
            max_output_tokens=1,
            parent_id=spec.request_id,
        )
        request.beam_seed = spec.request_id
        request.beam_percent = round(100 * spec.beam_switch_share)
        self._next_id += 1
        return request

    def _request(self, spec: RequestSpec, output_segment: int) -> Request:
        num_prompt_tokens = spec.num_prompt_tokens
        max_num_tokens = self.max_model_len
        output_limit = spec.output_limit
        if output_limit is not None:
            max_num_tokens = min(max_num_tokens, num_prompt_tokens + output_limit)
        request_id = self._next_id
        self._next_id = request_id + 1
        return Request(
            request_id=request_id,
            arrival_s=spec.arrival_s,
            num_prompt_tokens=num_prompt_tokens,
            tokens=SegmentTokens(spec.prompt, output_segment, self._tree),
            max_num_tokens=max_num_tokens,
            oracle_num_tokens=num_prompt_tokens + spec.num_output_tokens,
            priority=spec.priority,
            max_output_tokens=output_limit,
            parent_id=spec.request_id,
        )


def tree_of(specs: Sequence[RequestSpec]) -> PromptTree | None:
    """Return a tree for the prompts of a workload, if its requests may share text.

    Without one where beams ask: their prompts are given in pieces.
    """
    if isinstance(specs, RequestColumns) or largest(specs, "beam_width") > 1:
        return None
    return PromptTree()


class ColumnRequest(Request):
    """A request made of a row of columns, in a fifth of the time.

    What a scheduler with a decode clock never changes is its class's; to write any of
    these raises.
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
    kv_transfer_params = None

    @property
    def tokens(self) -> OwnTokens:  # type: ignore[override]
        """Identity of prompt and output; made anew when it is asked for."""
        segment = 2 * self.text
        return OwnTokens(((segment, self.num_prompt_tokens),), segment + 1)


@dataclass(frozen=True)
class LateRequests(Generic[Row]):
    """Requests of a workload in order, each made when it is needed.

    A request is some 650 bytes in a dozen places, which are no longer at hand when it
    is made long before an engine takes it in; a row is a few numbers.

    Parameters
    ----------
    rows
        What each is made of, in order of arrival; to be gone through once.
    make
        From a row to its request.
    """

    rows: Iterable[Row]
    make: Callable[[Row], Request]

    def __iter__(self) -> Iterator[Request]:
        return map(self.make, self.rows)


def requests_of(
    factory: RequestFactory, specs: Sequence[RequestSpec]
) -> LateRequests[Any]:
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
        return _of_columns(specs, factory.max_model_len)
    return LateRequests(factory.stream(specs), _itself)


def _itself(request: Request) -> Request:
    return request


def _of_columns(columns: RequestColumns, max_model_len: int) -> LateRequests[_Lengths]:
    """Return the requests of `RequestFactory.stream`; ids count from 0."""
    new = ColumnRequest.__new__
    priority = columns.priority
    first_parent_id, first_text = columns.first_request_id, columns.first_text
    assert isinstance(priority, int)

    # Most workloads count from 0; a number more is an object more.
    are_first = not (first_parent_id or first_text)

    def make(row: _Lengths) -> ColumnRequest:
        index, arrival_s, num_prompt_tokens, num_output_tokens, limit, longest = row
        request = new(ColumnRequest)
        request.request_id = index
        request.arrival_s = arrival_s
        request.num_prompt_tokens = request.num_tokens = num_prompt_tokens
        request.text = index if are_first else first_text + index
        request.max_num_tokens = longest
        request.oracle_num_tokens = num_prompt_tokens + num_output_tokens
        request.priority = priority
        request.max_output_tokens = limit
        request.parent_id = index if are_first else first_parent_id + index
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
        request.on_first_token = None
        request.ignore_eos = False
        request.streaks = []
        request.table = None
        request.order = 0
        request.due_step = -1
        return request

    parts = (
        _rows(columns.part(first, first + _CHUNK), max_model_len, first)
        for first in range(0, len(columns), _CHUNK)
    )
    return LateRequests(chain.from_iterable(parts), make)


def _rows(
    columns: RequestColumns, max_model_len: int, first: int
) -> Iterator[_Lengths]:
    """Yield number, arrival, both lengths, `output_limit` and longest sequence."""
    prompts, limits = columns.num_prompt_tokens, columns.output_limits()
    most = limits.copy()
    most[np.equal(limits, np.array(None))] = max_model_len
    longest = np.minimum(prompts + most.astype(np.int64), max_model_len)
    every = columns.arrival_s, prompts, columns.num_output_tokens, limits
    most_of_all: Iterable[int] = longest.tolist()
    if (longest == max_model_len).all():
        most_of_all = repeat(max_model_len, len(columns))
    numbers = range(first, first + len(columns))
    lists = (column.tolist() for column in every)
    return zip(numbers, *lists, most_of_all, strict=True)
