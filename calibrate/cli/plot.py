"""``kvsim profile plot``.

Loaded for its help line, so it imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="")]


def plot(
    file: Path,
    *,
    out: Path,
    op: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    overwrite: Flag = False,
    quiet: Flag = False,
) -> int:
    """Draw measured against fitted times, the roofline, and what is extrapolated.

    Errors are those of points held out, as 'kvsim profile fit' prints them: each
    fifth of the points predicted from the rest, and the longest eighth of the lengths.
    A whole table of 100,000 points takes minutes, a model's share of it seconds.

    Parameters
    ----------
    file
        A kvprofile/1 file.
    out
        Folder for errors.json and figures/*.png.
    op
        Operation to draw, such as decode_attention; may be given several times;
        default: all.
    overwrite
        Replace figures that this command wrote there.
    quiet
        Print nothing.
    """
    from calibrate.figures.drawing import FILES, draw_profile
    from sim.costs.profile import read_profile
    from sim.results.output import check_output

    check_output(out, overwrite=overwrite, files=FILES)
    found = draw_profile(read_profile(file), out, op, overwrite=overwrite)
    if not quiet:
        names, left_out = found
        for note in left_out:
            print(f"note: {note}")
        print(f"{out}: {', '.join(names)}")
    return 0
