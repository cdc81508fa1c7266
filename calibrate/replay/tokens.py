"""Which token lies where: the pool as the schedule says it is filled.

A copy of the pool that holds token ids instead of keys and values. Each step writes its
tokens into the slots of its block tables, and moves blocks as the GPU does; so the
context of every query, read through its table, must be the sequence's own tokens.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sim.config.tables import load_config
from sim.errors import UserError
from sim.results.folder import read_table
from sim.simulation.workload import make_workload

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from calibrate.replay.log import Facts, Query, Step
    from workloads.spec import RequestSpec

    Ids = NDArray[np.int64]

_EMPTY = -1


class ReplayError(UserError):
    """A schedule that contradicts itself."""


class Texts(Protocol):
    """Tokens of requests and of their answers: ids from 0 to 2**62."""

    def prompt(self, request: str) -> Ids | None:
        """Return a prompt; None where only the blocks know it."""

    def output(self, query: Query, first: int, end: int) -> Ids:
        """Return the tokens of a sequence at these positions, behind its prompt."""


def mixed(stream: int, first: int, end: int) -> Ids:
    """Return ids that differ by stream and offset."""
    at = np.arange(first + 1, end + 1, dtype=np.uint64)
    spread = at * np.uint64(0x9E3779B97F4A7C15)
    spread ^= np.uint64((stream + 1) * 0xBF58476D1CE4E5B9 % 2**64)
    spread *= np.uint64(0x94D049BB133111EB)
    return (spread >> np.uint64(2)).astype(np.int64)


class MadeUpTexts:
    """Texts of a schedule whose workload is not known."""

    def prompt(self, request: str) -> Ids | None:
        del request
        return None

    def output(self, query: Query, first: int, end: int) -> Ids:
        return mixed(zlib.crc32(query.name.encode()), first, end)


class WorkloadTexts:
    """Texts of the requests that a run served, by id of the request as text."""

    def __init__(self, specs: Mapping[str, RequestSpec]) -> None:
        self._specs = specs
        self._own = MadeUpTexts()

    def prompt(self, request: str) -> Ids | None:
        spec = self._specs[request]
        parts = [mixed(segment, 0, count) for segment, count in spec.prompt]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def output(self, query: Query, first: int, end: int) -> Ids:
        spec = self._specs[query.request]
        if spec.num_sequences > 1:
            return self._own.output(query, first, end)
        before = spec.num_prompt_tokens
        return mixed(spec.output_segment, first - before, end - before)


class TokenPool:
    """Token ids of all blocks, on the GPU and on the CPU.

    Where `texts` do not know it, a sequence that begins with a context (a hit in the
    prefix cache, or a fork) continues what its blocks hold. A beam that takes over
    another's text is none that can be followed.
    """

    def __init__(self, facts: Facts, texts: Texts) -> None:
        size = facts.block_size
        self._gpu = np.full((facts.num_gpu_blocks, size), _EMPTY, np.int64)
        self._cpu = np.full((facts.num_cpu_blocks, size), _EMPTY, np.int64)
        self._source = texts
        self._texts: dict[str, Ids] = {}

    def move(self, step: Step) -> None:
        """Swap in, swap out, copy: the order of the workers."""
        for first, second in step.swap_in:
            self._gpu[second] = self._cpu[first]
        for first, second in step.swap_out:
            self._cpu[second] = self._gpu[first]
        for first, second in step.copies:
            self._gpu[second] = self._gpu[first]

    def write(self, step: Step) -> list[Ids]:
        """Put the step's tokens into their slots; return those of each query."""
        written = [self._write(query) for query in step.queries]
        for query in step.queries:
            self._check(query, step.number)
        return written

    def text(self, name: str) -> Ids:
        """Return all tokens of a sequence so far."""
        return self._texts[name]

    def forget(self, name: str) -> None:
        self._texts.pop(name, None)

    def _slots(self, query: Query, first: int) -> tuple[Ids, Ids]:
        """Return block and place of each position from `first` on."""
        size = self._gpu.shape[1]
        at = np.arange(first, query.context)
        table = np.asarray(query.table, dtype=np.int64)
        return table[at // size], at % size

    def _write(self, query: Query) -> Ids:
        first = query.context - query.num_tokens
        known = self._texts.get(query.name)
        if known is None:
            known = self._begun(query, first)
        if len(known) < query.context:
            more = self._source.output(query, len(known), query.context)
            known = np.concatenate([known, more])
        self._texts[query.name] = known
        tokens = known[first : query.context]
        self._gpu[self._slots(query, first)] = tokens
        return tokens

    def _begun(self, query: Query, first: int) -> Ids:
        """Return the known tokens of a sequence that was not seen before."""
        prompt = self._source.prompt(query.request)
        known = np.zeros(0, np.int64) if prompt is None else prompt
        if len(known) >= first:
            return known
        held = self._gpu[self._slots(query, 0)][len(known) : first]
        return np.concatenate([known, held])

    def _check(self, query: Query, number: int) -> None:
        held = self._gpu[self._slots(query, 0)]
        wrong = np.flatnonzero(held != self._texts[query.name][: query.context])
        if len(wrong) or (held == _EMPTY).any():
            at = int(wrong[0]) if len(wrong) else int(np.argmax(held == _EMPTY))
            block = query.table[at // self._gpu.shape[1]]
            raise ReplayError(
                f"step {number}: block {block} holds another token than {query.name}'s "
                f"own at position {at}; the schedule moves or shares blocks wrongly, "
                "or is of a beam search, which cannot be followed"
            )


def texts_beside(place: Path) -> Texts:
    """Return the texts of a run's requests; made-up texts beside a lone schedule."""
    config_path, requests_path = place / "config.yaml", place / "requests.parquet"
    if not (config_path.is_file() and requests_path.is_file()):
        return MadeUpTexts()
    config = load_config(config_path)
    specs = {
        spec.request_id: spec
        for spec in make_workload(config.workload, config.seed).requests()
    }
    columns = read_table(requests_path)
    pairs = zip(columns["request_id"], columns["parent_id"], strict=True)
    return WorkloadTexts({str(request): specs[parent] for request, parent in pairs})
