"""The plan: the part of every tensor of a model on each rank of a mesh.

The runs of one dimension come from ``formats/notation/axes.py``, the rule of each tensor from ``binding.py``, and
whether the degrees are possible from ``degrees.py``. For another program's tensors see ``arrangement.py``.

A rank's config.json has the sizes that the rank owns.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from reshard.formats.errors import NotationError, PlanError, refused
from reshard.formats.files.safetensors import DTYPE_BITS
from reshard.formats.mesh import Mesh, mesh_of
from reshard.formats.notation.architecture import Architecture, is_index
from reshard.formats.notation.axes import Dim, Run, Shape, Share, Split, owned
from reshard.mesh.degrees import check_degrees, valid_degrees
from reshard.mesh.stages import staged, with_stages
from reshard.model.model import Kind, Model, padded_sizes, padding_for, shares_of


@dataclass(frozen=True)
class Box:
    """A rank's part of a tensor: the owned runs of each padded dimension, and the local shape as it is stored."""

    dims: tuple[tuple[Run, ...], ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """The parts of tensors on a mesh. Tensors of equal rule, sizes and shape share a layout."""

    rule: Shape
    """The rule, unfolded (see ``Dim.unfolded``) for scales or packed integers that are stored in one row."""
    full: tuple[int, ...]
    """The shape in the unsplit checkpoint, unfolded like the rule."""
    padded: tuple[int, ...]
    """``full`` with the zeros that a degree needs."""
    boxes: Mapping[int, Box]
    """The part of each rank; a rank without a part (it holds other experts or layers) is absent."""
    ranks: int
    """The number of all ranks."""
    stored: tuple[int, ...]
    """The shape as it is stored in the unsplit checkpoint."""
    dealt: frozenset[str]
    """The axes that are divided between ranks: axes of the shape or, like experts, of the tensors' names."""
    split: Split
    """The resulting kind of split (see ``Shape.split``)."""

    @cached_property
    def parallel_dims(self) -> frozenset[int]:
        """The dimensions of which ranks have parts."""
        return frozenset(i for i, dim in enumerate(self.rule.dims) if dim.axes & self.dealt)

    @property
    def dealt_by_name(self) -> bool:
        """Whether some rank has no part, because it holds other experts or layers."""
        return len(self.boxes) < self.ranks

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return not self.parallel_dims and not self.dealt_by_name

    @cached_property
    def empty(self) -> frozenset[int]:
        """The ranks that have a part without elements."""
        return frozenset(rank for rank, box in self.boxes.items() if 0 in box.shape and 0 not in self.full)

    @cached_property
    def numbers(self) -> int:
        """The numbers of a tensor on all ranks together, also of one that is packed."""
        return sum(
            math.prod(
                sum(run.length for run in runs) * dim.step // dim.per
                for runs, dim in zip(box.dims, self.rule.dims, strict=True)
            )
            for box in self.boxes.values()
        )

    def runs(self, dim: int) -> list[tuple[Run, ...]]:
        """The runs of a dimension that each rank owns."""
        return [self.boxes[rank].dims[dim] if rank in self.boxes else () for rank in range(self.ranks)]


@dataclass(frozen=True, repr=False)
class Plan:
    """The part of every tensor on each rank of a mesh."""

    model: Model
    mesh: Mesh
    padding: Mapping[str, int]
    """The padded size of each axis that is padded."""
    laid: Mapping[Kind, Layout]
    """The layout of the tensors of each kind."""
    _layouts: dict[tuple[object, ...], Layout] = field(init=False, repr=False, compare=False, default_factory=dict)
    """A cache that all arrangements of this plan share."""

    def layout(self, kind: Kind, dealt: str | None = None) -> Layout:
        """Return the layout of the tensors of a kind, or of parts of them, on the mesh. Equal layouts are one object.

        With ``dealt``, tp divides this axis and no other. Raises PlanError.
        """
        architecture, mesh, sizes = self.model.architecture, self.mesh, kind.sizes
        shares = shares_of(architecture, mesh, 0, sizes, kind.axes) if kind.places else {}
        dealt_by_name = [(axis, index) for axis, index in kind.places if axis in shares and shares[axis].parts > 1]
        parts = tuple((axis, index * shares[axis].parts // sizes[axis]) for axis, index in dealt_by_name)
        key = (kind.rule, kind.indices, kind.shape, DTYPE_BITS[kind.dtype] % 8, parts, kind.stages, dealt)
        if key in self._layouts:
            return self._layouts[key]
        ranks = [rank for rank in range(mesh.size) if kind.stages is None or mesh.stage(rank) in kind.stages]
        if parts:
            shares_of_ranks = {rank: shares_of(architecture, mesh, rank, sizes, kind.axes) for rank in ranks}
            ranks = [r for r in ranks if all(shares_of_ranks[r][axis].index == part for axis, part in parts)]
        if dealt is not None:
            architecture = replace(architecture, families={**architecture.families, "tp": ((dealt,),)})
        padded, rule, boxes = padded_sizes(sizes, self.padding), kind.rule.unfolded(sizes), dict[int, Box]()
        for rank in ranks:
            shares = shares_of(architecture, mesh, rank, padded, kind.axes)
            try:
                runs = [owned(dim, padded, shares) for dim in rule.dims]
            except NotationError as error:
                why = f"tensor '{kind.name}' cannot be split over {mesh}: {error.message}"
                raise PlanError(why, error.hint) from None
            lengths = iter([sum(run.length for run in dim) for dim in runs])
            shape = tuple(math.prod(itertools.islice(lengths, len(dim.unfolded(sizes)))) for dim in kind.rule.dims)
            boxes[rank] = Box(tuple(runs), shape)
        shares = shares_of(architecture, mesh, 0, padded, kind.axes)
        axes = frozenset(axis for axis in kind.axes & shares.keys() if shares[axis].parts > 1)
        for dim in kind.rule.dims:
            if dim.axis is None and (inside := dim.axes & self.padding.keys()):
                why = f"the axis '{min(inside)}' is not alone in '{dim}', so it cannot be padded"
                raise PlanError(f"tensor '{kind.name}': {why}")
        _check_every_element_is_owned(architecture, kind, axes)
        split, full = rule.split(axes, architecture.expert_axes), rule.sizes(sizes)
        self._layouts[key] = Layout(rule, full, rule.sizes(padded), boxes, mesh.size, kind.shape, axes, split)
        return self._layouts[key]

    @property
    def valid_degrees(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism that are possible."""
        return tuple(valid_degrees(self.model))

    @cached_property
    def unsplit(self) -> Plan:
        """The same padded sizes on one rank."""
        return make_plan(self.model, Mesh(), padding=self.padding)

    @cached_property
    def layouts(self) -> Mapping[str, Layout]:
        """The layout of each tensor, by its name."""
        return {name: self.laid[kind] for name, kind, _ in self.model.tensors}

    def boxes(self, rank: int) -> dict[Kind, Box]:
        """A rank's part of the tensors of each kind; kinds of which it holds nothing are absent."""
        return {kind: layout.boxes[rank] for kind, layout in self.laid.items() if rank in layout.boxes}

    def shares(self, kind: Kind, rank: int) -> dict[str, Share]:
        """A rank's share of each axis that is split, for the tensors of a kind."""
        sizes = padded_sizes(kind.sizes, self.padding)
        return shares_of(self.model.architecture, self.mesh, rank, sizes, kind.axes)

    def rank_sizes(self, rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """The size of each axis on a rank."""
        return {axis: run.length for axis, run in self.rank_runs(rank, sizes).items()}

    def rank_runs(self, rank: int, sizes: Mapping[str, int]) -> dict[str, Run]:
        """The indices that a rank has along each axis."""
        padded, architecture = padded_sizes(sizes, self.padding), self.model.architecture
        shares = shares_of(architecture, self.mesh, rank, padded, frozenset())
        if self.mesh.same_ranks:  # an axis that only experts have is not split by tp
            outside = {axis for axes in self.model.axis_sets(experts=False) for axis in axes}
            shares = {axis: part for axis, part in shares.items() if axis in outside}
            shares |= shares_of(architecture, self.mesh, rank, padded, architecture.expert_axes)
        return {axis: shares[axis].run(size) if axis in shares else Run(0, size) for axis, size in padded.items()}


def make_plan(
    model: Model,
    mesh: Mesh,
    *,
    pad: bool = True,
    pad_to: int = 1,
    padding: Mapping[str, int] | None = None,
    lacking: Collection[str] = (),
) -> Plan:
    """Split a model's axes over the ranks of a mesh.

    The axes that may be padded (the vocabulary) are padded to a multiple of ``pad_to``. With ``pad=False`` an axis that
    does not divide is refused. ``padding`` gives the padded sizes of existing shards. Raises PlanError that names the
    axis, its size and the valid degrees, or a tensor that no pipeline stage can have alone. Its hint does not name
    options that are ``lacking`` in a format.
    """
    mesh = with_stages(model, mesh)
    check_degrees(model, mesh, pad=pad, lacking=lacking)
    model = staged(model, mesh)
    if padding is None:
        padding = padding_for(model, mesh, pad_to) if pad else {}
    laid: dict[Kind, Layout] = {}
    plan = Plan(model, mesh, padding, laid)
    for kind in model.kinds:
        laid[kind] = plan.layout(kind)
        bits = DTYPE_BITS[kind.dtype]
        for box in laid[kind].boxes.values() if bits % 8 else ():
            for run in box.dims[-1] if box.dims else ():
                if run.offset * bits % 8 or run.length * bits % 8:
                    raise PlanError(
                        f"tensor '{kind.name}' ({kind.dtype}): elements {run.offset} to {run.end} "
                        f"of '{kind.rule.dims[-1]}' begin or end within a byte"
                    )
    return plan


def _check_every_element_is_owned(architecture: Architecture, tensor: Kind, dealt: frozenset[str]) -> None:
    """Raise PlanError if a mesh dimension splits two dimensions of a tensor: ranks would own only a diagonal."""
    for mesh_dim, families in architecture.families.items():
        split = [family for family in families if dealt & tensor.rule.axes & {*family}]
        repeated = any(_times(tensor.rule.dims, axis) > 1 for family in split for axis in dealt & {*family})
        if len(split) > 1 or repeated:
            raise PlanError(
                f"tensor '{tensor.name}': '{tensor.rule}' is split by {mesh_dim} in more than one place, "
                "so that no rank would own some of its elements"
            )


def _times(dims: Sequence[Dim], axis: str) -> int:
    """Count an axis in a product, over dimensions and factors; of the summands of a sum, only the highest count is
    taken.
    """
    return sum(
        max(sum(_times([f], axis) if isinstance(f, Dim) else f == axis for f in term.factors) for term in dim.summands)
        for dim in dims
    )


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The ranks that a model is split over: ``pp`` x ``ep`` x ``tp``.

    ``tp``: tensor parallelism, each large weight is split.
    ``ep``: expert parallelism, whole experts on each rank.
    ``pp``: pipeline parallelism, the layers in stages.
    ``pp_layers``: the number of layers of each stage, by default as equal as possible; says how many stages there are.
    ``same_ranks``: ``ep`` and ``tp`` use the same ranks, with the same degree.
    ``uneven``: if an axis has no equal split, or none that keeps scale blocks whole, the last ranks get less.
    ``pad_vocab``: a vocabulary that does not divide is padded, else it is refused.
    ``pad_vocab_to``: it is padded to a multiple of this, too.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    pp_layers: Sequence[int] = ()
    same_ranks: bool = False
    uneven: bool = False
    pad_vocab: bool = True
    pad_vocab_to: int = 1

    def __post_init__(self) -> None:
        if self.pad_vocab_to < 1:
            raise refused("pad_vocab_to", self.pad_vocab_to, "a multiple is at least 1")
        if not self.pad_vocab and self.pad_vocab_to != 1:
            why = "one pads and the other does not"
            raise refused("pad_vocab_to", self.pad_vocab_to, why, beside={"pad_vocab": False})

    @property
    def mesh(self) -> Mesh:
        """The mesh of these ranks. Raises PlanError for degrees that contradict each other."""
        stages = len(self.pp_layers) if self.pp == 1 and self.pp_layers else self.pp
        return mesh_of(self.tp, self.ep, self.same_ranks, stages, self.pp_layers)


def rank_config(plan: Plan, rank: int) -> dict[str, Any]:
    """The ``config.json`` of a rank: the source's, with the sizes of this rank."""
    architecture, config = plan.model.architecture, copy.deepcopy(dict(plan.model.config))
    target = config
    for key in architecture.section(config):
        target = target[key]
    for key, expression in architecture.config.items():
        for inner, last, indices in _settings_at(target, key.split("."), {}):
            original = inner.get(last)
            if isinstance(original, list) and expression.names & plan.model.sizes.varying:
                value: Any = [_at(plan, rank, expression, {"layer": i}) for i in range(len(original))]
            else:
                value = _at(plan, rank, expression, indices)
            if last in inner or (value is not None and inner is target):
                inner[last] = value
    return config


def with_sizes_of_whole(plan: Plan, config: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's ``config.json`` with the whole model's sizes in place of the rank's."""
    architecture, edited = plan.model.architecture, copy.deepcopy(dict(config))
    ours: dict[str, Any] = edited
    whole: dict[str, Any] = dict(plan.model.config)
    for key in architecture.section(plan.model.config):
        ours, whole = ours.get(key) or {}, whole[key]
    for key, expression in architecture.config.items():
        if not expression.names & architecture.sizes.keys():
            continue
        places = zip(*(_settings_at(settings, key.split("."), {}) for settings in (ours, whole)), strict=False)
        for (inner, last, _), (outer, _, _) in places:
            inner.pop(last, None)
            inner |= {last: outer[last]} if last in outer else {}
    return edited


def _settings_at(
    settings: dict[str, Any], path: Sequence[str], indices: Mapping[str, int]
) -> Iterable[tuple[dict[str, Any], str, Mapping[str, int]]]:
    """Yield the places of a key of ``[config]``: the settings that hold it, the key's last part, and the indices in its
    path.
    """
    first, *path_left = path
    if not path_left:
        yield settings, first, indices
        return
    keys = [key for key in settings if is_index(key)] if first.startswith("{") else [first]
    for key in keys:
        if isinstance(settings.get(key), dict):
            index = {first[1:-1]: int(key)} if first.startswith("{") else {}
            yield from _settings_at(settings[key], path_left, {**indices, **index})


def _at(plan: Plan, rank: int, expression: Any, indices: Mapping[str, int]) -> Any:
    """The value of an expression of ``[config]`` on a rank.

    An axis is the rank's size. The id of a token is its row among the rank's own, of the vocabularies that the
    expression names; None if another rank has the row. ``whole`` are the settings of the whole model.
    """
    sizes = plan.model.sizes
    full = sizes.of(indices)
    runs = plan.rank_runs(rank, full)
    vocabularies = [axis for axis in plan.model.architecture.pad if axis in expression.names and axis in runs]

    def look_up(name: str) -> Any:
        value = sizes.settings.get(name)
        if name in runs:
            return runs[name].length
        if vocabularies and name.endswith("_token_id") and isinstance(value, int):
            rows = [(value % full[axis] if value < 0 else value) - runs[axis].offset for axis in vocabularies]
            is_here = all(0 <= row < runs[axis].length for row, axis in zip(rows, vocabularies, strict=True))
            return rows[0] if is_here and len({*rows}) == 1 else None
        return sizes.settings if name == "whole" else value

    return expression.evaluate(look_up)
