"""Regimes of a case, to see that random cases reach those they are there for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.identity.compare import Comparison, Run


def regimes_of(compared: Comparison) -> set[str]:
    """Return the names of the regimes that a case went through."""
    reached = {compared.chosen.path}
    if compared.reference.error:
        return reached | {"error"}
    happened = _happened(compared.reference)
    return reached | {name for name, did_happen in happened.items() if did_happen}


def _happened(run: Run) -> dict[str, bool]:
    steps, requests, summary = run.tables["steps"], run.tables["requests"], run.summary
    served = requests["first_token_s"].notna()
    num_admissions = int(served.sum()) + int(requests["num_preemptions"].sum())
    end_s = steps["start_s"] + steps["latency_s"]
    room = summary["max_num_batched_tokens"] - steps["num_batched_tokens"]
    blocked = (
        (steps["num_waiting"] > 0)
        & (steps["num_preempted"] == 0)
        & (steps["num_running"] < summary["max_num_seqs"])
        & (room > 0)
    )
    quiet = (
        (steps["num_decodes"] == steps["num_running"])
        & (steps["num_batched_tokens"] == steps["num_decodes"])
        & (steps["num_finished"] == 0)
    ).to_numpy()
    return {
        "preemptions": summary["num_preemptions"] > 0,
        "hits": summary.get("prefix_cache_hits", 0) > 0,
        "evictions": summary.get("num_evictions", 0) > 0,
        "shared blocks": bool(
            (steps["num_logical_blocks"] > steps["num_physical_blocks"]).any()
        ),
        "blocked heads": bool(blocked.any()),
        "partial prefills": int(steps["num_prefills"].sum()) > num_admissions,
        "five quiet steps": _longest_run(quiet) >= 5,
        "arrival at a step's end": bool(requests["arrival_s"].isin(set(end_s)).any()),
        "idle engine": bool((steps["start_s"].to_numpy()[1:] > end_s[:-1]).any()),
        "rejected": summary["rejected"] > 0,
        "length capped": summary["length_capped"] > 0,
        "samples": bool(requests["parent_id"].duplicated().any()),
        "follow-ups": bool((requests["turn"] > 0).any()),
        "stalled": bool(summary["stalled"]),
        "loads": summary.get("loaded_blocks", 0) > 0,
    }


def _longest_run(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Return how many in a row are true at most."""
    breaks = np.flatnonzero(np.concatenate([[True], ~flags, [True]]))
    return int(np.diff(breaks).max()) - 1
