"""Which process this is, of how many, by the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from formats.errors import PlanError

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

    def of(self, number: int) -> range:
        """This process's part of so many pieces of work: neighbours; empty if there are more processes than pieces."""
        return range(number * self.index // self.count, number * (self.index + 1) // self.count)

    def of_sizes(self, sizes: Sequence[int]) -> frozenset[int]:
        """This process's pieces of work of these sizes, by their numbers: the largest first, each to who has least."""
        loads, mine = [0] * min(self.count, len(sizes)), set()  # of more processes the last have nothing
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            least = loads.index(min(loads))
            loads[least] += sizes[number] + 1  # so that empty pieces are dealt too
            if least == self.index:
                mine.add(number)
        return frozenset(mine)


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
            share = _in_array(share, environment) if rank == _SLURM else share
        except (ValueError, KeyError, ZeroDivisionError):
            share = Share(-1, 0)
        if not 0 <= share.index < share.count:
            raise PlanError(
                f"{launcher} says that this is process {environment[rank]} of {environment[size]}, which cannot be"
            )
        return share
    known = ", ".join(rank for _, rank, _ in _LAUNCHERS)
    raise PlanError(f"'auto' needs a launcher's variable, and none is set: {known}", "start it with srun or torchrun")


def _in_array(share: Share, environment: Mapping[str, str]) -> Share:
    """A process of a Slurm job among those of all jobs of its array, if it is in one. Raises ValueError."""
    if f"{_ARRAY}_ID" not in environment:
        return share
    first, step = int(environment.get(f"{_ARRAY}_MIN", "0")), int(environment.get(f"{_ARRAY}_STEP", "1"))
    number = (int(environment[f"{_ARRAY}_ID"]) - first) // step
    return Share(number * share.count + share.index, int(environment[f"{_ARRAY}_COUNT"]) * share.count)
