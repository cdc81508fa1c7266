"""Our scheduler beside the installed engine's: the same workload through both."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cache.v1.specs import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from sim.errors import SchedulerError, UserError
from sim.scheduler.sglang import SGLANG
from sim.studies.conformance.diff import Difference, first_difference
from sim.studies.conformance.driver import DecisionDriver, hosted_scheduler
from sim.studies.conformance.pair import PairDriver, driver_of
from sim.studies.conformance.played_pair import ROLES
from sim.studies.conformance.sglang import SglangDriver, hosted_lines
from sim.studies.conformance.shrink import shrunk

if TYPE_CHECKING:
    from collections.abc import Callable

    from cache.v1.specs import KVCacheLayout
    from sim.scheduler.log.lines import Line
    from sim.studies.conformance.kv_planning import KvCache
    from sim.studies.conformance.workload import DecisionWorkload

    Hosted = Callable[[DecisionWorkload], list[Line]]


_PREEMPTED = ("preempt", "retract")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload through both schedulers.

    Parameters
    ----------
    difference
        The first one, hosted engine first; None if all decisions are equal.
    lines
        The hosted engine's log.
    """

    difference: Difference | None
    lines: list[Line]

    @property
    def num_preemptions(self) -> int:
        """Preemptions of the hosted engine; retractions are."""
        return sum(len(line.get(key, ())) for line in self.lines for key in _PREEMPTED)


