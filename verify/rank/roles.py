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
from formats.notation.axes import Share
from reshard.mesh.plan import Entry, Plan
from reshard.model.model import shares_of


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
        for name, entry in self.plan.entries.items():
            sizes = entry_sizes(self.plan, entry)
            shares = entry_shares(self.plan, entry, self.rank)
            lengths = {axis: share.run(sizes[axis]).length for axis, share in shares.items() if axis in sizes}
            lengths = {axis: length for axis, length in lengths.items() if axis not in model.expert_axes}
            shapes[name] = entry.layout.rule.sizes({**sizes, **lengths})
        return shapes

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


def kind_of(plan: Plan, entry: Entry, dealt: frozenset[str]) -> Kind:
    """What the parallel dimension of a tensor with these ``dealt_axes`` is to its module. That experts are dealt does
    not count.
    """
    rule, experts = entry.layout.rule, plan.model.expert_axes
    dealt -= experts
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
    outer = [dim for i, dim in enumerate(rule.dims) if i >= leading and i not in inner]
    is_one_row = all(not dim.axes and dim.size({}) == 1 for dim in outer)  # "1 -> vocab"
    return Kind.VECTOR if is_one_row else Kind.COLUMN


def roles(plan: Plan, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Role]:
    """The role of each parameter, from the plan's entries of the tensors that it is made of."""
    kinds: dict[tuple[str, int], tuple[Kind, frozenset[str]]] = {}
    of_entries: dict[str, tuple[Kind, frozenset[str]]] = {}
    for name, entry in plan.entries.items():
        alike = entry.template, id(entry.layout)
        if alike not in kinds:
            dealt = dealt_axes(plan, entry)
            kinds[alike] = kind_of(plan, entry, dealt), dealt
        of_entries[name] = kinds[alike]
    consumed = frozenset[str]().union(*(dealt for kind, dealt in kinds.values() if kind is Kind.ROW))
    rules = {entry.layout.rule for entry in plan.entries.values()}
    inputs = frozenset[str]().union(*(rule.dims[dim].axes for rule in rules for dim in rule.input_dims))
    roles_of = {}
    for parameter, names in sources.items():
        of_sources = {of_entries[name][0] for name in names}
        if len(of_sources) > 1:
            raise PlanError(
                f"the tensors {', '.join(names[:3])} become one parameter, but lie differently on the ranks"
            )
        kind, entry, dealt = of_sources.pop(), plan.entries[names[0]], of_entries[names[0]][1]
        along_experts = experts_along(plan.mesh) if dealt & plan.model.expert_axes else frozenset()
        is_gathered = kind in {Kind.COLUMN, Kind.VECTOR} and not dealt & consumed
        along = plan.mesh.varying([entry.layout.boxes.get(rank) for rank in range(plan.mesh.size)])
        is_taken = bool(dealt & inputs)
        roles_of[parameter] = Role(kind, entry, along, along_experts, is_gathered, is_gathered and is_taken)
    return roles_of


def experts_along(mesh: Mesh) -> frozenset[str]:
    """The dimensions of a mesh that deal experts."""
    return mesh.varying([mesh.coordinates(rank).get("ep") for rank in range(mesh.size)])


def expert_shares(rank: Rank, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Share]:
    """What a rank has of the experts in each parameter of which it has not all."""
    plan, shares_of_rank = rank.plan, dict[str, Share]()
    for parameter, names in sources.items() if plan.model.expert_axes else ():
        entry = plan.entries[names[0]]
        for axis in dealt_axes(plan, entry) & plan.model.expert_axes:
            shares_of_rank[parameter] = entry_shares(plan, entry, rank.rank)[axis]
    return shares_of_rank
