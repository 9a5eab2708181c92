"""Which options of a split a format cannot keep. They are refused: an option is never ignored."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from formats.errors import PlanError
from formats.notation.format import Format

HUGGING_FACE = "huggingface"
"""The name of Hugging Face's own form, among those of other programs."""
_OF_RANKS = (
    "--tp", "--ep", "--pp", "--pp-layers", "--same-ranks", "--rank", "--uneven", "--pad-vocab-to", "--refine-blocks",
)  # fmt: skip


def check_options(form: str | None, format: Format | None, given: Collection[str]) -> None:
    """Raise PlanError if one of the ``given`` options cannot be kept in a format, which is ``format``.

    Without it, it is one full checkpoint, or without ``form`` ranks of our own.
    """
    for option, why in not_kept(form, format).items():
        if option in given:
            hint = "--part shares its files among processes" if option == "--rank" else f"leave {option} out"
            raise PlanError(f"{option} is not possible with the format '{form or 'safetensors'}', {why}", hint)


def not_kept(form: str | None, format: Format | None) -> Mapping[str, str]:
    """What cannot be kept, and why: the end of a sentence."""
    if form == HUGGING_FACE:
        return dict.fromkeys(_OF_RANKS, "which is one full checkpoint")
    if format is None:
        return {}
    found = {
        "--pad-vocab-to": "which says itself what is padded",
        "--refine-blocks": "whose reader takes the scale blocks of config.json",
    }
    if not format.container.boxes or format.padding.to is not None:
        found["--uneven"] = "whose ranks have equal parts"
    if format.container.boxes:
        found["--rank"] = "which any number of ranks loads"
    if not format.files.has_parts:
        found["--max-shard-size"] = "whose ranks have one file each"
    return found
