"""Weight files that are on no disk: a header, and tensors that are computed from other files as they are read."""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from reshard.store.remote import Read, Remote


class Span(Protocol):
    """A tensor of a computed file: its first byte there, and the one behind its last."""

    @property
    def begin(self) -> int:
        """The first byte."""
        ...

    @property
    def end(self) -> int:
        """The byte behind the last."""
        ...


_Piece = TypeVar("_Piece", bound=Span)


class ComputedFile(Remote):
    """A weight file that is computed from some of ``files``, those ``used``; ``header`` stands before its tensors.

    The first that is used is the file in whose place it stands.
    """

    header: bytes
    files: tuple[Remote, ...]

    @property
    def used(self) -> tuple[Remote, ...]:
        """The files that it is made of."""
        return self.files

    @property
    def address(self) -> str:
        """That of the file in whose place it stands."""
        return self.used[0].address

    @property
    def paths(self) -> tuple[Path, ...]:
        """Those of all files that it is made of."""
        return tuple(dict.fromkeys(path for file in self.used for path in file.paths))

    def over_network(self, nbytes: int) -> int:
        """What is fetched of the file in whose place it stands."""
        return self.used[0].over_network(nbytes)

    def digest_of(self, rest: object) -> str:
        """A digest of the identities of the files that it is made of, of its header, and of ``rest``."""
        found = hashlib.sha256(self.header)
        found.update(json.dumps([[file.identity for file in self.used], rest]).encode())
        return found.hexdigest()[:32]

    @property
    def made_of(self) -> str | None:
        """A digest of the inodes."""
        found = [file.made_of for file in self.used]
        return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32] if any(found) else None

    def check_unchanged(self) -> None:
        """Raise MismatchError if a file that it is made of has changed."""
        for file in self.used:
            file.check_unchanged()

    def opened(self) -> Callable[[int], Read]:
        """What opens file number N when it is first needed."""
        lock, found = threading.Lock(), dict[int, Read]()

        def file(number: int) -> Read:
            with lock:
                if number not in found:
                    found[number] = self.files[number].open()
                return found[number]

        return file

    def read_pieces(
        self, pieces: Sequence[_Piece], content: Callable[[_Piece, int, int], bytes | bytearray | memoryview]
    ) -> Read:
        """What reads the header, and of each piece the bytes from one on to another, counted from its begin."""
        ends = [piece.end for piece in pieces]

        def read(start: int, stop: int) -> memoryview:
            found = bytearray(stop - start)
            if start < len(self.header):
                found[: len(self.header) - start] = self.header[start:stop]
            for piece in pieces[bisect_right(ends, start) :]:
                if piece.begin >= stop:
                    break
                begin, end = max(start, piece.begin) - piece.begin, min(stop, piece.end) - piece.begin
                at = piece.begin + begin - start
                found[at : at + end - begin] = content(piece, begin, end)
            return memoryview(found)

        return read
