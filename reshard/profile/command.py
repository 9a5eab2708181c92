"""The command ``reshard profile``, for a Python caller too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from reshard.formats.errors import CheckpointError, require_transformers
from reshard.profile.job import ProfileRequest
from reshard.source.opening import find
from reshard.store.selection import Weights

if TYPE_CHECKING:
    from reshard.profile.words import Profile


def profile(request: ProfileRequest, progress: Callable[[str], None] = lambda _: None) -> Profile:
    """Say which degree of tensor parallelism is fast on this node: ``recommended`` of what is returned.

    Raises ReshardError.
    """
    require_transformers("profile")
    from reshard.profile.run import node_of  # torch
    from reshard.profile.run import profile as profile_folder

    node = node_of(request)
    path = find(request.source, request, Weights.NONE)
    folder = path.parent if path.name == "config.json" else path
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder", "give the folder that holds config.json, or that file")
    return profile_folder(folder, node, request, progress)
