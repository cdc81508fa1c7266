"""Compiles ``kvsim_cuda.cu`` with the nvcc at hand, once a source and toolkit."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from sim.errors import UserError

SOURCE = Path(__file__).with_name("kvsim_cuda.cu")
OPTIONS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")


class CudaBuildError(UserError):
    """The CUDA kernels could not be compiled; the message says what is missing."""


def find_nvcc() -> Path | None:
    """Return nvcc's path: of CUDA_HOME, of the PATH, or of the usual place."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if path.is_file()), None)


def nvcc_version(nvcc: Path) -> str:
    """Return the toolkit's release, such as "13.0, V13.0.88"."""
    done = subprocess.run(
        [str(nvcc), "--version"], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if "release" in line]
    return lines[0].partition("release ")[2].strip() if lines else "unknown"


def cache_folder() -> Path:
    """Return where built libraries are kept: a folder of the user's."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvsim" / "cuda"


def build_library(capability: int, folder: Path | None = None) -> Path:
    """Return the shared library for one compute capability, built if need be.

    Parameters
    ----------
    capability
        Such as 90 for sm_90.
    folder
        Where it is kept; default `cache_folder`.

    Raises
    ------
    CudaBuildError
        When there is no nvcc, or it fails.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise CudaBuildError(
            "the cuda backend needs nvcc, which is neither on the PATH nor in"
            " CUDA_HOME; install the CUDA toolkit, or take --backend triton"
        )
    key = hashlib.sha256(SOURCE.read_bytes())
    key.update(" ".join((nvcc_version(nvcc), *OPTIONS, str(capability))).encode())
    folder = folder or cache_folder()
    library = folder / f"kvsim_cuda-sm{capability}-{key.hexdigest()[:16]}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(nvcc, capability, library)
    return library


def _compile(nvcc: Path, capability: int, library: Path) -> None:
    """Compile beside the library and rename: no one loads half a file."""
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        arch = f"-arch=sm_{capability}"
        done = subprocess.run(
            [str(nvcc), *OPTIONS, arch, "-o", str(built), str(SOURCE)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = (done.stderr + done.stdout).split("\n")
            errors = [line for line in lines if "error" in line.lower()]
            raise CudaBuildError(
                f"nvcc {nvcc_version(nvcc)} could not compile the kernels for"
                f" sm_{capability}: {(errors or lines)[0].strip()[:300]}; take"
                " --backend triton"
            )
        built.replace(library)
