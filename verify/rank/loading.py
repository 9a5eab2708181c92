"""Loading a folder with transformers' own code, the whole original's or a rank's, and which tensors fill which
parameters.

transformers renames and fuses weights as it loads them; its own conversion says which parameter a tensor on disk ends
in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from huggingface_hub.errors import StrictDataclassError
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.quantization.companions import is_of_activations
from reshard.formats.quantization.methods import quantization_settings, scheme_of
from reshard.formats.transformers_internals import model_class, placements, quiet_transformers
from reshard.mesh.plan import Plan
from reshard.verify.rank.group import machine_fault


@dataclass(frozen=True)
class TensorPart:
    """A part of a tensor: it begins at ``start`` of the first dimension, which has ``length`` indices in the whole
    tensor.
    """

    start: int
    length: int

    def among_zeros(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor, zero but for this part; its gradient is the part of the whole one's."""
        index = torch.arange(self.start, self.start + len(part), device=part.device)
        return part.new_zeros(self.length, *part.shape[1:]).index_copy_(0, index, part)


@dataclass(frozen=True)
class Loaded:
    """A model, or a rank of it."""

    model: Any
    sources: Mapping[str, tuple[str, ...]]
    """The tensors that each parameter was made of."""
    unused: tuple[str, ...]
    """The tensors on disk that it does not use."""
    parts: tuple[tuple[torch.Tensor, frozenset[str]], ...] = ()
    """The parameters of which ranks have parts, with the mesh dimensions along which these differ."""
    experts: Mapping[str, TensorPart] = field(default_factory=dict)
    """The place of a rank's own experts among all, for each parameter made of them."""
    cut: tuple[str, ...] = ()
    """The parameters to which the rank's config.json gives another shape, where it should give the right one."""
    adapter: Any = None
    """PEFT's model around it."""


def dequantizing(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with which transformers loads a quantized checkpoint with plain weights; none for other
    checkpoints.

    Raises ReshardError if transformers cannot do that with what is installed.
    """
    settings = quantization_settings(config)
    if not settings:
        return {}
    method = settings.get("quant_method", "a method that config.json does not name")
    try:
        how = AutoQuantizationConfig.from_dict({**settings, "dequantize": True})
        AutoHfQuantizer.from_config(how, pre_quantized=True).validate_environment(device_map={"": "cpu"})
    except (ImportError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ReshardError(f"quantized by {method}, which transformers cannot load here: {_one_line(error)}") from None
    if not getattr(how, "dequantize", False):
        raise ReshardError(f"quantized by {method}, which transformers does not dequantize as it loads")
    return {"quantization_config": how}


def on_disk(folder: Path) -> dict[str, Any]:
    """Return arguments to load a model whose weights stay on disk; those that transformers fuses are written into
    ``folder``.
    """
    return {"device_map": {"": "disk"}, "offload_folder": folder, "offload_buffers": True}


def compute_on(model: torch.nn.Module, device: torch.device) -> None:
    """Let a model whose weights are on disk compute on a device: accelerate's hooks would choose the CPU."""
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if isinstance(each, AlignDevicesHook):
                each.execution_device = device


def load_original(
    folder: Path, config: Mapping[str, Any], plan: Plan, dtype: torch.dtype, place: Mapping[str, Any]
) -> Loaded:
    """Load a plan's full checkpoint; ``place`` says where to. A quantized one, whose plan is that of plain weights, is
    dequantized.

    Raises CheckpointError if it does not fill its model, or if that has no use for what belongs to a quantized weight.
    """
    loaded = from_pretrained(model_class(config), folder, dtype, {**place, **dequantizing(config)})
    scheme = scheme_of(config)
    scales = [name for name in loaded.unused if name not in plan.layouts and scheme.companion(name)]
    lost = [name for name in scales if not is_of_activations(name)]
    if lost:
        raise CheckpointError(f"{folder}: transformers does not dequantize with '{lost[0]}' ({len(lost)} such tensors)")
    tensors = placements(loaded.model, {name: layout.full for name, layout in plan.layouts.items()})
    return Loaded(loaded.model, {name: p.sources for name, p in tensors.items()}, loaded.unused)


def from_pretrained(cls: Any, folder: Path, dtype: torch.dtype, options: Mapping[str, Any]) -> Loaded:
    """Load a folder with transformers; ``options`` are further arguments of its ``from_pretrained``.

    Raises UnfitError if the folder does not fill the model, CheckpointError if it cannot be loaded at all.
    """
    with quiet_transformers():
        try:
            model, info = cls.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are listed then, and an error of ours
                local_files_only=True,
                **options,
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, StrictDataclassError) as error:
            if machine_fault(error):
                raise
            raise not_loaded(folder, error) from error
    _check_filled(folder, info)
    for tensor in (*model.parameters(), *model.buffers()):
        # Of a quantized checkpoint, what is not quantized stays as it is stored. Wider numbers are the same.
        if tensor.is_floating_point() and tensor.dtype.itemsize < dtype.itemsize:
            tensor.data = tensor.data.to(dtype)
    model.eval()
    model.config.use_cache = False
    return Loaded(model, {}, tuple(sorted(info["unexpected_keys"])))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class UnfitError(CheckpointError):
    """A folder is not that of a model: its config.json is refused, it does not fill the model that this describes, or
    that returns other things than the original, whatever their values.

    ``parameter`` is the first for which there is nothing, or something else; ``place`` the module that this is of.
    """

    def __init__(self, message: str, parameter: str = "", place: str = "") -> None:
        super().__init__(message)
        self.parameter, self.place = parameter, place or parameter.rpartition(".")[0]


def not_loaded(folder: Path, error: Exception) -> CheckpointError:
    """The error for a folder that transformers refused with this one."""
    message = f"{folder}: transformers cannot load it: {type(error).__name__}: {_one_line(error)}"
    is_of_machine = isinstance(error, (OSError, RuntimeError, ImportError))
    return CheckpointError(message) if is_of_machine else UnfitError(message)


def _check_filled(folder: Path, info: Mapping[str, Any]) -> None:
    for name, shape, expected in sorted(info.get("mismatched_keys") or (), key=str):
        has = f"'{name}' has shape {list(shape)}, transformers' model has {list(expected)}"
        raise UnfitError(f"{folder}: {has}", name)
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        what = f"no tensor fills '{missing[0]}' of transformers' model ({len(missing)} in all)"
        raise UnfitError(f"{folder}: {what}", missing[0])
