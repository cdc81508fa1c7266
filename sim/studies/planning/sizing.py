"""From a question in a line to a plan: traffic, candidates, prices, a small budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import resources
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from sim.config.files import override
from sim.config.plug import did_you_mean
from sim.config.tables import parse_config
from sim.errors import CapacityError, ConfigError, UserError
from sim.hardware.capacity.arguments import parse_engine_version, resolve_batch
from sim.hardware.gpus import GIB, load_gpu
from sim.hardware.models.bundled import load_model
from sim.simulation.assemble import make_capacity
from sim.simulation.workload import make_workload
from sim.studies.planning.search.tasks import natural_rate
from sim.studies.planning.spec import NO_PRICE, parse_plan
from workloads.errors import WorkloadError
from workloads.plain import parse_yaml
from workloads.traces import guess_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sim.config.engine import EngineConfig
    from sim.studies.planning.spec import PlanConfig

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
"""Ranks that are tried where the question names none: those of a node."""

_SHORTLIST = 3
"""A recommendation and two alternatives."""
_NUM_REQUESTS = (900, 3000)
"""Fewest and most requests of a run; between them, so many seconds of the traffic."""
_SECONDS = 90.0
_WINDOWS = 10
"""Parts of a trace that a run has at least; one shorter than ten minutes is cut so."""
_ROOMY = 64
"""Times the memory of a GPU, so that a model's need there can be counted."""
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class SizeQuestion:
    """A question: which engines serve traffic within objectives at the least cost.

    Parameters
    ----------
    model
        Bundled name, or path of a config.json.
    gpus
        GPUs that may be bought.
    objectives
        As of a plan.
    rate
        Requests/s; None for the trace's own.
    input_tokens, output_tokens
        Lengths of all requests; None with a trace.
    trace
        Path of a trace, of any format that is known by its content.
    tensor_parallel_sizes
        GPUs of an engine.
    prices
        Of a GPU for an hour; those of a GPU without one are `default_prices`.
    settings
        Changes to the plan, as ``key.path=value``.
    seed
        Of the traffic.
    """

    model: str
    gpus: tuple[str, ...]
    objectives: Mapping[str, float]
    rate: float | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    trace: str | None = None
    tensor_parallel_sizes: tuple[int, ...] = TENSOR_PARALLEL_SIZES
    prices: Mapping[str, float] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    seed: int = 0

    @property
    def supposed(self) -> str:
        """How traffic that is given by its means alone is drawn, in a sentence."""
        if self.trace is not None:
            return ""
        return (
            f"All prompts have {self.input_tokens:,} tokens, all answers "
            f"{self.output_tokens:,}, and arrivals are Poisson: where traffic varies "
            f"more, an engine holds less (--trace FILE)."
        )


@dataclass(frozen=True, slots=True)
class SizePlan:
    """The plan that answers a question.

    Parameters
    ----------
    data
        The same as YAML would hold it.
    plan
        The plan, checked.
    misfits
        Why some GPUs or ranks are no candidates, a sentence each.
    """

    data: Mapping[str, Any]
    plan: PlanConfig
    misfits: tuple[str, ...]


def default_prices() -> dict[str, Any]:
    """Return round figures to start from, not a quote of anybody's."""
    file = resources.files("sim.studies.planning") / "prices.yaml"
    table: dict[str, Any] = parse_yaml(file.read_text(encoding="utf-8"), "prices.yaml")
    return table


def plan_of(question: SizeQuestion) -> SizePlan:
    """Return the plan that answers a question.

    Raises
    ------
    ConfigError
        For a mistake in the question.
    CapacityError
        When the model fits no GPU; the message says by how much, and on how many it
        would.
    """
    gpus = tuple(dict.fromkeys(load_gpu(gpu).name for gpu in question.gpus))
    data: dict[str, Any] = {
        "workload": _workload(question),
        "engine": {"model": question.model},
        "candidates": [],
        "objectives": dict(question.objectives),
        "prices": _prices(gpus, question.prices),
        "search": {
            "num_seeds": 3,
            "tolerance": 0.05,
            "warmup_share": 0.1,
            "curve": [],
            "shortlist": _SHORTLIST,
        },
        "sensitivity": None,
        "seed": question.seed,
    }
    override(data, question.settings)
    tables, misfits = _candidates(question, gpus, data)
    data["candidates"] = tables
    return SizePlan(data, parse_plan(data), tuple(misfits))


def _workload(question: SizeQuestion) -> dict[str, Any]:
    lengths = (question.input_tokens, question.output_tokens)
    if question.trace is not None:
        if any(length is not None for length in lengths):
            raise ConfigError(
                "--trace has lengths of its own; remove --input-tokens and "
                "--output-tokens, or the trace"
            )
        return _trace(question, question.trace)
    if None in lengths or question.rate is None:
        raise ConfigError(
            "describe the traffic: --input-tokens, --output-tokens and --rate, or "
            "--trace FILE"
        )
    return {
        "synthetic": {
            "num_requests": _num_requests(question.rate),
            "arrivals": {"kind": "poisson", "rate": question.rate},
            "prompt_tokens": {"kind": "fixed", "tokens": question.input_tokens},
            "output_tokens": {"kind": "fixed", "tokens": question.output_tokens},
        }
    }


def _num_requests(rate: float) -> int:
    fewest, most = _NUM_REQUESTS
    return min(max(ceil(rate * _SECONDS), fewest), most)


