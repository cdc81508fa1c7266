"""Prompts that begin with what was said before."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workloads.spec import RequestSpec, Segment


def extended(
    previous: RequestSpec, new_segment: int, num_tokens: int
) -> tuple[Segment, ...]:
    """Return a prompt of `num_tokens`: the prompt before, its answer, and new text.

    Parameters
    ----------
    previous
        The request before.
    new_segment
        Id of the new text.
    num_tokens
        Length of the prompt; a short one quotes the beginning of what was said.
    """
    prompt: list[Segment] = []
    answer = (previous.output_segment, previous.num_output_tokens)
    for segment, num_segment_tokens in (*previous.prompt, answer):
        num_quoted = min(num_segment_tokens, num_tokens)
        if num_quoted:
            prompt.append((segment, num_quoted))
        num_tokens -= num_quoted
    if num_tokens:
        prompt.append((new_segment, num_tokens))
    return tuple(prompt)
