"""Results of the tests for each model type, from ``coverage.json`` (``make docs`` writes that file)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

FILE = Path(__file__).with_name("coverage.json")


@dataclass(frozen=True)
class Tested:
    """The tests split a small model of the type, merge it and compare its bytes, at these degrees of ``--tp``.

    ``forward``: they run it as well, and compare its outputs.
    """

    forward: bool
    degrees: tuple[int, ...]


@lru_cache(maxsize=1)
def coverage() -> Mapping[str, Tested]:
    """The model types that the tests have a model of. The others share the rules of such a type."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        model_type: Tested(verified == "forward", tuple(degrees))
        for verified, types in content.items()
        for model_type, degrees in types.items()
    }
