"""Pages of the longest names in windows of several widths: nothing is cut.

Chromium prints what a script in the page found, so that no driver is needed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from typing import TYPE_CHECKING, Any

import pytest

from sim.cli.main import run as kvsim
from sim.views.report import build_page
from tests.sim.studies.planning.plans import small, solved
from tests.sim.studies.planning.test_long_names import MODELS, with_long_names
from tests.sim.studies.sweeps.files import write_sweep
from tests.sim.views.report.browser import ARGUMENTS, BROWSERS

if TYPE_CHECKING:
    from pathlib import Path

POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
MEASURE = """<script>addEventListener("load", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const width = document.documentElement.clientWidth, found = [];
  for (const each of document.body.querySelectorAll("*")) {
    if (each.closest("svg, pre, nav, .sr")) continue;
    const box = each.getBoundingClientRect();
    if (box.width && (box.right > width + 1 || box.left < -1))
      found.push([each.tagName, each.textContent.slice(0, 80)]);
  }
  document.title = JSON.stringify([document.documentElement.scrollWidth, found]);
});</script>"""


def too_wide(text: str, width: int, directory: Path) -> Any:
    """Return what stands beyond the edges of a window, in a browser."""
    binary = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip("no chromium here; install chromium")
    page = directory / "page.html"
    measured = POLICY.sub("", text).replace("</body>", f"{MEASURE}</body>")
    page.write_text(measured, encoding="utf-8")
    arguments = [each for each in ARGUMENTS if "window-size" not in each]
    command = [binary, *arguments, f"--window-size={width},900", "--dump-dom"]
    command += [f"--user-data-dir={directory / 'profile'}", page.as_uri()]
    shown = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=120
    )
    title = re.search(r"<title>(\[.*?\])</title>", shown.stdout, re.DOTALL)
    assert title, shown.stderr
    widest, found = json.loads(unescape(title[1]))
    assert widest <= width
    return found


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory, crowded_run: Path, plain_run: Path
) -> dict[str, str]:
    asked = small(
        candidates={"gpu": ["h200_sxm", "h100_sxm"], "max_num_seqs": [8, 16]},
        sensitivity={"num_seeds": 1},
    )
    asked["engine"].pop("max_num_seqs")
    asked["workload"]["synthetic"]["num_requests"] = 100
    folder = tmp_path_factory.mktemp("plan")
    found = with_long_names(solved(asked, folder).data)
    (folder / "plan.json").write_text(json.dumps(found), encoding="utf-8")
    swept = _sweep(tmp_path_factory.mktemp("sweep"))
    return {
        "plan": build_page([folder], is_static=True),
        "runs": build_page([crowded_run, plain_run], is_static=True),
        "sweep": build_page([swept]),
        "static sweep": build_page([swept], is_static=True),
    }


def _sweep(folder: Path) -> Path:
    """Return runs of two long names and three pools, of which the smallest fails."""
    grid = {"engine.model": MODELS, "engine.num_gpu_blocks_override": [2, 25, 50]}
    out = folder / "out"
    asked = ["sweep", str(write_sweep(folder, grid=grid)), "--out", str(out)]
    assert kvsim([*asked, "--workers", "1", "--quiet"]) == 0
    return out


@pytest.mark.slow
@pytest.mark.parametrize("width", [900, 1200, 1600])
@pytest.mark.parametrize("kind", ["plan", "runs", "sweep", "static sweep"])
def test_nothing_stands_beyond_the_edges(
    kind: str, width: int, pages: dict[str, str], tmp_path: Path
) -> None:
    assert too_wide(pages[kind], width, tmp_path) == []
