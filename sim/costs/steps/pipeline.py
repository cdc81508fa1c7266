"""Steps of a pipeline: the times of its stages, and of what they send each other."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from sim.costs.base import StepCost
from sim.costs.rates.collectives import all_reduce_s
from sim.hardware.interconnects import DEFAULT_NETWORK, INTERCONNECTS, link_of
from sim.hardware.models.architecture import dtype_bytes
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.costs.base import CostModel
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.interconnects import Interconnect
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.scheduler.batch import BatchShape

_SENT_TENSORS: Final = 2
"""Hidden states and residuals."""
_SEND_S: Final = 10e-6
"""To start a message, as half of a small all-reduce by NCCL."""
_SEND_SHARE: Final = 0.77
"""Of a link that large messages reach, as collectives do."""


class StageLinks:
    """Transfers between stages: two activations a token, in parts over the ranks.

    Each rank of a stage sends its share, and the ranks of the next gather the whole.

    Parameters
    ----------
    model, gpu
        The served model, and its GPU.
    tensor_parallel_size, num_stages
        Ranks of a stage, and stages. They fill nodes one after the other; stages on
        different nodes reach each other over the network.
    interconnect, network
        Links within a node and between nodes; None for the GPU's own, and for the
        `DEFAULT_NETWORK`.

    Notes
    -----
    Source: vLLM 0.33, ``vllm/v1/worker/gpu_worker.py`` and
    ``vllm/distributed/parallel_state.py`` (`send_tensor_dict`).
    """

    def __init__(
        self,
        model: ModelArchitecture,
        gpu: GpuSpec,
        tensor_parallel_size: int,
        num_stages: int,
        *,
        interconnect: Interconnect | None = None,
        network: Interconnect | None = None,
    ) -> None:
        self.tensor_parallel_size = tp = tensor_parallel_size
        self.bytes_per_token = (
            _SENT_TENSORS * model.hidden_size * dtype_bytes(model.dtype)
        )
        joined = tp if tp > 1 else num_stages
        self.within = within = interconnect or link_of(gpu, joined)
        network = network or INTERCONNECTS[DEFAULT_NETWORK]
        nodes = [stage * tp // within.max_gpus for stage in range(num_stages)]
        self.links: list[Interconnect] = [
            within if node == before else network for before, node in pairwise(nodes)
        ]

    def send_s(self, stage: int, num_tokens: int) -> float:
        """Return seconds from the stage before to `stage`, which is not the first."""
        if not num_tokens:
            return 0.0
        link, tp = self.links[stage - 1], self.tensor_parallel_size
        num_bytes = num_tokens * self.bytes_per_token
        sent_s = (
            _SEND_S + link.hop_s + num_bytes / tp / (_SEND_SHARE * link.bytes_per_s)
        )
        # gathering is the second half of an all-reduce
        return sent_s + all_reduce_s(self.within, tp, num_bytes) / 2


class PipelineCost:
    """Seconds of a step that goes through stages, each with its share of the layers.

    Parameters
    ----------
    stages
        The cost model of each, and the share of a step's price that it takes: 1 where
        the model is made for the stage's layers.
    links
        Between them.

    Notes
    -----
    Only the last stage projects to the vocabulary and samples. Every stage prepares the
    batch itself, so each takes its host time. A batch without tokens costs what it does
    on the last stage.
    """

    def __init__(
        self, stages: Sequence[tuple[CostModel, float]], links: StageLinks
    ) -> None:
        self._stages = stages
        self._links = links
        first = stages[0][0]
        if hasattr(first, "host_part_s"):
            self.host_part_s = first.host_part_s
        if hasattr(first, "scheduling"):
            self.scheduling = first.scheduling

    def _costs(self, shape: BatchShape) -> list[StepCost]:
        """Return the cost of each stage, of a batch without tokens the last one."""
        stages = self._stages
        if not (shape.num_decodes or shape.num_prefill_tokens):
            stages = stages[-1:]
        costs = [_scaled(model.step(shape), share) for model, share in stages]
        return [*map(_without_head, costs[:-1]), costs[-1]]

    def step(self, shape: BatchShape) -> StepCost:
        """Return the parts of all stages together; sending counts as collectives."""
        costs = self._costs(shape)
        sent_s = self._sent_s(shape)
        parts = [
            added(each) for each in zip(*(cost.parts for cost in costs), strict=True)
        ]
        parts[StepCost._fields.index("allreduce_s") - 1] += sent_s
        total_s, lo_s, hi_s = (
            added(each) + sent_s
            for each in zip(*((c.total_s, c.lo_s, c.hi_s) for c in costs), strict=True)
        )
        is_outside = any(cost.extrapolated for cost in costs)
        return StepCost._make((total_s, *parts, is_outside, lo_s, hi_s))

    def _sent_s(self, shape: BatchShape) -> float:
        num_tokens = shape.num_decodes + shape.num_prefill_tokens
        links = range(1, len(self._stages))
        return added(self._links.send_s(stage, num_tokens) for stage in links)

    def stage_times(self, shape: BatchShape) -> list[tuple[float, float]]:
        """Return seconds on the way to each stage, and in it; the batch has tokens."""
        num_tokens = shape.num_decodes + shape.num_prefill_tokens
        return [
            (self._links.send_s(stage, num_tokens) if stage else 0.0, cost.total_s)
            for stage, cost in enumerate(self._costs(shape))
        ]

    def describe(self) -> dict[str, Any]:
        links = self._links
        return self._stages[0][0].describe() | {
            "pipeline": {
                "num_stages": len(self._stages),
                "bytes_per_token": links.bytes_per_token,
                "links": [link.name for link in links.links],
            }
        }


def _scaled(cost: StepCost, share: float) -> StepCost:
    if share == 1.0:
        return cost
    seconds = [share * each for each in (*cost[:9], cost.lo_s, cost.hi_s)]
    return StepCost._make((*seconds[:9], cost.extrapolated, *seconds[9:]))


def _without_head(cost: StepCost) -> StepCost:
    """Return the price of a stage that is not the last."""
    head_s = cost.head_s
    return cost._replace(
        total_s=cost.total_s - head_s,
        head_s=0.0,
        lo_s=cost.lo_s - head_s,
        hi_s=cost.hi_s - head_s,
    )
