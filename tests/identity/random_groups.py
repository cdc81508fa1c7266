"""Random small configurations of models with several KV cache groups, by seed."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from sim.config.tables import parse_config
from tests.identity.random_configs import Case, draw_case
from tests.shared import ROOT

_CONFIGS = ROOT / "sim" / "hardware" / "models" / "configs"


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kvsim-groups-")


def _model(name: str, **changes: Any) -> str:
    """Return a model's configuration with some of its numbers changed."""
    known = json.loads((_CONFIGS / f"{name}.json").read_text())
    text = known.get("text_config", known)
    text |= changes
    marks = "-".join(str(each) for each in changes.values() if isinstance(each, int))
    path = Path(_folder().name) / f"{name}-{marks}.json"
    path.write_text(json.dumps(known))
    return str(path)


def _gpt_oss(rng: Random) -> str:
    return _model("openai--gpt-oss-20b", sliding_window=rng.randint(1, 80))


def _gemma(rng: Random) -> str:
    return _model("google--gemma-3-4b-pt", sliding_window=rng.randint(1, 80))


def _llama(rng: Random) -> str:
    chunk = rng.choice([16, 32, 48, 64, 128])
    return _model(
        "meta-llama--Llama-4-Scout-17B-16E",
        attention_chunk_size=chunk,
        num_hidden_layers=8,
        layer_types=[*["chunked_attention"] * 3, "full_attention"] * 2,
    )


def _states(rng: Random) -> str:
    return _model(
        "ibm-granite--granite-4.0-h-tiny", mamba_d_state=rng.choice([64, 128])
    )


def _small_states() -> str:
    """Return a model whose states are kept for hits in blocks of few tokens."""
    return _model(
        "ibm-granite--granite-4.0-h-tiny",
        mamba_d_state=8,
        mamba_n_heads=8,
        mamba_d_head=8,
        hidden_size=32,
    )


def draw_group_case(seed: int, *, has_states: bool = True) -> Case:
    """Return `draw_case` of a seed with the layers of another model."""
    config, look = draw_case(seed)
    rng = Random(f"groups {seed}")
    engine = config.engine.model_dump(exclude_unset=True)
    for key in ("engine_version", "sliding_window", "evictor"):
        engine.pop(key, None)
    kinds = [_gpt_oss, _gpt_oss, _gemma, _llama, _states]
    model = rng.choice(kinds if has_states else kinds[:-1])
    engine["model"] = model(rng)
    engine["block_size"] = rng.choice([16, 16, 32])
    caches = engine["enable_prefix_caching"] = rng.random() < 0.5
    if model is _states:
        caches = engine["enable_prefix_caching"] = False
        states = Random(f"states {seed}")
        if states.random() < 0.6:
            engine |= {"model": _small_states(), "enable_prefix_caching": True}
            engine["num_gpu_blocks_override"] *= states.choice([1, 2, 4])
    if caches and rng.random() < 0.3:
        unit = engine["block_size"] * rng.choice([1, 3])
        engine["prefix_cache_retention_interval"] = rng.choice([None, unit])
    engine["num_gpu_blocks_override"] = max(
        2,
        round(
            engine["num_gpu_blocks_override"] * rng.choice([0.7, 1.0, 1.0, 1.5, 2.0])
        ),
    )
    if rng.random() < 0.5:
        engine["async_scheduling"] = False
    data = config.model_dump(exclude_unset=True) | {"engine": engine}
    if data["cost"]["kind"] == "measured":
        data["cost"] = {"kind": "roofline"}
    return Case(parse_config(data), look)
