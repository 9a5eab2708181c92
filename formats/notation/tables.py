"""Tables that were made from transformers: defaults of its configs, and heads of its classes. Each is read once."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

CONFIG_DEFAULTS = Path(__file__).parents[1] / "config_defaults.json"
"""The defaults of transformers' configuration classes, for settings that a ``config.json`` lacks."""
HEADS = Path(__file__).parents[1] / "heads.json"


@cache
def _tables() -> Mapping[str, Any]:
    tables: Mapping[str, Any] = json.loads(CONFIG_DEFAULTS.read_text(encoding="utf-8"))
    return tables


@cache
def config_defaults() -> Mapping[str, Mapping[str, Any]]:
    """For each model type, its settings where a ``config.json`` is silent."""
    defaults: Mapping[str, Mapping[str, Any]] = _tables()["types"]
    return defaults


def newer_than_tables(config: Mapping[str, Any]) -> str | None:
    """Return both versions in words if a ``config.json`` was written by a newer transformers than the one behind the
    tables.

    None if it is no newer, or does not say.
    """
    ours, theirs = _tables()["made_with"]["transformers"], config.get("transformers_version")
    newer = (version_of(theirs) or ()) > (version_of(ours) or ()) if isinstance(theirs, str) else False
    return f"what is known was made with transformers {ours}; the checkpoint says {theirs}" if newer else None


def version_of(version: str | None) -> tuple[int, ...] | None:
    """The numbers of a version: at most three. None if it has none."""
    match = re.match(r"\d{1,4}(\.\d{1,4}){1,2}", version or "")
    return tuple(map(int, match[0].split("."))) if match else None


@cache
def heads() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The heads of classes, and of ends of names of classes."""
    table = json.loads(HEADS.read_text(encoding="utf-8"))
    return {name: head for head, names in table["classes"].items() for name in names}, table["ends"]
