"""The JSON that ``vllm bench serve --save-result --save-detailed`` writes.

Source: vLLM, ``vllm/benchmarks/serve.py``. What only a real client has is left out:
``date``, ``generated_texts``, ``endpoint_type`` and rates by the second.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.results.metrics import is_served
from sim.results.schema import LATENCIES, STATISTICS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import TextIO

    import numpy.typing as npt

    from sim.results.folder import Columns, RunFolder

_TOTALS = (
    *("duration", "completed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput"),
)
_COLUMNS = (
    *("request_id", "arrival_s", "num_prompt_tokens", "num_generated_tokens"),
    *("status", "reason", "ttft_s"),
)


def write_bench(folder: RunFolder, path: Path) -> list[str]:
    """Write a result with an entry a request, in order of their ids.

    Requests without an answer have a time to first token of 0, no gaps, and their
    reason in ``errors``, as vLLM's client has it.
    """
    requests = folder.columns("requests", _COLUMNS)
    served = is_served(requests["status"])
    facts = _facts(folder, int(len(served) - served.sum())) | _lists(requests, served)
    itl = folder.recorded("itl.parquet")
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(facts, allow_nan=False)[:-1])
        if itl is not None:
            gaps = _gaps_by_request(requests["request_id"], folder.token_gaps())
            _write_lists(file, "itls", gaps)
        file.write("}\n")
    if itl is not None:
        return []
    return ["'itls' are left out; for them, run it with --itl exact"]


def _facts(folder: RunFolder, num_failed: int) -> dict[str, Any]:
    summary, model = folder.summary, folder.engine.get("model")
    rate = summary["request_rate"]
    facts = {
        "backend": "kvsim",
        "label": summary["title"],
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": summary["num_requests"],
        "request_rate": "inf" if rate is None else rate,
        "max_concurrency": None,
        "failed": num_failed,
    }
    names = [f"{each}_{of}_ms" for of in LATENCIES for each in STATISTICS]
    facts |= {name: summary[name] for name in _TOTALS}
    # vLLM has 0 where nothing was measured.
    return facts | {name: summary[name] or 0.0 for name in names}


def _lists(requests: Columns, served: npt.NDArray[np.bool_]) -> dict[str, Any]:
    failed = zip(requests["status"], requests["reason"], served, strict=True)
    output_lens = np.where(served, requests["num_generated_tokens"], 0)
    return {
        "input_lens": requests["num_prompt_tokens"].tolist(),
        "output_lens": output_lens.tolist(),
        "start_times": requests["arrival_s"].tolist(),
        "ttfts": np.where(served, requests["ttft_s"], 0.0).tolist(),
        "errors": ["" if ok else reason or status for status, reason, ok in failed],
    }


def _gaps_by_request(
    ids: npt.NDArray[np.int64],
    batches: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
) -> Iterator[list[float]]:
    """Yield the gaps of each of `ids`, both in ascending order; some have none."""
    wanted = iter(ids.tolist())
    current: int | None = next(wanted, None)
    gaps: list[float] = []
    for whose, gaps_s in batches:
        starts = np.flatnonzero(np.diff(whose, prepend=-1))
        ends = [*starts[1:].tolist(), len(whose)]
        for start, end in zip(starts.tolist(), ends, strict=True):
            while current is not None and current < whose[start]:
                yield gaps
                current, gaps = next(wanted, None), []
            gaps += gaps_s[start:end].tolist()
    while current is not None:
        yield gaps
        current, gaps = next(wanted, None), []


def _write_lists(file: TextIO, name: str, lists: Iterable[list[float]]) -> None:
    file.write(f', "{name}": [')
    for i, each in enumerate(lists):
        file.write(("," if i else "") + json.dumps(each, allow_nan=False))
    file.write("]")
