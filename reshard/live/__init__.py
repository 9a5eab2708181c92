"""Moves between running processes: a trainer's ranks to an engine's, without disk and without gathering."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reshard.formats.errors import LiveError as LiveError
    from reshard.live.meshes import Target as Target
    from reshard.live.meshes import placements as placements
    from reshard.live.process import pull as pull
    from reshard.live.process import push as push
    from reshard.live.routing import document as document
    from reshard.live.routing import routes as routes
    from reshard.live.vllm import Offline as Offline
    from reshard.live.vllm import Server as Server
    from reshard.live.vllm import join as join
    from reshard.live.vllm import update as update

_PLACES = {
    "LiveError": "reshard.formats.errors",
    **dict.fromkeys(("Target", "placements"), "reshard.live.meshes"),
    **dict.fromkeys(("document", "routes"), "reshard.live.routing"),
    **dict.fromkeys(("pull", "push"), "reshard.live.process"),
    **dict.fromkeys(("Offline", "Server", "join", "update"), "reshard.live.vllm"),
}
"""The module of each name. It is imported when it is first asked for: planning needs no torch."""
__all__ = sorted(_PLACES)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'reshard.live' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value
