"""The parallel layers, and how a loaded model is made of them, as its plan says.

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

Every module holds its rank's weights and nothing else. The layers are those of Shoeybi et al. 2019 (Megatron-LM).

What a gradient means when it is put together again, with ``loss`` computed alike on every rank:

- a weight that is split: each rank's gradient is its slice of the whole gradient.
- a weight that all ranks have and use alike (a norm over hidden, a row-parallel bias, a router): each rank has the
  whole gradient already. Take one; do not sum.
- a weight that several ranks have but each uses for its own outputs, as a KV head that is replicated because there are
  more ranks than KV heads: each rank has the part that came through its own query heads. **Sum over the replicas.**
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reshard.formats.errors import PlanError
from reshard.formats.notation.architecture import ModuleRule
from reshard.formats.torch_internals import own_buffers, own_parameters, with_tensors
from reshard.formats.transformers_internals import placements, tied_weights
from reshard.verify.rank.collectives import (
    Groups,
    copy_to_group,
    gather_from_group,
    lengths_in_group,
    places_among,
    reduce_from_group,
    scatter_to_group,
)
from reshard.verify.rank.group import Group
from reshard.verify.rank.loading import Loaded, TensorPart
from reshard.verify.rank.module_table import ModuleTable
from reshard.verify.rank.roles import Rank, Role, expert_shares, roles

Module = TypeVar("Module", bound=nn.Module)
Forward = Callable[..., Any]


# Each function gives a module of this rank's size the parallel behaviour, in place, and returns it.
# The module's own forward still does the arithmetic, whatever class it is; names of parameters stay as they are.


def column_parallel(module: Module, group: Group) -> Module:
    """Let a module that has some of the outputs take inputs that all ranks have.

    Every floating-point tensor among its arguments is one (of experts: the routing weights, too).
    """

    def forward(local: Forward, *args: Any, **kwargs: Any) -> Any:
        return local(*[_shared(a, group) for a in args], **{k: _shared(a, group) for k, a in kwargs.items()})

    return _around(module, forward)


def row_parallel(module: Module, group: Group, *, bias: str = "bias", elsewhere: Sequence[str] = ()) -> Module:
    """Sum the outputs of a module that has some of the inputs, and add its bias once after that.

    Of a tuple that the module returns, the first is the output. ``bias`` is the parameter that is added last, if the
    module has one. ``elsewhere``: parameters that are added further in, as the biases of experts before they are
    weighted, and that count on another rank, which has the same: here they are zero, and have no gradient.
    """

    def forward(local: Forward, *args: Any, **kwargs: Any) -> Any:
        last: Tensor | None = getattr(module, bias, None)
        # Zeros, not None: transformers' Conv1D needs a bias to add.
        instead = {} if last is None else {bias: torch.zeros_like(last)}
        instead |= {name: torch.zeros_like(getattr(module, name)) for name in elsewhere}
        with with_tensors(module, instead):
            out = local(*args, **kwargs)
        summand, *further = out if isinstance(out, tuple) else (out,)
        total = reduce_from_group(summand, group)
        total = total if last is None else total + last
        return (total, *further) if isinstance(out, tuple) else total

    return _around(module, forward)


def sum_at_use(module: Module, name: str, group: Group) -> Module:
    """Sum what is computed with a weight that has some of the inputs, for a module that goes on from there."""

    def forward(local: Forward, *args: Any, **kwargs: Any) -> Any:
        with _SumsAtUse(module.get_parameter(name), group):
            return local(*args, **kwargs)

    return _around(module, forward)


class _SumsAtUse(TorchFunctionMode):
    """Sums over the ranks the results of every function that takes a weight as an argument."""

    def __init__(self, weight: Tensor, group: Group) -> None:
        super().__init__()
        self._weight, self._group = weight, group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_used = any(argument is self._weight for argument in (*args, *(kwargs or {}).values()))
        return reduce_from_group(result, self._group) if is_used and isinstance(result, Tensor) else result


def with_all_experts(module: Module, holder: nn.Module, parts: Mapping[str, TensorPart]) -> Module:
    """Let a module's forward see all experts: those that this rank has not are zero, and so is what they compute.

    ``parts`` are the parameters of ``holder``, the module itself or one in it, that have some of the experts.
    """

    def whole() -> dict[str, Tensor]:
        own = ((name, part, own_parameters(holder)[name]) for name, part in parts.items())
        # Weights that are brought only for the holder's own forward are not there yet.
        present = ((name, part, p) for name, part, p in own if p is not None and not p.is_meta)
        return {name: part.among_zeros(p) for name, part, p in present if len(p) < part.length}

    return _seeing(module, holder, whole)


def vocab_parallel(module: Module, first_row: int, group: Group, *, padding_row: int | None = None) -> Module:
    """Let an embedding that has some rows of the vocabulary look up ids of all of it.

    ``padding_row``: the row of the whole vocabulary that takes no gradient (``padding_idx`` of the original module).
    """
    rows = module.get_parameter("weight").shape[0]
    own_padding = padding_row is not None and first_row <= padding_row < first_row + rows
    if hasattr(module, "padding_idx"):
        module.padding_idx = padding_row - first_row if own_padding and padding_row is not None else None  # type: ignore[assignment]

    for name, token in list(vars(module).items()):
        if name.endswith(("_token_index", "_token_id")) and isinstance(token, int):
            setattr(module, name, token - first_row if 0 <= token - first_row < rows else -1)  # a token apart

    def forward(local: Forward, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        size = rows * group.size
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
            raise IndexError(f"token ids {int(ids.min())} to {int(ids.max())} in a vocabulary of {size}")
        is_local = (ids >= first_row) & (ids < first_row + rows)
        vectors = local((ids - first_row).where(is_local, 0), *args, **kwargs)
        return reduce_from_group(vectors.masked_fill(~is_local.unsqueeze(-1), 0), group)

    return _around(module, forward)


def gather_logits(module: Module, group: Group, order: Tensor) -> Module:
    """Let an output layer that has some rows of the vocabulary return the logits of all, without those of padding.

    ``order`` says where each of them lies among the parts of the ranks, one after the other.
    """

    is_in_order = torch.equal(order, torch.arange(len(order)))

    def forward(local: Forward, *args: Any, **kwargs: Any) -> Tensor:
        whole = gather_from_group(local(*args, **kwargs), group)
        return whole[..., : len(order)] if is_in_order else whole.index_select(-1, order.to(whole.device))

    return _around(column_parallel(module, group), forward)


def without_padding(module: Module, true_shapes: Mapping[str, Sequence[int]], group: Group | None = None) -> Module:
    """Let a module see weights of the vocabulary without padding; vectors of a ``group`` are split over its ranks, and
    the module, which adds them to what is whole (a bias to gathered logits), sees all of them.
    """

    def whole() -> dict[str, Tensor]:
        own = {name: getattr(module, name) for name in true_shapes}
        weights = own if group is None else {name: gather_from_group(part, group) for name, part in own.items()}
        return {name: weight[tuple(map(slice, true_shapes[name]))] for name, weight in weights.items()}

    return _seeing(module, module, whole)


def parallel_norm(module: Module, group: Group) -> Module:
    """Let a norm whose last dimension is split normalise by the statistics of the whole.

    Inputs and weights are gathered and the module computes as it would unsharded, then each rank takes its slice: more
    bytes than the ranks' mean squares would be, but the same for every kind of norm, and to the last bit. Other tensors
    of the input's shape (a gate) are split as it is.
    """

    def forward(local: Forward, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lengths = lengths_in_group(x, group)

        def gathered(value: Any) -> Any:
            is_alike = isinstance(value, Tensor) and value.shape == x.shape
            return gather_from_group(value, group, lengths=lengths) if is_alike else value

        weights = module.named_parameters(recurse=False)
        whole = {name: gather_from_group(weight, group, lengths=lengths) for name, weight in weights}
        if isinstance(shape := getattr(module, "normalized_shape", None), tuple):  # torch's own are told their size
            module.normalized_shape = (*shape[:-1], sum(lengths))  # type: ignore[assignment]
        with with_tensors(module, whole):
            y: Tensor = local(gathered(x), *map(gathered, args), **{k: gathered(a) for k, a in kwargs.items()})
        return scatter_to_group(y, group, lengths=lengths)

    return _around(module, forward)


def _shared(x: Any, group: Group) -> Any:
    return copy_to_group(x, group) if isinstance(x, Tensor) and x.is_floating_point() else x


def _around(module: Module, forward: Callable[..., Any]) -> Module:
    """Let a module's forward be this one, whose first argument is the former."""
    # On the instance, so that hooks and the parameters' names stay what they were.
    module.forward = partial(forward, module.forward)
    return module


