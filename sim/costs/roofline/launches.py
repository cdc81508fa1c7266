"""Steps whose kernels the host launches: without graphs, or between their pieces."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sim.costs.base import StepCost
from sim.costs.parts import HI, LO, distinct_counts, late_s, looked_up
from sim.costs.roofline import RooflineCost

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.costs.parts import Columns, Parts, SteadyDecodes
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.scheduler.generation import GraphRule

_HOST: Final = StepCost._fields.index("host_s")

LAYER_LAUNCHES: Final = 10
"""Kernels of a layer: qkv, rope, cache write, attention, o, two norms, gate and up,
activation, down. A norm of queries and keys is one more (`num_launches`)."""
EXPERT_LAUNCHES: Final = 5
"""More in a layer of routed experts: eight kernels (router, choice of experts, their
tokens counted, and sorted, two products, activation, weighted sum) where an MLP has
three. Source: vLLM 0.26, ``fused_moe`` (`select_experts`, `moe_align_block_size`,
`TritonExperts.apply`)."""
SHARED_EXPERT_LAUNCHES: Final = 3
"""More where experts are shared: an MLP beside the routed ones."""
OTHER_LAUNCHES: Final = 4
"""Embedding, last norm, output projection, sampler."""
LAUNCH_S: Final = 26e-6
"""The host's time for a kernel, or a piece of a graph, Python between them included.

