"""Speculative decoding of a run: what drafts cost, and how many are accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

from sim.config.plug import build
from sim.costs.measured import MeasuredCost
from sim.costs.roofline import RooflineCost
from sim.costs.roofline.parameters import ATTENTION_EFFICIENCY
from sim.costs.steps.speculative import (
    Drafter,
    FixedDrafter,
    GpuNgramDrafter,
    ModelDrafter,
    NgramDrafter,
    SpeculativeCost,
    pair_s,
)
from sim.engine.group_sampling import sampler_for
from sim.errors import ConfigError
from sim.hardware.models.drafters import drafter_of
from sim.results.recording.drafts import DraftRecorder
from sim.scheduler.v1.speculative_config import SpeculativeConfig, SpeculativeMethod
from workloads.acceptance import ACCEPTANCE, DrawnAcceptance
from workloads.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.config.engine import EngineConfig
    from sim.config.tables import RunConfig
    from sim.costs.base import CostModel
    from sim.engine.sampling import Sampler
    from sim.hardware.gpus import GpuSpec
    from sim.hardware.models.architecture import ModelArchitecture
    from sim.results.recording.recorder import Recorder
    from sim.scheduler.base import Scheduler, SchedulerOutput
    from sim.scheduler.request import Request
    from sim.scheduler.v1.speculative import SpeculativeScheduler
    from workloads.spec import RequestSpec

DRAFT_STEP_KEY: Final = "draft_step_s"
"""Key of the cost table that is the drafter's, whatever the kind."""
PROPOSAL_KEY: Final = "proposal_rate"
"""Key of the acceptance table beside those of its kind."""

_LAUNCHED_AHEAD: Final = {
    "step_overhead_s": 1e-9,
    "request_overhead_s": 0.0,
    "schedule_request_s": 0.0,
}
"""Host time of a drafter's passes: that of the step covers their launches."""


def speculative_settings(engine: EngineConfig) -> SpeculativeConfig | None:
    """Return the settings of drafts for schedulers; None for none."""
    drafts = engine.speculative
    if drafts is None:
        return None
    return SpeculativeConfig(
        SpeculativeMethod(drafts.method),
        drafts.num_speculative_tokens,
        drafts.disable_lookahead_block_hashes,
        drafts.disable_eagle_block_drop,
    )


def drafter_model(
    engine: EngineConfig, model: ModelArchitecture
) -> ModelArchitecture | None:
    """Return the drafter's layers; None where drafts are looked up, or none.

    Parameters
    ----------
    engine
        The engine.
    model
        The target, in the precisions in which it is held.

    Raises
    ------
    ConfigError, CapacityError
        If there is no such draft model, or it has another vocabulary.
    """
    drafts = engine.speculative
    if drafts is None:
        return None
    drafter = drafter_of(model, drafts.method, drafts.model)
    if drafter is None:
        return None
    if drafter.model.vocab_size != model.vocab_size:
        raise ConfigError(
            f"engine.speculative_config.model: target and draft model must have the "
            f"same vocabulary, {model.name} has {model.vocab_size:,} tokens, got "
            f"{drafter.model.name} with {drafter.model.vocab_size:,}; name one of the "
            f"same family"
        )
    return drafter.model


