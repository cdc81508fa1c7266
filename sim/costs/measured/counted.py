"""What tokens and requests of a measured step decide, whatever they attend to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from sim.costs.measured.reading import token_curves
from sim.costs.parts import Memo
from sim.costs.widths import ESTIMATE, Widths, read_widths

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.costs.measured.rest import MeasuredRest
    from sim.costs.roofline import RooflineCost

_ESTIMATES: Final = Widths(ESTIMATE, ESTIMATE)


class TokenParts(NamedTuple):
    """Seconds that so many tokens take."""

    gemm_s: float = 0.0
    allreduce_s: float = 0.0
    kernels_s: float = 0.0
    """Element-wise kernels."""
    launch_decodes_s: float = 0.0
    """To launch all kernels of a step of decodes; see `MeasuredRest.launching_s`."""
    launch_prefills_s: float = 0.0
    """The same with a prompt among them."""
    extrapolated: bool = False
    """Whether the products or the collectives were."""
    down: float = 0.0
    up: float = 0.0
    """Squares of the width of all."""


class RowParts(NamedTuple):
    """Seconds that so many requests take."""

    head_s: float
    host_s: float
    down: float
    up: float
    """Squares of the head's width."""


class Counted:
    """Prices of tokens and of requests, each count computed once.

    Parameters
    ----------
    fit, entry
        Of the profile, and of the model in it.
    rest
        The datasheet's prices.
    other
        Element-wise kernels, head and launches.
    correction
        What the datasheet's operations are multiplied by.

    Attributes
    ----------
    tokens, rows
        What was computed, by count.
    """

    def __init__(
        self,
        fit: Mapping[str, Any],
        entry: Mapping[str, Any],
        rest: RooflineCost,
        other: MeasuredRest,
        correction: float,
    ) -> None:
        self.tokens: Memo[TokenParts] = Memo()
        self.rows: Memo[RowParts] = Memo()
        self._rest = rest
        self._other = other
        self._correction = correction
        gemm, self._allreduce = token_curves(entry["tokens"], rest)
        # experts are not in the tables
        self._gemm = None if rest.model.num_experts else gemm
        self._gemm_widths = (
            _ESTIMATES if self._gemm is None else read_widths(fit, "gemm")
        )
        self._allreduce_widths = (
            _ESTIMATES if self._allreduce is None else read_widths(fit, "allreduce")
        )

    def price_tokens(self, num_tokens: int) -> TokenParts:
        """Return what so many tokens decide; nothing for none."""
        if not num_tokens:
            return self.tokens.keep(0, TokenParts())
        gemm_s, allreduce_s, _ = (
            self._correction * part for part in self._rest.token_parts(num_tokens)
        )
        kernels_s, _, kernels_width = self._other.kernels(num_tokens)
        outside, apart = True, False
        if self._gemm is not None:
            gemm_s, outside = self._gemm.at(num_tokens)
        if self._allreduce is not None:
            allreduce_s, apart = self._allreduce.at(num_tokens)
        down = up = 0.0
        for width, seconds in (
            (self._gemm_widths[outside], gemm_s),
            (self._allreduce_widths[apart], allreduce_s),
            (kernels_width, kernels_s),
        ):
            more_down, more_up = width.squares(seconds)
            down += more_down
            up += more_up
        parts = TokenParts(
            gemm_s,
            allreduce_s,
            kernels_s,
            self._other.launching_s(num_tokens, 0),
            self._other.launching_s(num_tokens, 1),
            outside or apart,
            down,
            up,
        )
        return self.tokens.keep(num_tokens, parts)

    def price_rows(self, num_rows: int) -> RowParts:
        """Return what so many requests decide."""
        _, host_s = self._rest.row_parts(num_rows)
        head_s = down = up = 0.0
        for seconds, _, width in self._other.head(num_rows):
            more_down, more_up = width.squares(seconds)
            head_s += seconds
            down += more_down
            up += more_up
        return self.rows.keep(num_rows, RowParts(head_s, host_s, down, up))
