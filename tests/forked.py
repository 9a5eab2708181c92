"""Processes that start at once: they are forked from the fork server of the tests' ranks (see ``conftest.py``).

A process that imports torch and transformers, or the Hub's client, for itself takes up to ten seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

Work = tuple[Callable[[], None], Mapping[str, str]]
"""A function, importable by name, and the whole environment that it is called in."""

_PATIENCE = 200  # seconds


def forked(works: Sequence[Work], cwd: Path) -> list[CompletedProcess[str]]:
    """Call each function in a process of its own, all at the same time; exit codes, and what they printed."""
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        files = [(Path(folder, f"out-{i}"), Path(folder, f"err-{i}")) for i in range(len(works))]
        processes = [
            context.Process(target=_be, args=(work, environment, cwd, *paths))
            for (work, environment), paths in zip(works, files, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(_PATIENCE)
            process.kill()
            process.join()
        return [
            CompletedProcess([], process.exitcode, out.read_text(), err.read_text())
            for process, (out, err) in zip(processes, files, strict=True)
        ]


def _be(work: Callable[[], None], environment: Mapping[str, str], cwd: Path, out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    work()