def speculative_cost(
    config: RunConfig,
    target: CostModel,
    model: ModelArchitecture,
    gpu: GpuSpec,
    context: dict[str, Any],
    *,
    uses_drafts: bool = True,
) -> CostModel:
    """Return a cost model whose steps verify drafts, or `target` where there are none.

    Parameters
    ----------
    config
        The run.
    target
        Prices steps of the target.
    model
        The target, in the precisions in which it is held.
    gpu
        The GPU.
    context
        What the engine provides to cost models.
    uses_drafts
        Whether a step may verify drafts of the one before: not in engines that compute
        prompts for others.

    Raises
    ------
    ConfigError
        If the kind of cost model cannot tell what the drafter takes, and nothing does.
    """
    drafts = config.engine.speculative
    if drafts is None:
        return target
    known = target if isinstance(target, RooflineCost) else None
    drafter: Drafter
    if DRAFT_STEP_KEY in config.cost:
        drafter = FixedDrafter(_draft_step_s(config.cost))
    elif known is None and not isinstance(target, MeasuredCost):
        raise ConfigError(
            f"cost.{DRAFT_STEP_KEY}: '{config.cost['kind']}' does not know what a "
            f"drafter takes; give its seconds a step, 0 for none"
        )
    elif (layers := drafter_model(config.engine, model)) is None:
        is_ahead = config.engine.schedules_ahead
        drafter = GpuNgramDrafter(gpu) if is_ahead else NgramDrafter()
    else:
        own = dict(config.cost) if known is not None else {}
        passes = build(
            {"roofline": RooflineCost},
            own | {"kind": "roofline"} | _LAUNCHED_AHEAD,
            "cost",
            context | {"model": layers},
        )
        num_tokens = drafts.num_speculative_tokens if uses_drafts else 0
        drafter = ModelDrafter(passes, num_tokens)
    pair = 0.0
    if isinstance(target, RooflineCost | MeasuredCost):
        share = getattr(target, "prefill_attention_efficiency", ATTENTION_EFFICIENCY)
        pair = pair_s(model, gpu, config.engine.tensor_parallel_size, share)
    return SpeculativeCost(target, drafter, pair)


def _draft_step_s(cost: dict[str, Any]) -> float:
    given = cost[DRAFT_STEP_KEY]
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise ConfigError(
            f"cost.{DRAFT_STEP_KEY}: must be seconds a step, got {given!r}; write a "
            f"number such as 0.002"
        )
    return given


def make_sampler(
    config: RunConfig,
    specs: Sequence[RequestSpec],
    scheduler: Scheduler,
    recorder: Recorder,
) -> Sampler:
    """Return the output processing of a scheduler; that of drafts is recorded.

    Raises
    ------
    ConfigError
        If the traffic does not say how many drafts are accepted.
    """
    acceptance = make_acceptance(config, specs)
    sampler: Any = sampler_for(scheduler, acceptance)
    if acceptance is None or not isinstance(recorder, DraftRecorder):
        return cast("Sampler", sampler)
    num_draft_blocks = cast("SpeculativeScheduler", scheduler).num_draft_blocks
    verified = recorder.verified

    def sample(output: SchedulerOutput, step: int, end_s: float) -> list[Request]:
        finished: list[Request] = sampler(output, step, end_s)
        if step >= 0:  # a step in flight has ended
            wasted = sampler.delivery.wasted
            verified(step, sampler.verified, num_draft_blocks(), wasted)
        return finished

    return sample


def make_acceptance(
    config: RunConfig, specs: Sequence[RequestSpec]
) -> DrawnAcceptance | None:
    """Return the law of how many drafts are accepted; None without drafts.

    Raises
    ------
    ConfigError
        If the traffic does not say it.
    """
    drafts, given = config.engine.speculative, config.workload.acceptance
    if drafts is None:
        return None
    where = "workload.acceptance"
    if given is None:
        raise ConfigError(
            f"{where}: how many drafts are accepted is a property of the traffic; give "
            f"a table such as {{kind: constant, rate: 0.7}} or {{kind: profile, name: "
            f"qwen3.5-397b-a17b-mtp}} (kvsim list acceptance_profiles)"
        )
    own = {key: value for key, value in given.items() if key != PROPOSAL_KEY}
    rates = build(ACCEPTANCE, own, where, more_keys=(PROPOSAL_KEY,))
    finds = drafts.method == "ngram"
    try:
        return DrawnAcceptance(
            rates,
            specs,
            drafts.num_speculative_tokens,
            proposal_rate=given.get(PROPOSAL_KEY, 1.0) if finds else 1.0,
            verifies_none=config.engine.schedules_ahead,
            seed=config.seed,
        )
    except WorkloadError as error:
        raise ConfigError(f"{where}: {error}") from error
