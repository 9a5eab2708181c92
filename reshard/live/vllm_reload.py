"""vLLM's reloading of layers, which is private and changes from month to month: the one module that uses it.

Each layer is made anew in the shapes in which vLLM loads weights, filled, and processed as after loading; then its
values are copied into the tensors that the engine computes with. So weights that a kernel packs come out right, and
captured graphs keep their addresses.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import signature
from types import ModuleType
from typing import Any

import torch

from reshard.formats.errors import LiveError
from reshard.formats.torch_internals import unsaved_buffers

TRIED = "0.32"
"""The version of vLLM with which this was tried. Another is taken if it has all of ``SYMBOLS``, ``prove`` passes, and
its own loader agrees with the rules.
"""
LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
SYMBOLS = {
    "_get_original_loader": 1, "_layerwise_process": 2, "_place_kernel_tensors": 2, "get_layer_params_buffers": 1,
    "get_layer_tensors": 1, "get_layerwise_info": 1, "initialize_online_processing": 1,
    "is_deferred_attention_layer": 1, "materialize_layer": 2, "restore_layer_on_meta": 2,
}  # fmt: skip
"""Functions of vLLM that are used, with the number of their arguments."""


def version() -> str:
    """Return vLLM's version."""
    return str(importlib.import_module("vllm").__version__)


@cache
def layerwise() -> ModuleType:
    """vLLM's module. Raises LiveError if a function is not there, or takes other arguments."""
    try:
        module = importlib.import_module(LAYERWISE)
        for name, count in SYMBOLS.items():
            signature(getattr(module, name)).bind(*range(count))
    except (ImportError, AttributeError, TypeError) as error:
        raise _unknown(str(error)) from error
    return module


def prove() -> None:
    """Give a layer new weights with vLLM's functions. Raises LiveError if they are not in it then."""
    layer, built = (torch.nn.Linear(3, 2, bias=False, device=device) for device in ("cpu", "meta"))
    kernel = layer.weight
    try:
        layerwise().get_layerwise_info(layer).restore_metadata = {"weight": built.weight}, {}
        commit(layer, {"weight": torch.full((2, 3), 7.0)}, kernel.dtype)
    except (AttributeError, TypeError, ValueError, AssertionError) as error:
        raise _unknown(f"{type(error).__name__}: {error}") from error
    if layer.weight is not kernel or not kernel.eq(7).all():
        raise _unknown("a layer that was reloaded has not the new weights")


def _unknown(why: str) -> LiveError:
    return LiveError(f"live pushes do not work with vLLM {version()}: {why}", f"install vLLM {TRIED}")


def aliases(model: torch.nn.Module) -> list[list[str]]:
    """The names of each parameter of a model: several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [*names.values()]


def _before_processing(layer: torch.nn.Module, leaf: str, now: torch.Tensor) -> torch.Tensor:
    """Return a parameter as it was when the model was built, without data; attributes that vLLM did not note, as they
    are now.
    """
    noted: Mapping[str, torch.Tensor] = layerwise().get_layerwise_info(layer).restore_metadata[0]
    if leaf == "bias" and leaf not in noted and "weight" in noted:  # some kernels of CPUs have it in F32
        return now.to("meta", noted["weight"].dtype)
    return noted.get(leaf, now)


@torch.no_grad()
def commit(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Give a running model its parameters: one layer after another, so that no request finds it without.

    ``tensors`` has all of them, by any of their names; ``dtype`` is the model's. The caller holds vLLM's current
    configuration. What is raised on the way leaves the model half new.
    """
    layers: dict[torch.nn.Module, dict[str, torch.Tensor]] = {}
    for names in aliases(model):
        tensor = next(tensors[name] for name in names if name in tensors)
        for name in names:
            prefix, _, leaf = name.rpartition(".")
            layers.setdefault(model.get_submodule(prefix), {})[leaf] = tensor
    for layer, tensors_of in layers.items():
        _renew(layer, tensors_of)
    for layer in model.modules():
        if layerwise().is_deferred_attention_layer(layer):  # it makes its own of others' weights
            layer.process_weights_after_loading(dtype)  # type: ignore[operator]  # a method of vLLM's


def _renew(layer: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give one layer its parameters, as if it were loaded."""
    vllm = layerwise()
    info = _begun(layer)
    vllm.materialize_layer(layer, info)
    for leaf, buffer in info.kernel_tensors[1].items():  # no push brings buffers
        room = getattr(layer, leaf, None)
        if room is not None and room is not buffer and room.shape == buffer.shape:
            room.copy_(buffer)
    for leaf, tensor in tensors.items():
        layer.get_parameter(leaf).data.copy_(tensor)
    quantization = getattr(layer, "quant_method", None)
    on_cpu = all(tensor.device.type == "cpu" for tensor in info.kernel_tensors[0].values())
    if on_cpu and getattr(quantization, "moe_kernel", None) is not None:
        quantization.moe_kernel = None  # type: ignore[union-attr]  # with one, vLLM 0.32 does not pack experts again
    vllm._layerwise_process(layer, info)


def _begun(layer: torch.nn.Module) -> Any:
    """vLLM's notes of a layer, which has its load-time tensors on the meta device from then on."""
    vllm = layerwise()
    info = vllm.get_layerwise_info(layer)
    info.kernel_tensors = vllm.get_layer_params_buffers(layer)
    info.kernel_non_persistent_buffers = set(unsaved_buffers(layer))
    vllm.restore_layer_on_meta(layer, info)
    vllm.initialize_online_processing(layer)
    return info


@contextmanager
def as_loaded(model: torch.nn.Module) -> Iterator[None]:
    """A running model as it was before loading, with vLLM's own loaders, for the length of a block.

    Its parameters have storage of their own, and nothing in it. All is put back at the end, so no request may run.
    """
    vllm = layerwise()
    begun, biases = [], []
    tied = aliases(model)
    try:
        for layer in model.modules():
            begun.append((layer, _begun(layer)))
            vllm.materialize_layer(layer, begun[-1][1])
            for leaf, tensor in vllm.get_layer_tensors(layer).items():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = vllm._get_original_loader(tensor)
                if tensor is begun[-1][1].kernel_tensors[0].get(leaf):  # vLLM leaves it where it is
                    biases.append((tensor, tensor.data))
                    tensor.data = torch.empty_like(_before_processing(layer, leaf, tensor), device=tensor.device)
        for first, *others in tied:
            for name in others:  # vLLM forgets which are one
                prefix, _, leaf = name.rpartition(".")
                model.get_submodule(prefix)._parameters[leaf] = model.get_parameter(first)
        yield
    finally:
        for tensor, data in biases:
            tensor.data = data
        for layer, info in begun:
            vllm._place_kernel_tensors(layer, info)
            info.reset()
