"""The folders that training programs leave, each read as a distributed checkpoint of torch's (see ``dcp``).

A folder is known by the names of its files: ``.metadata``; accelerate's and transformers' Trainer's
``pytorch_model_fsdp_0`` beside ``optimizer_0``; verl's files of ranks; DeepSpeed's ``latest``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from formats.documents import Record, is_inside, optional, read_document, whole
from formats.errors import CheckpointError, MismatchError
from formats.files.checkpoint import CONFIG, METADATA, find_side_files
from formats.files.dcp import Distributed, read_distributed
from formats.files.deepspeed import MODEL, OPTIMIZER, read_zero
from formats.files.gathered import joined, of_safetensors, with_named_states
from formats.mesh import MOST_RANKS
from formats.store import FilePath, glob, name_in, read_file


class Training(NamedTuple):
    """A folder of a training program: one of its files, what reads them all, and who saved it, if not torch itself."""

    file: FilePath
    read: Callable[[], Distributed]
    what: str | None = None


_ACCELERATE = "saved by accelerate or Trainer"
_VERL = re.compile(r"(model|optim)_world_size_(\d+)_rank_(\d+)\.pt")
_RANK = re.compile(r"(pytorch_model_fsdp|optimizer)_0_rank(\d+)\.bin")


OWN = re.compile(
    r"latest(_universal|_checkpointed_iteration\.txt)?|(trainer_state|fsdp_config|lora_train_meta)\.json|zero_to_fp32\.py|"
    r"random_states_\d+\.pkl"
)
"""Names of a training program's own files, which belong to no model."""


def find_training(folder: FilePath) -> Training | None:
    """What a training program left in a folder; None if its names are not those of any that is read here."""
    if (folder / METADATA).is_file():
        return Training(folder / METADATA, partial(_read_torch, folder))
    if not folder.is_dir():
        return None
    names = sorted(path.name for path in folder.iterdir())
    of_ranks = [match for name in names for pattern in (_VERL, _RANK) if (match := pattern.fullmatch(name))]
    if of_ranks:
        return Training(folder / of_ranks[0][0], partial(_read_ranks, folder, of_ranks), "saved from FSDP")
    step = _step_of(folder, names)
    patterns = (MODEL, OPTIMIZER)
    states = [path for path in glob(step, "*_states.pt") if any(name.fullmatch(path.name) for name in patterns)]
    if states:
        return Training(states[0], partial(read_zero, step), "saved by DeepSpeed")
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "optimizer_0", "optimizer.bin"):
        for file in (folder / name, folder / name / METADATA):
            if file.is_file():
                return Training(file, partial(_read_accelerate, folder, names), _ACCELERATE)
    return None


def _step_of(folder: FilePath, names: Collection[str]) -> FilePath:
    """The folder of a step of DeepSpeed's: that of the tag in ``latest`` or ``latest_universal``, or this one."""
    for name in ("latest", "latest_universal"):
        if name in names:
            tag = read_file(folder / name, 1 << 10).decode("utf-8", "replace").strip()
            if is_inside(tag) and (folder / tag).is_dir():
                return folder / tag
    return folder


def read_training(folder: FilePath) -> Distributed:
    """The checkpoint in a folder. Raises CheckpointError and MismatchError."""
    program = find_training(folder)
    try:
        return program.read() if program is not None else read_distributed(folder)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        what = f"what its files hold is not as the program saves it: {error!s:.200}"
        raise CheckpointError(f"{folder}: {what}", "fetch or copy the files again") from error


def _read_torch(folder: FilePath) -> Distributed:
    """A distributed checkpoint, or transformers': then the weights are safetensors, and the rest is the optimizer."""
    distributed, weights = read_distributed(folder), glob(folder, "shard-*.safetensors")
    if weights:
        return joined([of_safetensors(weights, folder), distributed], folder, "saved by transformers")
    return with_named_states(distributed)


def _read_accelerate(folder: FilePath, names: list[str]) -> Distributed:
    if "pytorch_model_fsdp_1" in names:
        raise CheckpointError(f"{folder} has several models", "give the folder of one (pytorch_model_fsdp_0)")
    if "pytorch_model_fsdp_0" in names:
        parts = [read_distributed(folder / name) for name in ("pytorch_model_fsdp_0", "optimizer_0") if name in names]
        return joined(parts, folder, _ACCELERATE)
    if "pytorch_model_fsdp.bin" not in names:
        raise CheckpointError(
            f"{folder} has the states of an optimizer, and no model", "bring pytorch_model_fsdp_0 back"
        )
    from formats.files.fsdp_ranks import read_fsdp  # rarely needed

    optimizers = (folder / name for name in ("optimizer_0", "optimizer.bin"))
    optimizer = next((file for file in optimizers if file.is_file()), None)
    return read_fsdp(folder, [(folder / "pytorch_model_fsdp.bin", optimizer)], _ACCELERATE)


def _world_size(value: object, where: str) -> int | None:
    return Record(value, where).get("world_size", optional(whole(1, MOST_RANKS)), None)


def _read_ranks(folder: FilePath, matches: list[re.Match[str]]) -> Distributed:
    """Files of ranks, by the names of which the number of all ranks is known, or that of the last."""
    from formats.files.fsdp_ranks import read_fsdp  # rarely needed

    models, optimizers, worlds = dict[int, FilePath](), dict[int, FilePath](), dict[int, str]()
    for match in matches:
        files = models if match[1] in ("model", "pytorch_model_fsdp") else optimizers
        files[int(match[match.re.groups])] = folder / match[0]
        if match.re is _VERL:
            worlds[int(match[2])] = match[0]
    if (folder / "fsdp_config.json").is_file():
        _, world = read_document(folder / "fsdp_config.json", 1 << 20, _world_size)
        worlds |= {world: "fsdp_config.json"} if world is not None else {}
    if len(worlds) > 1:
        raise MismatchError(
            f"{folder} has files of different numbers of ranks: {' and '.join(map(str, worlds.values()))}",
            "keep the files of one save",
        )
    world = next(iter(worlds), 1 + max([*models, *optimizers]))
    if not models:
        why = f"{folder} has the states of an optimizer, and no model"
        raise CheckpointError(why, "bring the model's files back")
    for what, files in (("model", models), ("optimizer", optimizers)):
        # a name can say any number of ranks: no list of them all is made
        if files and (missing := next((rank for rank in range(world) if rank not in files), None)) is not None:
            why = f"{folder}: the {what}'s file of rank {missing} of {world} is missing"
            raise CheckpointError(why, "bring all ranks' files together")
    pairs = [(models[rank], optimizers.get(rank)) for rank in range(world)]
    return read_fsdp(folder, pairs, "saved by verl or SkyRL" if worlds else "saved by accelerate")


def model_files(folder: FilePath) -> dict[str, FilePath]:
    """The config.json of a model that a training program saved in a folder, and the files with it, by their names.

    They lie there, below in ``huggingface``, or above; above, folders are other things.
    """
    for place, span in ((folder, "**"), (folder / "huggingface", "**"), (folder.parent, "*")):
        if (place / CONFIG).is_file():
            files = ((name_in(file, place), file) for file in find_side_files(place) if file.is_file())
            return {name: file for name, file in files if not OWN.fullmatch(name) and (span == "**" or "/" not in name)}
    return {}
