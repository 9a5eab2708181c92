"""Commands as functions of the fields of their requests, as a Python caller sees them."""

from __future__ import annotations

import re
from ast import Subscript, Tuple, parse, unparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from inspect import Signature, cleandoc, isfunction, signature
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from threading import Lock
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from reshard.formats.errors import refused
from reshard.formats.store import opened
from reshard.source.access import Place
from reshard.system import Share, share_of_launcher, system_errors
from reshard.text import flops_of, size_of, speed_of

_Fields = ParamSpec("_Fields")
_Request = TypeVar("_Request")
_Result = TypeVar("_Result")
_NUMBERS: dict[Any, tuple[str, type, str]] = {
    int: (r"-?\d{1,18}", Integral, "a whole number"),
    float: (r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", Real, "a number"),
}
_WITH_UNITS = {"max_shard_size": size_of, "memory": size_of, "link": speed_of, "flops": flops_of}
"""The fields in bytes, or in bytes per second: ``5GB`` is one, too."""


def by_fields(
    request: Callable[_Fields, _Request], command: Callable[[_Request], _Result]
) -> Callable[_Fields, _Result]:
    """The command as a function whose arguments are the fields of its request's class; ``help`` lists them.

    A value may be what the command line takes. Raises SettingError for one that its field cannot have.
    """

    @wraps(command)
    def call(*places: _Fields.args, **options: _Fields.kwargs) -> _Result:
        try:
            with system_errors(), ExitStack() as stack:
                values = values_of(request, *places, **options)
                if values.get("progress") is True:
                    values["progress"] = stack.enter_context(_bar(command.__name__))
                return command(request(**values))  # type: ignore[call-arg]
        finally:
            opened.cache_clear()  # else a long process would keep the space of files that are removed

    shown = _shown(signature(request), signature(command).return_annotation)
    said = "\n".join(cleandoc(kind.__doc__ or "") for kind in getattr(request, "__mro__", ()) if kind is not object)
    lines = [f"    {each}\n        {_said(each.name, said)}" for each in shown.parameters.values()]
    call.__doc__ = "\n".join([cleandoc(command.__doc__ or ""), "", "Arguments:", *lines])
    call.__signature__ = shown  # type: ignore[attr-defined]
    return call


class _Word(str):
    """A text that a signature shows as it is, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _shown(whole: Signature, returned: str) -> Signature:
    """A signature for people: the types that a caller may give, and defaults that say something."""
    parameters = []
    for each in whole.parameters.values():
        kind, default = parse(each.annotation, mode="eval").body, each.default
        if isinstance(kind, Subscript) and unparse(kind.value) == "Taken":
            assert isinstance(kind.slice, Tuple)
            kind = kind.slice.elts[0]
        if isfunction(default):
            default = False  # no progress
        elif "factory" in repr(default):
            default = _Word("...")
        parameters.append(each.replace(annotation=_Word(unparse(kind)), default=default))
    return whole.replace(parameters=parameters, return_annotation=_Word(returned))


def _said(name: str, text: str) -> str:
    """Return the description of a field in the docstring of a request; "" if it has none."""
    match = re.search(rf"^``{name}``: (.*(?:\n    .*)*)", text, re.MULTILINE)
    return " ".join(match[1].split()) if match else ""


@contextmanager
def _bar(title: str) -> Iterator[Callable[..., None]]:
    """Show a bar of the bytes that are done, in a notebook too; yields the function that moves it, for any thread."""
    from tqdm.auto import tqdm

    lock = Lock()
    with tqdm(desc=title, unit="B", unit_scale=True) as bar:

        def show(*state: Any) -> None:
            done, total, *_ = state if len(state) > 1 else state[0]
            with lock:
                bar.total = total
                bar.update(max(0, done - bar.n))

        yield show


def values_of(request: Callable[..., Any], *places: Any, **options: Any) -> dict[str, Any]:
    """Convert arguments into the fields of a request. Raises SettingError for a value that its field cannot have."""
    values, kinds = signature(request).bind(*places, **options).arguments, get_type_hints(request)
    if values.get("progress") in (None, False):
        values.pop("progress", None)
    for name, value in values.items():
        if kinds[name] == Place and (hasattr(value, "state_dict") or isinstance(value, Mapping)):
            why = "tensors in memory are given as reshard.state_dict(model)"
            raise refused(name, type(value).__name__, why)
        with_unit = _WITH_UNITS.get(name) if isinstance(value, str) else None
        try:
            values[name] = with_unit(value) if with_unit else _read(value, kinds[name])
        except ValueError as error:
            given = value if type(value).__module__ == "builtins" else type(value).__name__  # whose repr may be long
            raise refused(name, given, str(error) if with_unit else f"{error} is expected") from None
    return values


def _read(value: Any, kind: Any) -> Any:
    """Convert a value to this type. Raises ValueError with the expected kind."""
    if get_origin(kind) in (Union, UnionType):
        expected = []
        for option in get_args(kind):
            try:
                return _read(value, option)
            except ValueError as error:
                expected += [str(error)] if option is not NoneType else []
        raise ValueError(" or ".join(dict.fromkeys(expected)))
    if get_origin(kind) in (tuple, Sequence):
        item, *_ = get_args(kind)
        if isinstance(value, str):  # a path may have a comma
            value = value.split(",") if item in (int, float, str) else [value]
        return tuple(_read(each, item) for each in (value if isinstance(value, Sequence | range) else [value]))
    if get_origin(kind) is Literal:
        return _checked(value, value in get_args(kind), " or ".join(map(repr, get_args(kind))))
    if get_origin(kind) is not None or kind is Callable:
        return _checked(value, value is True or callable(value), "True or a function")
    if kind in (int, float):
        pattern, number, what = _NUMBERS[kind]
        is_text = isinstance(value, str) and re.fullmatch(pattern, value) is not None
        is_number = isinstance(value, number) and not isinstance(value, bool)
        return kind(_checked(value, is_text or is_number, what))
    if kind is str:
        text = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value  # a dtype, a device
        return _checked(text, isinstance(text, str) and "\0" not in text, "a text")
    if kind is Path:
        path = value.__fspath__() if isinstance(value, PathLike) else value
        return Path(_checked(path, isinstance(path, str) and "\0" not in path, "a path"))
    if kind is Share and not isinstance(value, Share):
        if isinstance(value, str) and value == "auto":
            return share_of_launcher()
        try:
            return Share.of_text("/".join(map(str, value)) if isinstance(value, tuple) else str(value))
        except ValueError:
            raise ValueError("one of several processes, such as (0, 2)") from None
    return _checked(value, isinstance(value, kind), "True or False" if kind is bool else f"a {kind.__name__}")


def _checked(value: Any, is_right: bool, expected: str) -> Any:
    if not is_right:
        raise ValueError(expected)
    return value
