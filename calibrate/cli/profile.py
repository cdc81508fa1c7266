"""``kvsim profile``: files of measured kernel times.

Loaded for its help line, so it imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from sim.cli import options
from sim.cli.examples import epilogue

Tables = Annotated[bool, Parameter(name="--tables", negative="--no-tables")]

profile = App(
    help_epilogue=epilogue("profile"),
    name="profile",
    help="Profiles of measured kernel times: show, plot, validate, diff, fit, import.",
)
importing = App(
    help_epilogue=epilogue("profile import"),
    name="import",
    help="Turn published kernel tables into a profile, without a GPU.",
)
profile.command(importing)


@profile.command(help_epilogue=epilogue("profile show"))
def show(
    file: Path | None = None,
    *,
    crossover: options.Flag = False,
    model: str | None = None,
    gpu: str | None = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    block_size: options.BlockSize = 16,
    max_num_batched_tokens: int = 8192,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    out: Path | None = None,
    json: options.Json = False,
    quiet: options.Flag = False,
) -> int:
    """Print what a profile holds and where it comes from.

    With --crossover, compare instead what a preempted sequence costs, by its length:
    swapped out and in again by each variant, or computed again.

    Parameters
    ----------
    file
        A kvprofile/1 file.
    crossover
        Swap against recompute, for --model.
    model
        Bundled name, or path to a config.json; the profile needs its tables.
    gpu
        Datasheet to compare by: without a profile, or where it names no GPU.
    max_num_batched_tokens
        Tokens of a chunk when a prompt is computed again.
    out
        Figure of the comparison to write, a PNG.
    quiet
        Print the id only; with --crossover, only where swapping is cheaper.
    """
    from calibrate.cli import output as profile_output
    from sim.costs.measured.profile import read_profile
    from sim.errors import UserError

    if crossover:
        from calibrate.cli.crossover import show_crossover
        from sim.costs.crossover import Question

        if model is None:
            raise UserError(
                "--crossover compares for a model; give --model, such as "
                "meta-llama/Llama-3.1-8B"
            )
        question = Question(
            file=file,
            gpu=gpu,
            model=model,
            tensor_parallel_size=tensor_parallel_size,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=kv_cache_dtype,
        )
        return show_crossover(question, out=out, json=json, quiet=quiet)
    if file is None or model or gpu or out:
        raise UserError(
            "show takes a profile; --model, --gpu and --out belong to --crossover"
        )
    found = read_profile(file)
    if quiet:
        print(found.id)
    elif json:
        profile_output.print_json(profile_output.overview(found))
    else:
        profile_output.print_overview(found)
    return 0


@profile.command(help_epilogue=epilogue("profile validate"))
def validate(
    file: Path, *, json: options.Json = False, quiet: options.Flag = False
) -> int:
    """Check a profile against physics, order and provenance.

    Parameters
    ----------
    file
        A kvprofile/1 file.
    quiet
        Print nothing for a good profile.
    """
    from calibrate.cli import output as profile_output
    from sim.costs.measured.profile import read_profile
    from sim.costs.measured.profile_checks import validate_profile

    problems = validate_profile(read_profile(file))
    return profile_output.print_problems(file.name, problems, json=json, quiet=quiet)


@profile.command(help_epilogue=epilogue("profile diff"))
def diff(
    left: Path, right: Path, *, json: options.Json = False, quiet: options.Flag = False
) -> int:
    """Compare the points that two profiles share.

    Parameters
    ----------
    left, right
        Two kvprofile/1 files.
    quiet
        Say by the exit status only: 1 where shared points differ by over 5 %.
    """
    from calibrate.cli import output as profile_output
    from calibrate.cli.output import diff_profiles
    from sim.costs.measured.profile import read_profile

    found = diff_profiles(read_profile(left), read_profile(right))
    if json:
        profile_output.print_json({name: row.to_json() for name, row in found.items()})
    elif not quiet:
        profile_output.print_diff(found)
    return 1 if any(row.differs for row in found.values()) else 0


@profile.command(help_epilogue=epilogue("profile fit"))
@options.claiming("out")
def fit(
    file: Path,
    *,
    seeds: int | None = None,
    op: tuple[str, ...] = (),
    model: str | None = None,
    variant: tuple[str, ...] = (),
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
    quiet: options.Flag = False,
) -> int:
    """Fit a profile's points and print the errors on points held out, in percent.

    Parameters
    ----------
    file
        A kvprofile/1 file.
    seeds
        Random splits, medians over which are printed; default: 1 to 5, until 500
        points of the operation were held out.
    op
        Operations to fit; all of them by default.
    model
        Instead, tabulate the fits for this model, on the ranks that were measured, and
        write --out.
    variant
        OPERATION=VARIANT, such as decode_attention=split_kv, where an operation was
        timed in several ways; default: the fastest at the shape of a busy engine.
    out
        Profile to write, the points of FILE with tables for --model.
    quiet
        Print numbers without the headings.
    """
    from calibrate.cli import output as profile_output
    from calibrate.cli.output import check_out, fits_bar, write_and_tell
    from calibrate.fit_report import fit_report
    from calibrate.points import parse_variants
    from sim.costs.measured.profile import read_profile
    from sim.errors import UserError

    variants = parse_variants(variant)
    if (model is None) != (out is None):
        raise UserError("--model and --out go together: tables for a model are written")
    if model is not None and out is not None:
        from calibrate.tabulate import with_tables
        from sim.hardware.models.bundled import load_model

        check_out(out, overwrite)
        whole = read_profile(file)
        with fits_bar(quiet) as show:
            fitted = with_tables(whole, whole, load_model(model), variants, show=show)
        return write_and_tell(fitted, out, quiet)
    if seeds is not None and seeds < 1:
        raise UserError(f"--seeds must be 1 or more; got {seeds}")
    profile = read_profile(file)
    with fits_bar(quiet or json) as show:
        report = fit_report(profile, seeds, op, variants, show)
    if json:
        profile_output.print_json(report.to_json())
    else:
        profile_output.print_fit(report, headings=not quiet)
    return 0


@importing.command(help_epilogue=epilogue("profile import aiconfigurator"))
@options.claiming("out")
def aiconfigurator(
    *,
    system: str,
    out: Path,
    path: Path | None = None,
    model: str | None = None,
    overwrite: options.Overwrite = False,
    quiet: options.Flag = False,
) -> int:
    """Import attention, GEMM and all-reduce tables of aiconfigurator-core.

    With --model, the whole tables are fitted and tabulated for that model, so that
    cost: {kind: measured, profile: FILE} can price its steps.

    Parameters
    ----------
    system
        Such as a100_sxm, h100_sxm, h200_sxm, b200_sxm.
    out
        Profile to write.
    path
        Folder of tables; default: the installed package.
    model
        Keep the shapes of this model only: bundled name, or path to a config.json.
    quiet
        Print nothing.
    """
    from calibrate.cli.output import check_out, fits_bar, tell, write_and_tell
    from calibrate.importers.aiconfigurator import import_aiconfigurator
    from sim.hardware.models.bundled import load_model

    check_out(out, overwrite)
    if not model:
        tell(f"reading the tables of {system}", quiet)
        profile = import_aiconfigurator(system, path)
        return write_and_tell(profile, out, quiet)
    from calibrate.tabulate import check_model, with_tables

    architecture = load_model(model)
    tell(f"reading the tables of {system}", quiet)
    profile = import_aiconfigurator(system, path)
    check_model(profile, architecture)
    kept = import_aiconfigurator(system, path, architecture)
    points = sum(table.num_points for table in profile.ops)
    tell(f"fitting {points:,} points for {model}, about half a minute", quiet)
    with fits_bar(quiet) as show:
        fitted = with_tables(kept, profile, architecture, show=show)
    return write_and_tell(fitted, out, quiet)


@importing.command(help_epilogue=epilogue("profile import llmservingsim"))
@options.claiming("out")
def llmservingsim(
    *,
    path: Path,
    out: Path,
    model: str | None = None,
    gpu: str | None = None,
    tables: Tables = True,
    overwrite: options.Overwrite = False,
    quiet: options.Flag = False,
) -> int:
    """Import layer tables that LLMServingSim measured inside vLLM.

    They are fitted and tabulated for their model, on the ranks that were measured, so
    that cost: {kind: measured, profile: FILE} can price its steps.

    Parameters
    ----------
    path
        Folder of a model, with meta.yaml and tp1, or of its GPU, with --model.
    out
        Profile to write.
    model
        Which folder, and its architecture; default: the one that meta.yaml names.
    gpu
        Datasheet, bundled or a file; default: the device that meta.yaml names.
    tables
        Fit and tabulate; --no-tables keeps the points only.
    quiet
        Print nothing.
    """
    from calibrate.cli.output import check_out, fits_bar, tell, write_and_tell
    from calibrate.importers.llmservingsim import (
        architecture_of,
        import_llmservingsim,
    )
    from sim.hardware.models.bundled import load_model

    check_out(out, overwrite)
    architecture = architecture_of(model) if model else None
    found = import_llmservingsim(path, architecture, gpu, model)
    if tables:
        from calibrate.tabulate import with_tables
        from sim.hardware.gpus import load_gpu

        architecture = architecture or load_model(found.provenance["model"])
        sheet = load_gpu(gpu or found.device["name"])
        points = sum(table.num_points for table in found.ops)
        tell(f"fitting {points:,} points, about half a minute", quiet)
        with fits_bar(quiet) as show:
            found = with_tables(found, found, architecture, gpu=sheet, show=show)
    return write_and_tell(found, out, quiet)


@importing.command(help_epilogue=epilogue("profile import vidur"))
@options.claiming("out")
def vidur(
    *,
    path: Path,
    out: Path,
    system: str | None = None,
    model: str | None = None,
    architecture: str | None = None,
    tables: Tables = True,
    overwrite: options.Overwrite = False,
    quiet: options.Flag = False,
) -> int:
    """Import layer and all-reduce tables of Vidur.

    They are tabulated for their model, so that cost: {kind: measured, profile: FILE}
    can price its steps; attention, which the tables lack, comes from the datasheet and
    says so.

    Parameters
    ----------
    path
        Folder with compute and network, one above it or one inside.
    out
        Profile to write.
    system
        A folder below compute, such as a100.
    model
        A folder below that, such as Llama-2-7b-hf.
    architecture
        Path to its config.json, where the model is not bundled.
    tables
        Tabulate; --no-tables keeps the points only.
    quiet
        Print nothing.
    """
    from calibrate.cli.output import check_out, fits_bar, tell, write_and_tell
    from calibrate.importers.vidur import import_vidur, model_of

    check_out(out, overwrite)
    found = import_vidur(path, system, model)
    if tables:
        from calibrate.tabulate import with_tables

        shapes = model_of(found, architecture)
        points = sum(table.num_points for table in found.ops)
        tell(f"fitting {points:,} points", quiet)
        with fits_bar(quiet) as show:
            found = with_tables(found, found, shapes, show=show)
    return write_and_tell(found, out, quiet)


@profile.command(help_epilogue=epilogue("profile plot"))
def plot(
    file: Path,
    *,
    out: Path,
    op: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    overwrite: options.Flag = False,
    quiet: options.Flag = False,
) -> int:
    """Draw measured against fitted times, the roofline, and what is extrapolated.

    Errors are those of points held out, as 'kvsim profile fit' prints them: each
    fifth of the points predicted from the rest (one fifth of 2,500 points and more),
    and the longest eighth of the lengths.

    Parameters
    ----------
    file
        A kvprofile/1 file.
    out
        Folder for errors.json and figures/*.png.
    op
        Operation to draw, such as decode_attention; may be given several times;
        default: all.
    overwrite
        Replace figures that this command wrote there.
    quiet
        Print nothing.
    """
    from calibrate.cli.output import fits_bar
    from calibrate.figures.drawing import FILES, draw_profile
    from sim.costs.measured.profile import read_profile
    from sim.results.output import check_output

    check_output(out, overwrite=overwrite, files=FILES)
    profile = read_profile(file)
    with fits_bar(quiet) as show:
        found = draw_profile(profile, out, op, overwrite=overwrite, show=show)
    if not quiet:
        names, left_out = found
        for note in left_out:
            print(f"note: {note}")
        print(f"{out}: {', '.join(names)}")
    return 0
