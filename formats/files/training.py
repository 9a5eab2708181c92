"""The folders that training programs leave, each read as a distributed checkpoint of torch's (see ``dcp``).

A folder is known by the names of its files: ``.metadata``; accelerate's and transformers' Trainer's
``pytorch_model_fsdp_0`` beside ``optimizer_0``; verl's files of ranks; DeepSpeed's ``latest``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from reshard.formats.documents import Record, optional, read_document, whole
from reshard.formats.errors import CheckpointError, IncompleteError, MismatchError
from reshard.formats.files.checkpoint import CONFIG, METADATA, TRACKERS, step_of
from reshard.formats.files.chunks import Chunk, Sharded, read_chunks, whole_shape
from reshard.formats.files.dcp import STATE, Distributed, Entries, gathered, read_distributed
from reshard.formats.files.deepspeed import MODEL, OPTIMIZER, read_zero
from reshard.formats.files.safetensors import TensorInfo, read_header
from reshard.formats.files.side_files import find_side_files
from reshard.formats.mesh import MOST_RANKS
from reshard.formats.store import FilePath, glob, name_in, read_file


class Training(NamedTuple):
    """A folder of a training program: one of its files, what reads them all, and who saved it, if not torch itself."""

    file: FilePath
    read: Callable[[], Distributed]
    what: str | None = None


_ACCELERATE = "saved by accelerate or Trainer"
_VERL = re.compile(r"(model|optim)_world_size_(\d+)_rank_(\d+)\.pt")
_PARAMETERS = re.compile(r"optimizer\.param_groups\.\d+\.params")
_RANK = re.compile(r"(pytorch_model_fsdp|optimizer)_0_rank(\d+)\.bin")
SAVED = re.compile(
    r"(pytorch_model_fsdp_0/|optimizer_0/)?(\.metadata|__\d+_\d+\.distcp)|shard-[^/]*\.safetensors|common\.pt|metadata\.json|"
    r"mp_rank_[\d_]+/[^/]*\.pt|[^/]*_states\.pt|zero/.*\.pt|(model|optim)_world_size_\d+_rank_\d+\.pt|huggingface/[^/]*|"
    r"(pytorch_model_fsdp|optimizer)(_0_rank\d+)?\.bin"
)
"""Names of what is saved in the folder of a step, or of a run that has one."""


def find_training(folder: FilePath) -> Training | None:
    """Find the files that a training program left in a folder; None if no known program uses such names."""
    if (folder / METADATA).is_file():
        return Training(folder / METADATA, partial(_read_torch, folder))
    if not folder.is_dir():
        return None
    names = sorted(path.name for path in folder.iterdir())
    of_ranks = [match for name in names for pattern in (_VERL, _RANK) if (match := pattern.fullmatch(name))]
    if of_ranks:
        return Training(folder / of_ranks[0][0], partial(_read_ranks, folder, of_ranks), "saved from FSDP")
    trackers = (folder / name for name in TRACKERS[:2] if name in names)
    steps = (folder / step_of(tracker, read_file(tracker, 1 << 10)) for tracker in trackers)
    step = next((step for step in steps if step.is_dir()), folder)
    patterns = (MODEL, OPTIMIZER)
    states = [path for path in glob(step, "*_states.pt") if any(name.fullmatch(path.name) for name in patterns)]
    if states:
        return Training(states[0], partial(read_zero, step), "saved by DeepSpeed")
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "optimizer_0", "optimizer.bin"):
        for file in (folder / name, folder / name / METADATA):
            if file.is_file():
                return Training(file, partial(_read_accelerate, folder, names), _ACCELERATE)
    return None


def read_training(folder: FilePath) -> Distributed:
    """The checkpoint in a folder. Raises CheckpointError and MismatchError."""
    program = find_training(folder)
    try:
        return program.read() if program is not None else read_distributed(folder)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        what = f"what its files hold is not as the program saves it: {error!s:.200}"
        raise CheckpointError(f"{folder}: {what}", "fetch or copy the files again") from error


def _read_torch(folder: FilePath) -> Distributed:
    """A distributed checkpoint, or transformers': then the weights are safetensors, and the rest is the optimizer."""
    distributed, weights = read_distributed(folder), glob(folder, "shard-*.safetensors")
    if weights:
        return _joined([_of_safetensors(weights, folder), distributed], folder, "saved by transformers")
    return _with_named_states(distributed)


def _of_safetensors(files: Sequence[FilePath], folder: FilePath) -> Distributed:
    """Safetensors whose headers say which chunks they have, as transformers' distributed checkpoints do."""
    chunks_of = dict[str, list[tuple[Chunk, TensorInfo]]]()
    for file in files:
        header = read_header(file)
        for name, at in read_chunks(file, header.metadata, header.tensors).items():
            chunks_of.setdefault(name, []).append((at, header.tensors[name]))
    entries: Entries = {
        ("model", name): Sharded(whole_shape(at for at, _ in chunks), chunks) for name, chunks in chunks_of.items()
    }
    return gathered(folder, entries, "", files)


