"""Packages that are not installed here and that a program imports: their modules are made as they are imported."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Absent:
    """An entry of ``sys.meta_path``. ``attribute`` makes a module's attribute, by the names of both."""

    def __init__(self, has: Callable[[str], bool], attribute: Callable[[str, str], Any]) -> None:
        self._has, self._attribute = has, attribute

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """A spec of any such module."""
        return ModuleSpec(name, self, is_package=True) if self._has(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """A module with every attribute that has no underscores in front."""

        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self._attribute(spec.name, name)

        module = ModuleType(spec.name)
        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, _: ModuleType) -> None:
        """Do nothing."""
