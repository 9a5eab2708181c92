"""Tensors that state the shape of a weight, which on a rank is the rank's own.

compressed-tensors' ``weight_shape`` is the shape as integers; bitsandbytes' ``quant_state`` is JSON, as bytes, in which
``shape`` is one of the settings. Another shape is put into the same number of bytes, so that the first can be put back
to the byte: in JSON, spaces stand behind it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

from formats.documents import lenient_json
from formats.errors import CheckpointError

_INTEGERS = {"I32": "i", "I64": "q"}
_SHAPE = re.compile(rb'"shape": \[([^\]]*)\]')


def restated(data: bytes, dtype: str, before: Sequence[int], after: Sequence[int]) -> bytes:
    """A statement of the shape ``before``, made one of ``after``: as many bytes.

    Raises CheckpointError, in which the tensor is yet to be named, where it states another shape, or where ``before``
    could not be put back to the byte.
    """
    stated = _stated(data, dtype)
    if stated != list(before):
        raise CheckpointError(f"states the shape {stated} for a weight of shape {list(before)}")
    if list(after) == list(before):
        return data
    if dtype in _INTEGERS:
        return struct.pack(f"<{len(after)}{_INTEGERS[dtype]}", *after)
    found = [match.span(1) for match in _SHAPE.finditer(data)]
    begin, end = found[0] if len(found) == 1 else (0, 0)
    width = end - begin
    new = data[:begin] + _numbers(after).ljust(width) + data[end:]
    if data[begin:end] != _numbers(before).ljust(width) or len(new) != len(data) or _shape_in_json(new) != list(after):
        raise CheckpointError(
            f"states the shape {stated} in a form that cannot be put back to the byte",
            "as bitsandbytes writes it, it is '\"shape\": [rows, columns]', once: load it and save it again",
        )
    return new


def _numbers(shape: Sequence[int]) -> bytes:
    return ", ".join(map(str, shape)).encode()


def _stated(data: bytes, dtype: str) -> Any:
    """The shape that is stated; None if none is."""
    if dtype not in _INTEGERS:
        return _shape_in_json(data)
    kind = _INTEGERS[dtype]
    return list(struct.unpack(f"<{len(data) // struct.calcsize(kind)}{kind}", data))


def _shape_in_json(data: bytes) -> Any:
    try:
        document = lenient_json(data.decode())
    except ValueError:
        return None
    return document.get("shape") if isinstance(document, dict) else None
