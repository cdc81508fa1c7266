"""``kvsim workload``: traffic; so far, fetching public traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

app = App(name="workload", help="Traffic: public traces.")


@app.command
def fetch(
    name: str,
    *,
    to: Path | None = None,
    quiet: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Download a public trace and verify its checksum; print where it is.

    Parameters
    ----------
    name
        Name of the trace, such as azure_llm_2023_conv.
    to
        Folder to put it in; default: the user's cache folder.
    quiet
        Print the path only.
    """
    from workloads.fetch import fetch as fetch_trace

    path = fetch_trace(name, to)
    print(path if quiet else f"{name} is in {path}")
    return 0
