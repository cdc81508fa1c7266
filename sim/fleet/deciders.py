"""Deciders: whether a prompt is computed by a prefiller, or by its decoder itself.

A decider is a class with `is_remote(prospect)`. Those that look at prefixes, or at the
load of prefillers, need routers that know them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, runtime_checkable

from sim.fleet.checks import at_least

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True, slots=True)
class Prospect:
    """The facts that a decider may use; callables cost a look at an index.

    Parameters
    ----------
    num_prompt_tokens
        Length of its prompt.
    num_cached_tokens
        Returns the tokens that the decoders' router believes cached at the chosen one.
    most_cached_tokens
        The same for the decoder that has most.
    num_active_tokens
        Returns the prompt tokens in flight at the prefiller that would be chosen.
    """

    num_prompt_tokens: int
    num_cached_tokens: Callable[[], int]
    most_cached_tokens: Callable[[], int]
    num_active_tokens: Callable[[], float]


@runtime_checkable
class Decider(Protocol):
    """Decides whether a prefiller computes a prompt."""

    needs_prefixes: ClassVar[bool]
    """Whether it uses the tokens that decoders have cached."""
    needs_decoder: ClassVar[bool]
    """Whether the decoder must have been chosen before."""
    needs_load: ClassVar[bool]
    """Whether it uses the load of prefillers."""

    def is_remote(self, prospect: Prospect) -> bool:
        """Return whether a prefiller computes the prompt."""
        ...


class Always:
    """A prefiller computes every prompt."""

    needs_prefixes: ClassVar = False
    needs_decoder: ClassVar = False
    needs_load: ClassVar = False

    def is_remote(self, prospect: Prospect) -> bool:
        del prospect
        return True


class PrefixBased:
    """A prefiller computes prompts of which the chosen decoder lacks enough.

    Parameters
    ----------
    non_cached_tokens
        So many tokens at least; with 0, the release's default, no prompt is computed
        remotely.
    prompt_tokens
        Least length of such a prompt.

    Notes
    -----
    Source: llm-d-router of August 2026, its decider ``prefix-based-pd-decider``.
    """

    needs_prefixes: ClassVar = True
    needs_decoder: ClassVar = True
    needs_load: ClassVar = False

    def __init__(self, non_cached_tokens: int = 0, prompt_tokens: int = 0) -> None:
        at_least(0, non_cached_tokens=non_cached_tokens, prompt_tokens=prompt_tokens)
        self.non_cached_tokens = non_cached_tokens
        self.prompt_tokens = prompt_tokens

    def is_remote(self, prospect: Prospect) -> bool:
        least, length = self.non_cached_tokens, prospect.num_prompt_tokens
        if not least or length < max(least, self.prompt_tokens):
            return False
        return length - prospect.num_cached_tokens() >= least


class IslBounding:
    """A decoder computes a prompt itself of which little is not cached.

    Parameters
    ----------
    max_tokens, max_share
        The tokens not cached at the decoder that has most must be less than
        `max_tokens`, and less than `max_share` of the prompt.

    Notes
    -----
    Source: Dynamo 1.6.1, ``lib/kv-router/src/conditional_disagg.rs``.
    """

    needs_prefixes: ClassVar = True
    needs_decoder: ClassVar = False
    needs_load: ClassVar = False

    def __init__(self, max_tokens: int = 2048, max_share: float = 0.7) -> None:
        at_least(0, max_tokens=max_tokens, max_share=max_share)
        self.max_tokens = max_tokens
        self.max_share = max_share

    def is_remote(self, prospect: Prospect) -> bool:
        length = prospect.num_prompt_tokens
        rest = length - prospect.most_cached_tokens()
        return not (rest < self.max_tokens and rest / length < self.max_share)


class PrefillLoad:
    """A decoder computes prompts itself while the prefiller is busy.

    Parameters
    ----------
    max_active_tokens
        A prefiller with more prompt tokens in flight is busy; the release takes a
        multiple of max_num_batched_tokens.

    Notes
    -----
    Source: as of `IslBounding`.
    """

    needs_prefixes: ClassVar = False
    needs_decoder: ClassVar = False
    needs_load: ClassVar = True

    def __init__(self, max_active_tokens: float) -> None:
        at_least(0, max_active_tokens=max_active_tokens)
        self.max_active_tokens = max_active_tokens

    def is_remote(self, prospect: Prospect) -> bool:
        return prospect.num_active_tokens() <= self.max_active_tokens


class IslOrLoad:
    """A decoder computes prompts itself for either reason, `IslBounding` or load.

    Parameters
    ----------
    max_active_tokens
        See `PrefillLoad`.
    max_tokens, max_share
        See `IslBounding`.
    """

    needs_prefixes: ClassVar = True
    needs_decoder: ClassVar = False
    needs_load: ClassVar = True

    def __init__(
        self, max_active_tokens: float, max_tokens: int = 2048, max_share: float = 0.7
    ) -> None:
        self._reasons: tuple[Decider, Decider] = (
            IslBounding(max_tokens, max_share),
            PrefillLoad(max_active_tokens),
        )

    def is_remote(self, prospect: Prospect) -> bool:
        return all(each.is_remote(prospect) for each in self._reasons)


DECIDERS: Final[Mapping[str, type]] = MappingProxyType(
    {
        "always": Always,
        "prefix_based": PrefixBased,
        "isl_bounding": IslBounding,
        "prefill_load": PrefillLoad,
        "isl_or_load": IslOrLoad,
    }
)
"""Built-in deciders by kind."""
