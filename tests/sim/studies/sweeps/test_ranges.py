"""Ranges: what values they give, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from sim.studies.sweeps.ranges import Range, parse_range, parse_values


@pytest.mark.parametrize(
    ("table", "low", "middle", "high"),
    [
        ({"uniform": [0.5, 2.5]}, 0.5, 1.5, 2.5),
        ({"log": [1, 100]}, 1, 10, 100),
        ({"int": [1, 4]}, 1, 3, 4),
        ({"log_int": [1, 1024]}, 1, 32, 1024),
        ({"choice": ["a", "b", "c"]}, "a", "b", "c"),
    ],
)
def test_shares_become_values(table: Any, low: Any, middle: Any, high: Any) -> None:
    found = parse_range(table)
    assert found.at(0.0) == low
    assert found.at(0.5) == pytest.approx(middle)
    assert found.at(np.nextafter(1.0, 0.0)) == pytest.approx(high)


@pytest.mark.parametrize("kind", ["int", "log_int", "choice"])
def test_every_value_of_a_range_is_drawn(kind: str) -> None:
    bounds = ("a", "b", "c") if kind == "choice" else (2, 4)
    values = Range(kind, bounds)
    drawn = [values.at(share) for share in np.linspace(0, 1, 1000, endpoint=False)]
    numbers = {value: drawn.count(value) for value in drawn}
    assert len(numbers) == 3
    if kind != "log_int":
        assert max(numbers.values()) - min(numbers.values()) <= 1
    else:  # as wide as log(n + 1) - log(n)
        assert numbers[2] == pytest.approx(1000 * np.log(3 / 2) / np.log(5 / 2), abs=1)


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ([3, 1], [3, 1]),
        ({"uniform": [0.1, 0.5], "num": 5}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"log": [0.01, 1], "num": 3}, [0.01, 0.1, 1.0]),
        ({"int": [2, 5]}, [2, 3, 4, 5]),
        ({"int": [0, 100], "num": 3}, [0, 50, 100]),
        ({"log_int": [64, 1024], "num": 5}, [64, 128, 256, 512, 1024]),
    ],
)
def test_grids_are_even(table: Any, values: list[Any]) -> None:
    found = parse_values(table)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"uniform": [2.0, 0.5]}, "the range is empty: 2.0 is not below 0.5"),
        ({"uniform": [1.0, 1.0]}, "the range is empty"),
        ({"log": [0, 5]}, "log needs a lowest value above 0, got 0"),
        ({"int": [0.5, 2]}, "int should have two whole numbers"),
        ({"int": [True, 2]}, "int should have two whole numbers"),
        ({"uniform": [1]}, "should have two numbers"),
        ({"uniform": [0, float("inf")]}, "should have two numbers"),
        ({"unifrom": [0, 1]}, "unknown range 'unifrom'; did you mean 'uniform'?"),
        ({"choice": []}, "should be a list of values, not empty"),
        ({"choice": [1, 2, 1]}, "1 stands twice; remove one"),
        ([0, 1], "should be a range such as"),
        ({"int": [0, 1], "log": [1, 2]}, "should be a range such as"),
    ],
)
def test_bad_ranges(table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_range(table)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "should be a list of values, not empty"),
        (5, "should be a list of values, not empty, got 5"),
        ([{"a": 1}, {"a": 1}], "{'a': 1} stands twice"),
        ({"uniform": [0, 1]}, "num should say how many values"),
        ({"uniform": [0, 1], "num": 1}, "num should say how many values, at least 2"),
        ({"int": [1, 3], "num": 4}, "1 to 3 has no 4 different values"),
        ({"choice": [1, 2], "num": 2}, "choice is a plain list here"),
    ],
)
def test_bad_grids(table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_values(table)
