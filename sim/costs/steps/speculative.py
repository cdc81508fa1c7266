"""Time that verifying drafts and proposing them adds to a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from sim.costs.base import StepCost, Together
from sim.costs.checks import at_least_zero
from sim.costs.parts import Memo
from sim.costs.roofline.volumes import decode_key_flops
from sim.hardware.models.layers import LayerKind
from sim.scheduler.batch import BatchShape, VerifyingShape
from workloads.sums import added

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sim.costs.base import CostModel
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture

NGRAM_TOKEN_S: Final = 1.3e-9
NGRAM_REQUEST_S: Final = 1.0e-6
"""Seconds in which n-gram look-up passes a token of a request's text, and a request
besides. Measured: the look-up of vLLM 0.33, one thread of an AMD EPYC, 1 to 64 requests
of 512 to 8,192 random tokens."""

_TOKEN_BYTES: Final = 4


class Drafter(Protocol):
    """Proposes the drafts of the next step behind each step."""

    def step(self, shape: BatchShape) -> StepCost:
        """Return the cost of proposing behind a step of a shape with tokens."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return parameters and sources, JSON-ready."""
        ...


class ModelDrafter:
    """A drafter that is a model, or a layer of one, and runs once for each draft.

    ::

        pass 1        all tokens of the step, so that its cache keeps up
        pass 2 .. k   one token of each request, each a token further

    Parameters
    ----------
    model
        Prices its steps; its host time should be next to nothing, since launches run
        ahead of the GPU.
    num_speculative_tokens
        Drafts of a request. 0 where none is ever used: pass 1 is left, without output.

    Notes
    -----
    Source: vLLM 0.33, ``v1/spec_decode/llm_base_proposer.py`` (`propose`): the loop
    takes all requests of the batch, prompts in mid-way too. Drafts that are not used:
    ``v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py`` (``skip_sample``).
    """

    def __init__(self, model: CostModel, num_speculative_tokens: int) -> None:
        self._model = model
        self._num_passes = max(num_speculative_tokens, 1)
        self._has_output = num_speculative_tokens > 0

    def step(self, shape: BatchShape) -> StepCost:
        first, *others = map(self._model.step, self._passes(shape))
        if not self._has_output:
            parts = tuple(first._replace(head_s=0.0).parts)
            first = _with_parts(first, parts, extrapolated=first.extrapolated)
        return _added(first, *others)

    def _passes(self, shape: BatchShape) -> Iterator[BatchShape]:
        """Yield the shapes of its passes behind a step."""
        yield BatchShape(*shape[:6])
        num_rows = shape.num_decodes + shape.num_prefills
        num_context_tokens = (
            shape.num_decode_context_tokens + shape.num_prefill_context_tokens
        )
        for _ in range(1, self._num_passes):
            num_context_tokens += num_rows
            yield BatchShape(num_rows, num_context_tokens, 0, 0, 0, 0)

    def together(self, shapes: Sequence[BatchShape]) -> tuple[float, float]:
        """Return seconds of experts and of exchanges, see `steps_together`."""
        model = self._model
        if not isinstance(model, Together):
            return 0.0, 0.0
        passes = zip(*map(self._passes, shapes), strict=True)
        experts_s, exchange_s = zip(*map(model.together, passes), strict=True)
        return added(experts_s), added(exchange_s)

    def describe(self) -> dict[str, Any]:
        told = self._model.describe()
        named = {key: told[key] for key in ("kind", "model") if key in told}
        return named | {"num_passes": self._num_passes}


class NgramDrafter:
    """A drafter that looks drafts up in the text of each request, on the host.

    Parameters
    ----------
    token_s, request_s
        Seconds a token of the text, and a request.

    Notes
    -----
    Source: vLLM 0.33, ``v1/spec_decode/ngram_proposer.py``: one thread, one pass over
    the text of each request, whatever it finds.
    """

    def __init__(
        self, token_s: float = NGRAM_TOKEN_S, request_s: float = NGRAM_REQUEST_S
    ) -> None:
        self._token_s = token_s
        self._request_s = request_s

    def step(self, shape: BatchShape) -> StepCost:
        num_tokens = shape.num_decode_context_tokens + shape.num_prefill_context_tokens
        num_rows = shape.num_decodes + shape.num_prefills
        host_s = self._token_s * num_tokens + self._request_s * num_rows
        return StepCost(host_s, host_s=host_s)

    def describe(self) -> dict[str, Any]:
        return {"kind": "ngram", "token_s": self._token_s, "request_s": self._request_s}


class GpuNgramDrafter:
    """A drafter that looks drafts up on the GPU, behind the sampler of a step.

    Parameters
    ----------
    gpu
        It reads every token of the texts once.

    Notes
    -----
    Source: vLLM 0.33, ``v1/worker/gpu/spec_decode/ngram/speculator.py``: the second
    model runner, with which a step is scheduled ahead of such drafts.
    """

    def __init__(self, gpu: GpuSpec) -> None:
        self._token_s = _TOKEN_BYTES / gpu.memory_bandwidth_bytes_per_s

    def step(self, shape: BatchShape) -> StepCost:
        num_tokens = shape.num_decode_context_tokens + shape.num_prefill_context_tokens
        gpu_s = self._token_s * num_tokens
        return StepCost(gpu_s, head_s=gpu_s)

    def describe(self) -> dict[str, Any]:
        return {"kind": "ngram", "on": "gpu", "token_s": self._token_s}


