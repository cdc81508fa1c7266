"""Requests to a report of what a prefix cache would find, for every size of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from sim.errors import ConfigError
from sim.hardware.models.kv_memory import KvMemory, kv_memory
from sim.studies.prefixes.need import PrefixReport, what_is_left_out
from workloads.analysis import prefix_curve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.analysis import PrefixCurve
    from workloads.spec import RequestSpec

_OF_A_MODEL = ("gpu", "tensor_parallel_size", "dtype", "kv_cache_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveQuestion:
    """What is asked of a curve.

    Parameters
    ----------
    model, gpu, tensor_parallel_size, dtype, kv_cache_dtype
        See `sim.hardware.models.kv_memory.kv_memory`; without a model, sizes are in
        blocks only.
    block_size
        Tokens of a block.
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

    def memory(self) -> KvMemory | None:
        """Return what a token takes, if a model is named.

        Raises
        ------
        ConfigError, CapacityError
            If there is none but something is said of it, or it does not fit.
        """
        if self.model is None:
            self._refuse_without_model()
            return None
        return kv_memory(
            self.model,
            self.gpu,
            block_size=self.block_size,
            tensor_parallel_size=self.tensor_parallel_size,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
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
    """Take requests one after the other, and say what a cache of each size finds.

    Parameters
    ----------
    source
        Where they come from, in a word.
    requests
        In order of arrival.
    question
        What is asked.
    memory
        `CurveQuestion.memory`, asked before the requests are read.

    Raises
    ------
    WorkloadError
        If a number of the question is out of range.
    """
    found = prefix_curve(
        requests,
        question.block_size,
        prompts_only=question.prompts_only,
        sample_rate=question.sample,
        sample_seed=question.sample_seed,
    )
    return PrefixReport(
        title=_title(source, found, question.prompts_only),
        curve=found,
        bounds=found.bounds(question.bounds),
        need=found.need(question.share),
        memory=memory,
        notes=what_is_left_out(requests),
    )


def _title(source: str, curve: PrefixCurve, prompts_only: bool) -> str:
    paths = curve.paths
    kept = "prompts only" if prompts_only else "prompts and answers"
    if curve.sampled is not None:
        kept = f"{kept} (a sample of {100 * paths.sample_rate:g} %)"
    number = paths.num_requests
    said = f"{number:,} request{'s' * (number != 1)} one after the other"
    return f"{source}: {said}, {kept} cached"
