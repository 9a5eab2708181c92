"""Making a loaded model parallel, as its plan says.

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
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import accumulate, chain
from types import MappingProxyType

import torch
from accelerate.hooks import add_hook_to_module, remove_hook_from_module
from torch import nn

from formats.errors import PlanError
from formats.torch_internals import own_buffers, own_parameters
from formats.transformers_internals import placements, tied_weights
from reshard.mesh.plan import Layout
from verify.rank.collectives import Groups
from verify.rank.layers import (
    Part,
    gather_logits,
    gathered_vectors,
    parallel_norm,
    row_parallel,
    sum_at_use,
    unpadded_vectors,
    vocab_parallel,
    with_all_experts,
    without_padding,
)
from verify.rank.loading import Loaded
from verify.rank.roles import Kind, Rank, Role, expert_shares, roles


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
    parameters = placements(model, rank.shapes)
    sources = {name: place.sources for name, place in parameters.items()}
    by_name = roles(rank.plan, sources)
    shares = expert_shares(rank, sources)
    experts = {
        name: Part(share.index * parameters[name].shape[0], share.parts * parameters[name].shape[0])
        for name, share in shares.items()
    }
    values = model.state_dict(keep_vars=True)
    by_tensor = {id(values[name]): role for name, role in by_name.items()}
    for tied, original in tied_weights(model).items():
        # One tensor, as a rule, but two where weights are on disk.
        role = by_name.get(original) or by_name.get(tied)
        if role is not None:
            by_tensor |= {id(values[tied]): role, id(values[original]): role}
    held_by_tensor = {id(values[name]): part for name, part in experts.items()}
    parts = [(values[name], role.along) for name, role in by_name.items() if role.along]
    for path, module in [(path, module) for path, module in model.named_modules() if module not in alone]:
        tensors = {**own_parameters(module), **own_buffers(module)}
        named = {name: by_tensor[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_tensor}
        parts_of = {name: held_by_tensor[id(tensors[name])] for name in named if id(tensors[name]) in held_by_tensor}
        if parts_of:
            # Some are read by the module around them.
            for reader in (model.get_submodule(path.rpartition(".")[0]), module):
                with _beneath_hook(reader):
                    with_all_experts(reader, module, parts_of)
        if module in sums and sums[module] in named and named[sums[module]].summed_along:
            with _beneath_hook(module):
                sum_at_use(module, sums[module], groups.along(named[sums[module]].summed_along))
        elif named:
            with _beneath_hook(module):
                parts += _make_parallel(module, named, rank, groups)
    by_name_on_disk = {name: part for name, part in experts.items() if by_name[name].entry.layout.dealt_by_name}
    return Loaded(model, sources, loaded.unused, tuple(parts), by_name_on_disk)


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
    module: nn.Module, of: Mapping[str, Role], rank: Rank, groups: Groups
) -> list[tuple[torch.Tensor, frozenset[str]]]:
    """Make a module parallel; return its parameters that are added within a sum over ranks, and its dimensions."""
    kinds = {role.kind for role in of.values()}
    whole = [name for name, role in of.items() if role.kind is Kind.WHOLE and name in own_parameters(module)]
    summed = frozenset[str]().union(*(role.summed_along for role in of.values()))
    vocabulary = of.get("weight")
    if isinstance(module, nn.Embedding) and vocabulary and 0 in vocabulary.entry.layout.parallel_dims:
        first_row = vocabulary.entry.layout.boxes[rank.rank].dims[0][0].offset
        group = groups.along(vocabulary.along)
        padding_row = _padding_row(module, vocabulary.entry.layout.full[0], rank)
        vocab_parallel(module, first_row, group, padding_row=padding_row)
    elif summed and ({Kind.COLUMN, Kind.ROW} <= kinds or any(role.experts_along for role in of.values())):
        elsewhere = [name for name in whole if not groups.is_first(of[name].along)]
        row_parallel(module, groups.along(summed), bias="", elsewhere=elsewhere)
        return [(module.get_parameter(name), summed) for name in whole]
    elif Kind.ROW in kinds:
        row_parallel(module, groups.along(summed), bias=whole[0] if whole else "bias")
    elif columns := [role for role in of.values() if role.is_gathered and role.kind is Kind.COLUMN]:
        role = columns[0]
        dim = min(role.entry.layout.parallel_dims)
        if role.is_taken_whole and role.entry.layout.rule.dims[dim].axis is None:
            raise PlanError(
                f"no forward of {rank.plan.mesh} is known: '{role.entry.name}' is cut, but no weight takes its parts"
            )
        order = _order_of_parts(role.entry.layout, dim, rank.plan.mesh.peers(rank.rank, role.along))
        gather_logits(module, groups.along(role.along), role.entry.layout.full[dim], order)
    elif kinds == {Kind.VECTOR} and not list(module.children()):
        parallel_norm(module, groups.along(next(iter(of.values())).along))
    elif kinds == {Kind.VECTOR}:
        in_children = {id(tensor) for child in module.children() for tensor in child.parameters()}
        tensors = {**own_parameters(module), **own_buffers(module)}
        added = {name: role for name, role in of.items() if role.is_gathered and id(tensors[name]) not in in_children}
        if added:
            group = groups.along(next(iter(added.values())).along)
            gathered_vectors(module, group, {name: role.entry.layout.full[-1] for name, role in added.items()})
    elif kinds == {Kind.WHOLE} and not isinstance(module, nn.Embedding):
        _strip_padding(module, [*of.items()])
    return []


def _strip_padding(module: nn.Module, weights: Sequence[tuple[str, Role]]) -> None:
    """Let a module that every rank has whole, of a vocabulary that is padded nevertheless, compute without padding."""
    padded = [(name, role.entry.layout) for name, role in weights if role.entry.layout.padded != role.entry.layout.full]
    outputs = [layout.full[layout.rule.output_dim or 0] for _, layout in padded if math.prod(layout.full[:-1]) > 1]
    if outputs:
        without_padding(module, outputs[0])
    elif padded:
        unpadded_vectors(module, {name: layout.full[-1] for name, layout in padded})


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
