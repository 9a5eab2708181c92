"""Which failures of a rank are the machine's, and say nothing of the model that it runs. Imports no torch."""

from __future__ import annotations

MEMORY = "memory ran out on that rank, which says nothing of the model"
GPU = "the GPU or a library of it failed, which says nothing of the model; --device cpu runs without it"

_SIGNS = {
    MEMORY: ("SIGKILL", "out of memory", "ALLOC_FAILED", "MemoryError", "allocate memory"),
    GPU: ("AcceleratorError", "CUDA error", "CUDA driver error", "HIP error", "CUBLAS_STATUS_", "CUDNN_STATUS_",
          "CUSOLVER_STATUS_", "no kernel image"),
}  # fmt: skip
"""Words of torch, CUDA and the kernel: most of these errors have no class of their own."""


def machine_fault(error: BaseException | str) -> str | None:
    """What failed of the machine, ``MEMORY`` or ``GPU``, if an error or the text of one says so; else None."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return next((fault for fault, signs in _SIGNS.items() if any(sign in text for sign in signs)), None)
