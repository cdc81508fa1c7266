"""Which whole steps are CUDA graphs: of how many tokens, and in how many pieces."""

from __future__ import annotations

from typing import Final

from sim.scheduler.generation import GraphRule

GRAPH_SIZES: Final = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Tokens of the graphs that vLLM captures by default; steps are filled up to them."""
GRAPH_TOKENS: Final = GRAPH_SIZES[-1]
PIECE_LAUNCHES: Final = 2
"""For each layer of a step with prompts: a piece of a graph, and attention."""


def graph_rule(uses_graphs: bool) -> GraphRule:
    """Return which whole steps `calibrate.replay` runs as graphs."""
    if not uses_graphs:
        return GraphRule()
    return GraphRule(GRAPH_TOKENS, only_decodes=False, piece_launches=PIECE_LAUNCHES)
