"""Additions of other packages: entry points in the groups ``reshard.formats``, ``reshard.containers`` and so on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from reshard.formats.errors import PlanError


@cache
def plugins(kind: str) -> Mapping[str, Any]:
    """The additions of a kind, by their names. Raises PlanError for one that cannot be imported, or two of a name."""
    from importlib.metadata import entry_points  # slow, and rarely needed

    found = dict[str, Any]()
    for entry in entry_points(group=f"reshard.{kind}"):
        if entry.name in found:
            raise PlanError(f"two packages add '{entry.name}' to reshard.{kind}", "remove one of them")
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # of another package: anything
            of = entry.dist.name if entry.dist is not None else "a package"
            raise PlanError(f"{entry.value} of {of} is no {kind[:-1]}: {error}", f"mend or remove {of}") from error
    return found
