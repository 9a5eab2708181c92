"""One rank of a sharded model: loaded by transformers from the rank's own folder, made parallel as its plan says.

What the plan says about a weight decides what its module does:

- the output dimension is parallel: nothing to do, the module returns this rank's part of the output
  (column-parallel). If no weight takes that part as its input (the vocabulary), the parts are gathered.
- the input dimension is parallel: the outputs are summed over the ranks and the bias is added once (row-parallel).
  A module that holds both kinds, as fused experts do, sums what it returns, and what it adds inside counts on one
  rank alone.
- the rows of an embedding are parallel: a lookup of this rank's rows, summed over the ranks.
- a vector is parallel that is all that a module holds: a norm over a dimension that is split, with statistics of
  the whole.

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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.pytorch_utils import Conv1D

from formats.architecture import Architecture, ModuleRule
from formats.axes import Dim, owned
from formats.errors import CheckpointError, PlanError
from reshard.plan import AxisSizes, Entry, Plan, shares_of
from verify.collectives import copy_to_group, gather_from_group
from verify.layers import gather_logits, parallel_norm, row_parallel, vocab_parallel


@dataclass(frozen=True)
class Rank:
    """One rank of a plan. ``modules`` is the architecture whose ``[modules]`` table is meant."""

    plan: Plan
    rank: int
    modules: Architecture
    config: Mapping[str, Any]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor in this rank's folder."""
        boxes = {name: entry.layout.boxes[self.rank] for name, entry in self.plan.entries.items()}
        return {name: box.shape for name, box in boxes.items() if box is not None}


@dataclass(frozen=True)
class Loaded:
    """A model, what its parameters were made of, and the tensors on disk that it does not use.

    Of a rank's model, ``parts`` are the parameters that are its own, ``once`` those that count on one rank alone.
    """

    model: Any
    sources: Mapping[str, tuple[str, ...]]
    unused: tuple[str, ...]
    parts: tuple[torch.Tensor, ...] = ()
    once: tuple[torch.Tensor, ...] = ()


# Loading


def model_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that a checkpoint was saved from, or else the one for causal language models."""
    for name in config.get("architectures") or ():
        found = getattr(transformers, str(name), None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM


def on_disk(folder: Path) -> dict[str, Any]:
    """How to load a model whose weights stay on disk; those that transformers fuses are written into ``folder``."""
    return {"device_map": {"": "disk"}, "offload_folder": folder, "offload_buffers": True}


def load_original(
    folder: Path, config: Mapping[str, Any], plan: Plan, dtype: torch.dtype, more: Mapping[str, Any]
) -> Loaded:
    """Load a plan's full checkpoint; ``more`` says where to. Raises CheckpointError if it does not fill its model."""
    loaded = _from_pretrained(model_class(config), folder, dtype, more)
    placed = placements(loaded.model, {name: entry.layout.full for name, entry in plan.entries.items()})
    return Loaded(loaded.model, {name: p.sources for name, p in placed.items()}, loaded.unused)


def load_rank(
    folder: Path,
    rank: Rank,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    offload: Path | None = None,
) -> Loaded:
    """Load a rank's folder, and nothing else, into a model of that rank's sizes, and make it parallel.

    With ``offload``, a folder, weights stay on disk, and are there for as long as their module computes.

    Raises CheckpointError if the folder does not fill the model, PlanError for what a plan cannot say.
    """
    modules = ModuleTable(rank)
    cls, more = model_class(rank.config), on_disk(offload) if offload else {"device_map": {"": device}}
    if modules.is_needed:
        cls = _localised(_concrete(cls, rank.config), rank, modules)
        more["config"] = transformers.AutoConfig.for_model(**_settings(rank.config))
    loaded = _from_pretrained(cls, folder, dtype, more)
    own = modules.split(loaded.model, group)
    loaded = parallelise(loaded, rank, group)
    return replace(loaded, parts=(*loaded.parts, *own))


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
    with _quiet_transformers():
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
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            text = " ".join(str(error).split())
            raise CheckpointError(f"{folder}: transformers cannot load it: {text}") from error
    _check_filled(folder, info)
    model.eval()
    model.config.use_cache = False
    return Loaded(model, {}, tuple(sorted(info["unexpected_keys"])))


