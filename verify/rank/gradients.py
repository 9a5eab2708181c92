"""Gradients of a sharded model: what autograd must add between ranks, and how they are put together again.

In a rank's graph each value is either *whole*, the same on every rank, or a *part*, its own on each rank along some
dimensions of the mesh. Parts come from split weights; a sum or a gather over these ranks makes them whole. Where a
whole value enters the computation of a part, each rank's gradient of it is what came back through that rank's part,
so the ranks' gradients are summed there. That one rule, applied to the graph as it was recorded, covers the input of
a column-parallel layer, a norm's weight that every rank applies to its own heads, the rotary part that all heads of
latent attention share, routing weights and the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from graphlib import TopologicalSorter
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from reshard.formats.transformers_internals import revert_weight_conversion
from reshard.mesh.plan import Layout
from reshard.verify.rank.collectives import Groups, reduce_from_group
from reshard.verify.rank.loading import TensorPart


def loss_of(outputs: Mapping[str, Tensor]) -> Tensor:
    """A loss that every output has a part in: cross entropy of its last dimension with fixed random targets."""
    total = torch.zeros((), device=next(iter(outputs.values())).device)
    for name, output in sorted(outputs.items()):
        wide = output.to(torch.promote_types(output.dtype, torch.float32)).flatten(0, -2)
        generator = torch.Generator().manual_seed(len(name))
        targets = torch.randint(wide.shape[-1], (len(wide),), generator=generator)
        total = total + F.cross_entropy(wide, targets.to(wide.device))
    return total


# What autograd must add


Along = frozenset[str]
"""Dimensions of the mesh."""
Parts = Iterable[tuple[Tensor, Along]]
"""Tensors that ranks have different parts of, with the mesh dimensions along which they differ."""


def sum_where_ranks_part(results: Sequence[Tensor], parts: Parts, groups: Groups) -> None:
    """Let the backward of ``results`` sum gradients over the ranks wherever a whole value enters the computation of a
    part.

    ``parts`` are the split weights, and what was received of which ranks have different parts.
    """
    parted = _parted(results, parts, groups)
    needs, users = _needs(parted, [x.grad_fn for x in results])
    for node, along in needs.items():
        used = users[node]
        if _is_summed_once(node, used) and not _passes_on(node, used):
            node.register_prehook(partial(_sum, [used[0]], groups))
        apart = [need if child is not None and not _is_summed_once(child, users[child]) else frozenset()
                 for (child, _), need in zip(node.next_functions, along, strict=True)]  # fmt: skip
        if any(apart):
            node.register_hook(partial(_sum, apart, groups))


_KEEPS_ALL = {f"{name}Backward0" for name in ("Alias", "Clone", "Permute", "T", "Transpose", "UnsafeView", "View")}
"""Nodes of one input whose gradient has the same numbers, of the same dtype: to be summed behind as well as before."""


def _needs(
    parted: Mapping[Any, Along], roots: Sequence[Any]
) -> tuple[dict[Any, tuple[Along, ...]], dict[Any, list[Along]]]:
    """Along which dimensions the gradient that each node hands to each of its inputs is to be summed; and the same for
    what each node is handed, by those that use it. The gradients that roots are given are whole.

    Where all that use a value have parts, their gradients are added before they are summed, so that one sum serves the
    keys, the queries and the values of an attention.
    """
    needs: dict[Any, tuple[Along, ...]] = {}
    used: dict[Any, list[Along]] = {node: [Along()] if node in roots else [] for node in parted}
    for node in reversed([*parted]):  # each after all that use it
        late = used[node][0] if _passes_on(node, used[node]) else Along()
        along = Along() if _makes(node) == "part" else parted[node] | late
        needs[node] = tuple(along - parted[child] if child is not None else Along() for child, _ in node.next_functions)
        for (child, _), need in zip(node.next_functions, needs[node], strict=True):
            if child is not None:
                used[child].append(need)
    return needs, used


def _is_summed_once(node: Any, used: Sequence[Along]) -> bool:
    """Whether all users of a value need the same sum, so that it is done once, on its way into the node.

    False for a weight: its node outlives the graph, and a hook on it would run again in the next graph.
    """
    return len({*used}) == 1 and bool(used[0]) and type(node).__name__ != "AccumulateGrad"


def _passes_on(node: Any, used: Sequence[frozenset[str]]) -> bool:
    """Whether the sum for a node's gradient is left to the node before it."""
    return _is_summed_once(node, used) and type(node).__name__ in _KEEPS_ALL and node.next_functions[0][0] is not None


