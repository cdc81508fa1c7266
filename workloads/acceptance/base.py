"""The roles of acceptance: rates for drawing, and answers for the simulation.

Whether the model agrees with a draft is a property of the text and of the drafter, like
the length of an output. The simulation asks when a step's output is processed; no
scheduling policy may (invariant 4).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class Acceptance(Protocol):
    """Drafts proposed for each request, and how many of them its model accepts.

    A request's outputs are counted from 0 in the order in which the model produces
    them. Answers depend on the arguments alone, so that a request which is preempted,
    computed again, or scheduled before its last output is known gets the same ones;
    draws therefore come from a named stream by request and position, never in the
    order of the questions.

    ::

        outputs so far         0 .. position - 1
        drafts to verify       position .. position + num_drafts - 1
        the step yields        the accepted ones, and one token more
    """

    def num_proposed(self, request_index: int, position: int, most: int) -> int:
        """Return how many drafts follow the first `position` outputs, at most `most`.

        Parameters
        ----------
        request_index
            `RequestSpec.request_id`.
        position
            Outputs of the request so far, at least 1.
        most
            The engine's ``num_speculative_tokens``. A drafter that is a model proposes
            so many; n-gram look-up may find fewer, or none.
        """
        ...

    def num_accepted(self, request_index: int, position: int, num_drafts: int) -> int:
        """Return how many of the first `num_drafts` drafts are accepted in a row.

        Parameters
        ----------
        request_index
            `RequestSpec.request_id`.
        position
            Outputs of the request before the step that verifies the drafts.
        num_drafts
            Drafts that are verified, at least 1. Those of a budget that cuts drafts
            off are the first ones: with fewer drafts the answer is the smaller of
            their number and the answer with more.
        """
        ...


@runtime_checkable
class AcceptanceRates(Protocol):
    """How likely drafts are accepted, under vLLM's ``synthetic_acceptance_rates``."""

    def rates(self, num_speculative_tokens: int, slo_class: str) -> tuple[float, ...]:
        """Return unconditional acceptance rates of a step's drafts.

        Parameters
        ----------
        num_speculative_tokens
            Drafts of a step, at least 1.
        slo_class
            `RequestSpec.slo_class`.

        Returns
        -------
        tuple of float
            One for each draft: the probability that it and all before it are accepted.
            In [0, 1], never rising.

        Raises
        ------
        WorkloadError
            If nothing is known of so many drafts, or of the class.
        """
        ...
