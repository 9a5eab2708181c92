"""Ranks as processes of torch.distributed, each with cores or a GPU of its own: what takes turns cannot be timed.

None outlives the run, or the process that started it. They are forked from a server that has imported what they need.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, TypeVar

import psutil
import torch.distributed as dist

from reshard.formats.errors import ReshardError
from reshard.verify.ending import undone
from reshard.verify.forward.launch import DEFAULT_TIMEOUT, run_ranks
from reshard.verify.rank.device import memory
from reshard.verify.rank.group import RankError, is_of_collective

RESERVE = 1_500_000_000
"""The memory of a GPU that tensors cannot use, about: CUDA's context, NCCL's buffers and cuBLAS's workspace."""


@dataclass(frozen=True)
class Node:
    """The node on which the ranks run: ``cpu`` or an accelerator, the most ranks, and the threads and cores of each."""

    device: str
    ranks: int
    threads: int
    cores: int

    def memory(self, degree: int) -> int:
        """The bytes that a rank has for tensors if there are so many ranks: those of its GPU without a reserve, or its
        part of the machine's.
        """
        if self.device != "cpu":
            return max(0, min(memory(self.device, i) for i in range(min(degree, self.ranks))) - RESERVE)
        return int(psutil.virtual_memory().total) // degree

    def free(self, degree: int) -> int:
        """The bytes that a rank may take now, at most.

        On a GPU, all of its memory: to ask for the free part, this process would have to take some of each GPU. A rank
        that needs more ends with an error, which is reported (``_run``). On a CPU the kernel may end another process.
        """
        return self.memory(degree) if self.device != "cpu" else int(psutil.virtual_memory().available) // degree


T = TypeVar("T")
_HINTS: dict[int, str] = {
    signal.SIGKILL: "SIGKILL is what the kernel sends when memory runs out.",
    signal.SIGABRT: "NCCL ends a rank so that waited too long: if that is only slow, allow a longer timeout.",
}
_SETTLE = 2.0  # seconds
_IMPORTED = ["reshard.profile.rank", "transformers.models.auto.modeling_auto"]


def run_processes(
    fn: Callable[..., T], size: int, *args: Any, device: str = "cpu", timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[str], None] = lambda _: None,
) -> list[T]:  # fmt: skip
    """Run ``fn(*args)``, importable by name, in ``size`` processes; their results in rank order.

    ``progress`` is called with what rank 0 says. Raises RankError when a rank fails, and the ReshardError or RankAnswer
    that one raises.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    try:
        forkserver.ensure_running()
    except OSError as error:  # as where the name of its socket would be longer than a socket's may be
        where = f"the ranks' socket cannot be in {tempfile.gettempdir()}: {error.strerror or error}"
        raise ReshardError(where, "set TMPDIR to a folder with a shorter name, such as /tmp") from error
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    meeting = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": store.port,
               "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    pipes: list[Connection] = []
    ranks: list[Any] = []

    def kill() -> None:
        for process in ranks:
            process.kill()

    with _without_the_script(), undone(kill):
        for rank in range(size):
            receiving, sending = context.Pipe(duplex=False)
            # A rank is not to wait for each collective of NCCL: it would start the next kernels late.
            environment = {"TORCH_NCCL_BLOCKING_WAIT": "0", **os.environ, **meeting, "RANK": rank, "LOCAL_RANK": rank}
            variables = {name: str(value) for name, value in environment.items()}
            work = context.Process(
                target=_be,
                args=(variables, sending, device, timeout, fn, args, ReshardError.names_options),
                daemon=True,
            )
            work.start()
            sending.close()
            pipes.append(receiving)
            ranks.append(work)
        return _follow(pipes, ranks, progress)


def _follow(pipes: Sequence[Connection], ranks: Sequence[Any], progress: Callable[[str], None]) -> list[Any]:
    """The results. What fails in a collective may follow from another rank's failure, which is waited for a moment: a
    process that is killed closes its connections to other ranks first, perhaps.
    """
    results, failures = dict[int, Any](), dict[int, tuple[bool, Exception]]()
    while running := [pipe for rank, pipe in enumerate(pipes) if rank not in results and rank not in failures]:
        ready = wait(running, _SETTLE if failures else None)
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                what, value = pipes[rank].recv()
            except EOFError:
                ranks[rank].join()
                code = ranks[rank].exitcode
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                message = f"rank {rank} of {len(ranks)} {how}"
                what, value = "failed", (False, RankError(message, _HINTS.get(-code), rank=rank))
            if what == "said":
                progress(value)
            elif what == "failed":
                failures[rank] = value
            else:
                results[rank] = pickle.loads(value)  # of our own process
        if failures and not (ready and all(is_later for is_later, _ in failures.values())):
            break
    if failures:
        raise min(failures.values(), key=lambda failure: failure[0])[1]
    return [results[rank] for rank in range(len(pipes))]


def _be(
    variables: Mapping[str, str], pipe: Connection, device: str, timeout: float, fn: Callable[..., Any], args: Any,
    names_options: bool,
) -> None:  # fmt: skip
    ReshardError.names_options = names_options
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    try:
        results = run_ranks(
            fn, size, *args, device=device, timeout=timeout, progress=lambda text: pipe.send(("said", text))
        )
        # Not the tensors themselves: they would end with this process.
        pipe.send(("returned", pickle.dumps(results[rank])))
    except Exception as error:
        pipe.send(("failed", (is_of_collective(error.__cause__ or error), error)))
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _without_the_script() -> Iterator[None]:
    """Ranks import what they run by name. The script of a Python caller is not to run again in each of them."""
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
