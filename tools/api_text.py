"""The Python API in Markdown: functions with their own arguments, groups of arguments that several take, results."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from inspect import Parameter, cleandoc
from itertools import pairwise
from typing import Any, NamedTuple

import reshard
import reshard.live
from reshard.commands.inspect import Report
from reshard.commands.load import Slice
from reshard.commands.plan import PlanAnswer
from reshard.delta.differences import Diff
from reshard.profile.words import Profile
from reshard.verify.report.answer import Answer
from reshard.writing.summary import Summary

RESULTS: tuple[type, ...] = (Diff, Report, PlanAnswer, Profile, Summary, Answer, Slice)


class Argument(NamedTuple):
    """An argument of a function, as a signature has it, and what ``help`` says of it."""

    shown: str
    said: str


def api_text() -> str:
    """All functions with the arguments of their own, then each group of arguments that several take, and results."""
    functions = [each for name in reshard.__all__ if inspect.isfunction(each := getattr(reshard, name))]
    owners = {_request(call): call for call in reversed(functions)}  # of two with one request, the first
    taken = dict.fromkeys(kind for call in functions for kind in _kinds(_request(call)))
    results = [kind for call in functions if (kind := _result(call)) is not None]
    parts = [
        *(_function(call, owners) for call in functions),
        "## Groups of arguments\n",
        *(_group(kind, functions) for kind in taken if kind not in owners),
        "## What they return\n",
        *map(_result_class, dict.fromkeys(results)),
    ]
    return "\n".join(parts)


def live_text() -> str:
    """Return the text on ``reshard.live``, in the order in which one uses its names."""
    parts = []
    for name in reshard.live.__all__:
        thing = getattr(reshard.live, name)
        shape = "" if isinstance(thing, type) else f"\n```\nreshard.live.{name}{_plain(thing)}\n```\n"
        lines = "\n".join(["", *_field_lines(thing), ""]) if is_dataclass(thing) and isinstance(thing, type) else ""
        parts.append(f"### reshard.live.{name}\n{shape}\n{_text(thing)}\n{lines}")
    return "\n".join(parts)


def _plain(call: Callable[..., Any]) -> str:
    """A signature without the quotes of types."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(call)))


def _request(call: Callable[..., Any]) -> type:
    """The class of a function's request, whose fields are the function's arguments; ``object`` if it has none."""
    command = getattr(call, "__wrapped__", None)
    request = getattr(sys.modules[command.__module__], command.__annotations__["request"]) if command else object
    assert isinstance(request, type)
    return request


def _result(call: Callable[..., Any]) -> type | None:
    """The class of what a function returns, if it is one of ours."""
    *_, name = re.findall(r"\w+", str(inspect.signature(call).return_annotation))
    return next((kind for kind in RESULTS if kind.__name__ == name), None)


def _kinds(request: type) -> list[type]:
    """A request's class and those that it is made of, each with fields of its own."""
    return [kind for kind in request.__mro__ if is_dataclass(kind)]


def _arguments(call: Callable[..., Any]) -> dict[str, Argument]:
    """The arguments of a function, by name."""
    listed = re.findall(r"^    (\w+): .*\n        (.*)", call.__doc__ or "", re.MULTILINE)
    said = {name: re.sub(r"``([^`]*)``", r"`\1`", text) for name, text in listed}
    parameters = inspect.signature(call).parameters
    return {name: Argument(_shown(each), said.get(name, "")) for name, each in parameters.items()}


def _shown(parameter: Parameter) -> str:
    """``name: type = default``; what may be None is None by default."""
    default = "" if parameter.default in (Parameter.empty, None) else f" = {parameter.default!r}"
    return f"{parameter.name}: {parameter.annotation}{default}"


def _own(kind: type) -> list[str]:
    """The fields that a class adds or makes anew."""
    return [each.name for each in fields(kind) if each.name in vars(kind).get("__annotations__", ())]


