# %% [markdown]
# # 01. Who suffers when the KV cache is full?
#
# Every token of every request that an engine works on has a place in the KV cache of the
# GPU. The cache is cut into blocks of 16 tokens. When they run out, somebody has to give
# blocks back: a request is *preempted*. Its blocks go, and it is computed again later.
#
# We simulate an hour of chat traffic on one H200 that serves Qwen3-32B. The traffic is
# drawn from a preset that is bundled with kvsim; it resembles the conversation trace of
# the Azure LLM inference traces of 2023, 15 % faster than it was.

# %%
from kvsim import load_config, simulate

config = load_config("../examples/demo.yaml", {"workload.preset.rate_scale": 1.15})
results = simulate(config)
results

# %% [markdown]
# That is the summary: the numbers of `summary.json`, named as `vllm bench serve` names
# them. **TTFT** is the time to the first token, **TPOT** the time per token after it,
# **E2E** the whole request. Each row of `results.requests`, `.steps` and `.preemptions`
# is one of what its name says, and `results.plot` has the figures. First the cache, with
# the preemptions in orange.
#
# The cache is full for minutes at a time, and that is when preemptions happen. The table
# has a row each: at `time_s`, the request `for_request_id` needed a block and
# `request_id`, the one that came last, had to go, with `num_tokens_lost` tokens already
# computed.

# %%
display(results.plot.kv_cache_usage())
columns = ["time_s", "for_request_id", "request_id", "num_tokens_lost", "reason"]
results.preemptions[columns].head(5).round(1)

# %% [markdown]
# So the preempted suffer? Long answers are there for longer and are preempted more often,
# so the table compares answers of about the same length: seconds from arrival to the last
# token. They take some half as long again. But they are few.
#
# Now look at the queue below it, that is at requests which have not begun and are
# preempted by nobody.

# %%
import pandas as pd

requests = results.requests
length = pd.cut(requests["num_output_tokens"], [0, 100, 200, 400, 800])
fate = (requests["num_preemptions"] > 0).map({False: "never", True: "preempted"})
mean_e2el_s = requests.groupby([length, fate], observed=True)["e2el_s"].mean()
display(mean_e2el_s.unstack().round(1))
results.plot.queues()

# %% [markdown]
# While the cache is full nobody new gets in. What would the same hour be like on the same
# GPU with an endless cache? (`num_gpu_blocks_override` sets the number of blocks; a real
# H200 does not have so many, and the summary of that run would warn of it.)

# %%
endless = simulate(
    load_config(
        "../examples/demo.yaml",
        {
            "workload.preset.rate_scale": 1.15,
            "engine.num_gpu_blocks_override": 40_000,
        },
    )
)
names = [
    "num_preemptions",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
]
pd.DataFrame(
    {
        "this cache": pd.Series(results.summary)[names],
        "endless": pd.Series(endless.summary)[names],
    }
).astype(float).round(1)

# %% [markdown]
# ## What we have learned
#
# Preemptions are the sign of a full cache, not its price. The price is the queue in front.

# %%
preempted = (requests["num_preemptions"] > 0).mean()
waiting = requests["queue_s"].sum() / requests["ttft_s"].sum()
print(
    f"{preempted:.1%} of the requests are preempted. "
    f"But {waiting:.0%} of all the time to first tokens is spent in the queue:\n"
    f"the mean request waits {results.summary['mean_ttft_ms'] / 1e3:.1f} s for its first "
    f"token, and {endless.summary['mean_ttft_ms'] / 1e3:.1f} s if the cache is endless."
)
