"""A small file of each format, three requests in order of arrival."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workloads import TRACE_READERS, RequestSpec

if TYPE_CHECKING:
    from pathlib import Path

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:00.0000000,879,55
"""
BURSTGPT = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
Total tokens,Log Type
5.0,1722ac82-0a46,43,GPT-4,472,18,490,Conversation log
45.0,,2,ChatGPT,36,29,65,API log
60.5,1722ac82-0a46,2,GPT-4,417,276,693,Conversation log
"""
KVSIM = """{"kvsim_requests": 1}
{"arrival_s": 0, "prompt": 374, "num_output_tokens": 44}
{"arrival_s": 0.25, "prompt": [[2, 9], [40, 1]], "num_output_tokens": 1, "priority": 2}
{"arrival_s": 4.5, "prompt": 8, "num_output_tokens": 9, "slo_class": "chat"}
"""
LLMSERVINGSIM = """{"input_toks": 3, "output_toks": 2, "arrival_time_ns": 46926808, \
"input_tok_ids": [5, 6, 7], "output_tok_ids": [8, 9]}
{"input_toks": 4, "output_toks": 1, "arrival_time_ns": 147926808, \
"input_tok_ids": [5, 6, 9, 9]}
{"session_id": "a", "arrival_time_ns": 247926808, "sub_requests": \
[{"input_toks": 7, "output_toks": 2, "tool_duration_ns": 0}]}
"""
KV_CACHE_TESTER = """{"block_size": 64, "hash_id_scope": "local", "requests": \
[{"t": 0, "type": "n", "in": 130, "out": 9, "hash_ids": [[1, 2]]}]}
{"block_size": 64, "hash_id_scope": "local", "requests": \
[{"t": 0, "type": "s", "in": 260, "out": 7, "hash_ids": [[1, 2], [9, 2]]}]}
{"block_size": 64, "hash_id_scope": "local", "requests": \
[{"t": 0, "type": "n", "in": 64, "out": 5, "hash_ids": [[1, 1]]}]}
"""
MOONCAKE = """{"timestamp": 0, "input_length": 513, "output_length":5, "hash_ids":[0,1]}
{"timestamp": 27, "input_length": 10, "output_length": 6, "hash_ids": [0]}
{"timestamp": 3000, "input_length": 512, "output_length": 7, "hash_ids": [2]}
"""
QWEN_BAILIAN = """{"chat_id": 7, "parent_chat_id": -1, "timestamp": 0.5, \
"input_length": 33, "output_length": 5, "type": "text", "hash_ids": [1, 2, 3]}
{"chat_id": 8, "parent_chat_id": 4, "timestamp": 2.0, \
"input_length": 16, "output_length": 6, "type": "file", "hash_ids": [1]}
{"chat_id": 9, "parent_chat_id": 7, "timestamp": 61.114, \
"input_length": 40, "output_length": 7, "type": "text", "hash_ids": [1, 2, 9]}
"""
SHAREGPT = """[
{"id": "x", "conversations": [{"from": "human", "value": "What is a KV cache?"},
  {"from": "gpt", "value": "What a server remembers of a text."},
  {"from": "human", "value": "Why?"}, {"from": "gpt", "value": "To compute less."}]},
{"id": "y", "messages": [{"role": "user", "content": "Hi"},
  {"role": "assistant", "content": "Hello!"}]}
]
"""
TABLE = """when,agent,prompt,answer
2026-11-28T09:30:00.5Z,a,374,44
2026-11-28T09:30:04.5Z,,396,109
2026-11-28T11:30:09+02:00,a,879,55
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
32.388505,1029,399
"""
VLLM_BENCH = """{
"completed": 3,
"start_times": [100.5, 101.0, 107.25],
"input_lens": [12, 9, 700],
"output_lens": [5, 6, 7],
"ttfts": [0.1, 0.1, 0.2], "itls": [[0.1], [], [0.2, 0.1]],
"errors": ["", "", ""]
}
"""
SAMPLES = {
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "kvsim": KVSIM,
    "kv_cache_tester": KV_CACHE_TESTER,
    "llmservingsim": LLMSERVINGSIM,
    "mooncake": MOONCAKE,
    "qwen_bailian": QWEN_BAILIAN,
    "sharegpt": SHAREGPT,
    "table": TABLE,
    "vidur": VIDUR,
    "vllm_bench": VLLM_BENCH,
}
FIRST_LINE = {
    "azure": 2,
    "burstgpt": 2,
    "kvsim": 2,
    "llmservingsim": 1,
    "mooncake": 1,
    "qwen_bailian": 1,
    "table": 2,
    "vidur": 2,
}
"""Formats with a request a line: where the first of the three is, counted from 1."""

OPTIONS: dict[str, dict[str, Any]] = {
    "sharegpt": {"tokens_per_character": 0.25},
    "table": {
        "time": "when",
        "prompt_tokens": "prompt",
        "output_tokens": "answer",
        "session": "agent",
    },
}
"""What a reader needs besides the path."""


def write(folder: Path, content: str | bytes, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(kind: str, path: str | Path, **options: Any) -> list[RequestSpec]:
    reader_type: Any = TRACE_READERS[kind]
    return list(reader_type(path=path, **OPTIONS.get(kind, {}), **options).read())
