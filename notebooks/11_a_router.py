# %% [markdown]
# # 11. What is a router worth, and what must it know?
#
# Four engines behind a router, and 120 people who chat. A turn whose conversation is still cached
# where it is sent costs little, anywhere else all of it is computed again. Some routers know
# nothing, some how many requests they have sent where, some what they have sent, and one hears
# from the engines what they cache.
#
# ## Five routers, the same people
#
# Caches that hold some two thirds of the conversations, three seeds. `llm_d` scores prefixes by
# prompts that it sent, or with `precise` by the engines' KV events.

# %%
import matplotlib.pyplot as plt
import pandas as pd

from kvsim import load_config, simulate

routers = {
    "random": {"kind": "random"},
    "least requests": {"kind": "least_requests"},
    "session": {"kind": "session"},
    "llm-d, prompts sent": {"kind": "llm_d"},
    "llm-d, KV events": {"kind": "llm_d", "precise": True},
}
people = {
    "workload.sessions.num_sessions": 360,
    "workload.sessions.arrivals.burst_size": 360,
    "workload.max_tokens": 2000,
    "workload.max_concurrent_users": 120,
    "engine.num_gpu_blocks_override": 4500,
    "cost_intervals": False,
}
rows = []
for name, router in routers.items():
    for seed in range(3):
        fleet = {"pools": [{"name": "main", "replicas": 4}], "router": router}
        config = load_config(
            "../examples/chat_sessions.yaml", people | {"fleet": fleet, "seed": seed}
        )
        summary = simulate(config).summary
        rows.append(
            {
                "router": name,
                "seed": seed,
                "hits %": 100 * summary["prefix_cache_hit_rate"],
                "TTFT mean ms": summary["mean_ttft_ms"],
                "TTFT p95 ms": summary["p95_ttft_ms"],
                "busiest, of mean": summary["imbalance"]["requests"],
                "GPU busy %": 100 * summary["engine_busy_share"],
            }
        )
runs = pd.DataFrame(rows)
means = runs.groupby("router", sort=False).mean().drop(columns="seed")
means.round(1)

# %% [markdown]
# ## Is it the hits?
#
# Each dot is a seed. The more conversations are found where they are sent, the sooner comes the
# first token; counting requests evens the load, and finds no more than chance does.

# %%
fig, axes = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
colors = dict(
    zip(routers, ("#999999", "#0072B2", "#009E73", "#E69F00", "#D55E00"), strict=True)
)
for name, own in runs.groupby("router", sort=False):
    axes.plot(
        own["hits %"], own["TTFT mean ms"], "o", color=colors[name], label=name, ms=6
    )
axes.set(xlabel="prefix cache hits (%)", ylabel="mean TTFT (ms)", ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False)

# %% [markdown]
# ## An engine dies
#
# After three minutes engine 1 dies, its requests begin again elsewhere, and four minutes later a new
# one with an empty cache takes its place. Mean TTFT of what came in each minute; the grey band is
# the time without it.

# %%
events = [
    {"time_s": 180.0, "kind": "die", "engine": 1},
    {"time_s": 420.0, "kind": "start", "engine": 1},
]
fig, axes = plt.subplots(figsize=(7.4, 3.4), layout="constrained")
axes.axvspan(3, 7, color="0.92")
for name in "random", "session", "llm-d, KV events":
    fleet = {
        "pools": [{"name": "main", "replicas": 4}],
        "router": routers[name],
        "events": events,
    }
    config = load_config(
        "../examples/chat_sessions.yaml", people | {"fleet": fleet, "seed": 0}
    )
    results = simulate(config)
    requests = results.requests
    minute = requests["arrival_s"] // 60
    by_minute = requests["ttft_s"].groupby(minute).mean().loc[:11] * 1e3
    axes.plot(by_minute.index + 0.5, by_minute, color=colors[name], label=name)
axes.set(xlabel="time (min)", ylabel="mean TTFT (ms)", xlim=(0, 12), ylim=(0, None))
axes.spines[["top", "right"]].set_visible(False)
_ = axes.legend(frameon=False)

# %% [markdown]
# The last of these runs, engine by engine: how full each cache is over time, hatched where there is
# no engine, beside it what each served and found. The others fill up while one is missing, and the
# new one has its share of conversations within a minute.

# %%
results.plot.engines()

# %% [markdown]
# ## What we have learned
#
# Here what a router must know is where a conversation was last: a hash of the session says it
# nearly as well as the engines themselves. What counts requests only is as blind as chance.

# %%
best, blind = means.loc["llm-d, KV events"], means.loc["least requests"]
hashed = means.loc["session"]
print(
    f"Knowing the caches takes mean TTFT from {blind['TTFT mean ms']:.0f} to "
    f"{best['TTFT mean ms']:.0f} ms (a hash of the session: {hashed['TTFT mean ms']:.0f} ms),\n"
    f"since {best['hits %']:.0f} % of the tokens are found, not {blind['hits %']:.0f} %."
)
