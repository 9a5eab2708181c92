"""Reads pieces of weight files, of this machine or from where they lie.

The proof has its own code for this, to be independent of the engine.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

import numpy as np

from formats.errors import CheckpointError
from formats.files.checksum import PartialSum, sum_part
from formats.regular_files import open_file, unreadable
from reshard.storage.remote import Read
from reshard.storage.source import Source, SourceFile
from verify.bytes.dequantized import opened
from verify.bytes.views import Array

OPEN = 64
"""So many files stay open."""

BLOCK = 4 << 20
"""Files that lie elsewhere are read in blocks of so many bytes."""

ROOM = 1 << 30
"""Bytes of blocks that are kept: ranks share most blocks, and are compared at about the same time."""

_WORKERS, _WORKERS_ELSEWHERE = 4, 16


class Files:
    """Files of which pieces are read, by any thread; those that were used last stay open.

    To ``sums``, which have those of the headers, the blocks of files that lie elsewhere are added as they are fetched.
    """

    def __init__(self, *sources: Source, sums: Mapping[Path, PartialSum] = MappingProxyType({})) -> None:
        elsewhere = (file for source in sources for file in source.files.values() if file.remote is not None)
        self._elsewhere = {file.path: _Blocks(file, sums.get(file.path)) for file in elsewhere}
        self._open: OrderedDict[Path, BinaryIO] = OrderedDict()
        self._kept: OrderedDict[tuple[Path, int], Future[memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def workers(self) -> int:
        """The threads that should read: many, where they wait for answers."""
        return _WORKERS_ELSEWHERE if self._elsewhere else min(_WORKERS, os.cpu_count() or 1)

    def is_elsewhere(self, path: Path) -> bool:
        """Whether the bytes of a file are fetched from elsewhere, and added to its sum."""
        return path in self._elsewhere

    def read(self, path: Path, begin: int, nbytes: int) -> Array:
        """Bytes of a file. Raises CheckpointError, MismatchError."""
        found = np.empty(nbytes, np.uint8)
        self.fill(path, begin, found)
        return found

    def fill(self, path: Path, begin: int, buffer: Array) -> None:
        """Fill a buffer with bytes of a file.

        Raises CheckpointError if it cannot be read or has become shorter, MismatchError if it was replaced.
        """
        done = 0
        if path in self._elsewhere:
            while done < buffer.size:
                number, skip = divmod(begin + done, BLOCK)
                piece = self._block(path, number)[skip : skip + buffer.size - done]
                buffer[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                done += len(piece)
            return
        try:
            file = self._file(path)
            while done < buffer.size:
                count = os.preadv(file.fileno(), [buffer[done:].data], begin + done)
                if not count:
                    raise CheckpointError(f"{path} became shorter while it was read")
                done += count
        except OSError as error:
            raise unreadable(path, error) from None

    def _file(self, path: Path) -> BinaryIO:
        with self._lock:
            if path not in self._open:
                self._open[path] = open_file(path)
                if len(self._open) > OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return self._open[path]

    def _block(self, path: Path, number: int) -> memoryview:
        """A block of a file; who asks first fetches it, the others wait."""
        key, mine = (path, number), Future[memoryview]()
        with self._lock:
            block = self._kept.setdefault(key, mine)
            self._kept.move_to_end(key)
            if len(self._kept) * BLOCK > ROOM:
                self._kept.popitem(last=False)
        if block is mine:
            try:
                mine.set_result(self._elsewhere[path].read(number))
            except BaseException as error:
                mine.set_exception(error)
        return block.result()


class _Blocks:
    """The blocks of a file that lies elsewhere; each is added to ``total`` once."""

    def __init__(self, file: SourceFile, total: PartialSum | None) -> None:
        self._file, self._total, self._lock = file, total, threading.Lock()
        self._summed: set[int] = set()
        self._opened: Read | None = None

    def read(self, number: int) -> memoryview:
        """A block; the last is shorter. Raises CheckpointError, MismatchError."""
        with self._lock:
            if self._opened is None:
                assert self._file.remote is not None
                self._opened = opened(self._file.remote)
        begin = number * BLOCK
        if begin >= self._file.size:
            raise CheckpointError(f"{self._file.shown} has no byte {begin}")
        found = self._opened(begin, min(begin + BLOCK, self._file.size))
        if self._total is not None:
            self._sum(number, begin, found)
        return found

    def _sum(self, number: int, begin: int, found: memoryview) -> None:
        skip = max(0, len(self._file.header or b"") - begin)
        part = sum_part(found[skip:], begin + skip)
        with self._lock:
            if self._total is not None and number not in self._summed:
                self._summed.add(number)
                self._total.add(begin + skip, max(0, len(found) - skip), part)
