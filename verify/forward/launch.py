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
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from formats.errors import ReshardError, SettingError
from formats.torch_internals import PrefixStore
from verify.rank.device import backend, device_of, use
from verify.rank.group import Over, ProcessGroup, RankError, RankTimeoutError, Turns, being, machine_fault

T = TypeVar("T")

DEFAULT_TIMEOUT = 120.0
"""Seconds that a rank waits in a collective for the others."""


class RankAnswer(Exception):  # noqa: N818
    """A result of one rank that is the answer of the whole run, not a failure: ``value``, which can be pickled.

    Raised in a rank, it ends all ranks, and is raised again where they were started.
    """

    def __init__(self, value: Any) -> None:
        super().__init__("a rank knows the answer")
        self.value = value


def is_launched() -> bool:
    """Whether another launcher (such as torchrun) started this process as a rank."""
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
    try:
        with _frozen(), redirect_stdout(sys.stderr):
            return turns.run(lambda: fn(*args))
    except Over:
        rank, error = turns.failure or (0, Exception())
        raise explained(error, rank, world_size) from error


@contextmanager
def _frozen() -> Iterator[None]:
    """Do not look for garbage in what was imported, hundreds of thousands of objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def explained(error: BaseException, rank: int, world_size: int) -> RankAnswer | RankError:
    """What ended a rank, for those who started it."""
    if isinstance(error, (RankAnswer, RankTimeoutError)):
        return error
    fault = machine_fault(error)
    if isinstance(error, ReshardError):
        message, hint = error.message, error.hint
    else:
        message, hint = traceback.format_exception_only(error)[-1].strip(), fault
    message = message.splitlines()[0] if fault else message  # CUDA's next lines are advice for developers
    return RankError(f"rank {rank} of {world_size} failed: {message}", hint, rank=rank)


def _run_as_rank(
    fn: Callable[..., T], world_size: int, args: tuple[Any, ...], device: str, timeout: float,
    progress: Callable[[str], None],
) -> list[T]:  # fmt: skip
    """Run a function in this process, which another launcher started as a rank; the results of all ranks.

    Raises ReshardError for another number of ranks, RankError where the function fails here.
    """
    started, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if started != world_size:
        raise ReshardError(
            f"the launcher started {started} ranks, but {world_size} are needed",
            f"Start it with {world_size} processes in all (torchrun --nproc-per-node).",
        )
    joined = not dist.is_initialized()
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
    """The ranks that a launcher started, before and after their collectives: the first of them speaks for all.

    The others wait, without a limit, while the first rank works alone. An error or an answer that ends the run on
    another rank reaches the first rank even during a collective: then it calls ``give_up`` with it and ends with the
    exit code that this returns. All ranks end with the code of the first, and not before it has reported, because the
    launcher ends all of them at the first failure.
    """

    def __init__(self, give_up: Callable[[Any], int]) -> None:
        store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=10)))
        self._store = PrefixStore("crew", store)
        self._give_up = give_up
        self._speaks = threading.Lock()
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reports."""
        return bool(self.rank == 0)

    def agree(self, answer: bool) -> bool:
        """The first rank's value, on all ranks."""
        if self.is_first:
            self._store.set("answer", json.dumps(answer))
        while not self._store.check(["answer"]):
            time.sleep(_POLL)
        return bool(json.loads(self._store.get("answer")))

    def leave(self, end: Any) -> NoReturn:
        """Not for rank 0: reports what ended the run, if no other rank has, and ends when rank 0 does.

        ``end`` is a ReshardError, or something else that can be pickled; None if all ranks know what ended the run.
        """
        if end is not None and self._store.add("ends", 1) == 1:
            is_plain = isinstance(end, SettingError) or not isinstance(end, ReshardError)
            plain = end if is_plain else ReshardError(end.message, end.hint)
            self._store.set("end", pickle.dumps(plain).hex())
        while True:
            time.sleep(60)

    def first_end(self, end: Any) -> Any:
        """Rank 0 only: returns what ended the run. What another rank reported is preferred, because it may be the
        cause.
        """
        self._speaks.acquire()
        deadline = time.monotonic() + (_SETTLE if isinstance(end, ReshardError) else 0)
        while (reported := self._end()) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        return end if reported is None else reported

    def end(self, code: int) -> None:
        """Rank 0 only: tells the other ranks to end with this exit code, and waits until they have ended."""
        self._store.set("code", str(code))
        deadline = time.monotonic() + _PATIENCE
        while self._store.add("gone", 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL / 10)
        self._over.set()
        if threading.current_thread() is not self._listener:
            self._listener.join()  # a thread that asks the store while the interpreter ends aborts the process

    def _end(self) -> Any:
        # Written by a rank of this run, as the results of all ranks are.
        return pickle.loads(bytes.fromhex(self._store.get("end").decode())) if self._store.check(["end"]) else None

    def _listen(self) -> None:
        try:
            while not self._over.wait(_POLL):
                if not self.is_first and self._store.check(["code"]):
                    code = int(self._store.get("code"))
                    self._store.add("gone", 1)
                    break
                if self.is_first and (end := self._end()) is not None and self._speaks.acquire(blocking=False):
                    try:
                        code = self._give_up(end)
                    except Exception:
                        traceback.print_exc()
                        code = 2
                    self.end(code)  # the others wait for it, whatever happened
                    break
            else:
                return
        except dist.DistError:  # the first rank has gone without a word
            code = 2
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)
