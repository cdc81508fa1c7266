"""``from sim import ...``: cheap, typed, listed, documented, each with an example."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from typing import Any

import matplotlib as mpl
import pytest

import sim
from sim.results.summary import compared
from sim.views.plots.accessor import NamedFigures, RunPlots
from tests.shared import ROOT

PAGE = (ROOT / "docs/python.md").read_text(encoding="utf-8")
DOCUMENTED = {name: getattr(sim, name) for name in sim.__all__} | {
    "Results.load": sim.Results.load,
    "results.plot": RunPlots,
    "flat": compared.flat,
    "short_names": compared.short_names,
    "NamedFigures": NamedFigures,
}


def test_a_path_in_place_of_a_configuration_is_answered_in_a_line() -> None:
    path: Any = "examples/demo.yaml"
    with pytest.raises(ValueError, match=r"simulate\(load_config\('examples/demo"):
        sim.simulate(path)


def examples(name: str, documented: Any) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(
        inspect.getdoc(documented) or "", {}, name, None, None
    )


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_example_prints_what_it_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    test = examples(name, DOCUMENTED[name])
    if name in ("flat", "short_names", "NamedFigures"):
        test.globs[name] = DOCUMENTED[name]
    assert test.examples, f"{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append, clear_globs=True)
    assert not said, "".join(said)


def in_a_process(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def test_importing_sim_imports_nothing_heavy() -> None:
    heavy = ["numpy", "pandas", "simpy", "pydantic", "matplotlib", "sim.config.tables"]
    code = f"import sys, sim; print([m for m in {heavy} if m in sys.modules])"
    assert in_a_process(code) == "[]"


def test_help_imports_no_more_than_it_did() -> None:
    code = (
        "import sys\n"
        "from sim.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "print([m for m in ('pandas', 'matplotlib', 'simpy') if m in sys.modules])"
    )
    assert in_a_process(code).endswith("[]")


def test_simulate_is_the_function_whatever_was_imported_before() -> None:
    """A module of that name would hide it as soon as anything imports the module."""
    code = (
        "import sim.simulation.run, sim.api, sim.cli.main\n"
        "from sim import simulate, plan, sweep, validate, crossover\n"
        "print(all(map(callable, (simulate, plan, sweep, validate, crossover))))"
    )
    assert in_a_process(code) == "True"


def test_a_figure_that_is_not_there_is_answered_with_those_that_are() -> None:
    figures = NamedFigures({"states": str, "latencies": str}, None)
    with pytest.raises(AttributeError, match=r"'stats'.*there are: states, latencies"):
        figures.stats()
    with pytest.raises(AttributeError):
        NamedFigures.__new__(NamedFigures)._figures  # noqa: B018


def test_names_are_listed_and_a_wrong_one_says_so() -> None:
    assert set(sim.__all__) <= set(dir(sim))
    assert sim.__all__ == sorted(sim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        sim.simulat  # noqa: B018


def test_the_page_has_every_name() -> None:
    for name in sim.__all__:
        assert f"`{name}" in PAGE, name
    assert all(len(line) <= 100 or line.startswith("|") for line in PAGE.splitlines())


def test_code_on_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that need no file of the reader's, one after the other."""
    monkeypatch.chdir(ROOT)
    blocks = [part.split("```")[0] for part in PAGE.split("```python\n")[1:]]
    code = "".join(block for block in blocks if "FILE" not in block)
    assert "simulate(" in code
    exec(compile(code, "docs/python.md", "exec"), {"__name__": "__main__"})
