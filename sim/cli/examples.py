"""Two command lines for each command, with which its help ends."""

from __future__ import annotations

EXAMPLES = {
    "": (
        "kvsim run examples/demo.yaml",
        "kvsim size --model Qwen/Qwen3-32B --gpu h100_sxm,h200_sxm --rate 4 "
        "--input-tokens 1500 --output-tokens 300 --p95-ttft 1s",
    ),
    "run": (
        "kvsim run examples/demo.yaml --set engine.max_num_seqs=128 --out results/few",
        "kvsim run examples/demo.yaml --set objectives.p95_ttft_ms=2000",
    ),
    "explore": (
        "kvsim explore examples/demo.yaml",
        "kvsim explore examples/demo.yaml --traffic mine.csv --no-browser",
    ),
    "serve": (
        "kvsim serve examples/demo.yaml --port 8000",
        "kvsim serve examples/demo.yaml --speed 10 --out results/served",
    ),
    "sweep": (
        "kvsim sweep examples/sweep_rates.yaml",
        "kvsim sweep examples/sweep_settings.yaml --workers 4 --out results/settings",
    ),
    "plan": (
        "kvsim plan examples/plan_chat.yaml --set workload.trace.path=FILE",
        "kvsim plan examples/plan_chat.yaml --set search.num_seeds=10 --out ten",
    ),
    "size": (
        "kvsim size --model Qwen/Qwen3-32B --gpu h100_sxm,h200_sxm --rate 4 "
        "--input-tokens 1500 --output-tokens 300 --p95-ttft 1s --p95-tpot 60ms",
        "kvsim size --model openai/gpt-oss-120b --gpu h100_sxm --trace FILE "
        "--p95-ttft 2s --explain",
    ),
    "capacity": (
        "kvsim capacity --model Qwen/Qwen3-32B --gpu h200_sxm",
        "kvsim capacity --model openai/gpt-oss-120b --gpu h100_sxm "
        "--tensor-parallel-size 2 --kv-cache-dtype fp8",
    ),
    "decisions": (
        "kvsim decisions examples/decisions.workload.json --out ours.jsonl.gz",
        "kvsim decisions --diff theirs.jsonl.gz ours.jsonl.gz",
    ),
    "conform": (
        "kvsim conform --num 500",
        "kvsim conform --num 2000 --out results/conform",
    ),
    "validate": (
        "kvsim validate examples/demo.yaml --measured requests.csv",
        "kvsim validate examples/demo.yaml --measured bench.json --fit host",
    ),
    "plot": (
        "kvsim plot results/demo",
        "kvsim plot results/demo results/more --format svg",
    ),
    "advise": (
        "kvsim advise results/demo",
        "kvsim advise results/demo --set objectives.p95_ttft_ms=1000 --seeds 8",
    ),
    "report": (
        "kvsim report results/demo --out demo.html",
        "kvsim report results/demo results/more --out compared.html",
    ),
    "export": (
        "kvsim export results/demo --to chrome",
        "kvsim export results/demo --to prometheus",
    ),
    "list": (
        "kvsim list",
        "kvsim list evictors",
    ),
    "models": (
        "kvsim models",
        "kvsim models qwen3 fp8",
    ),
    "gpus": (
        "kvsim gpus",
        "kvsim gpus h100",
    ),
    "routers": (
        "kvsim routers",
        "kvsim routers prefix",
    ),
    "readers": (
        "kvsim readers",
        "kvsim readers sessions",
    ),
    "schedulers": (
        "kvsim schedulers",
        "kvsim schedulers v1 --json",
    ),
    "workload": (
        "kvsim workload describe examples/demo.yaml",
        "kvsim workload curve examples/chat_sessions.yaml --model Qwen/Qwen3-32B "
        "--gpu h200_sxm",
    ),
    "workload convert": (
        "kvsim workload convert trace.csv --to mooncake --out trace.jsonl",
        "kvsim workload convert trace.csv --from azure --to burstgpt --out same.csv",
    ),
    "workload generate": (
        "kvsim workload generate examples/demo.yaml --out trace.jsonl",
        "kvsim workload generate examples/chat_sessions.yaml --seed 1 --out chats.gz",
    ),
    "workload describe": (
        "kvsim workload describe examples/demo.yaml",
        "kvsim workload describe trace.csv --json",
    ),
    "workload curve": (
        "kvsim workload curve examples/chat_sessions.yaml --model Qwen/Qwen3-32B "
        "--gpu h200_sxm",
        "kvsim workload curve trace.jsonl --model openai/gpt-oss-120b",
    ),
    "workload fetch": (
        "kvsim workload fetch azure_llm_2023_conv --to traces",
        "kvsim workload fetch azure_llm_2023_code --to traces",
    ),
    "calibrate": (
        "kvsim calibrate --model Qwen/Qwen3-8B --out profile.json --preset quick",
        "kvsim calibrate --model Qwen/Qwen3-8B --out profile.json --dry-run",
    ),
    "profile": (
        "kvsim profile show profile.json",
        "kvsim profile plot profile.json --out figures",
    ),
    "calibrate replay": (
        "kvsim calibrate replay results/demo --profile profile.json --out replayed",
        "kvsim calibrate replay results/demo --dry-run",
    ),
    "profile show": (
        "kvsim profile show profile.json",
        "kvsim profile show --crossover --model Qwen/Qwen3-32B --gpu h200_sxm",
    ),
    "profile validate": (
        "kvsim profile validate profile.json",
        "kvsim profile validate profile.json --json",
    ),
    "profile diff": (
        "kvsim profile diff before.json after.json",
        "kvsim profile diff h100.json h200.json --json",
    ),
    "profile fit": (
        "kvsim profile fit profile.json",
        "kvsim profile fit points.json --model Qwen/Qwen3-32B --out profile.json",
    ),
    "profile plot": (
        "kvsim profile plot profile.json --out figures",
        "kvsim profile plot profile.json --op gemm --out figures",
    ),
    "profile import": (
        "kvsim profile import aiconfigurator --system h200_sxm --model Qwen/Qwen3-32B "
        "--out qwen_h200.json",
        "kvsim profile import vidur --path vidur --system a100 --model Llama-2-7b-hf "
        "--out a100.json",
    ),
    "profile import aiconfigurator": (
        "kvsim profile import aiconfigurator --system h200_sxm --model Qwen/Qwen3-32B "
        "--out qwen_h200.json",
        "kvsim profile import aiconfigurator --system a100_sxm --path tables "
        "--out a100.json",
    ),
    "profile import llmservingsim": (
        "kvsim profile import llmservingsim --path RTXPRO6000 "
        "--model meta-llama/Llama-3.1-8B --out rtx.json",
        "kvsim profile import llmservingsim --path RTXPRO6000/Qwen3-32B "
        "--no-tables --out points.json",
    ),
    "profile import vidur": (
        "kvsim profile import vidur --path vidur --system a100 --model Llama-2-7b-hf "
        "--out a100.json",
        "kvsim profile import vidur --path vidur --system h100 "
        "--model Llama-2-70b-hf --no-tables --out points.json",
    ),
}
"""By command; the empty one is that of all together."""


def epilogue(command: str) -> str:
    """Return the last part of a command's help."""
    lines = "\n".join(f"- `{line}`" for line in EXAMPLES[command])
    return f"Examples:\n\n{lines}"
