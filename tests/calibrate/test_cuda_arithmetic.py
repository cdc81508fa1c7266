"""Arithmetic of the CUDA kernels, emulated on the CPU: grids, barriers and shuffles.

The source is the one that nvcc compiles; only launches and shared memory, for which C++
has no words, are rewritten before g++ reads it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.calibrate.missing import torch_only

torch_only()

# ruff: noqa: E402
import torch

from calibrate.gpu.attention import Engines, attention_call
from calibrate.kernels import reference
from calibrate.kernels.cuda_compile import SOURCE
from calibrate.kernels.cuda_library import (
    CudaError,
    CudaLibrary,
    copy_batch,
    swap_plan,
)
from tests.calibrate.paged import Shape, random_batch, tolerance

HEADERS = Path(__file__).with_name("cuda_emulator")
LAUNCH = re.compile(r"(\w+(?:<[\w, ]+>)?)\s*<<<(.+?)>>>\((.*?)\);", re.DOTALL)


def as_cpp(source: str) -> str:
    """Return the CUDA source in plain C++."""

    def launch(found: re.Match[str]) -> str:
        kernel, shape, arguments = found.groups()
        grid, threads, size, _ = split(shape)
        call = f"{kernel}({arguments});"
        return f"emulator::launch({grid}, {threads}, {size}, [=] {{ {call} }});"

    source, count = LAUNCH.subn(launch, source)
    assert count == 4
    dynamic = "extern __shared__ float scores[];"
    assert dynamic in source
    source = source.replace(dynamic, "float* scores = emulator::dynamic.data();")
    # blocks run one after the other: their shared memory may be static
    return source.replace("__shared__", "static")


def split(shape: str) -> list[str]:
    """Split the four parts of a launch at commas outside of brackets."""
    parts, depth = [""], 0
    for letter in shape:
        depth += (letter in "(<") - (letter in ")>")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not on the PATH")
    folder = tmp_path_factory.mktemp("emulated")
    source, built = folder / "kvsim_cuda.cpp", folder / "kvsim_cuda.so"
    source.write_text(as_cpp(SOURCE.read_text()))
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HEADERS}"]
    command = [compiler, *options, "-o", str(built), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "_Float16" in done.stderr:
        pytest.skip("this g++ has no 16-bit floating point")
    assert done.returncode == 0, done.stderr[-3000:]
    return CudaLibrary(built)


@pytest.fixture(autouse=True)
def one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        cuda_stream = 1

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())


@pytest.mark.parametrize("variant", ["paged_v1", "paged_v2"])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 2, 64, 16, torch.bfloat16),
        Shape(4, 1, 128, 8, torch.float16),
        Shape(7, 1, 128, 32, torch.bfloat16),
        Shape(2, 1, 256, 16, torch.float16),
    ],
)
def test_attention(library: CudaLibrary, variant: str, shape: Shape) -> None:
    lens = (0, 1, 7, 512, 33, 530)
    batch = random_batch(shape, [1] * len(lens), lens)
    engines = Engines(torch.device("cpu"), 4, library)
    call, out = attention_call(variant, batch, engines)
    call()
    expected = reference.paged_attention(batch)
    assert reference.worst_row_error(out, expected) < tolerance(shape.dtype)


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 16])
def test_blocks_are_copied_in_every_layer(
    library: CudaLibrary, word_bytes: int
) -> None:
    rng = torch.Generator().manual_seed(1)
    pool = torch.randint(0, 256, (3, 2, 6, 96), generator=rng, dtype=torch.uint8)
    expected = pool.clone()
    pairs = torch.tensor([[4, 0], [5, 2], [4, 3]])
    expected[:, :, pairs[:, 1]] = pool[:, :, pairs[:, 0]]
    keys, values = (
        torch.tensor([pool[layer, half].data_ptr() for layer in range(3)])
        for half in range(2)
    )
    caches = (keys.data_ptr(), values.data_ptr(), 3)
    library.copy_blocks(caches, (pairs.data_ptr(), 3), 96, word_bytes, 1)
    assert torch.equal(pool, expected)


def test_pages_are_swapped_one_by_one_and_in_a_batch(library: CudaLibrary) -> None:
    rng = torch.Generator().manual_seed(2)
    source = torch.randint(0, 256, (4, 7, 32), generator=rng, dtype=torch.uint8)
    pairs = [(6, 0), (1, 4), (2, 2)]
    targets = [torch.zeros(4, 5, 32, dtype=torch.uint8) for _ in range(2)]
    expected = targets[0].clone()
    for first, second in pairs:
        expected[:, second] = source[:, first]
    one_by_one, batched = (
        [(source[i].data_ptr(), target[i].data_ptr()) for i in range(4)]
        for target in targets
    )
    library.swap_blocks_loop(swap_plan(one_by_one, pairs, 32, True), 1)
    batch = copy_batch(batched, pairs, 32)
    assert batch.num_descriptors == 12
    library.copy_batch(batch, 1)
    assert torch.equal(targets[0], expected)
    assert torch.equal(targets[1], expected)
    with pytest.raises(CudaError, match="cudaMemcpyBatchAsync failed"):
        library.copy_batch(batch, 0)  # the legacy default stream


def test_scores_that_exceed_shared_memory_are_refused(library: CudaLibrary) -> None:
    from calibrate.harness.device import UnsupportedPointError  # noqa: PLC0415

    batch = random_batch(Shape(1, 1, 64, 16, torch.float16), [1], [60_000])
    engines = Engines(torch.device("cpu"), 4, library)
    with pytest.raises(UnsupportedPointError, match="60000 keys do not fit"):
        attention_call("paged_v1", batch, engines)
