"""In the place of vLLM's private module of this name: the same functions, of a layer that packs its weight on a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

_INFO: dict[torch.nn.Module, SimpleNamespace] = {}


class Packed(torch.nn.Module):
    """Computes with ``packed``, made by ``process``; its weight is used in loading alone."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
        self.packed = torch.zeros(0)
        self.quant_method = SimpleNamespace(moe_kernel="as it was")

    def process(self) -> None:
        if self.quant_method.moe_kernel is None:
            self.packed = self.weight.detach().clone()
            self.quant_method.moe_kernel = "made"


def load(model: torch.nn.Module) -> None:
    """As vLLM builds and loads a model."""
    for layer in model.modules():
        metas = {name: tensor.to("meta") for name, tensor in layer._parameters.items() if tensor is not None}
        _INFO[layer] = SimpleNamespace(restore_metadata=(metas, {}), kernel_tensors=None)


def get_layerwise_info(layer: torch.nn.Module) -> SimpleNamespace:
    return _INFO.setdefault(layer, SimpleNamespace(restore_metadata=({}, {}), kernel_tensors=None))


def get_layer_params_buffers(layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    parameters = {name: tensor for name, tensor in layer._parameters.items() if tensor is not None}
    return parameters, dict(layer._buffers)


def get_layer_tensors(layer: torch.nn.Module) -> dict[str, Any]:
    return {**layer._parameters, **layer._buffers}


def restore_layer_on_meta(layer: torch.nn.Module, info: SimpleNamespace) -> None:
    for name, meta in info.restore_metadata[0].items():
        layer._parameters[name] = torch.nn.Parameter(meta, requires_grad=False)


def initialize_online_processing(layer: torch.nn.Module) -> None:
    """Nothing: no loader is wrapped here."""


def materialize_layer(layer: torch.nn.Module, info: SimpleNamespace) -> None:
    for name, tensor in layer._parameters.items():
        if tensor is not None and tensor.is_meta:
            layer._parameters[name] = torch.nn.Parameter(torch.full(tensor.shape, 9.0), requires_grad=False)


def is_deferred_attention_layer(layer: torch.nn.Module) -> bool:
    return False


def _layerwise_process(layer: torch.nn.Module, info: SimpleNamespace) -> None:
    if isinstance(layer, Packed):
        layer.process()
    for name, tensor in info.kernel_tensors[0].items():
        tensor.copy_(layer._parameters[name])
    _place_kernel_tensors(layer, info)


def _place_kernel_tensors(layer: torch.nn.Module, info: SimpleNamespace) -> None:
    layer._parameters.update(info.kernel_tensors[0])


def _get_original_loader(tensor: torch.Tensor) -> object:
    return None