class FixedDrafter:
    """A drafter that takes the same time behind every step.

    Parameters
    ----------
    draft_step_s
        Seconds for all drafts of a step, 0 or more.

    Raises
    ------
    ConfigError
        If it is negative or not finite.
    """

    def __init__(self, draft_step_s: float) -> None:
        self._step_s = at_least_zero("draft_step_s", draft_step_s)

    def step(self, shape: BatchShape) -> StepCost:
        del shape
        return StepCost(self._step_s, host_s=self._step_s)

    def describe(self) -> dict[str, Any]:
        return {"kind": "fixed", "draft_step_s": self._step_s}


class SpeculativeCost:
    """A step that verifies drafts, and the drafter behind it.

    ::

        products, collectives, host    of all query tokens: drafts are tokens
        head                           a row for each token that is verified
        attention of a verification    that of a decode: keys are read once for all of
                                       its tokens; at least its products
        drafter                        its own parts, added to those of the step

    An empty step has no drafter.

    Parameters
    ----------
    model
        Prices steps of the target.
    drafter
        Prices what follows.
    pair_s
        Seconds of a query-key pair of the target, at peak; 0 if that is not known.
    """

    def __init__(self, model: CostModel, drafter: Drafter, pair_s: float = 0.0) -> None:
        self._model = model
        self._drafter = drafter
        self._pair_s = pair_s
        self._head_s: Memo[float] = Memo()
        if isinstance(model, Together):
            self.together = _all_together(model, drafter)

    def __getattr__(self, name: str) -> Any:
        # The host's work is the target's; nothing else is handed on.
        if name.startswith("host_"):
            return getattr(self._model, name)
        raise AttributeError(name)

    def step(self, shape: BatchShape) -> StepCost:
        cost = self._model.step(shape)
        if isinstance(shape, VerifyingShape):
            cost = self._verifying(cost, shape)
        if not (shape.num_decodes or shape.num_prefill_tokens):
            return cost
        return _added(cost, self._drafter.step(shape))

    def _verifying(self, cost: StepCost, shape: VerifyingShape) -> StepCost:
        """Return the cost with the attention and the head of verifications."""
        if not any(cost.parts):
            return cost  # the model's own: chunks as any
        num_requests = shape.num_verifications
        attended = self._model.step(
            BatchShape(
                shape.num_decodes + num_requests,
                shape.num_decode_context_tokens + shape.num_verified_context_tokens,
                shape.num_prefills - num_requests,
                shape.num_prefill_tokens - shape.num_verified_tokens,
                shape.num_prefill_context_tokens - shape.num_verified_context_tokens,
                shape.num_prefill_attention_pairs - shape.num_verified_attention_pairs,
            )
        )
        least_s = self._pair_s * shape.num_verified_attention_pairs
        num_rows = shape.num_decodes + shape.num_prefills
        num_rows += shape.num_verified_tokens - num_requests
        parts = (
            cost.gemm_s,
            attended.prefill_attention_s,
            max(attended.decode_attention_s, least_s),
            self._head(num_rows),
            cost.allreduce_s,
            cost.swap_s,
            cost.copy_s,
            cost.host_s,
        )
        return _with_parts(attended, parts, extrapolated=attended.extrapolated)

    def _head(self, num_rows: int) -> float:
        """Return the seconds of output projection and sampler for so many rows."""
        kept = self._head_s.get(num_rows)
        if kept is not None:
            return kept
        head_s = self._model.step(BatchShape(num_rows, num_rows, 0, 0, 0, 0)).head_s
        return self._head_s.keep(num_rows, head_s)

    def describe(self) -> dict[str, Any]:
        return self._model.describe() | {"drafter": self._drafter.describe()}


def _all_together(
    model: Together, drafter: Drafter
) -> Callable[[Sequence[BatchShape]], tuple[float, float]]:
    """Return the common work of ranks in the layers of the target and the drafter."""
    if not isinstance(drafter, Together):
        return model.together

    def together(shapes: Sequence[BatchShape]) -> tuple[float, float]:
        experts_s, exchange_s = model.together(shapes)
        more_experts_s, more_exchange_s = drafter.together(shapes)
        return experts_s + more_experts_s, exchange_s + more_exchange_s

    return together


def pair_s(
    model: ModelArchitecture, gpu: GpuSpec, tensor_parallel_size: int, share: float
) -> float:
    """Return the seconds of a query-key pair of a verification.

    Parameters
    ----------
    model, gpu, tensor_parallel_size
        The target and its ranks. Windows are not counted: memory bounds them.
    share
        Of the peak FLOP/s that attention reaches.
    """
    layers = model.num_layers_of(LayerKind.FULL_ATTENTION, LayerKind.LATENT_ATTENTION)
    flops = layers * decode_key_flops(model, tensor_parallel_size)
    return flops / (gpu.bf16_flops_per_s * share)


def _added(first: StepCost, *others: StepCost) -> StepCost:
    """Return steps in a row as one; only the first has bounds of its own."""
    columns = zip(first.parts, *[each.parts for each in others], strict=True)
    parts = tuple(map(added, columns))
    flag = first.extrapolated or any(each.extrapolated for each in others)
    return _with_parts(first, parts, extrapolated=flag)


def _with_parts(
    cost: StepCost, parts: tuple[float, ...], *, extrapolated: bool
) -> StepCost:
    """Return a cost with other parts, whose sum and bounds move along."""
    before_s, lo_s, hi_s = cost.total_s, cost.lo_s, cost.hi_s
    total_s = before_s + (added(parts) - added(cost.parts))
    moved_s = total_s - before_s
    lo_s = max(lo_s + moved_s, total_s * lo_s / before_s)
    return StepCost._make((total_s, *parts, extrapolated, lo_s, hi_s + moved_s))
