"""Derive a preset from a trace: ``python -m workloads.derive_preset NAME TRACE``.

Writes the JSON of `workloads.preset` to standard output. From the repository root,
with the Azure conversation trace at hand::

    python -m workloads.derive_preset azure_conv_2023 TRACE.csv \
        > workloads/presets/azure_conv_2023.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workloads.analysis.description import rank_correlation
from workloads.arrivals import GammaArrivals, arrival_times_s
from workloads.draws.streams import Streams
from workloads.errors import WorkloadError
from workloads.fetch import PUBLIC_TRACES
from workloads.preset import PRESET_FORMAT
from workloads.traces import TRACE_READERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workloads.spec import RequestSpec

_COUNT_S = 60.0
_NUM_DRAWS = 20
# Per mille. Every percent, and closer towards the tails, where lengths run away.
_PER_MILLE = (0, 1, 2, 5, *range(10, 991, 10), 995, 998, 999, 1000)


def derive_preset(
    name: str, requests: Sequence[RequestSpec], source: dict[str, str]
) -> dict[str, Any]:
    """Return the facts of a trace of at least 3 requests, ready for `json.dumps`.

    The format is ``kvsim-preset/1``. The rate is one over the mean gap, per second; the
    burstiness one over the squared coefficient of variation of the gaps; quantiles are
    in tokens, linear between order statistics. Facts are rounded to six digits, so that
    no library's last bit shows. ``notes`` compares counts of arrivals per minute in the
    trace and in draws of the preset, seeds 0 to 19.
    """
    gaps_s = np.diff([request.arrival_s for request in requests])
    prompts = [request.num_prompt_tokens for request in requests]
    outputs = [request.num_output_tokens for request in requests]
    if any(len(set(column)) < 2 for column in (gaps_s.tolist(), prompts, outputs)):
        raise WorkloadError(
            "a preset needs varied gaps and lengths; "
            f"{len(requests)} requests have none; take a longer trace"
        )
    correlation = rank_correlation(np.array(prompts), np.array(outputs))
    assert correlation is not None  # lengths vary
    arrivals = {
        "kind": "gamma",
        "rate": _rounded(1 / gaps_s.mean()),
        "burstiness": _rounded((gaps_s.mean() / gaps_s.std()) ** 2),
    }
    notes = _notes([request.arrival_s for request in requests], arrivals)
    return {
        "format": PRESET_FORMAT,
        "name": name,
        "source": source,
        **({"notes": notes} if notes else {}),
        "num_requests": len(requests),
        "span_s": _rounded(gaps_s.sum()),
        "arrivals": arrivals,
        "prompt_tokens": _quantiles(prompts),
        "output_tokens": _quantiles(outputs),
        "rank_correlation": _rounded(correlation),
    }


def describe_source(trace: Path) -> dict[str, str]:
    """Describe a trace by its checksum, an unknown one by its name as well."""
    sha256 = hashlib.sha256(trace.read_bytes()).hexdigest()
    for public_name, public in PUBLIC_TRACES.items():
        if public.sha256 == sha256:
            return {
                "trace": public_name,
                "url": public.url,
                "sha256": sha256,
                "licence": public.licence,
                "citation": public.citation,
                "change": "facts derived: rate, burstiness, quantiles, correlation",
            }
    return {"trace": trace.name, "sha256": sha256}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workloads.derive_preset",
        description="Derive a preset from a trace; JSON on standard output.",
    )
    parser.add_argument("name", help="name of the preset")
    parser.add_argument("trace", type=Path, help="trace file")
    parser.add_argument("--kind", choices=[*TRACE_READERS], default="azure")
    options = parser.parse_args(arguments)
    reader_type: Any = TRACE_READERS[options.kind]
    try:
        requests = list(reader_type(path=options.trace).read())
        facts = derive_preset(options.name, requests, describe_source(options.trace))
    except WorkloadError as error:
        print(error, file=sys.stderr)
        return 2
    print(preset_text(facts), end="")
    return 0


def preset_text(facts: dict[str, Any]) -> str:
    """Return the text of a preset file: one key a line, tables on one line each."""
    lines = [f"  {json.dumps(key)}: {json.dumps(facts[key])}" for key in facts]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _notes(times_s: Sequence[float], arrivals: dict[str, Any]) -> str:
    """Say how much smoother draws are than the trace; empty for a short one."""
    if times_s[-1] - times_s[0] < 2 * _COUNT_S:
        return ""
    process = GammaArrivals(arrivals["rate"], arrivals["burstiness"])
    draws = []
    for seed in range(_NUM_DRAWS):
        rng = Streams(seed).generator("arrivals")
        draws.append(_swing(arrival_times_s(process, rng, len(times_s))))
    ratio, peak = _swing(times_s)
    drawn_ratio, drawn_peak = np.mean(draws, axis=0)
    return (
        "gaps are drawn independently, the trace's swings of rate are not in it: "
        f"arrivals per {_COUNT_S:g} s have variance/mean {ratio:.3g} in the trace, "
        f"{drawn_ratio:.2g} here; the busiest {_COUNT_S:g} s bring {peak:.3g} "
        f"requests/s in the trace, {drawn_peak:.2g} here (mean of {_NUM_DRAWS} draws)"
    )


def _swing(times_s: Sequence[float]) -> tuple[float, float]:
    num_counts = max(int((times_s[-1] - times_s[0]) // _COUNT_S), 1)
    edges_s = times_s[0] + _COUNT_S * np.arange(num_counts + 1)
    counts = np.histogram(times_s, edges_s)[0]
    return float(counts.var() / counts.mean()), float(counts.max() / _COUNT_S)


def _quantiles(lengths: Sequence[int]) -> dict[str, Any]:
    probabilities = [per_mille / 1000 for per_mille in _PER_MILLE]
    values = np.quantile(lengths, probabilities)
    return {
        "kind": "quantiles",
        "probabilities": probabilities,
        "values": [_rounded(value) for value in values],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


if __name__ == "__main__":
    raise SystemExit(main())
