"""Compares tensors that state the shape of a weight with the original's.

A rank's tensor states the local shape of the weight, and is the original's in all else (see
``formats.quantization.stated_shapes``). This module has its own code for reading the shapes, to be independent of the
engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from formats.documents import lenient_json
from formats.errors import CheckpointError
from formats.files.safetensors import TensorInfo

_LIST = re.compile(rb"\[[^\]]*\]")
_PADDED = re.compile(rb"\[\d+(, \d+)* *\]")
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


class Statements:
    """Reads such tensors; each file is opened once."""

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}

    def __enter__(self) -> Statements:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, info: TensorInfo) -> bytes:
        """All bytes of a tensor. Raises CheckpointError if the file cannot be read."""
        try:
            if info.file not in self._files:
                self._files[info.file] = info.file.open("rb", buffering=0)
            file = self._files[info.file]
            file.seek(info.offset)
            content = b""
            while len(content) < info.nbytes:  # an unbuffered read may return less
                more = file.read(info.nbytes - len(content))
                if not more:
                    raise CheckpointError(f"{info.file} became shorter while it was read")
                content += more
            return content
        except OSError as error:
            raise CheckpointError(f"{info.file}: cannot be read: {error.strerror or error}") from error


def says(found: bytes, original: bytes, dtype: str, shape: Sequence[int]) -> bool:
    """Whether a rank's tensor is the original's with this shape in it."""
    if dtype in _INTEGERS:
        return np.array_equal(np.frombuffer(found, _INTEGERS[dtype]), shape)
    try:
        theirs, ours = lenient_json(found), lenient_json(original)
    except ValueError:
        return False
    if not isinstance(ours, dict):
        return False
    alike = _LIST.sub(b"[]", found) == _LIST.sub(b"[]", original)
    padded = all(_PADDED.fullmatch(part) for part in _LIST.findall(found))
    same: bool = {**ours, "shape": list(shape)} == theirs
    return alike and padded and same
