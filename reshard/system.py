"""Everything that depends on the machine: errors of the disk, processes, and the share of the work that a launcher
gives.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from reshard.formats.errors import CheckpointError, PlanError

if TYPE_CHECKING:
    import torch

    Dtype = str | torch.dtype
    Device = str | torch.device
    Given = TypeVar("Given")
    Held = TypeVar("Held")

    class Taken(Generic[Given, Held]):
        """A field of a request: what a caller may give, and what it is then (``reshard.commands.fields`` reads it)."""

        def __get__(self, request: object, kind: type | None = None) -> Held: ...
        def __set__(self, request: object, value: Given) -> None: ...
else:
    Dtype = Device = str

    class Taken:
        """The type that a field has. A type checker knows what may be given, too."""

        def __class_getitem__(cls, types: tuple[object, object]) -> object:
            return types[1]


def default(value: Any) -> Any:
    """The default of a field that is ``Taken``."""
    return value


PROCESSES = "RESHARD_PROCESSES"
"""The number of processes, where the launcher does not say it (Kubernetes)."""

_SLURM, _ARRAY = "SLURM_PROCID", "SLURM_ARRAY_TASK"
_LAUNCHERS = (
    ("torchrun", "RANK", ("WORLD_SIZE",)),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MPI", "PMI_RANK", ("PMI_SIZE",)),
    ("Slurm", _SLURM, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
    ("the Kubernetes Job", "JOB_COMPLETION_INDEX", (PROCESSES,)),
    ("SkyPilot", "SKYPILOT_NODE_RANK", ("SKYPILOT_NUM_NODES",)),
)
"""Name, variable of the process's number, variables of the number of processes; the innermost launcher first."""


@dataclass(frozen=True)
class Share:
    """Process ``index`` of ``count`` that divide work among them."""

    index: int
    count: int

    @classmethod
    def of_text(cls, text: str) -> Share:
        """The process ``I/N``. Raises ValueError."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None or int(match[1]) >= int(match[2]):
            raise ValueError(f"'{text}' is not 'auto', nor I/N with I from 0 to N - 1")
        return cls(int(match[1]), int(match[2]))

    def of(self, number: int) -> range:
        """Return this process's share of ``number`` items of work: neighbours; empty if there are more processes than
        items.
        """
        return range(number * self.index // self.count, number * (self.index + 1) // self.count)

    def of_sizes(self, sizes: Sequence[int]) -> frozenset[int]:
        """This process's pieces of work of these sizes, by their numbers: the largest first, each to who has least."""
        loads, numbers = [0] * min(self.count, len(sizes)), set()  # of more processes the last have nothing
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            least = loads.index(min(loads))
            loads[least] += sizes[number] + 1  # so that empty pieces are dealt too
            if least == self.index:
                numbers.add(number)
        return frozenset(numbers)


def share_of_launcher(environment: Mapping[str, str] = os.environ) -> Share:
    """This process, as its launcher counts. Raises PlanError if no launcher's variables are set, or wrong ones."""
    for launcher, rank, sizes in _LAUNCHERS:
        if rank not in environment:
            continue
        if rank == _SLURM and f"{_ARRAY}_ID" in environment:  # without srun and --ntasks, each job is one process
            environment = {sizes[-1]: "1", **environment}
        size = next((name for name in sizes if name in environment), None)
        if size is None:
            raise PlanError(f"{rank} is set, but {sizes[-1]} is not", f"set {sizes[-1]} to the number of processes")
        try:
            share = Share(int(environment[rank]), int(environment[size]))
            if rank == _SLURM and f"{_ARRAY}_ID" in environment:  # one of the jobs of an array
                first, step = int(environment.get(f"{_ARRAY}_MIN", 0)), int(environment.get(f"{_ARRAY}_STEP", 1))
                number = (int(environment[f"{_ARRAY}_ID"]) - first) // step
                share = Share(number * share.count + share.index, int(environment[f"{_ARRAY}_COUNT"]) * share.count)
        except (ValueError, KeyError, ZeroDivisionError):
            share = Share(-1, 0)
        if not 0 <= share.index < share.count:
            raise PlanError(
                f"{launcher} says that this is process {environment[rank]} of {environment[size]}, which cannot be"
            )
        return share
    names = ", ".join(rank for _, rank, _ in _LAUNCHERS)
    raise PlanError(f"'auto' needs a launcher's variable, and none is set: {names}", "start it with srun or torchrun")


_LIBRARY = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


_SET_PARENT_DEATH_SIGNAL = 1


def end_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends (Linux only)."""
    if _LIBRARY is not None:
        _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


def cpu_count() -> int:
    """The processors of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def reserve(descriptor: int, nbytes: int) -> None:
    """Set the size of a new file in bytes, and reserve its space on the disk if the file system can.

    Later writes are faster, and cannot find the disk full. Raises OSError.
    """
    os.ftruncate(descriptor, nbytes)
    fallocate = getattr(_LIBRARY, "fallocate64", None)
    if fallocate is not None and nbytes:
        # not os.posix_fallocate: it writes to every block if the file system cannot reserve
        failed = fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
        if failed and ctypes.get_errno() in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def check_space(folder: Path, needed: int, what: str = "", hint: str = "write to another disk") -> None:
    """Raise CheckpointError if the disk has less free space than ``needed`` bytes. The error names ``what``
    needs them.
    """
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if needed > free:
        place = f"{folder}: not enough space for {what}" if what else str(folder)
        raise CheckpointError(
            f"{place}: {needed:,} bytes are needed and {free:,} are free", f"free some space, or {hint}"
        )


@lru_cache(maxsize=1)
def boot_id() -> str | None:
    """An id that changes with each start of the machine; None if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


@contextlib.contextmanager
def system_errors() -> Iterator[None]:
    """Turn an OSError in the block that names a file, such as one in a folder that is locked, into a CheckpointError.

    Others may be of a function that the caller gave.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> CheckpointError:
    """The CheckpointError for an OSError while a file is written, with a hint if the disk is full."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    hint = "free some space and run the same command again" if full else None
    return CheckpointError(f"cannot write {path}: {error.strerror or error}", hint)


def allow_open_files(count: int) -> None:
    """Let this process open ``count`` more files, if the system lets it: by default it may have 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count += len([*Path("/dev/fd").iterdir()])
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if resource.RLIM_INFINITY != soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
