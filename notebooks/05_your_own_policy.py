# %% [markdown]
# # 05. Can you beat the engine's own rules in twenty lines?
#
# Two choices are made when a cache is full. Which cached block is forgotten first: the
# *eviction policy*. And who loses all of its blocks when requests at work need more: the
# *preemption victim*. Both are small classes in kvsim, and yours are as good as those
# that are built in. We write one of each and race them.
#
# ## An eviction policy
#
# A `KeyedPolicy` gives each cached block a key when nobody uses it any more; the smallest
# key goes first. The idea of this one: the starts of prompts are what many requests have
# in common, so keep the first blocks of every prompt, and take the rest in the order of
# their last use.

# %%
from cache.v1.policies import KeyedPolicy


class KeepStarts(KeyedPolicy):
    """Forgets the first blocks of prompts last."""

    def __init__(self, num_first: int = 32):
        super().__init__()
        self.num_first = num_first

    def key(self, block):
        return block.depth < self.num_first, block.released_at


# %% [markdown]
# ## A victim policy
#
# The engine preempts whoever came last. This one looks at the few that came last, and takes the
# smallest of them: the least work is lost, and the old ones are still safe. What a policy sees of a
# request are views: facts that a real engine has, never how long its answer will be.


# %%
class SmallestOfTheNewest:
    """Preempts the smallest of those that came last."""

    def __init__(self, num_newest: int = 8):
        self.num_newest = num_newest

    def choose(self, running, needs):
        newest = sorted(running, key=lambda request: request.arrival_s)[
            -self.num_newest :
        ]
        return min(newest, key=lambda request: request.num_tokens)


# %% [markdown]
# ## The race for the cache
#
# kvsim takes a policy from a file, as `path/to/file.py:Class`. So what you have typed into the two
# cells above goes into one (`In` is what a notebook was told so far).
#
# Sixty people chat; each prompt is the whole conversation so far, and begins with one of eight
# system prompts. The cache is too small for all that they talk about. `clairvoyant` has read the
# prompts to come: it is no policy that an engine could have, but says what there is to gain.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

from kvsim import load_config, sweep

folder = TemporaryDirectory()
mine = Path(folder.name, "mine.py")
mine.write_text("\n".join(In[-3:-1]))

chats = {
    "workload.sessions.num_sessions": 60,
    "workload.sessions.arrivals": {"kind": "poisson", "rate": 0.4},
    "workload.max_concurrent_users": None,
    "engine.num_gpu_blocks_override": 3_000,
}
evictors = ["lru", "lfu", "s3_fifo", "arc", f"{mine}:KeepStarts", "clairvoyant"]
runs = sweep(
    [
        load_config("../examples/chat_sessions.yaml", chats | {"engine.evictor": each})
        for each in evictors
    ]
)
eviction = pd.DataFrame(
    {
        "prompt tokens found, %": 100
        * runs["prefix_cache_hits"]
        / runs["prefix_cache_queries"],
        "mean TTFT, ms": runs["mean_ttft_ms"],
    }
).set_index(
    pd.Index(
        ["lru", "lfu", "s3_fifo", "arc", "KeepStarts", "clairvoyant"], name="evictor"
    )
)
eviction.sort_values("mean TTFT, ms").round(1)

# %% [markdown]
# ## The race for the blocks
#
# Five minutes of the chat traffic of `examples/demo.yaml`, a quarter faster than it was, with three
# seeds. All policies meet the same requests, so the picture compares seed by seed.

# %%
victims = {
    "the engine's own": None,
    "most_blocks": "most_blocks",
    "cheapest_to_recompute": "cheapest_to_recompute",
    "SmallestOfTheNewest": f"{mine}:SmallestOfTheNewest",
}
races = [(name, kind, seed) for name, kind in victims.items() for seed in (0, 1, 2)]
runs = sweep(
    [
        load_config(
            "../examples/demo.yaml",
            {
                "workload.preset.duration_s": 300,
                "workload.preset.rate_scale": 1.25,
                "engine.preemption_victim": kind,
                "seed": seed,
            },
        )
        for _, kind, seed in races
    ]
)
runs[["victim", "seed"]] = [(name, seed) for name, _, seed in races]
names = [
    "num_preemptions",
    "recomputed_tokens",
    "mean_ttft_ms",
    "mean_e2el_ms",
    "p99_e2el_ms",
]
means = runs.groupby("victim")[names].mean().loc[list(victims)]
display(means.round().astype(int))
ttft = runs.pivot(index="seed", columns="victim", values="mean_ttft_ms")[list(victims)]
ratio = ttft.div(ttft["the engine's own"], axis=0)
axes = ratio.T.plot.barh(
    figsize=(8, 3),
    color=["#0072B2", "#E69F00", "#009E73"],
    ylabel="",
    xlabel="mean time to the first token, over that of the engine's own rule (shorter is better)",
)
axes.axvline(1.0, color="black", linewidth=0.8)
axes.invert_yaxis()

# %% [markdown]
# ## What we have learned
#
# Who is preempted matters more than what is forgotten: LRU is hard to beat.

# %%
own, best = eviction.loc["KeepStarts"], eviction.loc["clairvoyant"]
saved = 1 - means.loc["SmallestOfTheNewest"] / means.loc["the engine's own"]
print(
    f"Eviction: KeepStarts finds {own.iloc[0]:.1f} % of the prompt tokens, LRU "
    f"{eviction.iloc[0, 0]:.1f} %, and with the future known it would be {best.iloc[0]:.1f} %.\n"
    f"Victims: SmallestOfTheNewest computes {saved['recomputed_tokens']:.0%} fewer tokens again, and "
    f"the mean time to the first token is {saved['mean_ttft_ms']:.0%} shorter\n"
    f"(by seed: {', '.join(f'{1 - each:.0%}' for each in ratio['SmallestOfTheNewest'])})."
)
folder.cleanup()
