"""The words that wrappers of a module put into the names of its parameters."""

from __future__ import annotations

import re

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
"""Words of torch.compile, activation checkpointing, FSDP and Lightning."""
_WRAPPERS = re.compile(rf"(?:(?<=\.)|^)(?:{'|'.join(WRAPPERS)})\.")


def without_wrappers(name: str) -> str:
    """A parameter's name without the words of wrappers."""
    return _WRAPPERS.sub("", name)


def has_wrappers(name: str) -> bool:
    """Whether a parameter's name has the word of a wrapper."""
    return ("_mod." in name or "_module." in name) and _WRAPPERS.search(name) is not None
