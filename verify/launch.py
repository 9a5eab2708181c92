"""Run a function on N ranks: what each returned comes back, or one error that says which rank failed and of what.

The launcher is torch's elastic one, on a free port. Its workers come from a fork server that has imported torch once,
so that a start takes a fraction of a second and not N imports of torch (4 ranks on two cores: 0.4 s, against 4 s).

When a rank fails, the others fail a moment later, in whatever collective they were waiting. So that the cause is what
is reported, a rank that fails inside a collective waits a little before it exits; the launcher ends all of them at the
first exit that it sees. When a rank hangs, the others run into the time-out of their collective; the first to do so
asks every rank where it is.

No worker outlives the process that started it: each watches a pipe that closes when that process ends, however it ends.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from formats.errors import ReshardError

T = TypeVar("T")

DEFAULT_TIMEOUT = 120.0
"""Seconds that a rank waits in a collective for the others."""

_POLL = 0.1  # seconds between two looks at whether the parent lives, or a rank has timed out
_BLAME = 5.0  # seconds that a rank which failed in a collective leaves to the cause of it to be seen first
_SETTLE = 1.0  # seconds for all ranks to say where they are


class RankError(ReshardError):
    """A rank failed: ``rank`` is its number, ``details`` its traceback or, of a hang, where every rank was."""

    def __init__(self, message: str, hint: str | None = None, *, rank: int, details: str = "") -> None:
        super().__init__(message, hint)
        self.rank = rank
        self.details = details


class RankTimeoutError(RankError):
    """Ranks waited in a collective that ``rank`` did not come to."""


def run_ranks(
    fn: Callable[..., T], world_size: int, *args: Any, device: str = "cpu", timeout: float = DEFAULT_TIMEOUT
) -> list[T]:
    """Run ``fn(*args)`` on ``world_size`` ranks with torch.distributed ready, and return their results in rank order.

    ``fn`` must be importable by name; arguments and results are pickled. ``device`` is ``cpu`` or ``cuda``: the backend
    is NCCL with one rank a GPU, else gloo, and each rank's current CUDA device is its own. ``timeout`` is how many
    seconds a rank waits in a collective, or at the end, for the others.

    In a process that torchrun or another launcher started (``RANK`` and ``WORLD_SIZE`` are set), this process is one of
    the ranks: ``fn`` runs here, and every rank gets all results.

    Raises :class:`RankError` at the first rank that fails, with all others ended. Standard output of the ranks is not
    shown, nor is the standard error of any but rank 0.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}")
    if _is_launched():
        return _run_as_rank(fn, world_size, args, device, timeout)
    with tempfile.TemporaryDirectory(prefix="reshard-ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((fn, args)))
        environment = _Environment(str(folder), dict(os.environ), str(Path.cwd()), device, timeout)
        _launch(environment, world_size)
        # Written by our own workers into a folder that only this user can write to.
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def start_fork_server(*modules: str) -> bool:
    """Start what the ranks are forked from, if it does not run yet, and return at once.

    It imports torch, and ``modules`` that every rank would otherwise import for itself. Worth calling early, as the
    imports then happen while the caller does something else; not at the top of a module, which the ranks import too.
    Return whether the platform has such a thing, and a use for it: under another launcher there is none.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods() or _is_launched():
        return False
    multiprocessing.set_forkserver_preload(["torch", "torch.distributed.launcher.api", *modules])
    forkserver.ensure_running()
    return True


def _is_launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_device(device: str) -> torch.device:
    """Return this rank's device of the kind ``cpu`` or ``cuda``; ranks share GPUs if they outnumber them."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


# In the process that launches


def _launch(environment: _Environment, world_size: int) -> None:
    has_fork_server = start_fork_server()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": 60},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.02,
        start_method="forkserver" if has_fork_server else "spawn",
        shutdown_timeout=5,
        logs_specs=DefaultLogsSpecs(
            log_dir=environment.folder, redirects={r: Std.ALL if r else Std.OUT for r in range(world_size)}
        ),
    )
    with _silent_launcher(), _own_signal_handlers(), _no_children_left():
        try:
            elastic_launch(config, _worker)(environment)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise _explain(Path(environment.folder), rank, failure.exitcode, world_size, environment.timeout) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


@contextmanager
def _silent_launcher() -> Iterator[None]:
    """Keep the launcher's own account of a failure, several tracebacks long, from the user."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing.spawn")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put back the signal handlers that the launcher replaces and leaves behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [s for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if (s := getattr(signal, name, None))]
    handlers = {s: signal.getsignal(s) for s in signals}
    try:
        yield
    finally:
        for s, handler in handlers.items():
            signal.signal(s, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _no_children_left() -> Iterator[None]:
    """End what the launcher has not, as when it is interrupted while it starts the workers."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
            child.join()


