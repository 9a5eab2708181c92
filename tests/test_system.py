"""What Python lacks of the C library, and what happens where the library lacks it."""

from __future__ import annotations

import ctypes
import errno
import os

import pytest

from reshard.api import split
from reshard.formats.errors import CheckpointError
from reshard.system import reserve
from tests.support import contents, write_checkpoint


def test_reserve_gives_a_file_its_size_and_place(tmp_path):
    path = tmp_path / "f"
    with path.open("w+b") as file:
        reserve(file.fileno(), 3_000_000)
        assert path.stat().st_size == 3_000_000
        assert file.read() == bytes(3_000_000)
    with path.open("w+b") as file:
        reserve(file.fileno(), 0)
        assert path.stat().st_size == 0


def test_reserve_more_than_there_is(tmp_path):
    with (tmp_path / "f").open("w+b") as file:
        with pytest.raises(OSError) as error:
            reserve(file.fileno(), 1 << 60)
        assert error.value.errno in {errno.ENOSPC, errno.EFBIG}


class Library:
    """A C library on a system that does not know the call."""

    def fallocate64(self, *_: object) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1


@pytest.mark.parametrize("library", [None, Library()])
def test_without_the_library(tmp_path, monkeypatch, library):
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "with", tp=4)
    monkeypatch.setattr("reshard.system._LIBRARY", library)
    split(source, tmp_path / "without", tp=4)
    assert contents(tmp_path / "with") == contents(tmp_path / "without")


def test_no_room_for_what_is_reserved_leaves_none_taken(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", files=3)
    reserved = []

    def full(descriptor, nbytes):
        reserved.append(nbytes)
        if len(reserved) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, nbytes)

    monkeypatch.setattr("reshard.move.engine.reserve", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        split(source, tmp_path / "out", tp=4)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").rglob("*.incomplete"))
