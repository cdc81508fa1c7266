"""``kvsim size``: what to buy for traffic, in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import Parameter

from sim.cli import console, options
from sim.cli.main import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.studies.planning.sizing import SizePlan

Number = TypeVar("Number", int | None, float | None)

_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
EXIT_NOTHING_HOLDS = 1


def _milliseconds(type_: Any, tokens: Sequence[Any]) -> float:
    """Read 60ms or 1s; a number without a unit could be either."""
    text = tokens[0].value.strip().lower()
    for unit, factor in _UNITS_MS.items():
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdigit() and float(number):
            return float(number) * factor
    raise ValueError(f"must be a time with its unit, such as 60ms or 1.5s, got {text}")


def _names(type_: Any, tokens: Sequence[Any]) -> list[str]:
    names = [name for token in tokens for name in token.value.split(",") if name]
    if not names:
        raise ValueError("must name at least one, or several with commas between them")
    return names


Latency = Annotated[float | None, Parameter(converter=_milliseconds)]
Names = Annotated[list[str], Parameter(converter=_names, negative="")]
SomeNames = Annotated[list[str] | None, Parameter(converter=_names, negative="")]


@options.claiming("write")
def size(
    model: str,
    *,
    gpu: Names,
    input_tokens: options.Whole | None = None,
    output_tokens: options.Whole | None = None,
    rate: float | None = None,
    trace: Path | None = None,
    p95_ttft: Latency = None,
    p95_tpot: Latency = None,
    p95_e2el: Latency = None,
    p99_ttft: Latency = None,
    p99_tpot: Latency = None,
    p99_e2el: Latency = None,
    tensor_parallel_size: Annotated[
        SomeNames, Parameter(name=["--tensor-parallel-size", "-tp"])
    ] = None,
    price: SomeNames = None,
    set_: options.Settings = None,
    explain: options.Flag = False,
    write: Path | None = None,
    overwrite: options.Overwrite = False,
    workers: options.Workers = None,
    seed: options.Seed = None,
    json: options.Json = False,
) -> int:
    """Say what to buy to serve traffic within objectives, and what would change that.

    Exit status 1 says that nothing on offer does.

    Parameters
    ----------
    model
        Bundled name (kvsim models), or path to a config.json.
    gpu
        GPUs that may be bought, such as h100_sxm,h200_sxm (kvsim gpus).
    input_tokens
        Prompt of each request.
    output_tokens
        Answer to each request.
    rate
        Requests a second; with a trace, default: its own.
    trace
        File of recorded requests in place of lengths and Poisson arrivals.
    p95_ttft
        Objective of the time to the first token: 95 % of requests within 1s, 800ms.
    p95_tpot
        The same of the time for each further token.
    p95_e2el
        The same of the whole request.
    p99_ttft
        The same for 99 % of requests.
    p99_tpot
        The same for 99 % of requests.
    p99_e2el
        The same for 99 % of requests.
    tensor_parallel_size
        GPUs of an engine to try. Default: 1,2,4,8, those that the model fits.
    price
        Of a GPU for an hour, as h100_sxm=2.5,h200_sxm=3.2. Default: round figures.
    explain
        Print the plan that is run, too.
    write
        Keep the plan in this file: 'kvsim plan FILE' runs it with figures and files.
    """
    from sim.studies.planning.answer.verdict import verdict_of
    from sim.studies.planning.sizing import SizeQuestion, plan_of

    options.check_workers(workers)
    limits = {
        "p95_ttft_ms": p95_ttft,
        "p95_tpot_ms": p95_tpot,
        "p95_e2el_ms": p95_e2el,
        "p99_ttft_ms": p99_ttft,
        "p99_tpot_ms": p99_tpot,
        "p99_e2el_ms": p99_e2el,
    }
    question = SizeQuestion(
        model=model,
        gpus=tuple(gpu),
        objectives=_objectives(limits),
        rate=_above_0("--rate", rate, "requests a second"),
        input_tokens=_above_0("--input-tokens", input_tokens, "tokens"),
        output_tokens=_above_0("--output-tokens", output_tokens, "tokens"),
        trace=None if trace is None else str(trace),
        prices=_prices(price or []),
        settings=tuple(set_ or ()),
        seed=seed or 0,
        **_ranks(tensor_parallel_size),
    )
    asked = plan_of(question)
    text = _yaml(asked)
    if write is not None:
        _keep(text, write, overwrite=overwrite)
    found = _solve(asked, workers, shown=not json)
    verdict = verdict_of(found.data)
    if verdict.confidence:
        sure = f"{verdict.confidence} {question.supposed}".rstrip()
        verdict = replace(verdict, confidence=sure)
    if json:
        told = {"verdict": verdict.to_dict(), "misfits": list(asked.misfits)}
        console.print_json(told | {"plan": found.data})
    else:
        from sim.cli.output.size import print_size

        print_size(verdict, found.data, asked.misfits, text if explain else "", write)
    if found.stopped_in:
        console.note(f"interrupted during '{found.stopped_in}'")
        return EXIT_INTERRUPTED
    return 0 if verdict.holds else EXIT_NOTHING_HOLDS


def _objectives(limits: dict[str, float | None]) -> dict[str, float]:
    from sim.errors import ConfigError

    given = {name: limit for name, limit in limits.items() if limit is not None}
    if not given:
        raise ConfigError(
            "say what is promised, such as --p95-ttft 1s --p95-tpot 60ms; without an "
            "objective any engine that keeps up would do"
        )
    return given


def _above_0(option: str, value: Number, what: str) -> Number:
    from sim.errors import ConfigError

    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(f"{option} takes {what} above 0, got {value:g}")
    return value


def _ranks(given: list[str] | None) -> dict[str, Any]:
    from sim.errors import ConfigError

    if given is None:
        return {}
    for text in given:
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(
                f"--tensor-parallel-size takes whole numbers of at least 1, such as "
                f"2,4, got '{text}'"
            )
    return {"tensor_parallel_sizes": tuple(dict.fromkeys(int(t) for t in given))}


def _prices(given: Sequence[str]) -> dict[str, float]:
    from sim.errors import ConfigError

    prices = {}
    for each in given:
        name, _, text = each.partition("=")
        try:
            prices[name] = float(text)
        except ValueError as error:
            raise ConfigError(
                f"--price takes GPU=NUMBER, such as h100_sxm=2.5, got '{each}'"
            ) from error
    return prices


def _yaml(asked: SizePlan) -> str:
    import yaml

    return yaml.safe_dump(dict(asked.data), sort_keys=False)


def _keep(text: str, path: Path, *, overwrite: bool) -> None:
    from sim.errors import OutputError

    if path.exists() and not overwrite:
        raise OutputError(f"'{path}' exists; give another --write, or --overwrite")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--write {path}: {error.strerror}; give another") from error


def _solve(asked: SizePlan, workers: int | None, *, shown: bool) -> Any:
    from sim.cli.output.plan import plan_reporter
    from sim.studies.planning.solve import executor_for, solve

    executor = executor_for(asked.plan, workers)
    with (
        executor,
        console.stopping_on_interrupt(executor.stop),
        console.progress_bar(plan_reporter, 1, shown=shown) as on_progress,
    ):
        return solve(asked.plan, executor, on_progress)
