"""The size of the product, and its limits: ``make check`` fails above the numbers of ``CEILING``.

    python -m tools.size

Lines that hold code are counted: neither blank lines nor comments nor docstrings. A feature that needs more lines
raises its number in the same change, and says why; all other changes may only lower it.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Size(NamedTuple):
    """Numbers of a package."""

    files: int
    lines: int
    functions: int
    classes: int


CEILING = {
    "formats": Size(48, 7163, 739, 109),
    "reshard": Size(148, 19343, 1683, 237),
    "verify": Size(60, 6582, 601, 92),
}

_NOT_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def size_of(text: str) -> Size:
    """The size of one file."""
    nodes = [*ast.walk(ast.parse(text))]
    docs = {
        line
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = (token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _NOT_CODE)
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    return Size(1, len(lines - docs), functions, sum(isinstance(node, ast.ClassDef) for node in nodes))


def main() -> int:
    """Print the sizes; 1 if one is above its ceiling."""
    above = False
    for package, ceiling in CEILING.items():
        sizes = [size_of(file.read_text()) for file in sorted((ROOT / package).rglob("*.py"))]
        for what, number, most in zip(Size._fields, map(sum, zip(*sizes, strict=True)), ceiling, strict=True):
            above |= number > most
            print(f"{package:8} {what:10} {number:6,} of {most:6,}{'  TOO MANY' if number > most else ''}")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
