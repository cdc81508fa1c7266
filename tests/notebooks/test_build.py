"""The builder refuses what is not the same everywhere; all notebooks run as stored."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from notebooks import build
from notebooks.percent import HERE, cells_of, sources
from notebooks.pictures import WIDTH_PX, small_png
from sim.cli.main import run as kvsim
from tests.shared import ROOT, shared

if TYPE_CHECKING:
    from pathlib import Path

NEEDED = ("jupytext", "nbclient", "ipykernel")
missing = [name for name in NEEDED if find_spec(name) is None]
with_jupyter = pytest.mark.skipif(
    bool(missing), reason=f"{', '.join(missing)} is not installed (make notebooks)"
)


class Output(dict[str, Any]):
    """An output as nbformat has them: keys are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


def shown(text: str) -> Output:
    return Output(
        output_type="execute_result",
        data={"text/plain": text},
        metadata={"at": 1},
        execution_count=7,
    )


def test_what_differs_from_run_to_run_is_left_out() -> None:
    kept = build._kept(shown("42"), "here")
    assert kept == {
        "output_type": "execute_result",
        "data": {"text/plain": "42"},
        "metadata": {},
        "execution_count": None,
    }


@pytest.mark.parametrize(
    "output",
    [
        shown(f"[{ROOT}/examples]"),
        shown("<object at 0x7f3a>"),
        Output(output_type="stream", name="stdout", text="in /tmp/x"),
        Output(output_type="stream", name="stderr", text="careful"),
        Output(output_type="error", ename="ValueError", evalue="no"),
    ],
    ids=["path", "address", "temporary", "warning", "error"],
)
def test_what_others_do_not_have_is_refused(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")
    with pytest.raises(build.BuildError, match="01, code cell 3"):
        build._kept(output, "01, code cell 3")


def test_pictures_get_few_bytes_and_always_the_same() -> None:
    wide = Image.linear_gradient("L").resize((2 * WIDTH_PX, 600)).convert("RGBA")
    buffer = io.BytesIO()
    wide.save(buffer, format="png")
    once, again = (
        small_png(base64.b64encode(buffer.getvalue()).decode()) for _ in "ab"
    )
    assert once == again
    small = Image.open(io.BytesIO(base64.b64decode(once)))
    assert small.size == (WIDTH_PX, 300)
    assert small.mode == "P"
    assert not small.info.get("Software")


def test_a_changed_output_is_found_and_a_picture_is_only_there() -> None:
    def cell(text: str, picture: str = "AA==") -> SimpleNamespace:
        data = {"text/plain": text, "image/png": picture}
        output = Output(output_type="display_data", data=data)
        fields = {"cell_type": "code", "id": "a", "source": "f()", "outputs": [output]}
        return SimpleNamespace(**fields, get=lambda key, _: fields[key])

    assert build._shown(cell("1")) == build._shown(cell("1", "BB=="))
    assert build._shown(cell("1")) != build._shown(cell("2"))


def test_an_unknown_name_is_answered_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        build.main(["99"])
    assert "01_first_run" in capsys.readouterr().err


@pytest.mark.slow
@with_jupyter
def test_what_is_printed_is_one_output_however_slowly_it_comes(tmp_path: Path) -> None:
    source = tmp_path / "slow.py"
    source.write_text(
        "# %%\nimport time\n\nprint(1, flush=True)\ntime.sleep(1.0)\nprint(2)\n"
    )
    [cell] = json.loads(build.build(source))["cells"]
    assert [each["text"] for each in cell["outputs"]] == [["1\n", "2\n"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@with_jupyter
@pytest.mark.parametrize("source", sources(), ids=[s.stem for s in sources()])
def test_it_runs_and_says_what_is_stored(source: Path) -> None:
    """In a process of its own: kernels and their sockets are not for this one."""
    command = [sys.executable, "-m", "notebooks.build", "--check", source.stem]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as stored" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_swap_or_recompute_takes_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As its text says: name a profile and its GPU, and everything is priced by it."""
    profile = tmp_path / "profile.json"
    tables = shared("profiles/llmservingsim/RTXPRO6000/Llama-3.1-8B")
    asked = ["llmservingsim", "--path", str(tables), "--out", str(profile), "--quiet"]
    assert kvsim(["profile", "import", *asked]) == 0
    source = (HERE / "03_swap_or_recompute.py").read_text(encoding="utf-8")
    code = "\n".join(c.source for c in cells_of(source) if c.kind == "code")
    for there, instead in {
        "profile = None": f"profile = {str(profile)!r}",
        '"h200_sxm"': '"rtx_pro_6000_server"',
        "sweep(configs)": "sweep(configs, num_workers=1)",
    }.items():
        assert there in code
        code = code.replace(there, instead)
    monkeypatch.chdir(HERE)
    said: dict[str, Any] = {}
    exec(compile(code, "03", "exec"), said)
    assert "profile profile.json" in said["report"].title
    assert "within the bounds" in capsys.readouterr().out
    assert (said["runs"]["status"] == "done").all()
