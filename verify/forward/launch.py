"""Run a function on N ranks: what each returned comes back, or one error that says which rank failed and of what.

The launcher is torch's elastic one. Its workers come from a fork server that has imported torch once, so that a start
takes a fraction of a second and not N imports of torch (4 ranks on two cores: 0.4 s, against 4 s). They meet at a store
of the process that started them, on a free port.

When a rank fails, the others fail a moment later, in whatever collective they were waiting. So that the cause is what
is reported, a rank that fails inside a collective waits a little before it exits; the launcher ends all of them at the
first exit that it sees. When a rank hangs, the others run into the time-out of their collective; the first to do so
asks every rank where it is.

No worker outlives the process that started it: each watches a pipe that closes when that process ends, however it ends.
Nor does a file: the ranks' temporary files lie in the folder of the run, which the last to go removes.
"""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std, start_processes
from torch.distributed.rendezvous import rendezvous

from formats.errors import ReshardError
from verify.ending import remove, temporary_folder, undo_at_the_end, undone

T = TypeVar("T")

DEFAULT_TIMEOUT = 120.0
"""Seconds that a rank waits in a collective for the others."""

_POLL = 0.1  # seconds between two looks at whether the parent lives, or a rank has timed out
_BLAME = 5.0  # seconds that a rank which failed in a collective leaves to the cause of it to be seen first
_SETTLE = 1.0  # seconds for all ranks to say where they are
_LOOK = 0.02  # seconds between two looks at whether the ranks are done
_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_LAUNCHER = ("torch", "torch.distributed.elastic.multiprocessing")


class RankError(ReshardError):
    """A rank failed: ``rank`` is its number, ``details`` its traceback or, of a hang, where every rank was."""

    def __init__(self, message: str, hint: str | None = None, *, rank: int, details: str = "") -> None:
        super().__init__(message, hint)
        self.rank = rank
        self.details = details


class RankAnswer(Exception):  # noqa: N818
    """What a rank found out that is the answer of the run, and no failure of it: ``value``, which can be pickled.

    Raised in a rank, it ends all ranks, wherever they are, and is raised where they were started.
    """

    def __init__(self, value: Any) -> None:
        super().__init__("a rank knows the answer")
        self.value = value


class RankTimeoutError(RankError):
    """Ranks waited in a collective that ``rank`` did not come to."""


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
    progress: Callable[[str], None] = lambda _: None,
) -> list[T]:
    """Run ``fn(*args)`` on ``world_size`` ranks with torch.distributed ready, and return their results in rank order.

    ``fn`` must be importable by name; arguments and results are pickled. ``device`` is ``cpu`` or ``cuda``: the backend
    is NCCL with one rank a GPU, else gloo, and each rank's current CUDA device is its own. ``timeout`` is how many
    seconds a rank waits in a collective, or at the end, for the others. ``progress`` is called with what rank 0 says it
    is doing (:func:`say`).

    In a process that torchrun or another launcher started (``RANK`` and ``WORLD_SIZE`` are set), this process is one of
    the ranks: ``fn`` runs here, and every rank gets all results.

    Raises :class:`RankError` at the first rank that fails, with all others ended, and the first :class:`RankAnswer`
    that a rank raises. Standard output of the ranks is not shown, nor is the standard error of any but rank 0.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}")
    if _is_launched():
        with _heard(progress):
            return _run_as_rank(fn, world_size, args, device, timeout)
    with temporary_folder("reshard-ranks-") as folder:
        (folder / "job").write_bytes(pickle.dumps((fn, args)))
        sockets = multiprocessing.util.get_temp_dir()
        environment = _Environment(str(folder), sockets, dict(os.environ), str(Path.cwd()), device, timeout)
        _launch(environment, world_size, progress)
        # Written by our own workers into a folder that only this user can write to.
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


_listener: Callable[[str], None] | None = None


def say(text: str) -> None:
    """Say, on rank 0, what is being done; the process that started the ranks hears it."""
    if _listener is not None and dist.get_rank() == 0:
        _listener(text)


@contextmanager
def _heard(listener: Callable[[str], None]) -> Iterator[None]:
    global _listener
    _listener = listener
    try:
        yield
    finally:
        _listener = None


def start_fork_server(*modules: str) -> bool:
    """Start what the ranks are forked from, if it does not run yet, and return at once.

    It imports torch, and ``modules`` that every rank would otherwise import for itself. Worth calling early, as the
    imports then happen while the caller does something else; not at the top of a module, which the ranks import too.
    Return whether the platform has such a thing, and a use for it: under another launcher there is none. Raises
    ReshardError where the folder for temporary files has too long a name.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods() or _is_launched():
        return False
    multiprocessing.set_forkserver_preload(
        ["verify.forward.own_group", "torch", "torch.distributed.elastic.multiprocessing", *modules]
    )
    # It starts with Ctrl-C blocked, as this thread has it for a moment: an interrupted import prints tracebacks.
    with _variable("PYTHONWARNINGS", "ignore"):  # it frees what an interrupted launcher has left without a word
        resource_tracker.ensure_running()  # or it would be started, and the signal allowed, by the fork server's start
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    undo_at_the_end(_end_fork_server)
    atexit.unregister(_end_idle_fork_server)  # it may have been asked for before
    atexit.register(_end_idle_fork_server)
    try:
        forkserver.ensure_running()
    except OSError as error:  # as where the name of its socket would be longer than a socket's may be
        where = f"the ranks' socket cannot be in {tempfile.gettempdir()}: {error.strerror or error}"
        raise ReshardError(where, "set TMPDIR to a folder with a shorter name, such as /tmp") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return True


