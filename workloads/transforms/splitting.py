"""Traffic split over replicas of an engine: the requests that each of them gets.

A router that knows nothing of its engines sends requests at random, or in turn. Split
at random, bursts stay bursts and a Poisson process stays one; in turn, arrivals at each
replica are more even. Turns of a session go to one replica, where their prefix lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from workloads._checks import one_of, whole
from workloads._numpy import np
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError
from workloads.requests.chains import in_order
from workloads.requests.columns import RequestColumns
from workloads.transforms.superposition import roots_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from workloads.spec import RequestSpec
    from workloads.workload import Workload

MAX_NUM_REPLICAS = 65_536

SplitBy = Literal["random", "round_robin"]


@dataclass(frozen=True, slots=True)
class SplitWorkload:
    """The share of one replica in a workload.

    Parameters
    ----------
    workload
        All requests before the router.
    num_replicas
        Engines behind it.
    replica
        Which of them this is, from 0.
    by
        ``"random"``: each request, or session, to any of them with equal probability;
        ``"round_robin"``: to one after another.
    seed
        Seed of the choice.

    Raises
    ------
    WorkloadError
        If a number is out of range.
    """

    workload: Workload
    num_replicas: int
    replica: int = 0
    by: SplitBy = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        remedy = "give a number of engines"
        whole("num_replicas", self.num_replicas, 1, MAX_NUM_REPLICAS, remedy)
        remedy = "they are numbered from 0"
        whole("replica", self.replica, 0, self.num_replicas - 1, remedy)
        one_of("by", self.by, ("random", "round_robin"))

    def requests(self) -> Sequence[RequestSpec]:
        requests = self.workload.requests()
        chosen = replicas_of(requests, self.num_replicas, self.by, self.seed)
        part = share_of(requests, chosen, self.replica)
        if not len(part):
            raise WorkloadError(
                f"a workload needs at least one request; replica {self.replica} of "
                f"{self.num_replicas} gets none; lower num_replicas"
            )
        return part


def replicas_of(
    requests: Sequence[RequestSpec], num_replicas: int, by: SplitBy, seed: int
) -> NDArray[np.int64]:
    """Return the replica of each request.

    Random ones come from the stream ``"split"``.
    """
    if isinstance(requests, RequestColumns):
        num_roots, root = len(requests), np.arange(len(requests))
    else:
        roots = np.array(roots_of(requests), dtype=np.int64)
        kinds, root = np.unique(roots, return_inverse=True)
        num_roots = len(kinds)
    if by == "round_robin":
        return root % num_replicas
    rng = Streams(seed).generator("split")
    # From floats: more replicas redraw nothing, they only cut finer.
    chosen = (rng.random(num_roots) * num_replicas).astype(np.int64)
    return chosen[root]


def share_of(
    requests: Sequence[RequestSpec], chosen: NDArray[np.int64], replica: int
) -> Sequence[RequestSpec]:
    rows = np.flatnonzero(chosen == replica)
    if isinstance(requests, RequestColumns):
        return requests.rearranged(rows, requests.arrival_s[rows])
    return in_order(requests[row] for row in rows.tolist())
