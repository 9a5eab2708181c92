"""The modules of Transformer Engine from which Megatron-Core builds a model: names and shapes of their parameters.

Transformer Engine needs a GPU's libraries. Megatron-Core divides the parameters of these modules, and names them in a
checkpoint, in classes of its own that derive from them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from reshard.verify.loader.absent import Absent

_PACKAGE = "transformer_engine"
_MODULES = frozenset(
    _PACKAGE + name
    for name in ("", ".common", ".common.recipe", ".pytorch", ".pytorch.cpp_extensions", ".pytorch.distributed",
                 ".pytorch.float8_tensor", ".pytorch.fp8")
)  # fmt: skip
"""Modules that Megatron-Core imports wherever the package is installed."""


class _Module(nn.Module):
    """A module with the state beside the weights that all have, and no parameters."""

    fp8 = fp8_calibration = False

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> None:
        """Nothing: no weight is F8."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing."""

    def _have(self, name: str, *shape: int, dtype: torch.dtype | None) -> None:
        setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype)))


class Linear(_Module):
    """A matrix, ``out in``, of which a rank has rows (column-parallel) or columns (row-parallel)."""

    def __init__(
        self, in_features: int, out_features: int, *, parallel_mode: str | None = None, tp_size: int = 1,
        bias: bool = True, params_dtype: torch.dtype | None = None, numbers: tuple[str, ...] = ("",), **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.use_bias, self.parallel_mode, self.tp_size = bias, parallel_mode, tp_size
        rows = out_features // (tp_size if parallel_mode == "column" else 1)
        columns = in_features // (tp_size if parallel_mode == "row" else 1)
        for number in numbers:
            self._have(f"weight{number}", rows, columns, dtype=params_dtype)
            if bias:
                self._have(f"bias{number}", rows, dtype=params_dtype)


class LayerNormLinear(Linear):
    """A norm by the root mean square, and the matrix behind it."""

    def __init__(self, in_features: int, out_features: int, *, params_dtype: Any = None, **settings: Any) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **settings)
        self._have("layer_norm_weight", in_features, dtype=params_dtype)


class GroupedLinear(Linear):
    """The matrices of several experts."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **settings: Any) -> None:
        super().__init__(in_features, out_features, numbers=tuple(map(str, range(num_gemms))), **settings)
        self.num_gemms = num_gemms


class RMSNorm(_Module):
    """A norm by the root mean square."""

    def __init__(
        self, hidden_size: int = 0, *, normalized_shape: int = 0, params_dtype: torch.dtype | None = None, **_: Any
    ) -> None:
        super().__init__()
        self._have("weight", hidden_size or normalized_shape, dtype=params_dtype)


_CLASSES = {each.__name__: each for each in (Linear, LayerNormLinear, GroupedLinear, RMSNorm)}


def _attribute(module: str, name: str) -> Any:
    if (inner := f"{module}.{name}") in _MODULES:
        return import_module(inner)
    return _CLASSES.get(name) or type(name, (_Module,), {})


def stand_in() -> bool:
    """Make the package importable if it is not installed; returns whether that was so."""
    if find_spec(_PACKAGE) is not None:
        return False
    sys.meta_path.append(Absent(_MODULES.__contains__, _attribute))
    vars(import_module(_PACKAGE))["__version__"] = "1.12.0"  # later ones are asked for more modules
    return True
