"""One rank of a sharded model: loaded by transformers from the rank's own folder, made parallel as its plan says.

What the plan says about a weight decides what its module does:

- the output dimension is parallel: nothing to do, the module returns this rank's part of the output
  (column-parallel). If no weight takes that part as its input (the vocabulary), the parts are gathered.
- the input dimension is parallel: the outputs are summed over the ranks and the bias is added once (row-parallel).
  A module that holds both kinds, as fused experts do, sums what it returns, and what it adds inside counts on one
  rank alone.
- the experts are dealt: the module sees all of them, those of other ranks as zeros, and its outputs are summed.
- the rows of an embedding are parallel: a lookup of this rank's rows, summed over the ranks.
- a vector is parallel that is all that a module holds: a norm over a dimension that is split, with statistics of
  the whole.
- a vector is parallel whose parts nothing takes, in a module around others: it is added to what these have gathered
  (a bias of the vocabulary, outside of its layer), and the module sees all of it.

Each of these goes over the ranks that differ along the mesh dimensions that deal the weight: attention over `tp`, and
alike on all ranks of `ep`; experts over both.

transformers renames and fuses weights as it loads them; its own conversion says which parameter a tensor on disk
ends in. Where a model takes its sizes from elsewhere than a rank's config.json, the architecture file's
``[modules]`` table says what a rank has there.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

from formats.errors import CheckpointError, PlanError, ReshardError
from formats.mesh import Mesh
from formats.notation.architecture import Architecture, ModuleRule
from formats.notation.axes import Dim, Share, owned
from formats.quantization.companions import is_of_activations
from formats.quantization.methods import scheme_of
from formats.quantization.settings import quantization_settings
from reshard.planning.plan import Entry, Layout, Plan
from reshard.planning.rank_config import with_sizes_of_whole
from reshard.planning.shares import shares_of
from reshard.planning.sizes import AxisSizes
from verify.rank.collectives import Groups, copy_to_group, gather_from_group
from verify.rank.layers import (
    Part,
    gather_logits,
    gathered_vectors,
    parallel_norm,
    row_parallel,
    sum_at_use,
    vocab_parallel,
    with_all_experts,
)


@dataclass(frozen=True)
class Rank:
    """One rank of a plan. ``modules`` is the architecture whose ``[modules]`` table is meant.

    ``is_built_in`` says that the plan is known to be right, and the rank's config.json with it.
    """

    plan: Plan
    rank: int
    modules: Architecture
    config: Mapping[str, Any]
    is_built_in: bool = True

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor in this rank's folder."""
        boxes = self.plan.boxes(self.rank)
        return {tensor.name: boxes[tensor.kind].shape for tensor in self.plan.model.tensors if tensor.kind in boxes}

    @cached_property
    def shapes_with_all_experts(self) -> dict[str, tuple[int, ...]]:
        """The shape that each tensor would have here if this rank had all experts."""
        model, found = self.plan.model, {}
        for name, entry in self.plan.entries.items():
            sizes = entry_sizes(self.plan, entry)
            shares = entry_shares(self.plan, entry, self.rank)
            own = {axis: share.run(sizes[axis]).length for axis, share in shares.items() if axis in sizes}
            own = {axis: length for axis, length in own.items() if axis not in model.expert_axes}
            found[name] = entry.layout.rule.sizes({**sizes, **own})
        return found

    @property
    def lacks_experts(self) -> bool:
        """Whether other ranks have experts that this one has not."""
        return bool(_experts_along(self.plan.mesh)) and self.shapes != self.shapes_with_all_experts


@dataclass(frozen=True)
class Loaded:
    """A model, what its parameters were made of, and the tensors on disk that it does not use.

    Of a rank's model, ``parts`` are the parameters of which ranks have parts, with the mesh dimensions along which
    these differ; ``experts`` says of those made of experts of its own, by name, where they lie among all. ``cut`` are
    those to which the rank's config.json gives another shape, where it should give the right one.
    """

    model: Any
    sources: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...]
    parts: tuple[tuple[torch.Tensor, frozenset[str]], ...] = ()
    experts: Mapping[str, Part] = field(default_factory=dict)
    cut: tuple[str, ...] = ()


