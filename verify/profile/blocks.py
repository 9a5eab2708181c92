"""A rank's model with one layer of each kind, of the rank's own sizes and with random values.

It is transformers' own model, made parallel as ``verify`` makes it. The other layers are there in name alone: they pass
on what the layer before them returned.

Its plan comes from config.json alone (``skeleton``): the tensors that a checkpoint of it would hold, with rules, and
without weights. Quantized weights are taken as plain ones.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from reshard.formats.documents import read_config
from reshard.formats.errors import CheckpointError, ReshardError, refused
from reshard.formats.files.safetensors import DTYPE_NAMES, stated_dtype
from reshard.formats.notation.architecture_files import find_architecture, load_architecture
from reshard.formats.quantization.methods import without_quantization
from reshard.formats.store import FilePath
from reshard.formats.torch_internals import own_buffers, own_parameters
from reshard.formats.transformers_internals import (
    concrete_class,
    model_class,
    not_saved,
    placements,
    revert_weight_conversion,
    settings_of,
    tied_weights,
)
from reshard.mesh.plan import rank_config, with_sizes_of_whole
from reshard.mesh.stages import is_layered
from reshard.model.binding import bind
from reshard.model.model import AxisSizes, FullTensor, Model, check_members
from reshard.verify.profile.job import LayerKind
from reshard.verify.rank.collectives import Groups
from reshard.verify.rank.layers import parallelise
from reshard.verify.rank.loading import Loaded, quiet_transformers
from reshard.verify.rank.model import for_input, localised
from reshard.verify.rank.module_table import ModuleTable
from reshard.verify.rank.roles import Rank
from reshard.verify.rank.trace import blocks_of

_CHUNK = 1 << 20  # random numbers that a large weight repeats


@dataclass(frozen=True)
class Blocks:
    """A rank's model, and its parts: the module of each layer that computes, and the last of all layers."""

    loaded: Loaded
    layers: Mapping[str, nn.Module]
    last: nn.Module


def build(
    rank: Rank, kinds: Sequence[LayerKind], groups: Groups, dtype: torch.dtype, device: torch.device, tokens: int
) -> Blocks:
    """Build a rank's model for sequences of so many tokens. Raises CheckpointError where transformers cannot."""
    modules = ModuleTable(rank, groups)
    settings = rank_config(rank.plan, rank.rank)
    if modules.is_needed:  # what transformers would make of the rank's sizes is in the [modules] table
        settings = with_sizes_of_whole(rank.plan, settings)
    with quiet_transformers():
        try:
            config = for_input(transformers.AutoConfig.for_model(**settings_of(settings)), tokens)
            cls = concrete_class(model_class(rank.config), rank.config)
            with local_torch_dtype(dtype), no_init_weights(), init_empty_weights(include_buffers=False):
                model = localised(cls, rank, modules, {}, None)(config)
        except Exception as error:  # whatever the constructors of transformers raise
            text = " ".join(str(error).split())
            raise CheckpointError(f"transformers builds no model of a rank's sizes: {text}") from error
    layers = _layers(model, rank)
    timed = {kind.part: layers[kind.first] for kind in kinds}
    skipped = [module for module in layers.values() if module not in timed.values()]
    _pass_on(skipped, [*timed.values()])
    _fill(model, skipped, dtype, device)
    model.tie_weights()
    model.eval()
    if not _is_aligned(model):
        model.set_experts_implementation("eager")
    return Blocks(parallelise(Loaded(model, {}, ()), rank, groups, modules), timed, layers[max(layers)])


def _is_aligned(model: nn.Module) -> bool:
    """Whether experts may be multiplied together: the kernels for that want rows of whole 16 bytes."""
    stacks = (parameter for parameter in model.parameters() if parameter.dim() == 3)
    return all(size * stack.itemsize % 16 == 0 for stack in stacks for size in stack.shape[1:])


def _layers(model: Any, rank: Rank) -> dict[int, nn.Module]:
    """All layers by their numbers: the list of modules that has those of which the plan has weights."""
    plan = rank.plan
    layered = {tensor.name for tensor in plan.model.tensors if is_layered(plan.model, tensor.kind)}
    parameters = placements(model, {name: shape for name, shape in rank.shapes.items() if name in layered})
    lists = {path.rpartition(".")[0] for path in blocks_of(model, parameters)}
    if len(lists) != 1:
        what = ", ".join(f"'{path}'" for path in sorted(lists)) or "none"
        raise CheckpointError(f"profile needs a model whose layers are in one list of modules; found: {what}")
    return dict(enumerate(model.get_submodule(lists.pop())))


