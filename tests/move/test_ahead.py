"""Bytes of files on this machine are asked of the kernel before they are read, if they are not in its page cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from reshard import load, split
from reshard.formats.files.safetensors import read_header
from reshard.move import reading
from tests.support import contents, write_checkpoint


@dataclass
class Kernel:
    """The page cache as the tests have it."""

    is_cached: bool = False
    asked: list[tuple[int, int]] = field(default_factory=list)
    """The offsets and lengths that it is asked for."""


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """A kernel with an empty page cache."""
    found, read = Kernel(), os.preadv

    def preadv(descriptor: int, buffers: Sequence[Any], offset: int, *flags: int) -> int:
        if flags and not found.is_cached:
            raise BlockingIOError
        return read(descriptor, buffers, offset)

    def ask(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED and offset + length <= os.fstat(descriptor).st_size
        found.asked.append((offset, length))

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", ask)
    return found


@pytest.mark.parametrize("is_cached", [False, True])
def test_what_is_not_in_the_cache_is_asked_for_once(tmp_path: Path, kernel: Kernel, is_cached: bool) -> None:
    source, kernel.is_cached = write_checkpoint(tmp_path / "source"), is_cached
    split(source, tmp_path / "out", tp=2)
    weights = sum(info.nbytes for file in source.glob("*.safetensors") for info in read_header(file).tensors.values())
    assert sum(length for _, length in kernel.asked) == (0 if is_cached else weights)


def test_a_system_that_cannot_be_asked_reads_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_NOWAIT", None)
    monkeypatch.delattr(os, "posix_fadvise")
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "out", tp=2)
    assert load(source, tp=2).keys() == load(tmp_path / "out", tp=2).keys()


def test_few_bytes_are_held_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: Kernel) -> None:
    """A step is carried out when enough is on its way, or nothing is."""
    monkeypatch.setattr(reading, "AHEAD_HERE", 1)
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "out", tp=2)
    monkeypatch.setattr(reading, "AHEAD_HERE", 1 << 40)
    split(source, tmp_path / "other", tp=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "other") and kernel.asked
