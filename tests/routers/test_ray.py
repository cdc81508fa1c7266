"""Our router of Ray's kind beside Ray's own tree and choice, where Ray is installed.

The sources of the installed release are run without Ray itself: its tree as it is, and
the two methods of its router that choose.
"""

from __future__ import annotations

import ast
import logging
import random
from collections.abc import Callable
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sim.fleet.routers.ray_prefix import RayPrefix
from tests.sim.fleet.test_routers import request

Method = Callable[..., Any]
_ROUTER = "llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py"
_TREE = "llm/_internal/serve/routing_policies/prefix_aware/prefix_tree.py"
_BASE = "serve/_private/request_router/request_router.py"


def sources() -> Path:
    spec = find_spec("ray")
    if spec is None or spec.origin is None:
        pytest.skip("Ray is not installed: pip install ray==2.60.0")
    root = Path(spec.origin).parent
    if not (root / _TREE).exists():
        pytest.skip("this release of Ray has no prefix tree: pip install ray==2.60.0")
    return root


def run_source(path: Path, names: dict[str, Any]) -> dict[str, Any]:
    """Run a file of Ray's without what it imports of Ray."""
    tree = ast.parse(path.read_text())
    tree.body = [each for each in tree.body if not _imports_ray(each)]
    exec(compile(tree, str(path), "exec"), names)
    return names


def _imports_ray(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return any(each.name.split(".")[0] == "ray" for each in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ray")


def method(path: Path, name: str, names: dict[str, Any]) -> Method:
    """Cut a method out of the file, without its annotations."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AsyncFunctionDef) and node.name == name:
            node.returns = None
            for each in node.args.args:
                each.annotation = None
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
            found: Method = names[name]
            return found
    raise AssertionError(f"{path} has no {name}")


def finished(coroutine: Any) -> Any:
    """Return what a coroutine that waits for nothing returns."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


class Real:
    """Ray's choice for replicas whose queues are those of `loads`."""

    def __init__(self, num_replicas: int, imbalanced: float, rate: float) -> None:
        root = sources()
        ray = SimpleNamespace(remote=lambda each: each, get=lambda each: each)
        names = {"__name__": "real", "ray": ray, "SERVE_LOGGER_NAME": "ray.serve"}
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self.tree: Any = run_source(root / _TREE, names)["PrefixTree"]()
        self.ids = [str(place) for place in range(num_replicas)]
        self.tree.add_tenants(self.ids, 0.0)
        self.loads = [0] * num_replicas
        names |= {
            "math": SimpleNamespace(inf=inf),
            "ReplicaID": SimpleNamespace(from_full_id_str=lambda each: each),
        }
        self._match = method(root / _ROUTER, "_prefix_match_best_replicas", names)
        self._select = method(root / _BASE, "_select_from_candidate_replicas", names)
        replicas = {each: _replica(each) for each in self.ids}
        self._self = SimpleNamespace(
            _extract_text_from_request=lambda pending: pending.args[0],
            _use_replica_queue_len_cache=True,
            _replica_queue_len_cache=SimpleNamespace(
                get=lambda each: self.loads[int(each)]
            ),
            _imbalanced_threshold=imbalanced,
            _match_rate_threshold=rate,
            _replicas=replicas,
            _tree_actor=SimpleNamespace(
                prefix_match=SimpleNamespace(remote=self.tree.prefix_match),
                get_smallest_tenants=SimpleNamespace(
                    remote=self.tree.get_smallest_tenants
                ),
            ),
        )

    def choose(self, text: str) -> int | None:
        """Return the replica of a prompt; None where two that are drawn decide."""
        pending = SimpleNamespace(args=[text])
        every = list(self._self._replicas.values())
        [replicas] = finished(self._match(self._self, pending, every))
        if not replicas:
            return None
        chosen = finished(self._select(self._self, replicas, 0))
        return int(str(chosen.replica_id.name))


class _Id(str):
    """A replica's identity, which is its name in full."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return str(self)

    def to_full_id_str(self) -> str:
        return str(self)


def _replica(name: str) -> SimpleNamespace:
    return SimpleNamespace(replica_id=_Id(name), max_ongoing_requests=10**9)


@pytest.mark.parametrize("seed", range(60))
def test_decisions_are_those_of_the_real_router(seed: int) -> None:
    """Sixty fleets, fifty requests each; some of them leave in between."""
    rng = random.Random(seed)
    num_engines = rng.choice([1, 2, 3, 5, 8])
    imbalanced, rate = rng.choice([inf, inf, 1, 3]), rng.choice([0.1, 0.1, 0.5, 0.0])
    real = Real(num_engines, imbalanced, rate)
    ours = RayPrefix(
        num_engines,
        np.random.default_rng(seed),
        imbalanced_threshold=imbalanced,
        match_rate_threshold=rate,
    )
    heads = ["".join(rng.choices("ab", k=rng.randint(1, 12))) for _ in range(4)]
    here: list[tuple[int, int]] = []
    num_by_prefix = 0
    for number in range(50):
        head, tail = rng.choice(heads), "".join(rng.choices("abc", k=rng.randint(1, 9)))
        text = head[: rng.randint(1, len(head))] + tail
        real.loads = list(ours.num_in_flight)
        theirs = real.choose(text)
        sent = request(number, *((ord(each), 1) for each in text))
        place = ours.choose(sent)
        assert theirs in (place, None), (number, text)
        num_by_prefix += theirs is not None
        real.tree.insert(text, str(place), float(number + 1))
        assert real.tree.tenant_to_char_count == {
            str(each): ours.tree.num_tokens.get(each, 0) for each in range(num_engines)
        }
        here.append((number, place))
        if rng.random() < 0.4:
            left, where = here.pop(rng.randrange(len(here)))
            ours.ended(request(left), where)
    assert num_by_prefix > 10 or imbalanced < inf