def _explain(folder: Path, rank: int, exitcode: int, world_size: int, timeout: float) -> RankError:
    file = folder / f"failure-{rank}"
    if not file.exists():
        if exitcode >= 0:
            return RankError(f"rank {rank} of {world_size} exited with code {exitcode} and no exception", rank=rank)
        hint = "SIGKILL is what the kernel sends when memory runs out." if -exitcode == 9 else None
        return RankError(f"rank {rank} of {world_size} was ended by {signal.Signals(-exitcode).name}", hint, rank=rank)
    failure = _Failure(**json.loads(file.read_text()))
    if failure.timed_out:
        places = {r: place for r in range(world_size) if (place := _read_place(folder, r))}
        return _explain_hang(rank, world_size, timeout, places)
    return RankError(f"rank {rank} of {world_size} failed: {failure.message}", rank=rank, details=failure.traceback)


def _read_place(folder: Path, rank: int) -> _Place | None:
    """Where the rank says it was when it gave up, or else where its watching thread saw it."""
    for file in (folder / f"place-{rank}", folder / f"seen-{rank}"):
        if file.exists():
            return _Place(**json.loads(file.read_text()))
    return None


def _explain_hang(rank: int, world_size: int, timeout: float, places: dict[int, _Place]) -> RankTimeoutError:
    here = places[rank]
    absent = [r for r in range(world_size) if r not in places or not places[r].collective]
    waiting = [r for r in range(world_size) if r not in absent]
    each = "; ".join(f"rank {r} {places.get(r, 'gave no sign of life')}" for r in absent or waiting)
    hint = None
    if absent:
        message = f"{_ranks(absent)} did not come to {here}, where {_ranks(waiting)} waited {timeout:g} s; {each}"
        hint = "If that is only slow, allow a longer timeout."
    elif len({places[r].collective for r in waiting}) > 1:
        message = f"the ranks waited {timeout:g} s for each other in different collectives: {each}"
    else:
        message = f"{_ranks(waiting)} waited {timeout:g} s in {here}, and it did not complete"
    details = "\n".join(f"rank {r} {place}" for r, place in sorted(places.items()))
    return RankTimeoutError(message, hint, rank=absent[0] if absent else rank, details=details)


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(r) for r in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


# In a rank


@dataclass(frozen=True)
class _Environment:
    """What a worker does not have from the fork server, which may be older than the call."""

    folder: str
    variables: dict[str, str]
    directory: str
    device: str
    timeout: float

    def enter(self) -> None:
        given = {k: v for k, v in os.environ.items() if k.startswith(_LAUNCHER_VARIABLES)}
        os.environ.clear()
        os.environ.update(self.variables | given)
        os.chdir(self.directory)


_LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)


@dataclass(frozen=True)
class _Place:
    """Where a rank is: the collective it is in, if it is in one, and the line outside torch."""

    collective: str | None
    line: str

    def __str__(self) -> str:
        return f"{self.collective} ({self.line})" if self.collective else f"was at {self.line}"


@dataclass(frozen=True)
class _Failure:
    message: str
    traceback: str
    timed_out: bool


def _worker(environment: _Environment) -> None:
    for s in (signal.SIGINT, signal.SIGTERM):
        signal.signal(s, signal.SIG_DFL)
    folder, rank = Path(environment.folder), int(os.environ["RANK"])
    threading.Thread(target=_watch, args=(folder, rank, threading.get_ident()), daemon=True).start()
    environment.enter()
    try:
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        _join_group(environment.device, environment.timeout)
        fn, args = pickle.loads((folder / "job").read_bytes())
        result = fn(*args)
        _meet_at_the_end()
        _write(folder / f"result-{rank}", pickle.dumps(result))
        dist.destroy_process_group()
    except BaseException as error:
        _fail(folder, rank, error)


def _run_as_rank(fn: Callable[..., T], world_size: int, args: tuple[Any, ...], device: str, timeout: float) -> list[T]:
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
    except ReshardError:
        raise
    except Exception as error:
        raise RankError(
            f"rank {rank} of {world_size} failed: {_last_line(error)}", rank=rank, details=traceback.format_exc()
        ) from error
    if joined:
        dist.destroy_process_group()
    return results


def _join_group(device: str, timeout: float) -> None:
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    backend = "gloo"
    if device != "cpu":
        torch.cuda.set_device(rank_device(device))
        if local_ranks <= torch.cuda.device_count():
            backend = "nccl"
            # A collective that times out is then an exception in the rank, not the end of its process.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))


def _meet_at_the_end() -> None:
    dist.barrier()


