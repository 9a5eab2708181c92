"""A function in several processes at once, as ranks of torch.distributed on gloo; none of them outlives the test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.forked import begin_fork_server


def free_port() -> int:
    """A port that nobody listens at, nor gets as the end of a connection before it is used: below those of Linux."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run(function: Callable[..., Any], world: int, *args: Any, timeout: float = 200, group: bool = True) -> list[Any]:
    """Call ``function(rank, world, *args)`` in so many processes; returns what each returned, by rank.

    ``function`` is importable by name; arguments and results are pickled. With ``group`` the processes have a default
    group on gloo. Raises RuntimeError with the tracebacks if one raises, dies, or is not done within ``timeout``
    seconds; then all are killed.
    """
    begin_fork_server()
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="live-") as folder:
        given = (function, world, args, Path(folder), group, timeout)
        ranks = [context.Process(target=_be, args=(rank, *given)) for rank in range(world)]
        try:
            for rank in ranks:
                rank.start()
            _await(ranks, time.monotonic() + timeout)
        finally:
            codes = [rank.exitcode for rank in ranks]
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()
        if any(code != 0 for code in codes):
            said = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
            raise RuntimeError(f"exit codes {codes} (None: not done within {timeout} s)\n" + "\n".join(said))
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def _await(ranks: list[Any], deadline: float) -> None:
    """Until all have ended, one has failed, or the time is over."""
    while left := [rank for rank in ranks if rank.exitcode is None]:
        if any(rank.exitcode for rank in ranks) or time.monotonic() > deadline:
            time.sleep(0.2)  # for what others say of it
            return
        connection.wait([rank.sentinel for rank in left], timeout=0.2)


def _be(
    rank: int,
    function: Callable[..., Any],
    world: int,
    args: tuple[Any, ...],
    folder: Path,
    group: bool,
    timeout: float,
) -> None:
    end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
    try:
        if group:
            _join(rank, world, folder, timeout)
        result = pickle.dumps(function(rank, world, *args))
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    (folder / f"result-{rank}").write_bytes(result)
    os._exit(0)


def _join(rank: int, world: int, folder: Path, timeout: float) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


def end_with_parent() -> None:
    """End this process when the one that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
