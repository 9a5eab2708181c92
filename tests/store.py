"""Checkpoints of the zoo, their shards, and what the originals compute: made once for all tests of a run.

The folder is shared by the processes that run tests side by side: who asks first makes, the others wait for the lock.
It begins empty with each run, so nothing in it is of older code. A test that changes something takes a copy.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from reshard.api import split
from reshard.source.opening import open_source
from reshard.source.source import Source

_VARIABLE = "RESHARD_TESTS_STORE"


def begin() -> None:
    """Make the folder, in the process that starts the others."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="reshard-tests-")


def end() -> None:
    """Remove the folder, in the process that made it."""
    shutil.rmtree(os.environ.pop(_VARIABLE), ignore_errors=True)


def made(name: str, make: Callable[[Path], object]) -> Path:
    """The file or folder that ``make`` writes at the path that it is given. The name says all that it is made of."""
    root = Path(os.environ[_VARIABLE])
    there = root / name
    if not there.exists():
        with (root / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not there.exists():
                part = root / f".{name}.part"
                shutil.rmtree(part, ignore_errors=True)
                make(part)
                part.rename(there)
    return there


def checkpoint(name: str, dtype: str = "float32", experts: int | None = None, kv: int | None = None) -> Path:
    """A model of the zoo, in one file; with ``experts`` and ``kv``, so many experts and KV heads."""
    import torch

    from tests import zoo

    key = f"{name}-{dtype}" + (f"-{experts}-experts" if experts else "") + (f"-{kv}-kv" if kv else "")
    return made(key, lambda folder: zoo.save(name, folder, getattr(torch, dtype), experts=experts, kv=kv))


@lru_cache(maxsize=2)
def source(name: str) -> Source:
    """A model of the zoo, opened; the tests of one model come together."""
    return open_source(checkpoint(name))


def shards(name: str, dtype: str = "float32", experts: int | None = None, kv: int | None = None, **mesh: Any) -> Path:
    """A model of the zoo, split for a mesh: the arguments of ``split``."""
    original = checkpoint(name, dtype, experts, kv)
    key = "-".join(f"{dimension}{degree}" for dimension, degree in mesh.items())
    return made(f"{original.name}-{key}", lambda folder: split(original, folder, **mesh))


def pair(
    name: str, dtype: str = "float32", experts: int | None = None, kv: int | None = None, **mesh: Any
) -> tuple[Source, Source]:
    """A model of the zoo and its shards."""
    original, split_for = checkpoint(name, dtype, experts, kv), shards(name, dtype, experts, kv, **mesh)
    return open_source(original), open_source(split_for)


class References(dict[str, Any]):
    """What the originals compute (see ``run_forwards``), kept for all processes of a run in the store."""

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (made("references", Path.mkdir) / str(key)).exists()

    def __missing__(self, key: str) -> Any:
        super().__setitem__(key, pickle.loads((made("references", Path.mkdir) / key).read_bytes()))
        return self[key]

    def __setitem__(self, key: str, reference: Any) -> None:
        file = made("references", Path.mkdir) / key
        part = file.with_name(f"{key}.{os.getpid()}")
        part.write_bytes(pickle.dumps(reference))
        part.replace(file)


REFERENCES = References()
