"""Shared beginnings of prompts, which come before each request's own text.

A structure gives every prompt its leading segments; the request's own text follows and
is in no other prompt. Lengths add up: the prompt is as long as the shared text and its
own together, and a distribution of prompt lengths means the request's own text.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np

from workloads._checks import MAX_TOKENS, between, check_role, one_of, whole
from workloads.draws.by_position import Draws, check_quantile
from workloads.draws.counts import CountDistribution
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError
from workloads.lengths import LengthDistribution
from workloads.spec import RequestSpec, Segment
from workloads.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

MAX_TEXTS = 1_000_000
"""Most shared texts: system prompts, or documents of a corpus."""

Prefix = tuple[Segment, ...]


@runtime_checkable
class PrefixStructure(Protocol):
    """Which prompts begin alike."""

    @property
    def num_texts(self) -> int:
        """Different texts that prefixes are made of."""

    def prefixes(self, num_prompts: int, streams: Streams) -> Sequence[Prefix]:
        """Return the leading segments of each prompt.

        Parameters
        ----------
        num_prompts
            How many; the first ones of a longer answer are the same.
        streams
            The only randomness to use, under names that begin with ``prefixes``.

        Returns
        -------
        sequence of tuple of (segment_id, num_tokens)
            One a prompt. Ids are even: ``2 * k`` is text ``k``, below `num_texts`.
        """


@dataclass(frozen=True, slots=True)
class NoPrefixes:
    """Every prompt is text of its own."""

    @property
    def num_texts(self) -> int:
        return 0

    def prefixes(self, num_prompts: int, streams: Streams) -> Sequence[Prefix]:
        del streams
        return [()] * num_prompts


@dataclass(frozen=True, slots=True)
class SystemPrompts:
    """Groups of requests, such as the users of one application, share a prompt.

    Parameters
    ----------
    num_groups
        Different system prompts.
    tokens
        Their lengths, drawn once a group.
    zipf
        Exponent of their popularity: group ``g`` (from 1) has a share proportional to
        ``g ** -zipf``; 0 for equal shares.
    share
        Share of requests that have a system prompt at all.

    Raises
    ------
    WorkloadError
        If a parameter is out of range.
    """

    num_groups: int
    tokens: LengthDistribution
    zipf: float = 1.0
    share: float = 1.0

    def __post_init__(self) -> None:
        whole("num_groups", self.num_groups, 1, MAX_TEXTS, "give the system prompts")
        check_quantile("tokens", self.tokens, LengthDistribution)
        _check_zipf(self.zipf)
        between("share", self.share, 0, 1, "give a share of requests, such as 0.9")

    @property
    def num_texts(self) -> int:
        return self.num_groups

    def prefixes(self, num_prompts: int, streams: Streams) -> Sequence[Prefix]:
        draws = Draws(streams, 0, num_prompts)
        groups = _ranks(self.num_groups, self.zipf, draws.uniforms("prefixes/groups"))
        has_one = draws.uniforms("prefixes/share") < self.share
        lengths = _text_lengths(self.num_groups, self.tokens, streams)
        texts = [((2 * group, tokens),) for group, tokens in enumerate(lengths)]
        return [
            texts[group] if has else ()
            for group, has in zip(groups.tolist(), has_one.tolist(), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Documents:
    """Retrieval: a system prompt, some documents of a corpus, then the question.

    A prompt's documents are different from each other; each is drawn from those that
    are left, by popularity. Two prompts share a prefix as far as they begin with the
    same documents in the same order.

    Parameters
    ----------
    num_documents
        Size of the corpus.
    tokens
        Lengths of the documents, drawn once each.
    per_prompt
        How many documents a prompt has; never more than the corpus.
    zipf
        Exponent of their popularity, as in `SystemPrompts`.
    order
        ``"drawn"`` puts them as they were drawn, the popular ones mostly first, as a
        ranking does; ``"sorted"`` by their number in the corpus, which makes more
        prompts begin alike.
    system_tokens
        Length of the system prompt before them, the same for all; 0 for none.

    Raises
    ------
    WorkloadError
        If a parameter is out of range.
    """

    num_documents: int
    tokens: LengthDistribution
    per_prompt: CountDistribution
    zipf: float = 1.0
    order: Literal["drawn", "sorted"] = "drawn"
    system_tokens: int = 0

    def __post_init__(self) -> None:
        remedy = "give the size of the corpus"
        whole("num_documents", self.num_documents, 1, MAX_TEXTS - 1, remedy)
        check_quantile("tokens", self.tokens, LengthDistribution)
        check_quantile("per_prompt", self.per_prompt, CountDistribution)
        _check_zipf(self.zipf)
        remedy = "give a number of tokens, or 0 for none"
        whole("system_tokens", self.system_tokens, 0, MAX_TOKENS, remedy)
        one_of("order", self.order, ("drawn", "sorted"))

    @property
    def num_texts(self) -> int:
        return self.num_documents + 1

    def prefixes(self, num_prompts: int, streams: Streams) -> Sequence[Prefix]:
        draws = Draws(streams, 0, num_prompts)
        numbers = draws.counts("prefixes/per_prompt", self.per_prompt)
        most = int(numbers.max(initial=0))
        if most > self.num_documents:
            raise WorkloadError(
                f"per_prompt must be at most num_documents={self.num_documents}; got "
                f"{most}; enlarge the corpus, or give a max"
            )
        chosen = self._chosen(most, draws)
        lengths = _text_lengths(self.num_documents, self.tokens, streams)
        system = ((0, self.system_tokens),) if self.system_tokens else ()
        found = []
        for documents, number in zip(chosen.tolist(), numbers.tolist(), strict=True):
            kept = documents[:number]
            if self.order == "sorted":
                kept.sort()
            found.append((*system, *((2 * (d + 1), lengths[d]) for d in kept)))
        return found

    def _chosen(self, most: int, draws: Draws) -> NDArray[np.int64]:
        """Return different documents for each prompt, in the order drawn."""
        shares = zipf_shares(self.num_documents, self.zipf)
        chosen = np.empty((draws.num_draws, most), dtype=np.int64)
        for place in range(most):
            u = draws.uniforms(f"prefixes/document/{place}")
            chosen[:, place] = _another(shares, chosen[:, :place], u)
        return chosen


def zipf_shares(num_items: int, exponent: float) -> NDArray[np.float64]:
    """Return the shares of items by rank: proportional to ``rank ** -exponent``."""
    weights = np.arange(1, num_items + 1, dtype=np.float64) ** -exponent
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def _another(
    shares: NDArray[np.float64], taken: NDArray[np.int64], u: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Draw items that were not taken, each by its share of those left.

    A row a draw.
    """
    ends = np.cumsum(shares)
    # A point in the shares left, moved past each taken item that lies before it.
    point = u * (ends[-1] - shares[taken].sum(axis=1))
    for item in np.sort(taken, axis=1).T:
        is_behind = point >= ends[item] - shares[item]
        past = np.maximum(point + shares[item], ends[item])
        point = np.where(is_behind, past, point)
    behind = np.searchsorted(ends, point, side="right")
    found: NDArray[np.int64] = np.minimum(behind, len(shares) - 1).astype(np.int64)
    # Rounding may lead to a taken item, at the end of the corpus or beside a tiny one.
    for row in np.flatnonzero((taken == found[:, None]).any(axis=1)):
        free = np.setdiff1d(np.arange(len(shares)), taken[row])
        found[row] = free[np.abs(free - found[row]).argmin()]
    return found


