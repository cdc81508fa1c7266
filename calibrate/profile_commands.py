"""``kvsim profile``: files of measured kernel times.

Loaded for its help line, so it imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

Flag = Annotated[bool, Parameter(negative="")]

profile = App(
    name="profile",
    help="Profiles of measured kernel times: show, validate, diff, fit, import.",
)
importing = App(
    name="import", help="Turn published kernel tables into a profile, without a GPU."
)
profile.command(importing)


@profile.command
def show(
    file: Path | None = None,
    *,
    crossover: Flag = False,
    model: str | None = None,
    gpu: str | None = None,
    tensor_parallel_size: int = 1,
    block_size: int = 16,
    max_num_batched_tokens: int = 8192,
    kv_cache_dtype: str = "auto",
    out: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
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
        Datasheet to compare by where there is no profile.
    tensor_parallel_size
        Number of GPUs that share the model.
    block_size
        Tokens a block.
    max_num_batched_tokens
        Tokens of a chunk when a prompt is computed again.
    kv_cache_dtype
        Data type of the KV cache: auto (the model's) or fp8.
    out
        Figure of the comparison to write, a PNG.
    json
        Print as JSON.
    quiet
        Print the id only; with --crossover, only where swapping is cheaper.
    """
    from calibrate import profile_output
    from sim.errors import UserError
    from sim.profile import read_profile

    if crossover:
        from calibrate.crossover import Question, show_crossover

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


@profile.command
def validate(file: Path, *, json: Flag = False, quiet: Flag = False) -> int:
    """Check a profile against physics, order and provenance.

    Parameters
    ----------
    file
        A kvprofile/1 file.
    json
        Print the problems as JSON.
    quiet
        Print nothing for a good profile.
    """
    from calibrate import profile_output
    from sim.profile import read_profile
    from sim.profile_checks import validate_profile

    problems = validate_profile(read_profile(file))
    return profile_output.print_problems(file.name, problems, json=json, quiet=quiet)


@profile.command
def diff(left: Path, right: Path, *, json: Flag = False, quiet: Flag = False) -> int:
    """Compare the points that two profiles share.

    Parameters
    ----------
    left, right
        Two kvprofile/1 files.
    json
        Print as JSON.
    quiet
        Say by the exit status only: 1 where shared points differ by over 5 %.
    """
    from calibrate import profile_output
    from calibrate.profile_diff import diff_profiles
    from sim.profile import read_profile

    found = diff_profiles(read_profile(left), read_profile(right))
    if json:
        profile_output.print_json({name: row.to_json() for name, row in found.items()})
    elif not quiet:
        profile_output.print_diff(found)
    return 1 if any(row.differs for row in found.values()) else 0


@profile.command
def fit(
    file: Path,
    *,
    seeds: int = 5,
    op: tuple[str, ...] = (),
    model: str | None = None,
    out: Path | None = None,
    json: Flag = False,
    quiet: Flag = False,
) -> int:
    """Fit a profile's points and print the errors on points held out, in percent.

    Parameters
    ----------
    file
        A kvprofile/1 file.
    seeds
        Random splits; medians over them are printed.
    op
        Operations to fit; all of them by default.
    model
        Instead, tabulate the fits for this model, on 1 to 8 ranks, and write --out.
    out
        Profile to write, the points of FILE with tables for --model.
    json
        Print as JSON.
    quiet
        Print numbers without the headings.
    """
    from calibrate import profile_output
    from calibrate.fit_report import fit_report
    from sim.errors import UserError
    from sim.profile import read_profile

    if (model is None) != (out is None):
        raise UserError("--model and --out go together: tables for a model are written")
    if model is not None and out is not None:
        from calibrate.profile_output import write_and_tell
        from calibrate.tabulate import with_tables
        from sim.model import load_model

        whole = read_profile(file)
        return write_and_tell(with_tables(whole, whole, load_model(model)), out, quiet)
    if seeds < 1:
        raise UserError(f"--seeds must be 1 or more; got {seeds}")
    report = fit_report(read_profile(file), num_seeds=seeds, only=op)
    if json:
        profile_output.print_json(report.to_json())
    else:
        profile_output.print_fit(report, headings=not quiet)
    return 0


@importing.command
def aiconfigurator(
    *,
    system: str,
    out: Path,
    path: Path | None = None,
    model: str | None = None,
    quiet: Flag = False,
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
    from calibrate.importers.aiconfigurator import import_aiconfigurator
    from calibrate.profile_output import write_and_tell
    from sim.model import load_model

    profile = import_aiconfigurator(system, path)
    if model:
        from calibrate.tabulate import with_tables

        architecture = load_model(model)
        kept = import_aiconfigurator(system, path, architecture)
        profile = with_tables(kept, profile, architecture)
    return write_and_tell(profile, out, quiet)


@importing.command
def llmservingsim(
    *,
    path: Path,
    out: Path,
    model: str | None = None,
    gpu: str | None = None,
    quiet: Flag = False,
) -> int:
    """Import layer tables that LLMServingSim measured inside vLLM.

    Parameters
    ----------
    path
        Folder of a model, with meta.yaml and tp1.
    out
        Profile to write.
    model
        Architecture; default: the one that meta.yaml names.
    gpu
        Datasheet; default: the device that meta.yaml names.
    quiet
        Print nothing.
    """
    from calibrate.importers.llmservingsim import import_llmservingsim
    from calibrate.profile_output import write_and_tell
    from sim.model import load_model

    architecture = load_model(model) if model else None
    return write_and_tell(import_llmservingsim(path, architecture, gpu), out, quiet)


@importing.command
def vidur(
    *,
    path: Path,
    out: Path,
    system: str | None = None,
    model: str | None = None,
    quiet: Flag = False,
) -> int:
    """Import layer and all-reduce tables of Vidur.

    Parameters
    ----------
    path
        Folder with compute and network.
    out
        Profile to write.
    system
        A folder below compute, such as a100.
    model
        A folder below that, such as Llama-2-7b-hf.
    quiet
        Print nothing.
    """
    from calibrate.importers.vidur import import_vidur
    from calibrate.profile_output import write_and_tell

    return write_and_tell(import_vidur(path, system, model), out, quiet)
