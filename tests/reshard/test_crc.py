"""CRC-32s that are made of those of pieces are those of the whole."""

from __future__ import annotations

import itertools
import os
import random
import zipfile
import zlib
from pathlib import Path

import pytest

from formats.files.torch_zip import Crc
from reshard.api import split
from reshard.engine import crc as crcs
from reshard.engine.crc import FOLDED, FOLDS, SMALLEST, Run, add_run, combined, crc32, joined, parts_within
from reshard.engine.jobs import Options
from tests.support import LLAMA, write_checkpoint


@pytest.mark.parametrize(
    "lengths", [(0, 0), (0, 5), (5, 0), (1, 1), (3, 70_000), (70_000, 3), (1 << 20, (1 << 20) + 7)]
)
def test_two_pieces(lengths: tuple[int, int]) -> None:
    first, second = (os.urandom(length) for length in lengths)
    assert combined(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize("fold", FOLDS)
def test_the_polynomials_that_pieces_are_folded_by(fold: tuple[int, ...]) -> None:
    """The polynomial of CRC-32 divides the sum of these powers of x, so no remainder is left."""
    rest, power = 0, 1
    for exponent in range(fold[0] + 1):
        rest ^= power if exponent in fold else 0
        power = power << 1 ^ (0x104C11DB7 if power >> 31 else 0)
    assert rest == 0


LONGEST = 8 * FOLDS[0][0]


@pytest.mark.parametrize(
    "size", [0, FOLDED - 1, FOLDED, FOLDED + 5, LONGEST - 8, LONGEST + 8, LONGEST + 15, 2 * LONGEST, (4 << 20) + 3]
)
def test_a_large_piece(size: int) -> None:
    content = random.Random(size).randbytes(size + 1)
    for value in (0, 1, zlib.crc32(b"before")):
        for piece in (memoryview(content)[:size], memoryview(content)[1:]):  # also where no word is aligned
            assert crc32(piece, value) == zlib.crc32(piece, value)


def test_pieces_in_any_order() -> None:
    content, chance = os.urandom(500_000), random.Random(0)
    ends = sorted({0, len(content), *(chance.randrange(len(content)) for _ in range(9))})
    pieces = list(itertools.pairwise(ends))
    for _ in range(20):
        chance.shuffle(pieces)
        runs: list[Run] = []
        for begin, end in pieces:
            add_run(runs, 7 + begin, memoryview(content)[begin:end], is_whole=True)
        assert joined(Crc(7, 7 + len(content), ()), sorted(runs)) == zlib.crc32(content)
        assert joined(Crc(7, 8 + len(content), ()), sorted(runs)) is None
        assert joined(Crc(6, 7 + len(content), ()), sorted(runs)) is None
        assert len(runs) == 1 or joined(Crc(7, 7 + len(content), ()), sorted(runs)[1:]) is None


def test_small_pieces_are_left_to_be_read_again() -> None:
    runs: list[Run] = []
    add_run(runs, 0, memoryview(bytes(SMALLEST - 1)), is_whole=False)
    assert not runs
    add_run(runs, 0, memoryview(bytes(SMALLEST)), is_whole=False)
    add_run(runs, SMALLEST, memoryview(b"x"), is_whole=False)
    assert runs == [Run(0, SMALLEST + 1, zlib.crc32(bytes(SMALLEST) + b"x"))]


def test_the_parts_of_a_piece() -> None:
    found = [Crc(10, 20, ()), Crc(25, 25, ()), Crc(30, 50, ()), Crc(60, 61, ())]
    assert list(parts_within(found, 0, 100)) == [(10, 20, True), (30, 50, True), (60, 61, True)]
    assert list(parts_within(found, 15, 20)) == [(15, 20, False), (30, 35, False)]
    assert list(parts_within(found, 20, 10)) == []
    assert list(parts_within(found, 30, 20)) == [(30, 50, True)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("workers", [1, 3])
def test_what_several_processes_write_together(
    tp: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors, which are written in steps and, on two ranks, in rows; each entry has the CRC-32 of its bytes."""
    monkeypatch.setattr("reshard.engine.move.STEP", 1 << 20)
    monkeypatch.setattr(crcs, "SMALLEST", 1 << 10)
    large = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 1500, "head_dim": 64}
    original = write_checkpoint(tmp_path / "original", config=large)
    split(original, tmp_path / "out", tp, form="meta", options=Options(workers=workers))
    for file in (tmp_path / "out").glob("*.pth"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
