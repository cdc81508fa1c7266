# %% [markdown]
# # 03. Preempted: is it better to swap, or to compute again?
#
# When blocks run out, a request loses its own. What they held can be copied to the memory
# of the host and back later (*swap*), or thrown away and computed again (*recompute*).
# Engines before V1 did either; V1 always computes again. What is dearer depends on how long
# the request is, and on how the engine copies.

# %%
from kvsim import crossover, load_config, sweep

model, gpu = "meta-llama/Llama-3.1-8B", "h200_sxm"
profile = None  # the path of a profile of that GPU; None: prices from its datasheet
report = crossover(model, gpu=gpu, profile=profile, max_num_batched_tokens=65_536)
report.plot()

# %% [markdown]
# The curve asks a *profile*: kernel and copy times that were measured. `kvsim calibrate`
# makes one on your GPU (notebook 07 shows how). None is bundled, so what you see here is
# from the datasheet of the H200 and has no bounds; put the path of yours into `profile`,
# and its GPU into `gpu`, and run the notebook again: the engine below is then priced by it,
# too.
#
# Three ways to copy: `loop` is one call for each piece of a block, as the engines before V1
# do it, 64 pieces a block with this model; `batch` is one call for all; `kernel` copies
# with some of the GPU's processors. Below, the curve in words and, at five lengths, in numbers.
#
# Why is there a window in the middle? A short prompt costs a whole step however short it
# is: all weights are read. A long one pays for attention, which grows with the square of
# the length, while bytes to copy only grow with the length.

# %%
for way, sentence in report.sentences.items():
    print(f"{way:7s}{sentence}")
report.table.loc[[32, 320, 2_000, 8_000, 40_000]].round(1)

# %% [markdown]
# ## Does a whole engine agree?
#
# The curve prices one preemption by itself. In an engine, a preemption also holds up others, and
# the one that comes back may be preempted again. So we serve 20 requests on vLLM 0.7.3
# (`scheduler: v0`), all there at the start, in a cache that holds six of them until 40 % of
# their answers are there, and then no more. We do so for five lengths, in both modes.

# %%
prices = {"kind": "measured", "profile": profile} if profile else {"kind": "roofline"}
answers = {150: 300, 1_000: 1_000, 4_000: 1_000, 8_000: 1_000, 40_000: 2_000}
configs = [
    load_config(
        "../examples/beams_under_pressure.yaml",
        {
            "workload": {
                "synthetic": {
                    "num_requests": 20,
                    "arrivals": {"kind": "burst", "burst_size": 20, "interval_s": 1.0},
                    "prompt_tokens": {"kind": "fixed", "tokens": prompt},
                    "output_tokens": {"kind": "fixed", "tokens": answer},
                },
                "max_tokens": answer,
            },
            "engine.num_gpu_blocks_override": int(
                6 * (prompt + 0.4 * answer) / 0.99 / 16
            ),
            "engine.max_model_len": prompt + answer,
            "engine.max_num_batched_tokens": prompt + max(answer, 2_048),
            "engine.enable_chunked_prefill": False,
            "engine.swap_space": 512.0,
            "engine.preemption_mode": mode,
            "engine.gpu": gpu,
            "cost": prices | {"swap_variant": way},
        },
    )
    for prompt, answer in answers.items()
    for mode, way in [("recompute", None), ("swap", "loop"), ("swap", "batch")]
]
runs = sweep(configs)
runs["way"] = (
    runs["engine.preemption_mode"]
    .str.cat(runs["cost.swap_variant"], sep=" ", na_rep="")
    .str.strip()
)
runs["prompt"] = runs["workload.synthetic.prompt_tokens.tokens"]
seconds = runs.pivot(index="prompt", columns="way", values="duration")
seconds.round(2)

# %% [markdown]
# Seconds until all twenty are served. Now the curve beside it, at the length that a request has when
# the cache runs out:

# %%
import numpy as np

length = np.array([prompt + 0.4 * answer for prompt, answer in answers.items()])
at = {
    way: np.interp(length, report.table.index, report.table[f"{way}_ms"])
    for way in ["recompute", "swap_loop", "swap_batch"]
}
names = np.array(["recompute", "swap loop"])
verdicts = seconds.assign(
    curve_says=names[(at["swap_loop"] < at["recompute"]).astype(int)],
    engine_says=names[(seconds["swap loop"] < seconds["recompute"]).astype(int)],
    batched_copies_win=seconds["swap batch"]
    < seconds[["recompute", "swap loop"]].min(axis=1),
)
verdicts.drop(columns=seconds.columns)

# %% [markdown]
# ## What we have learned
#
# Not whether to swap, but how the bytes are copied decides.

# %%
agree = (verdicts["curve_says"] == verdicts["engine_says"]).sum()
middle = list(answers).index(8_000)
print(
    f"Curve and engine name the same winner at {agree} of {len(verdicts)} lengths.\n"
    f"Copied piece by piece, {length[middle]:,.0f} tokens cost "
    f"{at['swap_loop'][middle] / at['recompute'][middle]:.1f} times what computing them again "
    f"costs; copied in one call, {at['swap_batch'][middle] / at['recompute'][middle]:.1f} times.\n"
    f"Batched copies win at {verdicts['batched_copies_win'].sum()} of {len(verdicts)} lengths."
)
