"""The work of ``kvsim calibrate replay``, apart from reading its arguments."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from calibrate.harness.command import Lines
from calibrate.harness.device import MissingError
from calibrate.replay.log import Facts, Schedule
from sim.cli.main import EXIT_INTERRUPTED
from sim.costs.measured.profile import Profile, read_profile
from sim.errors import UserError
from sim.hardware.gpus import load_gpu
from sim.hardware.models.bundled import load_model
from sim.results.output import check_output, output_directory
from sim.scheduler.generations import DEFAULT_GENERATION, generation_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from calibrate.harness.outcome import Progress
    from calibrate.replay.predict import Target
    from calibrate.replay.run import Executor, Plan, Replayed
    from sim.hardware.models.architecture import ModelArchitecture

_BLOCK_SIZE: Final = 16
"""Of the steps of --into where there is no schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of the command; see there."""

    steps: Path | None
    profile: Path | None
    into: Path | None
    out: Path | None
    plan: Plan
    num_layers: int | None
    use_graphs: bool
    check: bool
    dry_run: bool
    seed: int
    overwrite: bool
    quiet: bool
    json: bool

    def checked(self) -> None:
        """Refuse arguments that cannot be meant, before anything is imported or run."""
        plan = self.plan
        for name, value in (
            ("max-steps", plan.max_steps),
            ("sample", plan.sample),
            ("repeats", plan.repeats),
        ):
            if value is not None and value < 1:
                raise UserError(f"--{name} must be 1 or more; got {value}")
        limit_s = plan.time_limit_s
        if limit_s is not None and not 0 < limit_s < math.inf:
            raise UserError(
                f"--time-limit must be a number of seconds above 0; got {limit_s}"
            )
        if self.steps is None and (self.into is None or self.check):
            raise UserError(
                "give STEPS, the results of 'kvsim run --record schedule'; only --into "
                "does without"
            )
        if self.into is not None:
            self._check_into(self.into)
        if self.check and (self.sample_or_profile or self.dry_run):
            raise UserError(
                "--check executes all steps from the beginning on the CPU; give it "
                "STEPS and --max-steps only"
            )
        if self.out is not None:
            from calibrate.replay.output import FILES  # noqa: PLC0415 - draws

            check_output(self.out, overwrite=self.overwrite, files=FILES)

    @property
    def sample_or_profile(self) -> bool:
        return bool(self.plan.sample or self.profile or self.into or self.out)

    def _check_into(self, into: Path) -> None:
        if self.profile is None or self.dry_run:
            raise UserError(
                "--into writes a measured --profile with whole steps: give it, and no "
                "--dry-run"
            )
        if into.exists() and not self.overwrite and into != self.profile:
            raise UserError(f"'{into}' exists; take another name, or --overwrite")


def run_replay(request: Request) -> int:
    """Run the replay that the arguments ask for; return the exit status."""
    request.checked()
    began_s = time.monotonic()
    schedule = None if request.steps is None else Schedule(request.steps)
    _need_torch()
    if request.check and schedule is not None:
        return _check(request, schedule)
    session = _Session(request, schedule)
    if request.into is not None:
        session.measure_steps(request.into)
    if schedule is None:
        return 0
    limit_s = request.plan.time_limit_s
    if limit_s is not None:  # building the stack has taken its part
        limit_s = max(1e-3, limit_s - (time.monotonic() - began_s))
    return session.replay(schedule, replace(request.plan, time_limit_s=limit_s))


def _need_torch() -> None:
    if find_spec("torch") is None:
        raise MissingError(
            "a replay needs torch, which is not installed: pip install "
            "'kvsim[calibrate]', or its CPU build for --check and --dry-run"
        )


def _check(request: Request, schedule: Schedule) -> int:
    from calibrate.replay.tokens import texts_beside  # noqa: PLC0415
    from calibrate.replay.truth import TOLERANCE, TruthCheck  # noqa: PLC0415 - torch

    place = request.steps
    assert place is not None
    _one_thread()
    check = TruthCheck(schedule.facts, texts_beside(place), request.seed)
    truth = check.run(islice(schedule.steps(), request.plan.max_steps))
    if request.json:
        print(json.dumps(asdict(truth), indent=2))
    elif not request.quiet:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in truth.kinds.items())
        print(
            f"{truth.num_steps:,} steps ({kinds}) executed truthfully: "
            f"{truth.num_logits:,} logit vectors equal those of dense attention, worst "
            f"relative error {truth.worst_error:.1e} (at most {TOLERANCE:.0e})"
        )
    return 0


def _one_thread() -> None:
    """Keep a tiny stack on one thread: handing its pieces around takes longer."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)


