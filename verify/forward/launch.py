"""Run a function on N ranks, and return all results, or one error that says which rank failed and why.

The ranks are threads of this process (verify/rank/group.py), or the processes that a launcher such as torchrun started.
Of the latter it also says how they agree, and end with one exit code.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import redirect_stdout, suppress
from datetime import timedelta
from threading import Thread
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from reshard.formats.errors import ReshardError, SettingError
from reshard.formats.torch_internals import PrefixStore
from reshard.verify.rank.device import backend, device_of, use
from reshard.verify.rank.group import ProcessGroup, RankAnswer, Turns, being, explained

T = TypeVar("T")

DEFAULT_TIMEOUT = 120.0
"""Seconds that a rank waits in a collective for the others."""


def is_launched() -> bool:
    """Whether another launcher (such as torchrun) started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[str], None] = lambda _: None,
) -> list[T]:
    """Run ``fn(*args)`` on ``world_size`` ranks, whose group is :func:`world`; their results in rank order.

    ``device`` is a kind of device: ranks share GPUs if they outnumber them. ``timeout`` is how many seconds a rank
    waits in a collective for one that computes. ``progress`` is called with what rank 0 says it is doing (:func:`say`).

    In a process that torchrun or another launcher started (``RANK`` and ``WORLD_SIZE`` are set), this process is one of
    the ranks: ``fn`` runs here, and every rank gets all results.

    Raises :class:`RankError` when a rank fails, after ending all others, and the first :class:`RankAnswer` that a rank
    raises. What ranks print goes to standard error.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}")
    if is_launched():
        return _run_as_rank(fn, world_size, args, device, timeout, progress)
    turns = Turns([device_of(device, rank) for rank in range(world_size)], timeout, progress)
    gc.freeze()  # garbage is not looked for in what was imported, hundreds of thousands of objects
    try:
        with redirect_stdout(sys.stderr):
            return turns.run(lambda: fn(*args))
    finally:
        gc.unfreeze()


def _run_as_rank(
    fn: Callable[..., T], world_size: int, args: tuple[Any, ...], device: str, timeout: float,
    progress: Callable[[str], None],
) -> list[T]:  # fmt: skip
    """Run a function in this process, which another launcher started as a rank; the results of all ranks.

    Raises ReshardError for another number of ranks, RankError where the function fails here.
    """
    check_ranks(world_size)
    rank, joined = int(os.environ["RANK"]), not dist.is_initialized()
    try:
        if joined:
            join_group(device, timeout)
        group = ProcessGroup(rank_device(device), timeout)
        with being(group, progress):
            results: list[T] = group.gather(fn(*args))
    except (ReshardError, RankAnswer):
        raise
    except Exception as error:
        raise explained(error, rank, world_size) from error
    if joined:
        dist.destroy_process_group()
    return results


def check_ranks(world_size: int) -> None:
    """Raise ReshardError if a launcher started another number of ranks."""
    started = int(os.environ["WORLD_SIZE"]) if is_launched() else world_size
    if started != world_size:
        raise ReshardError(
            f"the launcher started {started} ranks, but {world_size} are needed",
            f"Start it with {world_size} processes in all (torchrun --nproc-per-node).",
        )


def rank_device(device: str) -> torch.device:
    """This process's device of a kind."""
    # A launcher that is not torch's may give the rank among all alone.
    return device_of(device, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))


def join_group(device: str, timeout: float) -> None:
    """Make this process a rank of torch.distributed, by the variables of a launcher."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    use(rank_device(device))
    way = backend(device, local_ranks)
    # The ranks connect here, and not in the first collective; a barrier knows its GPU.
    bound_device = rank_device(device) if way != "gloo" else None
    if way == "nccl":  # a collective that times out is then an exception in the rank, not the end of its process
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    dist.init_process_group(way, timeout=timedelta(seconds=timeout), device_id=bound_device)


_POLL = 0.1  # seconds between two looks at what other ranks have said
_SETTLE = 1.0  # seconds that an error of rank 0 leaves to the cause of it to be reported first
_PATIENCE = 5.0  # seconds for all ranks to end


class Crew:
    """The ranks that a launcher started: the first of them compares the bytes and speaks for all.

    The others wait, without a limit, while the first rank works alone. All end with the exit code of the first, and not
    before it has reported, because the launcher ends all of them at the first failure.
    """

    def __init__(self) -> None:
        store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=10)))
        self._store, self.is_first = PrefixStore("crew", store), bool(self.rank == 0)

    def agree(self, answer: bool) -> bool:
        """The first rank's value, on all ranks."""
        if self.is_first:
            self._store.set("answer", json.dumps(answer))
        while not self._store.check(["answer"]):
            time.sleep(_POLL)
        return bool(json.loads(self._store.get("answer")))

    def run(self, work: Callable[[], Any], report: Callable[[Any], int]) -> NoReturn:
        """Do the work in another thread, and end this process when the first rank has reported.

        ``work`` returns what ended the run on this rank: a ReshardError, something else that can be pickled, or None if
        all ranks know it. The first rank calls ``report`` with that, or with what another rank returned, which may be
        the cause and is heard even during a collective; ``report`` returns the exit code. What it raises is raised
        here, and the others end with 2.
        """
        future, news, code = Future[Any](), "end" if self.is_first else "code", 2

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        Thread(target=do, daemon=True).start()  # or the end of this process would wait for one in a collective
        try:
            while not (future.done() or self._store.check([news])):
                wait([future], _POLL)
            end = future.result() if future.done() else None
            if self.is_first:
                if isinstance(end, ReshardError):
                    time.sleep(_SETTLE)
                if self._store.check(["end"]):  # of a rank of this run, as the results of all ranks are
                    end = pickle.loads(bytes.fromhex(self._store.get("end").decode()))
                try:
                    code = report(end)
                finally:
                    self._store.set("code", str(code))
                    deadline = time.monotonic() + _PATIENCE
                    while self._store.add("gone", 0) < self.size - 1 and time.monotonic() < deadline:
                        time.sleep(_POLL / 10)
            else:
                if end is not None and self._store.add("ends", 1) == 1:
                    is_plain = isinstance(end, SettingError) or not isinstance(end, ReshardError)
                    plain = end if is_plain else ReshardError(end.message, end.hint)
                    self._store.set("end", pickle.dumps(plain).hex())
                while not self._store.check(["code"]):
                    time.sleep(_POLL)
                code = int(self._store.get("code"))
                self._store.add("gone", 1)
        except dist.DistError:  # the first rank has gone without a word
            pass
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)  # the other thread may wait in a collective
