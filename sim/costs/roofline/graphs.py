"""CUDA graphs: the sizes that a release captures, to which it fills steps up."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sim.costs.sources import pieces_told
from sim.hardware.graph_sizes import strided_sizes
from sim.scheduler.v1.dialect import dialect_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.roofline.parameters import RooflineParameters
    from sim.scheduler.generation import GraphRule

_STRIDE: Final = 8
_MAX_NUM_SEQS: Final = 256
"""Of every release where nothing else is said; V1 has more on large GPUs, which
changes no size."""
_FOLLOWS_SEQS_MINOR: Final = 10
"""Since 0.10 sizes end at twice the most sequences; before, whatever these are."""
_BUDGET_MINOR: Final = 21
"""Since 0.21 the most tokens of a step are a size, if small enough; not in 0.20."""
_SEQS_MINOR: Final = 29
"""Since 0.29 the most sequences are one, too; not in 0.28."""
_NARROW: Final = ("0.11.0", "0.11.1")
_WHOLE_DECODES_MINOR: Final = 11
"""Since 0.11 decodes alone are one graph by default; V1 cut them, too, before."""


def rule_of(rule: GraphRule, engine_version: str) -> GraphRule:
    """Return the rule of a release.

    Pieces of a step end at each attention, of which the cache write was part before it
    became an operation of its own (vLLM 25954): a layer is launched as a graph, a cache
    write and an attention (FlashAttention's own metadata are made once a step).

    Source: vLLM 0.30 ``config/vllm.py`` (`cudagraph_mode`), ``config/compilation.py``
    (`splitting_ops`), ``model_executor/layers/attention/attention.py``; the notes of
    release 0.11.0, which made ``FULL_AND_PIECEWISE`` the default.
    """
    if not rule.piece_launches:
        return rule
    minor = dialect_of(engine_version).minor
    return replace(rule, has_whole_decodes=minor >= _WHOLE_DECODES_MINOR)


def release_sizes(
    rule: GraphRule,
    engine_version: str,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
) -> tuple[int, ...]:
    """Return the tokens of the graphs that a release captures, in ascending order.

    Before V1 only decodes are graphs; up to 0.11.1 sizes lie 8 apart throughout. On
    GPUs of the Blackwell data centre family 0.28 and later go on to 1,024, which is
    left out.

    Source: vLLM 0.2.7 and 0.7.3 ``worker/model_runner.py`` and ``config.py``; 0.8.5,
    0.9.2 and 0.10.0 ``config.py``; 0.11.0, 0.11.2, 0.12 to 0.15.1 and 0.19 to 0.33
    ``config/vllm.py`` (`_set_cudagraph_sizes`). 0.16 to 0.18, between two that agree,
    were not read.
    """
    seqs = max_num_seqs or _MAX_NUM_SEQS
    if rule.only_decodes:
        most = min(-(-seqs // _STRIDE) * _STRIDE, rule.max_tokens)
        return strided_sizes(most, is_narrow=True)
    budget = max_num_batched_tokens or rule.max_tokens
    minor = dialect_of(engine_version).minor
    most = min(rule.max_tokens, budget)
    if minor >= _FOLLOWS_SEQS_MINOR:
        most = min(most, 2 * seqs)
    is_narrow = minor < 11 or engine_version in _NARROW
    sizes = set(strided_sizes(most, is_narrow=is_narrow))
    if minor >= _BUDGET_MINOR and budget <= most:
        sizes.add(budget)
    if minor >= _SEQS_MINOR and seqs <= most:
        sizes.add(seqs)
    return tuple(sorted(sizes))


def padded(sizes: Sequence[int], num_tokens: int) -> int:
    """Return the tokens that a step computes: the next size, or its own beyond all."""
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else num_tokens


def pieces_s(cost: RooflineParameters, num_tokens: int) -> float:
    """Return seconds more of the GPU where a graph of so many tokens is in pieces."""
    if not cost.graph_rule.cuts(num_tokens):
        return 0.0
    layer_s = float(pieces_told(cost.piece_latency_s)["value"])
    return cost.model.num_hidden_layers * layer_s
