"""The CUDA kernels without nvcc: compiled by NVRTC, launched by a driver."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest

from calibrate.kernels import cuda_compile
from calibrate.kernels import cuda_kernels as choice
from calibrate.kernels.cuda_compile import Cubin, CudaBuildError, Nvrtc
from calibrate.kernels.cuda_kernels import (
    CopyAttributes,
    CudaDriver,
    NvrtcKernels,
    compile_kernels,
    kernel_names,
)
from calibrate.kernels.cuda_library import (
    CudaError,
    PagedArgs,
    copy_batch,
    swap_plan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from calibrate.kernels.cuda_library import CopyBatch


class PaperDriver:
    """Copies on the host at once, and notes launches."""

    has_batch_copy = True

    def __init__(self) -> None:
        self.names: list[bytes] = []
        self.shared: list[int] = []
        self.launches: list[tuple[bytes, tuple[Sequence[int], int, int]]] = []
        self.values: list[tuple[object, ...]] = []

    def load(self, image: bytes, name: bytes) -> int:
        assert image == b"image"
        self.names.append(name)
        return len(self.names)

    def allow_shared(self, function: int, num_bytes: int) -> None:
        self.shared.append(num_bytes)

    def launch(
        self,
        function: int,
        shape: tuple[Sequence[int], int, int],
        arguments: Sequence[object],
        stream: int,
    ) -> None:
        assert stream == 7
        self.launches.append((self.names[function - 1], shape))
        self.values.append(tuple(getattr(a, "value", None) for a in arguments))

    def copy(self, target: int, source: int, num_bytes: int, place: int) -> None:
        assert place == 7
        ctypes.memmove(target, source, num_bytes)

    def copy_batch(self, batch: CopyBatch, stream: int) -> None:
        copies = zip(batch.targets, batch.sources, batch.sizes, strict=True)
        for target, source, size in copies:
            self.copy(target, source, size, stream)


def kernels() -> tuple[NvrtcKernels, PaperDriver]:
    driver = PaperDriver()
    cubin = Cubin(b"image", {name: name.encode() for name in kernel_names()})
    return NvrtcKernels(cubin, driver, "NVRTC on paper"), driver


def test_attention_is_launched_over_heads_sequences_and_partitions() -> None:
    found, driver = kernels()
    shape = {"num_seqs": 3, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    args = PagedArgs(**shape, max_context_len=1300, dtype=1)
    found.paged_attention(args, 1, 7)
    found.paged_attention(args, 2, 7)
    paged = b"kvsim::paged_attention_kernel<__nv_bfloat16, 128, %s>"
    assert driver.launches == [
        (paged % b"false", ((8, 3, 1), 128, 5200)),
        (paged % b"true", ((8, 3, 3), 128, 2048)),
        (
            b"kvsim::reduce_partitions_kernel<__nv_bfloat16, 128>",
            ((8, 3, 1), 128, 0),
        ),
    ]
    assert driver.shared == [5200]
    assert driver.values[-1] == (None, 3)  # the structure, the partitions
    found.paged_attention(PagedArgs(num_seqs=0), 1, 7)
    assert len(driver.launches) == 3
    with pytest.raises(CudaError, match="heads of"):
        found.paged_attention(PagedArgs(num_seqs=1, head_dim=80), 2, 7)
    with pytest.raises(CudaError, match="versions 1 and 2"):
        found.paged_attention(args, 3, 7)


def test_blocks_are_copied_over_layers_and_pairs() -> None:
    found, driver = kernels()
    found.copy_blocks((10, 20, 4), (30, 5), 4096, 2, 7)
    found.copy_blocks((10, 20, 4), (30, 5), 4096, 16, 7)
    assert driver.launches == [
        (b"kvsim::copy_blocks_kernel<uint16_t>", ((4, 5, 1), 1024, 0)),
        (b"kvsim::copy_blocks_kernel<uint4>", ((4, 5, 1), 256, 0)),
    ]
    assert driver.values == [(10, 20, 30, 2048), (10, 20, 30, 256)]
    found.copy_blocks((10, 20, 0), (30, 5), 4096, 2, 7)
    assert len(driver.launches) == 2
    with pytest.raises(CudaError, match="got 3 in 4096"):
        found.copy_blocks((10, 20, 4), (30, 5), 4096, 3, 7)


def test_pages_are_swapped_one_by_one_and_in_a_batch() -> None:
    found, _ = kernels()
    source = ctypes.create_string_buffer(bytes(range(32)), 32)
    pairs = [(3, 0), (1, 2)]
    for swap in ("loop", "batch"):
        target = ctypes.create_string_buffer(32)
        planes = [(ctypes.addressof(source), ctypes.addressof(target))]
        if swap == "loop":
            found.swap_blocks_loop(swap_plan(planes, pairs, 8, True), 7)
        else:
            found.copy_batch(copy_batch(planes, pairs, 8), 7)
        expected = bytes(range(24, 32)) + bytes(8) + bytes(range(8, 16)) + bytes(8)
        assert target.raw == expected


def compiler() -> Nvrtc:
    path = cuda_compile.find_nvrtc()
    if path is None:
        pytest.skip("there is no libnvrtc: it comes with CUDA builds of torch")
    return Nvrtc(path)


@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(capability: int) -> None:
    cubin = compile_kernels(compiler(), capability)
    assert cubin.image[:4] == b"\x7fELF"
    assert all(cubin.names[name] in cubin.image for name in kernel_names())


def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(CudaBuildError, match=r"could not compile.*sm_90: .*error"):
        compiler().compile("int x = y;", 90, [])


def test_the_driver_is_missing() -> None:
    try:
        driver = CudaDriver()
    except OSError:
        return  # what `cuda_kernels` says it raises
    assert isinstance(driver.has_batch_copy, bool)


def test_attributes_are_laid_out_as_the_driver_reads_them() -> None:
    """Of cuda.h: an enumeration, two places of two integers, flags."""
    assert ctypes.sizeof(CopyAttributes) == 24
    assert CopyAttributes.flags.offset == 20


def test_the_library_lies_in_the_packages_or_in_the_toolkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, home = tmp_path / "site-packages", tmp_path / "cuda"
    folders = packages / "nvidia/cu13/lib", home / "lib64"
    for folder, release in zip(folders, ("13", "12"), strict=True):
        folder.mkdir(parents=True)
        (folder / f"libnvrtc.so.{release}").touch()
        (folder / f"libnvrtc-builtins.so.{release}").touch()
        (folder / f"libnvrtc.alt.so.{release}").touch()
    monkeypatch.setattr(cuda_compile.sys, "path", [str(packages)])
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert cuda_compile.find_nvrtc() == str(folders[0] / "libnvrtc.so.13")
    monkeypatch.setattr(cuda_compile.sys, "path", [])
    assert cuda_compile.find_nvrtc() == str(folders[1] / "libnvrtc.so.12")
    with pytest.raises(CudaBuildError, match="NVRTC cannot be loaded"):
        Nvrtc(str(folders[1] / "libnvrtc.so.12"))


def test_nvrtc_stands_in_for_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(capability: int) -> Path:
        raise CudaBuildError(f"no nvcc for {capability}")

    found, _ = kernels()
    monkeypatch.setattr(choice, "build_library", fails)
    monkeypatch.setattr(choice, "find_nvrtc", lambda: "here")
    monkeypatch.setattr(choice, "by_nvrtc", lambda path, capability: found)
    assert choice.cuda_kernels(90) is found

    def fails_too(path: str, capability: int) -> NvrtcKernels:
        raise CudaBuildError("NVRTC neither")

    monkeypatch.setattr(choice, "by_nvrtc", fails_too)
    with pytest.raises(CudaBuildError, match="no nvcc for 90; NVRTC neither"):
        choice.cuda_kernels(90)
    monkeypatch.setattr(choice, "find_nvrtc", lambda: None)
    with pytest.raises(CudaBuildError, match=r"no nvcc for 90$"):
        choice.cuda_kernels(90)
