"""One rank of a sharded model: loaded by transformers from the rank's own folder, made parallel as its plan says.

Where a model takes its sizes from elsewhere than a rank's config.json, the architecture file's ``[modules]`` table says
what a rank has there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from reshard.formats.errors import CheckpointError
from reshard.formats.torch_internals import own_buffers, own_parameters, unsaved_buffers
from reshard.formats.transformers_internals import (
    concrete_class,
    has_first_values,
    model_class,
    placements,
    settings_of,
    tied_weights,
)
from reshard.mesh.plan import with_sizes_of_whole
from reshard.verify.rank.collectives import Groups
from reshard.verify.rank.layers import parallelise
from reshard.verify.rank.loading import Loaded, compute_on, dequantizing, from_pretrained, not_loaded, on_disk
from reshard.verify.rank.module_table import ModuleTable
from reshard.verify.rank.roles import Rank, expert_shares
from reshard.verify.rank.stages import Pipeline


def load_rank(
    folder: Path,
    rank: Rank,
    dtype: torch.dtype,
    device: torch.device,
    groups: Groups,
    *,
    tokens: int,
    offload: Path | None = None,
    pipeline: Pipeline | None = None,
) -> Loaded:
    """Load a rank's folder, and nothing else, into a model of that rank's sizes, and make it parallel.

    With ``offload``, a folder, weights stay on disk, and are there for as long as their module computes. ``tokens`` is
    the length of a sequence. With ``pipeline``, the model lacks what other stages have.

    Raises UnfitError if the folder does not fill the model, CheckpointError if it cannot be loaded at all, PlanError
    for what a plan cannot say.
    """
    modules = ModuleTable(rank, groups)
    cls, options = model_class(rank.config), on_disk(offload) if offload else {"device_map": {"": device}}
    cut: dict[str, None] = {}
    is_cut = modules.is_needed or rank.lacks_experts or pipeline is not None
    # One setting may stand for two axes. Of equal parts it can be right for both, of others it need not.
    if is_cut or rank.plan.mesh.uneven or not rank.is_built_in:
        cls = localised(concrete_class(cls, rank.config), rank, modules, cut, pipeline)
    if modules.is_needed:
        # What transformers would make of the rank's sizes is in the [modules] table.
        options["config"] = for_input(_config_of(folder, rank), tokens)
    loaded = from_pretrained(cls, folder, dtype, {**options, **dequantizing(rank.config)})
    _say_padding(loaded.model.config, rank.config)
    if offload:
        compute_on(loaded.model, device)
    is_to_fit = not modules.is_needed and not rank.lacks_experts
    return replace(parallelise(loaded, rank, groups, modules), cut=tuple(cut) if is_to_fit else ())


def _config_of(folder: Path, rank: Rank) -> Any:
    """Return transformers' config of a rank's own config.json, but with the sizes of the whole model."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return transformers.AutoConfig.for_model(**settings_of(with_sizes_of_whole(rank.plan, settings)))
    except OSError as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever the type checks of its settings
        raise not_loaded(folder, error) from error


def _say_padding(config: Any, whole: Mapping[str, Any]) -> None:
    """Let a rank's model know the token of padding as it is in the inputs, which are those of the whole vocabulary: a
    rank's config.json has its row on this rank, or none.
    """
    for key, value in whole.items():
        if key == "pad_token_id":
            config.pad_token_id = value
        elif key in config.sub_configs and isinstance(value, Mapping):
            _say_padding(getattr(config, key), value)


def for_input(config: Any, tokens: int) -> Any:
    """The config that a model would give itself when it first sees an input of so many tokens.

    BigBird then makes its sparse attention anew as a full one, of the sizes that its config says and not this rank's.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        blocks = 5 + 2 * config.num_random_blocks
        config.attention_type = "original_full" if tokens <= blocks * config.block_size else "block_sparse"
    return config


def localised(cls: Any, rank: Rank, modules: ModuleTable, cut: dict[str, None], pipeline: Pipeline | None) -> Any:
    """A subclass that is cut to the sizes of a rank before it is filled; ``cut`` gets the names of what had others.

    Experts are in the first dimension.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        cls.__init__(self, config, *args, **kwargs)
        if pipeline is not None:
            pipeline.cut(self)
        tensors = placements(self, rank.shapes_with_all_experts)
        experts = expert_shares(rank, {name: place.sources for name, place in tensors.items()})
        for name, place in tensors.items():
            path, _, last = name.rpartition(".")
            module = self.get_submodule(path)
            old, shape = getattr(module, last), place.shape
            if name in experts:
                shape = (shape[0] // experts[name].parts, *shape[1:])
            if tuple(old.shape) != shape:
                cut[name] = None
                new = torch.empty(shape, dtype=old.dtype, device=old.device)
                if last in own_parameters(module):
                    # In place, so that tied parameters stay one.
                    old.data = new
                else:
                    own_buffers(module)[last] = new
        filled = {*tensors, *tied_weights(self)}
        for path, module in self.named_modules():
            _say_size(module)
            names = {f"{path}.{key}" if path else key for key in own_parameters(module)}
            if names & filled and not unsaved_buffers(module):
                # It comes from the folder; first values may have the original's sizes. A table of sines may not.
                has_first_values(module)
        modules.set_attributes(self)

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _say_size(module: nn.Module) -> None:
    """Let the basic layers speak the truth about their weight, if they have it."""
    if "weight" not in own_parameters(module):
        return  # another pipeline stage has it
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, Conv1D):
        module.nx, module.nf = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape
