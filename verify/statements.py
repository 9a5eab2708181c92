"""Tensors that state the shape of a weight: what a rank's says, against the original's.

A rank states the shape that the weight has there; all else is the original's (see ``formats.statements``). The shapes
are read here in a way of their own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np

from formats.safetensors import TensorInfo

_LIST = re.compile(rb"\[[^\]]*\]")
_PADDED = re.compile(rb"\[\d+(, \d+)* *\]")
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


def says(info: TensorInfo, original: TensorInfo, shape: Sequence[int]) -> bool:
    """Whether a rank's statement is the original's with this shape in it."""
    found, expected = _read(info), _read(original)
    if info.dtype in _INTEGERS:
        return np.array_equal(np.frombuffer(found, _INTEGERS[info.dtype]), shape)
    try:
        theirs, ours = json.loads(found), json.loads(expected)
    except ValueError:
        return False
    alike = _LIST.sub(b"[]", found) == _LIST.sub(b"[]", expected)
    padded = all(_PADDED.fullmatch(part) for part in _LIST.findall(found))
    same: bool = {**ours, "shape": list(shape)} == theirs
    return alike and padded and same


def _read(info: TensorInfo) -> bytes:
    with info.file.open("rb") as file:
        file.seek(info.offset)
        return file.read(info.nbytes)
