"""A rank's model with one layer of each kind, of the rank's own sizes and with random values.

It is transformers' own model, made parallel as ``verify`` makes it. The other layers are there in name alone: they pass
on what the layer before them returned.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from reshard.formats.errors import CheckpointError
from reshard.formats.torch_internals import own_buffers, own_parameters
from reshard.formats.transformers_internals import (
    concrete_class,
    model_class,
    placements,
    quiet_transformers,
    settings_of,
)
from reshard.mesh.plan import rank_config, with_sizes_of_whole
from reshard.mesh.stages import is_layered
from reshard.profile.job import LayerKind
from reshard.verify.rank.collectives import Groups
from reshard.verify.rank.layers import parallelise
from reshard.verify.rank.loading import Loaded
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
