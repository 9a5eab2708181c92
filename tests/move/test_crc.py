"""CRC-32s that are made of those of pieces are those of the whole."""

from __future__ import annotations

import itertools
import os
import random
import zipfile
import zlib
from pathlib import Path

import pytest

from reshard.api import split
from reshard.formats.files.layout import Crc
from reshard.move import jobs as crcs
from reshard.move.jobs import SMALLEST, CrcRun, Sizes, add_run, parts_within, value_of
from tests.marks import thorough
from tests.support import LLAMA, write_checkpoint


def test_pieces_in_any_order() -> None:
    content, chance = os.urandom(500_000), random.Random(0)
    ends = sorted({0, len(content), *(chance.randrange(len(content)) for _ in range(9))})
    pieces = list(itertools.pairwise(ends))
    for _ in range(20):
        chance.shuffle(pieces)
        runs: list[CrcRun] = []
        for begin, end in pieces:
            add_run(runs, 7 + begin, memoryview(content)[begin:end], is_whole=True)
        assert value_of(Crc(7, 7 + len(content), ()), sorted(runs)) == zlib.crc32(content)
        assert value_of(Crc(7, 8 + len(content), ()), sorted(runs)) is None
        assert value_of(Crc(6, 7 + len(content), ()), sorted(runs)) is None
        assert len(runs) == 1 or value_of(Crc(7, 7 + len(content), ()), sorted(runs)[1:]) is None


def test_small_pieces_are_left_to_be_read_again() -> None:
    runs: list[CrcRun] = []
    add_run(runs, 0, memoryview(bytes(SMALLEST - 1)), is_whole=False)
    assert not runs
    add_run(runs, 0, memoryview(bytes(SMALLEST)), is_whole=False)
    add_run(runs, SMALLEST, memoryview(b"x"), is_whole=False)
    assert runs == [CrcRun(0, SMALLEST + 1, zlib.crc32(bytes(SMALLEST) + b"x"))]


def test_the_parts_of_a_piece() -> None:
    found = [Crc(10, 20, ()), Crc(25, 25, ()), Crc(30, 50, ()), Crc(60, 61, ())]
    assert list(parts_within(found, 0, 100)) == [(10, 20, True), (30, 50, True), (60, 61, True)]
    assert list(parts_within(found, 15, 20)) == [(15, 20, False), (30, 35, False)]
    assert list(parts_within(found, 20, 10)) == []
    assert list(parts_within(found, 30, 20)) == [(30, 50, True)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("workers", [1, 3])
@thorough
def test_what_several_processes_write_together(
    tp: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors, which are written in steps and, on two ranks, in rows; each entry has the CRC-32 of its bytes."""
    monkeypatch.setattr(crcs, "SMALLEST", 1 << 10)
    large = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 1500, "head_dim": 64}
    original = write_checkpoint(tmp_path / "original", config=large)
    sizes = Sizes(step=1 << 20, small=1000)
    split(original, tmp_path / "out", tp=tp, format="meta", workers=workers, sizes=sizes)
    for file in (tmp_path / "out").glob("*.pth"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
