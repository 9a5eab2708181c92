"""The Python API in Markdown: of each function its signature and docstring; of what it takes and returns the fields."""

from __future__ import annotations

import inspect
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from inspect import Parameter, cleandoc
from typing import Any

import reshard
import reshard.live
from reshard.commands.inspect import Report
from reshard.commands.plan import PlanAnswer
from reshard.delta.differences import Diff
from reshard.verify.profile.words import Profile
from reshard.verify.report.answer import Answer
from reshard.writing.summary import Summary

RESULTS: tuple[type, ...] = (Diff, Report, PlanAnswer, Profile, Summary, Answer)


def api_text() -> str:
    """All functions, then each class of fields that they take, once, and what they return."""
    functions = [each for name in reshard.__all__ if inspect.isfunction(each := getattr(reshard, name))]
    requests = list(dict.fromkeys(kind for call in functions for kind in _kinds(_request(call))))
    results = [kind for call in functions if (kind := _result(call)) is not None]
    parts = [
        *map(_function, functions),
        "## What they take\n",
        *map(_request_class, requests),
        "## What they return\n",
        *map(_result_class, dict.fromkeys(results)),
    ]
    return "\n".join(parts)


def live_text() -> str:
    """Return the text on ``reshard.live``, in the order in which one uses its names."""
    parts = []
    for name in reshard.live.__all__:
        thing = getattr(reshard.live, name)
        shape = "" if isinstance(thing, type) else f"\n```\nreshard.live.{name}{inspect.signature(thing)}\n```\n"
        parts.append(f"### reshard.live.{name}\n{shape}\n{_text(thing)}\n")
    return "\n".join(parts)


def _request(call: Callable[..., Any]) -> type:
    """The class of a function's request, whose fields are the function's arguments; ``object`` if it has none."""
    command = getattr(call, "__wrapped__", None)
    request = getattr(sys.modules[command.__module__], command.__annotations__["request"]) if command else object
    assert isinstance(request, type)
    return request


def _result(call: Callable[..., Any]) -> type | None:
    """The class of what a function returns, if it is one of ours."""
    name = str(inspect.signature(call).return_annotation).rpartition(".")[2]
    return next((kind for kind in RESULTS if kind.__name__ == name), None)


def _kinds(request: type) -> list[type]:
    """A request's class and those that it is made of, each with fields of its own."""
    return [kind for kind in request.__mro__ if is_dataclass(kind)]


def _function(call: Callable[..., Any]) -> str:
    name, signature = call.__name__, inspect.signature(call)
    lines: list[str] = []
    for each in signature.parameters.values():
        if each.kind is Parameter.KEYWORD_ONLY and "    *," not in lines:
            lines.append("    *,")
        lines.append(f"    {_argument(each)},")
    result = _result(call)
    shape = "\n".join(
        [f"reshard.{name}(", *lines, f") -> {result.__name__ if result else signature.return_annotation}"]
    )
    taken = ", ".join(f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in _kinds(_request(call)))
    returned = f" Returns [{result.__name__}](#{result.__name__.lower()})." if result else ""
    fields = f"\n\nFields: {taken}.{returned}" if taken else ""
    return f"### reshard.{name}\n\n```\n{shape}\n```\n\n{_text(getattr(call, '__wrapped__', call))}{fields}\n"


def _argument(parameter: Parameter) -> str:
    default = parameter.default
    if default is Parameter.empty:
        return f"{parameter.name}: {parameter.annotation}"
    shown = default.__name__ if inspect.isfunction(default) else repr(default)
    return f"{parameter.name}: {parameter.annotation} = {'...' if shown == '<factory>' else shown}"


def _request_class(kind: type) -> str:
    return f"### {kind.__name__}\n\n{_text(kind)}\n"


def _result_class(kind: type) -> str:
    rows = "\n".join(f"| `{name}` | `{of}` |" for name, of in _attributes(kind))
    return f"### {kind.__name__}\n\n{_text(kind)}\n\n| field | type |\n|---|---|\n{rows}\n"


def _attributes(kind: type) -> Iterator[tuple[str, str]]:
    """The fields of a class, and its properties, with their types."""
    if is_dataclass(kind):
        yield from ((each.name, str(each.type).replace("|", "\\|")) for each in fields(kind) if each.init and each.repr)
    for name, value in ChainMap(*(vars(each) for each in kind.__mro__ if each is kind or is_dataclass(each))).items():
        getter = (
            value.fget if isinstance(value, property) else value.func if isinstance(value, cached_property) else None
        )
        if getter is not None and not name.startswith("_"):
            yield name, str(getter.__annotations__.get("return", "")).replace("|", "\\|")


def _text(thing: object) -> str:
    """A docstring as Markdown."""
    text = re.sub(r"``([^`]*)``", r"`\1`", cleandoc(getattr(thing, "__doc__", None) or ""))
    return re.sub(r"^(`\w+`: )", r"- \1", text, flags=re.MULTILINE)  # the fields
