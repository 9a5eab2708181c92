"""The devices that ranks compute on: the CPU, or this machine's accelerator (CUDA, ROCm, XPU, NPU) by torch's own name.

Whatever verify asks of an accelerator, it asks here: torch has one module of the same functions for each kind.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from reshard.formats.errors import refused

CPU = torch.device("cpu")


def accelerator() -> str | None:
    """Return torch's name of this machine's accelerator (``cuda`` for ROCm too); None without one.

    Apple's MPS counts as none: it is one device, without float64, of which torch does not say how much is free.
    """
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None or device.type == "mps" else device.type


def resolve(kind: str) -> str:
    """The kind of device that ``--device`` asks for. Raises SettingError for one that is not there."""
    available = accelerator()
    if kind == "auto":
        return available or "cpu"
    if kind not in {"cpu", available}:
        what = f"no device but '{available}'" if available else "no accelerator"
        raise refused("device", kind, f"torch finds {what}", instead=({"device": available or "cpu"},))
    return kind


def count(kind: str) -> int:
    """The number of devices of a kind that this process sees."""
    number: int = torch.get_device_module(kind).device_count()
    return number


def device_of(kind: str, rank: int) -> torch.device:
    """The device of a rank of this machine: ranks share accelerators if they outnumber them."""
    return CPU if kind == "cpu" else torch.device(kind, rank % count(kind))


def use(device: torch.device) -> None:
    """Let this thread compute on a device unless something else is said."""
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def backend(kind: str, ranks: int) -> str:
    """Return the backend of ``ranks`` processes on this machine: the device's usual one, or gloo if several share a
    device.
    """
    return dist.get_default_backend_for_device(kind) if kind != "cpu" and ranks <= count(kind) else "gloo"


def names(kind: str, ranks: int) -> str:
    """Return the names of the devices of so many ranks."""
    if kind == "cpu":
        return "cpu"
    module = torch.get_device_module(kind)
    return ", ".join(dict.fromkeys(module.get_device_name(i) for i in range(min(ranks, count(kind)))))


def memory(kind: str, number: int) -> int:
    """All bytes of a device; to ask for the free ones would take some."""
    nbytes: int = torch.get_device_module(kind).get_device_properties(number).total_memory
    return nbytes


def free(device: torch.device) -> int:
    """The bytes of an accelerator that this process may take now: free, or its own and unused."""
    module = torch.get_device_module(device)
    unused = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + unused)


def empty() -> None:
    """Give memory that this process does not use back, to the accelerators and to the system (glibc keeps it)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    kind = accelerator()
    if kind is not None:
        torch.get_device_module(kind).empty_cache()


class Now:
    """A mark of time on a CPU, as ``torch.Event`` is one on a stream."""

    def record(self) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: Now) -> float:
        """Milliseconds from this mark to a later one."""
        return (end._time - self._time) * 1e3


def stream(kind: str) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return two functions: one makes an event that marks the time on the current stream (``record``, ``elapsed_time``
    in milliseconds), the other waits until the device has done everything.
    """
    if kind == "cpu":
        return Now, lambda: None
    module = torch.get_device_module(kind)
    return partial(module.Event, enable_timing=True), module.synchronize


def is_noisy(device: torch.device) -> bool:
    """Whether two equal runs may differ: accelerators add some sums in the order of arrival."""
    return device.type != "cpu"


def has_bfloat16(kind: str) -> bool:
    """Whether devices of a kind compute in bfloat16 themselves; old CUDA GPUs imitate it."""
    return kind != "cuda" or torch.cuda.is_bf16_supported(False)


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64: some refuse it, some compute in float32 and say nothing."""
    try:
        one = torch.ones(1, 1, dtype=torch.float64, device=device)
        return bool(((one + 2.0**-40) @ one).item() > 1)
    except (RuntimeError, TypeError):
        return False
