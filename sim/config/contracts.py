"""Methods that a part of the user's own must have."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import TYPE_CHECKING

from sim.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def require_methods(part: object, where: str, role: str, calls: Iterable[str]) -> None:
    """Refuse a part that lacks a method, or one whose method takes other arguments.

    Parameters
    ----------
    part
        Of a class that is not built in.
    where
        Path of its table in the configuration.
    role
        What it is, for messages: ``"a router"``.
    calls
        The methods as they are called: ``"choose(request)"``.

    Raises
    ------
    ConfigError
        With the method.
    """
    for call in calls:
        name, _, rest = call.partition("(")
        arguments = [each for each in rest.rstrip(")").split(", ") if each]
        method = getattr(part, name, None)
        if not callable(method):
            raise ConfigError(
                f"{where}: {role} needs a method {call}, which {type(part).__name__} "
                f"has not; mend your class"
            )
        try:
            taken = signature(method)
        except ValueError:  # of a function of C, which does not tell
            continue
        try:
            taken.bind(*[Parameter.empty] * len(arguments))
        except TypeError:
            raise ConfigError(
                f"{where}: {role} is called as {call}, and {type(part).__name__} has "
                f"{name}{taken.replace(return_annotation=taken.empty)} beside self; "
                f"mend your class"
            ) from None


def watch(
    part: object, where: str, role: str, **watched: Callable[..., object]
) -> None:
    """Put methods that look at answers in place of a part's own.

    Raises
    ------
    ConfigError
        If the part does not let its methods be replaced.
    """
    try:
        for name, method in watched.items():
            object.__setattr__(part, name, method)  # of a frozen dataclass, too
    except AttributeError as error:
        raise ConfigError(
            f"{where}: {role}'s methods are watched, and {type(part).__name__} does "
            f"not let them be replaced; leave __slots__ out"
        ) from error