def _check_filled(folder: Path, info: Mapping[str, Any]) -> None:
    for name, found, expected in sorted(info.get("mismatched_keys") or (), key=str):
        raise CheckpointError(f"{folder}: '{name}' has shape {list(found)}, transformers' model has {list(expected)}")
    missing = sorted(info.get("missing_keys") or ())
    if missing:
        raise CheckpointError(
            f"{folder}: no tensor fills '{missing[0]}' of transformers' model ({len(missing)} in all)"
        )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
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

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
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

    def split(self, model: nn.Module, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
        """Let each module see this rank's part of what it shares with all ranks: lists of modules, buffers, arguments.

        The other way about, ``output`` is what a module returns a part of, and all parts are put together: what lies
        between such a module and one that takes its part as an argument again is computed whole on every rank.

        Return the parameters that are this rank's own by that.
        """
        own: list[torch.Tensor] = []
        for module, rule, indices in list(self.lines(model)):
            arguments: dict[str, Sequence[Dim]] = {}
            for name, shape in rule.split.items():
                held = getattr(module, name, None)
                if name == "output":
                    module.register_forward_hook(self._output_hook(shape.dims, indices, group))
                elif isinstance(held, nn.ModuleList):
                    # Under their old numbers, as on disk.
                    kept = self._indices(shape.dims[0], len(held), indices)
                    held._modules = {str(i): held[i] for i in kept}
                    own += list(held.parameters())
                elif isinstance(held, torch.Tensor):
                    module._buffers[name] = self._part(held, shape.dims, indices, group)
                else:
                    arguments[name] = shape.dims
            if arguments:
                hook = self._argument_hook(module, arguments, indices, group)
                module.register_forward_pre_hook(hook, with_kwargs=True)
        return own

    def _holds(self, rule: ModuleRule, indices: Mapping[str, int]) -> bool:
        return rule.when is None or bool(rule.when.evaluate(self._lookup(self._sizes.of(indices), indices)))

    def _lookup(self, sizes: Mapping[str, int], indices: Mapping[str, int]) -> Callable[[str], Any]:
        return lambda name: {**sizes, **indices}.get(name, self._sizes.settings.get(name))

    def _argument_hook(
        self,
        module: nn.Module,
        arguments: Mapping[str, Sequence[Dim]],
        indices: Mapping[str, int],
        group: dist.ProcessGroup | None,
    ) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
        import inspect

        names = list(inspect.signature(module.forward).parameters)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            parts = {
                name: self._part(given[name], dims, indices, group)
                for name, dims in arguments.items()
                if isinstance(given.get(name), torch.Tensor)
            }
            new = tuple(parts.get(name, value) for name, value in zip(names, args, strict=False))
            return new, {name: parts.get(name, value) for name, value in kwargs.items()}

        return hook

    def _output_hook(
        self, dims: Sequence[Dim], indices: Mapping[str, int], group: dist.ProcessGroup | None
    ) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
        sizes, orders = self._sizes.of(indices), {}
        for i, dim in enumerate(dims):
            if not dim.axes or dim.axes - sizes.keys():
                continue
            length = dim.size(sizes)
            parts = [self._indices(dim, length, indices, rank) for rank in range(self._rank.plan.mesh.size)]
            if any(len(part) < length for part in parts):
                # Of what several ranks have, the first one's is taken.
                places = {index: place for place, index in reversed([*enumerate(chain(*parts))])}
                orders[i] = torch.tensor([places[index] for index in range(length)])

        def hook(_: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            for i, order in orders.items():
                out = gather_from_group(out, group, i).index_select(i, order.to(out.device))
            return out

        return hook

    def _part(
        self, tensor: torch.Tensor, dims: Sequence[Dim], indices: Mapping[str, int], group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        """This rank's part of a tensor that is whole; its gradient is what comes back through the parts of all."""
        wanted = {i: self._indices(dim, tensor.shape[i], indices) for i, dim in enumerate(dims) if dim.axes}
        wanted = {i: own for i, own in wanted.items() if len(own) < tensor.shape[i]}
        if wanted and tensor.requires_grad:
            tensor = copy_to_group(tensor, group)
        for i, own in wanted.items():
            tensor = tensor.index_select(i, torch.tensor(own, device=tensor.device))
        return tensor

    def _indices(self, dim: Dim, length: int, indices: Mapping[str, int], rank: int | None = None) -> list[int]:
        """The indices that a rank (this one) owns of a dimension, of which one axis may be measured (a batch)."""
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
        shares = shares_of(plan.model, plan.mesh, self._rank.rank if rank is None else rank, sizes, frozenset())
        return [i for run in owned(dim, sizes, shares) for i in range(run.offset, run.end)]


def _is_indexed(rule: ModuleRule, template: str) -> bool:
    """Whether a rule holds for some of the modules of a name, by the indices in it."""
    return rule.when is not None and any(f"{{{name}}}" in template for name in rule.when.names)


def _localised(cls: Any, rank: Rank, modules: ModuleTable) -> Any:
    """A subclass that is built from the original config and then cut to the sizes of a rank, before it is filled."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        cls.__init__(self, config, *args, **kwargs)
        for name, placed in placements(self, rank.shapes).items():
            path, _, last = name.rpartition(".")
            module = self.get_submodule(path)
            old = getattr(module, last)
            if tuple(old.shape) != placed.shape:
                new = torch.empty(placed.shape, dtype=old.dtype, device=old.device)
                if last in module._parameters:
                    # In place, so that tied parameters stay one.
                    old.data = new
                else:
                    module._buffers[last] = new
        for module in self.modules():
            _say_size(module)
            if module._parameters and not module._non_persistent_buffers_set:
                # All of it comes from the folder; first values may have the original's sizes.
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
    """The kind of a parameter, the plan's entry of a tensor in it, and whether its outputs are to be gathered."""

    kind: Kind
    entry: Entry
    is_gathered: bool


def kind_of(plan: Plan, entry: Entry) -> Kind:
    """What the parallel dimension of a tensor is to its module. Leading dimensions of experts do not count."""
    rule, parallel = entry.layout.rule, entry.layout.parallel_dims
    experts = {axis for family in plan.model.architecture.families.get("ep", ()) for axis in family}
    leading = 0
    while leading < len(rule.dims) - 1 and rule.dims[leading].axis in experts:
        leading += 1
    inner = {dim - leading for dim in parallel}
    count = len(rule.dims) - leading
    if not parallel:
        return Kind.WHOLE
    if count == 1:
        return Kind.VECTOR
    assert rule.output_dim is not None
    input_dim = count - 1 if rule.arrow is None else rule.output_dim - leading - 1
    return Kind.ROW if input_dim in inner else Kind.COLUMN


def roles(plan: Plan, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Role]:
    """The role of each parameter, from the plan's entries of the tensors that it is made of."""
    kinds = {name: kind_of(plan, entry) for name, entry in plan.entries.items()}
    consumed = _dealt_axes(plan, (entry for name, entry in plan.entries.items() if kinds[name] is Kind.ROW))
    found = {}
    for parameter, names in sources.items():
        of_sources = {kinds[name] for name in names}
        if len(of_sources) > 1:
            raise PlanError(
                f"the tensors {', '.join(names[:3])} become one parameter, but lie differently on the ranks"
            )
        kind, entry = of_sources.pop(), plan.entries[names[0]]
        is_gathered = kind is Kind.COLUMN and not _dealt_axes(plan, [entry]) & consumed
        found[parameter] = Role(kind, entry, is_gathered)
    return found


def _dealt_axes(plan: Plan, entries: Iterable[Entry]) -> set[str]:
    axes: set[str] = set()
    for entry in entries:
        match = plan.model.architecture.match(entry.name)
        sizes = {**plan.model.sizes.of(match.indices if match else {}), **plan.padding}
        shares = shares_of(plan.model, plan.mesh, 0, sizes, frozenset())
        dealt = {axis for axis, part in shares.items() if part.parts > 1}
        for dim in entry.layout.parallel_dims:
            axes |= entry.layout.rule.dims[dim].axes & dealt
    return axes


def parallelise(loaded: Loaded, rank: Rank, group: dist.ProcessGroup | None) -> Loaded:
    """Give each module of a rank's model the behaviour that the plan's entries of its weights ask for."""
    model = loaded.model
    sources = {name: placed.sources for name, placed in placements(model, rank.shapes).items()}
    by_name = roles(rank.plan, sources)
    values = model.state_dict(keep_vars=True)
    by_tensor = {id(values[name]): role for name, role in by_name.items()}
    for tied, kept in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        # One tensor, as a rule, but two where weights are on disk.
        role = by_name.get(kept) or by_name.get(tied)
        if role is not None:
            by_tensor |= {id(values[tied]): role, id(values[kept]): role}
    parts = tuple(values[name] for name, role in by_name.items() if role.kind is not Kind.WHOLE)
    once: list[torch.Tensor] = []
    for module in list(model.modules()):
        tensors = {**module._parameters, **module._buffers}
        own = {name: by_tensor[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_tensor}
        if own:
            with _beneath_hook(module):
                once += _make_parallel(module, own, rank, group)
    return Loaded(model, sources, loaded.unused, parts, tuple(once))


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
    module: nn.Module, own: Mapping[str, Role], rank: Rank, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Make a module parallel; return its parameters that count on one rank alone."""
    kinds = {role.kind for role in own.values()}
    whole = [name for name, role in own.items() if role.kind is Kind.WHOLE and name in module._parameters]
    if Kind.COLUMN in kinds and isinstance(module, nn.Embedding):
        box = own["weight"].entry.layout.boxes[rank.rank]
        assert box is not None
        vocab_parallel(module, box.dims[0][0].offset, group, padding_row=_padding_row(module, rank))
    elif {Kind.COLUMN, Kind.ROW} <= kinds:
        row_parallel(module, group, bias="", once=whole)
        return [module.get_parameter(name) for name in whole]
    elif Kind.ROW in kinds:
        row_parallel(module, group, bias=whole[0] if whole else "bias")
    elif any(role.is_gathered for role in own.values()):
        role = next(role for role in own.values() if role.is_gathered)
        dim = min(role.entry.layout.parallel_dims)
        gather_logits(module, group, role.entry.layout.full[dim])
    elif kinds == {Kind.VECTOR} and not list(module.children()):
        parallel_norm(module, group)
    return []


def _padding_row(module: nn.Embedding, rank: Rank) -> int | None:
    return rank.config.get("pad_token_id") if module.padding_idx is not None else None
