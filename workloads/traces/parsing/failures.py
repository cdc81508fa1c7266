"""Requests that failed when the trace was taken: left out, or kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from workloads.errors import WorkloadError
from workloads.traces.parsing.bad_lines import warn

if TYPE_CHECKING:
    from pathlib import Path

FailureRule = Literal["drop", "keep"]
"""Leave failed requests out, or keep them with an output of one token."""


def check_rule(rule: str) -> None:
    """Refuse what is no `FailureRule`.

    Raises
    ------
    WorkloadError
        With the rule, value and remedy.
    """
    if rule not in ("drop", "keep"):
        raise WorkloadError(
            f"failures must be drop or keep; got {rule!r}; drop leaves failed requests "
            "out, keep gives them an output of 1 token"
        )


class Failures:
    """What becomes of the failed requests of one file; `report` is called at the end.

    Parameters
    ----------
    path
        The file, for the warning.
    rule
        See `FailureRule`.
    """

    def __init__(self, path: str | Path, rule: FailureRule) -> None:
        self.path = path
        self.keep = rule == "keep"
        self.num_failed = 0
        self.num_without_prompt = 0

    def is_kept(self, num_prompt_tokens: int) -> bool:
        """Count a failed request, and return whether it is kept.

        Parameters
        ----------
        num_prompt_tokens
            0 where the trace does not know: there is no request to make of it.
        """
        self.num_failed += 1
        self.num_without_prompt += num_prompt_tokens == 0
        return self.keep and num_prompt_tokens > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.report()  # after an error, too: none may be left but failures

    def report(self) -> None:
        """Warn if there were failed requests.

        Warns
        -----
        WorkloadWarning
            How many, and what became of them.
        """
        if not self.num_failed:
            return
        what = "kept with an output of 1 token" if self.keep else "left out"
        if self.keep and self.num_without_prompt:
            what += f", but {self.num_without_prompt} without a prompt are left out"
        other = "drop" if self.keep else "keep"
        warn(
            f"{self.path}: {self.num_failed} requests without a response (failures) "
            f"are {what}; failures={other} is the other choice"
        )
