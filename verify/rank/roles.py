"""Roles of the parameters of a rank's model in their modules, by the plan's rules for the tensors that they are made
of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reshard.formats.errors import PlanError
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import Architecture
from reshard.formats.notation.axes import Share, Split
from reshard.mesh.plan import Layout, Plan
from reshard.model.model import Model, padded_sizes, sizes_of_parts


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
        plan, experts, shapes = self.plan, self.plan.model.architecture.expert_axes, {}
        for kind, layout in plan.laid.items():
            others = {axis: share for axis, share in plan.shares(kind, self.rank).items() if axis not in experts}
            shapes[kind] = layout.rule.sizes(sizes_of_parts(padded_sizes(kind.sizes, plan.padding), others))
        return {tensor.name: shapes[tensor.kind] for tensor in plan.model.tensors}

    @property
    def lacks_experts(self) -> bool:
        """Whether other ranks have experts that this rank lacks."""
        return bool(experts_along(self.plan.mesh)) and self.shapes != self.shapes_with_all_experts


@dataclass(frozen=True)
class Role:
    """The role of a parameter: its split, one of its tensors with its layout, and facts about all tensors that it is
    made of.
    """

    split: Split
    tensor: str
    layout: Layout
    along: frozenset[str]
    """The mesh dimensions along which ranks have different parts of it."""
    experts_along: frozenset[str]
    """The mesh dimensions that divide its experts."""
    is_gathered: bool
    """Whether its outputs are gathered, because no module takes them as they are."""
    is_taken_whole: bool
    """Whether a module that is not sharded with it takes all of its outputs."""

    @property
    def summed_along(self) -> frozenset[str]:
        """The mesh dimensions along which ranks have parts of a sum, not parts of the output."""
        return self.along if self.split == "row" else self.experts_along


def roles(plan: Plan, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Role]:
    """The role of each parameter, from the plan's layouts of the tensors that it is made of."""
    experts, laid = plan.model.architecture.expert_axes, {*plan.laid.values()}
    consumed = frozenset[str]().union(*(layout.dealt for layout in laid if layout.split == "row"))
    inputs = frozenset[str]().union(*(layout.rule.dims[dim].axes for layout in laid for dim in layout.rule.input_dims))
    roles_of = {}
    for parameter, names in sources.items():
        layout = plan.layouts[names[0]]
        if any(plan.layouts[name].split != layout.split for name in names):
            raise PlanError(
                f"the tensors {', '.join(names[:3])} become one parameter, but lie differently on the ranks"
            )
        along = plan.mesh.varying([layout.boxes.get(rank) for rank in range(plan.mesh.size)])
        along_experts = experts_along(plan.mesh) if layout.dealt & experts else frozenset()
        is_gathered = layout.split in {"column", "vector"} and not layout.dealt & consumed
        is_whole = is_gathered and bool(layout.dealt & inputs)
        roles_of[parameter] = Role(layout.split, names[0], layout, along, along_experts, is_gathered, is_whole)
    return roles_of


def positions_of(model: Model) -> int | None:
    """Return the number of positions in a model's table of positions; None if it computes them."""
    tables = (
        kind for kind in model.kinds if len(kind.shape) == 2 and kind.rule.dims[0].axes & {"positions", "dpositions"}
    )
    limits = [kind.shape[0] for kind in tables]
    stated = model.sizes.settings.get("max_position_embeddings")  # some tables have a few rows more
    first = model.sizes.of({}).get("first_position", 0)  # RoBERTa's are behind the padding's
    return min([*limits, *([stated] if isinstance(stated, int) else [])]) - first if limits else None


def experts_along(mesh: Mesh) -> frozenset[str]:
    """The dimensions of a mesh that deal experts."""
    return mesh.varying([mesh.coordinates(rank).get("ep") for rank in range(mesh.size)])


def expert_shares(rank: Rank, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Share]:
    """Return the rank's share of the experts in each parameter of which it lacks some."""
    plan, experts, shares_of_rank = rank.plan, rank.plan.model.architecture.expert_axes, dict[str, Share]()
    for parameter, names in sources.items():
        if (kind := plan.model.kind_of.get(names[0])) is not None:
            for axis in plan.laid[kind].dealt & experts:
                shares_of_rank[parameter] = plan.shares(kind, rank.rank)[axis]
    return shares_of_rank
