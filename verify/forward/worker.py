"""A process that is a rank: it joins the others, runs a function, and writes down how that ended.

A rank that fails inside a collective waits a little before it exits, so that the cause is seen first. When a rank
hangs, the others run into the time-out of their collective, and every rank says where it is.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from formats.errors import ReshardError
from formats.torch_internals import collective_of, is_timeout
from verify.ending import remove
from verify.rank.machine import machine_fault

T = TypeVar("T")

POLL = 0.1  # seconds between two looks at whether the parent lives, or a rank has timed out
BLAME = 5.0  # seconds that a rank which failed in a collective leaves to the cause of it to be seen first
SETTLE = 1.0  # seconds for all ranks to say where they are


class RankError(ReshardError):
    """A rank failed: ``rank`` is its number, ``details`` its traceback or, of a hang, where every rank was."""

    def __init__(self, message: str, hint: str | None = None, *, rank: int, details: str = "") -> None:
        super().__init__(message, hint)
        self.rank = rank
        self.details = details


class RankAnswer(Exception):  # noqa: N818
    """A result of one rank that is the answer of the whole run, not a failure: ``value``, which can be pickled.

    Raised in a rank, it ends all ranks, whatever they do, and is raised again in the process that started them.
    """

    def __init__(self, value: Any) -> None:
        super().__init__("a rank knows the answer")
        self.value = value


_listener: Callable[[str], None] | None = None


def say(text: str) -> None:
    """Say, on rank 0, what is being done; the process that started the ranks hears it."""
    if _listener is not None and dist.get_rank() == 0:
        _listener(text)


@contextmanager
def heard(listener: Callable[[str], None]) -> Iterator[None]:
    """Send what rank 0 says (:func:`say`) to ``listener``, in this process."""
    global _listener
    _listener = listener
    try:
        yield
    finally:
        _listener = None


def is_launched() -> bool:
    """Whether another launcher (such as torchrun) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_device(device: str) -> torch.device:
    """Return this rank's device of the kind ``cpu`` or ``cuda``; ranks share GPUs if they outnumber them."""
    if device == "cpu":
        return torch.device("cpu")
    rank = os.environ.get("LOCAL_RANK", os.environ["RANK"])  # a launcher that is not torch's may give the one alone
    return torch.device(device, int(rank) % torch.cuda.device_count())


@dataclass(frozen=True)
class Environment:
    """The caller's environment, which a worker cannot take from the fork server: that may have started earlier."""

    folder: str
    sockets: str
    variables: dict[str, str]
    directory: str
    device: str
    timeout: float

    def enter(self) -> None:
        """Take over the caller's working directory and environment, and what the launcher adds to it."""
        given = {name: os.environ[name] for name in variables(0, 1, 0)}
        os.environ.clear()
        os.environ.update(self.variables | given)
        os.environ["TMPDIR"] = tempfile.tempdir = self.folder
        os.chdir(self.directory)


def variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables that torchrun would set for a rank. ``port`` is that of the store where the ranks meet."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    outside = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {**{name: str(n) for name, n in numbers.items()}, **meeting, **outside}


@dataclass(frozen=True)
class Place:
    """Where a rank is: the collective it is in, if it is in one, and the line outside torch."""

    collective: str | None
    line: str

    def __str__(self) -> str:
        return f"{self.collective} ({self.line})" if self.collective else f"was at {self.line}"


@dataclass(frozen=True)
class Failure:
    """How a rank failed; ``timed_out`` if it waited in a collective for another rank."""

    message: str
    hint: str | None
    traceback: str
    timed_out: bool