def _watch(folder: Path, rank: int, main: int) -> None:
    """End this process with its parent, and say where it is when a rank has timed out."""
    parent = multiprocessing.parent_process()
    while parent and not wait([parent.sentinel], _POLL):
        seen = folder / f"seen-{rank}"
        if (folder / "timed-out").exists() and not seen.exists():
            with suppress(OSError):
                _write(seen, json.dumps(asdict(_current_place(main))).encode())
    os._exit(1)


def _fail(folder: Path, rank: int, error: BaseException) -> NoReturn:
    """Leave an account of the error, and end this process; not by the way of destructors that may wait for others."""
    place = _place(list(traceback.walk_tb(error.__traceback__)))
    timed_out = place.collective is not None and any(s in str(error).lower() for s in ("timed out", "timeout"))
    failure = _Failure(_last_line(error), "".join(traceback.format_exception(error)), timed_out)
    with suppress(OSError):  # the launcher may be gone, and the folder with it
        if place.collective:
            _write(folder / f"place-{rank}", json.dumps(asdict(place)).encode())
        _write(folder / f"failure-{rank}", json.dumps(asdict(failure)).encode())
        if timed_out:
            (folder / "timed-out").touch()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if place.collective:
        time.sleep(_SETTLE if timed_out else _BLAME)
    os._exit(1)


def _last_line(error: BaseException) -> str:
    if isinstance(error, ReshardError):
        return error.message
    return traceback.format_exception_only(error)[-1].strip()


def _current_place(main: int) -> _Place:
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


def _place(frames: list[tuple[FrameType, int]]) -> _Place:
    """Read a stack, outermost frame first: which collective it is in, and the line that led there."""
    if any(frame.f_code is _meet_at_the_end.__code__ for frame, _ in frames):
        return _Place("the end of the run", "where the ranks meet")
    collective = None
    place = "an unknown line"
    for frame, line in frames:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if module == "torch.distributed.distributed_c10d" and not code.co_name.startswith("_"):
            collective = collective or code.co_name
        elif module.split(".")[0] != "torch" and module not in ("verify.collectives", "verify.layers"):
            place = f"{Path(code.co_filename).name}:{line} in {code.co_name}"
    return _Place(collective, place)


def _write(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all."""
    part = path.with_name(f"{path.name}.{threading.get_ident()}")
    part.write_bytes(data)
    part.replace(path)


# Under another launcher


class Crew:
    """The ranks that a launcher started, before and after their collectives: the first of them speaks for all.

    The others wait, without a limit, while it works alone. An error of any rank reaches it even while it is in a
    collective: then it calls ``give_up`` with the error and ends with the exit code that this returns. All ranks end
    with the code of the first, and not before it has spoken, as the launcher ends all of them at the first failure.
    """

    def __init__(self, give_up: Callable[[ReshardError], int]) -> None:
        store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=10)))
        self._store = PrefixStore("crew", store)
        self._give_up = give_up
        self._speaks = threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks."""
        return bool(self.rank == 0)

    def agree(self, answer: bool) -> bool:
        """What the first rank says, on all of them."""
        if self.is_first:
            self._store.set("answer", json.dumps(answer))
        while not self._store.check(["answer"]):
            time.sleep(_POLL)
        return bool(json.loads(self._store.get("answer")))

    def leave(self, error: ReshardError | None) -> NoReturn:
        """Of a rank that is not the first: report the error, if there is one, and end when the first does."""
        if error is not None and self._store.add("errors", 1) == 1:
            self._store.set("error", json.dumps([error.message, error.hint]))
        while True:
            time.sleep(60)

    def first_error(self, error: ReshardError | None) -> ReshardError | None:
        """Of the first rank: take the word. Another rank's error, the cause of its own perhaps, goes before that."""
        self._speaks.acquire()
        deadline = time.monotonic() + (_SETTLE if error is not None else 0)
        while not (found := self._error()) and time.monotonic() < deadline:
            time.sleep(_POLL)
        return found or error

    def end(self, code: int) -> None:
        """Of the first rank: let the others end with this exit code, and see them go."""
        self._store.set("code", str(code))
        deadline = time.monotonic() + _BLAME
        while self._store.add("gone", 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL / 10)

    def _error(self) -> ReshardError | None:
        return ReshardError(*json.loads(self._store.get("error"))) if self._store.check(["error"]) else None

    def _listen(self) -> None:
        try:
            while True:
                time.sleep(_POLL)
                if not self.is_first and self._store.check(["code"]):
                    code = int(self._store.get("code"))
                    self._store.add("gone", 1)
                    break
                if self.is_first and (error := self._error()) and self._speaks.acquire(blocking=False):
                    code = self._give_up(error)
                    self.end(code)
                    break
        except dist.DistError:  # the first rank has gone without a word
            code = 2
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)
