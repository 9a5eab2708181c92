"""Packages that only some commands need, and that an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec

from formats.errors import PlanError


def need(what: str, *packages: str) -> None:
    """Raise PlanError unless the packages that ``what`` needs are installed."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise PlanError(f"{what} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")


def need_transformers(what: str, *beside: str) -> None:
    """Raise PlanError if what runs or builds a model of transformers' is not installed; ``what`` needs it.

    ``beside`` are further packages that are needed with it.
    """
    need(what, "transformers", "accelerate", *beside)
