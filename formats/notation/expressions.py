"""Sizes as small expressions over ``config.json``, in a safe subset of Python.

``"head_dim or hidden_size / num_attention_heads"``: names are looked up by the caller, ``/`` must divide exactly, and
arithmetic with ``None`` (an unknown name) is ``None``. Nothing is executed: the syntax tree is walked. Time and memory
are bounded by an expression's length: arithmetic is of numbers (and ``+`` of short lists), and every number that arises
must be a possible size.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

from reshard.formats.documents import LARGEST, READERS, WRITERS, notation
from reshard.formats.errors import NotationError, brief

Lookup = Callable[[str], Any]

LONGEST = 2000
"""Characters of an expression; the longest of a built-in architecture has 200."""
MOST_ITEMS = 10_000
"""Items of a list that is joined from others (settings of each layer)."""
DEEPEST = 50
"""Levels of an expression's syntax tree."""


_CALLS: dict[str, Callable[..., Any]] = {
    "int": lambda value: None if value is None else int(value),
    "len": len,
    "max": max,
    "min": min,
    # a division that need not be exact: of a program's settings, and of no size
    "ratio": lambda one, other: None if one is None or other is None else _number(one) / _number(other),
    "sum": lambda values: sum(map(_number, values)),
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


@dataclass(frozen=True)
class Expression:
    """An expression that has been read; ``names`` are the names it looks up."""

    text: str
    names: frozenset[str] = field(compare=False)
    _tree: ast.expr = field(repr=False, compare=False)

    def evaluate(self, lookup: Lookup) -> Any:
        """The value, with ``lookup(name)`` for names. Raises NotationError that shows the expression."""
        try:
            return _evaluate(self._tree, lookup)
        except NotationError as error:
            raise NotationError(f"'{self.text}': {error.message}", error.hint) from None
        except (TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
            raise NotationError(f"'{self.text}' cannot be evaluated: {error}") from None


@lru_cache(maxsize=4096)
def read_expression(text: str) -> Expression:
    """Read an expression. Raises NotationError for anything outside the subset, and for one that is too long or too
    deep.
    """
    if len(text) > LONGEST:
        raise NotationError(f"'{text}': an expression has at most {LONGEST:,} characters, this has {len(text):,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two are the parser's own for deep nesting
        raise NotationError(f"'{text}' is not an expression") from None
    nodes = _nodes(tree, text)
    names = frozenset(node.id for node in nodes if isinstance(node, ast.Name)) - _CALLS.keys()
    for node in nodes:
        if not isinstance(node, _ALLOWED) or (isinstance(node, ast.Constant) and not isinstance(node.value, _VALUES)):
            raise NotationError(f"'{text}': '{ast.unparse(node)}' is not allowed in a size expression")
    return Expression(text, names, tree)


READERS[Expression] = notation(read_expression, "an expression", (str, int, float))
WRITERS[Expression] = attrgetter("text")

_ALLOWED = (
    ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.List, ast.Tuple, ast.Load, ast.Call, ast.BinOp,
    ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip

_VALUES = (str, int, float, type(None))


def _nodes(tree: ast.AST, text: str) -> list[ast.AST]:
    """All nodes of a tree that is not too deep."""
    nodes, level = [tree], [tree]
    for _ in range(DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return nodes
        nodes += level
    raise NotationError(f"'{text}' is nested more than {DEEPEST} levels deep")


def _evaluate(node: ast.expr, lookup: Lookup) -> Any:
    """Walk the tree: one case a kind of node."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return lookup(node.id)
        case ast.List() | ast.Tuple():
            return [_evaluate(item, lookup) for item in node.elts]
        case ast.IfExp():
            return _evaluate(node.body if _evaluate(node.test, lookup) else node.orelse, lookup)
        case ast.BoolOp():
            value: Any = None
            for part in node.values:
                value = _evaluate(part, lookup)
                if bool(value) is isinstance(node.op, ast.Or):
                    break
            return value
        case ast.UnaryOp(op=ast.Not()):
            return not _evaluate(node.operand, lookup)
        case ast.UnaryOp(op=ast.USub()):
            value = _evaluate(node.operand, lookup)
            return None if value is None else -_number(value)
        case ast.BinOp():
            return _binary(node.op, _evaluate(node.left, lookup), _evaluate(node.right, lookup))
        case ast.Compare():
            value = _evaluate(node.left, lookup)
            for op, comparator in zip(node.ops, node.comparators, strict=True):
                other = _evaluate(comparator, lookup)
                if value is None and isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
                    return False
                if not _COMPARISONS[type(op)](value, other):
                    return False
                value = other
            return True
        case ast.Attribute():
            value = _evaluate(node.value, lookup)
            return None if value is None else value.get(node.attr)
        case ast.Subscript():
            value, index = _evaluate(node.value, lookup), _evaluate(node.slice, lookup)
            if value is None or index is None:  # of no layer: a size that differs from layer to layer is not known
                return None
            # JSON's keys are strings, and an index is a number.
            return value.get(index, value.get(str(index))) if isinstance(value, dict) else value[index]
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _CALLS:
            return _bounded(_CALLS[name](*(_evaluate(argument, lookup) for argument in node.args)))
    raise NotationError(f"'{ast.unparse(node)}' is not allowed in a size expression")


def _binary(op: ast.operator, a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    if isinstance(op, ast.Add) and isinstance(a, list) and isinstance(b, list):
        if len(a) + len(b) > MOST_ITEMS:
            raise NotationError(f"a list of {len(a) + len(b):,} items is longer than {MOST_ITEMS:,}")
        return a + b
    a, b = _number(a), _number(b)
    if isinstance(op, ast.Div):
        if a % b:
            raise NotationError(f"{a} / {b} is not a whole number")
        return a // b
    if type(op) not in _ARITHMETIC:
        raise NotationError(f"the operator {type(op).__name__} is not allowed in a size expression")
    return _bounded(_ARITHMETIC[type(op)](a, b))


def _number(value: Any) -> int | float:
    """Returns a number. Texts and lists are refused: ``"a" * 10**9`` would exhaust memory."""
    if not isinstance(value, (int, float)):
        raise NotationError(f"{brief(value)} is not a number")
    _bounded(value)
    return value


def _bounded(value: Any) -> Any:
    """The same value, unless it is a number that no size can be."""
    if isinstance(value, (int, float)) and not -LARGEST <= value <= LARGEST:
        size = f"{value:g}" if isinstance(value, float) else f"a number of {value.bit_length()} bits"
        raise NotationError(f"{size} is more than a size can be")
    return value