def _seeing(module: Module, holder: nn.Module, tensors: Callable[[], dict[str, Tensor]]) -> Module:
    """Let a module's forward see other tensors in place of those of ``holder``."""

    def forward(local: Forward, *args: Any, **kwargs: Any) -> Any:
        with with_tensors(holder, tensors()):
            return local(*args, **kwargs)

    return _around(module, forward)


# --------------------------------------------------------------------------------------------------- as a plan says


def parallelise(loaded: Loaded, rank: Rank, groups: Groups, modules: ModuleTable) -> Loaded:
    """Give each module of a rank's model the behaviour that the plan's entries of its weights ask for, and the
    [modules] table.
    """
    model = loaded.model
    split_parts, rules = modules.split(model), {module: rule for module, rule, _ in modules.lines(model)}
    parameters = placements(model, rank.shapes)
    sources = {name: place.sources for name, place in parameters.items()}
    by_name = roles(rank.plan, sources)
    experts = dict[str, TensorPart]()
    for name, share in expert_shares(rank, sources).items():
        length = parameters[name].shape[0]
        experts[name] = TensorPart(share.index * length, share.parts * length)
    values = model.state_dict(keep_vars=True)
    by_tensor = {id(values[name]): role for name, role in by_name.items()}
    for tied, original in tied_weights(model).items():
        # One tensor, as a rule, but two where weights are on disk.
        role = by_name.get(original) or by_name.get(tied)
        if role is not None:
            by_tensor |= {id(values[tied]): role, id(values[original]): role}
    held_by_tensor = {id(values[name]): part for name, part in experts.items()}
    parts = [(values[name], role.along) for name, role in by_name.items() if role.along]
    for path, module in [*model.named_modules()]:
        rule = rules.get(module, ModuleRule())
        if rule.alone:
            continue
        tensors = {**own_parameters(module), **own_buffers(module)}
        named = {name: by_tensor[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_tensor}
        parts_of = {name: held_by_tensor[id(tensors[name])] for name in named if id(tensors[name]) in held_by_tensor}
        if parts_of:
            # Some are read by the module around them.
            for reader in (model.get_submodule(path.rpartition(".")[0]), module):
                with _beneath_hook(reader):
                    with_all_experts(reader, module, parts_of)
        if rule.sums in named and named[rule.sums].summed_along:
            with _beneath_hook(module):
                sum_at_use(module, rule.sums, groups.along(named[rule.sums].summed_along))
        elif named:
            with _beneath_hook(module):
                parts += _make_parallel(module, named, rank, groups)
    by_name_on_disk = {name: part for name, part in experts.items() if by_name[name].layout.dealt_by_name}
    return Loaded(model, sources, loaded.unused, (*parts, *split_parts), by_name_on_disk)


@contextmanager
def _beneath_hook(module: nn.Module) -> Iterator[None]:
    """Change a module's forward beneath accelerate's hook, if it has one, which brings its weights."""
    hook = getattr(module, "_hf_hook", None)
    if hook is None:
        yield
        return
    remove_hook_from_module(module)
    yield
    add_hook_to_module(module, hook)


def _make_parallel(
    module: nn.Module, roles: Mapping[str, Role], rank: Rank, groups: Groups
) -> list[tuple[torch.Tensor, frozenset[str]]]:
    """Make a module parallel; return its parameters that are added within a sum over ranks, and its dimensions."""
    splits = {role.split for role in roles.values()}
    whole = [name for name, role in roles.items() if role.split == "whole" and name in own_parameters(module)]
    summed = frozenset[str]().union(*(role.summed_along for role in roles.values()))
    vocabulary = roles.get("weight")
    if isinstance(module, nn.Embedding) and vocabulary and 0 in vocabulary.layout.parallel_dims:
        first_row = vocabulary.layout.boxes[rank.rank].dims[0][0].offset
        group = groups.along(vocabulary.along)
        padding_row = _padding_row(module, vocabulary.layout.full[0], first_row, rank)
        vocab_parallel(module, first_row, group, padding_row=padding_row)
    elif summed and ({"column", "row"} <= splits or any(role.experts_along for role in roles.values())):
        elsewhere = [name for name in whole if not groups.is_first(roles[name].along)]
        row_parallel(module, groups.along(summed), bias="", elsewhere=elsewhere)
        return [(module.get_parameter(name), summed) for name in whole]
    elif "row" in splits:
        row_parallel(module, groups.along(summed), bias=whole[0] if whole else "bias")
    elif columns := [role for role in roles.values() if role.is_gathered and role.split == "column"]:
        role = columns[0]
        dim = min(role.layout.parallel_dims)
        if role.is_taken_whole and role.layout.rule.dims[dim].axis is None:
            raise PlanError(
                f"no forward of {rank.plan.mesh} is known: '{role.tensor}' is cut, but no weight takes its parts"
            )
        boxes = [role.layout.boxes[peer] for peer in rank.plan.mesh.peers(rank.rank, role.along)]
        parts = [[i for run in box.dims[dim] for i in range(run.offset, run.end)] for box in boxes]
        gather_logits(module, groups.along(role.along), places_among(parts, role.layout.full[dim]))
    elif splits == {"vector"} and not list(module.children()):
        parallel_norm(module, groups.along(next(iter(roles.values())).along))
    elif splits == {"vector"}:
        in_children = {id(tensor) for child in module.children() for tensor in child.parameters()}
        tensors = {**own_parameters(module), **own_buffers(module)}
        added = {
            name: role for name, role in roles.items() if role.is_gathered and id(tensors[name]) not in in_children
        }
        if added:
            group = groups.along(next(iter(added.values())).along)
            without_padding(module, {name: role.layout.full for name, role in added.items()}, group)
    elif splits == {"whole"} and not isinstance(module, nn.Embedding):
        layouts = {name: role.layout for name, role in roles.items()}
        if padded := {name: layout.full for name, layout in layouts.items() if layout.padded != layout.full}:
            without_padding(module, padded)
    return []


def _padding_row(module: nn.Embedding, rows: int, first_row: int, rank: Rank) -> int | None:
    """The row of the whole vocabulary, of ``rows``, that takes no gradient.

    It is pad_token_id, which the module may have as the rank's own row, or of some classes (MPNet), a number of their
    own. A negative one counts from the end.
    """
    if module.padding_idx is None:
        return None
    named = rank.plan.model.sizes.settings.get("pad_token_id")
    row = rows + named if named is not None and named < 0 else named
    return row if row is not None and module.padding_idx == row - first_row else module.padding_idx