def _ranks(
    num_items: int, exponent: float, u: NDArray[np.float64]
) -> NDArray[np.int64]:
    ends = np.cumsum(zipf_shares(num_items, exponent))
    found = np.searchsorted(ends, u, side="right")
    ranks: NDArray[np.int64] = np.minimum(found, num_items - 1).astype(np.int64)
    return ranks


def _text_lengths(
    num_texts: int, tokens: LengthDistribution, streams: Streams
) -> list[int]:
    drawn = Draws(streams, 0, num_texts).lengths("prefixes/tokens", tokens)
    lengths: list[int] = drawn.tolist()
    return lengths


def _check_zipf(zipf: float) -> None:
    between("zipf", zipf, 0, 10, "give an exponent: 0 for equal shares, 1 for Zipf's")


@dataclass(frozen=True, slots=True)
class PrefixedWorkload:
    """A workload of independent requests whose prompts begin alike.

    Parameters
    ----------
    workload
        Requests whose prompts are text of their own; it stays as it is, behind the
        shared text.
    prefixes
        Text that comes before it.
    seed
        Seed of its streams.

    Raises
    ------
    WorkloadError
        If the seed is no integer in range.
    """

    workload: Workload
    prefixes: PrefixStructure
    seed: int = 0

    def __post_init__(self) -> None:
        check_role("workload", self.workload, Workload, "requests(self)")
        check_prefixes(self.prefixes)
        Streams(self.seed)

    def requests(self) -> Sequence[RequestSpec]:
        requests = self.workload.requests()
        found = drawn_prefixes(self.prefixes, len(requests), Streams(self.seed))
        shift = 2 * self.prefixes.num_texts
        return [
            request._replace(prompt=(*prefix, *_moved(request.prompt, shift)))
            for request, prefix in zip(requests, found, strict=True)
        ]


def check_prefixes(prefixes: object) -> None:
    method = "prefixes(self, num_prompts, streams), and num_texts"
    check_role("prefixes", prefixes, PrefixStructure, method)


def drawn_prefixes(
    structure: PrefixStructure, num_prompts: int, streams: Streams
) -> Sequence[Prefix]:
    """Return the prefixes of prompts, held to the contract: users bring their own."""
    found = structure.prefixes(num_prompts, streams)
    owner = type(structure).__name__
    if len(found) != num_prompts:
        raise WorkloadError(
            f"{owner}.prefixes must give one a prompt; got {len(found)} for "
            f"{num_prompts}; mend it"
        )
    last = 2 * structure.num_texts
    for segment, tokens in {each for prefix in found for each in prefix}:
        if segment % 2 or not 0 <= segment < last or not 1 <= tokens <= MAX_TOKENS:
            raise WorkloadError(
                f"{owner}.prefixes must use even segments below {last}, of 1 to "
                f"{MAX_TOKENS} tokens; got ({segment}, {tokens}); mend it"
            )
    return found


def _moved(prompt: tuple[Segment, ...], shift: int) -> tuple[Segment, ...]:
    """Return a prompt whose own texts have numbers behind those of the shared ones."""
    return tuple([(s if s % 2 else s + shift, tokens) for s, tokens in prompt])


PREFIXES: Mapping[str, type[PrefixStructure]] = MappingProxyType(
    {"documents": Documents, "none": NoPrefixes, "system_prompts": SystemPrompts}
)
"""Structures of prefixes by the ``kind`` of a configuration."""
