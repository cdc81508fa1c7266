"""Run the code of a notebook, and write the results of every configuration it loads.

``python notebook_runs.py SOURCE.py OUT [KEY=VALUE ...]``, in the environment and from
the root of the checkout to be asked, with some keys set, those of the engine where it
is v1; any release of the program will do, so nothing is imported but its public names.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import sim

_load_config = sim.load_config


def main(source: Path, out: Path, back: list[str]) -> None:
    """Run the cells of `source` in its folder; write ``OUT/0``, ``OUT/1``, ..."""
    num_loaded = 0
    out.mkdir(exist_ok=True)

    def load_config(*args: Any, **more: Any) -> Any:
        nonlocal num_loaded
        config = _load_config(*args, **more)
        is_v1 = config.engine.scheduler == "v1"
        keys = [each for each in back if is_v1 or not each.startswith("engine.")]
        if keys:
            whole = out / "config.yaml"
            whole.write_text(config.to_yaml(), encoding="utf-8")
            config = _load_config(whole, keys)
        folder = out / str(num_loaded)
        folder.mkdir(parents=True)
        num_loaded += 1
        try:
            sim.simulate(config).write(folder)
        except sim.errors.ConfigError as error:  # it is for something else
            (folder / "error.json").write_text(json.dumps(str(error)), encoding="utf-8")
        return config

    sim.load_config = load_config
    cells = re.split(r"^# %%", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    os.chdir(source.parent)
    told = [""]  # what IPython calls `In`: the code of all cells so far
    names = {"display": lambda *_: None, "In": told}
    for cell in cells:
        if not cell.startswith(" [markdown]"):
            told.append(cell.partition("\n")[2])
            exec(compile(told[-1], source.name, "exec"), names)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
