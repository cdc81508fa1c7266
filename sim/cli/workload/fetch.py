"""``kvsim workload fetch``: public traces."""

from __future__ import annotations

import sys
from pathlib import Path

from sim.cli.options import Flag


def fetch(
    name: str,
    *,
    to: Path | None = None,
    quiet: Flag = False,
) -> int:
    """Download a public trace and verify its checksum; print where it is.

    Parameters
    ----------
    name
        azure_llm_2023_conv, azure_llm_2023_code or mooncake_conversation.
    to
        Folder to put it in; default: the user's cache folder.
    quiet
        Print the path only.
    """
    from workloads.fetch import fetch as fetch_trace

    if not quiet:
        print(f"fetching {name} ...", file=sys.stderr)
    path = fetch_trace(name, to)
    hint = f"; use it with --set workload.trace.path={path}"
    print(path if quiet else f"{name} is in {path}{hint}")
    return 0
