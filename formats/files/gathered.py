"""Gathers what the files of a training program hold, as one distributed checkpoint of torch's.

Names are those of torch's own state dicts: ``model.{name}``, ``optimizer.state.{name}.exp_avg``,
``optimizer.param_groups.{number}.lr``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from formats.errors import MismatchError
from formats.files.chunks import Chunk, check_tiling
from formats.files.dcp import Distributed, Whole, object_bytes
from formats.files.safetensors import TensorInfo
from formats.store import FilePath

Keys = tuple[str | int, ...]
STATE: Keys = ("optimizer", "state")


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
            raise MismatchError(f"{new[0][1].file if new else self._folder}: {_differs(name, shape)} in {other}")
        self._chunks.setdefault(name, []).extend(new)

    def add_whole(self, keys: Keys, info: TensorInfo) -> None:
        """Add a tensor that is stored whole."""
        self.add(keys, info.shape, [(Chunk((0,) * len(info.shape), info.shape), info)])

    def add_object(self, keys: Keys, value: object) -> None:
        """Add what is no tensor; what is not plain data is left out."""
        try:
            self._objects[self._name(keys)] = object_bytes(value)
        except TypeError:
            return

    def add_groups(self, groups: object, names: Sequence[Sequence[str]]) -> None:
        """Add the settings of an optimizer, with the ``names`` of the parameters of each group."""
        for number, (group, own) in enumerate(zip(groups if isinstance(groups, list) else (), names, strict=False)):
            for key, value in group.items() if isinstance(group, dict) else ():
                self.add_object(("optimizer", "param_groups", number, key), [*own] if key == "params" else value)

    def finish(self, what: str, files: Collection[FilePath]) -> Distributed:
        """What was gathered. Raises MismatchError if a tensor has two dtypes, or its chunks do not make it."""
        tensors: dict[str, Whole] = {}
        for name, chunks in self._chunks.items():
            shape, dtypes = self._shapes[name], dict.fromkeys(info.dtype for _, info in chunks)
            if len(dtypes) > 1:
                raise MismatchError(f"{self._folder}: '{name}' is {' and '.join(dtypes)} in different files")
            if not chunks:
                raise MismatchError(f"{self._folder}: no file has any of '{name}', a tensor {list(shape)}")
            kept = chunks[:1] if 0 in shape else chunks
            check_tiling(name, dict(enumerate(at for at, _ in kept)), shape, self._folder)
            tensors[name] = Whole(name, kept[0][1].dtype, shape, tuple(kept))
        sizes = {file: file.stat().st_size for file in files}
        return Distributed(self._folder, tensors, self._objects, self._keys, sizes, what)

    def _name(self, keys: Keys) -> str:
        name = ".".join(map(str, keys))
        self._keys[name] = keys
        return name


def _differs(name: str, shape: tuple[int, ...]) -> str:
    return f"'{name}' is of a tensor {list(shape)} here, and of another"


def joined(parts: Sequence[Distributed], folder: FilePath, what: str | None) -> Distributed:
    """Several folders or forms of files as one checkpoint. Raises MismatchError if a name is in two of them."""
    names = [name for part in parts for name in (*part.tensors, *part.objects)]
    if len({*names}) < len(names):
        raise MismatchError(f"{folder}: '{max(names, key=names.count)}' is there twice, in different files")

    def of(each: str) -> Mapping[str, object]:
        return {key: value for part in parts for key, value in getattr(part, each).items()}

    return Distributed(folder, of("tensors"), of("objects"), of("keys"), of("files"), what)  # type: ignore[arg-type]
