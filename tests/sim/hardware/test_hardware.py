from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from sim.costs.roofline import RooflineCost
from sim.errors import ConfigError
from sim.hardware.gpus import GPUS, datasheet_of, load_gpu
from sim.hardware.models.bundled import load_model

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


# Physical GiB, memory GB/s, dense bf16 and fp8 TFLOP/s, GPU-to-GPU and host GB/s.
DATASHEETS = {
    "h100_sxm": (79.19, 3350, 989.4, 1978.9, 450, 64),
    "h100_pcie": (79.19, 2000, 756, 1513, 64, 64),
    "h200_sxm": (139.81, 4800, 989.4, 1978.9, 450, 64),
    "b200_sxm": (178.35, 7700, 2250, 4500, 900, 64),
    "a100_sxm": (79.25, 2039, 312, None, 300, 32),
    "a100_pcie": (79.25, 1935, 312, None, 32, 32),
    "a100_sxm_40gb": (39.49, 1555, 312, None, 300, 32),
    "l40s": (44.40, 864, 362.05, 733, 32, 32),
    "l4": (22.03, 300, 121, 242.5, 32, 32),
    "rtx_pro_6000_workstation": (94.97, 1792, 503.8, 1007.6, 64, 64),
    "rtx_pro_6000_server": (94.97, 1597, 503.8, 1007.6, 64, 64),
    "rtx_4090": (23.516, 1008, 165.2, 330.3, 32, 32),
    "rtx_3090": (23.58, 936.2, 71, None, 32, 32),
}


@pytest.mark.parametrize(("name", "sheet"), DATASHEETS.items())
def test_datasheets(name: str, sheet: tuple[float | None, ...]) -> None:
    gpu = GPUS[name]
    rates = (
        gpu.memory_bandwidth_bytes_per_s / 1e9,
        gpu.bf16_flops_per_s / 1e12,
        gpu.fp8_flops_per_s and gpu.fp8_flops_per_s / 1e12,
        gpu.interconnect_bytes_per_s / 1e9,
        gpu.host_bytes_per_s / 1e9,
    )
    assert (gpu.name, gpu.source.split()[0]) == (name, "NVIDIA")
    assert gpu.memory_gib == pytest.approx(sheet[0], abs=1e-8)
    assert rates == pytest.approx(sheet[1:])


def test_every_judged_gpu_has_its_literals() -> None:
    judged = {name for name, gpu in GPUS.items() if gpu.is_judged}
    assert judged == set(DATASHEETS) - {"l4"}


def test_gpus_that_were_not_judged_are_told_apart_and_plausible() -> None:
    for gpu in GPUS.values():
        # FP8 doubles the rate of bf16, FP4 that of FP8 or more
        if gpu.fp8_flops_per_s:
            assert gpu.fp8_flops_per_s / gpu.bf16_flops_per_s == pytest.approx(2, 0.02)
        if gpu.fp4_flops_per_s and gpu.fp8_flops_per_s:
            assert 1.9 < gpu.fp4_flops_per_s / gpu.fp8_flops_per_s < 4.1
    cost = RooflineCost(model=load_model("Llama-3-8B"), gpu=load_gpu("A40"))
    assert "nothing measured" in cost.describe()["gpu_not_judged"]
    judged = RooflineCost(model=load_model("Llama-3-8B"), gpu=load_gpu("h100"))
    assert "gpu_not_judged" not in judged.describe()


def test_form_factors_share_a_family() -> None:
    assert load_gpu("a100_pcie").family == load_gpu("a100_sxm_40gb").family == "a100"
    assert load_gpu("h800").family == load_gpu("gh200").family == "h100"
    assert load_gpu("h200_nvl").family == "h200"
    pro = {GPUS[f"rtx_pro_6000_{name}"].family for name in ("server", "workstation")}
    assert pro == {"rtx_pro_6000"}
    assert [name for name, gpu in GPUS.items() if gpu.consumer] == [
        "rtx_4090",
        "rtx_3090",
        "rtx_4090_d",
        "rtx_4080",
        "rtx_4080_super",
        "rtx_5090",
        "rtx_5080",
        "rtx_5070_ti",
        "rtx_5060_ti",
    ]