def _joined(parts: Sequence[Distributed], folder: FilePath, what: str | None) -> Distributed:
    """Several folders or forms of files as one checkpoint. Raises MismatchError if a name is in two of them."""
    names = [name for part in parts for name in (*part.tensors, *part.objects)]
    if len({*names}) < len(names):
        raise MismatchError(f"{folder}: '{max(names, key=names.count)}' is there twice, in different files")

    def of(field: str) -> Mapping[str, object]:
        return {key: value for part in parts for key, value in getattr(part, field).items()}

    return Distributed(folder, of("tensors"), of("objects"), of("keys"), of("files"), what)  # type: ignore[arg-type]


def _with_named_states(saved: Distributed) -> Distributed:
    """The same with the states of the optimizer by name, if they are numbered and the order of parameters is known.

    That is the order of the model's keys, if one group has as many parameters, and all states have their shapes. A tied
    head of the vocabulary is no parameter of its own. Names are without Megatron-FSDP's ``module.``.
    """
    keys = {name: keys for name, keys in saved.keys.items() if name in saved.tensors}
    numbered = {name: k for name, k in keys.items() if len(k) == 4 and k[:2] == STATE and str(k[2]).isdecimal()}
    groups = [name for name in saved.objects if _PARAMETERS.fullmatch(name)]
    if not numbered or len(groups) != 1:
        return saved
    plain = {name: str(k[1]).removeprefix("module.") for name, k in keys.items() if k[0] == "model" and len(k) == 2}
    value, shapes = saved.object(groups[0]), {key: saved.tensors[name].shape for name, key in plain.items()}
    numbers = value if isinstance(value, list) and all(type(number) is int for number in value) else []
    for way in ([*shapes], [name for name in shapes if not name.endswith("lm_head.weight")]):
        if len(way) != len(numbers):
            continue
        of_number = dict(zip(map(str, numbers), way, strict=True))
        new = {name: (*STATE, of_number.get(str(key[2]), ""), key[3]) for name, key in numbered.items()}
        if all(saved.tensors[name].shape in ((), shapes.get(str(key[2]))) for name, key in new.items()):
            new = {**saved.keys, **{name: ("model", key) for name, key in plain.items()}, **new}
            renamed = {name: ".".join(map(str, new[name])) if name in new else name for name in saved.tensors}
            tensors = {renamed[name]: tensor for name, tensor in saved.tensors.items()}
            objects = {**saved.objects, groups[0]: way}
            keys = {renamed.get(name, name): key for name, key in new.items()}
            return replace(saved, tensors=tensors, objects=objects, keys=keys)
    return saved


def _read_accelerate(folder: FilePath, names: list[str]) -> Distributed:
    if "pytorch_model_fsdp_1" in names:
        raise CheckpointError(f"{folder} has several models", "give the folder of one (pytorch_model_fsdp_0)")
    if "pytorch_model_fsdp_0" in names:
        parts = [read_distributed(folder / name) for name in ("pytorch_model_fsdp_0", "optimizer_0") if name in names]
        return _joined(parts, folder, _ACCELERATE)
    if "pytorch_model_fsdp.bin" not in names:
        raise CheckpointError(
            f"{folder} has the states of an optimizer, and no model", "bring pytorch_model_fsdp_0 back"
        )
    from reshard.formats.files.fsdp_ranks import read_fsdp  # rarely needed

    optimizers = (folder / name for name in ("optimizer_0", "optimizer.bin"))
    optimizer = next((file for file in optimizers if file.is_file()), None)
    return read_fsdp(folder, [(folder / "pytorch_model_fsdp.bin", optimizer)], _ACCELERATE)


def _world_size(value: object, where: str) -> int | None:
    return Record(value, where).get("world_size", optional(whole(1, MOST_RANKS)), None)


def _read_ranks(folder: FilePath, matches: list[re.Match[str]]) -> Distributed:
    """Files of ranks, by the names of which the number of all ranks is known, or that of the last."""
    from reshard.formats.files.fsdp_ranks import read_fsdp  # rarely needed

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
            raise IncompleteError(why, "bring all ranks' files together")
    pairs = [(models[rank], optimizers.get(rank)) for rank in range(world)]
    return read_fsdp(folder, pairs, "saved by verl or SkyRL" if worlds else "saved by accelerate")


def model_files(folder: FilePath) -> dict[str, FilePath]:
    """The config.json of a model that a training program saved in a folder, and the files with it, by their names.

    They lie there, below in ``huggingface``, or above; above, folders are other things.
    """
    above = folder / ".." if folder.name in {"", ".."} else folder.parent
    for place, span in ((folder, "**"), (folder / "huggingface", "**"), (above, "*")):
        if (place / CONFIG).is_file():
            files = ((name_in(file, place), file) for file in find_side_files(place) if file.is_file())
            return {name: file for name, file in files if span == "**" or "/" not in name}
    return {}
