# %% [markdown]
# # 07. Can I believe a calibration?
#
# `kvsim calibrate` times the kernels of your model on your GPU and writes a *profile*, by which
# `cost: {kind: measured}` prices steps. Before you believe its predictions you should ask how good
# the fit is, and how a bad one would look.
#
# **Nothing in this notebook was measured.** Not everybody has a GPU at hand, so it takes a
# *dry run*: everything but the kernels, on a fake clock, with made-up times of a device like an H200.
# On a machine with an NVIDIA GPU set `dry_run` to False: a profile of an 8B model is expected
# to take five to eight minutes. And kvsim does not simulate with made-up times: it refuses them,
# as you see below the cell.

# %%
import sys
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory

from kvsim import load_config, read_profile, simulate
from sim.cli.main import run as kvsim

dry_run = True
folder = TemporaryDirectory()
file = Path(folder.name, "profile.json")
with redirect_stderr(sys.stdout):
    status = kvsim(
        [
            "calibrate",
            "--model",
            "meta-llama/Llama-3.1-8B",
            "--out",
            str(file),
            "--quiet",
            *(["--dry-run"] if dry_run else []),
        ]
    )
assert status == 0

config = load_config(
    "../examples/demo.yaml",
    {
        "engine.model": "meta-llama/Llama-3.1-8B",
        "cost": {"kind": "measured", "profile": str(file)},
    },
)
try:
    simulate(config)
except ValueError as error:
    print(str(error).replace(folder.name, "..."))

# %% [markdown]
# ## What is in a profile
#
# Points: an operation, a shape, and the times of many calls. And where they come from.
#
# Points are visited in random order, and every twenty visits three *sentinels* are timed again. If
# the GPU gets hot and slows down, they say so: the ratio of their slowest to their fastest times.

# %%
import pandas as pd

profile = read_profile(file)
print(f"{profile.kind}: {profile.device['name']}, {profile.provenance['tool']}")
stability = profile.provenance["stability"]
print({name: round(ratio, 3) for name, ratio in stability["ratios"].items()})
print(f"stable: {stability['stable']} (allowed: {stability['threshold']})")
points = pd.DataFrame(
    [
        (table.operation, table.num_points)
        for table in profile.ops
        if "." not in table.operation
    ],
    columns=["operation", "points"],
)
points.groupby("operation").sum().T

# %% [markdown]
# ## How good is the fit?
#
# A fit that has seen a point knows it, which says little. So a fifth of the points is held out and
# predicted from the rest (*inside*), and so are the longest lengths from the shorter ones
# (*beyond*). The *floor* is what two measurements of one shape differ by: no method can do better.
# All in percent.
#
# The picture is of decode attention, the kernel that reads the cache: points are times, lines the
# fit, and below are the errors on points held out.

# %%
from calibrate.figures.fitted import measured_and_fitted
from calibrate.figures.subject import source_line, subjects
from calibrate.fit_report import fit_report

columns = ["n", "mape_inside", "p90_inside", "mape_beyond", "bias", "floor"]
errors = pd.DataFrame(fit_report(profile).to_json()).T[columns]
display(errors.astype(float).round(2))

(decode,), _ = subjects(profile, ["decode_attention"])
measured_and_fitted(decode, source_line(profile))

# %% [markdown]
# ## And a bad one?
#
# We spoil the profile: while a third of the decode points was timed, somebody else used the GPU, and
# they took 20 % longer. As the order is random, these are points here and there. Had they been
# visited from small to large, the same trouble would look like a smooth curve, and nobody would see
# it.

# %%
import json
from random import Random

from sim.costs.measured.profile import parse_profile, profile_id

random, body = Random(0), json.loads(file.read_text())
for table in body["ops"]:
    if table["operation"] == "decode_attention" and table["metric"] == "device":
        slow = [
            1.2 if random.random() < 1 / 3 else 1.0 for _ in table["quantiles"]["p50_s"]
        ]
        for name, times in table["quantiles"].items():
            table["quantiles"][name] = [
                each * by for each, by in zip(times, slow, strict=True)
            ]
spoilt = parse_profile(json.dumps(body | {"id": profile_id(body)}))
worse = pd.DataFrame(fit_report(spoilt, only=["decode_attention"]).to_json()).T[columns]
both = pd.concat([errors.loc[["decode_attention"]], worse.loc[["decode_attention"]]])
display(both.set_axis(["as it was", "spoilt"]).astype(float).round(2))
(broken,), _ = subjects(spoilt, ["decode_attention"])
measured_and_fitted(broken, source_line(spoilt))

# %% [markdown]
# ## What we have learned
#
# Judge a fit by points that it has not seen, beside the floor of the measurement.

# %%
good, bad = both["mape_inside"].astype(float)
print(
    f"Decode attention, points held out: {good:.2f} % off, with a floor of "
    f"{both['floor'].astype(float).iloc[0]:.2f} %: the fit is as good as the measurement.\n"
    f"With a third of the points 20 % too slow: {bad:.1f} % off, {bad / good:.0f} times as much. "
    f"That would be the time to calibrate again."
)
folder.cleanup()
