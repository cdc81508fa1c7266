"""Tables of LLMServingSim's first format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from calibrate.importers.llmservingsim import import_llmservingsim
from sim.errors import UserError
from sim.hardware.models.bundled import load_model
from tests.shared import shared

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = """layer_name,input,kv_cache,tp_size,latency(ns)
q_proj,1,0,4,4000
k_proj,1,0,4,2000
v_proj,1,0,4,2000
gate_proj,1,0,4,9000
up_proj,1,0,4,8000
input_layernorm,1,0,4,3000
post_layernorm,1,0,4,3000
rope,1,0,4,5000
attn,1,0,4,7000
down_proj,1,0,4,6000
"""
ATTENTION = """time_stats.attn_prefill.median,batch_size,prefill_chunk_size,\
kv_cache_size,is_prefill
0.5,1,64,128,True
,8,0,128,False
"""


def tables(folder: Path, layers: str = LAYERS) -> Path:
    place = folder / "H100" / "Llama-3.1-70B" / "tp4"
    place.mkdir(parents=True)
    (place / "layers.csv").write_text(layers, encoding="utf-8")
    (place / "attention.csv").write_text(ATTENTION, encoding="utf-8")
    return folder / "H100"


def test_layers_are_put_together_and_decodes_left_out(tmp_path: Path) -> None:
    folder = tables(tmp_path)
    model = load_model("meta-llama/Llama-3.1-70B")
    profile = import_llmservingsim(folder, model)
    layers = {
        table.constants["layer"]: table.quantiles["p50_s"][0]
        for table in profile.tables("layer")
    }
    assert layers == pytest.approx(
        {
            "qkv_proj": 8e-6,
            "gate_up_proj": 17e-6,
            "layernorm": 3e-6,
            "rotary_emb": 5e-6,
            "down_proj": 6e-6,
        }
    )
    (chunk,) = profile.tables("prefill_attention")
    assert chunk.quantiles["p50_s"] == pytest.approx([5e-4])
    assert {key: list(axis) for key, axis in chunk.axes.items()} == {
        "batch": [1],
        "query": [64],
        "past": [128],
    }
    assert not profile.tables("decode_attention")
    same = import_llmservingsim(folder / "Llama-3.1-70B", model)
    assert same.body["ops"] == profile.body["ops"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = tables(tmp_path, LAYERS.replace("k_proj", "another"))
    with pytest.raises(UserError, match=r"layers\.csv has no layer 'k_proj'"):
        import_llmservingsim(folder, load_model("meta-llama/Llama-3.1-70B"))
    with pytest.raises(UserError, match=r"no meta\.yaml"):
        import_llmservingsim(tmp_path / "nowhere")


def test_the_published_tables() -> None:
    folder = shared("profiles/llmservingsim_v0")
    profile = import_llmservingsim(folder, load_model("meta-llama/Llama-3.1-70B"))
    (chunks,) = profile.tables("prefill_attention")
    assert chunks.num_points == 232
    assert len(profile.tables("layer")) == 10
