"""Packages that only some commands need, and that an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec

from formats.errors import PlanError


def need(what: str, *packages: str, extra: str) -> None:
    """Raise PlanError unless the packages, which ``what`` needs and this extra installs, are there."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise PlanError(f"{what} needs {' and '.join(missing)}", f"pip install 'reshard[{extra}]'")


def need_transformers(what: str, *beside: str) -> None:
    """Raise PlanError if what runs or builds a model of transformers' is not installed; ``what`` needs it.

    ``beside`` are further packages that are needed with it.
    """
    need(what, "transformers", "accelerate", *beside, extra="verify")
