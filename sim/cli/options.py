"""Options that several commands have: each is spelled, typed and explained here once.

Where a command means something of its own, its docstring explains the option and its
annotation is one of those without a text: `Flag`, `Whole`, `Assignments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypeVar

from cyclopts import Parameter

P = ParamSpec("P")
R = TypeVar("R")


def _whole(type_: Any, tokens: Sequence[Any]) -> int:
    """Refuse 1.7, which would be rounded."""
    text = tokens[0].value
    if not text.lstrip("-").isdecimal():
        raise ValueError(f"must be a whole number, got {text}")
    return int(text)


_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def _suffixed(type_: Any, tokens: Sequence[Any]) -> int:
    """Read 32k, 25.6k (thousands) and 32K (of 1,024), as ``vllm serve`` does."""
    text = tokens[0].value
    number, factor = text[:-1], _FACTORS.get(text[-1:], 0)
    if factor and number.isdecimal():
        return int(number) * factor
    if factor and text[-1].islower() and number.replace(".", "", 1).isdecimal():
        return int(float(number) * factor)
    if not text.lstrip("-").isdecimal():
        raise ValueError(f"must be a whole number, or one such as 32k, got {text}")
    return int(text)


Flag = Annotated[bool, Parameter(negative="")]
Whole = Annotated[int, Parameter(converter=_whole)]
Size = Annotated[int | None, Parameter(converter=_suffixed)]
Several = Annotated[list[str] | None, Parameter(negative="")]
Assignments = Annotated[
    list[str] | None,
    Parameter(name="--set", negative="", allow_leading_hyphen=False),
]

Settings = Annotated[
    Assignments,
    Parameter(help="Change a key, as key.path=value; may be given several times."),
]
Seed = Annotated[Whole | None, Parameter(help="Shorthand for --set seed=N.")]
Overwrite = Annotated[Flag, Parameter(help="Replace what is there.")]
Figures = Annotated[bool, Parameter(help="Draw the figures.")]
Quiet = Annotated[Flag, Parameter(help="Print nothing but warnings and errors.")]
Json = Annotated[Flag, Parameter(help="Print the result as JSON.")]

Workers = Annotated[
    Whole | None,
    Parameter(help="Processes on this machine. Default: one for each processor."),
]
Address = Annotated[
    str | None,
    Parameter(
        help='Run on an existing Ray cluster instead: "auto", or HOST:PORT of its head '
        "node."
    ),
]

TraceFormat = Annotated[
    str | None,
    Parameter(name="--from", help="Format of the trace; default: told by its content."),
]
TraceSettings = Annotated[
    Assignments,
    Parameter(
        help="key=value: an argument of the trace's reader, or key.path=value of the "
        "configuration; may be given several times."
    ),
]
SkipBadLines = Annotated[
    Flag, Parameter(help="Leave malformed lines out, and say how many.")
]

BlockSize = Annotated[int, Parameter(help="Tokens a block.")]
TensorParallelSize = Annotated[
    int,
    Parameter(
        name=["--tensor-parallel-size", "-tp"],
        help="Number of GPUs that share the model.",
    ),
]
WeightDtype = Annotated[
    str, Parameter(help="Data type of the weights; auto takes the model's own.")
]
KvCacheDtype = Annotated[
    str, Parameter(help="Data type of the KV cache: auto (the model's) or fp8.")
]


def with_seed(settings: Sequence[str] | None, seed: int | None) -> list[str]:
    """Return the settings of ``--set``, and of ``--seed`` as the last of them."""
    return [*(settings or []), *([] if seed is None else [f"seed={seed}"])]


def check_workers(workers: int | None) -> None:
    from sim.errors import ConfigError

    if workers is not None and workers < 1:
        raise ConfigError(f"--workers takes a number of at least 1, got {workers}")


def claiming(option: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Keep other processes out of the file that an option of a command names.

    Commands that write folders do so where they open them.
    """

    def decorate(command: Callable[P, R]) -> Callable[P, R]:
        @wraps(command)
        def alone(*args: P.args, **options: P.kwargs) -> R:
            from sim.results.output import claimed

            path: Any = options.get(option)
            with claimed(path):
                return command(*args, **options)

        return alone

    return decorate
