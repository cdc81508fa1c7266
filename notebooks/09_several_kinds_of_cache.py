# %% [markdown]
# # 09. What does a pool hold of a model with several kinds of cache?
#
# Layers of today's models keep different things: full attention every token, a sliding
# window the last ones, a linear layer a state, latent attention (MLA) one short vector in
# the place of all heads. Layers of one kind form *groups* with a block table each, and all
# groups draw blocks from one pool. "Tokens of the pool" then has no single answer.
#
# ## Which groups share it?
#
# We plan 128 GiB of KV cache on one rank for five models, as vLLM 0.33 does on an H200, with
# prefix caching. A block has the same bytes in whichever group; in a row "4 x" are four groups.
# `a long request` is one of 131,072 tokens: the blocks, and GiB, that it takes at most. A
# window of 1,024 takes more than that, since a step of 2,048 tokens comes on top.

# %%
import matplotlib.pyplot as plt
import pandas as pd

from cache.v1.planning import plan_kv_cache
from kvsim import load_config, simulate
from sim.hardware.capacity.groups import shares_of
from sim.hardware.models.bundled import load_model
from sim.hardware.models.kv_layers import KVCacheOptions, kv_cache_layers

GIB, LONG = 2**30, 131_072
models = {
    "Llama-3.3-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "Gemma-3-27b": "google/gemma-3-27b-it",
    "Qwen3-Next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
}
plans = {
    name: plan_kv_cache(
        kv_cache_layers(
            load_model(model), KVCacheOptions(block_size=16, prefill_checkpoint=True)
        ),
        block_size=16,
        available_bytes=128 * GIB,
        max_model_len=LONG,
        max_in_flight_tokens=2048,
    )
    for name, model in models.items()
}
rows = [
    {
        "model": name,
        "layers": f"{share['num_groups']} x {share['num_layers']} {share['kind']}",
        "tokens/block": share["block_size"],
        "MiB/block": plan.layout.bytes_per_block / 2**20,
        "blocks, a long request": share["num_groups"] * share["blocks_per_request"],
    }
    for name, plan in plans.items()
    for share in shares_of(plan)
    or [
        {
            "num_groups": 1,
            "num_layers": len(plan.layers),
            "kind": "latent attention" if name == "DeepSeek-V3" else "full attention",
            "block_size": 16,
            "blocks_per_request": plan.blocks_per_request[0],
        }
    ]
]
groups = pd.DataFrame(rows)
groups["GiB"] = groups["MiB/block"] * groups["blocks, a long request"] / 1024
groups.round(3)

# %% [markdown]
# ## How much is it?
#
# The most requests of a length at once, and the tokens that those hold together. Of a
# plain model the tokens are the same at each length. Windows and states make them grow:
# what a request keeps whatever its length is paid once, by few long requests or by many
# short ones. `one request` is the longest that the pool could hold alone, in millions of
# tokens, were the model made for it.

# %%
lengths = {"8k": 8192, "32k": 32_768, "128k": LONG}
held = pd.DataFrame(
    {
        name: {"blocks": plan.layout.num_blocks}
        | {
            f"{words} at once": plan.layout.num_blocks / sum(plan.blocks_for(num))
            for words, num in lengths.items()
        }
        for name, plan in plans.items()
    }
).T
for words, num in lengths.items():
    held[f"tokens in {words}, M"] = held[f"{words} at once"] * num / 1e6
