"""Gradients of a sharded model: what autograd must add between ranks, and how they are put together again.

In a rank's graph each value is either *whole*, the same on every rank, or a *part*, its own on each. Parts come
from split weights; a sum or a gather over the ranks makes them whole. Where a whole value enters the computation of
a part, each rank's gradient of it is what came back through that rank's part, so the ranks' gradients are summed
there. That one rule, applied to the graph as it was recorded, covers the input of a column-parallel layer, a norm's
weight that every rank applies to its own heads, the rotary part that all heads of latent attention share, routing
weights and the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from reshard.plan import Layout
from verify.collectives import reduce_from_group


def loss_of(outputs: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """A loss that every output has a part in: cross entropy of its last dimension with fixed random targets."""
    total = torch.zeros((), device=ids.device)
    for name, output in sorted(outputs.items()):
        wide = output.to(torch.promote_types(output.dtype, torch.float32)).flatten(0, -2)
        generator = torch.Generator().manual_seed(len(name))
        targets = torch.randint(wide.shape[-1], (len(wide),), generator=generator)
        total = total + F.cross_entropy(wide, targets.to(ids.device))
    return total


# What autograd must add


class _Value(Enum):
    WHOLE = "whole"
    ONCE = "once"  # a parameter that counts on one rank alone, and has its whole gradient on all
    PART = "part"


_MAKES_WHOLE = {"_ReduceBackward", "_GatherBackward"}
_MAKES_PART = {"_ScatterBackward", "_CopyBackward"}


def sum_where_ranks_part(
    loss: Tensor, parts: Sequence[Tensor], once: Sequence[Tensor], group: dist.ProcessGroup | None
) -> None:
    """Let the backward of ``loss`` sum gradients over the ranks wherever a whole value enters the computation of a
    part.

    ``parts`` are the split weights, ``once`` those that count on one rank alone.
    """
    leaves = {id(x): _Value.PART for x in parts} | {id(x): _Value.ONCE for x in once}
    kinds: dict[Any, _Value] = {}
    for node in _in_order(loss.grad_fn):
        kinds[node] = kind = _kind(node, leaves, kinds)
        if kind is _Value.PART and type(node).__name__ not in _MAKES_PART:
            into = [child is not None and kinds[child] is _Value.WHOLE for child, _ in node.next_functions]
            if any(into):
                node.register_hook(_summing(into, group))


def _in_order(root: Any) -> list[Any]:
    """Every node, after all that it depends on."""
    found: dict[Any, None] = {}
    stack = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            found[node] = None
        elif node not in found:
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in found)
    return list(found)


def _kind(node: Any, leaves: Mapping[int, _Value], kinds: Mapping[Any, _Value]) -> _Value:
    name = type(node).__name__
    if name == "AccumulateGrad":
        return leaves.get(id(node.variable), _Value.WHOLE)
    if name in _MAKES_WHOLE:
        return _Value.WHOLE
    below = {kinds[child] for child, _ in node.next_functions if child is not None}
    if name in _MAKES_PART or _Value.PART in below:
        return _Value.PART
    return _Value.ONCE if below == {_Value.ONCE} else _Value.WHOLE


def _summing(into: Sequence[bool], group: dist.ProcessGroup | None) -> Callable[..., Any]:
    def hook(grad_inputs: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(
            reduce_from_group(grad.detach(), group, in_float32=True) if is_whole and grad is not None else grad
            for grad, is_whole in zip(grad_inputs, into, strict=True)
        )

    return hook


# By the names on disk


def gradients_on_disk(model: Any, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """The gradients of a model's parameters, under the names and in the shapes of the tensors on disk."""
    names = {id(value): name for name, value in model.state_dict(keep_vars=True).items() if name in sources}
    found: dict[str, Tensor] = {}
    fused: dict[str, Tensor] = {}
    for parameter in model.parameters():
        name = names.get(id(parameter))
        if name is None or parameter.grad is None:
            continue
        if len(sources[name]) == 1 and sources[name][0].rpartition(".")[2] == name.rpartition(".")[2]:
            found[sources[name][0]] = parameter.grad.detach().cpu()
        else:
            fused[name] = parameter.grad.detach().cpu()
    if fused:
        wanted = {source for name in fused for source in sources[name]}
        found |= {name: grad for name, grad in revert_weight_conversion(model, fused).items() if name in wanted}
    return found


def together(layout: Layout, of_ranks: Sequence[Tensor | None]) -> Tensor:
    """Put a tensor's gradient together from what each rank has; what several ranks hold of a split one is summed.

    Of a whole one that all ranks have, the first is taken; of one that not all have, the sum.
    """
    present = [grad for grad in of_ranks if grad is not None]
    wide = torch.promote_types(present[0].dtype, torch.float32)
    if layout.is_replicated:
        return present[0] if len(present) == len(of_ranks) else torch.stack([x.to(wide) for x in present]).sum(0)
    full = torch.zeros(layout.padded, dtype=wide)
    for box, grad in zip(layout.boxes, of_ranks, strict=True):
        if box is not None and grad is not None:
            indices = [torch.tensor([i for run in runs for i in range(run.offset, run.end)]) for runs in box.dims]
            full[torch.meshgrid(*indices, indexing="ij")] += grad.to(wide)
    return full[tuple(slice(size) for size in layout.full)].to(present[0].dtype)