Of steps that the GPU does not bound, 1.5 ms for the rest of the host's work taken off
where an engine ran them: in eager mode 26 us (Llama-3.1-8B on an H100, no engine), 22
and 26 (the same in vLLM's V0 and V1, pull request 10058), 19 and 15 (OPT-125M there),
26 (Voxtral 4B on an H200, 51167); of graphs in pieces at most 25 (the last again), and
12 to 25 where 0.5 to 1 ms are the rest (OPT-125M on an H100, 10733). Slow hosts take
more: 73 (two A800 that others used, vllm-omni 7960), 95 (a virtual machine with an
H200, ours), 80 to 160 (another with an H100), 104 to 110 (pieces of Qwen3-30B-A3B on an
H100, 25444)."""
LAUNCH_INTERVAL_S: Final = [12e-6, 160e-6]
LAUNCH_SOURCE: Final = (
    "six steps in eager mode and two of graphs in pieces, of four sources: 12 to 26 "
    "us; four slow hosts take 73 to 160"
)


def num_launches(model: ModelArchitecture, tensor_parallel_size: int) -> int:
    """Return the kernels of a step."""
    per_layer = LAYER_LAUNCHES + 2 * (tensor_parallel_size > 1)
    per_experts = EXPERT_LAUNCHES
    if model.shared_expert_size:
        per_experts += SHARED_EXPERT_LAUNCHES
    layers = per_layer * model.num_hidden_layers + model.num_qk_norms
    return layers + per_experts * model.num_moe_layers + OTHER_LAUNCHES


def step_launches(
    model: ModelArchitecture,
    tensor_parallel_size: int,
    graphs: GraphRule,
    num_tokens: int,
    num_prefills: int,
) -> int:
    """Return the launches of a step: all, those between pieces, or none."""
    if not num_tokens:
        return 0
    if not graphs.replays(num_tokens, num_prefills):
        return num_launches(model, tensor_parallel_size)
    if num_prefills or not graphs.has_whole_decodes:
        return launches_of_pieces(model, graphs)
    return 0


def launches_of_pieces(model: ModelArchitecture, graphs: GraphRule) -> int:
    """Return the launches of a step that is graphs in pieces; 0 of one graph."""
    if not graphs.piece_launches:
        return 0
    return graphs.piece_launches * model.num_hidden_layers + OTHER_LAUNCHES


class LaunchedRooflineCost(RooflineCost):
    """`RooflineCost` where the GPU cannot run what the host has not launched.

    ``host_s`` grows by how much launching the kernels of a step outlasts running them.
    """

    __slots__ = ()

    @classmethod
    def of(cls, cost: RooflineCost) -> LaunchedRooflineCost:
        """Return a roofline with its launches."""
        return cls(**{f.name: getattr(cost, f.name) for f in fields(cost) if f.init})

    def launching_s(self, num_tokens: int, num_prefills: int) -> float:
        """Return seconds of the host to launch a step of so many tokens and prompts."""
        one_s = LAUNCH_S if self.launch_s is None else self.launch_s
        return one_s * step_launches(
            self.model,
            self.tensor_parallel_size,
            self.graph_rule,
            num_tokens,
            num_prefills,
        )

    @property
    def may_wait(self) -> bool:
        """Whether a step may wait for its launches, were its attention no work at all.

        The least work is one token, or one more than the largest graph holds.
        """
        beyond = self.graph_rule.max_tokens + 1
        shapes = ((1, 0, 0, 0), (0, 0, 1, 1), (beyond, 0, 0, 0), (0, 0, 1, beyond))
        return any(
            self.parts(*shape, 0, 0) != RooflineCost.parts(self, *shape, 0, 0)
            for shape in shapes
        )

    def parts(  # noqa: PLR0917 - the fields of `BatchShape`
        self,
        num_decodes: int,
        decode_context: int,
        num_prefills: int,
        num_tokens: int,
        prefill_context: int,
        num_pairs: int,
    ) -> Parts:
        gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s, kernels_s = (
            RooflineCost.parts(
                self,
                num_decodes,
                decode_context,
                num_prefills,
                num_tokens,
                prefill_context,
                num_pairs,
            )
        )
        launching_s = self.launching_s(num_decodes + num_tokens, num_prefills)
        if launching_s:
            gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
            host_s += late_s(launching_s, gpu_s)
        return gemm_s, prefill_s, decode_s, head_s, allreduce_s, host_s, kernels_s

    def steady_decodes(self, num_decodes: int) -> SteadyDecodes | None:
        steady = RooflineCost.steady_decodes(self, num_decodes)
        launching_s = self.launching_s(num_decodes, 0)
        if steady is None or not launching_s:
            return steady
        kernels_s = self.token_parts(num_decodes)[2]
        gpu_s = steady.gemm_s + steady.head_s + steady.allreduce_s + kernels_s
        if launching_s <= gpu_s:  # whatever is attended
            return steady
        return steady._replace(kernels_s=kernels_s, launching_s=launching_s)

    def columns(self, shapes: NDArray[np.int64]) -> Columns:
        costs = RooflineCost.columns(self, shapes)
        # those that move blocks are priced by `step`
        rows = np.flatnonzero(~shapes[:, 6:].any(axis=1))
        decodes, chunks, tokens = shapes[rows][:, (0, 2, 3)].T
        num_tokens = decodes + tokens
        distinct, places = distinct_counts(2 * num_tokens + (chunks != 0))
        all_s = [self.launching_s(*divmod(each, 2)) for each in distinct]
        launching_s = np.array(all_s, np.float64)[places]
        if not launching_s.any():
            return costs
        gemm_s, prefill_s, decode_s, head_s, allreduce_s = costs[rows, 1:6].T
        _, _, kernels_s = looked_up(self._token_parts, self.token_parts, num_tokens)
        gpu_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + kernels_s
        late = np.where(launching_s != 0, late_s(launching_s, gpu_s), 0.0)
        host_s = costs[rows, _HOST] + late
        total_s = gemm_s + prefill_s + decode_s + head_s + allreduce_s + host_s
        costs[rows, _HOST] = host_s
        for column in (0, LO, HI):
            costs[rows, column] = total_s
        return costs

    def describe(self) -> dict[str, Any]:
        one_s = LAUNCH_S if self.launch_s is None else self.launch_s
        source = LAUNCH_SOURCE if self.launch_s is None else "configuration"
        found = RooflineCost.describe(self)
        found["parameters"] |= {
            "launch_s": {"value": one_s, "unit": "s/kernel", "source": source}
            | ({"interval": LAUNCH_INTERVAL_S} if self.launch_s is None else {})
        }
        tp, graphs = self.tensor_parallel_size, self.graph_rule
        found["launches_s"] = one_s * num_launches(self.model, tp)
        if pieces := launches_of_pieces(self.model, graphs):
            found["piece_launches_s"] = one_s * pieces
        return found
