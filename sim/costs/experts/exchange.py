"""Seconds to bring tokens to their experts on other ranks, and back.

By default all GPUs gather the hidden states of all tokens, and scatter the sums of what
their experts make of them. DeepEP sends a token to those alone that hold its experts:
its high-throughput kernels once to each GPU, and over the network once to each node;
its low-latency kernels once for each expert.

Source: vLLM 0.33.0, ``distributed/device_communicators/all2all.py``
(`AgRsAll2AllManager`), ``config/parallel.py`` (`all2all_backend`). Gathers are fitted
to aiconfigurator's NCCL tables of eight H100 and H200, DeepEP to its own tables (H800,
8 to 256 GPUs); tests/sim/costs/test_exchange.py says how well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sim.hardware.interconnects import GATHERING
from sim.hardware.models.architecture import dtype_bytes
from sim.hardware.models.quantization import quantization_scheme
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.hardware.interconnects import All2AllBackend, Interconnect
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.scheduler.batch import BatchShape

_GATHER_S: Final = 4e-6
_GATHER_SHARE: Final = 0.70
_EXCHANGE_S: Final = 22e-6
_EXCHANGE_SHARE: Final = 0.77
_NETWORK_SHARE: Final = 0.8
"""Shares of links that gathers reach, DeepEP in a node, and either between nodes."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """GPUs on nodes, each with a port of the network."""

    num_gpus: int
    link: Interconnect
    network: Interconnect

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.link.max_gpus)

    @property
    def gpus_per_node(self) -> float:
        return self.num_gpus / self.num_nodes

    @property
    def around_s(self) -> float:
        """Seconds of hops where messages go around all GPUs."""
        local_s = (self.gpus_per_node - 1) * self.link.hop_s
        return local_s + (self.num_nodes - 1) * self.network.hop_s

    def seconds(self, local_bytes: float, network_bytes: float, share: float) -> float:
        """Return seconds of what a GPU sends within its node, and over its port."""
        local_s = local_bytes / (share * self.link.bytes_per_s)
        network_s = network_bytes / (_NETWORK_SHARE * self.network.bytes_per_s)
        return max(local_s, network_s)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tokens to experts and back, in one layer."""

    nodes: Nodes
    """All GPUs that hold experts."""
    tensor_parallel_size: int
    experts_per_token: int
    sent_bytes: float
    """Of a token on its way to an expert."""
    returned_bytes: float
    backend: All2AllBackend = GATHERING
    are_whole: bool = True
    """Whether GPUs hold experts whole; those of a rank then share its tokens."""

    def tokens_moved(self, num_tokens: int, most_tokens: int) -> tuple[float, float]:
        """Return how many tokens a GPU moves within its node, and over the network.

        Each is as many bytes as `sent_bytes` on the way there, and `returned_bytes`
        on the way back.
        """
        nodes = self.nodes
        gpus, groups = nodes.num_gpus, nodes.num_nodes
        if self.backend == GATHERING:
            together = gpus if self.are_whole else gpus / self.tensor_parallel_size
            received = num_tokens * (1.0 - 1.0 / together)
            between = num_tokens * (1.0 - 1.0 / groups) / nodes.gpus_per_node
            return received, between
        own = most_tokens / self.tensor_parallel_size
        if self.backend == "deepep_low_latency":
            copies = self.experts_per_token / gpus  # to each GPU
            beside = copies * (nodes.gpus_per_node - 1)
            between = copies * (gpus - nodes.gpus_per_node)
        else:
            reached = 1.0 - (1.0 - 1.0 / gpus) ** self.experts_per_token
            visited = 1.0 - (1.0 - 1.0 / groups) ** self.experts_per_token
            # what arrives at a node goes on to its GPUs
            beside = reached * (nodes.gpus_per_node - 1) * groups
            between = visited * (groups - 1)
        return own * beside, own * between

    def seconds(self, num_tokens: int, most_tokens: int) -> float:
        """Return seconds there and back, for tokens of all ranks and of the fullest."""
        local, between = self.tokens_moved(num_tokens, most_tokens)
        share, start_s = _EXCHANGE_SHARE, _EXCHANGE_S
        if self.backend == GATHERING:
            share, start_s = _GATHER_SHARE, _GATHER_S + self.nodes.around_s
        return added(
            start_s + self.nodes.seconds(local * size, between * size, share)
            for size in (self.sent_bytes, self.returned_bytes)
        )


def token_bytes(model: ModelArchitecture) -> tuple[float, float]:
    """Return bytes of a token on its way to an expert, and of what comes back."""
    width, itemsize = model.hidden_size, dtype_bytes(model.dtype)
    scheme = quantization_scheme(model.quantization)
    sent = float(width * itemsize)
    if scheme is not None and scheme.quantized_activation:
        scales = scheme.scale_bytes * (width / (scheme.group_size or width))
        sent = width * min(1.0, scheme.weight_bits / 8) + scales
    return sent, float(width * itemsize)


def rank_tokens(shapes: Sequence[BatchShape]) -> tuple[int, int]:
    """Return the tokens of all ranks, and of the rank with most; one at least each."""
    tokens = [shape[0] + shape[3] or 1 for shape in shapes]
    return sum(tokens), max(tokens)