def parted_along(results: Sequence[Tensor], parts: Parts, groups: Groups) -> list[frozenset[str]]:
    """The mesh dimensions along which ranks have parts of each result; none of a whole one."""
    along_of = {id(tensor): along for tensor, along in parts}
    parted = _parted(results, parts, groups)
    return [along_of.get(id(x), frozenset()) if x.grad_fn is None else parted[x.grad_fn] for x in results]


def _parted(results: Sequence[Tensor], parts: Parts, groups: Groups) -> dict[Any, frozenset[str]]:
    """The same of every node of the graph, in an order in which each comes after all that it depends on."""
    leaves = {id(tensor): along for tensor, along in parts}
    graph: dict[Any, list[Any]] = {}
    nodes = [x.grad_fn for x in results if x.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node not in graph:
            graph[node] = [child for child, _ in node.next_functions if child is not None]
            nodes += graph[node]
    parted: dict[Any, frozenset[str]] = {}
    for node in TopologicalSorter(graph).static_order():
        below = frozenset[str]().union(*(parted[child] for child in graph[node]))
        if type(node).__name__ == "AccumulateGrad":
            below = leaves.get(id(node.variable), frozenset())
        elif _makes(node) == "whole":
            below -= groups.dimensions(node.group)
        elif _makes(node) == "part":
            below |= groups.dimensions(node.group)
        parted[node] = below
    return parted


def _makes(node: Any) -> str | None:
    """Return ``part`` or ``whole`` if a node is a collective that makes such a value; else None."""
    return getattr(node, "makes", None)


def _sum(
    new: Sequence[frozenset[str]], groups: Groups, grads: tuple[Tensor | None, ...], *_: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Sum each of some gradients along its dimensions; of one dimension set, all of them along it."""
    along_of = [*new] * len(grads) if len(new) == 1 else new
    return tuple(
        reduce_from_group(grad.detach(), groups.along(along)) if along and grad is not None else grad
        for grad, along in zip(grads, along_of, strict=True)
    )


# By the names on disk


def gradients_on_disk(
    model: Any, sources: Mapping[str, tuple[str, ...]], experts: Mapping[str, TensorPart] = MappingProxyType({})
) -> dict[str, Tensor]:
    """The gradients of a model's parameters, under the names and in the shapes of the tensors on disk.

    ``experts``: where the experts in a parameter lie among all, of which each has a tensor of its own on disk.
    """
    names = {id(value): name for name, value in model.state_dict(keep_vars=True).items() if name in sources}
    uses = Counter(source for of_one in sources.values() for source in of_one)
    gradients: dict[str, Tensor] = {}
    fused: dict[str, Tensor] = {}
    for parameter in model.parameters():
        name = names.get(id(parameter))
        if name is None or parameter.grad is None:
            continue
        grad, (first, *others) = parameter.grad.detach().cpu(), sources[name]
        if not others and uses[first] == 1 and first.rpartition(".")[2] == name.rpartition(".")[2]:
            gradients[first] = grad  # a file may also lack the prefix that the model's class gives all names
        else:
            fused[name] = experts[name].among_zeros(grad) if name in experts else grad
    if fused:
        names_of = {source for name in fused for source in sources[name]}
        gradients |= {name: grad for name, grad in revert_weight_conversion(model, fused).items() if name in names_of}
    return gradients


def together(layout: Layout, of_ranks: Sequence[Tensor | None]) -> Tensor:
    """Put a tensor's gradient together from what each rank has; what several ranks hold of a split one is summed.

    Of a whole one that all ranks have, the first is taken; of one that not all have, the sum.
    """
    present = [grad for grad in of_ranks if grad is not None]
    wide = torch.promote_types(present[0].dtype, torch.float32)
    if layout.is_replicated:
        return present[0] if len(present) == len(of_ranks) else torch.stack([x.to(wide) for x in present]).sum(0)
    full = torch.zeros(layout.padded, dtype=wide)
    for rank, grad in enumerate(of_ranks):
        if rank in layout.boxes and grad is not None:
            dims = layout.boxes[rank].dims
            indices = [torch.tensor([i for run in runs for i in range(run.offset, run.end)]) for runs in dims]
            full[torch.meshgrid(*indices, indexing="ij")] += grad.to(wide)
    return full[tuple(slice(size) for size in layout.full)].to(present[0].dtype)
