"""Mutants of a Python module, made mechanically from its syntax tree.

Each mutant is the module with one small change: a comparison, sign, operator, mask, bound, constant or condition
turned into its nearest wrong neighbour, or a term dropped. Docstrings, annotations, and what only words an error
(`raise` statements) are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
# Functions and methods that bound or choose, and what they become.
RENAMED = {
    "minimum": "maximum",
    "maximum": "minimum",
    "min": "max",
    "max": "min",
    "amax": "amin",
    "cumsum": "cumprod",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "expm1": "exp",
    "exp": "expm1",
    "log1p": "log",
    "ge": "gt",
    "gt": "ge",
    "le": "lt",
    "lt": "le",
    "any": "all",
    "all": "any",
}
# Methods that can be left out: x.abs() becomes x.
DROPPED = {"abs", "clamp", "clamp_min", "clamp_max", "neg", "square", "flip", "masked_fill", "nan_to_num"}
KEYWORDS = {"min": "max", "max": "min"}


@dataclass(frozen=True)
class Mutant:
    """One change: what kind, where, from what to what; `source` is the whole changed module."""

    module: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    occurrence: int
    source: str

    @property
    def key(self) -> str:
        """A name that survives edits elsewhere in the module."""
        return f"{self.module}:{self.function}:{self.kind}:{self.before} -> {self.after}#{self.occurrence}"


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(kind, replacement) for every mechanical change of one node."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        changed = copy.deepcopy(node)
        changed.ops[0] = COMPARISONS[type(node.ops[0])]()
        yield "comparison", changed
        turned = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}.get(type(node.ops[0]))
        if turned is not None:
            changed = copy.deepcopy(node)
            changed.ops[0] = turned()
            yield "comparison", changed
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        changed = copy.deepcopy(node)
        changed.op = OPERATORS[type(node.op)]()
        yield "mask" if isinstance(node.op, (ast.BitAnd, ast.BitOr)) else "operator", changed
        yield "dropped term", copy.deepcopy(node.left)
        if not isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv)):
            yield "dropped term", copy.deepcopy(node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "sign", copy.deepcopy(node.operand)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.Not)):
        yield "mask", copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", ast.Constant(node.value + 1)
        if node.value > 0:
            yield "off by one", ast.Constant(node.value - 1)
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        yield "constant", ast.Constant(node.value * 2.0 if node.value else 1.0)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "condition", ast.Constant(not node.value)
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "condition", changed
        yield "condition", copy.deepcopy(node.values[0])
    elif isinstance(node, ast.Call):
        yield from _call_variants(node)
    elif isinstance(node, ast.IfExp):
        changed = copy.deepcopy(node)
        changed.body, changed.orelse = changed.orelse, changed.body
        yield "condition", changed
    elif isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, ast.Compare):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield "condition", changed
    elif (
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) and (node.slice.lower or node.slice.upper)
    ):
        changed = copy.deepcopy(node)
        changed.slice = ast.Slice()
        yield "off by one", changed
    elif isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        changed = copy.deepcopy(node)
        changed.op = OPERATORS[type(node.op)]()
        yield "sign", changed


def _call_variants(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in RENAMED:
        changed = copy.deepcopy(node)
        if isinstance(changed.func, ast.Attribute):
            changed.func.attr = RENAMED[name]
        else:
            assert isinstance(changed.func, ast.Name)
            changed.func.id = RENAMED[name]
        yield "bound", changed
    is_method = isinstance(node.func, ast.Attribute) and not (
        isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
    )
    if name in DROPPED and is_method:
        assert isinstance(node.func, ast.Attribute)
        yield "bound", copy.deepcopy(node.func.value)
    if name == "clamp" and not is_method and node.args:
        yield "bound", copy.deepcopy(node.args[0])
    if name == "where" and len(node.args) == 3:
        changed = copy.deepcopy(node)
        changed.args[1], changed.args[2] = changed.args[2], changed.args[1]
        yield "mask", changed
        yield "mask", copy.deepcopy(node.args[1])
        yield "mask", copy.deepcopy(node.args[2])
    for i, keyword in enumerate(node.keywords):
        if keyword.arg in KEYWORDS:
            changed = copy.deepcopy(node)
            changed.keywords[i].arg = KEYWORDS[keyword.arg]
            yield "bound", changed


class _Places(ast.NodeVisitor):
    """Collects every node that may change, with the function it stands in."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.AST]] = []
        self.scope: list[str] = []

    def generic_visit(self, node: ast.AST) -> None:
        if self.scope:
            self.found.append((".".join(self.scope), node))
        super().generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.scope.append(node.name)
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
            self.visit(default)
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        for statement in body:
            self.visit(statement)
        self.scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.scope.append(node.name)
        for statement in node.body:
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                self.visit(statement)
        self.scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """An error's words are no arithmetic."""

    def visit_Assign(self, node: ast.Assign) -> None:
        # Module-level constants have no scope, and matter as much as what uses them.
        if not self.scope and isinstance(node.value, ast.Constant):
            self.found.append(("<module>", node.value))
        self.generic_visit(node)


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, replacement: ast.AST) -> None:
        self.target, self.replacement = target, replacement

    def visit(self, node: ast.AST) -> ast.AST:
        if node is self.target:
            return ast.copy_location(self.replacement, node)
        return self.generic_visit(node)


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Every mutant of a module's source, in the order of its lines."""
    places = _Places()
    tree = ast.parse(source)
    places.visit(tree)
    parents = _surroundings(tree)
    seen: dict[tuple[str, str, str, str], int] = {}
    out = []
    for function, node in places.found:
        for kind, replacement in _variants(node):
            # A bare number says nothing: such a change is told by the expression around it.
            told = parents[node] if isinstance(node, ast.Constant) and node in parents else None
            before = _text(told or node)
            # The tree is shared by all mutants: put the change in, write it out, take it back.
            changed = _Replace(node, replacement).visit(tree)
            text = ast.unparse(ast.fix_missing_locations(changed))
            after = _text(told or replacement)
            _Replace(replacement, node).visit(tree)
            label = (function, kind, before, after)
            seen[label] = seen.get(label, 0) + 1
            if after != before:
                line = getattr(node, "lineno", 0)
                out.append(Mutant(module, function, line, kind, before, after, seen[label], text))
    return out


def _surroundings(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    """For each number the expression it stands in, past the slices, tuples and signs right around it."""
    above = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    out: dict[ast.AST, ast.AST] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            parent = above.get(node)
            while isinstance(parent, (ast.Slice, ast.Tuple, ast.UnaryOp, ast.keyword)):
                parent = above.get(parent)
            if isinstance(parent, ast.expr):
                out[node] = parent
    return out


def _text(node: ast.AST) -> str:
    if isinstance(node, (ast.If, ast.While)):
        return f"{type(node).__name__.lower()} {ast.unparse(node.test)}"
    return ast.unparse(node)
