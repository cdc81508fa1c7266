"""Commands that this package adds to ``kvsim``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from sim.errors import UserError


def calibrate(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> int:
    """Time the real kernels on a GPU (not built yet).

    Raises
    ------
    UserError
        Always, until kernel timing is built.
    """
    raise UserError(
        "'kvsim calibrate' is not built yet; step times come from cost: {kind: "
        "roofline}, {kind: linear} or {kind: constant}"
    )
