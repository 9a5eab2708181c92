"""What each parameter of a rank's model is to its module, by the plan's rules for the tensors that it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from formats.errors import PlanError
from formats.mesh import Mesh
from formats.notation.architecture import Architecture
from formats.notation.axes import Shape, Share
from reshard.mesh.plan import Layout, Plan
from reshard.model.model import Kind as Alike
from reshard.model.model import padded_sizes, shares_of, sizes_of_parts


@dataclass(frozen=True)
class Rank:
    """One rank of a plan. ``modules`` is the architecture whose ``[modules]`` table is meant.

    ``is_built_in`` says that the plan is known to be right, and the rank's config.json with it.
    """

    plan: Plan
    rank: int
    modules: Architecture
    is_built_in: bool = True

    @property
    def config(self) -> Mapping[str, Any]:
        """The config.json of the whole model."""
        return self.plan.model.config

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor in this rank's folder."""
        boxes = self.plan.boxes(self.rank)
        return {tensor.name: boxes[tensor.kind].shape for tensor in self.plan.model.tensors if tensor.kind in boxes}

    @cached_property
    def shapes_with_all_experts(self) -> dict[str, tuple[int, ...]]:
        """The shape that each tensor would have here if this rank had all experts."""
        model, shapes = self.plan.model, {}
        for kind, layout in self.plan.laid.items():
            sizes, shares = sizes_and_shares(self.plan, kind, self.rank)
            others = {axis: share for axis, share in shares.items() if axis not in model.expert_axes}
            shapes[kind] = layout.rule.sizes(sizes_of_parts(sizes, others))
        return {tensor.name: shapes[tensor.kind] for tensor in model.tensors}

    @property
    def lacks_experts(self) -> bool:
        """Whether other ranks have experts that this one has not."""
        return bool(experts_along(self.plan.mesh)) and self.shapes != self.shapes_with_all_experts


class Kind(Enum):
    """How a parameter lies on the ranks."""

    WHOLE = "whole"
    VECTOR = "vector"
    COLUMN = "column"
    ROW = "row"


@dataclass(frozen=True)
class Role:
    """The kind of a parameter, a tensor in it with its layout, and what the plan says of all that it is made of.

    ``along`` are the mesh dimensions along which ranks have different parts of it, ``experts_along`` those that deal
    its experts. ``is_gathered``: nothing takes its outputs as they are, so they are to be gathered;
    ``is_taken_whole``: but something takes all of them, which is not dealt with them.
    """

    kind: Kind
    tensor: str
    layout: Layout
    along: frozenset[str]
    experts_along: frozenset[str]
    is_gathered: bool
    is_taken_whole: bool

    @property
    def summed_along(self) -> frozenset[str]:
        """The mesh dimensions along which ranks have parts of a sum, not parts of the output."""
        return self.along if self.kind is Kind.ROW else self.experts_along


def sizes_and_shares(plan: Plan, alike: Alike, rank: int) -> tuple[dict[str, int], dict[str, Share]]:
    """The padded size of each axis for tensors that are alike, and what a rank has of each that is dealt."""
    sizes = padded_sizes(alike.sizes, plan.padding)
    return sizes, shares_of(plan.model, plan.mesh, rank, sizes, alike.axes)


def dealt_axes(plan: Plan, alike: Alike) -> frozenset[str]:
    """The axes of tensors, or of their names, of which ranks have parts."""
    _, shares = sizes_and_shares(plan, alike, 0)
    return frozenset(axis for axis in alike.axes & shares.keys() if shares[axis].parts > 1)


def kind_of(rule: Shape, dealt: frozenset[str], experts: frozenset[str]) -> Kind:
    """What the parallel dimension of a tensor with these ``dealt_axes`` is to its module. That experts are dealt does
    not count.
    """
    leading = next((i for i, dim in enumerate(rule.dims[:-1]) if dim.axis not in experts), len(rule.dims) - 1)
    inner = {i for i, dim in enumerate(rule.dims) if dim.axes & (dealt - experts)}
    if not inner:
        return Kind.WHOLE
    if len(rule.dims) - leading == 1:
        return Kind.VECTOR
    if rule.input_dims & inner:
        return Kind.ROW
    outer = [dim for i, dim in enumerate(rule.dims) if i >= leading and i not in inner]
    is_one_row = all(not dim.axes and dim.size({}) == 1 for dim in outer)  # "1 -> vocab"
    return Kind.VECTOR if is_one_row else Kind.COLUMN


def roles(plan: Plan, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Role]:
    """The role of each parameter, from the plan's layouts of the tensors that it is made of."""
    experts, of_tensor = plan.model.expert_axes, plan.model.kind_of
    dealt = {alike: dealt_axes(plan, alike) for alike in plan.laid}
    rules = {alike: layout.rule for alike, layout in plan.laid.items()}
    kinds = {alike: kind_of(rule, dealt[alike], experts) for alike, rule in rules.items()}
    consumed = frozenset[str]().union(*(dealt[alike] for alike, kind in kinds.items() if kind is Kind.ROW))
    inputs = frozenset[str]().union(*(rule.dims[dim].axes for rule in {*rules.values()} for dim in rule.input_dims))
    roles_of = {}
    for parameter, names in sources.items():
        alike, layout = of_tensor[names[0]], plan.layouts[names[0]]
        kind, axes = kinds[alike], dealt[alike]
        if any(kinds[of_tensor[name]] is not kind for name in names):
            raise PlanError(
                f"the tensors {', '.join(names[:3])} become one parameter, but lie differently on the ranks"
            )
        along = plan.mesh.varying([layout.boxes.get(rank) for rank in range(plan.mesh.size)])
        along_experts = experts_along(plan.mesh) if axes & experts else frozenset()
        is_gathered = kind in {Kind.COLUMN, Kind.VECTOR} and not axes & consumed
        is_whole = is_gathered and bool(axes & inputs)
        roles_of[parameter] = Role(kind, names[0], layout, along, along_experts, is_gathered, is_whole)
    return roles_of


def experts_along(mesh: Mesh) -> frozenset[str]:
    """The dimensions of a mesh that deal experts."""
    return mesh.varying([mesh.coordinates(rank).get("ep") for rank in range(mesh.size)])


def expert_shares(rank: Rank, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Share]:
    """What a rank has of the experts in each parameter of which it has not all."""
    plan, experts, shares_of_rank = rank.plan, rank.plan.model.expert_axes, dict[str, Share]()
    for parameter, names in sources.items():
        if (alike := plan.model.kind_of.get(names[0])) is not None:
            for axis in dealt_axes(plan, alike) & experts:
                shares_of_rank[parameter] = sizes_and_shares(plan, alike, rank.rank)[1][axis]
    return shares_of_rank
