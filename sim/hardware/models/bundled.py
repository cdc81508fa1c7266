"""Model architectures: the facts of a Hugging Face ``config.json`` that cost memory.

Bundled facts live in ``sim/hardware/models/configs/*.json``, one file a model, in the
keys of its ``config.json``; ``aliases.json`` names the checkpoints that share a shape,
and names that people type for one that the hub knows by another (``hub``).
Each file's parameters are counted and equal the published total of the checkpoint. Any
other model is read from a ``config.json`` by path.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sim.errors import ConfigError
from sim.hardware.models.architecture import ModelArchitecture, dtype_bytes
from sim.hardware.models.config_json import architecture_facts
from sim.hardware.models.quantization import (
    PACKED_BITS,
    QUANTIZATION_SCHEMES,
    held_scheme_name,
    quantization_scheme,
)
from workloads.plain import parse_json


def bundled_models() -> tuple[str, ...]:
    """Return the Hugging Face names of all bundled models, sorted."""
    return tuple(sorted(_index()))


def load_model(name: str | Path) -> ModelArchitecture:
    """Return a bundled model by name, or the one of a ``config.json`` by path.

    Parameters
    ----------
    name
        A Hugging Face name (case and separators do not matter; the owner and words
        such as ``-Instruct``, ``-Base``, ``-hf`` and ``-it`` may be left out or added,
        a date where it changes no shape), the path of a ``config.json``, or of a
        directory that holds one.

    Raises
    ------
    ConfigError
        When the name is neither (the nearest names are given), or the file is not
        readable or lacks a key.
    """
    if not str(name).strip():
        raise ConfigError(
            f"model must be a bundled name or the path of a config.json; got {name!r}"
        )
    path = Path(name)
    if _is_directory(path):
        path = path / "config.json"
    if path.suffix == ".json":
        return _read_config(path)
    found = _find_bundled(str(name))
    if found is None:
        shown = _shortened(str(name))
        known = bundled_models()
        near = difflib.get_close_matches(shown, known, n=3, cutoff=0.4)
        near = near or [each for each in known if shown.lower() in each.lower()][:3]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        if quantised := _as_quantised(shown):
            hint = f"did you mean {quantised}, or in another scheme? "
        raise ConfigError(
            f"unknown model: {shown!r}; {hint}any other model is read from the path"
            " of its config.json"
        )
    facts, quantization = found
    model = model_from_config(facts, str(name), f"the bundled facts of {name}")
    return replace(model, quantization=quantization or model.quantization)


def hub_name(name: str) -> str | None:
    """Return the name by which the Hugging Face hub knows a checkpoint.

    Of a bundled name, or of one that differs from it by case, separators, a release
    (``-2507``, ``-v0.1``) or words that tell a base model. None where none or several
    fit: ``-Instruct`` is another checkpoint of the same shape.
    """
    owner = name.lower().rpartition("/")[0]
    fit = {
        known: hub
        for known, hub in _hub_names().items()
        if owner in ("", known.lower().rpartition("/")[0])
    }
    for told in (_tail_of, _checkpoint_of, _unreleased_of):
        found = {hub for known, hub in fit.items() if told(known) == told(name)}
        if len(found) > 1:  # of several, the one whose facts are bundled
            found &= _files().keys()
        if len(found) == 1:
            return found.pop()
    return None


def model_from_config(
    config: dict[str, Any], name: str, source: str
) -> ModelArchitecture:
    """Return the architecture of a parsed ``config.json``."""
    return ModelArchitecture(name=name, **architecture_facts(config, source))


def resolved_model(
    model: ModelArchitecture, dtype: str = "auto", quantization: str | None = None
) -> ModelArchitecture:
    """Return the model as the engine runs it."""
    dtype = model.dtype if dtype == "auto" else dtype
    dtype_bytes(dtype)
    name = held_scheme_name(quantization or None, model.quantization, model.name)
    quantization_scheme(name)
    return replace(model, dtype=dtype, quantization=name)


def _read_config(path: Path) -> ModelArchitecture:
    where = _shortened(str(path))
    config = _json_object(path, where)
    apart = path.with_name("hf_quant_config.json")
    if not config.get("quantization_config") and apart.is_file():
        told = _json_object(apart, _shortened(str(apart))).get("quantization")
        if isinstance(told, dict):  # as ModelOpt exports it, and vLLM reads it
            config["quantization_config"] = {
                "quant_method": "modelopt",
                "ignore": told.get("exclude_modules") or [],
                **told,
            }
    name = config.get("_name_or_path")
    if not isinstance(name, str) or not name:
        name = path.parent.name or path.stem
    return model_from_config(config, _shortened(name), where)


def _json_object(path: Path, where: str) -> dict[str, Any]:
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or "not readable"
        raise ConfigError(
            f"no readable config.json at {where}: {reason}; give the path of one"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where} must hold JSON; it is nested too deep") from error
    except ValueError as error:  # no JSON, no UTF-8, or a null byte in the path
        reason = _shortened(str(error))
        raise ConfigError(f"{where} must hold JSON; {reason}") from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{where} must hold a JSON object; got a {type(config).__name__}"
        )
    return config


def _shortened(text: str, most: int = 200) -> str:
    """Return `text` on one line, and its end only where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"...{line[-most:]}"


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # such as a name too long for the file system
        return False


