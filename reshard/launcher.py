"""Which process this is, of how many, by the variables that launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from formats.errors import PlanError

PROCESSES = "RESHARD_PROCESSES"
"""The number of processes, where the launcher does not say it (Kubernetes)."""

_LAUNCHERS = (
    ("torchrun", "RANK", ("WORLD_SIZE",)),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("MPI", "PMI_RANK", ("PMI_SIZE",)),
    ("Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
    ("the Slurm array", "SLURM_ARRAY_TASK_ID", ("SLURM_ARRAY_TASK_COUNT",)),
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

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


def share_of_launcher(environment: Mapping[str, str] = os.environ) -> Share:
    """This process, as its launcher counts. Raises PlanError if no launcher's variables are set, or wrong ones."""
    for launcher, rank, sizes in _LAUNCHERS:
        if rank not in environment or (launcher == "Slurm" and _is_one_of_an_array(environment)):
            continue
        size = next((name for name in sizes if name in environment), None)
        if size is None:
            raise PlanError(f"{rank} is set, but {sizes[-1]} is not", f"set {sizes[-1]} to the number of processes")
        first = int(environment.get("SLURM_ARRAY_TASK_MIN", "0")) if "ARRAY" in rank else 0
        try:
            share = Share(int(environment[rank]) - first, int(environment[size]))
        except ValueError:
            share = Share(-1, 0)
        if not 0 <= share.index < share.count:
            raise PlanError(
                f"{launcher} says that this is process {environment[rank]} of {environment[size]}, which cannot be"
            )
        return share
    known = ", ".join(rank for _, rank, _ in _LAUNCHERS)
    raise PlanError(f"'auto' needs a launcher's variable, and none is set: {known}", "start it with srun or torchrun")


def _is_one_of_an_array(environment: Mapping[str, str]) -> bool:
    return "SLURM_ARRAY_TASK_ID" in environment and environment.get("SLURM_NTASKS", "1") == "1"