fixed = {name: sum(p.blocks_for(LONG)) for name, p in plans.items()}
twice = {name: sum(p.blocks_for(2 * LONG)) for name, p in plans.items()}
held["one request, M"] = [
    LONG
    * (1 + (plan.layout.num_blocks - fixed[name]) / (twice[name] - fixed[name]))
    / 1e6
    for name, plan in plans.items()
]
display(held.round(2))
axes = held[[f"tokens in {words}, M" for words in lengths]].plot.barh(
    figsize=(8, 3.4), color=["#56B4E9", "#0072B2", "#D55E00"], width=0.75
)
axes.invert_yaxis()
axes.set(xlabel="millions of tokens", title="What 128 GiB of KV cache hold")
axes.legend(["requests of 8k", "of 32k", "of 128k"], frameon=False)
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## How do the curves differ under the same traffic?
#
# Three minutes of the bundled chat traffic, at four times its rate, on eight H200 with
# 16 GiB of cache each, 128 GiB in all: more than Llama and DeepSeek-V3 can serve so. Its prompts have no identity, so prefix caching is
# off, and states are one a request.
#
# Two things lower a curve. A model keeps less of each request, and a faster model keeps it
# for a shorter time: gpt-oss computes 5 billion parameters a token, Llama 70. And one
# raises it: the latent vectors of DeepSeek-V3 are on each of the eight ranks alike, so the
# 128 GiB hold an eighth of the tokens above. Data parallel attention is the remedy.

# %%
runs = {
    name: simulate(
        load_config(
            "../examples/demo.yaml",
            {
                "engine.model": model,
                "engine.tensor_parallel_size": 8,
                "engine.kv_cache_memory_bytes": 16 * GIB,
                "engine.max_num_batched_tokens": 2048,
                "engine.max_model_len": 32_768,
                "workload.preset.duration_s": 180,
                "workload.preset.rate_scale": 4.0,
            },
        )
    )
    for name, model in models.items()
}
colors = ["#000000", "#D55E00", "#009E73", "#0072B2", "#CC79A7"]
_, axes = plt.subplots(figsize=(8, 3.6))
for (name, run), color in zip(runs.items(), colors, strict=True):
    usage = 100 * run.steps["kv_cache_usage"]
    axes.plot(run.steps["start_s"], usage, color=color, linewidth=1.3, label=name)
axes.set(xlabel="s", ylabel="KV cache in use (%)", ylim=(0, 103), xlim=(0, 200))
axes.set_title("The same traffic, the same 128 GiB")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
told = pd.DataFrame({name: run.summary for name, run in runs.items()}).T
asked = ["num_gpu_blocks", "num_preemptions", "mean_ttft_ms", "mean_tpot_ms"]
display(told[asked].astype(float).round(1))

# %% [markdown]
# ## Which layers use it?
#
# Blocks in use by kind, on average. Chats of a thousand tokens hardly outgrow the window of
# Gemma-3: each of its six window groups holds more than half of what the full one does.
# The window of gpt-oss is an eighth as long.

# %%
shares = pd.DataFrame(
    [
        {
            "model": name,
            "layers": f"{kind['num_groups']} x {kind['num_layers']} {kind['kind']}",
            "blocks in use, mean": kind["num_blocks_mean"],
            "GiB, mean": kind["num_blocks_mean"] * 128 / run.summary["num_gpu_blocks"],
        }
        for name, run in runs.items()
        for kind in run.summary.get("kv_cache_groups", [])
    ]
)
shares.round(2)

# %% [markdown]
# ## What we have learned
#
# Ask for tokens at *your* lengths: a model of windows pays for its windows first.

# %%
gemma, llama = held.loc["Gemma-3-27b"], held.loc["Llama-3.3-70B"]
of_gemma = shares[shares["model"] == "Gemma-3-27b"]
windows = of_gemma[of_gemma["layers"].str.contains("window")]["GiB, mean"].sum()
print(
    f"128 GiB hold {gemma['8k at once'] / llama['8k at once']:.1f} times as many requests "
    f"of 8k of Gemma-3-27b as of Llama-3.3-70B, and "
    f"{gemma['128k at once'] / llama['128k at once']:.1f} times as many of 128k.\n"
    f"In chats its windows hold {windows / of_gemma['GiB, mean'].sum():.0%} of the blocks "
    f"in use; the same traffic fills {runs['Llama-3.3-70B'].summary['kv_cache_usage_mean']:.0%} "
    f"of the pool of Llama-3.3-70B and "
    f"{runs['gpt-oss-120b'].summary['kv_cache_usage_mean']:.1%} of that of gpt-oss-120b."
)
