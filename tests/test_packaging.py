"""The four import names are ours, and what users install is complete."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.shared import ROOT

PACKAGES = ("cache", "sim", "workloads", "calibrate")


@pytest.mark.parametrize("name", PACKAGES)
def test_names_resolve_here(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT)
    owners = packages_distributions().get(name, ["kvsim"])
    assert set(owners) == {"kvsim"}


def test_constraints_name_no_host_and_pin_what_is_required() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines
    assert all("==" in line and "/" not in line for line in lines)
    pinned = {line.split("==")[0].lower() for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        assert requirement.split(">=")[0].lower() in pinned


@pytest.mark.slow
def test_a_wheel_holds_models_and_presets(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    preset = "workloads/presets/azure_conv_2023.json"
    assert preset in names
    assert json.loads(zipfile.ZipFile(wheel).read(preset))["num_requests"] == 19_366
    assert sum(name.startswith("sim/hardware/models/configs/") for name in names) >= 11
    assert "calibrate/kernels/kvsim_cuda.cu" in names
    assert "sim/views/report/assets/figures.js" in names
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert not any(name.startswith(("tests/", "docs/")) for name in names)
