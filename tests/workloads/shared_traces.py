"""Real traces, kept beside the repository; tests skip where they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
AZURE_CONV = "azure_llm_2023_conv.csv"
AZURE_CODE = "azure_llm_2023_code.csv"
MOONCAKE = "mooncake_fast25_conversation.jsonl"


def shared_trace(name: str) -> Path:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"real trace not at hand: {path.name}")
    return path