def _fork_server() -> int | None:
    server: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
    return server


def _end_idle_fork_server() -> None:
    """End what the ranks were forked from at once: left to itself it takes a second to forget what it has imported."""
    server = _fork_server()
    if server is not None:
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def _end_fork_server() -> None:
    """End what the ranks are forked from, and ranks that are being started; remove where its socket is."""
    server = _fork_server()
    if server is not None:
        for end in (os.killpg, os.kill):  # it may not have come as far as to have a group
            with suppress(ProcessLookupError):
                end(server, signal.SIGKILL)
    remove(Path(multiprocessing.util.get_temp_dir()))


def _is_launched() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_device(device: str) -> torch.device:
    """Return this rank's device of the kind ``cpu`` or ``cuda``; ranks share GPUs if they outnumber them."""
    if device == "cpu":
        return torch.device("cpu")
    return torch.device(device, int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


# In the process that launches


def _launch(environment: _Environment, world_size: int, progress: Callable[[str], None]) -> None:
    has_fork_server = start_fork_server()
    start_method = "forkserver" if has_fork_server else "spawn"
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    here, there = multiprocessing.get_context(start_method).Pipe(duplex=False)
    shown = {rank: Std.ALL if rank else Std.OUT for rank in range(world_size)}
    with here, _silent_launcher():
        with _variable(_SIGNALS, "none"):  # the handlers of signals stay ours, which end all at once (verify/ending.py)
            ranks = start_processes(
                name="reshard",
                entrypoint=_worker,
                args=dict.fromkeys(range(world_size), (environment, there)),
                envs={rank: _variables(rank, world_size, store.port) for rank in range(world_size)},
                logs_specs=DefaultLogsSpecs(log_dir=environment.folder, redirects=shown),
                start_method=start_method,
            )
        there.close()
        with undone(lambda: ranks.close(signal.SIGKILL)):
            _follow(ranks, here, progress, environment, world_size)


def _follow(
    ranks: PContext, said: Connection, progress: Callable[[str], None], environment: _Environment, world_size: int
) -> None:
    """Pass on what rank 0 says until all ranks are done. Raises RankError at the first that fails."""
    is_open = True
    while (result := ranks.wait(0)) is None:
        if not is_open:
            time.sleep(_LOOK)
        elif said.poll(_LOOK):
            try:
                progress(said.recv())
            except EOFError:
                is_open = False
    if result.is_failed():
        failure = min(result.failures.values(), key=lambda failure: failure.timestamp)
        rank = failure.local_rank
        raise _explain(Path(environment.folder), rank, failure.exitcode, world_size, environment.timeout)
    while is_open and said.poll():
        try:
            progress(said.recv())
        except EOFError:
            is_open = False


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank. ``port`` is that of the store where the ranks meet."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    outside = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return {**{name: str(n) for name, n in numbers.items()}, **meeting, **outside}


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
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _explain(folder: Path, rank: int, exitcode: int, world_size: int, timeout: float) -> RankError | RankAnswer:
    answer = folder / f"answer-{rank}"
    if answer.exists():
        return RankAnswer(pickle.loads(answer.read_bytes()))
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
    message = f"rank {rank} of {world_size} failed: {failure.message}"
    return RankError(message, failure.hint, rank=rank, details=failure.traceback)


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
    sockets: str
    variables: dict[str, str]
    directory: str
    device: str
    timeout: float

    def enter(self) -> None:
        """Be where the caller is, with its environment and what the launcher adds to it."""
        given = {name: os.environ[name] for name in _variables(0, 1, 0)}
        os.environ.clear()
        os.environ.update(self.variables | given)
        os.environ["TMPDIR"] = tempfile.tempdir = self.folder
        os.chdir(self.directory)


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
    hint: str | None
    traceback: str
    timed_out: bool


def _worker(environment: _Environment, listener: Connection) -> None:
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
        with _heard(listener.send):
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
    except (ReshardError, RankAnswer):
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


def _watch(folder: Path, rank: int, main: int, left: Sequence[Path]) -> None:
    """End this process with its parent, whose folders are ``left``; say where it is when a rank has timed out."""
    parent = multiprocessing.parent_process()
    while parent and not wait([parent.sentinel], _POLL):
        seen = folder / f"seen-{rank}"
        if (folder / "timed-out").exists() and not seen.exists():
            with suppress(OSError):
                _write(seen, json.dumps(asdict(_current_place(main))).encode())
    for each in left:
        remove(each)
    os._exit(1)


def _fail(folder: Path, rank: int, error: BaseException) -> NoReturn:
    """Leave an account of the error, and end this process; not by the way of destructors that may wait for others."""
    place = _place(list(traceback.walk_tb(error.__traceback__)))
    timed_out = place.collective is not None and any(s in str(error).lower() for s in ("timed out", "timeout"))
    hint = error.hint if isinstance(error, ReshardError) else None
    failure = _Failure(_last_line(error), hint, "".join(traceback.format_exception(error)), timed_out)
    with suppress(OSError):  # the launcher may be gone, and the folder with it
        if place.collective:
            _write(folder / f"place-{rank}", json.dumps(asdict(place)).encode())
        if isinstance(error, RankAnswer):
            _write(folder / f"answer-{rank}", pickle.dumps(error.value))
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


def is_of_collective(error: BaseException) -> bool:
    """Whether an error was raised while this rank was in a collective: another rank may be the cause of it."""
    return _place(list(traceback.walk_tb(error.__traceback__))).collective is not None


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
        elif module.split(".")[0] != "torch" and module not in ("verify.rank.collectives", "verify.rank.layers"):
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

    The others wait, without a limit, while it works alone. What ends the run on any rank, an error or an answer that
    the rank alone knows, reaches it even while it is in a collective: then it calls ``give_up`` with that and ends with
    the exit code that this returns. All ranks end with the code of the first, and not before it has spoken, as the
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
        """Whether this is the rank that speaks."""
        return bool(self.rank == 0)

    def agree(self, answer: bool) -> bool:
        """What the first rank says, on all of them."""
        if self.is_first:
            self._store.set("answer", json.dumps(answer))
        while not self._store.check(["answer"]):
            time.sleep(_POLL)
        return bool(json.loads(self._store.get("answer")))

    def leave(self, end: Any) -> NoReturn:
        """Of a rank that is not the first: report what ended the run, if not all know it, and end when the first does.

        That is a ReshardError, or something else that can be pickled.
        """
        if end is not None and self._store.add("ends", 1) == 1:
            plain = ReshardError(end.message, end.hint) if isinstance(end, ReshardError) else end
            self._store.set("end", pickle.dumps(plain).hex())
        while True:
            time.sleep(60)

    def first_end(self, end: Any) -> Any:
        """Of the first rank: take the word. Another rank's end, the cause of its own perhaps, goes before that."""
        self._speaks.acquire()
        deadline = time.monotonic() + (_SETTLE if isinstance(end, ReshardError) else 0)
        while (found := self._end()) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        return end if found is None else found

    def end(self, code: int) -> None:
        """Of the first rank: let the others end with this exit code, and see them go."""
        self._store.set("code", str(code))
        deadline = time.monotonic() + _BLAME
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
                    code = self._give_up(end)
                    self.end(code)
                    break
            else:
                return
        except dist.DistError:  # the first rank has gone without a word
            code = 2
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)
