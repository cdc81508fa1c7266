"""Commands that this package adds to ``kvsim``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="")]


def calibrate(
    *,
    model: str,
    out: Path,
    preset: str = "default",
    backend: str = "auto",
    ops: Annotated[
        list[str] | None, Parameter(consume_multiple=True, negative="")
    ] = None,
    block_size: int = 16,
    tensor_parallel_size: int = 1,
    seed: int = 0,
    time_limit: float | None = None,
    resume: Flag = False,
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
        Size of the grid: quick, default or extended.
    backend
        Kernels to prefer: auto, vllm, flashinfer, cuda, triton or torch; what it does
        not have is timed with the best of the others.
    ops
        Operations to time, such as decode_attention swap; default: all.
    block_size
        Tokens a block.
    tensor_parallel_size
        GPUs that share the model: the shapes of one of them are timed.
    seed
        Order of the points, contents and block tables.
    time_limit
        Seconds after which no further block is begun: it ends with what is finished in
        the checkpoint and the exit status of an interruption, 130; --resume goes on.
    resume
        Go on from the checkpoint that a killed calibration left beside the profile.
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
    from calibrate.finish import fit_calibration
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
    from sim.cli import EXIT_INTERRUPTED
    from sim.model import load_model

    write = Write.ON if resume else Write.OVER if overwrite else Write.NEW
    check_arguments(preset, backend, out, write, time_limit)
    operations = checked_operations(ops)
    architecture = load_model(model)
    geometry = geometry_of(architecture, block_size, tensor_parallel_size)
    settings = Settings(geometry, preset, backend, operations, seed)
    device: Device
    if dry_run or backend == "dry-run":
        from calibrate.harness.dry_run import DryRunDevice

        device = DryRunDevice()
    else:
        from calibrate.gpu.detect import find_gpu

        device = find_gpu(seed)
    if time_limit is not None:
        # torch and nvcc have taken their part
        left_s = time_limit - (0.0 if dry_run else monotonic() - began_s)
        settings = replace(settings, time_limit_s=left_s)
    try:
        profile = calibrate_device(device, settings, out, resume, quiet or json)
    except OutOfTimeError as stop:
        print(f"kvsim: {stop}; add --resume", file=sys.stderr)
        return EXIT_INTERRUPTED
    fit_calibration(out, architecture, quiet or json)
    if json:
        print(dumps(profile["provenance"], indent=2, allow_nan=False))
    return 0
