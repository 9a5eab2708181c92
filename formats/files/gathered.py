"""Gathers what the files of a training program hold, as one distributed checkpoint of torch's.

Names are those of torch's own state dicts: ``model.{name}``, ``optimizer.state.{name}.exp_avg``,
``optimizer.param_groups.{number}.lr``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from formats.errors import MismatchError
from formats.files.chunks import Chunk, Sharded, check_tiling, read_chunks, whole_shape
from formats.files.dcp import Blob, Distributed, read_object
from formats.files.pickles import is_plain, quote
from formats.files.safetensors import TensorInfo, read_header
from formats.store import FilePath, read_ranges

Keys = tuple[str | int, ...]
STATE: Keys = ("optimizer", "state")
TOGETHER = "bring all files of one save together"
_PARAMETERS = re.compile(r"optimizer\.param_groups\.\d+\.params")

Entries = dict[Keys, object]
"""What was saved, by the keys that lead to it: a tensor is ``Sharded``, all else is data."""


def group_settings(groups: object, names: Sequence[Sequence[str]]) -> Entries:
    """The settings of an optimizer, with the ``names`` of the parameters of each group."""
    tables = enumerate(zip(groups if isinstance(groups, list) else (), names, strict=False))
    return {
        ("optimizer", "param_groups", number, key): [*members] if key == "params" else value
        for number, (group, members) in tables
        for key, value in (group.items() if isinstance(group, dict) else ())
    }


def gathered(folder: FilePath, entries: Entries, what: str, files: Collection[FilePath]) -> Distributed:
    """What the files of a folder have. Of what is no tensor, only plain data is kept.

    Raises MismatchError if a tensor has two dtypes, or its chunks do not make it; empty ones are nothing.
    """
    tensors, objects, keys_of = dict[str, Sharded](), dict[str, object](), dict[str, Keys]()
    for keys, entry in entries.items():
        keys_of[name := ".".join(map(str, keys))] = keys
        if not isinstance(entry, Sharded):
            objects |= {name: entry} if is_plain(entry) else {}
            continue
        shape = entry.shape
        parts = [(at, info) for at, info in entry.chunks if 0 not in at.shape or 0 in shape]
        dtypes = dict.fromkeys(info.dtype for _, info in parts)
        if len(dtypes) > 1:
            raise MismatchError(f"{folder}: '{name}' is {' and '.join(dtypes)} in different files")
        if not parts:
            raise MismatchError(f"{folder}: no file has any of '{name}', a tensor {list(shape)}")
        parts = parts[:1] if 0 in shape else parts
        check_tiling(name, dict(enumerate(at for at, _ in parts)), shape, folder)
        tensors[name] = Sharded(shape, parts)
    return Distributed(folder, tensors, objects, keys_of, {file: file.stat().st_size for file in files}, what)


def check_steps(steps: Iterable[tuple[FilePath, object]]) -> None:
    """Raise MismatchError if the steps that files state, as numbers or as tensors, differ."""
    first: tuple[FilePath, object] | None = None
    for file, step in steps:
        if isinstance(step, TensorInfo):
            (step,) = read_ranges([(step.file, step.offset, step.offset + step.nbytes)])
        step = step if isinstance(step, bytes | int | float) else quote(step)  # lists that unfold are not compared
        first = first or (file, step)
        if step != first[1]:
            raise MismatchError(f"{file} and {first[0]} are of different steps", TOGETHER)


def of_safetensors(files: Sequence[FilePath], folder: FilePath) -> Distributed:
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


def joined(parts: Sequence[Distributed], folder: FilePath, what: str | None) -> Distributed:
    """Several folders or forms of files as one checkpoint. Raises MismatchError if a name is in two of them."""
    names = [name for part in parts for name in (*part.tensors, *part.objects)]
    if len({*names}) < len(names):
        raise MismatchError(f"{folder}: '{max(names, key=names.count)}' is there twice, in different files")

    def of(field: str) -> Mapping[str, object]:
        return {key: value for part in parts for key, value in getattr(part, field).items()}

    return Distributed(folder, of("tensors"), of("objects"), of("keys"), of("files"), what)  # type: ignore[arg-type]


def with_named_states(saved: Distributed) -> Distributed:
    """The same with the states of the optimizer by name, if they are numbered and the order of parameters is known.

    That is the order of the model's keys, if one group has as many parameters, and all states have their shapes. A tied
    head of the vocabulary is no parameter of its own. Names are without Megatron-FSDP's ``module.``.
    """
    keys = {name: keys for name, keys in saved.keys.items() if name in saved.tensors}
    numbered = {name: k for name, k in keys.items() if len(k) == 4 and k[:2] == STATE and str(k[2]).isdecimal()}
    groups = [name for name in saved.objects if _PARAMETERS.fullmatch(name)]
    if not numbered or len(groups) != 1 or not isinstance(blob := saved.objects[groups[0]], Blob):
        return saved
    plain = {name: str(k[1]).removeprefix("module.") for name, k in keys.items() if k[0] == "model" and len(k) == 2}
    value, shapes = read_object(blob), {key: saved.tensors[name].shape for name, key in plain.items()}
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