def _find_bundled(name: str) -> tuple[dict[str, Any], str | None] | None:
    folded = _folded()
    entry = folded.get(name.lower())
    owner, _, _ = name.lower().rpartition("/")
    if entry is None and owner in {
        "",
        _MIRROR,
        *(each.partition("/")[0] for each in folded),
    }:
        entry = _by_words().get(_words_of(name)) or _without_owner(name)
    if entry is None and owner in _QUANTISERS:
        entry = _requantised(name)
    if entry is None:
        return None
    file_name, quantization = entry
    return _bundled_json(file_name), quantization


_MIRROR = "unsloth"
"""Owner of copies of others' checkpoints under their names."""
_QUANTISERS = frozenset(
    {
        "casperhansen",
        "hugging-quants",
        "neuralmagic",
        "nm-testing",
        "nvidia",
        "redhatai",
        "techxgenus",
        "thebloke",
    }
)
"""Owners whose checkpoints are others' in a scheme that the name tells."""
_SCHEMES_BY_ENDING = (
    (re.compile(r"-fp8-dynamic$"), "fp8"),
    (re.compile(r"-fp8$"), "fp8-tensor"),
    (re.compile(r"[-.]quantized\.w8a8$"), "w8a8"),
    (re.compile(r"[-.]quantized\.w8a16$"), "w8a16"),
    (re.compile(r"[-.]quantized\.w4a16$"), "w4a16"),
    (re.compile(r"-awq(-int4)?$"), "awq"),
    (re.compile(r"-gptq(-int4)?$"), "gptq"),
    (re.compile(r"-(nv)?fp4$"), "nvfp4"),
)
_EXPERTS_FACTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts"})


_DELTA_NET_FACT = "linear_num_value_heads"
_SCHEMES_WITHOUT_DELTA_NETS = frozenset({"fp8", "w8a8", "w8a16", "w4a16", "nvfp4"})
"""Those of llm-compressor, whose recipes list ``linear_attn`` under ``ignore``."""


def _requantised(name: str) -> tuple[str, str | None] | None:
    """Return the file and scheme of a checkpoint that its name tells both of."""
    tail = _tail_of(name)
    for ending, scheme in _SCHEMES_BY_ENDING:
        base = ending.sub("", tail)
        found = _by_words().get(_words_of(base)) if base != tail else None
        if found and found[1] is None:
            facts = _bundled_json(found[0])
            if scheme == "nvfp4" and _EXPERTS_FACTS & facts.keys():
                return None  # recipes differ in what attention is stored in
            has_net = _DELTA_NET_FACT in facts
            is_left = has_net and scheme in _SCHEMES_WITHOUT_DELTA_NETS
            return found[0], f"{scheme}-but-states" if is_left else scheme
    return None


_ANY_SCHEME = re.compile(
    r"[-.](fp8|(?:nv|mx)?fp4|int8|int4|w\d+a\d+|awq|gptq|quantized|bnb)\b.*$", re.I
)


