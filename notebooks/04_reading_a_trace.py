# %% [markdown]
# # 04. What could a prefix cache gain of this trace, and what will it?
#
# Prompts often begin as earlier ones did: with the same instructions, or with the
# conversation so far. Blocks that are still in the cache need not be computed again. How
# much of a trace could be found again, and how large must the cache be?
#
# No trace is bundled, so we write a sample: 400 people who chat, drawn from
# `examples/chat_sessions.yaml`. With a trace of your own, put its path into `trace` at the
# end of the next cell; eight formats are read.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

from sim.cli.main import run as kvsim

folder = TemporaryDirectory()
trace = Path(folder.name, "chats.jsonl")
status = kvsim(
    [
        "workload",
        "generate",
        "../examples/chat_sessions.yaml",
        "--out",
        str(trace),
        "--quiet",
        "--set",
        "workload.sessions.num_sessions=400",
        "--set",
        "workload.sessions.arrivals={kind: poisson, rate: 0.25}",
        "--set",
        "workload.max_concurrent_users=null",
    ]
)
assert status == 0
with trace.open() as lines:
    print(
        *[line.strip()[:120] for line, _ in zip(lines, range(3), strict=False)],
        sep="\n",
    )

# %% [markdown]
# In kvsim's own format a prompt is a list of *segments*, `[id, tokens]`: where two prompts begin
# with the same segments, they begin with the same text. That is all a cache has to know.
# First, what is in there?

# %%
import pandas as pd

from kvsim import hit_curve, load_config, read_requests, sweep
from workloads.analysis import describe

requests = read_requests(trace)
found = describe(requests)
pd.Series(
    {
        "requests": len(requests),
        "sessions": found.sessions.num_sessions,
        "turns of a session, mean": round(found.sessions.turns.mean(), 1),
        "prompt tokens, median": found.prompts.p50,
        "output tokens, median": found.outputs.p50,
        "prompt tokens that an earlier prompt had, %": round(
            100 * found.sharing[-1].statistics.token_hit_rate, 1
        ),
    },
    name="",
).to_frame()

# %% [markdown]
# ## How large must the cache be?
#
# The curve says for every size of an LRU cache which share of the prompt tokens it finds;
# what is missing to 100 % is the miss ratio. The green points (Belady) are a cache that
# knows the future and forgets what is needed last: no policy can do better. The sentence
# above the picture says what it takes of this GPU, and what the curve leaves out.

# %%
model, gpu = "Qwen/Qwen3-32B", "h200_sxm"
report = hit_curve(requests, model=model, gpu=gpu)
print(report.sentence(), *report.notes, sep="\n")
report.plot()

# %% [markdown]
# ## And in an engine?
#
# The curve serves one request after the other, so the whole cache is there to remember. An engine
# works on many at once, and their blocks are not free to be forgotten or kept. We run the same trace
# through V1's own block pool, in caches of five sizes.
#
# In percent, but for TTFT. The engine is below the curve where requests at work fill the cache (`in
# use`, on average), and meets it where there is room to spare. The last column reads the curve at
# the number of blocks that are *not* in use: that is close to what the engine finds.

# %%
sizes = [4_000, 6_000, 9_000, 15_446, 25_000]
runs = sweep(
    [
        load_config(
            "../examples/chat_sessions.yaml",
            {
                "workload": {"trace": {"kind": "kvsim", "path": str(trace)}},
                "engine.num_gpu_blocks_override": size,
            },
        )
        for size in sizes
    ]
).set_index("engine.num_gpu_blocks_override")
table = pd.DataFrame(
    {
        "curve": [100 * report.curve.hit_rate_at(size) for size in sizes],
        "engine": 100 * runs["prefix_cache_hits"] / runs["prefix_cache_queries"],
        "in use": 100 * runs["kv_cache_usage_mean"],
        "mean TTFT, ms": runs["mean_ttft_ms"],
    }
)
left_over = runs.index * (1 - runs["kv_cache_usage_mean"])
table["curve of what is left"] = [
    100 * report.curve.hit_rate_at(each) for each in left_over
]
table.index.name = "blocks"
display(table.round(1))
axes = table[["curve", "curve of what is left", "engine"]].plot(
    figsize=(8, 3.4),
    style=["o-", "s--", "D-"],
    ylim=(0, 100),
    grid=True,
    xlabel="KV blocks",
    ylabel="prompt tokens found again (%)",
    color=["#0072B2", "#56B4E9", "#D55E00"],
    title="Prefix hits: one request after the other, and in an engine",
)

# %% [markdown]
# ## What we have learned
#
# Read the curve for the blocks that are *left over*, not for the pool.

# %%
small = table.loc[6_000]
apart = (table["engine"] - table["curve of what is left"]).abs().max()
print(
    f"{report.need.share:.0%} of the possible hits take {report.need.num_blocks:,} blocks, "
    f"{report.pools(report.need.num_blocks):.2f} of the pool of {model} on {gpu}.\n"
    f"But of 6,000 blocks {small['in use']:.0f} % are in use: the engine finds "
    f"{small['engine']:.0f} % where the curve promises {small['curve']:.0f} %.\n"
    f"Read at what is left over, the curve is at most {apart:.0f} points away from the engine."
)
folder.cleanup()