def work(environment: Environment, listener: Connection) -> None:
    """Work as a rank: run the function of the job in the folder, and write its result or its failure there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    folder, rank = Path(environment.folder), int(os.environ["RANK"])
    left = [folder, Path(environment.sockets)]
    threading.Thread(target=_watch, args=(folder, rank, threading.get_ident(), left), daemon=True).start()
    environment.enter()
    try:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        _join_group(environment.device, environment.timeout)
        fn, args = pickle.loads((folder / "job").read_bytes())
        with heard(listener.send):
            result = fn(*args)
        _meet_at_the_end()
        write_whole(folder / f"result-{rank}", pickle.dumps(result))
        dist.destroy_process_group()
    except BaseException as error:
        _fail(folder, rank, error)


def run_as_rank(fn: Callable[..., T], world_size: int, args: tuple[Any, ...], device: str, timeout: float) -> list[T]:
    """Run a function in this process, which another launcher started as a rank; the results of all ranks.

    Raises ReshardError for another number of ranks, RankError where the function fails here.
    """
    there, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if there != world_size:
        raise ReshardError(
            f"the launcher started {there} ranks, but {world_size} are needed",
            f"Start it with {world_size} processes in all (torchrun --nproc-per-node).",
        )
    joined = not dist.is_initialized()
    try:
        if joined:
            _join_group(device, timeout)
        results: list[Any] = [None] * world_size
        dist.all_gather_object(results, fn(*args))
    except (ReshardError, RankAnswer):
        raise
    except Exception as error:
        message = f"rank {rank} of {world_size} failed: {_last_line(error)}"
        raise RankError(message, machine_fault(error), rank=rank, details=traceback.format_exc()) from error
    if joined:
        dist.destroy_process_group()
    return results


def _join_group(device: str, timeout: float) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    backend, own = "gloo", None
    if device != "cpu":
        torch.cuda.set_device(rank_device(device))
        if local_ranks <= torch.cuda.device_count():
            # The ranks connect here, and not in the first collective; a barrier knows its GPU.
            backend, own = "nccl", rank_device(device)
            # A collective that times out is then an exception in the rank, not the end of its process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=own)


def _meet_at_the_end() -> None:
    dist.barrier()


def _watch(folder: Path, rank: int, main: int, left: Sequence[Path]) -> None:
    """End this process with its parent, whose folders are ``left``; say where it is when a rank has timed out."""
    parent = multiprocessing.parent_process()
    while parent and not wait([parent.sentinel], POLL):
        seen = folder / f"seen-{rank}"
        if (folder / "timed-out").exists() and not seen.exists():
            with suppress(OSError):
                write_whole(seen, json.dumps(asdict(_current_place(main))).encode())
    for each in left:
        remove(each)
    os._exit(1)


def _fail(folder: Path, rank: int, error: BaseException) -> NoReturn:
    """Leave an account of the error, and end this process; not by the way of destructors that may wait for others."""
    place = _place(list(traceback.walk_tb(error.__traceback__)))
    timed_out = place.collective is not None and is_timeout(error)
    hint = error.hint if isinstance(error, ReshardError) else machine_fault(error)
    failure = Failure(_last_line(error), hint, "".join(traceback.format_exception(error)), timed_out)
    with suppress(OSError):  # the launcher may be gone, and the folder with it
        if place.collective:
            write_whole(folder / f"place-{rank}", json.dumps(asdict(place)).encode())
        if isinstance(error, RankAnswer):
            write_whole(folder / f"answer-{rank}", pickle.dumps(error.value))
        write_whole(folder / f"failure-{rank}", json.dumps(asdict(failure)).encode())
        if timed_out:
            (folder / "timed-out").touch()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if place.collective:
        time.sleep(SETTLE if timed_out else BLAME)
    os._exit(1)


def _last_line(error: BaseException) -> str:
    if isinstance(error, ReshardError):
        return error.message
    text = traceback.format_exception_only(error)[-1].strip()
    return text.splitlines()[0] if machine_fault(error) else text  # CUDA's next lines are advice for developers


def is_of_collective(error: BaseException) -> bool:
    """Whether an error was raised while this rank was in a collective: another rank may be the cause of it."""
    return _place(list(traceback.walk_tb(error.__traceback__))).collective is not None


def _current_place(main: int) -> Place:
    """Where the main thread is, unless another one (autograd's, of a CUDA backward) is in a collective."""
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    places = {ident: _place(_stack(frame)) for ident, frame in frames.items()}
    return next((place for place in places.values() if place.collective), places[main])


def _stack(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """List the frames and their lines, outermost first."""
    frames: list[tuple[FrameType, int]] = []
    while frame is not None:
        frames.insert(0, (frame, frame.f_lineno))
        frame = frame.f_back
    return frames


def _place(frames: list[tuple[FrameType, int]]) -> Place:
    """Read a stack, outermost frame first: which collective it is in, and the line that led there."""
    if any(frame.f_code is _meet_at_the_end.__code__ for frame, _ in frames):
        return Place("the end of the run", "where the ranks meet")
    collective = None
    place = "an unknown line"
    for frame, line in frames:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if (found := collective_of(frame)) is not None:
            collective = collective or found
        elif module.split(".")[0] != "torch" and module not in ("verify.rank.collectives", "verify.rank.layers"):
            place = f"{Path(code.co_filename).name}:{line} in {code.co_name}"
    return Place(collective, place)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    part = path.with_name(f"{path.name}.{threading.get_ident()}")
    part.write_bytes(data)
    part.replace(path)