def test_spellings() -> None:
    assert load_gpu("H100-SXM") is GPUS["h100_sxm"]
    assert load_gpu("rtx 4090") is GPUS["rtx_4090"]
    assert load_gpu("a100") is GPUS["a100_sxm"]
    assert load_gpu("rtx_pro_6000") is GPUS["rtx_pro_6000_workstation"]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("RTX4090", "rtx_4090"),
        ("NVIDIA GeForce RTX 5090", "rtx_5090"),
        ("RTX A6000", "rtx_a6000"),
        ("A40", "a40"),
        ("H20", "h20"),
        ("NVIDIA H20-3e", "h20_3e"),
        ("NVIDIA GeForce RTX 4090 D", "rtx_4090_d"),
        ("NVIDIA RTX 4000 Ada Generation", "rtx_4000_ada"),
        ("V100", "v100_sxm"),
        ("Tesla V100-SXM2-32GB", "v100_sxm_32gb"),
        ("Tesla V100S-PCIE-32GB", "v100s_pcie"),
        ("H100 NVL", "h100_nvl"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("A100-SXM4-80GB", "a100_sxm"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("RTX PRO 6000", "rtx_pro_6000_workstation"),
        ("RTXPRO6000", "rtx_pro_6000_workstation"),
        ("H100-80GB-SXM", "h100_sxm"),
        ("NVIDIA H800", "h800_sxm"),
        ("NVIDIA A800-SXM4-80GB", "a800_sxm"),
        ("NVIDIA A100-PCIE-40GB", "a100_pcie_40gb"),
        ("NVIDIA B300 SXM6 AC", "b300_sxm"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA GB10", "gb10"),
        ("DGX Spark", "gb10"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GeForce RTX 4080", "rtx_4080"),
        ("NVIDIA GeForce RTX 4080 SUPER", "rtx_4080_super"),
        ("NVIDIA RTX A5000", "rtx_a5000"),
        ("RTX 5060 Ti", "rtx_5060_ti"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA H200 NVL", "h200_nvl"),
        ("NVIDIA L20", "l20"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000_server"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "rtx_pro_6000_workstation",
        ),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
    ],
)
def test_names_as_they_are_typed(typed: str, name: str) -> None:
    assert load_gpu(typed) is GPUS[name]


@pytest.mark.parametrize(
    ("printed", "gib", "name"),
    [
        ("NVIDIA A10", 22.0, "a10"),
        ("NVIDIA A10G", 22.3, "a10g"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100_sxm"),
        ("NVIDIA A100-PCIE-40GB", 39.5, "a100_pcie_40gb"),
        ("NVIDIA GH200 480GB", 94.5, "gh200"),
        ("NVIDIA H200", 139.8, "h200_sxm"),
        ("NVIDIA H200 NVL", 139.8, "h200_nvl"),
        ("NVIDIA H100 NVL", 93.1, "h100_nvl"),
        ("NVIDIA H100 80GB HBM3", 79.1, "h100_sxm"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA H20", 95.0, "h20"),
    ],
)
def test_what_drivers_print(printed: str, gib: float, name: str | None) -> None:
    sheet = datasheet_of(printed, round(gib * 2**30))
    assert (sheet and sheet.name) == name


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h100_sxm"):
        load_gpu("h100_sxn")
    with pytest.raises(ConfigError, match=r"unknown gpu: '\?\?'; \('kvsim gpus' lists"):
        load_gpu("??")


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_gpu_by_path(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    path.write_text(json.dumps(FIELDS), encoding="utf-8")
    gpu = load_gpu(str(path))
    assert (gpu.name, gpu.memory_bytes) == ("mine", 50_000_000_000)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_rates_with_an_exponent(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    lines = json.dumps(FIELDS).replace("200000000000000.0", "3e14")
    assert "3e14" in lines
    path.write_text(lines, encoding="utf-8")
    assert load_gpu(path).bf16_flops_per_s == 3e14


@pytest.mark.parametrize("suffix", ["yaml", "json"])
@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[" * 100_000, b"a: 2001-99-99", b'{"a": 1' + b"0" * 5000]
)
def test_files_that_are_no_text(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"mine.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"must hold|is missing") as caught:
        load_gpu(path)
    assert "\n" not in str(caught.value)


def test_names_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    for name in (str(tmp_path / "folder.yaml"), "x" * 100_000 + ".json"):
        with pytest.raises(ConfigError, match="no readable GPU file") as caught:
            load_gpu(name)
        assert len(str(caught.value)) < 400
    for name in ("", "y" * 100_000, str(tmp_path)):
        with pytest.raises(ConfigError, match="unknown gpu") as caught:
            load_gpu(name)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_bytes_per_s": ...}, "host_bytes_per_s is missing in"),
        ({"memory": 3}, "memory is no field of a GPU"),
        ({"memory_bytes": -1}, "memory_bytes must be a positive number"),
        ({"memory_bytes": float("nan")}, "memory_bytes must be a positive number"),
        ({"bf16_flops_per_s": "fast"}, "bf16_flops_per_s must be a positive number"),
        ({"memory_bytes": True}, "memory_bytes must be a positive number"),
        ({"memory_bytes": 80}, "number of bytes from 1e\\+06 to 1e\\+15 in .*; got 80"),
        ({"memory_bytes": 1e300}, "memory_bytes must be a positive number"),
        ({"memory_bytes": 10**400}, "memory_bytes must be a positive number"),
        ({"host_bytes_per_s": 1e-300}, "host_bytes_per_s must be a positive number"),
        ({"bf16_flops_per_s": 1e300}, "number of flops/s from 1e\\+06 to 1e\\+20"),
        ({"bf16_flops_per_s": [1]}, "bf16_flops_per_s must be a positive number"),
        ({"name": 3}, "name must be a string in .*; got 3"),
        ({"family": None}, "family must be a string in .*; got None"),
        ({"source": ["x"]}, "source must be a string"),
        ({"consumer": "no"}, "consumer must be true or false in .*; got 'no'"),
        ({"is_desktop_card": 1}, "is_desktop_card must be true or false in .*; got 1"),
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
    [
        ("a: [", "must hold YAML or JSON"),
        ("- 1", "must hold a mapping"),
        (json.dumps(FIELDS)[:-1] + ", 3: 4}", "the key 3 is no text"),
    ],
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