# Loading


def model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a checkpoint was saved from, or else the one for causal language models."""
    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM


def dequantizing(config: Mapping[str, Any]) -> dict[str, Any]:
    """How to load a quantized checkpoint with plain weights; of another, nothing is to be said.

    Raises ReshardError where transformers cannot do that with what is installed.
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
    """How to load a model whose weights stay on disk; those that transformers fuses are written into ``folder``."""
    return {"device_map": {"": "disk"}, "offload_folder": folder, "offload_buffers": True}


def load_original(
    folder: Path, config: Mapping[str, Any], plan: Plan, dtype: torch.dtype, more: Mapping[str, Any]
) -> Loaded:
    """Load a plan's full checkpoint; ``more`` says where to. A quantized one, whose plan is that of plain weights, is
    dequantized.

    Raises CheckpointError if it does not fill its model, or if that has no use for what belongs to a quantized weight.
    """
    loaded = _from_pretrained(model_class(config), folder, dtype, {**more, **dequantizing(config)})
    scheme = scheme_of(config)
    scales = [name for name in loaded.unused if name not in plan.entries and scheme.companion(name)]
    lost = [name for name in scales if not is_of_activations(name)]
    if lost:
        raise CheckpointError(f"{folder}: transformers does not dequantize with '{lost[0]}' ({len(lost)} such tensors)")
    placed = placements(loaded.model, {name: entry.layout.full for name, entry in plan.entries.items()})
    return Loaded(loaded.model, {name: p.sources for name, p in placed.items()}, loaded.unused)


def load_rank(
    folder: Path,
    rank: Rank,
    dtype: torch.dtype,
    device: torch.device,
    groups: Groups,
    *,
    tokens: int,
    offload: Path | None = None,
) -> Loaded:
    """Load a rank's folder, and nothing else, into a model of that rank's sizes, and make it parallel.

    With ``offload``, a folder, weights stay on disk, and are there for as long as their module computes. ``tokens`` is
    the length of a sequence.

    Raises UnfitError if the folder does not fill the model, CheckpointError if it cannot be loaded at all, PlanError
    for what a plan cannot say.
    """
    modules = ModuleTable(rank, groups)
    cls, more = model_class(rank.config), on_disk(offload) if offload else {"device_map": {"": device}}
    cut: dict[str, None] = {}
    if modules.is_needed or rank.lacks_experts or not rank.is_built_in or not _says_sizes(cls, folder, rank):
        cls = _localised(_concrete(cls, rank.config), rank, modules, cut)
    if modules.is_needed:
        # What transformers would make of the rank's sizes is in the [modules] table.
        more["config"] = _for_input(_config_of(folder, rank), tokens)
    loaded = _from_pretrained(cls, folder, dtype, {**more, **dequantizing(rank.config)})
    own = modules.split(loaded.model)
    loaded = parallelise(loaded, rank, groups, modules.alone(loaded.model), modules.sums(loaded.model))
    is_to_fit = not modules.is_needed and not rank.lacks_experts
    return replace(loaded, parts=(*loaded.parts, *own), cut=tuple(cut) if is_to_fit else ())


def _config_of(folder: Path, rank: Rank) -> Any:
    """What transformers makes of a rank's own config.json, but for the sizes, which are the whole model's."""
    try:
        own = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return transformers.AutoConfig.for_model(**_settings(with_sizes_of_whole(rank.plan, own)))
    except OSError as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # whatever the type checks of its settings
        raise _not_loaded(folder, error) from error


def _for_input(config: Any, tokens: int) -> Any:
    """The config that a model would give itself when it first sees an input of so many tokens.

    BigBird then makes its sparse attention anew as a full one, of the sizes that its config says and not this rank's.
    """
    if getattr(config, "attention_type", None) == "block_sparse":
        blocks = 5 + 2 * config.num_random_blocks
        config.attention_type = "original_full" if tokens <= blocks * config.block_size else "block_sparse"
    return config


