"""The fields of a request that a format has a place for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from reshard.formats.errors import refused
from reshard.formats.notation.format import Format
from reshard.formats.notation.format_file import HUGGING_FACE, OWN
from reshard.mesh.plan import Degrees

_OF_RANKS = ("tp", "ep", "pp", "pp_layers", "same_ranks", "ranks", "uneven", "pad_vocab_to")


def check_kept(request: Degrees, format: Format, name: str | None = None) -> None:
    """Raise SettingError if a field of a request that differs from its default cannot be carried out in a format.

    ``name`` is that of a format of adapters, which are as whole as ``format``.
    """
    reasons, defaults = not_kept(format), {field.name: field.default for field in fields(request)}
    for setting, why in reasons.items():
        if setting in defaults and (getattr(request, setting) or None) != (defaults[setting] or None):
            instead = ({"part": None},) if setting == "ranks" else ()
            advice = "it shares the files among processes" if instead else "leave it out"
            raise refused(setting, None, why, format=name or format.name, instead=instead, advice=advice)


def not_kept(format: Format) -> Mapping[str, str]:
    """The fields that cannot be carried out, and why."""
    if format is HUGGING_FACE:
        return dict.fromkeys(_OF_RANKS, "it is one full checkpoint")
    names = {"names": "it has names of its own"}
    if format is OWN:
        return {}
    if format.files.is_single:
        why = "each tensor has one file, which any number of ranks loads"
        return dict.fromkeys((*_OF_RANKS, "max_shard_size"), why) | names
    reasons = {} if format.takes_any_names else names
    reasons |= {"pad_vocab_to": "it says itself what is padded"}
    if not format.container.chunks or format.padding.to is not None:
        reasons["uneven"] = "its ranks have equal parts"
    if format.container.chunks:
        reasons["ranks"] = "any number of ranks loads it"
    if not format.files.has_parts:
        reasons["max_shard_size"] = "its ranks have one file each"
    return reasons
