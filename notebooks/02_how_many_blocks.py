# %% [markdown]
# # 02. How many KV blocks do I have, and why?
#
# The number of blocks decides everything else, and nobody sets it: an engine measures what
# is left of the GPU's memory when it starts, and cuts that into blocks. kvsim does the
# same sum without the GPU.
#
# ## Where the memory goes
#
# `gpu_memory_utilization` (0.92 from vLLM 0.20 on, and 0.9 before, unless you say otherwise)
# grants the engine a share of the GPU. Weights, the peak of activations in the largest batch,
# what CUDA takes beside torch and CUDA graphs come off it. The cache gets the rest.

# %%
import pandas as pd

from kvsim import estimate_capacity, load_config, sweep
from sim.hardware.models.bundled import load_model

model, gpu = "Qwen/Qwen3-32B", "h200_sxm"
pool = estimate_capacity(model, gpu)
print(f"{pool.num_gpu_blocks:,} blocks, {pool.kv_cache_tokens:,} tokens")

GIB = 2**30
parts = (
    pd.Series(
        {
            "not granted": pool.total_bytes - pool.requested_bytes,
            "weights": pool.weights_bytes,
            "activation peak": pool.activation_peak_bytes,
            "non-torch": pool.non_torch_bytes,
            "CUDA graphs": pool.cuda_graph_bytes,
            "KV cache": pool.available_kv_bytes,
        }
    )
    / GIB
)
axes = parts[::-1].plot.barh(figsize=(8, 2.8), color="#0072B2", xlabel="GiB")
axes.bar_label(axes.containers[0], fmt="%.1f", padding=3)
axes.set_title(f"The {pool.total_bytes / GIB:.0f} GiB of an {gpu} with {model}")
axes.spines[["top", "right"]].set_visible(False)

# %% [markdown]
# ## What a block is
#
# The keys and values of 16 tokens in every layer. One line of arithmetic must give the
# same bytes:

# %%
shape = load_model(model)
both, number_bytes = 2, 2  # keys and values, in bfloat16
numbers = shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
token_bytes = both * number_bytes * numbers
print(
    f"keys and values x {shape.num_hidden_layers} layers x "
    f"{shape.num_key_value_heads} KV heads x {shape.head_dim} numbers x 2 bytes "
    f"= {token_bytes:,} bytes a token;\n"
    f"a block of {pool.block_size} tokens: {pool.block_size * token_bytes / 2**20:g} MiB, "
    f"as the estimate says: {pool.block_bytes / 2**20:g} MiB"
)

# %% [markdown]
# ## What would change it
#
# Some settings are worth more than a GPU, others nothing. "At least" and "at most" are an
# interval, because some parts were measured on other GPUs or releases; below the table the
# estimate says which.

# %%
changes = {
    "as above": {},
    "gpu_memory_utilization 0.95": {"gpu_memory_utilization": 0.95},
    "max_num_seqs 128": {"max_num_seqs": 128},
    "engine 0.11": {"engine_version": "0.11"},
    "KV cache in FP8": {"kv_cache_dtype": "fp8"},
    "two GPUs (TP 2)": {"tensor_parallel_size": 2},
    "b200_sxm": {"gpu": "b200_sxm"},
    "h100_sxm": {"gpu": "h100_sxm"},
}
estimates = {
    name: estimate_capacity(model, **{"gpu": gpu} | change)
    for name, change in changes.items()
}
table = pd.DataFrame(
    {
        "blocks": {name: each.num_gpu_blocks for name, each in estimates.items()},
        "at least": {name: each.num_gpu_blocks_low for name, each in estimates.items()},
        "at most": {name: each.num_gpu_blocks_high for name, each in estimates.items()},
    }
)
table["times"] = (table["blocks"] / pool.num_gpu_blocks).round(2)
display(table)
print(*pool.extrapolated, sep="\n")

# %% [markdown]
# ## Does a block more or less matter?
#
# The hour of chat traffic of `examples/demo.yaml` again, now with pools of different size.
# The first and the last of the interval are among them: the grey band in the picture is the
# interval of the estimate, the dotted line its best guess.

# %%
shares = [0.80, 0.90, 1.00, 1.10, 1.20, 1.30]
sizes = sorted(
    [round(share * pool.num_gpu_blocks) for share in shares]
    + [pool.num_gpu_blocks_low, pool.num_gpu_blocks_high]
)
runs = sweep(
    [
        load_config("../examples/demo.yaml", {"engine.num_gpu_blocks_override": size})
        for size in sizes
    ]
)
columns = [
    "engine.num_gpu_blocks_override",
    "num_preemptions",
    "mean_ttft_ms",
    "p99_ttft_ms",
]
curve = runs[columns].set_index(columns[0]).round().astype(int)
display(curve)
axes = curve.plot(
    subplots=True,
    figsize=(8, 4.5),
    marker="o",
    color=["#D55E00", "#0072B2", "#009E73"],
    ylim=(0, None),
    xlabel="KV blocks",
    title="An hour of chats, by the size of the cache",
)
for each in axes:
    each.axvspan(
        pool.num_gpu_blocks_low, pool.num_gpu_blocks_high, alpha=0.2, color="grey"
    )
    each.axvline(pool.num_gpu_blocks, color="grey", linestyle=":")

# %% [markdown]
# ## What we have learned
#
# A few percent of the blocks decide, and the estimate is no surer than that: measure yours.

# %%
within = curve.loc[pool.num_gpu_blocks_low : pool.num_gpu_blocks_high, columns[1]]
few, all_of_them = curve.loc[sizes[1]], curve.loc[pool.num_gpu_blocks]
print(
    f"{1 - sizes[1] / pool.num_gpu_blocks:.0%} fewer blocks are "
    f"{few['num_preemptions'] / all_of_them['num_preemptions']:.1f} times the preemptions and "
    f"{few['mean_ttft_ms'] / all_of_them['mean_ttft_ms']:.1f} times the mean TTFT.\n"
    f"Within the interval of the estimate alone there are {within.min()} to {within.max()} of them.\n"
    f"An FP8 cache, or a second GPU, has {table['times']['KV cache in FP8']:g} or "
    f"{table['times']['two GPUs (TP 2)']:g} times as many blocks."
)
