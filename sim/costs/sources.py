"""The source and the interval of each term of a step's cost, for the summary."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, Final

from sim.scheduler.generation import SCHEDULE_REQUEST_S

if TYPE_CHECKING:
    from sim.scheduler.generation import HostRule

COLLECTIVES: Final = {
    "within": "nine of ten published all-reduces within 13 to 30 %; see "
    "sim/costs/README.md"
}
GRAPHS: Final = {
    "source": "sizes that the release captures, vLLM config/vllm.py; what filling up "
    "costs is that of so many tokens: 0.8 % of a measured run at most"
}
EXPERTS: Final = {
    "value": "uniform",
    "source": "moe.csv of Qwen3-30B-A3B; skew (a power law) against balanced tokens, "
    "aiconfigurator tables of h100",
    "interval": [1.0, 1.14],
    "unit": "times the experts' seconds",
}
"""How tokens choose experts, and how much longer they take where routing is skewed."""
QK_NORM: Final = (
    "1.9 and 2.0 us at one token, LLMServingSim tables of Qwen3 under vLLM 0.19.0; "
    "2.1, of SGLang's, in its pull request 17515"
)
QK_NORM_INTERVAL_S: Final = (1.2e-6, 2.6e-6)
"""SGLang's newer kernel, and the 5.0 us of norm and rotary embedding on an H100 (vLLM,
pull request 38621) without the 2.4 of the latter."""
NOT_JUDGED: Final = "datasheet alone: nothing measured was held against it"
_SCHEDULING: Final = (
    "vLLM 0.33's own scheduler, timed on one core of an AMD EPYC; 11 to 13 us on two "
    "A100 (vLLM, pull request 23914)"
)
_SCHEDULING_S: Final = [11e-6, 17e-6]


def parameter(
    default: float | None,
    unit: str,
    source: str,
    interval: tuple[float, float] | None = None,
) -> Any:
    """Declare a parameter with what `describe` tells of it."""
    told: dict[str, Any] = {"unit": unit, "source": source}
    return field(
        default=default,
        metadata=told if interval is None else told | {"interval": list(interval)},
    )


def factor(default: float, source: str) -> Any:
    """Declare a parameter that multiplies a time."""
    return field(default=default, metadata={"unit": "factor", "source": source})


def scheduling_told(given_s: float | None, rule: HostRule) -> dict[str, Any]:
    """Return the seconds a request, as given or by the release, with their source.

    Where no figure is known, steps ahead hide as much as vLLM's, and others wait for
    none.
    """
    if given_s is not None:
        return {"value": given_s, "unit": "s/request", "source": "given"}
    value = rule.schedule_request_s or (SCHEDULE_REQUEST_S if rule.is_hidden else 0.0)
    source = _SCHEDULING if value else "no public figure for this release: zero"
    found: dict[str, Any] = {"value": value, "unit": "s/request", "source": source}
    return found | ({"interval": _SCHEDULING_S} if value else {})


CASCADE_LAYER_LATENCY_S: Final = 16.4e-6


PIECE_LATENCY_S: Final = 20e-6


def pieces_told(given_s: float | None) -> dict[str, Any]:
    """Return what a layer takes longer whose graph is cut, with its source."""
    if given_s is not None:
        return {"value": given_s, "unit": "s/layer", "source": "given"}
    return {
        "value": PIECE_LATENCY_S,
        "unit": "s/layer",
        "source": "the same decodes in pieces and whole, vLLM pull requests 16072 "
        "(17 us), 20050 (27), 20059 (20, of 14 to 26) and 51167 (20, of 5 to 25)",
        "interval": [5e-6, 27e-6],
    }


def cascade_told(given_s: float | None) -> dict[str, Any]:
    """Return the start of a layer's further kernels of attention, with its source."""
    if given_s is not None:
        return {"value": given_s, "unit": "s/layer", "source": "given"}
    return {
        "value": CASCADE_LAYER_LATENCY_S,
        "unit": "s/layer",
        "source": "another attention kernel of 14 us and a merge of 2.4 us, as in "
        "layer_latency_s",
    }