def _says_sizes(cls: Any, folder: Path, rank: Rank) -> bool:
    """Whether the config.json in a rank's folder says all sizes that the rank has.

    One setting may stand for two axes (DeepSeek's ``moe_intermediate_size`` for the shared experts' width, too). Of
    equal parts it can be right for both, of others it need not.
    """
    if not rank.plan.mesh.uneven:
        return True
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = _concrete(cls, config)(transformers.AutoConfig.for_model(**_settings(config)))
    known = model.state_dict()
    return all(tuple(known[name].shape) == place.shape for name, place in placements(model, rank.shapes).items())


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in {"transformers_version", "architectures"}}
    found: dict[str, Any] = json.loads(json.dumps(kept), object_hook=_special_float)
    return found


def _special_float(value: dict[str, Any]) -> Any:
    """transformers writes infinity as ``{"__float__": "Infinity"}``."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _concrete(cls: Any, config: Mapping[str, Any]) -> Any:
    if not hasattr(cls, "_model_mapping"):
        return cls
    settings = transformers.AutoConfig.for_model(**_settings(config))
    return cls._model_mapping[type(settings)]


def _from_pretrained(cls: Any, folder: Path, dtype: torch.dtype, more: Mapping[str, Any]) -> Loaded:
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
                **more,
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, StrictDataclassError) as error:
            raise _not_loaded(folder, error) from error
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
    """A folder is not that of a model: its config.json is refused, or it does not fill the model that this describes.

    ``parameter`` is the first for which there is nothing, or something else.
    """

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


def _not_loaded(folder: Path, error: Exception) -> CheckpointError:
    message = f"{folder}: transformers cannot load it: {type(error).__name__}: {_one_line(error)}"
    is_of_machine = isinstance(error, (OSError, RuntimeError, ImportError))
    return CheckpointError(message) if is_of_machine else UnfitError(message)


def _check_filled(folder: Path, info: Mapping[str, Any]) -> None:
    for name, found, expected in sorted(info.get("mismatched_keys") or (), key=str):
        has = f"'{name}' has shape {list(found)}, transformers' model has {list(expected)}"
        raise UnfitError(f"{folder}: {has}", name)
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        what = f"no tensor fills '{missing[0]}' of transformers' model ({len(missing)} in all)"
        raise UnfitError(f"{folder}: {what}", missing[0])


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' reports and progress bars of loading to ourselves: what matters becomes an error."""
    level, accelerate = transformers.logging.get_verbosity(), logging.getLogger("accelerate.big_modeling")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    before = accelerate.level
    accelerate.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        accelerate.setLevel(before)


# Where tensors end


@dataclass(frozen=True)
class Placed:
    """A parameter or buffer: the shape it is given, and the tensors on disk that it is made of."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]


def placements(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Placed]:
    """What tensors on disk of these shapes become in a model, by transformers' own rules of conversion."""
    known = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    collected: dict[str, Any] = {}
    sources: dict[str, list[str]] = defaultdict(list)
    for name in sorted(shapes, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, known)
        if target not in known:
            continue
        new = WeightRenaming(name, target) if pattern is None else copy.deepcopy(by_pattern[pattern])
        entry = collected.setdefault(target, new)
        entry.add_tensor(target, name, pattern or name, torch.empty(shapes[name], device="meta"))
        sources[target].append(name)
    placed: dict[str, Placed] = {}
    for target, entry in collected.items():
        for key, value in entry.convert(target, model=model, config=model.config).items():
            tensor = value[0] if isinstance(value, list) else value
            placed[key] = Placed(tuple(tensor.shape), tuple(sources[target]))
    return placed


# Models whose config.json cannot say a rank's sizes


