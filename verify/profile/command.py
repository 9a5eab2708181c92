"""What ``reshard profile`` does, for a Python caller too: finds the config.json and profiles its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from formats.errors import CheckpointError
from reshard.source.access import find
from reshard.store.selection import Weights
from verify.profile.job import ProfileRequest

if TYPE_CHECKING:
    from verify.profile.words import Profile


def profile(request: ProfileRequest, progress: Callable[[str], None] = lambda _: None) -> Profile:
    """Say which degree of tensor parallelism is fast on this node: ``recommended`` of what is returned.

    Raises ReshardError.
    """
    found = find(request.source, request, Weights.HEADERS)
    folder = found.parent if found.name == "config.json" else found
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder", "give the folder that holds config.json, or that file")
    from verify.profile.run import profile as profile_folder  # torch

    return profile_folder(folder, request, progress)
