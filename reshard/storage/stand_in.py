"""A folder that stands in for a checkpoint that lies elsewhere: its side files, and weight files with headers alone.

The weight files are sparse, of their true sizes. Everything that needs no weights (planning, checking) takes the folder
for the checkpoint; the engine reads the weights where they are. A folder is made once for each state of the checkpoint.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from formats.errors import CheckpointError
from formats.files.checkpoint import has_usual_weights, open_checkpoint, samples
from formats.files.sharded import is_sharded
from reshard.storage.fetched import told_as
from reshard.storage.remote import Read, Remote
from reshard.storage.threads import Threads

_FIRST_READ = 100_000  # bytes; most safetensors headers are shorter
_MAX_HEADER = 100_000_000  # bytes; the safetensors library's own limit
_REQUESTS = 16


@dataclass(frozen=True)
class Elsewhere:
    """A weight file that lies elsewhere, and its size in bytes."""

    remote: Remote
    size: int


def stand_in(
    final: Path, weights: Mapping[str, Elsewhere], fill: Callable[[Path], None], name: str, *, sampled: bool
) -> Path:
    """Make the folder ``final``, unless it is there. ``fill`` puts the other files into it.

    With ``sampled`` it has also the few bytes by which a checkpoint is told from another. ``name`` is what messages
    call the checkpoint. Raises CheckpointError.
    """
    if final.exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=f"{final.name}.", ignore_cleanup_errors=True) as scratch:
        building = Path(scratch) / "files"
        building.mkdir()
        for file in weights:
            (building / file).parent.mkdir(parents=True, exist_ok=True)
        fill(building)
        with told_as(building, name), Threads(_REQUESTS) as threads:
            opened = dict(zip(weights, threads.map(lambda file: file.remote.open(), weights.values()), strict=True))
            threads.map(lambda file: _put_header(weights[file], opened[file], building / file), weights)
            if sampled and not is_sharded(building) and has_usual_weights(building):
                threads.map(lambda part: _put(opened[part[0]], building / part[0], *part[1:]), _samples(building))
        try:
            building.rename(final)
        except OSError:  # another process has just made the same folder
            if not final.exists():
                raise
    return final


def _put_header(file: Elsewhere, read: Read, target: Path) -> None:
    """Write the header of a safetensors file to ``target``, and give it the file's full size."""
    data = bytes(read(0, min(_FIRST_READ, file.size)))
    end = 8 + int.from_bytes(data[:8], "little")
    if not 8 < end <= min(file.size, _MAX_HEADER):
        raise CheckpointError(
            f"{file.remote.address} is not a safetensors file, or is cut off: the header does not fit",
            "ask its owner to upload it again",
        )
    if end > len(data):
        data += bytes(read(len(data), end))
    with target.open("wb") as opened:
        opened.write(data[:end])
        opened.truncate(file.size)


def _samples(folder: Path) -> list[tuple[str, int, int]]:
    found = samples(open_checkpoint(folder))
    return [(file.relative_to(folder).as_posix(), begin, end) for file, begin, end in found if end > begin]


def _put(read: Read, path: Path, begin: int, end: int) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, read(begin, end), begin)
    finally:
        os.close(descriptor)
