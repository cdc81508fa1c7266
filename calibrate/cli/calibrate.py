"""Commands that this package adds to ``kvsim``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from sim.cli.examples import epilogue
from sim.cli.options import BlockSize, Flag, Json, claiming

calibrate = App(
    help_epilogue=epilogue("calibrate"),
    name="calibrate",
    help="Time the real kernels on a GPU and write a profile.",
)


@calibrate.default
@claiming("out")
def measure(
    *,
    model: str,
    out: Path,
    preset: str = "default",
    backend: str = "auto",
    ops: Annotated[
        list[str] | None, Parameter(consume_multiple=True, negative="")
    ] = None,
    block_size: BlockSize = 16,
    tensor_parallel_size: int = 1,
    seed: int = 0,
    time_limit: float | None = None,
    resume: Flag = False,
    finish: Flag = False,
    overwrite: Flag = False,
    dry_run: Flag = False,
    quiet: Flag = False,
    json: Flag = False,
) -> int:
    """Time the real kernels on a GPU and write a profile.

    Parameters
    ----------
    model
        Bundled name, or path to a config.json: whose shapes are timed.
    out
        The profile to write.
    preset
        Size of the grid: quick, brief, default or extended.
    backend
        Kernels to prefer: auto, vllm, flashinfer, cuda, triton or torch; what it does
        not have is timed with the best of the others.
    ops
        Operations to time, such as decode_attention swap; default: all.
    tensor_parallel_size
        GPUs that share the model: the shapes of one of them are timed.
    seed
        Order of the points, contents and block tables.
    time_limit
        Seconds after which no further block is begun: it ends with what is finished in
        the checkpoint and the exit status of an interruption, 130; --resume goes on.
    resume
        Go on from the checkpoint that a killed calibration left beside the profile.
    finish
        Write the profile of what the checkpoint holds, without its GPU, once each point
        was visited; the profile says that it was cut short, and the checkpoint stays.
    overwrite
        Replace the profile, and begin again where a checkpoint was left.
    dry_run
        Everything but the kernels: made-up times on a fake clock, no GPU needed.
    quiet
        Show neither progress nor summary.
    json
        Print the profile's provenance as JSON.
    """
    import sys
    from dataclasses import replace
    from json import dumps
    from time import monotonic

    began_s = monotonic()
    from calibrate.harness.command import (
        Write,
        calibrate_device,
        check_arguments,
        checked_operations,
    )
    from calibrate.harness.device import Device
    from calibrate.harness.geometry import geometry_of
    from calibrate.harness.outcome import Settings
    from calibrate.harness.session import OutOfTimeError
    from calibrate.tabulate import fit_calibration
    from sim.cli.main import EXIT_INTERRUPTED
    from sim.hardware.models.bundled import load_model

    write = Write.OVER if overwrite else Write.NEW
    write = Write.END if finish else Write.ON if resume else write
    check_arguments(preset, backend, out, write, time_limit)
    operations = checked_operations(ops)
    architecture = load_model(model)
    geometry = geometry_of(architecture, block_size, tensor_parallel_size)
    settings = Settings(geometry, preset, backend, operations, seed)
    device: Device
    dry = dry_run or backend == "dry-run"
    if dry:
        from calibrate.harness.dry_run import DryRunDevice

        device = DryRunDevice()
    elif finish:
        from calibrate.harness.command import checkpoint_of
        from calibrate.harness.recorded import RecordedDevice

        device = RecordedDevice(checkpoint_of(out))
    else:
        from calibrate.gpu.detect import find_gpu

        device = find_gpu(seed)
    if time_limit is not None:
        # torch and nvcc have taken their part
        left_s = time_limit - (0.0 if dry else monotonic() - began_s)
        settings = replace(settings, time_limit_s=left_s)
    try:
        profile = calibrate_device(device, settings, out, write, quiet or json)
    except OutOfTimeError as stop:
        print(f"kvsim: {stop}; add --resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    fit_calibration(out, architecture, quiet or json)
    if json:
        print(dumps(profile["provenance"], indent=2, allow_nan=False))
    return 0


@calibrate.command(help_epilogue=epilogue("calibrate replay"))
@claiming("into")
def replay(
    steps: Path | None = None,
    /,
    *,
    profile: Path | None = None,
    into: Path | None = None,
    out: Path | None = None,
    max_steps: int | None = None,
    sample: int | None = None,
    repeats: int = 3,
    num_layers: int | None = None,
    time_limit: float | None = None,
    no_graphs: Flag = False,
    check: Flag = False,
    dry_run: Flag = False,
    seed: int = 0,
    overwrite: Flag = False,
    quiet: Flag = False,
    json: Json = False,
) -> int:
    """Execute a simulated schedule on a GPU: predicted against measured, by step.

    Parameters
    ----------
    steps
        Results of kvsim run --record schedule, or its schedule.jsonl.zst. May be left
        out with --into.
    profile
        That prices the steps; default: the datasheet of the GPU that was simulated.
    into
        Time 17 whole steps of its own first, write them with what was fitted to them
        into this profile, and price by it.
    out
        Folder for replay.json, replay.csv and replay.png.
    max_steps
        Steps from the beginning, at most; default: all.
    sample
        Steps to execute of these, evenly over kinds and time; default: all.
    repeats
        Executions of a step, after one that does not count; medians are taken.
    num_layers
        Layers of the stack, where the model does not fit; default: the model's.
    time_limit
        Seconds after which no further step is begun.
    no_graphs
        Launch the kernels of decodes one by one, not as CUDA graphs.
    check
        Instead, prove on the CPU that the schedule is executed truthfully: all logits
        of a tiny stack against dense attention.
    dry_run
        Everything on the CPU with a tiny stack: errors mean nothing.
    seed
        Of weights and block tables.
    overwrite
        Replace --out, and --into.
    quiet
        Show neither progress nor result.
    """
    from calibrate.replay.command import Request, run_replay
    from calibrate.replay.run import Plan

    request = Request(
        steps=steps,
        profile=profile,
        into=into,
        out=out,
        plan=Plan(max_steps, sample, repeats, time_limit),
        num_layers=num_layers,
        use_graphs=not no_graphs,
        check=check,
        dry_run=dry_run,
        seed=seed,
        overwrite=overwrite,
        quiet=quiet,
        json=json,
    )
    return run_replay(request)
