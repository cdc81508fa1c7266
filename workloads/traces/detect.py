"""Which format a trace file has, by its content and never by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads.errors import TraceFormatError, WorkloadError
from workloads.traces.kvsim import HEADER_KEY
from workloads.traces.parsing.files import numbered_lines
from workloads.traces.parsing.json_values import json_values

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_COLUMNS: Mapping[str, frozenset[str]] = {
    "azure": frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    "burstgpt": frozenset({"Timestamp", "Request tokens", "Response tokens"}),
    "vidur": frozenset({"arrived_at", "num_prefill_tokens", "num_decode_tokens"}),
}
"""Columns by which a CSV file is told."""

_KEYS: Mapping[str, tuple[frozenset[str], ...]] = {
    "kvsim": (frozenset({HEADER_KEY}),),
    "kv_cache_tester": (frozenset({"hash_id_scope", "requests"}),),
    "mooncake": (frozenset({"input_length", "output_length", "hash_ids"}),),
    "qwen_bailian": (frozenset({"input_length", "hash_ids", "parent_chat_id"}),),
    "llmservingsim": (
        frozenset({"input_toks", "output_toks", "arrival_time_ns"}),
        frozenset({"sub_requests", "arrival_time_ns"}),
    ),
    "sharegpt": (frozenset({"conversations"}), frozenset({"messages"})),
    "vllm_bench": (frozenset({"start_times", "input_lens", "output_lens"}),),
}
"""Keys, all of one set, by which the first object of a JSON file is told."""


def guess_kind(path: str | Path) -> str:
    """Return the kind of a trace file, a key of `workloads.TRACE_READERS`.

    Raises
    ------
    WorkloadError
        If the file cannot be read, or is of no known format, or of more than one.
    """
    _, line = next(numbered_lines(path), (0, ""))
    if line.startswith(("{", "[")):
        found = _of_object(_first_value(path))
    else:
        names = {name.strip().strip('"') for name in line.split(",")}
        found = [kind for kind, columns in _COLUMNS.items() if columns <= names]
    if len(found) == 1:
        return found[0]
    what = "like " + " and ".join(found) if found else "like no known format"
    kinds = ", ".join(sorted((*_COLUMNS, *_KEYS)))
    raise WorkloadError(
        f"{path}: a trace's format must be plain; got {line[:80]!r}, which looks "
        f"{what}; name its kind (trace.kind, or --from): {kinds}; or table, for any "
        "log of requests, with the names of its columns as time, prompt_tokens and "
        "output_tokens"
    )


def _first_value(path: str | Path) -> Any:
    try:
        return next(json_values(path), (0, None))[1]
    except TraceFormatError:
        return None


def _of_object(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return []
    found = [
        kind
        for kind, choices in _KEYS.items()
        if any(keys <= value.keys() for keys in choices)
    ]
    if "qwen_bailian" in found:  # whose lines have all of Mooncake's keys
        found = [kind for kind in found if kind != "mooncake"]
    return found
