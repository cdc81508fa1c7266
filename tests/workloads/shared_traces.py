"""Real traces, kept beside the repository; tests skip where they are missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.shared import shared

if TYPE_CHECKING:
    from pathlib import Path

AZURE_CONV = "azure_llm_2023_conv.csv"
AZURE_CODE = "azure_llm_2023_code.csv"
MOONCAKE = "mooncake_fast25_conversation.jsonl"
SHAREGPT = "llmservingsim_sharegpt_llama31_300_sps10.jsonl.gz"


def shared_trace(name: str) -> Path:
    return shared(f"traces/{name}")
