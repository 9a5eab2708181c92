"""Ranks as a launcher that is not torch's starts them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

from tests.forked import forked


def by_hand(works: Sequence[Callable[[], None]]) -> list[CompletedProcess[str]]:
    """Call each function, importable by name, in a process of its own that is one rank of as many."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    meeting = {"WORLD_SIZE": str(len(works)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    environments = [{**os.environ, **meeting, "RANK": f"{i}", "LOCAL_RANK": f"{i}"} for i in range(len(works))]
    return forked(list(zip(works, environments, strict=True)), Path.cwd())


def command(*arguments: str, stdout: str | None = None) -> None:
    """Be ``reshard`` with these arguments, and with a file as its stdout."""
    from reshard.__main__ import main

    if stdout is not None:
        os.dup2(os.open(stdout, os.O_WRONLY), 1)
    sys.argv = ["reshard", *arguments]
    main()
