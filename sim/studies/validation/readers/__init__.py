"""Readers of measurements, one format a file.

A reader is a function ``(Path, Mapping) -> Observed``; `READERS` names it, `read` tells
which one a file wants. To add one: write its file, add a line here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sim.studies.validation.observed import MeasuredError, Observed
from sim.studies.validation.readers.prometheus import (
    looks_like_prometheus,
    read_prometheus,
)
from sim.studies.validation.readers.requests_csv import read_requests_csv
from sim.studies.validation.readers.vllm_bench import read_vllm_bench

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READERS: Final[dict[str, Callable[[str, Path], Observed]]] = {
    "requests": read_requests_csv,
    "vllm_bench": read_vllm_bench,
    "prometheus": read_prometheus,
}
"""Kind to reader; each takes the text of the file and its path."""


def read(path: Path) -> Observed:
    """Read a file of measurements, its format told by its content."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise MeasuredError(
            f"'{path}' cannot be read: {reason}; give a requests.csv, a result of "
            "'vllm bench serve' or a scrape of vLLM's metrics"
        ) from error
    return READERS[_kind_of(text, path)](text, path)


def _kind_of(text: str, path: Path) -> str:
    if text.lstrip()[:1] in {"{", "["}:
        return "vllm_bench"
    if looks_like_prometheus(text):
        return "prometheus"
    if "," in text.partition("\n")[0]:
        return "requests"
    raise MeasuredError(
        f"'{path}' is no file of measurements that is known: give a requests.csv with "
        "a header, the JSON of 'vllm bench serve', or the text of vLLM's /metrics"
    )
