"""The demo's model has the same bytes on every machine: docs/tutorial.md shows their sha256."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reshard.formats.files.safetensors import read_header
from reshard.tiny_model import write_model


def in_integers(count: int, draws: Iterator[int], bias: int) -> bytes:
    """The values of a tensor from 64 random bits each time, by arithmetic that has no rounding but the last."""
    found = []
    for word in itertools.islice(draws, math.ceil(count / 2)):
        for half in (word & 0xFFFFFFFF, word >> 32):
            steps = sum(half.to_bytes(4, "little")) - 510 + bias * 2**13
            found.append(struct.pack("<f", steps / 2**13)[2:])
    return b"".join(found[:count])


def test_weights_are_made_of_integers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    generator = np.random.PCG64(0)
    draws = iter(lambda: int(generator.random_raw()), None)
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        for info in sorted(read_header(file).tensors.values(), key=lambda info: info.offset):
            if info.nbytes > 200_000:  # in Python that takes a while
                generator.advance(math.ceil(info.nbytes / 4))
                continue
            expected = in_integers(info.nbytes // 2, draws, int(len(info.shape) == 1))
            assert content[info.offset : info.offset + info.nbytes] == expected, info.name
