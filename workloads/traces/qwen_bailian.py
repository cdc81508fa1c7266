"""Traces of Qwen on Aliyun Bailian: Mooncake's, in seconds, with chats."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - constructors' types are read at run time
from typing import TYPE_CHECKING, Any

from workloads.traces.mooncake import MooncakeTraceReader
from workloads.traces.parsing.json_values import json_lines
from workloads.traces.parsing.values import (
    MAX_SECONDS,
    MAX_SESSION_ID,
    missing_problem,
    time_problem,
    whole_problem,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workloads.traces.parsing.files import BadLines

_ROOT = -1
"""The parent of a chat's first request."""


@dataclass(frozen=True, slots=True)
class QwenBailianTraceReader(MooncakeTraceReader):
    """Reader of the traces of Qwen on Aliyun Bailian, with prefixes and chats.

    As of Mooncake's traces, but that ``timestamp`` is in seconds, an id stands for 16
    tokens, and ``parent_chat_id`` names the request that a chat goes on from: all that
    come from one are a session. Arrivals are as recorded, after the answers.

    Parameters
    ----------
    path, block_tokens, full_blocks_only, spread_arrivals, skip_bad_lines
        See `MooncakeTraceReader`; published ids stand for 16 tokens each.

    Raises
    ------
    WorkloadError
        If ``block_tokens`` is no integer or below 1, or ``path`` no path.

    Notes
    -----
    Source: github.com/alibaba-edu/qwen-bailian-usagetraces-anon; Wang et al., KVCache
    Cache in the Wild, USENIX ATC 2025.
    """

    path: str | Path
    block_tokens: int = 16

    def _entries(self, bad: BadLines) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield lines as Mooncake would have written them."""
        session_of: dict[int, int] = {}
        for number, entry in json_lines(self.path, bad):
            problem = _problem(entry)
            if problem:
                bad.refuse(number, problem)
                continue
            chat, parent = entry["chat_id"], entry["parent_chat_id"]
            # A parent may have come before the trace began.
            session = chat if parent == _ROOT else session_of.get(parent, parent)
            session_of[chat] = session
            timestamp_ms = entry["timestamp"] * 1000
            yield number, entry | {"timestamp": timestamp_ms, "session_id": session}


def _problem(entry: dict[str, Any]) -> str | None:
    return (
        missing_problem(entry, ("chat_id", "parent_chat_id", "timestamp"))
        or time_problem("timestamp", entry["timestamp"], "seconds", MAX_SECONDS)
        or whole_problem("chat_id", entry["chat_id"], 0, MAX_SESSION_ID)
        or whole_problem(
            "parent_chat_id", entry["parent_chat_id"], _ROOT, MAX_SESSION_ID
        )
    )
