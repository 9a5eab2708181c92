"""What a package of somebody else's may add to reshard: a container, a store, a quantization, and formats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.containers import Around, Container, Weights
from reshard.formats.files.layout import Layout, Tensor
from reshard.formats.files.safetensors import TensorInfo, tensor_bytes
from reshard.formats.quantization.companions import Scheme
from reshard.formats.store import FilePath, read_file
from reshard.store.remote import Remote

DTYPES = ("F32", "BF16", "F16", "I8")


def build(tensors: Sequence[Tensor], _: Around) -> Layout:
    """A line of JSON that names the tensors, then their bytes."""
    if strange := {tensor.dtype for tensor in tensors} - {*DTYPES}:
        raise PlanError(f"Acme has no {min(strange)}")
    header = (json.dumps([[tensor.name, tensor.dtype, tensor.shape] for tensor in tensors]) + "\n").encode()
    offsets = [len(header)]
    for tensor in tensors:
        offsets.append(offsets[-1] + tensor.nbytes)
    names = [tensor.name for tensor in tensors]
    return Layout(offsets[-1], names, offsets[:-1], fixed=((0, header),))


def read(file: FilePath) -> Weights:
    """The tensors that the first line names."""
    size = file.stat().st_size
    header, found, _ = read_file(file).partition(b"\n")
    if not found:
        raise CheckpointError(f"{file} is cut off")
    tensors, offset = {}, len(header) + 1
    for name, dtype, shape in json.loads(header):
        nbytes = tensor_bytes(name, dtype, tuple(shape))
        tensors[name] = TensorInfo(name, dtype, tuple(shape), file, offset, nbytes)
        offset += nbytes
    if offset != size:
        raise CheckpointError(f"{file} has {size} bytes, and names {offset}")
    return Weights(tensors)


CONTAINER = Container((".acme",), read, build)


class OnShelf(Remote):
    """A file on a shelf."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, path.stat().st_size

    @property
    def identity(self) -> str:
        """The hash of its content."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    @property
    def address(self) -> str:
        """Where it stands."""
        return f"shelf:/{self.path}"

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes of it."""
        return memoryview(self.path.read_bytes()[start:stop])


def files_of(url: str) -> Mapping[str, Any]:
    """The files at ``shelf://FOLDER``: small ones as they are, weights to be read by ranges."""
    folder = Path(url.removeprefix("shelf:/"))
    return {
        path.relative_to(folder).as_posix(): path if path.suffix == ".json" else OnShelf(path)
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip


def scheme_of(settings: Mapping[str, Any]) -> Scheme:
    """Weights of eight bits, each with a scale for each of its outputs."""
    return Scheme({".weight_steps": ("lead out 1",)})
