"""Pictures of notebooks: few bytes, always the same ones."""

from __future__ import annotations

import base64
import io

from PIL import Image

WIDTH_PX = 1000
NUM_COLOURS = 128


def small_png(encoded: str) -> str:
    """Return a picture at most `WIDTH_PX` wide, of few colours, as base64.

    The file names no program and no time, as matplotlib's own would.
    """
    picture = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGBA")
    flat = Image.new("RGB", picture.size, "white")
    flat.paste(picture, mask=picture.getchannel("A"))
    if flat.width > WIDTH_PX:
        height = round(flat.height * WIDTH_PX / flat.width)
        flat = flat.resize((WIDTH_PX, height), Image.Resampling.LANCZOS)
    few = flat.quantize(NUM_COLOURS, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    few.save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
