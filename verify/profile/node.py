"""Where the ranks of a profile run, and the memory that each of them has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from verify.rank.device import memory

RESERVE = 1_500_000_000
"""The memory of a GPU that tensors cannot use, about: CUDA's context, NCCL's buffers and cuBLAS's workspace."""


@dataclass(frozen=True)
class Node:
    """Where the ranks run: ``cpu`` or an accelerator, how many there may be, and what each has."""

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
        return _machine_memory("MemTotal") // degree

    def free(self, degree: int) -> int:
        """The bytes that a rank may take now, at most.

        On a GPU, all of its memory: to ask for the free part, this process would have to take some of each GPU. A rank
        that needs more ends with an error, which is reported (``_run``). On a CPU the kernel may end another process.
        """
        return self.memory(degree) if self.device != "cpu" else _machine_memory("MemAvailable") // degree


def _machine_memory(key: str) -> int:
    """A line of /proc/meminfo in bytes, or else all memory."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
