from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from sim.views.plots.png import png_bytes


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (9, 1), (40, 30)])
def test_a_reader_gets_the_same_pixels(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    pixels = rng.integers(0, 256, (*shape, 4), dtype=np.uint8)
    png = png_bytes(pixels, 150)
    image = Image.open(io.BytesIO(png))
    image.verify()
    image = Image.open(io.BytesIO(png))
    np.testing.assert_array_equal(np.asarray(image), pixels)
    assert image.mode == "RGBA"
    assert image.info["dpi"] == pytest.approx((150, 150), abs=0.02)


def test_rows_that_repeat_cost_nothing() -> None:
    rows = np.random.default_rng(5).integers(0, 256, (1, 500, 4), dtype=np.uint8)
    one, many = (len(png_bytes(np.repeat(rows, n, axis=0), 150)) for n in (1, 1000))
    assert many < one + 20_000  # of 2 million bytes


def test_pixels_need_not_lie_in_a_row() -> None:
    pixels = np.arange(4 * 6 * 4, dtype=np.uint8).reshape(4, 6, 4)
    assert png_bytes(pixels[:, ::2], 72) == png_bytes(pixels[:, ::2].copy(), 72)