@dataclass(slots=True)
class Coverage:
    """Steps and features that the workloads of a comparison reached, to judge it by."""

    num_workloads: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    workloads_with: Counter[str] = field(default_factory=Counter)

    def add(self, workload: DecisionWorkload, comparison: Comparison) -> None:
        """Count a workload that was compared."""
        self.num_workloads += 1
        self.num_steps += len(comparison.lines)
        self.num_preemptions += comparison.num_preemptions
        if workload.generation == SGLANG.name:
            facts = _sglang_facts(workload.engine.model_dump(), comparison.lines)
            self.workloads_with.update({name: int(hit) for name, hit in facts.items()})
            return
        configs = _engines(workload)
        seen = {
            "preemptions": comparison.num_preemptions > 0,
            "prefix caching": any(
                each.get("enable_prefix_caching", True) for each in configs
            ),
            "prefix hits": any(
                any(line.get("cached", {}).values()) for line in comparison.lines
            ),
            "priorities": any(each.get("policy") == "priority" for each in configs),
            "thresholds": any(
                each.get("long_prefill_token_threshold") for each in configs
            ),
            "chunking off": not all(
                each.get("chunked_prefill", True) for each in configs
            ),
            "sliding windows": any(each.get("sliding_window") for each in configs),
            "aborts": any("abort" in line for line in comparison.lines),
        }
        if any(each.get("async_scheduling") for each in configs):
            for name, key in (("wasted tokens", "wasted"), ("stale tokens", "stale")):
                seen[name] = any(key in line for line in comparison.lines)
        if any(each.get("speculative") for each in configs):
            lines = comparison.lines
            verified = [each for line in lines for each in line.get("acc", ())]
            seen["accepted drafts"] = any(each[2] for each in verified)
            seen["padded admissions"] = any(map(_is_padded, lines))
        if any(each.get("offload") for each in configs):
            seen |= _transfer_facts(comparison.lines)
        if workload.pair is not None:
            seen |= _pair_facts(workload, comparison.lines)
        one = workload if workload.pair is None else workload.sides("prefill")[0]
        if (plan := one.plan) is not None:
            seen |= _group_facts(plan.layout, comparison.lines)
        self.workloads_with.update({name: int(hit) for name, hit in seen.items()})

    def in_words(self) -> str:
        """Return the counts in a line."""
        shares = ", ".join(
            f"{name} {number:,}"
            for name, number in self.workloads_with.items()
            if number
        )
        return (
            f"workloads {self.num_workloads:,}, steps {self.num_steps:,}, preemptions "
            f"{self.num_preemptions:,}; workloads with {shares or 'none of the rules'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain data, JSON-ready."""
        return {
            "num_workloads": self.num_workloads,
            "num_steps": self.num_steps,
            "num_preemptions": self.num_preemptions,
            "workloads_with": dict(self.workloads_with),
        }


def _engines(workload: DecisionWorkload) -> list[dict[str, Any]]:
    """Return the configuration of each engine of a workload."""
    config = workload.config
    if workload.pair is None:
        return [config]
    return [side.config for name in ROLES for side in workload.sides(name)]


def _is_padded(line: Line) -> bool:
    """Whether a request was admitted with drafts, which are empty then."""
    return (
        not line.get("spec", {})
        .keys()
        .isdisjoint(name for name, _, kind, _ in line.get("sched", ()) if kind != "r")
    )


def _sglang_facts(config: dict[str, Any], lines: list[Line]) -> dict[str, bool]:
    """Return which rules of SGLang acted."""
    names = {
        "retractions": "retract",
        "requests pushed out": "preempt",
        "evictions": "evict",
        "chunks": "chunked",
        "refused requests": "reject",
        "aborts": "abort",
        "deaths": "error",
        "prompts sent": "send",
        "joined requests": "joined",
    }
    evictions = _all_of(lines, "evict")
    return {
        "overlap": bool(config["overlap"]),
        "pages": config["page_size"] > 1,
        "no radix cache": bool(config["disable_radix_cache"]),
        "windows": config["swa"] is not None,
        "windows dropped": any(len(each) > 2 and bool(each[3]) for each in evictions),
        "windows dropped inside": any(
            len(each) > 2 and any(part not in each[1] for part in each[3])
            for each in evictions
        ),
        "mixed batches": any(line.get("mode") == "mixed" for line in lines),
        "priorities": bool(config["enable_priority_scheduling"]),
        **{
            f"order {kind}": config["schedule_policy"] == kind
            for kind in ("lpm", "dfs-weight", "lof")
        },
        **{name: any(key in line for line in lines) for name, key in names.items()},
    }


def _transfer_facts(lines: list[Line]) -> dict[str, bool]:
    """Return which rules of a CPU tier acted."""
    loads = [job for line in lines for job in line.get("load", ())]
    names = {
        "stores": "store",
        "evicted chunks": "evict",
        "refused stores": "refuse",
        "flushes": "flush",
        "late frees": "delayed",
    }
    return {
        "loads": any(job[-1] != "sync" for job in loads),
        "loads in the step": any(job[-1] == "sync" for job in loads),
        "failed loads": any(isinstance(bad, int) for bad in _all_of(lines, "bad")),
        **{name: any(key in line for line in lines) for name, key in names.items()},
    }


def _pair_facts(workload: DecisionWorkload, lines: list[Line]) -> dict[str, bool]:
    """Return which rules of prefillers and decoders acted."""
    names = {
        "failed requests": "errors",
        "expired leases": "expired",
        "heartbeats": "heartbeat",
    }
    pulls = [pull for line in lines for pull in line.get("pull", ())]
    decodes = [line for line in lines if line.get("e", "").startswith("D")]
    num_prefillers, num_decoders = (len(workload.sides(name)) for name in ROLES)
    return {
        "pulls": any(waits for _, _, _, waits, *_ in pulls),
        "failed pulls": any(
            isinstance(name, str)
            for key in ("bad", "failed")  # the latter beside a tier
            for name in _all_of(lines, key)
        ),
        "pulls of nothing": not all(waits for _, _, _, waits, *_ in pulls),
        "preempted decodes": any("preempt" in line for line in decodes),
        "late frees": any("delayed" in line for line in decodes),
        **{name: any(key in line for line in lines) for name, key in names.items()},
        "several prefillers": num_prefillers > 1,
        "several decoders": num_decoders > 1,
        "prompts of decoders": not all(r.remote_prefill for r in workload.requests),
        "heartbeats to several": any(
            isinstance(sent := line.get("heartbeat"), dict) and len(sent) > 1
            for line in decodes
        ),
        "leases that end while another decoder pulls": _expires_beside(lines),
        "preemptions beside pulls": any(
            "preempt" in line and len(line.get("holding", ())) > 1 for line in decodes
        ),
        "aborts beside pulls": any(
            "abort" in line and len(line.get("holding", ())) > 1 for line in decodes
        ),
    }


def _all_of(lines: list[Line], key: str) -> list[Any]:
    return [each for line in lines for each in line.get(key, ())]


def _expires_beside(lines: list[Line]) -> bool:
    """Whether a lease ends at a prefiller of which some decoder is reading."""
    pulling: dict[str, str] = {}  # prefiller, by request
    for line in lines:
        for name, _, _, waits, *source in line.get("pull", ()):
            if waits:
                pulling[name] = source[0] if source else "P"
        for name in line.get("recv", ()):
            pulling.pop(name, None)
        if "expired" in line and line["e"] in pulling.values():
            return True
    return False


def _group_facts(layout: KVCacheLayout, lines: list[Line]) -> dict[str, bool]:
    """Return which kinds of groups there are, and which of their rules acted."""
    specs = [group.spec for group in layout.groups]
    kinds = {
        "windows": SlidingWindowSpec,
        "chunked attention": ChunkedLocalAttentionSpec,
        "latent attention": MLAAttentionSpec,
        "states": MambaSpec,
    }
    return {
        "several groups": len(specs) > 1,
        "blocks of several sizes": len({spec.block_size for spec in specs}) > 1,
        **{
            f"groups of {name}": any(isinstance(spec, kind) for spec in specs)
            for name, kind in kinds.items()
        },
        "junctions": any("junction" in line for line in lines),
        "hits inside blocks": layout.has_hits_inside_blocks,
        "copied blocks": any("copy" in line for line in lines),
    }


def installed_lines(workload: DecisionWorkload) -> list[Line]:
    """Return the log of the installed engine, vLLM or SGLang.

    Raises
    ------
    SchedulerError
        If it is not installed, or cannot be set up so.
    """
    if workload.generation == SGLANG.name:
        return hosted_lines(workload)
    return _lines(driver_of(workload, make=hosted_scheduler))


def compare(workload: DecisionWorkload, hosted: Hosted = installed_lines) -> Comparison:
    """Take a workload through the installed engine's scheduler and through ours."""
    theirs, ours = hosted(workload), _lines(driver_of(workload))
    return Comparison(first_difference(theirs, ours), theirs)


def smallest(
    workload: DecisionWorkload, hosted: Hosted = installed_lines
) -> tuple[DecisionWorkload, Difference]:
    """Return a small part of a workload that differs, and where it does."""

    def difference(part: DecisionWorkload) -> Difference | None:
        try:
            return compare(part, hosted).difference
        except UserError:
            return None  # settings, or layers and memory, that do not fit together

    small = shrunk(workload, lambda part: difference(part) is not None)
    found = difference(small)
    assert found is not None
    return small, found


def as_file(workload: DecisionWorkload) -> dict[str, Any]:
    """Return the contents of a workload's file."""
    return {
        "schema": 1,
        "name": workload.name,
        "reference": workload.reference,
        "config": workload.config,
        **({} if workload.kv is None else {"kv": _kv_as_file(workload.kv)}),
        "requests": [
            request.model_dump(mode="json", exclude_defaults=True)
            # none is not the default one, for SGLang
            | request.model_dump(include={"priority"}, exclude_unset=True)
            for request in workload.requests
        ],
    }


def _kv_as_file(kv: KvCache) -> dict[str, Any]:
    return kv.model_dump(mode="json", exclude_defaults=True)


def _lines(driver: DecisionDriver | PairDriver | SglangDriver) -> list[Line]:
    """Return a whole log; a scheduler that gives up ends it with its message."""
    lines: list[Line] = []
    try:
        lines.extend(driver.lines())
    except SchedulerError as error:
        if isinstance(driver, SglangDriver):
            raise
        lines.append({"t": driver.step, "error": str(error)})
    return lines
