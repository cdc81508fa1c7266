"""Many requests at once, made in C: rows are many, and most fields are defaults."""

from __future__ import annotations

from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from workloads.spec import RequestSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from workloads.spec import Segment

# What RequestSpec._make does, without its Python code.
_made: Callable[[Iterable[Any]], RequestSpec] = partial(tuple.__new__, RequestSpec)

_DEFAULTS = RequestSpec(0, 0.0, (), 1, 1)


def sharing_specs(
    times_s: Sequence[float],
    prompts: Iterable[tuple[Segment, ...]],
    num_output_tokens: Iterable[int],
    session_ids: Iterable[int | None],
) -> Iterator[RequestSpec]:
    """Return requests in the order given, which wait for no other.

    Parameters
    ----------
    times_s
        Arrivals in seconds, never falling, the first 0.
    prompts, num_output_tokens, session_ids
        Fields of each request.
    """
    num = len(times_s)
    fields = (
        range(num),
        times_s,
        prompts,
        num_output_tokens,
        range(1, 2 * num, 2),
        *map(repeat, _DEFAULTS[5:11]),
        session_ids,
        repeat(None),
        repeat(0.0),
    )
    # Not strict: what is the same for all repeats without end.
    return map(_made, zip(*fields, strict=False))


def own_prompts(lengths: Iterable[int]) -> Iterator[tuple[Segment, ...]]:
    """Return prompts of these lengths, each text of its own."""
    return (((2 * i, num_tokens),) for i, num_tokens in enumerate(lengths))
