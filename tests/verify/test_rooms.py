"""The rooms of ``verify``: imports go one way, and none in a circle."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imports() -> dict[str, set[str]]:
    """The modules of verify that each of them imports, anywhere in it."""
    files = {".".join(f.relative_to(ROOT).with_suffix("").parts): f for f in (ROOT / "verify").rglob("*.py")}
    nodes = {name: ast.walk(ast.parse(file.read_text())) for name, file in files.items()}
    found = {
        name: {n.module for n in each if isinstance(n, ast.ImportFrom) and n.module} for name, each in nodes.items()
    }
    return {name: modules & files.keys() for name, modules in found.items()}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert len([*TopologicalSorter(imports()).static_order()]) > 20


def test_a_rank_knows_nothing_of_who_runs_it() -> None:
    for name, modules in imports().items():
        if name.startswith("verify.rank."):
            assert not {module for module in modules if not module.startswith("verify.rank.")}, name
