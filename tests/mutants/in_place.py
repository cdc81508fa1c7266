"""Changed code for functions in memory: nothing is imported anew for a mutant."""

from __future__ import annotations

import ast
import builtins
import gc
from collections import defaultdict
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from tests.mutants.core import core_files
from tests.mutants.operators import blocks_of, mutated
from tests.shared import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.mutants.operators import Mutant

_HIT = "__block_hit__"


class Functions:
    """All functions of the core that are in memory."""

    def __init__(self) -> None:
        core = {str(path) for path in core_files()}
        self._found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
        gc.unfreeze()
        for each in gc.get_objects():
            if type(each) is FunctionType and each.__code__.co_filename in core:
                self._found[_key(each.__code__)].append(each)
        gc.freeze()

    def mutate(self, mutant: Mutant) -> None:
        """Give the functions of a module the code that has one fault."""
        path = ROOT / mutant.path
        self._replace(mutated(path.read_text(encoding="utf-8"), mutant.number), path)

    def probe(self, hits: set[str]) -> None:
        """Have each block of statements say, in `hits`, that it was run."""
        setattr(builtins, _HIT, hits.add)
        for path in core_files():
            shown = str(path.relative_to(ROOT))
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name, statements in list(blocks_of(tree)):
                told = ast.Constant(f"{shown}:{name}")
                call = ast.Expr(ast.Call(ast.Name(_HIT, ast.Load()), [told], []))
                ast.copy_location(call, statements[0])
                statements.insert(0, ast.fix_missing_locations(call))
            self._replace(tree, path)

    def _replace(self, tree: ast.Module, path: Path) -> None:
        for code in _codes(compile(tree, str(path), "exec", dont_inherit=True)):
            for function in self._found.get(_key(code), ()):
                function.__code__ = code


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)
