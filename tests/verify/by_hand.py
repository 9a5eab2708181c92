"""Ranks as a launcher that is not torch's starts them, forked from what all ranks of the tests are forked from.

A process that imports torch and transformers for itself takes seconds to start.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

Ended = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def by_hand(works: Sequence[Callable[[], None]], **environment: str) -> list[Ended]:
    """Call each function, importable by name, in a process of its own that is one rank of as many."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    meeting = {"WORLD_SIZE": str(len(works)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), **environment}
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"out-{rank}"), Path(folder, f"err-{rank}")) for rank in range(len(works))]
        processes = [
            context.Process(target=_be, args=(work, {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}, *paths))
            for rank, (work, paths) in enumerate(zip(works, files, strict=True))
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(200)
            process.kill()
            process.join()
        return [
            (process.exitcode, out.read_text(), err.read_text())
            for process, (out, err) in zip(processes, files, strict=True)
        ]


def command(*arguments: str) -> None:
    """Be ``reshard`` with these arguments."""
    from reshard.__main__ import main

    sys.argv = ["reshard", *arguments]
    main()


def _be(work: Callable[[], None], environment: dict[str, str], out: Path, err: Path) -> None:
    os.environ.update(environment)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    work()
