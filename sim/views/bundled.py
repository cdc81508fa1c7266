"""Bundled entries, kind by kind: the tables of the product with their own facts."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cache.tiers.cpu import TIER_POLICIES
from cache.v1.policies import CACHE_POLICIES
from sim.config.plug import did_you_mean
from sim.costs import COST_MODELS
from sim.errors import ConfigError
from sim.fleet.routers import ROUTERS
from sim.hardware.gpus import GIB, GPUS
from sim.hardware.interconnects import INTERCONNECTS, link_of
from sim.hardware.models.bundled import bundled_models, load_model
from sim.hardware.models.kv_memory import kv_memory
from sim.hardware.models.weights import count_active_parameters, count_parameters
from sim.scheduler.admission import ADMISSION_RULES
from sim.scheduler.generations import GENERATIONS
from sim.scheduler.victims import VICTIMS
from workloads.acceptance import ACCEPTANCE, acceptance_profiles
from workloads.arrivals import ARRIVALS
from workloads.draws.durations import DURATIONS
from workloads.lengths import LENGTH_PAIRS, LENGTHS
from workloads.prefixes import PREFIXES
from workloads.preset import load_preset, preset_names
from workloads.sessions import SESSIONS
from workloads.traces import TRACE_READERS, TRACE_WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Row = dict[str, Any]
"""Facts of one bundled thing, JSON-ready, units in the names."""

_BLOCK_SIZE = 16
_WHOLE = 1_000
"""Numbers from here on are rounded to whole ones."""


@dataclass(frozen=True, slots=True)
class BundledKind:
    """A table of the product.

    Parameters
    ----------
    key
        Where its names stand in a configuration, or on a command line.
    rows
        Returns the facts of each entry.
    columns
        Heading to the text of a row under it, for people; names come first.
    note
        What the numbers leave out, in a sentence.
    """

    key: str
    rows: Callable[[], Iterator[Row]]
    columns: Mapping[str, Callable[[Row], str]]
    note: str = ""


def bundled(kind: str, word: str = "") -> list[Row]:
    """Return the facts of what is bundled of a kind, in the order of its table.

    Parameters
    ----------
    kind
        A key of `BUNDLED_KINDS`.
    word
        Only what has each of these words, in any case, in its facts.

    Raises
    ------
    ConfigError
        When there is no such kind, or nothing of it has the words.
    """
    if kind not in BUNDLED_KINDS:
        raise ConfigError(
            f"kind: '{kind}' is not listed{did_you_mean(kind, BUNDLED_KINDS)} (there "
            f"are: {', '.join(BUNDLED_KINDS)})"
        )
    rows = list(BUNDLED_KINDS[kind].rows())
    found = [row for row in rows if _has(row, word.lower().split())]
    if not found:
        names = [row["name"] for row in rows]
        raise ConfigError(
            f"{kind}: nothing bundled has '{word}'{did_you_mean(word, names)}; without "
            f"a word all {len(rows)} are listed"
        )
    return found


def _has(row: Row, words: list[str]) -> bool:
    text = " ".join(map(str, row.values())).lower()
    return all(word in text for word in words)


def _models() -> Iterator[Row]:
    for name in bundled_models():
        model = load_model(name)
        layers = Counter(
            kind.value for kind in model.layer_kinds if kind.value != "MLP"
        )
        yield {
            "name": name,
            "num_parameters": count_parameters(model),
            "num_active_parameters": count_active_parameters(model),
            "num_layers": model.num_hidden_layers,
            "kv_cache_layers": dict(layers),
            "sliding_window": model.sliding_window,
            "kv_bytes_per_token": kv_memory(name, block_size=_BLOCK_SIZE).token_bytes,
            "max_model_len": model.max_position_embeddings,
            "dtype": model.dtype,
            "quantization": model.quantization,
        }


def _parameters(row: Row) -> str:
    total, active = row["num_parameters"] / 1e9, row["num_active_parameters"] / 1e9
    # Embeddings, of which a token reads a row, are not what makes a mixture.
    return f"{total:.3g}B" + (f" ({active:.3g}B active)" if active < total / 2 else "")


def _caches(row: Row) -> str:
    window = f" of {row['sliding_window']:,}" if row["sliding_window"] else ""
    return " + ".join(
        f"{number} {kind}{window if kind in _WINDOWED else ''}"
        for kind, number in row["kv_cache_layers"].items()
    )


_WINDOWED = ("sliding window", "chunked local attention")


def _gpus() -> Iterator[Row]:
    for gpu in GPUS.values():
        link = link_of(gpu)
        yield {
            "name": gpu.name,
            "memory_bytes": gpu.memory_bytes,
            "memory_bandwidth_bytes_per_s": gpu.memory_bandwidth_bytes_per_s,
            "bf16_flops_per_s": gpu.bf16_flops_per_s,
            "fp8_flops_per_s": gpu.fp8_flops_per_s,
            "fp4_flops_per_s": gpu.fp4_flops_per_s,
            "interconnect_bytes_per_s": link.bytes_per_s,
            "interconnect_is_switched": link.is_switched,
            "host_bytes_per_s": gpu.host_bytes_per_s,
            "is_judged": gpu.is_judged,
            "source": gpu.source,
        }


def _wiring(row: Row) -> str:
    if not row["interconnect_is_switched"]:
        return "PCIe"
    return "xGMI" if row["source"].startswith("AMD") else "NVLink"


def _schedulers() -> Iterator[Row]:
    for generation in GENERATIONS.values():
        parts = generation.parts()
        yield {
            "name": generation.name,
            "releases": generation.versions_in_words,
            "engine_version": generation.engine_version,
            "does": _first_line(parts.scheduler),
            "enable_prefix_caching": generation.enable_prefix_caching,
            "has_cpu_tier": generation.has_cpu_tier,
            "evictors": list(parts.evictors),
        }


def _prefix_caching(row: Row) -> str:
    default = row["enable_prefix_caching"]
    return "none" if default is None else "on" if default else "off"


def _interconnects() -> Iterator[Row]:
    for link in INTERCONNECTS.values():
        yield {
            "name": link.name,
            "bytes_per_s": link.bytes_per_s,
            "is_switched": link.is_switched,
            "hop_s": link.hop_s,
            "max_gpus": link.max_gpus,
            "source": link.source,
        }


def _acceptance_profiles() -> Iterator[Row]:
    for profile in acceptance_profiles().values():
        lengths = {mode: list(means) for mode, means in profile.lengths.items()}
        yield asdict(profile) | {"lengths": lengths}


def _lengths(row: Row) -> str:
    return "; ".join(
        f"{mode} {' '.join(f'{mean:.2f}' for mean in means)}"
        for mode, means in row["lengths"].items()
    )


def _presets() -> Iterator[Row]:
    for name in preset_names():
        preset = load_preset(name)
        yield {
            "name": name,
            "num_requests": preset.num_requests,
            "span_s": preset.span_s,
            "source": dict(preset.source),
            "notes": preset.notes,
        }


def _classes(table: Mapping[str, type]) -> Callable[[], Iterator[Row]]:
    def rows() -> Iterator[Row]:
        for name, cls in table.items():
            yield {"name": name, "does": _first_line(cls), "arguments": _arguments(cls)}

    return rows


def _first_line(cls: type) -> str:
    return (inspect.getdoc(cls) or "").partition("\n")[0].replace("``", "")


def _arguments(cls: type) -> list[str]:
    return list(inspect.signature(cls).parameters)


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def _number(key: str, unit: float) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        if row[key] is None:
            return "-"
        value = row[key] / unit
        return f"{value:,.0f}" if value >= _WHOLE else f"{value:,.4g}"

    return text


def _kind(key: str, table: Mapping[str, type]) -> BundledKind:
    columns = {"name": _text("name"), "what it does": _text("does")}
    return BundledKind(key, _classes(table), columns)


BUNDLED_KINDS: Mapping[str, BundledKind] = MappingProxyType(
    {
        "models": BundledKind(
            "engine.model",
            _models,
            {
                "name": _text("name"),
                "parameters": _parameters,
                "layers": lambda row: f"{row['num_layers']}",
                "KV cache": _caches,
                "KiB a token": _number("kv_bytes_per_token", 1024),
                "max_model_len": lambda row: f"{row['max_model_len']:,}",
                "dtype": _text("dtype"),
                "quantization": lambda row: row["quantization"] or "none",
            },
            "KiB a token count the layers that keep every token, on one rank, in the "
            "model's dtype; any other model is read from its config.json",
        ),
        "gpus": BundledKind(
            "engine.gpu",
            _gpus,
            {
                "name": lambda row: row["name"] + ("" if row["is_judged"] else " *"),
                "GiB": _number("memory_bytes", GIB),
                "GB/s": _number("memory_bandwidth_bytes_per_s", 1e9),
                "bf16": _number("bf16_flops_per_s", 1e12),
                "fp8": _number("fp8_flops_per_s", 1e12),
                "fp4": _number("fp4_flops_per_s", 1e12),
                "link": lambda row: (
                    f"{row['interconnect_bytes_per_s'] / 1e9:,.4g} {_wiring(row)}"
                ),
                "host": _number("host_bytes_per_s", 1e9),
            },
            "* a datasheet that nothing measured was held against; dense TFLOP/s by "
            "dtype, link and host in GB/s one way; any other GPU is read from a YAML "
            "file of the same fields",
        ),
        "schedulers": BundledKind(
            "engine.scheduler",
            _schedulers,
            {
                "name": _text("name"),
                "what it does": _text("does"),
                "releases": _text("releases"),
                "default": _text("engine_version"),
                "prefix caching": _prefix_caching,
                "CPU tier": lambda row: "yes" if row["has_cpu_tier"] else "no",
            },
        ),
        "cost_models": _kind("cost.kind", COST_MODELS),
        "evictors": _kind("engine.evictor", CACHE_POLICIES),
        "victims": _kind("engine.preemption_victim", VICTIMS),
        "admission_rules": _kind("engine.admission", ADMISSION_RULES),
        "routers": _kind("fleet.router", ROUTERS),
        "tier_policies": _kind(
            "engine.kv_transfer_config.kv_connector_extra_config.eviction_policy",
            TIER_POLICIES,
        ),
        "interconnects": BundledKind(
            "engine.interconnect",
            _interconnects,
            {
                "name": _text("name"),
                "GB/s one way": _number("bytes_per_s", 1e9),
                "hop (us)": _number("hop_s", 1e-6),
                "GPUs": lambda row: f"{row['max_gpus']:,}",
                "wired": lambda row: "switched" if row["is_switched"] else "ring",
            },
        ),
        "trace_readers": _kind("workload.trace.kind", TRACE_READERS),
        "trace_writers": _kind("kvsim workload convert --to", TRACE_WRITERS),
        "arrivals": _kind("workload.synthetic.arrivals", ARRIVALS),
        "lengths": _kind("workload.synthetic.prompt_tokens", LENGTHS),
        "length_pairs": _kind("workload.synthetic.lengths", LENGTH_PAIRS),
        "prefixes": _kind("workload.synthetic.prefixes", PREFIXES),
        "sessions": _kind("workload.sessions.kind", SESSIONS),
        "durations": _kind("workload.sessions.tool_s", DURATIONS),
        "acceptance": _kind("workload.acceptance", ACCEPTANCE),
        "acceptance_profiles": BundledKind(
            "workload.acceptance.name",
            _acceptance_profiles,
            {
                "name": _text("name"),
                "model": _text("model"),
                "GPU": _text("gpu"),
                "tokens a step with 1, 2, ... drafts": _lengths,
            },
            "SPEED-Bench, coding; from github.com/SemiAnalysisAI/InferenceX",
        ),
        "presets": BundledKind(
            "workload.preset.name",
            _presets,
            {
                "name": _text("name"),
                "requests": lambda row: f"{row['num_requests']:,}",
                "hours": _number("span_s", 3600),
            },
        ),
    }
)
"""Kinds by the name that ``kvsim list`` takes."""
