"""Small faults in a module: what they change, and the module with one of them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault in a module."""

    path: str
    number: int
    """Its place among the faults that the module can have."""
    line: int
    block: str
    """The block of statements that it is in, as `blocks_of` calls it."""
    what: str

    @property
    def name(self) -> str:
        """Return a name that holds while other functions change."""
        return f"{self.path}:{self.block.partition('#')[0]}: {self.what}"


def mutants_of(path: Path, shown: str) -> list[Mutant]:
    """Return all faults that a module can have."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        Mutant(shown, number, getattr(node, "lineno", 0), block, what)
        for number, (block, (node, what, _)) in enumerate(_faults(tree))
    ]


def mutated(source: str, number: int) -> ast.Module:
    """Return a module with one of its faults."""
    tree = ast.parse(source)
    for place, (_, (_, _, change)) in enumerate(_faults(tree)):
        if place == number:
            change()
            return ast.fix_missing_locations(tree)
    raise ValueError(f"there is no fault {number}")


_Fault = tuple[ast.AST, str, "Callable[[], None]"]


def _faults(tree: ast.Module) -> Iterator[tuple[str, _Fault]]:
    """Yield faults in functions: messages of errors, checks and types are left out."""
    for name, statements in blocks_of(tree):
        for index, statement in enumerate(statements):
            for fault in _of_statement(statements, index, statement):
                yield name, fault
            for node in _expressions(statement):
                for fault in _of_expression(node):
                    yield name, fault


def blocks_of(tree: ast.AST) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Yield blocks of statements, with names such as ``Class.method#2``."""
    for function, node in _functions(tree):
        for index, statements in enumerate(_blocks(node)):
            yield f"{function}#{index}", statements


def _functions(
    tree: ast.AST, within: str = ""
) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            name = f"{within}.{node.name}" if within else node.name
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(
            ("check", "_check", "__repr__", "describe")
        ):
            yield name, node
        yield from _functions(node, name)


def _blocks(function: ast.FunctionDef) -> Iterator[list[ast.stmt]]:
    """Yield lists of statements, those of functions inside left to themselves."""
    pending: list[ast.AST] = [function]
    while pending:
        node = pending.pop()
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if not isinstance(statements, list) or not statements:
                continue
            yield statements
            pending += [
                each
                for each in statements
                if not isinstance(each, ast.FunctionDef | ast.ClassDef)
            ]
        pending += [*getattr(node, "handlers", []), *getattr(node, "cases", [])]


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield what a statement computes itself, in order; not what it holds."""
    if isinstance(statement, ast.Raise | ast.Assert | ast.FunctionDef | ast.ClassDef):
        return
    pending: list[ast.AST] = []
    for name, value in ast.iter_fields(statement):
        if name in ("body", "orelse", "finalbody", "handlers", "annotation"):
            continue
        parts = value if isinstance(value, list) else [value]
        pending += [each for each in parts if isinstance(each, ast.AST)]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.JoinedStr):
            continue
        yield node
        pending += ast.iter_child_nodes(node)


def _of_statement(
    statements: list[ast.stmt], index: int, statement: ast.stmt
) -> Iterator[_Fault]:
    def drop() -> None:
        if isinstance(statement, ast.Break | ast.Continue):
            statements[index] = ast.Pass()
        else:  # what it names stays known, so that closures keep their cells
            statements[index] = ast.If(ast.Constant(False), [statement], [])

    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    is_change = isinstance(statement, ast.AugAssign)
    is_kept = isinstance(statement, ast.Assign) and isinstance(
        statement.targets[0], ast.Attribute | ast.Subscript
    )
    is_taken = isinstance(statement, ast.Delete) and not isinstance(
        statement.targets[0], ast.Name
    )
    if is_call or is_change or is_kept or is_taken:
        yield statement, f"without `{ast.unparse(statement)}`", drop
    if isinstance(statement, ast.AugAssign) and type(statement.op) in _COMPUTED:
        yield _swapped(statement, "op", _COMPUTED[type(statement.op)])
    value = statement.value if isinstance(statement, ast.Return) else None
    if isinstance(statement, ast.Return) and value and not _is_none(value):

        def return_none() -> None:
            statement.value = ast.IfExp(ast.Constant(True), ast.Constant(None), value)

        yield statement, f"`{ast.unparse(statement)}` returns None", return_none
    if isinstance(statement, ast.Break | ast.Continue):
        yield statement, f"without `{ast.unparse(statement)}`", drop


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def _of_expression(node: ast.AST) -> Iterator[_Fault]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        other = _COMPARED[type(node.ops[0])]

        def compare() -> None:
            node.ops[0] = other()

        yield node, f"`{ast.unparse(node)}` by {other.__name__}", compare
    if isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        yield _swapped(node, "op", _COMPUTED[type(node.op)])
    if isinstance(node, ast.BoolOp):
        yield _swapped(node, "op", ast.Or if isinstance(node.op, ast.And) else ast.And)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):

        def affirm() -> None:
            node.op = ast.Not()
            node.operand = ast.UnaryOp(ast.Not(), node.operand)

        yield node, f"`{ast.unparse(node)}` without not", affirm
    if isinstance(node, ast.Constant) and isinstance(node.value, int):

        def change() -> None:
            value: Any = node.value
            node.value = not value if isinstance(value, bool) else value + 1

        yield node, f"`{node.value}` changed", change


def _swapped(node: Any, field: str, other: type) -> _Fault:
    def swap() -> None:
        setattr(node, field, other())

    return node, f"`{ast.unparse(node)}` by {other.__name__}", swap
