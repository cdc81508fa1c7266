"""Bounds of the histograms that vLLM shows."""

from __future__ import annotations

from typing import Final

TTFT_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5),
    *(5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def one_two_five(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... up to `largest`: bounds of numbers of tokens."""
    bounds: list[float] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > largest:
                return bounds
            bounds.append(float(digit * scale))
        scale *= 10
