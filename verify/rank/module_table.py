"""Models whose config.json cannot say a rank's sizes: what the architecture file's ``[modules]`` table says of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from reshard.formats.errors import PlanError
from reshard.formats.notation.architecture import ModuleRule
from reshard.formats.notation.axes import Dim, owned
from reshard.formats.torch_internals import own_buffers, renumber
from reshard.model.model import AxisSizes, shares_of
from reshard.verify.rank.collectives import Groups, copy_to_group, gather_from_group, places_among
from reshard.verify.rank.roles import Rank


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
        return any(
            (rule.when is not None and any(f"{{{index}}}" in name for index in rule.when.names))  # of some of these
            or self._holds(rule, {})
            for name, rule in lines
        )

    def lines(self, model: nn.Module) -> Iterable[tuple[nn.Module, ModuleRule, dict[str, int]]]:
        """Each module that a line speaks of, with the line and the indices in the module's name."""
        for name, module in model.named_modules():
            match = self._rank.modules.match_module(name)
            if match is None:
                continue
            rules, indices = match
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
                *outer, last = path.split(".")
                holder: Any = reduce(getattr, outer, module)
                if not hasattr(holder, last):
                    raise PlanError(
                        f"plan '{self._rank.modules.name}': {type(holder).__name__} has no attribute '{last}'"
                    )
                setattr(holder, last, value)

    def split(self, model: nn.Module) -> list[tuple[torch.Tensor, frozenset[str]]]:
        """Let each module see this rank's part of what it shares with all ranks: lists of modules, buffers, arguments.

        ``output``: the module returns this rank's part; the parts are gathered, and what follows is computed whole on
        every rank. ``part``: the module returns the whole; the rank takes its own part.

        Return the parameters that only this rank has after that, with the mesh dimensions along which they differ.
        """
        parts: list[tuple[torch.Tensor, frozenset[str]]] = []
        for module, rule, indices in list(self.lines(model)):
            arguments: dict[str, Sequence[Dim]] = {}
            for name, shape in rule.split.items():
                attribute = getattr(module, name, None)
                if name == "output":
                    module.register_forward_hook(self._output_hook(shape.dims, indices))
                elif name == "part":
                    module.register_forward_hook(partial(self._part_of_output, shape.dims, indices))
                elif isinstance(attribute, nn.ModuleList):
                    # Under their old numbers, as on disk.
                    numbers = self._of_ranks(shape.dims[0], len(attribute), indices)
                    renumber(attribute, numbers[self._rank.rank])
                    parts += [(tensor, self._rank.plan.mesh.varying(numbers)) for tensor in attribute.parameters()]
                elif isinstance(attribute, torch.Tensor):
                    own_buffers(module)[name] = self._part(attribute, shape.dims, indices)
                else:
                    arguments[name] = shape.dims
            if arguments:
                names = list(inspect.signature(module.forward).parameters)
                hook = partial(self._split_arguments, arguments, indices, names)
                module.register_forward_pre_hook(hook, with_kwargs=True)
        return parts

    def _holds(self, rule: ModuleRule, indices: Mapping[str, int]) -> bool:
        return rule.when is None or bool(rule.when.evaluate(self._lookup(self._sizes.of(indices), indices)))

    def _lookup(self, sizes: Mapping[str, int], indices: Mapping[str, int]) -> Callable[[str], Any]:
        return lambda name: {**sizes, **indices}.get(name, self._sizes.settings.get(name))

    def _split_arguments(
        self, arguments: Mapping[str, Sequence[Dim]], indices: Mapping[str, int], names: Sequence[str], _: nn.Module,
        args: tuple[Any, ...], kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        parts = {
            name: self._part(values[name], dims, indices)
            for name, dims in arguments.items()
            if isinstance(values.get(name), torch.Tensor)
        }
        new = tuple(parts.get(name, value) for name, value in zip(names, args, strict=False))
        return new, {name: parts.get(name, value) for name, value in kwargs.items()}

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
                of_peers = [parts[rank] for rank in mesh.peers(self._rank.rank, along)]
                orders[i] = self._groups.along(along), places_among(of_peers, length), [*map(len, of_peers)]

        def hook(_: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            for i, (group, order, lengths) in orders.items():
                out = gather_from_group(out, group, i, lengths=lengths).index_select(i, order.to(out.device))
            return out

        return hook

    def _part_of_output(
        self, dims: Sequence[Dim], indices: Mapping[str, int], _: nn.Module, __: Any, out: torch.Tensor
    ) -> torch.Tensor:
        return self._part(out, dims, indices)

    def _part(self, tensor: torch.Tensor, dims: Sequence[Dim], indices: Mapping[str, int]) -> torch.Tensor:
        """This rank's part of a tensor that is whole; its gradient is what comes back through the parts of all."""
        indices_of = {i: self._of_ranks(dim, tensor.shape[i], indices) for i, dim in enumerate(dims) if dim.axes}
        along = frozenset[str]().union(*(self._rank.plan.mesh.varying(parts) for parts in indices_of.values()))
        if along and tensor.requires_grad:
            tensor = copy_to_group(tensor, self._groups.along(along))
        for i, parts in indices_of.items():
            local = parts[self._rank.rank]
            if len(local) < tensor.shape[i]:
                tensor = tensor.index_select(i, torch.tensor(local, device=tensor.device))
        return tensor

    def _of_ranks(self, dim: Dim, length: int, indices: Mapping[str, int]) -> list[list[int]]:
        """The indices that each rank owns of a dimension, of which one axis may be measured (a batch)."""
        plan = self._rank.plan
        sizes = {**self._sizes.of(indices), **plan.padding}
        unknown = sorted(dim.axes - sizes.keys())
        if unknown:
            divisor = dim.size({**sizes, **dict.fromkeys(unknown, 1)})
            sizes |= {unknown[0]: length // divisor, **dict.fromkeys(unknown[1:], 1)}
        if dim.size(sizes) != length:
            raise PlanError(
                f"plan '{self._rank.modules.name}', [modules]: '{dim}' is {dim.size(sizes)}, the model has {length}"
            )
        shares = (
            shares_of(plan.model.architecture, plan.mesh, rank, sizes, frozenset()) for rank in range(plan.mesh.size)
        )
        return [[i for run in owned(dim, sizes, share) for i in range(run.offset, run.end)] for share in shares]