def _function(call: Callable[..., Any], owners: dict[type, Callable[..., Any]]) -> str:
    request, arguments, result = _request(call), _arguments(call), _result(call)
    returned = inspect.signature(call).return_annotation
    needed = [each for each in inspect.signature(call).parameters.values() if each.default is Parameter.empty]
    places = [each.name for each in needed if each.kind is not Parameter.KEYWORD_ONLY]
    named = [each.name for each in needed if each.kind is Parameter.KEYWORD_ONLY]
    named += ["..."] if len(arguments) > len(needed) else []
    shape = f"reshard.{call.__name__}({', '.join([*places, *(['*', *named] if named else [])])}) -> {returned}"
    own = [*arguments]
    links = ""
    if request is not object:
        is_owner = owners[request] is call
        own = _own(request) if is_owner else []
        links = ", ".join(_link(kind, owners) for kind in _nearest(request, itself=not is_owner))
    text = [f"### reshard.{call.__name__}\n", f"```\n{shape}\n```\n", f"{_text(getattr(call, '__wrapped__', call))}\n"]
    text += [*(_line(arguments[name]) for name in own), ""] if own else []
    links = f"{'Also' if own else 'Takes'} {links}." if links else ""
    back = f"Returns [{result.__name__}](#{result.__name__.lower()})." if result else ""
    return "\n".join([*text, *([f"{links} {back}".strip() + "\n"] if links or back else [])])


def _nearest(request: type, *, itself: bool = False) -> list[type]:
    """The classes that a request is made of, without those that another of them is made of."""
    if itself:
        return [request]
    found: list[type] = []
    for kind in _kinds(request)[1:]:
        if not any(issubclass(other, kind) for other in found):
            found.append(kind)
    return found


def _link(kind: type, owners: dict[type, Callable[..., Any]]) -> str:
    if (owner := owners.get(kind)) is not None:
        return f"what [{owner.__name__}](#reshard{owner.__name__}) takes"
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def _group(kind: type, functions: list[Callable[..., Any]]) -> str:
    """A class of fields that several functions take: what is said of it, and each field."""
    lines = []
    for name in _own(kind):
        first = next(call for call in functions if name in _own_of(_request(call), kind))
        lines.append(_line(_arguments(first)[name]))
    intro = re.split(r"\n+``\w+``: ", cleandoc(kind.__doc__ or ""))[0]
    more = ", ".join(_link(each, {}) for each in _nearest(kind))
    lines += ["", f"Also {more}."] if more else []
    return f"### {kind.__name__}\n\n{_marked(intro)}\n\n" + "\n".join(lines) + "\n"


def _own_of(request: type, kind: type) -> list[str]:
    """The fields that a request has from one of its classes, and from no other before it."""
    kinds = _kinds(request)
    if kind not in kinds:
        return []
    before = {name for each in kinds[: kinds.index(kind)] for name in _own(each)}
    return [name for name in _own(kind) if name not in before]


def _line(argument: Argument) -> str:
    return f"- `{argument.shown}`: {argument.said}" if argument.said else f"- `{argument.shown}`"


def _result_class(kind: type) -> str:
    """A class: its attributes that have a docstring, a line each, then the others."""
    said = _field_texts(kind)
    others = ", ".join(f"`{name}: {of}`" for name, of in _attributes(kind) if name not in said)
    parts = [f"### {kind.__name__}", _text(kind), "\n".join(_field_lines(kind)), others]
    return "\n\n".join(filter(None, parts)) + "\n"


def _field_lines(kind: type) -> list[str]:
    """A line for each field that has a docstring."""
    said = _field_texts(kind)
    return [f"- `{name}: {of}`: {said[name]}" for name, of in _attributes(kind) if name in said]


def _field_texts(kind: type) -> dict[str, str]:
    """The docstrings of a class's fields, those of its bases too, as Markdown."""
    found: dict[str, str] = {}
    for each in reversed([each for each in kind.__mro__ if is_dataclass(each)]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for before, node in pairwise(tree.body):
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(node, ast.Expr):
                found[before.target.id] = _marked(" ".join(ast.literal_eval(node.value).split()))
    return found


def _attributes(kind: type) -> Iterator[tuple[str, str]]:
    """The fields of a class, and its properties, with their types."""
    if is_dataclass(kind):
        yield from ((each.name, str(each.type)) for each in fields(kind) if each.init and each.repr)
    for name, value in ChainMap(*(vars(each) for each in kind.__mro__ if each is kind or is_dataclass(each))).items():
        getter = (
            value.fget if isinstance(value, property) else value.func if isinstance(value, cached_property) else None
        )
        if getter is not None and not name.startswith("_") and name != "headline":  # of every result: its repr
            yield name, str(getter.__annotations__.get("return", ""))


def _text(thing: object) -> str:
    """A docstring as Markdown."""
    text = _marked(cleandoc(getattr(thing, "__doc__", None) or ""))
    return re.sub(r"^(`\w+`: )", r"- \1", text, flags=re.MULTILINE)  # the fields


def _marked(text: str) -> str:
    return re.sub(r"``([^`]*)``", r"`\1`", text)
