"""Rules for the package as a whole."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import workloads
from workloads import (
    ACCEPTANCE,
    ARRIVALS,
    LENGTH_PAIRS,
    LENGTHS,
    TRACE_READERS,
    PresetWorkload,
    Streams,
    SyntheticWorkload,
    TraceWorkload,
    arrival_times_s,
)

CONSTRUCTED = [
    *ACCEPTANCE.values(),
    *ARRIVALS.values(),
    *LENGTHS.values(),
    *LENGTH_PAIRS.values(),
    *TRACE_READERS.values(),
    PresetWorkload,
    SyntheticWorkload,
    TraceWorkload,
]


def test_importing_is_cheap() -> None:
    code = (
        "import sys, workloads, workloads.fetch\n"
        "print(sorted({'numpy', 'scipy', 'pooch', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_public_names_exist() -> None:
    assert workloads.__all__ == sorted(
        workloads.__all__, key=lambda name: (not name.isupper(), name)
    )
    assert all(hasattr(workloads, name) for name in workloads.__all__)


@pytest.mark.parametrize("constructed", CONSTRUCTED)
def test_constructors_can_be_built_from_tables(constructed: Any) -> None:
    # Configurations name the arguments, so the types must be readable at run time.
    hints = get_type_hints(constructed.__init__)
    for name, parameter in inspect.signature(constructed).parameters.items():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert name in hints
        assert name in constructed.__doc__


@pytest.mark.parametrize("constructed", CONSTRUCTED)
def test_values_are_frozen_and_slotted(constructed: Any) -> None:
    assert constructed.__dataclass_params__.frozen
    assert "__slots__" in vars(constructed)


@pytest.mark.parametrize(
    "table", [ACCEPTANCE, ARRIVALS, LENGTHS, LENGTH_PAIRS, TRACE_READERS]
)
def test_registries_are_read_only(table: Any) -> None:
    with pytest.raises(TypeError):
        table["own"] = object


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(workloads.__file__).parent / "README.md"
    first, own = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    (tmp_path / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(first + own, names)
    assert len(names["recorded"].requests()) == 1
    assert len(names["drawn"].requests()) == pytest.approx(4800, rel=0.1)
    # A rate of 2 t has seen 100 arrivals after 10 s.
    rng = Streams(0).generator("arrivals")
    times_s = arrival_times_s(names["RampArrivals"](growth=2), rng, duration_s=100)
    assert len(times_s) == pytest.approx(10_000, rel=0.05)
