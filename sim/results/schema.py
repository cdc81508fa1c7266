"""Columns of the result tables: names, types, units; the contract with every reader.

Times are simulated seconds from the start of the workload, counts are ``num_*``,
usage is a share between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

STEPS: dict[str, str] = {
    "step": "int64",
    "start_s": "float64",
    "latency_s": "float64",
    # parts of latency_s, see sim.costs.base.StepCost
    "gemm_s": "float64",
    "prefill_attention_s": "float64",
    "decode_attention_s": "float64",
    "head_s": "float64",
    "allreduce_s": "float64",
    "swap_s": "float64",
    "copy_s": "float64",
    "host_s": "float64",
    "extrapolated": "int8",  # 1 where the cost model was outside its data
    # nine steps of ten like it should take as long; latency_s where no bounds are known
    "latency_lo_s": "float64",
    "latency_hi_s": "float64",
    # requests in each queue right after the scheduler call
    "num_running": "int64",
    "num_waiting": "int64",
    "num_swapped": "int64",
    # the batch; tokens that are not of prefills are those of decodes
    "num_batched_tokens": "int64",
    "num_decodes": "int64",  # a token each, and the draft tokens that they verify
    "num_prefills": "int64",
    "num_prefill_tokens": "int64",
    # the cache right after the scheduler call
    "kv_cache_usage": "float64",
    "cpu_cache_usage": "float64",
    "num_physical_blocks": "int64",  # blocks that at least one table holds
    "num_logical_blocks": "int64",  # entries of all tables
    "num_physical_tokens": "int64",  # tokens stored in physical blocks
    "num_logical_tokens": "int64",  # computed tokens of all running requests
    # moves and recomputations of the scheduler call
    "num_preempted": "int64",
    "num_swapped_in_blocks": "int64",
    "num_swapped_out_blocks": "int64",
    "num_copied_blocks": "int64",
    "num_recomputed_tokens": "int64",  # tokens of this batch computed before
    "num_finished": "int64",  # requests that this step's output finished
}

REQUESTS: dict[str, str] = {
    "request_id": "int64",
    "arrival_s": "float64",
    "num_prompt_tokens": "int64",
    "num_output_tokens": "int64",  # generated in the simulation, of the longest sample
    "num_sequences": "int64",  # samples, or beams, that the engine schedules as one
    "num_generated_tokens": "int64",  # of all samples, dropped beams included
    "parent_id": "int64",  # request of the workload; v1 serves samples one by one
    "status": "str",  # value of sim.scheduler.request.RequestStatus
    "reason": "str",  # why it was rejected or aborted, else ""
    "first_scheduled_s": "float64",  # NaN where it never came to that
    "first_token_s": "float64",
    "finish_s": "float64",
    "queue_s": "float64",  # first_scheduled_s - arrival_s
    "ttft_s": "float64",
    "tpot_s": "float64",  # NaN with fewer than two output tokens
    "e2el_s": "float64",
    "num_preemptions": "int64",
    "num_cached_tokens": "int64",  # prefix hit when first scheduled
    "num_recomputed_tokens": "int64",  # computed again after preemptions
}

TRAFFIC: dict[str, str] = {
    "session_id": "int64",  # of the workload's request, -1 for none
    "turn": "int64",  # requests that had to end before this one could be sent
    "priority": "int64",  # smaller is more urgent
    "slo_class": "str",  # service level that was promised, "" for none
}
"""Facts of the workload on a request; these columns follow those of `REQUESTS`."""

PREEMPTIONS: dict[str, str] = {
    "time_s": "float64",
    "step": "int64",
    "request_id": "int64",  # the victim
    "for_request_id": "int64",  # the request that needed the room
    "reason": "str",
    "mode": "str",  # "recompute" or "swap"
    "num_tokens_lost": "int64",  # computed tokens given up
    "num_output_tokens": "int64",  # generated so far by the victim
    "num_blocks_freed": "int64",  # blocks back in the free queue
    "num_blocks_moved": "int64",  # blocks swapped out
    "kv_cache_usage_before": "float64",
    "kv_cache_usage_after": "float64",
    "num_preemptions": "int64",  # of this request, this one included
}

RANKS: dict[str, str] = {"rank": "int64"}
"""Which data-parallel rank a row of any table is of, where there are several."""

ENGINES: dict[str, str] = {"engine": "int64"}
"""Which engine of a fleet a row of any table is of; numbered pool by pool."""

PAIRS: dict[str, str] = {
    "prefill_engine": "int64",  # that computed its prompt; -1 for the decoder itself
    "num_transferred_tokens": "int64",  # of blocks that the decoder read, whole ones
    # the parts of first_token_s - arrival_s; NaN without a first token
    "ttft_queue_s": "float64",  # at both engines, and between them
    "ttft_prefill_s": "float64",
    "ttft_transfer_s": "float64",
    "ttft_decode_s": "float64",  # from the end of the transfer on
}
"""Requests of a fleet that prefills and decodes apart have these columns as well."""

PULLS: dict[str, str] = {
    "prefill_engine": "int64",  # that was read from
    "engine": "int64",  # that read
}
"""Transfers of such a fleet have these columns as well; their kind is "pull", or
"failed_pull" where the prefiller died, with the blocks that were asked for."""

FLEET: dict[str, str] = {
    "time_s": "float64",  # regular times
    "pool": "str",
    # replicas that take requests, that will, and that only finish those they have
    "num_ready": "int64",
    "num_starting": "int64",
    "num_draining": "int64",
    # requests of its engines as of the step in progress, which those that came since
    # do not count in; behind an engine's last step those that are left there
    "num_running": "int64",
    "num_waiting": "int64",
    "num_held": "int64",  # before the router, as no replica is ready; of all pools
    "num_transfers": "int64",  # prompts that its engines read from others
}
"""The state of each pool of a fleet: one row a time and pool."""

RANK_STEPS: dict[str, str] = {
    "wait_s": "float64",  # it waited for the slowest rank, part of allreduce_s
}
"""Steps of a rank have this column as well; one without tokens is a dummy batch."""

AHEAD_STEPS: dict[str, str] = {
    # when its output was processed, and its tokens appeared; NaN if the run ended first
    "output_s": "float64",
}
"""Steps of an engine that forms some before the output of the last have this as well;
elsewhere the output of a step is processed when it ends."""

DRAFT_STEPS: dict[str, str] = {
    "num_drafts": "int64",  # requests whose draft tokens it verifies
    "num_draft_tokens": "int64",  # of all of them
    "num_accepted_tokens": "int64",  # of these, those that the model accepted
    # blocks that tables hold beyond their tokens, when the output has been processed
    "num_draft_blocks": "int64",
}
"""Steps of an engine that verifies drafts have these columns as well."""

DRAFT_REQUESTS: dict[str, str] = {
    "num_drafts": "int64",  # steps that verified drafts of it before it ended
    "num_draft_tokens": "int64",
    "num_accepted_tokens": "int64",  # also those behind its end
}
"""Requests of such an engine have these columns as well."""

KV_CACHE_GROUPS: dict[str, str] = {
    "time_s": "float64",  # start of the step from which on it holds so many
    "kind": "int64",  # place in capacity.kv_cache_groups of the summary
    "num_blocks": "int64",  # of the pool, that tables of its groups hold
}
"""One row a change, for models whose layers need KV caches of several kinds."""

PREFIX_TREE: dict[str, str] = {
    "time_s": "float64",  # start of the step from which on it is so
    "num_evictable_tokens": "int64",  # of the tree, that no request uses
    "num_protected_tokens": "int64",  # of the tree, that some request uses
    "num_tree_nodes": "int64",  # without the root
    "new_token_ratio": "float64",  # falls from here on, a little with each decode
}
"""One row a change, for engines that keep prefixes in a tree of tokens: of the tree, or
a rise of the ratio."""

OFFLOAD_REQUESTS: dict[str, str] = {
    "num_loaded_tokens": "int64",  # of blocks loaded from the tier, over all its loads
}
"""Requests of an engine with a tier behind its pool have these columns as well."""

TRANSFERS: dict[str, str] = {
    # in the order in which the scheduler asked for them; -1 behind the host
    "job_id": "int64",
    # "store", "load", or "sync_load" into the batch of the same step; between the host
    # and a tier behind it "fs_store" and "fs_load", by its name
    "kind": "str",
    "request_id": "int64",
    "num_blocks": "int64",
    "num_tokens": "int64",
    "num_bytes": "int64",  # of all GPUs
    "begin_s": "float64",  # when the link began with it
    "end_s": "float64",
    "reported_s": "float64",  # when the scheduler heard of it
}
"""One row a copy that was reported, of an engine with a tier behind its pool."""

TIER: dict[str, str] = {
    "time_s": "float64",  # of the scheduler call from which on it holds so many
    "num_used_chunks": "int64",
    "num_writing_chunks": "int64",  # of these, not there yet
    "num_reading_chunks": "int64",
}
"""One row a change of the contents of such a tier."""

ITL: dict[str, str] = {
    "request_id": "int64",  # served requests only, by id
    "token_index": "int32",  # of the output, from 1; of the longest sample
    "time_s": "float64",  # when it appeared
}
"""One row a token, written on request: latencies are the differences of `time_s`."""


@dataclass(frozen=True, slots=True)
class Latency:
    """A latency: its statistics stand in a summary as ``p99_{key}_ms``."""

    key: str
    label: str
    meaning: str

    @property
    def column(self) -> str:
        """Its column in the table of requests; ITL, of every token, has none."""
        return f"{self.key}_s"


LATENCIES: Final = {
    each.key: each
    for each in (
        Latency("ttft", "TTFT", "time to first token"),
        Latency("tpot", "TPOT", "time per output token"),
        Latency("itl", "ITL", "inter-token latency"),
        Latency("e2el", "E2E", "end-to-end latency"),
    )
}
"""By key, which is that of ``vllm bench serve``; in the order of every table."""

OF_REQUESTS: Final = tuple(each for each in LATENCIES.values() if each.key != "itl")
"""Latencies of which each request has one."""

PERCENTILES: Final = (50, 90, 95, 99)
STATISTICS: Final = ("mean", "median", "std", *(f"p{each}" for each in PERCENTILES))
"""Statistics of each latency in a summary."""

SHOWN_STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")
"""Statistics that terminals, notebooks and pages show."""

# Bounds of the histograms that vLLM shows.
TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def one_two_five(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... up to `largest`: bounds of numbers of tokens."""
    bounds: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > largest:
                return bounds
            bounds.append(float(digit * scale))
        scale *= 10
