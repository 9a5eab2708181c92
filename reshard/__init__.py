"""Split, merge and re-split checkpoints of large language models for tensor parallelism, and prove the result."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.errors import ReshardError
    from reshard.api import Access, Padding, Summary, load, merge, plan, split

__all__ = ["Access", "Padding", "ReshardError", "Summary", "load", "merge", "plan", "split"]
__version__ = "0.1.0"


def check_not_hidden(package: str) -> None:
    """Raise ImportError if another module of this name lies before the package that came with this one."""
    own = Path(__file__).parents[1] / package
    spec = find_spec(package)
    found = spec.origin if spec is not None else None
    if found is not None and not Path(found).parent.samefile(own):
        raise ImportError(
            f"{found} hides the package '{package}' that belongs to reshard ({own}): rename it, or run from another "
            "folder",
            name=__name__,
        )


check_not_hidden("formats")


def __getattr__(name: str) -> Any:
    """The API, imported when it is first asked for: the command line must start at once."""
    if name not in __all__:
        raise AttributeError(f"module 'reshard' has no attribute '{name}'")
    return getattr(import_module("formats.errors" if name == "ReshardError" else "reshard.api"), name)
