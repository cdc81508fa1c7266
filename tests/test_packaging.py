"""The five import names are ours, and what users install is complete."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvsim
import sim
from tests.shared import ROOT
from tests.test_moved import EXTENSION_POINTS, MOVED

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
    command = [sys.executable, "-m", "kvsim", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == version("kvsim")


def test_constraints_name_no_host_and_pin_what_is_required() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert lines
    pins = [line for line in lines if not line.startswith("    --hash=sha256:")]
    assert all("==" in line and "/" not in line for line in pins)
    assert [line for line in pins if not line.endswith("\\")] == ["torch==2.13.0"]
    pinned = {line.split("==")[0].lower() for line in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        assert requirement.split(">=")[0].lower() in pinned


def test_what_is_installed_is_listed_with_its_licence() -> None:
    page = (ROOT / "docs/security.md").read_text()
    pins = re.findall(r"^(\S+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    versions = {canonicalize_name(name): version for name, version in pins}
    listed = {
        canonicalize_name(name): (version, licence)
        for name, version, licence in re.findall(
            r"^\| (\S+) \| (\d\S*) \| (.+) \|$", page, re.M
        )
    }
    needed = {
        canonicalize_name(each) for each in _needed("kvsim", frozenset({"traces"}))
    }
    assert listed.keys() == needed
    assert {name: version for name, (version, _) in listed.items()} == {
        name: versions[name] for name in needed
    }


def _needed(package: str, extras: frozenset[str]) -> set[str]:
    """Return what a package requires here, and what that requires."""
    found: set[str] = set()
    for line in requires(package) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in (*extras, "")):
            found |= {requirement.name, *_needed(requirement.name, frozenset())}
    return found


UV = shutil.which("uv", path=str(Path(sys.executable).parent))


def uv(*arguments: object) -> None:
    assert UV is not None
    subprocess.run([UV, *map(str, arguments), "--quiet"], check=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree."""
    if UV is None:
        pytest.skip("uv builds the wheel; make test installs it")
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--wheel", "--out-dir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


@pytest.mark.slow
def test_a_wheel_holds_models_and_presets(wheel: Path) -> None:
    names = contents(wheel)
    preset = "workloads/presets/azure_conv_2023.json"
    assert json.loads(zipfile.ZipFile(wheel).read(preset))["num_requests"] == 19_366
    assert sum(name.startswith("sim/hardware/models/configs/") for name in names) >= 11
    assert "calibrate/kernels/kvsim_cuda.cu" in names
    assert "sim/views/report/assets/figures.js" in names
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert not any(name.startswith(("tests/", "docs/")) for name in names)


@pytest.mark.slow
def test_a_source_distribution_gives_the_same_wheel(
    wheel: Path, tmp_path: Path
) -> None:
    uv("build", "--sdist", "--out-dir", tmp_path, ROOT)
    (source,) = tmp_path.glob("*.tar.gz")
    uv("build", "--wheel", "--out-dir", tmp_path, source)
    (again,) = tmp_path.glob("*.whl")
    assert contents(again) == contents(wheel)
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "LICENSE", "Makefile", "constraints.txt", "docs/conf.py"}
    assert wanted | {"examples/demo.yaml", "tests/test_packaging.py"} <= names


@pytest.mark.slow
def test_a_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Outside the clone, so that none of its folders is imported instead."""
    environment = tmp_path / "environment"
    uv("venv", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    uv("pip", "install", "--python", python, "--constraint", constraints, wheel)
    shutil.copy(ROOT / "examples/demo.yaml", tmp_path)
    minute = ["--set", "workload.preset.duration_s=60", "--out", "results"]
    model = ["--model", "meta-llama/Llama-3.1-8B", "--gpu", "h200_sxm"]
    points = {**EXTENSION_POINTS, **{old: names for old, (_, names) in MOVED.items()}}
    imports = [f"from {at} import {', '.join(points[at])}" for at in points]
    for command, printed in (
        (["-m", "kvsim", "run", "demo.yaml", *minute], "366 of 366 completed"),
        (["-m", "kvsim", "capacity", *model], "num_gpu_blocks"),
        (["-c", "\n".join([*imports, "print('imported')"])], "imported"),
        (
            [
                "-c",
                "from kvsim import Results as R; print(len(R.load('results').steps))",
            ],
            "",
        ),
    ):
        assert printed in said(tmp_path, python, *command)
    kvsim_command = environment / "bin" / "kvsim"
    assert {"capacity", "calibrate", "profile", "run"} <= set(
        re.findall(r"\w+", said(tmp_path, kvsim_command, "--help"))
    )
    said(tmp_path, kvsim_command, "report", "results", "--out", "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert len(list((tmp_path / "results/figures").glob("*.png"))) == 6


def said(folder: Path, *command: object) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
