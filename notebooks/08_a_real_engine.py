# %% [markdown]
# # 08. Is it true of my engine?
#
# A simulation that agrees with itself proves nothing. `validate` takes a run that you measured,
# simulates it with its own arrivals and lengths, and says how far off it is.
#
# **The measured run of this notebook is a stand-in.** No log of a real engine is bundled, so
# the next cell makes one: kvsim plays an engine, started with `--no-async-scheduling`, that differs
# from what we believe in two ways. Its host takes 3 ms longer for each step, and its cache has
# fewer blocks than we think. Can `validate` find both? To look at your own engine, put your files
# into `measured` and `timeseries` and your arguments into `believed`, above the last line of the
# next cell; what is compared with the truth has no meaning then. What came out for published runs
# of real engines stands in [tests/truth](../tests/truth/README.md).
#
# ## A row a request
#
# That is all that is needed of an engine: when a request came, when its first and its last token
# came, and how many tokens there were. A row for each second of queues and cache helps.

# %%
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd

from kvsim import load_config, simulate, validate

traffic = {
    "workload.preset.duration_s": 600,
    "workload.preset.rate_scale": 1.0,
    "engine.async_scheduling": False,
}
believed = load_config("../examples/demo.yaml", traffic)
truth = {
    "engine.num_gpu_blocks_override": 14_000,
    "cost": {"kind": "roofline", "step_overhead_s": 0.0045},
}
played = simulate(load_config("../examples/demo.yaml", traffic | truth))

folder = TemporaryDirectory()
measured, timeseries = (
    Path(folder.name, "requests.csv"),
    Path(folder.name, "timeseries.csv"),
)
pd.DataFrame(
    {
        "arrival_s": played.requests["arrival_s"],
        "queued_s": played.requests["arrival_s"],
        "first_token_s": played.requests["first_token_s"],
        "last_token_s": played.requests["finish_s"],
        "prompt_tokens": played.requests["num_prompt_tokens"],
        "output_tokens": played.requests["num_output_tokens"],
        "preemptions": played.requests["num_preemptions"],
    }
).to_csv(measured, index=False)
marks = np.arange(1.0, played.steps["start_s"].iloc[-1])
steps = played.steps.iloc[played.steps["start_s"].searchsorted(marks) - 1]
came, begun = played.requests["arrival_s"], played.requests["first_scheduled_s"]
pd.DataFrame(
    {
        "t": marks,
        "running": steps["num_running"].to_numpy(),
        "waiting": [((came <= mark) & (mark < begun)).sum() for mark in marks],
        "kv_cache_pct": 100 * steps["kv_cache_usage"].to_numpy(),
    }
).to_csv(timeseries, index=False)

pd.read_csv(measured).head(3).round(2)

# %% [markdown]
# ## As we believe it to be
#
# Errors in percent of what was measured, of the simulation with the arguments that we believe in:

# %%
metrics = [
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "num_preemptions",
]
columns = ["predicted", "measured", "error_pct"]
first = validate(believed, measured, timeseries)
first.table.loc[metrics, columns].round(1)

# %% [markdown]
# Everything is too fast by about the same share, from the first request on. That smells of the host,
# which no datasheet knows. (An engine that schedules ahead hides it behind the GPU: there is nothing
# to be fitted.)
#
# ## The host, fitted on the first third
#
# `fit=["host"]` finds the host's time a step on requests that ended in the first third of the
# run. The rest is what it is judged by.
#
# The time per token is right now, and so is the whole request; one could stop here. But look at the
# preemptions, at the tail of TTFT, and at the states over time.

# %%
second = validate(believed, measured, timeseries, fit=["host"])
print(f"fitted: {second.fit.values}, the truth is {truth['cost']['step_overhead_s']}")
display(second.table.loc[metrics, columns].round(1))
second.plot.states()

# %% [markdown]
# Where the cache of the engine is full, ours is not: the share of the cache in use differs by a
# constant factor. That is the number of blocks. A real engine prints it when it starts; the log of
# this one says 14,000.

# %%
log = {"engine.num_gpu_blocks_override": 14_000}
known = load_config("../examples/demo.yaml", traffic | log)
third = validate(known, measured, timeseries, fit=["host"])
itself = validate(load_config("../examples/demo.yaml", traffic | truth), measured)
pd.DataFrame(
    {
        "as believed": first.table["error_pct"],
        "host fitted": second.table["error_pct"],
        "and blocks from the log": third.table["error_pct"],
        "the truth itself": itself.table["error_pct"],
    }
).loc[metrics].round(1)

# %% [markdown]
# What is left in the tail of TTFT is chance. The fitted host is ten microseconds off, and in a full
# cache that is enough for others to be preempted; with the truth itself nothing is off. One run is
# one sample of its tail.
#
# ## What we have learned
#
# Means forgive a wrong cache, preemptions do not. Take the number of blocks from your log.

# %%
tpot = [abs(each.table.loc["mean_tpot_ms", "error_pct"]) for each in (second, third)]
counts = [each.table.loc["num_preemptions", "predicted"] for each in (second, third)]
print(
    f"With the host fitted, TPOT is {tpot[0]:.1f} % off with the wrong number of blocks and "
    f"{tpot[1]:.1f} % with the right one: nothing to see.\n"
    f"Preemptions: {counts[0]:.0f} with the wrong number, {counts[1]:.0f} with the right one, "
    f"{third.table.loc['num_preemptions', 'measured']:.0f} in truth."
)
folder.cleanup()