def _as_quantised(name: str) -> str | None:
    """Return the bundled model that a name says to be in a scheme, and a scheme."""
    told = _ANY_SCHEME.search(name)
    if told is None:
        return None
    base = name[: told.start()]
    for each in (base, base.rpartition("/")[2]):
        if _find_bundled(each):
            scheme = {"fp4": "nvfp4"}.get(told[1].lower(), told[1].lower())
            known = scheme in {*QUANTIZATION_SCHEMES, *PACKED_BITS}
            return f"{each} with quantization {scheme if known else 'fp8'}"
    return None


def _without_owner(name: str) -> tuple[str, str | None] | None:
    """Return the only entry of that name, whoever owns it."""
    known = _folded().items()
    found = {entry for full, entry in known if _tail_of(full) == name.lower()}
    return found.pop() if len(found) == 1 else None


@cache
def _folded() -> dict[str, tuple[str, str | None]]:
    """Map every bundled name, in small letters, to its file and scheme."""
    return {name.lower(): entry for name, entry in _index().items()}


_UNTOLD = frozenset({"instruct", "base", "it", "chat", "hf", "pt", "meta"})
"""Words of a name that tell nothing about the shape."""
_OF_A_BASE = frozenset({"base", "hf", "pt", "meta"})
"""Words of a name that tell no other checkpoint, as ``-Instruct`` does."""
_DATE = re.compile(r"\d{4}")
_RELEASE = re.compile(r"\d{4}|v\d+(\.\d+)*")
_BETWEEN_NUMBERS = re.compile(r"(?<=\d) (?=\d)")
"""The space that keeps Qwen2-7B from Qwen-27B."""


def _words_of(
    name: str,
    untold: frozenset[str] = _UNTOLD,
    release: re.Pattern[str] | None = None,
) -> str:
    """Return a name without owner, case, separators and words that tell nothing."""
    kept = [
        word
        for word in re.split(r"[-_\s]+", _tail_of(name))
        if word not in untold and not (release and release.fullmatch(word))
    ]
    return _BETWEEN_NUMBERS.sub("-", " ".join(kept)).replace(" ", "")


def _tail_of(name: str) -> str:
    """Return a name in small letters, without its owner."""
    return name.lower().rpartition("/")[2]


def _checkpoint_of(name: str) -> str:
    return _words_of(name, _OF_A_BASE)


def _unreleased_of(name: str) -> str:
    return _words_of(name, _OF_A_BASE, _RELEASE)


@cache
def _by_words() -> dict[str, tuple[str, str | None]]:
    """Map what tells a shape to its file and scheme, where that is one.

    A date may be left out where all dates have one shape.
    """
    found: dict[str, set[tuple[str, str | None]]] = {}
    for release in (None, _DATE):
        added: dict[str, set[tuple[str, str | None]]] = {}
        for name, entry in _index().items():
            words = _words_of(name, release=release)
            if words not in found:
                added.setdefault(words, set()).add(entry)
        found |= added
    return {words: next(iter(both)) for words, both in found.items() if len(both) == 1}


@cache
def _index() -> dict[str, tuple[str, str | None]]:
    """Map every bundled name to its file and quantisation scheme."""
    files = _files()
    index: dict[str, tuple[str, str | None]] = {
        name: (file_name, None) for name, file_name in files.items()
    }
    for alias, target in _bundled_json("aliases.json").items():
        index[alias] = (files[target["model"]], target.get("quantization"))
    return index


@cache
def _hub_names() -> dict[str, str]:
    """Map every bundled name to the hub's name of its checkpoint."""
    aliases = _bundled_json("aliases.json").items()
    return {name: name for name in _files()} | {
        alias: target.get("hub", alias) for alias, target in aliases
    }


@cache
def _files() -> dict[str, str]:
    """Map the name of every model with facts of its own to its file."""
    folder = resources.files("sim.hardware.models") / "configs"
    return {
        entry.name.removesuffix(".json").replace("--", "/", 1): entry.name
        for entry in folder.iterdir()
        if "--" in entry.name
    }


def _bundled_json(file_name: str) -> dict[str, Any]:
    text = (resources.files("sim.hardware.models") / "configs" / file_name).read_text(
        encoding="utf-8"
    )
    facts: dict[str, Any] = json.loads(text)
    return facts
