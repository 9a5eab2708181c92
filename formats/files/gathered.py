"""Gathers what the files of a training program hold, as one distributed checkpoint of torch's.

Names are those of torch's own state dicts: ``model.{name}``, ``optimizer.state.{name}.exp_avg``,
``optimizer.param_groups.{number}.lr``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from formats.errors import MismatchError
from formats.files.chunks import Chunk, check_tiling, read_chunks, whole_shape
from formats.files.dcp import Blob, Distributed, Whole, object_bytes, read_object
from formats.files.safetensors import TensorInfo, read_header
from formats.store import FilePath, read_ranges

Keys = tuple[str | int, ...]
STATE: Keys = ("optimizer", "state")
TOGETHER = "bring all files of one save together"
_PARAMETERS = re.compile(r"optimizer\.param_groups\.\d+\.params")


class Gathered:
    """The tensors and objects of a folder, by the keys that lead to them."""

    def __init__(self, folder: FilePath) -> None:
        self._folder = folder
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._chunks: dict[str, list[tuple[Chunk, TensorInfo]]] = {}
        self._objects: dict[str, bytes] = {}
        self._keys: dict[str, Keys] = {}

    def add(self, keys: Keys, shape: tuple[int, ...], chunks: Iterable[tuple[Chunk, TensorInfo]]) -> None:
        """Add chunks of a tensor of ``shape``; empty ones are nothing. Raises MismatchError if files disagree."""
        name = self._name(keys)
        new = [(at, info._replace(name=name)) for at, info in chunks if 0 not in at.shape or 0 in shape]
        if self._shapes.setdefault(name, shape) != shape:
            other = self._chunks[name][0][1].file if self._chunks[name] else self._folder
            file = new[0][1].file if new else self._folder
            raise MismatchError(f"{file}: '{name}' is of a tensor {list(shape)} here, and of another in {other}")
        self._chunks.setdefault(name, []).extend(new)

    def add_whole(self, keys: Keys, info: TensorInfo) -> None:
        """Add a tensor that is stored whole."""
        self.add(keys, info.shape, [(Chunk((0,) * len(info.shape), info.shape), info)])

    def add_copy(self, keys: Keys, original: Keys) -> None:
        """Add a tensor that shares the bytes of another, if it is not there yet."""
        name = self._name(original)
        if name in self._shapes and self._name(keys) not in self._shapes:
            self.add(keys, self._shapes[name], self._chunks[name])

    def add_object(self, keys: Keys, value: object) -> None:
        """Add what is no tensor; what is not plain data is left out."""
        try:
            self._objects[self._name(keys)] = object_bytes(value)
        except TypeError:
            return

    def add_groups(self, groups: object, names: Sequence[Sequence[str]]) -> None:
        """Add the settings of an optimizer, with the ``names`` of the parameters of each group."""
        for number, (group, members) in enumerate(zip(groups if isinstance(groups, list) else (), names, strict=False)):
            for key, value in group.items() if isinstance(group, dict) else ():
                self.add_object(("optimizer", "param_groups", number, key), [*members] if key == "params" else value)

    def join(self, others: Sequence[Gathered], dim_of: Callable[[str], int | None]) -> None:
        """Add what the next tensor parallel ranks have: each has a part of the dimension that ``dim_of`` a name says.

        Of a tensor without one all have the same. Raises MismatchError if their shapes do not fit.
        """
        for name, chunks in self._chunks.items():
            dim, shape = dim_of(str(self._keys[name][1 if len(self._keys[name]) == 2 else 2])), [*self._shapes[name]]
            for other in others if shape else ():
                part = other._shapes.get(name, ())
                around = [(*dims[:dim], *dims[dim + 1 :]) if dim is not None else (*dims,) for dims in (part, shape)]
                if around[0] != around[1]:
                    text = f"'{name}' is {shape} on the first model parallel ranks, and {list(part)} on the next"
                    raise MismatchError(f"{self._folder}: {text}", TOGETHER)
                if dim is None:
                    continue
                begin = tuple(shape[dim] if at == dim else 0 for at in range(len(shape)))
                for at, info in other._chunks[name]:
                    chunks.append((Chunk(tuple(map(sum, zip(at.offset, begin, strict=True))), at.shape), info))
                shape[dim] += part[dim]
            self._shapes[name] = tuple(shape)

    def finish(self, what: str, files: Collection[FilePath]) -> Distributed:
        """What was gathered. Raises MismatchError if a tensor has two dtypes, or its chunks do not make it."""
        tensors: dict[str, Whole] = {}
        for name, chunks in self._chunks.items():
            shape, dtypes = self._shapes[name], dict.fromkeys(info.dtype for _, info in chunks)
            if len(dtypes) > 1:
                raise MismatchError(f"{self._folder}: '{name}' is {' and '.join(dtypes)} in different files")
            if not chunks:
                raise MismatchError(f"{self._folder}: no file has any of '{name}', a tensor {list(shape)}")
            parts = chunks[:1] if 0 in shape else chunks
            check_tiling(name, dict(enumerate(at for at, _ in parts)), shape, self._folder)
            tensors[name] = Whole(name, parts[0][1].dtype, shape, tuple(parts))
        sizes = {file: file.stat().st_size for file in files}
        return Distributed(self._folder, tensors, self._objects, self._keys, sizes, what)

    def _name(self, keys: Keys) -> str:
        name = ".".join(map(str, keys))
        self._keys[name] = keys
        return name


def check_steps(steps: Iterable[tuple[FilePath, object]]) -> None:
    """Raise MismatchError if the steps that files state, as numbers or as tensors, differ."""
    first: tuple[FilePath, object] | None = None
    for file, step in steps:
        if isinstance(step, TensorInfo):
            (step,) = read_ranges([(step.file, step.offset, step.offset + step.nbytes)])
        first = first or (file, step)
        if step != first[1]:
            raise MismatchError(f"{file} and {first[0]} are of different steps", TOGETHER)


def of_safetensors(files: Sequence[FilePath], folder: FilePath) -> Distributed:
    """Safetensors whose headers say which chunks they have, as transformers' distributed checkpoints do."""
    gathered, chunks_of = Gathered(folder), dict[str, list[tuple[Chunk, TensorInfo]]]()
    for file in files:
        header = read_header(file)
        for name, at in read_chunks(file, header.metadata, header.tensors).items():
            chunks_of.setdefault(name, []).append((at, header.tensors[name]))
    for name, chunks in chunks_of.items():
        gathered.add(("model", name), whole_shape(at for at, _ in chunks), chunks)
    return gathered.finish("", files)


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
    numbers, shapes = read_object(blob), {key: saved.tensors[name].shape for name, key in plain.items()}
    for way in ([*shapes], [name for name in shapes if not name.endswith("lm_head.weight")]):
        if not isinstance(numbers, list) or len(way) != len(numbers):
            continue
        of_number = dict(zip(map(str, numbers), way, strict=True))
        new = {name: (*STATE, of_number.get(str(key[2]), ""), key[3]) for name, key in numbered.items()}
        if all(saved.tensors[name].shape in ((), shapes.get(str(key[2]))) for name, key in new.items()):
            new = {**saved.keys, **{name: ("model", key) for name, key in plain.items()}, **new}
            renamed = {name: ".".join(map(str, new[name])) if name in new else name for name in saved.tensors}
            tensors = {renamed[name]: whole._replace(name=renamed[name]) for name, whole in saved.tensors.items()}
            objects = {**saved.objects, groups[0]: object_bytes(way)}
            keys = {renamed.get(name, name): key for name, key in new.items()}
            return replace(saved, tensors=tensors, objects=objects, keys=keys)
    return saved
