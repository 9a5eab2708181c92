"""Which settings of a request a format cannot carry out. They are refused: a setting is never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from formats.notation.format import Format
from formats.notation.format_file import HUGGING_FACE
from formats.refusals import refused

if TYPE_CHECKING:
    from reshard.mesh.plan import Degrees

_OF_RANKS = ("tp", "ep", "pp", "pp_layers", "same_ranks", "ranks", "uneven", "pad_vocab_to", "refine_blocks")


def check_kept(request: Degrees, name: str | None, format: Format | None) -> None:
    """Raise SettingError if a field of a request that differs from its default cannot be carried out in a format.

    Without a ``format`` it is one full checkpoint, or, without a ``name`` too, reshard's own form.
    """
    reasons, defaults = not_kept(name, format), {field.name: field.default for field in fields(request)}
    for setting, why in reasons.items():
        if setting in defaults and (getattr(request, setting) or None) != (defaults[setting] or None):
            instead = ({"part": None},) if setting == "ranks" else ()
            advice = "it shares the files among processes" if instead else "leave it out"
            raise refused(setting, None, why, format=name, instead=instead, advice=advice)


def not_kept(name: str | None, format: Format | None) -> Mapping[str, str]:
    """The fields that cannot be carried out, and why."""
    if name == HUGGING_FACE:
        return dict.fromkeys(_OF_RANKS, "it is one full checkpoint")
    if format is None:
        return {}
    found = {
        "pad_vocab_to": "it says itself what is padded",
        "refine_blocks": "its reader takes the scale blocks of config.json",
    }
    if not format.container.chunks or format.padding.to is not None:
        found["uneven"] = "its ranks have equal parts"
    if format.container.chunks:
        found["ranks"] = "any number of ranks loads it"
    if not format.files.has_parts:
        found["max_shard_size"] = "its ranks have one file each"
    return found
