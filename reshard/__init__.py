"""Split, merge and re-split checkpoints of large language models for tensor parallelism, and prove the result."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.errors import ReshardError
    from reshard.api import Access, Padding, Summary, load, merge, plan, split

__all__ = ["Access", "Padding", "ReshardError", "Summary", "load", "merge", "plan", "split"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The API, imported when it is first asked for: the command line must start at once."""
    if name not in __all__:
        raise AttributeError(f"module 'reshard' has no attribute '{name}'")
    return getattr(import_module("formats.errors" if name == "ReshardError" else "reshard.api"), name)
