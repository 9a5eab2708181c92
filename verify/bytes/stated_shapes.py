"""Compares tensors that state the shape of a weight with the original's.

A rank's tensor states the local shape of the weight, and is the original's in all else (see
``formats.quantization.stated_shapes``). This module has its own code for reading the shapes, to be independent of the
engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from formats.documents import lenient_json

_LIST = re.compile(rb"\[[^\]]*\]")
_PADDED = re.compile(rb"\[\d+(, \d+)* *\]")
_INTEGERS = {"I32": "<i4", "I64": "<i8"}


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
