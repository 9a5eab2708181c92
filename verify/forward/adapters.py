"""An adapter in a run of the model: PEFT applies it to the original, and a rank's part is added to that rank's weights.

The original is what people run: the base model, and beside it PEFT's own modules. The ranks have the sum in their
weights, as it was rounded when it was written, or, if the shards are the adapter's alone, as it is rounded here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from reshard.formats.documents import read_config
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, CONFIG, MODEL
from reshard.formats.files.safetensors import read_header
from reshard.formats.notation.adapters import settings_of
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.notation.tables import version_of
from reshard.formats.store import Store, StoredPath
from reshard.mesh.plan import Plan
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.transforms.adapter import add_adapter
from reshard.verify.forward.foreign import write_rank
from reshard.verify.run_settings import BYTES_ALONE

_CHUNK = 64 << 20
_WRAPPED = ".base_layer"


# -------------------------------------------------------------------------------------------------------- the original


def apply(model: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Put an adapter's modules beside those of a model, with PEFT; they compute in ``dtype`` or wider.

    Returns PEFT's model around it. Raises CheckpointError if PEFT does not find a place for all of the adapter.
    """
    import peft

    _check_version(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what matters is in the result
            wrapped = peft.PeftModel(model, peft.PeftConfig.from_pretrained(folder))
            loaded = wrapped.load_adapter(folder, "default", torch_device=str(model.device))
    except (ValueError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        raise CheckpointError(f"{folder}: PEFT cannot load it: {' '.join(str(error).split())}") from error
    for what, names in (("misses", loaded.missing_keys), ("has no place for", loaded.unexpected_keys)):
        if names:
            raise CheckpointError(f"{folder}: PEFT {what} '{sorted(names)[0]}' ({len(names)} in all)")
    for name, parameter in model.named_parameters():
        if "lora_" in name and parameter.dtype.itemsize < dtype.itemsize:
            parameter.data = parameter.data.to(dtype)
    model.eval()
    return wrapped


def _check_version(folder: Path) -> None:
    """Raise CheckpointError for an adapter of experts whose A and B the installed PEFT takes for something else."""
    settings, installed = settings_of(read_config(folder / ADAPTER_CONFIG), folder), version("peft")
    (format_here,) = replace(settings, version=version_of(installed)).formats()
    if settings.targets and (settings.grouped or format_here not in settings.formats()):
        writer = "Unsloth" if settings.grouped else f"PEFT {'.'.join(map(str, settings.version or ()))}"
        raise CheckpointError(
            f"{folder} was written by {writer}, and PEFT {installed} reads its experts otherwise",
            f"'reshard split ADAPTER OUT --as peft --config BASE' converts it; {BYTES_ALONE}",
        )


def merge(wrapped: Any) -> None:
    """Add the adapter to the weights, as PEFT does: the sum is rounded to their dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        wrapped.merge_adapter()


def named_as_unwrapped(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """States by the names of the base model's modules, which PEFT may have put into others."""
    return {name.replace(_WRAPPED, ""): state for name, state in states.items()}


# ----------------------------------------------------------------------------------------------------------- the ranks


def write_adapted_rank(base: Source, plan: Plan, rank: int, adapter: Path, folder: Path) -> Path:
    """Write a rank's part of the base model with that rank's part of the adapter in it, and return the folder.

    ``base`` is the whole base model, ``plan`` is its plan on the mesh of the adapter's shards. Raises ReshardError
    where the two parts do not fit.
    """
    base_rank = write_rank(base, plan, rank, folder / "base")
    if not read_header(adapter / ADAPTER).tensors:
        return base_rank  # a pipeline stage that it does not change
    try:
        added = add_adapter(open_source(base_rank, is_part=True), adapter, is_part=True)
        assert isinstance(added.path, StoredPath)
        return _copied(added.path.store, folder / "sum")
    except ReshardError as error:  # an axis of which a rank's config.json cannot say what the rank has
        raise CheckpointError(
            f"a rank's part of the adapter is not added to that rank's part of the base model: {error.message}",
            f"{BYTES_ALONE}; 'reshard split BASE OUT --adapter' is compared at any degree",
        ) from error


def _copied(store: Store, folder: Path) -> Path:
    """Write the files of a store into a new folder, and return it."""
    folder.mkdir()
    for name, stat in store.stats.items():
        with (folder / name).open("wb") as file:
            for begin in range(0, stat.st_size, _CHUNK):
                file.writelines(store.read([(name, begin, min(begin + _CHUNK, stat.st_size))]))
    return folder


def as_adapter(folder: Path) -> Path:
    """Return a folder with the same adapter, whose tensors and config have PEFT's file names."""
    (folder / MODEL).rename(folder / ADAPTER)
    settings = read_config(folder / CONFIG)[SETTINGS]
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
    return folder
