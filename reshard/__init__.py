"""Split, merge and re-split checkpoints of large language models for tensor parallelism, and prove the result."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.errors import ReshardError
    from reshard.api import Access, Padding, Summary, load, merge, plan, split

__all__ = ["Access", "Padding", "ReshardError", "Summary", "load", "merge", "plan", "split"]
__version__ = "0.1.0"


class _Package(ModuleType):
    """This package, with the API imported when it is first asked for: the command line must start at once."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'reshard' has no attribute '{name}'")
        value = getattr(import_module("formats.errors" if name == "ReshardError" else "reshard.api"), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # `reshard.plan` is the function; importing the submodule of that name would put the module in its place.
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
