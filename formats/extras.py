"""Packages that only some commands need, and that an installation may lack."""

from __future__ import annotations

from importlib.util import find_spec

from formats.errors import PlanError


def need_transformers(what: str) -> None:
    """Raise PlanError if what runs or builds a model of transformers' is not installed; ``what`` needs it."""
    missing = [name for name in ("transformers", "accelerate") if find_spec(name) is None]
    if missing:
        raise PlanError(f"{what} needs {' and '.join(missing)}", "pip install 'reshard[verify]'")
