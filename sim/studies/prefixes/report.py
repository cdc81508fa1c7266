"""The report on a prefix cache of each size for some requests, in words and rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.errors import ConfigError
from sim.hardware.models.kv_memory import KvMemory, kv_memory
from workloads.analysis import prefix_curve
from workloads.requests.chains import has_chains

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from sim.studies.prefixes.beside import SimulatedHits
    from workloads.analysis import CacheNeed, HitCurve, PrefixCurve
    from workloads.spec import RequestSpec


NUM_ROWS = 200
"""Points of the curve that are written, but for those of the bound and the answer."""
_RANGE = 1e4


def what_is_left_out(requests: Sequence[RequestSpec]) -> tuple[str, ...]:
    """Return the facts of these requests that a curve leaves out, a line each."""
    notes = []
    if has_chains(requests):
        notes.append(
            "follow-ups stand at the earliest time that they can come, as if answers "
            "took no time and every user began at once"
        )
    if any(request.num_sequences > 1 for request in requests):
        notes.append("of several samples or beams of a prompt only one is counted")
    return tuple(notes)


@dataclass(frozen=True)
class PrefixReport:
    """A curve with all that is said of it."""

    title: str  # where the requests come from, in a line
    curve: PrefixCurve  # hits by size
    bounds: HitCurve  # of the clairvoyant cache, at some sizes
    need: CacheNeed  # the answer
    memory: KvMemory | None  # bytes of a token, or None without a model
    # facts of these requests that the curve leaves out, a line each
    notes: tuple[str, ...] = ()
    # hits of runs of these requests
    simulated: tuple[SimulatedHits, ...] = ()

    @property
    def is_bound(self) -> bool:
        """Whether LRU finds at most what the curve says: layers share a pool."""
        return self.memory is not None and self.memory.hit_tokens is not None

    @property
    def block_size(self) -> int:
        return self.curve.paths.block_size

    def gib(self, num_blocks: float) -> float | None:
        """Return GiB of so many blocks, if a model was named."""
        if self.memory is None:
            return None
        return self.memory.gib(num_blocks * self.block_size)

    def pools(self, num_blocks: float) -> float | None:
        """Return how many engines' KV pools so many blocks fill, if a GPU was named."""
        if self.memory is None or self.memory.pool_tokens is None:
            return None
        return num_blocks * self.block_size / self.memory.pool_tokens

    def kinds(self) -> list[dict[str, Any]]:
        """Return the facts of layers by kind, where only some keep every token."""
        if self.memory is None or not self.is_bound:
            return []
        whole = self.curve.num_distinct_blocks * self.block_size
        tails = iter(self.curve.ends.kept_tokens if self.curve.ends else ())
        rows = []
        for each in self.memory.layers:
            kept = whole if each.tail_tokens is None else next(tails)
            rows.append(
                {
                    "kind": each.kind,
                    "num_layers": each.num_layers,
                    "num_groups": each.num_groups,
                    "block_size": each.block_size,
                    "token_bytes": each.token_bytes,
                    "hit_needs": each.hit_needs,
                    "kept_tokens": kept,
                    "kept_gib": each.gib(kept),
                }
            )
        return rows

    def rows(self, num_rows: int = NUM_ROWS) -> list[dict[str, float | None]]:
        """Return points of the curve: sizes rising by a factor, and the bound's.

        Rates are shares of prompt tokens, None where nothing is known; ``lru_margin``
        is half the 95 % interval of ``lru_hit_rate``.
        """
        found = dict(
            zip(
                self.bounds.num_blocks.tolist(),
                self.bounds.num_hits.tolist(),
                strict=True,
            )
        )
        high = max(self.curve.lru.enough_blocks, 2.0)
        between = np.geomspace(max(high / _RANGE, 1.0), high, num_rows).round()
        sizes = sorted({*between.tolist(), *found, float(self.need.num_blocks)})
        return [self._row(size, found.get(size)) for size in sizes]

    def _row(self, num_blocks: float, bound: float | None) -> dict[str, float | None]:
        curve = self.curve
        return {
            "num_blocks": num_blocks,
            "num_tokens": num_blocks * self.block_size,
            "gib": self.gib(num_blocks),
            "lru_hit_rate": curve.hit_rate_at(num_blocks),
            "lru_margin": curve.margin_at(num_blocks),
            "belady_hit_rate": None if bound is None else curve.token_hit_rate(bound),
        }

    def simulated_rows(self) -> list[dict[str, Any]]:
        """Return the hits of runs, and those of the curve at as many blocks."""
        return [
            each.to_dict() | {"lru_hit_rate": self.curve.hit_rate_at(each.num_blocks)}
            for each in self.simulated
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the facts and the answer, JSON-ready, without the rows."""
        curve, need, paths = self.curve, self.need, self.curve.paths
        kinds = self.kinds()
        return {
            "title": self.title,
            "num_requests": paths.num_requests,
            "num_prompt_tokens": paths.num_prompt_tokens,
            "block_size": self.block_size,
            "sample_rate": paths.sample_rate,
            "num_prompt_blocks": paths.num_readable,
            "num_distinct_blocks": curve.num_distinct_blocks,
            "possible_hit_rate": curve.token_hit_rate(curve.possible_hits),
            "memory": self.memory and self.memory.to_dict(),
            **({"kinds": kinds} if kinds else {}),
            "notes": list(self.notes),
            **({"simulated": self.simulated_rows()} if self.simulated else {}),
            "need": asdict(need)
            | {
                "num_tokens": need.num_blocks * self.block_size,
                "gib": self.gib(need.num_blocks),
                "gpu_pools": self.pools(need.num_blocks),
                "clairvoyant_gib": self.gib(need.clairvoyant_blocks),
                "sentence": self.sentence(),
            },
        }

    @property
    def table(self) -> pd.DataFrame:
        import pandas as pd  # noqa: PLC0415 - slow to import

        return pd.DataFrame(self.rows())

    def sentence(self) -> str:
        curve, need = self.curve, self.need
        if not curve.lru.most_hits:
            if curve.sampled is not None:
                return "No block of the sample is found again; a larger one might have."
            return "No prompt begins as an earlier one does: no cache finds anything."
        possible = curve.token_hit_rate(curve.possible_hits)
        if not possible:
            return (
                "Prompts share beginnings, but none ends where a window or a state is "
                "kept: no hit."
            )
        least = "at least " * self.is_bound
        return (
            f"{100 * need.share:.4g}% of the possible hits ({need.hit_rate:.2%} of "
            f"prompt tokens; an infinite cache finds {possible:.2%}) takes "
            f"{least}{need.num_blocks:,} blocks{self._margin()} of {self.block_size} "
            f"tokens, {need.num_blocks * self.block_size:,} tokens{self._memory()}; "
            f"with the "
            f"future known {least}{need.clairvoyant_blocks:,} blocks would do."
        ).replace("%", " %")

    def _margin(self) -> str:
        margin = self.need.margin_blocks
        return f" (give or take {margin:,})" if self.curve.sampled is not None else ""

    def _memory(self) -> str:
        memory = self.memory
        if memory is None:
            return ""
        gib, pools = self.gib(self.need.num_blocks), self.pools(self.need.num_blocks)
        tp = memory.tensor_parallel_size
        ranks = f" over {tp} ranks" if tp > 1 else ""
        what = "the full attention of " * self.is_bound + memory.model
        text = f", {_amount(gib)} GiB of GPU or host memory for {what} "
        text += f"({memory.kv_cache_dtype}{ranks})"
        if pools is None:
            return text
        engine = f"{tp} x {memory.gpu}" if tp > 1 else memory.gpu
        return f"{text}, {_amount(pools)} KV pools of an engine on {engine}"


def _amount(number: float | None) -> str:
    """Return a number to hundredths, or a small one to two digits."""
    number = number or 0.0
    return f"{number:,.2f}" if number >= 0.1 else f"{number:.2g}"


_OF_A_MODEL = (
    "gpu",
    "tensor_parallel_size",
    "dtype",
    "kv_cache_dtype",
    "prefix_cache_retention_interval",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveQuestion:
    """A question to a curve.

    Parameters
    ----------
    model, gpu, tensor_parallel_size, dtype, kv_cache_dtype
        See `sim.hardware.models.kv_memory.kv_memory`; without a model, sizes are in
        blocks only.
    block_size
        Tokens of a block; where layers are of several kinds, hits end at multiples
        of what their blocks have in common, which may be more.
    prefix_cache_retention_interval
        Tokens after which windows are kept for hits; 0 for the ends of prompts and
        where they part only.
    share
        Share of the possible hits that is asked for.
    prompts_only
        Leave generated text out of the cache.
    sample, sample_seed
        Share of the blocks to look at, and which.
    bounds
        Number of sizes at which the clairvoyant bound is computed.
    """

    model: str | None = None
    gpu: str | None = None
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    share: float = 0.8
    prompts_only: bool = False
    sample: float = 1.0
    sample_seed: int = 0
    bounds: int = 16
    prefix_cache_retention_interval: int = 0

    def memory(self) -> KvMemory | None:
        """Return the memory of the model; without one refuse settings that need it."""
        if self.model is None:
            self._refuse_without_model()
            return None
        memory = kv_memory(
            self.model,
            self.gpu,
            block_size=self.block_size,
            tensor_parallel_size=self.tensor_parallel_size,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
        )
        if self.prefix_cache_retention_interval:
            self._check_interval(memory)
        return memory

    def _check_interval(self, memory: KvMemory) -> None:
        """Refuse an interval at whose ends no hit can end, or that means nothing."""
        interval = self.prefix_cache_retention_interval
        name, model = "prefix_cache_retention_interval", memory.model
        if not memory.tails:
            raise ConfigError(
                f"{name} is for models with windows beside full attention; got "
                f"{interval} for {model}; leave it out"
            )
        if any(each.has_state for each in memory.layers):
            raise ConfigError(
                f"{name} must be 0 for {model}: which states are kept depends on where "
                f"steps end, and a curve has no steps; got {interval}; run it instead"
            )
        if interval < 0 or interval % (memory.hit_tokens or 1):
            raise ConfigError(
                f"{name} must be 0 or a multiple of {memory.hit_tokens} for {model}; "
                f"got {interval}"
            )

    def _refuse_without_model(self) -> None:
        """Refuse arguments that would say nothing."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OF_A_MODEL and value != field.default:
                raise ConfigError(
                    f"{field.name} {value} needs a model: GiB and pools are those of "
                    f"one; name it, or leave this out"
                )


def prefix_report(
    source: str,
    requests: Sequence[RequestSpec],
    question: CurveQuestion,
    memory: KvMemory | None,
) -> PrefixReport:
    """Take requests one after the other, and say what a cache of each size finds."""
    tails: tuple[int, ...] = ()
    size = question.block_size
    if memory is not None and memory.hit_tokens is not None:
        tails, size = memory.tails, memory.hit_tokens
    found = prefix_curve(
        requests,
        size,
        prompts_only=question.prompts_only,
        sample_rate=question.sample,
        sample_seed=question.sample_seed,
        tail_tokens=tails,
        retention_interval=question.prefix_cache_retention_interval,
    )
    notes = (*what_is_left_out(requests), *_of_kinds(found, memory, question))
    return PrefixReport(
        title=_title(source, found, question.prompts_only),
        curve=found,
        bounds=found.bounds(question.bounds),
        need=found.need(question.share),
        memory=memory,
        notes=notes,
    )


def _of_kinds(
    curve: PrefixCurve, memory: KvMemory | None, question: CurveQuestion
) -> list[str]:
    """Return the limits of the curve on layers that keep less, a line each."""
    if memory is None or not memory.layers:
        return []
    if memory.hit_tokens is None:
        return [
            f"no layer of {memory.model} keeps every token: hits and sizes are counted "
            f"as if all did"
        ]
    notes = [
        "blocks are those of the layers that keep every token; the others draw from "
        "the same pool, so LRU finds at most what is said, and sizes are the least"
    ]
    if curve.ends is not None:
        every = question.prefix_cache_retention_interval
        also = f", or at a multiple of {every:,} tokens" if every else ""
        without = curve.token_hit_rate(curve.lru.most_hits)
        notes.append(
            f"a hit ends where an earlier prompt ended or parted from what was cached"
            f"{also}, at a multiple of {memory.hit_tokens:,} tokens; if every block "
            f"were kept, an infinite cache would find {without:.2%}"
        )
    return notes


def _title(source: str, curve: PrefixCurve, prompts_only: bool) -> str:
    paths = curve.paths
    kept = "prompts only" if prompts_only else "prompts and answers"
    if curve.sampled is not None:
        kept = f"{kept} (a sample of {100 * paths.sample_rate:g} %)"
    number = paths.num_requests
    said = f"{number:,} request{'s' * (number != 1)} one after the other"
    return f"{source}: {said}, {kept} cached"
