from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from sim.errors import ConfigError
from sim.hardware import GPUS, load_gpu

if TYPE_CHECKING:
    from pathlib import Path

FIELDS = {
    "memory_bytes": 50_000_000_000,
    "memory_bandwidth_bytes_per_s": 1e12,
    "bf16_flops_per_s": 2e14,
    "fp8_flops_per_s": None,
    "interconnect_bytes_per_s": 3.2e10,
    "host_bytes_per_s": 3.2e10,
}


def test_memory_is_physical_not_the_catalogues() -> None:
    assert load_gpu("h100_sxm").memory_gib == pytest.approx(79.19)
    assert load_gpu("h200_sxm").memory_gib == pytest.approx(139.81)
    assert load_gpu("rtx_4090").memory_gib == pytest.approx(23.516)


def test_every_datasheet_is_plausible() -> None:
    assert len(GPUS) >= 8
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert 16 < gpu.memory_gib < 300
        assert 3e11 <= gpu.memory_bandwidth_bytes_per_s <= 1e13
        assert gpu.interconnect_bytes_per_s >= gpu.host_bytes_per_s
        assert gpu.source.startswith("NVIDIA")
        if gpu.fp8_flops_per_s is not None:
            ratio = gpu.fp8_flops_per_s / gpu.bf16_flops_per_s
            assert ratio == pytest.approx(2, rel=0.02)


def test_form_factors_share_a_family() -> None:
    assert load_gpu("a100_pcie").family == load_gpu("a100_sxm_40gb").family == "a100"
    assert [name for name, gpu in GPUS.items() if gpu.consumer] == [
        "rtx_4090",
        "rtx_3090",
    ]


def test_spellings() -> None:
    assert load_gpu("H100-SXM") is GPUS["h100_sxm"]
    assert load_gpu("rtx 4090") is GPUS["rtx_4090"]
    assert load_gpu("a100") is GPUS["a100_sxm"]


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h100_sxm"):
        load_gpu("h100_sxn")
    with pytest.raises(ConfigError, match=r"unknown gpu: '\?\?'; known: a100_pcie"):
        load_gpu("??")


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_gpu_by_path(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    path.write_text(json.dumps(FIELDS), encoding="utf-8")
    gpu = load_gpu(str(path))
    assert (gpu.name, gpu.memory_bytes) == ("mine", 50_000_000_000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_bytes_per_s": ...}, "host_bytes_per_s is missing in"),
        ({"memory": 3}, "memory is no field of a GPU"),
        ({"memory_bytes": -1}, "memory_bytes must be a positive number"),
        ({"memory_bytes": float("nan")}, "memory_bytes must be a positive number"),
        ({"bf16_flops_per_s": "fast"}, "bf16_flops_per_s must be a positive number"),
        ({"memory_bytes": True}, "memory_bytes must be a positive number"),
    ],
)
def test_wrong_files(tmp_path: Path, change: dict[str, object], message: str) -> None:
    content = {k: v for k, v in (FIELDS | change).items() if v is not ...}
    path = tmp_path / "gpu.yaml"
    path.write_text(json.dumps(content).replace("NaN", ".nan"), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_gpu(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "must hold YAML or JSON"), ("- 1", "must hold a mapping")],
)
def test_unparsable_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_gpu(path)
    assert "\n" not in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no readable GPU file at"):
        load_gpu(tmp_path / "gone.yaml")
