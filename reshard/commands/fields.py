"""Commands as functions of the fields of their requests: what a Python caller sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import cleandoc, signature
from pathlib import Path
from typing import ParamSpec, TypeVar

_Fields = ParamSpec("_Fields")
_Request = TypeVar("_Request")
_Result = TypeVar("_Result")


def by_fields(
    request: Callable[_Fields, _Request], command: Callable[[_Request], _Result]
) -> Callable[_Fields, _Result]:
    """The command as a function whose arguments are the fields of its request's class; ``help`` shows them."""

    @wraps(command)
    def call(*source: _Fields.args, **options: _Fields.kwargs) -> _Result:
        values = {
            name: Path(value) if name in paths and isinstance(value, str) else value for name, value in options.items()
        }
        return command(request(*source, **values))  # type: ignore[arg-type]

    paths = {name for name, field in signature(request).parameters.items() if field.annotation == "Path | None"}
    kinds = [kind for kind in getattr(request, "__mro__", ()) if kind is not object]
    call.__doc__ = "\n\n".join(cleandoc(thing.__doc__ or "") for thing in (command, *kinds))
    returned = signature(command).return_annotation
    call.__signature__ = signature(request).replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call
