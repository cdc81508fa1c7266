"""The mistakes of docs/mistakes.md, and a writer of its table.

``python -m tests.mistakes`` writes the answers that the code gives today.
"""

from __future__ import annotations

import re
import shlex
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from sim.cli.main import run as kvsim
from tests.shared import ROOT

PAGE = ROOT / "docs/mistakes.md"
DEMO = "run examples/demo.yaml --set "
SIZE = "size --model Qwen/Qwen3-32B --gpu h100_sxm --rate 6 --input-tokens 9 "

MISTAKES = (
    DEMO + "max_num_seqs=64",
    DEMO + "engine.max-num-seqs=64",
    DEMO + "engine.max_num_seq=64",
    DEMO + "engine.max_num_seqs:64",
    "run examples/demo.yaml --max-num-seqs 64",
    DEMO + "engine.tp=2",
    DEMO + "engine.trust_remote_code=true",
    DEMO + "engine.cpu_offload_gb=10",
    DEMO + "engine.tensor_parallel_size=3",
    DEMO + "engine.num_blocks=1000",
    DEMO + "request_rate=5",
    DEMO + "engine.engine_version=0.7.3",
    DEMO + "engine.engine_version=0.10",
    DEMO + "engine.gpu_memory_utilization=90",
    DEMO + "engine.kv_cache_dtype=int4",
    DEMO + "engine.preemption_mode=swap",
    DEMO + "engine.scheduler=v2",
    DEMO + "engine.gpu=mi100",
    DEMO + "engine.model=meta-llama/Llama-9-8B",
    DEMO + "objectives.ttft_p95=1000",
    "run examples/fleet_death.yaml --set 'fleet.events=[{at_s: 60, kind: die}]'",
    "run examples/plan_chat.yaml",
    "plan examples/demo.yaml",
    "sweep examples/demo.yaml",
    "run demo.yaml",
    "report examples",
    SIZE + "--output-tokens 9",
    SIZE + "--output-tokens 9 --p95-ttft 1",
)
"""Command lines that are refused."""

WITHOUT_EFFECT = (
    DEMO + "engine.swap_space=16",
    DEMO + "engine.tensor_parallel_size=16",
    DEMO + "engine.block_size=17",
)
"""Command lines that run, and say what is odd about them."""

_SHORT = "--set workload.preset.duration_s=5 --no-figures --quiet"


def answer(command: str) -> tuple[int, str]:
    """Return the exit status of a command, and what it says on stderr."""
    said = StringIO()
    with TemporaryDirectory() as folder, chdir(ROOT), redirect_stderr(said):
        words = shlex.split(command)
        if command in WITHOUT_EFFECT:
            words += [*shlex.split(_SHORT), "--out", str(Path(folder) / "out")]
        with redirect_stdout(StringIO()):
            status = kvsim(words)
    lines = said.getvalue().splitlines()
    return status, " ".join(line.removeprefix("kvsim: ") for line in lines)


def table(commands: tuple[str, ...]) -> str:
    """Return the rows of the page: what is typed, and what is answered."""
    rows = [f"| `kvsim {each}` | {_cell(answer(each)[1])} |" for each in commands]
    return "\n".join(["| typed | answered |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def page(text: str) -> str:
    """Return the page with today's answers."""
    tables = iter((table(MISTAKES), table(WITHOUT_EFFECT)))
    pattern = re.compile(r"^\| typed \|.*?(?=\n\n|\Z)", re.DOTALL | re.MULTILINE)
    return pattern.sub(lambda _: next(tables), text.rstrip()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
