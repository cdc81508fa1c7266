"""The five import names are ours, and what users install is complete."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

import kvsim
import sim
from tests.shared import ROOT

PACKAGES = ("cache", "sim", "workloads", "calibrate", "kvsim")


@pytest.mark.parametrize("name", PACKAGES)
def test_names_resolve_here(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().is_relative_to(ROOT)
    owners = packages_distributions().get(name, ["kvsim"])
    assert set(owners) == {"kvsim"}


def test_kvsim_hands_on_what_sim_offers_and_imports_nothing_else() -> None:
    assert kvsim.__all__ == sim.__all__
    assert set(kvsim.__all__) <= set(dir(kvsim))
    for name in kvsim.__all__:
        assert getattr(kvsim, name) is getattr(sim, name)
    with pytest.raises(AttributeError, match="'kvsim' has no attribute 'simulat'"):
        kvsim.simulat  # noqa: B018
    code = (
        "import sys, kvsim; print(any(m in sys.modules for m in ('numpy', 'pandas')))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == b"False"


def test_type_checkers_see_the_names_of_kvsim() -> None:
    """They read the imports that are for them only."""
    tree = ast.parse((ROOT / "kvsim/__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    (names,) = (node.names for node in imports if node.module == "sim")
    assert [name.name for name in names] == kvsim.__all__


def test_python_m_kvsim_is_the_command() -> None:
    for module in ("kvsim", "sim"):
        command = [sys.executable, "-m", module, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == version("kvsim")


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
