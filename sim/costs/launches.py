"""Steps whose kernels the host launches: without graphs, or between their pieces."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from sim.costs.parts import late_s
from sim.costs.roofline import RooflineCost
from workloads.sums import added

if TYPE_CHECKING:
    from sim.costs.base import StepCost
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.scheduler.batch import BatchShape
    from sim.scheduler.generation import GraphRule

LAYER_LAUNCHES: Final = 10
"""Kernels of a layer: qkv, rope, cache write, attention, o, two norms, gate and up,
activation, down. A norm of queries and keys is one more (`num_launches`)."""
OTHER_LAUNCHES: Final = 4
"""Embedding, last norm, output projection, sampler."""
LAUNCH_S: Final = 26e-6
"""The host's time for a kernel in eager mode, Python between kernels included."""
LAUNCH_INTERVAL_S: Final = [15e-6, 40e-6]
LAUNCH_SOURCE: Final = (
    "one source: 8.4 ms a decode of Llama-3.1-8B on H100 in eager mode, 324 kernels"
)


def num_launches(model: ModelArchitecture, tensor_parallel_size: int) -> int:
    """Return the kernels of a step."""
    per_layer = LAYER_LAUNCHES + 2 * (tensor_parallel_size > 1)
    layers = per_layer * model.num_hidden_layers + model.num_qk_norms
    return layers + OTHER_LAUNCHES


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

    def step(self, shape: BatchShape) -> StepCost:
        cost = RooflineCost.step(self, shape)
        num_tokens = shape.num_decodes + shape.num_prefill_tokens
        launching_s = self.launching_s(num_tokens, shape.num_prefills)
        if not launching_s:
            return cost
        kernels_s = self.token_parts(num_tokens)[2]
        gpu_s = kernels_s + added(cost.parts[:5])
        late = float(late_s(launching_s, gpu_s))
        if not late:
            return cost
        total_s = cost.total_s + late
        return cost._replace(
            total_s=total_s, host_s=cost.host_s + late, lo_s=total_s, hi_s=total_s
        )

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