class _Session:
    """A stack on a device, and the prediction that prices its steps."""

    def __init__(self, request: Request, schedule: Schedule | None) -> None:
        self._request = request
        self._profile_path = request.profile
        if schedule is None:
            assert request.profile is not None
            facts = facts_without_schedule(read_profile(request.profile))
        else:
            facts = schedule.facts
        self.facts = facts
        self._model = load_model(facts.model)
        self._executor, self._num_layers = self._make_executor()

    def _make_executor(self) -> tuple[Executor, int]:
        """Return the executor, and the layers that it has or stands for."""
        from calibrate.gpu.detect import find_gpu  # noqa: PLC0415 - torch
        from calibrate.gpu.device import GpuDevice  # noqa: PLC0415
        from calibrate.replay import setup  # noqa: PLC0415

        request = self._request
        geometry = setup.replay_geometry(self._model, self.facts, request.num_layers)
        if request.dry_run:
            _one_thread()
            executor = setup.tiny_executor(self.facts, request.seed)
            return executor, geometry.num_layers
        gpu = find_gpu(request.seed)
        assert isinstance(gpu, GpuDevice)
        variants: dict[str, list[str]] = {}
        if request.profile is not None:
            variants = dict(read_profile(request.profile).fit.get("variants") or {})
        executor = setup.gpu_executor(
            gpu,
            geometry,
            self.facts,
            variants,
            use_graphs=request.use_graphs,
            seed=request.seed,
        )
        return executor, geometry.num_layers

    @property
    def _gpu(self) -> str:
        """Return the GPU that prices are of: the profile's, whatever was simulated."""
        if self._profile_path is None:
            return self.facts.gpu
        return str(read_profile(self._profile_path).fit.get("gpu") or self.facts.gpu)

    @property
    def _stack_model(self) -> ModelArchitecture:
        return replace(self._model, num_hidden_layers=self._num_layers)

    def _target(self) -> Target:
        from calibrate.replay.predict import Target  # noqa: PLC0415 - scipy

        return Target(
            model=self._stack_model,
            gpu=load_gpu(self._gpu),
            block_size=self.facts.block_size,
            swap=generation_of(self.facts.engine_version).swap,
            uses_graphs=self._executor.variants["graphs"] != "none",
        )

    def measure_steps(self, into: Path) -> None:
        """Time whole steps, and write a profile that is fitted to them."""
        from calibrate.replay.whole import measured_steps, with_steps  # noqa: PLC0415
        from calibrate.writing import write_profile  # noqa: PLC0415

        assert self._profile_path is not None
        steps = measured_steps(
            self._executor, self.facts, self._num_layers, self._request.seed
        )
        profile = read_profile(self._profile_path)
        fitted = with_steps(profile, steps, self._stack_model)
        write_profile(fitted, into)
        self._profile_path = into
        if not (self._request.quiet or self._request.json):
            print(f"{len(steps)} whole steps in {into}: {_correction(fitted)}")

    def replay(self, schedule: Schedule, plan: Plan) -> int:
        from calibrate.replay.output import FILES, show, write_files  # noqa: PLC0415
        from calibrate.replay.predict import Prediction  # noqa: PLC0415
        from calibrate.replay.run import Replay  # noqa: PLC0415

        request = self._request
        prediction = Prediction(self._target(), self._profile_path)
        tell = _teller(request.quiet)
        replayed = Replay(schedule, self._executor, prediction, plan, tell=tell).run()
        facts = self._facts(prediction.name)
        title = self._title(prediction.name)
        if request.out is not None:
            with output_directory(
                request.out, overwrite=request.overwrite, files=FILES
            ) as folder:
                write_files(replayed, facts, title, folder)
        if request.json:
            print(json.dumps(facts | replayed.comparison.to_dict(), indent=2))
        elif not request.quiet:
            show(replayed, title)
        return _status(replayed)

    def _facts(self, priced_by: str) -> dict[str, Any]:
        return {
            "priced_by": priced_by,
            "gpu": self._gpu,
            "stack": "tiny, on a CPU" if self._request.dry_run else "as simulated",
            "num_layers": self._num_layers,
            "variants": self._executor.variants,
            "worst_graph_error": self._executor.worst_graph_error,
            "dry_run": self._request.dry_run,
            "repeats": self._request.plan.repeats,
            "schedule": asdict(self.facts),
        }

    def _title(self, priced_by: str) -> str:
        facts = self.facts
        engine = f"{facts.scheduler} {facts.engine_version}"
        if self._request.dry_run:
            return f"dry run, errors mean nothing: a tiny stack on the CPU; {engine}"
        layers = f"{self._num_layers} layers" if self._request.num_layers else ""
        parts = [f"{facts.model} on {self._gpu}", layers, engine, f"by {priced_by}"]
        return ", ".join(part for part in parts if part)


def facts_without_schedule(profile: Profile) -> Facts:
    """Return facts for whole steps: a pool that holds the largest of them."""
    from calibrate.replay.whole import most_tokens  # noqa: PLC0415 - numpy, scipy

    model = profile.provenance.get("model")
    gpu = profile.fit.get("gpu") or profile.device.get("name")
    name = model.get("model") if isinstance(model, dict) else model
    if not isinstance(name, str) or not isinstance(gpu, str):
        raise UserError(
            "the profile does not say of which model and GPU it is; give STEPS"
        )
    return Facts(
        scheduler="v1",
        engine_version=DEFAULT_GENERATION.engine_version,
        model=name,
        gpu=gpu,
        tensor_parallel_size=1,
        kv_cache_dtype="auto",
        block_size=_BLOCK_SIZE,
        num_gpu_blocks=-(-most_tokens() // _BLOCK_SIZE),
        num_cpu_blocks=0,
        max_model_len=8192,
    )


def _correction(profile: Profile) -> str:
    found = profile.fit.get("step_correction")
    if not found:
        return "too few to fit"
    host = profile.fit["host"]
    step_ms = 1e3 * host["step_overhead_s"]
    request_us = 1e6 * host["request_overhead_s"]
    return (
        f"kernels x {found['factor']:.3f}, host {step_ms:.2f} ms a step and "
        f"{request_us:.1f} us a request; median error {found['before_percent']:.1f} % "
        f"before, {found['after_percent']:.1f} % held out"
    )


def _teller(quiet: bool) -> Callable[[Progress], None]:
    if quiet:
        return lambda _: None
    return Lines(sys.stderr, time.monotonic).update


def _status(replayed: Replayed) -> int:
    return EXIT_INTERRUPTED if replayed.stopped == "interruption" else 0
