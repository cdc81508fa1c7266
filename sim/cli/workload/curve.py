"""``kvsim workload curve``: prefix hits against the size of the KV cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sim.cli import options
from sim.cli.console import print_json

if TYPE_CHECKING:
    from sim.results.output import ResultFiles
    from sim.studies.prefixes.report import PrefixReport


@options.claiming("out")
def curve(
    file: Path,
    /,
    *,
    from_: options.TraceFormat = None,
    set_: options.TraceSettings = None,
    skip_bad_lines: options.SkipBadLines = False,
    model: str | None = None,
    gpu: str | None = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    dtype: options.WeightDtype = "auto",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    block_size: options.BlockSize = 16,
    share: float = 0.8,
    prompts_only: options.Flag = False,
    sample: float = 1.0,
    sample_seed: int = 0,
    bounds: int = 16,
    prefix_cache_retention_interval: int = 0,
    beside: options.Several = None,
    out: Path | None = None,
    overwrite: options.Overwrite = False,
    quiet: options.Flag = False,
    json: options.Json = False,
) -> int:
    """Say how much KV memory buys how many prefix hits, for every size at once.

    Requests are served one after the other in order of arrival, in no time: what
    running requests hold comes on top. A prompt finds its leading full blocks, all
    but its last token; LRU evicts as V1's block pool does.

    Parameters
    ----------
    file
        A trace of any kind, or a configuration (YAML) whose workload is taken.
    model
        Bundled name, or path to a config.json: sizes also in GiB.
    gpu
        GPU name, such as h200_sxm: sizes also in KV pools of one engine on it.
    share
        Share of the possible hits that is asked for.
    prompts_only
        Leave generated text out of the cache.
    sample
        Share of the blocks to look at: less memory, and an estimate with its error.
    sample_seed
        Another number looks at other blocks.
    bounds
        Number of sizes at which the clairvoyant bound is computed.
    prefix_cache_retention_interval
        Tokens after which windows are kept; 0, the engine's default, for the ends of
        prompts and where they part only.
    beside
        Folder of a run of this traffic, whose hits are drawn beside the curve, those of
        host memory on top of the GPU's; may be given several times.
    out
        Folder for curve.json, curve.csv and the figure.
    quiet
        Print the sentence only.
    """
    from sim.cli.workload.source import requests_of
    from sim.results.output import check_output
    from sim.studies.prefixes.beside import simulated_hits
    from sim.studies.prefixes.report import CurveQuestion, prefix_report

    if out is not None:
        check_output(out, overwrite=overwrite, files=_files())
    question = CurveQuestion(
        model=model,
        gpu=gpu,
        tensor_parallel_size=tensor_parallel_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        share=share,
        prompts_only=prompts_only,
        sample=sample,
        sample_seed=sample_seed,
        bounds=bounds,
        prefix_cache_retention_interval=prefix_cache_retention_interval,
    )
    memory = question.memory()
    silent = quiet or json
    requests = requests_of(file, from_, set_ or [], skip_bad_lines, quiet=silent)
    report = prefix_report(file.name, requests, question, memory)
    runs = [simulated_hits(Path(each), report.block_size) for each in beside or ()]
    report = replace(report, simulated=tuple(runs))
    if out is not None:
        _write(report, out, overwrite=overwrite)
    _print(report, out, quiet=quiet, as_json=json)
    return 0


def _files() -> ResultFiles:
    from sim.results.output import ResultFiles

    names = frozenset({"curve.json", "curve.csv", "figures"})
    return ResultFiles("kvsim workload curve", "curve.json", names)


def _write(report: PrefixReport, out: Path, *, overwrite: bool) -> None:
    """Write the folder, as a whole or not at all."""
    import csv

    from sim.results.output import output_directory, write_json
    from sim.views.plots.studies.prefixes import prefix_hits
    from sim.views.plots.style import to_png

    with output_directory(out, overwrite=overwrite, files=_files()) as partial:
        rows = report.rows()
        write_json(partial / "curve.json", report.to_dict() | {"points": rows})
        with (partial / "curve.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        (partial / "figures").mkdir()
        figure = partial / "figures" / "prefix_hits.png"
        figure.write_bytes(to_png(prefix_hits(report)))


def _print(
    report: PrefixReport, out: Path | None, *, quiet: bool, as_json: bool
) -> None:
    if as_json:
        print_json(report.to_dict() | {"points": report.rows()})
        return
    if not quiet:
        from sim.cli.output.workload import print_curve

        print_curve(report)
    print(report.sentence())
    for row in report.simulated_rows():
        print(
            f"{row['name']}: {row['pool_hit_rate']:.1%} found on the GPU, "
            f"{row['host_hit_rate']:.1%} in host memory; the curve says "
            f"{row['lru_hit_rate']:.1%} of the larger of both, {row['num_blocks']:,} "
            f"blocks".replace("%", " %")
        )
    if quiet:
        return
    for note in report.notes:
        print(f"note: {note}")
    if out is not None:
        print(f"curve.json, curve.csv and the figure are in {out}")
