"""Which module may import which: docs/explanation/design.md draws it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"reshard": "reshard", "reshard.formats": "formats", "reshard.verify": "verify"}
"""The folder of each."""
FILES = {
    ".".join((package, *file.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__"): file
    for package, folder in PACKAGES.items()
    for file in (ROOT / folder).rglob("*.py")  # it follows no links
}
COMMAND_LINES = ("reshard.live.cli", "reshard.profile.cli", "reshard.verify.cli")
"""Those of rooms that ``reshard.cli`` names in its table, and imports when they are asked for."""
STARTS = ("__main__", "reshard")
OWN = "reshard but reshard.formats but reshard.verify"
NEVER = [
    ("reshard.formats", "reshard but reshard.formats"),
    (f"reshard but reshard.cli{''.join(f' but {each}' for each in COMMAND_LINES)}", "reshard.cli"),
    ("reshard but reshard.verify but reshard.profile but reshard.live", "reshard.verify"),
    ("reshard.live", "reshard.verify but reshard.verify.loader but reshard.verify.ending"),
    ("reshard but reshard.live", "reshard.live"),
    ("reshard but reshard.profile", "reshard.profile"),
    *((f"reshard.{room}", "reshard.text") for room in ("model", "mesh", "placement", "source", "move", "publishing")),
    ("reshard.verify", "reshard.api"),
    ("reshard.verify", "reshard.commands but reshard.commands.fields"),
    ("reshard.verify.rank", "reshard.verify but reshard.verify.rank"),
    ("reshard.verify.loader but reshard.verify.loader.ask", "reshard but reshard.verify.loader"),
]
"""No module of the first names one of the second, at its top or in a function. ``__main__`` modules start the rest, and
``reshard`` itself has the names of what it offers."""
UNREACHED = [
    ("reshard.verify.bytes", "reshard.move"),
    ("reshard.verify.bytes", "reshard.writing"),
    ("reshard.writing", "torch"),
    ("reshard.api", "torch"),
    ("reshard.cli", "torch"),
    ("reshard.cli but reshard.cli.demo", "numpy"),
    *((each, name) for each in COMMAND_LINES for name in ("torch", "numpy")),
    ("reshard.verify.bytes", "torch"),
    ("reshard.verify.api", "torch"),
    ("reshard.profile.api", "torch"),
    ("reshard.live.routing", "torch"),
    ("reshard.verify", "reshard.live"),
    ("reshard.verify.loader.ask", "torch"),
    ("reshard.verify.loader", "reshard.placement"),
    ("reshard.verify.loader", "reshard.mesh"),
    ("reshard.verify.loader", "reshard.formats.notation"),
]
"""Importing a module of the first never imports the second, directly or through others."""


def imports(tree: ast.AST, *, at_the_top: bool) -> Iterator[str]:
    """The names of the modules that a module imports: all, or those that importing it imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "an import relative to the package"
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in FILES)
            yield str(node.module)
        elif not at_the_top or not isinstance(node, ast.FunctionDef | ast.If):  # what is for types alone is under an if
            yield from imports(node, at_the_top=at_the_top)


@cache
def imported(module: str, *, at_the_top: bool = False) -> frozenset[str]:
    return frozenset(imports(ast.parse(FILES[module].read_text()), at_the_top=at_the_top))


def lies_in(module: str, package: str) -> bool:
    inner, *left_out = package.split(" but ")
    return f"{module}.".startswith(f"{inner}.") and not any(lies_in(module, each) for each in left_out)


def modules_of(package: str) -> list[str]:
    found = [module for module in FILES if lies_in(module, package) and module.rpartition(".")[2] not in STARTS]
    assert found, package
    return found


@pytest.mark.parametrize(("package", "other"), NEVER)
def test_never(package: str, other: str) -> None:
    found = {(module, name) for module in modules_of(package) for name in imported(module) if lies_in(name, other)}
    assert not found


@pytest.mark.parametrize(("package", "other"), UNREACHED)
def test_unreached(package: str, other: str) -> None:
    way = {module: module for module in modules_of(package)}
    new = [*way]
    while new:
        module = new.pop()
        for name in imported(module, at_the_top=True):
            assert not lies_in(name, other), f"{way[module]} -> {name}"
            if name in FILES and name not in way:
                way[name] = f"{way[module]} -> {name}"
                new.append(name)


def room(module: str) -> str:
    """The folder that a module lies in, or the module itself if that is a package's own folder."""
    inner = module.rpartition(".")[0]
    return module if inner in PACKAGES else inner


@pytest.mark.parametrize("package", ["reshard.formats", OWN, "reshard.verify"])
def test_no_rooms_import_each_other(package: str) -> None:
    """Were they to, neither could be read, or replaced, without the other."""
    graph: dict[str, set[str]] = {}
    for module in modules_of(package):
        names = {name for name in imported(module) if name in FILES and name not in PACKAGES}
        graph.setdefault(room(module), set()).update({room(name) for name in names} - {room(module)})
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the rooms


ORDER = [
    "profile",
    "live",
    "cli",
    "commands",
    "delta",
    "transforms",
    "writing",
    "move",
    "source",
    "publishing",
    "placement",
    "mesh",
    "model",
    "store",
]
"""The rooms of reshard as docs/explanation/design.md draws them, from the top."""


@pytest.mark.parametrize("name", ORDER)
def test_no_room_imports_one_above_it(name: str) -> None:
    above = {f"reshard.{each}" for each in ORDER[: ORDER.index(name)]}
    names = {(module, room(found)) for module in modules_of(f"reshard.{name}") for found in imported(module)}
    assert not {(module, found) for module, found in names if found in above}


@pytest.mark.parametrize("package", ["reshard.formats", OWN, "reshard.verify"])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    graph = {module: {name for name in imported(module) if name in FILES} - {module} for module in modules_of(package)}
    assert len([*graphlib.TopologicalSorter(graph).static_order()]) > 20


@pytest.mark.parametrize("package", ["reshard.formats", OWN, "reshard.verify"])
def test_a_name_stands_for_one_thing(package: str) -> None:
    """No class or alias of a type has the name of another in its package."""
    where: dict[str, str] = {}
    for module in modules_of(package):
        for node in ast.parse(FILES[module].read_text()).body:
            is_alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp)
            name = (
                node.name if isinstance(node, ast.ClassDef) else getattr(node.targets[0], "id", "") if is_alias else ""
            )
            if (plain := name.lstrip("_")) and plain[0].isupper() and not plain.isupper():
                assert plain not in where, f"{plain} is in {where[plain]} and in {module}"
                where[plain] = module