class ModuleTable:
    """The lines of an architecture's ``[modules]`` table that hold for a checkpoint, evaluated for one rank."""

    def __init__(self, rank: Rank, groups: Groups) -> None:
        self._rank = rank
        self._groups = groups
        self._sizes: AxisSizes = rank.plan.model.sizes

    @property
    def is_needed(self) -> bool:
        """Whether a rank's model differs from what its config.json says."""
        lines = ((name, rule) for name, rules in self._rank.modules.modules.items() for rule in rules)
        return any(_is_indexed(rule, name) or self._holds(rule, {}) for name, rule in lines)

    def lines(self, model: nn.Module) -> Iterable[tuple[nn.Module, ModuleRule, dict[str, int]]]:
        """Each module that a line speaks of, with the line and the indices in the module's name."""
        for name, module in model.named_modules():
            found = self._rank.modules.match_module(name)
            if found is None:
                continue
            rules, indices = found
            for rule in rules:
                if self._holds(rule, indices):
                    yield module, rule, dict(indices)
                    break

    def set_attributes(self, model: nn.Module) -> None:
        """Give each module the numbers that this rank has."""
        for module, rule, indices in self.lines(model):
            local = self._rank.plan.rank_sizes(self._rank.rank, self._sizes.of(indices))
            for path, expression in rule.attributes.items():
                value = expression.evaluate(self._lookup(local, indices))
                holder: Any = module
                *outer, last = path.split(".")
                for part in outer:
                    holder = getattr(holder, part)
                if not hasattr(holder, last):
                    raise PlanError(
                        f"plan '{self._rank.modules.name}': {type(holder).__name__} has no attribute '{last}'"
                    )
                setattr(holder, last, value)

    def split(self, model: nn.Module) -> list[tuple[torch.Tensor, frozenset[str]]]:
        """Let each module see this rank's part of what it shares with all ranks: lists of modules, buffers, arguments.

        The other way about, ``output`` is what a module returns a part of, and all parts are put together: what lies
        between such a module and one that takes its part as an argument again is computed whole on every rank. ``part``
        is what a module returns whole, and a rank takes its part of.

        Return the parameters that are this rank's own by that, with the mesh dimensions along which they differ.
        """
        own: list[tuple[torch.Tensor, frozenset[str]]] = []
        for module, rule, indices in list(self.lines(model)):
            arguments: dict[str, Sequence[Dim]] = {}
            for name, shape in rule.split.items():
                held = getattr(module, name, None)
                if name == "output":
                    module.register_forward_hook(self._output_hook(shape.dims, indices))
                elif name == "part":
                    module.register_forward_hook(self._part_hook(shape.dims, indices))
                elif isinstance(held, nn.ModuleList):
                    # Under their old numbers, as on disk.
                    kept = self._of_ranks(shape.dims[0], len(held), indices)
                    held._modules = {str(i): held[i] for i in kept[self._rank.rank]}
                    own += [(tensor, self._rank.plan.mesh.varying(kept)) for tensor in held.parameters()]
                elif isinstance(held, torch.Tensor):
                    module._buffers[name] = self._part(held, shape.dims, indices)
                else:
                    arguments[name] = shape.dims
            if arguments:
                hook = self._argument_hook(module, arguments, indices)
                module.register_forward_pre_hook(hook, with_kwargs=True)
        return own

    def alone(self, model: nn.Module) -> set[nn.Module]:
        """The modules that need nothing of other ranks, whatever lies on them."""
        return {module for module, rule, _ in self.lines(model) if rule.alone}

    def sums(self, model: nn.Module) -> dict[nn.Module, str]:
        """The modules that sum the results of a weight where it is used, with its name."""
        return {module: rule.sums for module, rule, _ in self.lines(model) if rule.sums}

    def _holds(self, rule: ModuleRule, indices: Mapping[str, int]) -> bool:
        return rule.when is None or bool(rule.when.evaluate(self._lookup(self._sizes.of(indices), indices)))

    def _lookup(self, sizes: Mapping[str, int], indices: Mapping[str, int]) -> Callable[[str], Any]:
        return lambda name: {**sizes, **indices}.get(name, self._sizes.settings.get(name))

    def _argument_hook(
        self,
        module: nn.Module,
        arguments: Mapping[str, Sequence[Dim]],
        indices: Mapping[str, int],
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
        import inspect

        names = list(inspect.signature(module.forward).parameters)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            parts = {
                name: self._part(given[name], dims, indices)
                for name, dims in arguments.items()
                if isinstance(given.get(name), torch.Tensor)
            }
            new = tuple(parts.get(name, value) for name, value in zip(names, args, strict=False))
            return new, {name: parts.get(name, value) for name, value in kwargs.items()}

        return hook

    def _output_hook(
        self, dims: Sequence[Dim], indices: Mapping[str, int]
    ) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
        sizes, orders, mesh = self._sizes.of(indices), {}, self._rank.plan.mesh
        for i, dim in enumerate(dims):
            if not dim.axes or dim.axes - sizes.keys():
                continue
            length = dim.size(sizes)
            parts = self._of_ranks(dim, length, indices)
            along = mesh.varying(parts)
            if along:
                # Of what several ranks have, the first one's is taken.
                of_peers = [parts[rank] for rank in mesh.peers(self._rank.rank, along)]
                places = {index: place for place, index in reversed([*enumerate(chain(*of_peers))])}
                order = torch.tensor([places[index] for index in range(length)])
                orders[i] = self._groups.along(along), order, [len(part) for part in of_peers]

        def hook(_: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            for i, (group, order, lengths) in orders.items():
                out = gather_from_group(out, group, i, lengths=lengths).index_select(i, order.to(out.device))
            return out

        return hook

    def _part_hook(
        self, dims: Sequence[Dim], indices: Mapping[str, int]
    ) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
        return lambda _module, _args, out: self._part(out, dims, indices)

    def _part(self, tensor: torch.Tensor, dims: Sequence[Dim], indices: Mapping[str, int]) -> torch.Tensor:
        """This rank's part of a tensor that is whole; its gradient is what comes back through the parts of all."""
        wanted = {i: self._of_ranks(dim, tensor.shape[i], indices) for i, dim in enumerate(dims) if dim.axes}
        along = frozenset[str]().union(*(self._rank.plan.mesh.varying(parts) for parts in wanted.values()))
        if along and tensor.requires_grad:
            tensor = copy_to_group(tensor, self._groups.along(along))
        for i, parts in wanted.items():
            own = parts[self._rank.rank]
            if len(own) < tensor.shape[i]:
                tensor = tensor.index_select(i, torch.tensor(own, device=tensor.device))
        return tensor

    def _of_ranks(self, dim: Dim, length: int, indices: Mapping[str, int]) -> list[list[int]]:
        """The indices that each rank owns of a dimension, of which one axis may be measured (a batch)."""
        return [self._indices(dim, length, indices, rank) for rank in range(self._rank.plan.mesh.size)]

    def _indices(self, dim: Dim, length: int, indices: Mapping[str, int], rank: int) -> list[int]:
        plan = self._rank.plan
        sizes = {**self._sizes.of(indices), **plan.padding}
        unknown = sorted(dim.axes - sizes.keys())
        if unknown:
            rest = dim.size({**sizes, **dict.fromkeys(unknown, 1)})
            sizes |= {unknown[0]: length // rest, **dict.fromkeys(unknown[1:], 1)}
        if dim.size(sizes) != length:
            raise PlanError(
                f"plan '{self._rank.modules.name}', [modules]: '{dim}' is {dim.size(sizes)}, the model has {length}"
            )
        shares = shares_of(plan.model, plan.mesh, rank, sizes, frozenset())
        return [i for run in owned(dim, sizes, shares) for i in range(run.offset, run.end)]


def _is_indexed(rule: ModuleRule, template: str) -> bool:
    """Whether a rule holds for some of the modules of a name, by the indices in it."""
    return rule.when is not None and any(f"{{{name}}}" in template for name in rule.when.names)


def _localised(cls: Any, rank: Rank, modules: ModuleTable, cut: dict[str, None]) -> Any:
    """A subclass that is cut to the sizes of a rank before it is filled; ``cut`` gets the names of what had others.

    Experts are in the first dimension.
    """

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        cls.__init__(self, config, *args, **kwargs)
        placed = placements(self, rank.shapes_with_all_experts)
        experts = expert_shares(rank, {name: place.sources for name, place in placed.items()})
        for name, place in placed.items():
            path, _, last = name.rpartition(".")
            module = self.get_submodule(path)
            old, shape = getattr(module, last), place.shape
            if name in experts:
                shape = (shape[0] // experts[name].parts, *shape[1:])
            if tuple(old.shape) != shape:
                cut[name] = None
                new = torch.empty(shape, dtype=old.dtype, device=old.device)
                if last in module._parameters:
                    # In place, so that tied parameters stay one.
                    old.data = new
                else:
                    module._buffers[last] = new
        filled = {*placed, *(getattr(self, "all_tied_weights_keys", None) or {})}
        for path, module in self.named_modules():
            _say_size(module)
            own = {f"{path}.{key}" if path else key for key in module._parameters}
            if own & filled and not module._non_persistent_buffers_set:
                # It comes from the folder; first values may have the original's sizes. A table of sines may not.
                module._is_hf_initialized = True
        modules.set_attributes(self)

    return type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})


def _say_size(module: nn.Module) -> None:
    """Let the basic layers speak the truth about their weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, Conv1D):
        module.nx, module.nf = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings, module.embedding_dim = module.weight.shape


# What a module does


class Kind(Enum):
    """How a parameter lies on the ranks."""

    WHOLE = "whole"
    VECTOR = "vector"
    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True)
class Role:
    """The kind of a parameter, the plan's entry of a tensor in it, and what the plan says of all that it is made of.

    ``along`` are the mesh dimensions along which ranks have different parts of it, ``experts_along`` those that deal
    its experts. ``is_gathered``: nothing takes its outputs as they are, so they are to be gathered;
    ``is_taken_whole``: but something takes all of them, which is not dealt with them.
    """

    kind: Kind
    entry: Entry
    along: frozenset[str]
    experts_along: frozenset[str]
    is_gathered: bool
    is_taken_whole: bool

    @property
    def summed_along(self) -> frozenset[str]:
        """The mesh dimensions along which ranks have parts of a sum, not parts of the output."""
        return self.along if self.kind is Kind.ROW else self.experts_along


def entry_axes(plan: Plan, entry: Entry) -> frozenset[str]:
    """The axes of a tensor's shape, and those of its name that may be dealt to ranks (experts)."""
    match = plan.model.architecture.match(entry.name)
    return entry.layout.rule.axes | (plan.model.expert_axes & match.indices.keys() if match else frozenset())


def entry_sizes(plan: Plan, entry: Entry) -> dict[str, int]:
    """The padded sizes of the axes for a tensor."""
    match = plan.model.architecture.match(entry.name)
    sizes = plan.model.sizes.of(match.indices if match else {})
    return {axis: plan.padding.get(axis, size) for axis, size in sizes.items()}


def entry_shares(plan: Plan, entry: Entry, rank: int) -> dict[str, Share]:
    """What a rank has of each axis that is dealt, in a tensor."""
    return shares_of(plan.model, plan.mesh, rank, entry_sizes(plan, entry), entry_axes(plan, entry))


def dealt_axes(plan: Plan, entry: Entry) -> frozenset[str]:
    """The axes of a tensor, or of its name, of which ranks have parts."""
    shares = entry_shares(plan, entry, 0)
    return frozenset(axis for axis, share in shares.items() if share.parts > 1) & entry_axes(plan, entry)


def kind_of(plan: Plan, entry: Entry) -> Kind:
    """What the parallel dimension of a tensor is to its module. That experts are dealt does not count."""
    rule, experts = entry.layout.rule, plan.model.expert_axes
    dealt = dealt_axes(plan, entry) - experts
    leading = 0
    while leading < len(rule.dims) - 1 and rule.dims[leading].axis in experts:
        leading += 1
    inner = {dim for dim in range(len(rule.dims)) if rule.dims[dim].axes & dealt}
    if not inner:
        return Kind.WHOLE
    if len(rule.dims) - leading == 1:
        return Kind.VECTOR
    if rule.input_dims & inner:
        return Kind.ROW
    others = [dim for i, dim in enumerate(rule.dims) if i >= leading and i not in inner]
    is_one_row = all(not dim.axes and dim.size({}) == 1 for dim in others)  # "1 -> vocab"
    return Kind.VECTOR if is_one_row else Kind.COLUMN


def roles(plan: Plan, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Role]:
    """The role of each parameter, from the plan's entries of the tensors that it is made of."""
    known: dict[tuple[str, int], Kind] = {}
    kinds: dict[str, Kind] = {}
    for name, entry in plan.entries.items():
        alike = entry.template, id(entry.layout)
        kinds[name] = known[alike] = known[alike] if alike in known else kind_of(plan, entry)
    rows = [entry for name, entry in plan.entries.items() if kinds[name] is Kind.ROW]
    consumed = frozenset[str]().union(*(dealt_axes(plan, entry) for entry in rows))
    rules = {entry.layout.rule for entry in plan.entries.values()}
    inputs = frozenset[str]().union(*(rule.dims[dim].axes for rule in rules for dim in rule.input_dims))
    found = {}
    for parameter, names in sources.items():
        of_sources = {kinds[name] for name in names}
        if len(of_sources) > 1:
            raise PlanError(
                f"the tensors {', '.join(names[:3])} become one parameter, but lie differently on the ranks"
            )
        kind, entry = of_sources.pop(), plan.entries[names[0]]
        dealt = dealt_axes(plan, entry)
        experts_along = _experts_along(plan.mesh) if dealt & plan.model.expert_axes else frozenset()
        is_gathered = kind in {Kind.COLUMN, Kind.VECTOR} and not dealt & consumed
        along, is_taken = (
            plan.mesh.varying([entry.layout.boxes.get(place) for place in range(plan.mesh.size)]),
            bool(dealt & inputs),
        )
        found[parameter] = Role(kind, entry, along, experts_along, is_gathered, is_gathered and is_taken)
    return found


def _experts_along(mesh: Mesh) -> frozenset[str]:
    """The dimensions of a mesh that deal experts."""
    return mesh.varying([mesh.coordinates(rank).get("ep") for rank in range(mesh.size)])


def parallelise(
    loaded: Loaded,
    rank: Rank,
    groups: Groups,
    alone: AbstractSet[nn.Module] = frozenset(),
    sums: Mapping[nn.Module, str] = MappingProxyType({}),
) -> Loaded:
    """Give each module of a rank's model, but those ``alone``, the behaviour that the plan's entries of its weights ask
    for; in those of ``sums`` the results of the weight of that name are summed.
    """
    model = loaded.model
    placed = placements(model, rank.shapes)
    sources = {name: place.sources for name, place in placed.items()}
    by_name = roles(rank.plan, sources)
    shares = expert_shares(rank, sources)
    experts = {
        name: Part(share.index * placed[name].shape[0], share.parts * placed[name].shape[0])
        for name, share in shares.items()
    }
    values = model.state_dict(keep_vars=True)
    by_tensor = {id(values[name]): role for name, role in by_name.items()}
    for tied, kept in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        # One tensor, as a rule, but two where weights are on disk.
        role = by_name.get(kept) or by_name.get(tied)
        if role is not None:
            by_tensor |= {id(values[tied]): role, id(values[kept]): role}
    held_by_tensor = {id(values[name]): part for name, part in experts.items()}
    parts = [(values[name], role.along) for name, role in by_name.items() if role.along]
    for path, module in [(path, module) for path, module in model.named_modules() if module not in alone]:
        tensors = {**module._parameters, **module._buffers}
        own = {name: by_tensor[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_tensor}
        held = {name: held_by_tensor[id(tensors[name])] for name in own if id(tensors[name]) in held_by_tensor}
        if held:
            # Some are read by the module around them.
            for reader in (model.get_submodule(path.rpartition(".")[0]), module):
                with _beneath_hook(reader):
                    with_all_experts(reader, module, held)
        if module in sums and own[sums[module]].summed_along:
            with _beneath_hook(module):
                sum_at_use(module, sums[module], groups.along(own[sums[module]].summed_along))
        elif own:
            with _beneath_hook(module):
                parts += _make_parallel(module, own, rank, groups)
    by_name_on_disk = {name: part for name, part in experts.items() if by_name[name].entry.layout.dealt_by_name}
    return Loaded(model, sources, loaded.unused, tuple(parts), by_name_on_disk)


def expert_shares(rank: Rank, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Share]:
    """What a rank has of the experts in each parameter of which it has not all."""
    plan, found = rank.plan, {}
    for parameter, names in sources.items():
        entry = plan.entries[names[0]]
        for axis in dealt_axes(plan, entry) & plan.model.expert_axes:
            found[parameter] = entry_shares(plan, entry, rank.rank)[axis]
    return found


@contextmanager
def _beneath_hook(module: nn.Module) -> Iterator[None]:
    """Change a module's forward beneath accelerate's hook, if it has one, which brings its weights."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    remove_hook_from_module(module)
    yield
    add_hook_to_module(module, hook)


def _make_parallel(
    module: nn.Module, own: Mapping[str, Role], rank: Rank, groups: Groups
) -> list[tuple[torch.Tensor, frozenset[str]]]:
    """Make a module parallel; return its parameters that are added within a sum over ranks, and its dimensions."""
    kinds = {role.kind for role in own.values()}
    whole = [name for name, role in own.items() if role.kind is Kind.WHOLE and name in module._parameters]
    summed = frozenset[str]().union(*(role.summed_along for role in own.values()))
    vocabulary = own.get("weight")
    if isinstance(module, nn.Embedding) and vocabulary and 0 in vocabulary.entry.layout.parallel_dims:
        first_row = vocabulary.entry.layout.boxes[rank.rank].dims[0][0].offset
        group = groups.along(vocabulary.along)
        padding_row = _padding_row(module, vocabulary.entry.layout.full[0], rank)
        vocab_parallel(module, first_row, group, padding_row=padding_row)
    elif summed and ({Kind.COLUMN, Kind.ROW} <= kinds or any(role.experts_along for role in own.values())):
        elsewhere = [name for name in whole if not groups.is_first(own[name].along)]
        row_parallel(module, groups.along(summed), bias="", elsewhere=elsewhere)
        return [(module.get_parameter(name), summed) for name in whole]
    elif Kind.ROW in kinds:
        row_parallel(module, groups.along(summed), bias=whole[0] if whole else "bias")
    elif columns := [role for role in own.values() if role.is_gathered and role.kind is Kind.COLUMN]:
        role = columns[0]
        dim = min(role.entry.layout.parallel_dims)
        if role.is_taken_whole and role.entry.layout.rule.dims[dim].axis is None:
            raise PlanError(
                f"no forward of {rank.plan.mesh} is known: '{role.entry.name}' is cut, but no weight takes its parts"
            )
        order = _order_of_parts(role.entry.layout, dim, rank.plan.mesh.peers(rank.rank, role.along))
        gather_logits(module, groups.along(role.along), role.entry.layout.full[dim], order)
    elif kinds == {Kind.VECTOR} and not list(module.children()):
        parallel_norm(module, groups.along(next(iter(own.values())).along))
    elif kinds == {Kind.VECTOR}:
        in_children = {id(tensor) for child in module.children() for tensor in child.parameters()}
        tensors = {**module._parameters, **module._buffers}
        added = {name: role for name, role in own.items() if role.is_gathered and id(tensors[name]) not in in_children}
        if added:
            group = groups.along(next(iter(added.values())).along)
            gathered_vectors(module, group, {name: role.entry.layout.full[-1] for name, role in added.items()})
    return []


def _order_of_parts(layout: Layout, dim: int, ranks: Iterable[int]) -> torch.Tensor | None:
    """Where each index of a dimension lies among the parts of these ranks, one after the other; None: at its place."""
    runs = [run for rank in ranks for run in layout.boxes[rank].dims[dim]]
    if [run.offset for run in runs] == [0, *accumulate(run.length for run in runs[:-1])]:
        return None
    joined = enumerate(chain(*(range(run.offset, run.end) for run in runs)))
    # Of what several ranks have, the first one's is taken.
    places = {index: place for place, index in reversed([*joined])}
    return torch.tensor([places[index] for index in range(layout.full[dim])])


def _padding_row(module: nn.Embedding, rows: int, rank: Rank) -> int | None:
    """The row of the whole vocabulary, of ``rows``, that takes no gradient.

    It is pad_token_id or, of some classes (MPNet), a number of their own. A negative one counts from the end.
    """
    if module.padding_idx is None:
        return None
    named = rank.plan.model.sizes.settings.get("pad_token_id")
    return rows + named if named is not None and named < 0 else module.padding_idx
