"""Compilers of ``kvsim_cuda.cu``: nvcc, else NVRTC, which comes with torch."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sim.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCE = Path(__file__).with_name("kvsim_cuda.cu")
OPTIONS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC")
_NAME = re.compile(r"libnvrtc\.so(\.\d+)*$")


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
    """Return the shared library for a capability such as 90, built if need be."""
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


@dataclass(frozen=True, slots=True)
class Cubin:
    """Compiled device code."""

    image: bytes
    names: dict[str, bytes]
    """The name in the image of each kernel that was asked for."""


def find_nvrtc() -> str | None:
    """Return the library: of torch's packages, of the toolkit, or of the system."""
    found = next(_candidates(), None)
    return str(found) if found else ctypes.util.find_library("nvrtc")


def _candidates() -> Iterator[Path]:
    """Yield libraries: the wheels of CUDA 13, of CUDA 12, then CUDA_HOME's."""
    folders: list[Path] = []
    for place in map(Path, sys.path):
        if place.name == "site-packages":
            folders += [place / "nvidia/cu13/lib", place / "nvidia/cuda_nvrtc/lib"]
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    folders += [Path(home) / "lib64" for home in homes if home]
    for folder in folders:
        if folder.is_dir():
            yield from sorted(p for p in folder.iterdir() if _NAME.match(p.name))


class Nvrtc:
    """The loaded compiler; needs neither a driver nor a GPU."""

    def __init__(self, path: str) -> None:
        try:
            # it looks for its headers by name, and not beside itself
            for beside in sorted(Path(path).parent.glob("libnvrtc-builtins.so*")):
                ctypes.CDLL(str(beside), mode=ctypes.RTLD_GLOBAL)
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise CudaBuildError(
                f"NVRTC cannot be loaded: {error}; install the CUDA toolkit, or take"
                " --backend triton"
            ) from error
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    @property
    def version(self) -> str:
        """Release, such as "13.0"."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: str, capability: int, names: Sequence[str]) -> Cubin:
        """Compile CUDA C++ without includes.

        `names` are kept, template arguments included.
        """
        program = ctypes.c_void_p()
        create = (source.encode(), b"kvsim_cuda.cu", 0, None, None)
        self._call("CreateProgram", ctypes.byref(program), *create)
        try:
            for name in names:
                self._call("AddNameExpression", program, name.encode())
            options = [f"--gpu-architecture=sm_{capability}".encode(), b"-std=c++17"]
            array = (ctypes.c_char_p * len(options))(*options)
            code = self._library.nvrtcCompileProgram(program, len(options), array)
            if code:
                raise CudaBuildError(
                    f"NVRTC {self.version} could not compile the kernels for"
                    f" sm_{capability}: {self._first_error(program, code)}; take"
                    " --backend triton"
                )
            lowered = {name: self._lowered(program, name) for name in names}
            return Cubin(self._text(program, "CUBIN"), lowered)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _call(self, what: str, *arguments: object) -> None:
        code = getattr(self._library, f"nvrtc{what}")(*arguments)
        if code:
            text = self._library.nvrtcGetErrorString(code).decode()
            raise CudaBuildError(f"nvrtc{what} failed: {text}; take --backend triton")

    def _lowered(self, program: ctypes.c_void_p, name: str) -> bytes:
        found = ctypes.c_char_p()
        self._call("GetLoweredName", program, name.encode(), ctypes.byref(found))
        return found.value or b""

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def _first_error(self, program: ctypes.c_void_p, code: int) -> str:
        lines = self._text(program, "ProgramLog").decode(errors="replace").split("\n")
        errors = [line for line in lines if "error" in line.lower()]
        if errors:
            return errors[0].strip()[:300]
        return str(self._library.nvrtcGetErrorString(code).decode())
