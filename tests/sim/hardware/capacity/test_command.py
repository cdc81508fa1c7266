"""`kvsim capacity` and `kvsim workload fetch` as a user meets them."""

from __future__ import annotations

import json

import pytest

from sim.cli.main import run as kvsim

H100 = ["capacity", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100_sxm"]
PUBLISHED = [*H100, "--engine-version", "0.19", "--gpu-memory-utilization", "0.95"]


def test_it_explains_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvsim(PUBLISHED) == 0
    lines = capsys.readouterr().out
    for part in (
        "requested             75.23 GiB",
        "- weights             14.99 GiB",
        "- activation peak      1.89 GiB",
        "- non-torch            0.25 GiB",
        "= KV cache            58.11 GiB",
        "block: 2 MiB",
        "num_gpu_blocks: 29,751 (interval",
        "476,016 tokens, 3.63 requests of 131,072",
        "max_num_seqs=1024, max_num_batched_tokens=8192",
    ):
        assert part in lines


def test_a_release_without_its_patch_tells_which_one_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """0.11.0 samples by FlashInfer and later patches sort: 44 % of a small pool."""
    said = "0.11 is its last patch"
    blocks = {}
    for release in ("0.11", "0.11.0", "0.11.1", "0.12"):
        small = [*H100[:2], "Qwen/Qwen3-32B", *H100[3:], "--engine-version", release]
        assert kvsim(small) == 0
        told = capsys.readouterr().out
        assert (said in told) == (release == "0.11")
        blocks[release] = int(
            told.split("num_gpu_blocks: ")[1].split()[0].replace(",", "")
        )
    assert blocks["0.11"] == blocks["0.11.1"] < 0.6 * blocks["0.11.0"]


def test_json_and_quiet_give_the_same_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kvsim([*PUBLISHED, "--json"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    assert estimate["num_gpu_blocks"] == 29_751
    assert estimate["available_kv_bytes"] // estimate["block_bytes"] == 29_751
    assert kvsim([*PUBLISHED, "--quiet"]) == 0
    assert capsys.readouterr().out == "29751\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-size", "0"], "block_size"),
        (["--gpu-memory-utilization", "nan"], "gpu_memory_utilization"),
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
        (["--tensor-parallel-size", "3"], "tensor_parallel_size"),
        (["--max-model-len", "1000000"], "max_model_len must fit the KV cache"),
        (["--engine-version", "latest"], "engine_version"),
        (["--kv-cache-dtype", "fp3"], "kv_cache_dtype"),
        (["--model", "meta-llama/Llama-3.1-70B"], "tensor_parallel_size"),
        (["--model", "meta-llama/Llama-9"], "Llama"),
        (["--gpu", "h300"], "h100_sxm"),
        (["--bogus"], "--bogus"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = H100
    for flag in ("--model", "--gpu"):
        if flag in arguments:
            at = base.index(flag)
            base = base[:at] + base[at + 2 :]
    assert kvsim([*base, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert message in captured.err


def test_fetching_an_unknown_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvsim(["workload", "fetch", "burstgpt", "--quiet"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "azure_llm_2023_conv" in err


def test_groups_pages_and_blocks_are_explained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["--model", "Qwen/Qwen3-Next-80B-A3B-Instruct"]
    pool = ["--tensor-parallel-size", "4", "--kv-cache-memory-bytes", "13369344000"]
    pool += ["--gdn-prefill-backend", "triton"]
    base = ["capacity", *model, "--gpu", "h100_sxm", *pool]
    assert kvsim(base) == 0
    said = capsys.readouterr().out
    for part in (
        "block: 3.1875 MiB (12 layers, KV in bfloat16), whichever group it belongs to",
        "4 groups in one pool; a request of 262,144 tokens holds at most 970 blocks:",
        "  3 x 12 layers, a state (kept: align): 272 tokens a block, 2 blocks",
        "272 KiB, 3 x 2048 + 8 x 128 x 128 in bfloat16 and bfloat16, 4 KiB unused",
        "  12 layers, full attention: 272 tokens a block, 964 blocks a request",
    ):
        assert part in said
    assert kvsim([*base, "--json", "--no-enable-prefix-caching"]) == 0
    groups = json.loads(capsys.readouterr().out)["kv_cache_groups"]
    assert [group["blocks_per_request"] for group in groups] == [1, 964]
    assert kvsim([*base, "--mamba-ssm-cache-dtype", "int8"]) == 2
    assert "mamba_ssm_cache_dtype must be one of auto, float32" in (
        capsys.readouterr().err
    )
    assert kvsim([*base, "--prefix-match-unit", "16"]) == 0
    assert "prefix hits are multiples of 16 tokens" in capsys.readouterr().out
    assert kvsim([*base, "--prefix-match-unit", "7"]) == 2
    assert "must divide the block sizes of all groups" in capsys.readouterr().err


def test_windows_that_keep_their_blocks_are_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = ["capacity", "--model", "openai/gpt-oss-20b", "--gpu", "h200_sxm"]
    assert kvsim([*base, "--disable-hybrid-kv-cache-manager"]) == 0
    said = capsys.readouterr().out
    assert "sliding window of 128, whose blocks are kept" in said
    assert "1 group in one pool" in said


def test_the_indexers_cache_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "deepseek-ai/DeepSeek-V3.2", "--tensor-parallel-size", "8"]
    assert kvsim(["capacity", *model, "--gpu", "h200_sxm"]) == 0
    said = capsys.readouterr().out
    assert "page of 61 layers: 2.0625 KiB, 1 head x 132 in uint8" in said


def test_arguments_are_taken_as_vllm_serve_has_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model by its place, short names of sizes of groups, 32K and 10G."""
    long = "--tensor-parallel-size 2 --max-model-len 32768 --kv-cache-memory-bytes"
    typed = "-tp 2 --max-model-len 32K --kv-cache-memory-bytes"
    printed = []
    for line in (
        f"capacity --model Qwen/Qwen3-32B {long} 10737418240",
        f"capacity Qwen/Qwen3-32B {typed} 10G",
    ):
        assert kvsim([*line.split(), "--gpu", "NVIDIA H100 80GB HBM3"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "KV cache: 81,920 tokens, 2.50 requests of 32,768" in printed[0]
    for length, tokens in (("32k", 32_000), ("25.6k", 25_600), ("4096", 4096)):
        assert kvsim([*H100, "--max-model-len", length]) == 0
        assert f" requests of {tokens:,}\n" in capsys.readouterr().out
    for length in ("3.2K", "k", "32kb", ""):
        assert kvsim([*H100, "--max-model-len", length]) == 2
        assert "a whole number, or one such as 32k, got" in capsys.readouterr().err