def _trace(question: SizeQuestion, path: str) -> dict[str, Any]:
    try:
        table: dict[str, Any] = {"kind": guess_kind(path), "path": path}
    except WorkloadError as error:
        raise ConfigError(
            f"--trace: {error}; write it in a format that is told by its content "
            "first: kvsim workload convert FILE --from KIND --to kvsim --out NEW"
        ) from None
    config = parse_config(
        {
            "workload": {"trace": table},
            "engine": {"model": question.model, "gpu": question.gpus[0]},
        }
    )
    specs = make_workload(config.workload, question.seed).requests()
    recorded = natural_rate(specs)
    if recorded == inf:
        raise ConfigError(
            f"--trace {path}: all of its requests come at once, so there is no rate to "
            f"size for; give one that is spread over time, or --input-tokens, "
            f"--output-tokens and --rate"
        )
    window_s = min(60.0, len(specs) / recorded / _WINDOWS)
    if question.rate is not None:
        table["rate_scale"] = question.rate / recorded
    wanted = _num_requests(question.rate or recorded)
    return {
        "trace": table,
        "resample": {
            "window_s": window_s,
            "num_windows": max(_WINDOWS, ceil(wanted / (recorded * window_s))),
        },
    }


def _prices(gpus: Sequence[str], given: Mapping[str, float]) -> dict[str, Any]:
    """Return the prices of GPUs: as given, or round figures, or a GPU-hour each."""
    asked = {load_gpu(gpu).name: price for gpu, price in given.items()}
    for gpu in asked:
        if gpu not in gpus:
            raise ConfigError(
                f"--price {gpu}: this GPU is not among --gpu{did_you_mean(gpu, gpus)}"
            )
    default = default_prices()
    known = {**default["per_gpu_hour"], **asked}
    missing = [gpu for gpu in gpus if gpu not in known]
    if not missing:
        of_gpus = {"per_gpu_hour": {gpu: known[gpu] for gpu in gpus}}
        return of_gpus if asked.keys() >= set(gpus) else {**default, **of_gpus}
    if len(gpus) > 1:
        raise ConfigError(
            f"--price {missing[0]}=NUMBER: there is no price of this GPU to compare "
            f"others with; add it, in USD an hour"
        )
    return {
        "currency": NO_PRICE,
        "note": f"{missing[0]} has no price; --price {missing[0]}=NUMBER gives it one",
        "per_gpu_hour": {missing[0]: 1.0},
    }


def _candidates(
    question: SizeQuestion, gpus: Sequence[str], data: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a table of candidates for each GPU that the model fits, and misfits.

    Ranks that do not divide the model are left out silently where the question names
    none.
    """
    model, tables, misfits = load_model(question.model).name, [], []
    refusals: list[UserError] = []
    for gpu in gpus:
        fitting: list[int] = []
        largest = None
        for ranks in question.tensor_parallel_sizes:
            own = {**data["engine"], "gpu": gpu, "tensor_parallel_size": ranks}
            config = parse_config({"workload": data["workload"], "engine": own})
            try:
                misfit = misfit_of(config.engine)
            except UserError as error:
                refusals.append(error)
                continue
            if misfit is None:
                fitting.append(ranks)
            else:
                largest = misfit
        if largest is not None:
            misfits.append(largest.sentence(model))
        if fitting:
            tables.append({"gpu": [gpu], "tensor_parallel_size": fitting})
    if not tables:
        if not misfits:
            raise refusals[0]
        raise CapacityError("; ".join(misfits))
    return tables, misfits


# -- models that do not fit ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why an engine has no room for its model.

    Parameters
    ----------
    gpu, tensor_parallel_size
        The configuration that was tried.
    needed_gib, usable_gib
        Of a GPU: weights and a step's memory, and the memory that the engine may use.
    fits_from
        The least number of ranks, a power of two, on which it fits; None for none.
    """

    gpu: str
    tensor_parallel_size: int
    needed_gib: float
    usable_gib: float
    fits_from: int | None

    def sentence(self, model: str) -> str:
        more = self.needed_gib - self.usable_gib
        remedy = (
            f"it fits from tensor_parallel_size {self.fits_from}"
            if self.fits_from is not None
            else f"nor does it on any number of ranks up to {MOST_RANKS}"
        )
        return (
            f"{model} does not fit {self.tensor_parallel_size} x {self.gpu}: a GPU "
            f"lacks {more:.1f} GiB (weights and a step take {self.needed_gib:.1f}, the "
            f"engine may use {self.usable_gib:.1f}); {remedy}"
        )


def misfit_of(engine: EngineConfig) -> Misfit | None:
    """Return by how much an engine's model does not fit, or None if it does.

    Raises CapacityError for a fault that no memory would mend, such as heads that the
    ranks do not divide.
    """
    if fits(engine):
        return None
    model, gpu = load_model(engine.model), load_gpu(engine.gpu)
    tokens, seqs = resolve_batch(
        model,
        gpu,
        parse_engine_version(engine.version),
        max_model_len=engine.max_model_len,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_num_seqs=engine.max_num_seqs,
    )
    limits = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}
    roomy = replace(gpu, memory_bytes=gpu.memory_bytes * _ROOMY)
    there = make_capacity(engine.model_copy(update=limits), model, roomy)
    needed = there.requested_bytes - there.left_bytes + 2 * there.block_bytes
    return Misfit(
        gpu.name,
        engine.tensor_parallel_size,
        needed / GIB,
        gpu.memory_bytes * there.gpu_memory_utilization / GIB,
        _fits_from(engine),
    )


def fits(engine: EngineConfig) -> bool:
    try:
        make_capacity(engine, load_model(engine.model), load_gpu(engine.gpu))
    except CapacityError:
        return False
    return True


def _fits_from(engine: EngineConfig) -> int | None:
    ranks = engine.tensor_parallel_size * 2
    while ranks <= MOST_RANKS:
        try:
            if fits(engine.model_copy(update={"tensor_parallel_size": ranks})):
                return ranks
        except ConfigError:  # heads that so many ranks do not divide
            return None
        ranks *= 2
    return None
