"""The modules of Transformer Engine that Megatron-Core builds a model from, on a CPU: their parameters and plain math.

Transformer Engine itself needs a GPU. Megatron-Core names and divides the parameters of its models in classes that
derive from these modules, so with this in its place all that Megatron-Core does with a checkpoint is its own.
``install`` makes it importable as ``transformer_engine``. This file runs in the engine's own environment.
"""

from __future__ import annotations

import importlib.machinery
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Base(nn.Module):
    """What all of them have: a state beside the weights, which is empty for weights that are not F8."""

    fp8 = fp8_calibration = False

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False}

    def get_extra_state(self) -> Tensor:
        """An empty state."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Ignore it."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing: nothing is F8."""


class Linear(Base):
    """A matrix, ``out in``, of which this rank has rows (column-parallel) or columns (row-parallel)."""

    def __init__(
        self, in_features: int, out_features: int, *, tp_group: Any = None, tp_size: int = 1, bias: bool = True,
        return_bias: bool = False, parallel_mode: str | None = None, params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(_zeros(in_features, out_features, parallel_mode, tp_size, params_dtype))
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.return_bias = return_bias
        self.bias = nn.Parameter(torch.zeros(len(self.weight), dtype=params_dtype)) if bias else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        """The product, summed over the ranks if row-parallel; with ``return_bias``, the bias beside it."""
        found = functional.linear(x, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            torch.distributed.all_reduce(found, group=self.tp_group)
        if self.return_bias:
            return found, self.bias
        return found if self.bias is None else found + self.bias


class LayerNormLinear(Linear):
    """A norm and the matrix behind it."""

    def __init__(
        self, in_features: int, out_features: int, *, eps: float = 1e-5, normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, **settings)
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features)) if normalization == "LayerNorm" else None
        self.eps, self.added = eps, int(zero_centered_gamma)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, **_: Any) -> Any:
        """The product of the normed input."""
        return super().forward(_normed(x, self.layer_norm_weight + self.added, self.layer_norm_bias, self.eps))


class RMSNorm(Base):
    """A norm by the root mean square."""

    def __init__(
        self, hidden_size: int | None = None, eps: float = 1e-5, zero_centered_gamma: bool = False,
        normalized_shape: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size or normalized_shape or 0))
        self.eps, self.added = eps, int(zero_centered_gamma)
        self.bias: nn.Parameter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The normed input."""
        return _normed(x, self.weight + self.added, self.bias, self.eps)


class LayerNorm(RMSNorm):
    """A norm by mean and variance."""

    def __init__(self, hidden_size: int | None = None, eps: float = 1e-5, **settings: Any) -> None:
        super().__init__(hidden_size, eps, **settings)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))


class DotProductAttention(Base):
    """Causal attention; queries, keys and values are ``position batch head channel``."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """What the queries find, with the channels of all heads in one dimension."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return found.permute(2, 0, 1, 3).flatten(2)


class GroupedLinear(Base):
    """The matrices of several experts; ``splits`` has the number of tokens of each."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, tp_size: int = 1, bias: bool = True,
        parallel_mode: str | None = None, params_dtype: torch.dtype = torch.float32, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        for number in range(num_gemms):
            weight = nn.Parameter(_zeros(in_features, out_features, parallel_mode, tp_size, params_dtype))
            setattr(self, f"weight{number}", weight)
            if bias:
                setattr(self, f"bias{number}", nn.Parameter(torch.zeros(len(weight), dtype=params_dtype)))

    def forward(self, x: Tensor, splits: Any, is_first_microbatch: bool | None = None) -> Tensor:
        """The product of each expert's tokens."""
        parts = enumerate(torch.split(x, list(splits)))
        return torch.cat([functional.linear(part, getattr(self, f"weight{number}")) for number, part in parts])


def _zeros(inputs: int, outputs: int, mode: str | None, ranks: int, dtype: torch.dtype) -> Tensor:
    rows, columns = outputs // (ranks if mode == "column" else 1), inputs // (ranks if mode == "row" else 1)
    return torch.zeros(rows, columns, dtype=dtype)


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _absent(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("it needs a GPU")


def install() -> None:
    """Make these modules importable as ``transformer_engine``."""
    empty = type("Empty", (), {"__init__": lambda self, *_, **__: None})
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {"__version__": "1.12.0"},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"DelayedScaling": empty, "Format": type("Format", (), {"E4M3": 0})},
        "transformer_engine.pytorch": {
            each.__name__: each
            for each in (Linear, LayerNormLinear, RMSNorm, LayerNorm, DotProductAttention, GroupedLinear)
        }
        | {"Fp8Padding": Base, "Fp8Unpadding": Base},
        "transformer_engine.pytorch.cpp_extensions": {"cast_to_fp8": _absent},
        "transformer_engine.pytorch.distributed": {
            "CudaRNGStatesTracker": empty,
            "checkpoint": _absent,
            "activation_recompute_forward": lambda *_, **__: nullcontext(),
            "is_fp8_activation_recompute_enabled": lambda: False,
        },
        "transformer_engine.pytorch.float8_tensor": {"Float8Tensor": empty},
        "transformer_engine.pytorch.fp8": {
            "FP8GlobalStateManager": empty, "fp8_autocast": _absent, "fp8_model_init": _absent,
        },
    }  # fmt: skip
    for name, content in contents.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(content)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