def _pass_on(skipped: Sequence[nn.Module], timed: Sequence[nn.Module]) -> None:
    """Let layers return what the last of those that compute returned. Their weights stay without values."""
    last: list[Any] = [None]

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        last[0] = output

    for module in timed:
        module.register_forward_hook(keep)
    for module in skipped:
        module.forward = lambda *_, **__: last[0]


def _fill(model: Any, skipped: Sequence[nn.Module], dtype: torch.dtype, device: torch.device) -> None:
    """Give every weight random values, but none to other layers: the same on all ranks where they have the same.

    Vectors are ones.
    """
    without = {inner for module in skipped for inner in module.modules()}
    new: dict[int, nn.Parameter] = {}
    wide = _kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        if module in without:
            continue
        parameters, buffers = own_parameters(module), own_buffers(module)
        for name, parameter in parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in new:
                is_wide = wide is not None and wide.search(f"{path}.{name}") is not None
                values = _random(f"{path}.{name}", parameter, torch.float32 if is_wide else dtype, device)
                new[id(parameter)] = nn.Parameter(values, requires_grad=values.is_floating_point())
            parameters[name] = new[id(parameter)]
        for name, buffer in buffers.items():
            if buffer is not None:  # values of its own (frequencies, masks), unless it is a weight without values
                buffers[name] = torch.zeros_like(buffer, device=device) if buffer.is_meta else buffer.to(device)


def _kept_in_float32(model: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """The names of modules and weights that transformers loads in float32 where others are of a 16-bit dtype."""
    names = model._get_dtype_plan(dtype)
    return re.compile("|".join(rf"(?:^|\.)(?:{name})(?:$|\.)" for name in names)) if names else None


def _random(name: str, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    value_dtype = dtype if like.is_floating_point() else like.dtype
    if like.dim() < 2 or not like.is_floating_point():
        return torch.ones(like.shape, dtype=value_dtype, device=device)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    size = min(_CHUNK, like.numel())
    numbers = (torch.randn(size, generator=generator) / like.shape[-1] ** 0.5).to(value_dtype).to(device)
    repeated: torch.Tensor = numbers.repeat(-(-like.numel() // size))
    return repeated[: like.numel()].view(like.shape)


# ---------------------------------------------------------------------------------------------------- config.json alone


DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def skeleton(folder: FilePath, dtype: str | None = None, plan_file: Path | None = None) -> Model:
    """The model that the config.json in a folder describes, its weights of one dtype: the given one, or what the config
    states, of the model or of its language model, or bfloat16.

    Raises ReshardError if transformers has no class for it or no rules cover it, and for an encoder beside a decoder.
    """
    config = read_config(folder / "config.json")
    sections = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    stated = next(filter(None, map(stated_dtype, sections)), "BF16")
    name = dtype or DTYPE_NAMES[stated]
    if name not in DTYPES:
        raise refused("dtype", name, f"the dtypes are {', '.join(DTYPES)}")
    plain = {**_with_dtype(without_quantization(config), name), "dtype": name}
    architecture = load_architecture(plan_file) if plan_file else find_architecture(plain, folder)
    if plain.get("is_encoder_decoder"):
        what = plain.get("model_type", "this model")
        raise ReshardError(f"profile runs one stack of layers: {what} has an encoder beside its decoder")
    for axis, count in AxisSizes(architecture, plain, {}).counts.items():
        check_members(axis, count, 0)  # transformers makes a module of each
    tensors = [FullTensor(key, DTYPES[name], shape, "config.json") for key, shape in _shapes(plain).items()]
    return bind(architecture, plain, tensors)


def _with_dtype(settings: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The same settings, with one dtype wherever they state any."""
    nested = {key: _with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in settings.items()}
    stated = {key for key in ("dtype", "torch_dtype") if isinstance(settings.get(key), str)}
    return nested | dict.fromkeys(stated, dtype)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name on disk and shape of each tensor that transformers would save."""
    try:
        cls = concrete_class(model_class(config), config)
        with quiet_transformers(), torch.device("meta"), no_init_weights():
            model = cls(transformers.AutoConfig.for_model(**settings_of(config)))
        tied, ignored = tied_weights(model), not_saved(model)
        saved = ((key, tensor) for key, tensor in model.state_dict().items() if key not in tied)
        state = {key: tensor for key, tensor in saved if not any(re.search(pattern, key) for pattern in ignored)}
        return {key: tuple(tensor.shape) for key, tensor in revert_weight_conversion(model, state).items()}
    except Exception as error:  # whatever the constructors of transformers raise
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"config.json: transformers builds no model of it: {type(error).__name__}: {text}"
        ) from error
