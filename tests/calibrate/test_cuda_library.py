"""The CUDA kernels compile and load here; what a call without a driver answers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from calibrate.kernels import cuda_compile
from calibrate.kernels.cuda_library import (
    CudaError,
    CudaLibrary,
    PagedArgs,
    copy_batch,
    swap_plan,
)
from tests.calibrate.missing import nvcc

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow  # it compiles all kernels, for 10 s


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CudaLibrary:
    nvcc()
    folder = tmp_path_factory.mktemp("cuda")
    built = cuda_compile.build_library(90, folder)
    assert cuda_compile.build_library(90, folder) == built
    assert [path.name for path in folder.iterdir()] == [built.name]
    return CudaLibrary(built)


def test_it_loads_without_a_driver(library: CudaLibrary) -> None:
    assert library.runtime_version >= 11_000
    assert library.has_batch_copy == (library.runtime_version >= 12_080)


def no_driver(library: CudaLibrary) -> None:
    try:
        library.device_count()
    except CudaError:
        return
    pytest.skip("this machine has a CUDA driver")


def test_calls_without_a_driver_say_so(library: CudaLibrary) -> None:
    no_driver(library)
    memory = ctypes.create_string_buffer(64)
    plane = (ctypes.addressof(memory), ctypes.addressof(memory))
    plan = swap_plan([plane], [(0, 1)], 16, True)
    remedy = "run on a machine with an NVIDIA GPU"
    with pytest.raises(CudaError, match=f"swap_blocks failed: .*{remedy}") as caught:
        library.swap_blocks_loop(plan, 0)
    assert caught.value.code in {35, 100}
    with pytest.raises(CudaError, match="cudaGetDeviceCount failed"):
        library.device_count()
    with pytest.raises(CudaError, match=r"copy_blocks failed: .*\(cudaError"):
        library.copy_blocks((0, 0, 1), (0, 1), 16, 2, 0)
    args = PagedArgs(num_seqs=1, num_heads=1, num_kv_heads=1, head_dim=64)
    with pytest.raises(CudaError, match="paged_attention_v2 failed"):
        library.paged_attention(args, 2, 0)
    if library.has_batch_copy:
        with pytest.raises(CudaError, match="cudaMemcpyBatchAsync failed"):
            library.copy_batch(copy_batch([plane], [(0, 1)], 16), 1)


def test_what_is_wrong_is_refused_before_the_device(library: CudaLibrary) -> None:
    with pytest.raises(CudaError, match="cudaErrorInvalidValue") as caught:
        library.copy_blocks((0, 0, 1), (0, 1), 16, 3, 0)
    assert caught.value.code == 1
    args = PagedArgs(num_seqs=1, num_heads=1, num_kv_heads=1, head_dim=80)
    with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
        library.paged_attention(args, 1, 0)
    with pytest.raises(CudaError, match="cudaErrorInvalidValue"):
        library.paged_attention(args, 3, 0)


def test_nothing_to_do_needs_no_device(library: CudaLibrary) -> None:
    library.copy_blocks((0, 0, 0), (0, 0), 16, 2, 0)
    library.paged_attention(PagedArgs(num_seqs=0), 1, 0)
    library.swap_blocks_loop(swap_plan([], [], 16, False), 0)


def test_descriptors_of_a_batch() -> None:
    batch = copy_batch([(1000, 5000), (2000, 6000)], [(0, 3), (2, 1)], 16)
    assert list(batch.sources) == [1000, 1032, 2000, 2032]
    assert list(batch.targets) == [5048, 5016, 6048, 6016]
    assert list(batch.sizes) == [16] * 4
    plan = swap_plan([(1000, 5000)], [(0, 3), (2, 1)], 16, True)
    assert list(plan.pairs) == [0, 3, 2, 1]


def test_without_nvcc_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_compile, "find_nvcc", lambda: None)
    with pytest.raises(
        cuda_compile.CudaBuildError, match=r"needs nvcc.*--backend triton"
    ):
        cuda_compile.build_library(90, tmp_path)


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path) -> None:
    nvcc()
    with pytest.raises(cuda_compile.CudaBuildError, match=r"could not compile.*sm_1"):
        cuda_compile.build_library(1, tmp_path)
    assert list(tmp_path.iterdir()) == []
