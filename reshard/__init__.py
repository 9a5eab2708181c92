"""Split, merge, re-split and convert checkpoints of large language models, and prove the result.

    reshard.split("model", "out", tp=4)
    print(reshard.verify("model", "out"))

Commands are functions; their arguments have the names of the options. ``plan``, ``inspect`` and ``diff`` read,
``split``, ``merge``, ``patch`` and ``average`` write, ``load`` returns one rank's tensors and ``rank_config`` its
config, ``tensors`` all tensors; ``verify`` and ``profile`` run the model. ``str`` of a result is what the command
prints. Every error is a ``ReshardError``.
``reshard.live`` pushes weights between running processes.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from reshard.version import __version__ as __version__

if TYPE_CHECKING:
    from reshard import live as live
    from reshard.api import average as average
    from reshard.api import diff as diff
    from reshard.api import inspect as inspect
    from reshard.api import load as load
    from reshard.api import merge as merge
    from reshard.api import patch as patch
    from reshard.api import plan as plan
    from reshard.api import rank_config as rank_config
    from reshard.api import slices as slices
    from reshard.api import split as split
    from reshard.api import tensors as tensors
    from reshard.formats.errors import ReshardError as ReshardError
    from reshard.formats.errors import SettingError as SettingError
    from reshard.live.meshes import Target as Target
    from reshard.live.state_dict import state_dict as state_dict
    from reshard.profile.api import profile as profile
    from reshard.verify.api import verify as verify

_PLACES = {
    **dict.fromkeys(("average", "diff", "inspect", "load", "merge"), "reshard.api"),
    **dict.fromkeys(("patch", "plan", "rank_config", "slices", "split", "tensors"), "reshard.api"),
    "profile": "reshard.profile.api",
    "verify": "reshard.verify.api",
    "live": "reshard.live",
    "state_dict": "reshard.live.state_dict",
    "SettingError": "reshard.formats.errors",
    "ReshardError": "reshard.formats.errors",
    "Target": "reshard.live.meshes",
}
"""The module of each name. It is imported when it is first asked for: the command line must start at once."""
__all__ = sorted(_PLACES)


class _Package(ModuleType):
    """``reshard.verify`` is the function, also after a module of that package was imported; so is ``profile``."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("verify", "profile") or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'reshard' has no attribute '{name}'")
    was_enabled = gc.isenabled()
    gc.disable()  # it would go through all that torch made, several times
    try:
        module = import_module(_PLACES[name])
    finally:
        if was_enabled:
            gc.enable()
    value = globals()[name] = module if name == "live" else getattr(module, name)
    return value
