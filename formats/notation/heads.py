"""The head of the class that ``architectures`` of a config.json names: for tokens, another one, or none.

``formats/heads.json`` has it for transformers' classes. ``python -m tools.heads`` writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.formats.notation.tables import heads

TOKENS, NO_HEAD = "tokens", "none"
"""A head for tokens, whatever its module is called; no head at all."""


def class_of(config: Mapping[str, Any]) -> str:
    """The class of a model that ``config.json`` names; empty if it names none."""
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def head_of(config: Mapping[str, Any]) -> str | None:
    """The head of the class in a config.json: ``TOKENS``, ``NO_HEAD``, or the module of another one.

    None if there is no class, or one of which nothing is known. That of a class that transformers does not have is told
    by the end of its name.
    """
    name, (classes, ends) = class_of(config), heads()
    if name in classes:
        return classes[name]
    return next((ends[name[at:]] for at in range(1, len(name)) if name[at:] in ends), None)


def is_headless(config: Mapping[str, Any]) -> bool:
    """Whether the class in a config.json has no head for tokens."""
    return head_of(config) not in {TOKENS, None}
