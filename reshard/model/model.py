"""A model: the tensors of a checkpoint, each bound to the rule that covers it; the size of each axis, from config.json
or as measured on disk; and the share of each axis on each rank of a mesh.

How a family absorbs a degree is in ``formats/notation/axes.py`` (``deal``); here the families of a model are taken one
by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from reshard.formats.documents import LARGEST
from reshard.formats.errors import CheckpointError, NotationError, PlanError, brief
from reshard.formats.files.safetensors import DTYPE_BITS, TensorInfo
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import Architecture, Match, Rule
from reshard.formats.notation.axes import Shape, Share, deal, encloses, share
from reshard.formats.notation.expressions import Expression
from reshard.formats.quantization.companions import Scheme
from reshard.formats.quantization.methods import scheme_of

_DEEPEST, _MOST_STEPS = 30, 10_000
"""Limits for sizes that refer to other sizes: the length of a chain, and the number of look-ups. Built-in plans need 2
and 43.
"""


FEW = 10_000
"""The most by which a count of layers or experts may exceed the number of tensors: some tensors hold several of
them.
"""


def check_members(axis: str, count: int | None, tensors: int) -> None:
    """Raise CheckpointError for a count of layers or experts that is impossible with so few tensors.

    Later work takes time and memory for each of them, and anyone can write a large number into config.json.
    """
    if count is not None and count > tensors + FEW:
        raise CheckpointError(
            f"config.json: '{axis}' is {count:,}, and there are {tensors:,} tensors",
            "it is not the config.json of these tensors, or is damaged",
        )


class AxisSizes:
    """The size of every axis for a tensor's indices: from the config, else measured on disk."""

    def __init__(self, architecture: Architecture, config: Mapping[str, Any], measured: Mapping[str, int]) -> None:
        self._architecture = architecture
        self.settings = architecture.settings(config)
        self.measured: dict[str, int] = dict(measured)
        self._named = frozenset(
            segment[1:-1] for name in architecture.tensors for segment in name.split(".") if segment.startswith("{")
        )
        layers = {architecture.layers.text} & architecture.sizes.keys()
        self._index_names = self._named | layers  # also where no line has it: of an adapter to an embedding
        self._cache: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        self._steps = 0

    @cached_property
    def scheme(self) -> Scheme:
        """The quantization scheme that the config states."""
        return scheme_of(self.settings)

    def _indices_behind(self, expressions: Iterable[Expression]) -> frozenset[str]:
        """The axes in names whose index some of these expressions depend on, also through sizes that they name."""
        sizes, reached = self._architecture.sizes, frozenset[str]()
        names = frozenset[str]().union(*(expression.names for expression in expressions))
        while names - reached:
            reached |= names
            names = names.union(*(sizes[name].names for name in names - self._index_names if name in sizes))
        return names & self._index_names

    @cached_property
    def _used_indices(self) -> frozenset[str]:
        rules = (rule for rules in self._architecture.tensors.values() for rule in rules)
        conditions = [rule.when for rule in rules if rule.when is not None]
        return self._indices_behind([*self._architecture.sizes.values(), *conditions])

    def indices_for(self, rules: Sequence[Rule]) -> frozenset[str]:
        """The axes in names whose index decides which of a line's rules holds, or how the tensors are split.

        The sizes of all axes of a family matter, because they are split together.
        """
        axes = frozenset[str]().union(*(shape.axes for rule in rules for shape in rule.shapes))
        families = (family for families_of in self._architecture.families.values() for family in families_of)
        axes = axes.union(*(family for family in families if axes & {*family}))
        sizes = [self._architecture.sizes[axis] for axis in axes if axis in self._architecture.sizes]
        conditions = [rule.when for rule in rules if rule.when is not None and self._asks_for_index(rule.when)]
        return self._indices_behind([*sizes, *conditions])

    def _asks_for_index(self, condition: Expression) -> bool:
        """Whether the value may depend on an index. With no draft, that of ``draft and layer == 0`` does not."""
        try:
            self.evaluate(condition, None)
        except NotationError:
            return True
        return False

    @cached_property
    def varying(self) -> frozenset[str]:
        """The axes whose size depends on an index in the tensor's name."""
        sizes = self._architecture.sizes.items()
        return frozenset(axis for axis, expression in sizes if self._indices_behind([expression]))

    @cached_property
    def counts(self) -> dict[str, int]:
        """The size that the config gives to each axis in names."""
        named = {axis: self._config_size(axis, {}, ()) for axis in self._named & self._architecture.sizes.keys()}
        return {axis: size for axis, size in named.items() if size is not None}

    def key(self, indices: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """The indices of a tensor on which sizes depend."""
        if not self._used_indices:
            return ()
        return tuple((name, indices[name]) for name in sorted(self._used_indices) if name in indices)

    def of(self, indices: Mapping[str, int]) -> dict[str, int]:
        """The size of each axis for a tensor with these indices; an axis of unknown size is absent."""
        key = self.key(indices)
        if key not in self._cache:
            values = {axis: self._config_size(axis, dict(key), ()) for axis in self._architecture.sizes}
            self._cache[key] = {axis: value for axis, value in values.items() if value is not None}
        return {**self.measured, **self._cache[key]}

    def holds(self, match: Match) -> Rule | None:
        """The first rule of a line whose condition holds."""
        return next((rule for rule in match.rules if self.is_true(rule.when, match.indices)), None)

    def is_true(self, when: Expression | None, indices: Mapping[str, int] = {}) -> bool:
        """Whether a condition holds for a tensor with these indices; no condition always holds."""
        return when is None or bool(self.evaluate(when, indices))

    def evaluate(self, expression: Expression, indices: Mapping[str, int] | None) -> Any:
        """The value of an expression for a tensor with these indices; raises NotationError if it has none.

        None: they are not known, and an expression that asks for one has no value.
        """
        return expression.evaluate(lambda name: self.look_up(name, indices))

    def count(
        self, axis: str, indices: Mapping[str, int], *, without: Callable[[str], bool] = lambda _: False
    ) -> int | None:
        """The size that the config gives to an axis, or None; settings for which ``without`` holds are ignored."""
        expression, self._steps = self._architecture.sizes.get(axis), 0
        if expression is None:
            return None
        try:
            value = expression.evaluate(lambda name: None if without(name) else self.look_up(name, indices, (axis,)))
        except NotationError:
            return None
        return int(value) if isinstance(value, (int, float)) else None

    def look_up(self, name: str, indices: Mapping[str, int] | None = {}, below: tuple[str, ...] = ()) -> Any:
        """The size of an axis, or else a setting of the config; None if there is neither. ``below`` are the axes whose
        sizes ask for it: within its own size, a name is a setting.
        """
        if name in self._index_names:
            if indices is None:
                raise NotationError("an index is not known")
            return indices.get(name)
        if name in self._architecture.sizes and name not in below:
            return self._config_size(name, indices, below)
        return self.settings.get(name)

    def _config_size(self, axis: str, indices: Mapping[str, int] | None, below: tuple[str, ...]) -> int | None:
        expression, plan = self._architecture.sizes[axis], self._architecture.name
        self._steps = self._steps + 1 if below else 1
        if len(below) > _DEEPEST or self._steps > _MOST_STEPS:
            raise PlanError(f"plan '{plan}': the sizes refer to each other without end")
        try:
            value = expression.evaluate(lambda name: self.look_up(name, indices, (*below, axis)))
        except NotationError as error:
            if indices is None:
                raise
            raise PlanError(
                f"config.json does not fit the plan '{plan}': axis '{axis}' = {error.message}", error.hint
            ) from None
        if isinstance(value, float) and value.is_integer():  # a width times a factor
            value = int(value)
        if value is not None and (type(value) is not int or not 0 <= value <= LARGEST):
            raise PlanError(f"config.json: axis '{axis}' = '{expression.text}' is {brief(value)}, not a size")
        return value


class FullTensor(NamedTuple):
    """A tensor of the unsplit checkpoint that is in no file as it is. ``shape`` is None where the rule gives it;
    ``local`` is one rank's shape, where the full shape is not known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    where: str
    local: tuple[int, ...] | None = None


AnyTensor = FullTensor | TensorInfo
"""A tensor of the unsplit checkpoint, as a header has it or without a file of its own."""


@dataclass(frozen=True, eq=False)
class Kind:
    """Tensors whose names differ only in indices that affect neither a size nor which rank has the tensor."""

    name: str
    """The name of the first."""
    dtype: str
    template: str
    pattern: str
    """A name with all indices as ``{layer}``, in the architecture's own spelling."""
    index_axes: tuple[str, ...]
    """The axes of these indices."""
    rule: Shape
    indices: tuple[tuple[str, int], ...]
    """The indices in the name on which sizes depend."""
    sizes: Mapping[str, int]
    """The size of each axis at these indices."""
    places: tuple[tuple[str, int], ...]
    """The indices along axes that may be split over ranks (experts)."""
    shape: tuple[int, ...]
    """The full shape."""
    stated: Shape | None
    """The rule of the weight, if this tensor's values state the shape of a weight."""
    advice: str | None
    """The hint for an error in which a rank's boundary would cut one of its scale blocks."""
    count: int
    """The number of tensors."""
    layers: frozenset[int]
    """The tensors' indices along the outermost axis of the name that is not split."""
    stages: frozenset[int] | None = None

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes of its shape, and the axes in its name that may be split."""
        return self.rule.axes | {axis for axis, _ in self.places}

    @cached_property
    def rule_in_rows(self) -> Shape:
        """The rule with blocks that do not reach into another row counted within each row."""
        return self.rule.in_rows(self.sizes)


class BoundTensor(NamedTuple):
    """A tensor's name, its kind, and all indices in its name, outermost first."""

    name: str
    kind: Kind
    at: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """A key of ``DTYPE_BITS``."""
        return self.kind.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape, as it is stored."""
        return self.kind.shape

    @property
    def indices(self) -> dict[str, int]:
        """All indices in its name, by their axes."""
        return dict(zip(self.kind.index_axes, self.at, strict=True))

    @property
    def template(self) -> str:
        """The rule line that covers it."""
        return self.kind.template


@dataclass(frozen=True)
class Model:
    """A checkpoint and its architecture: every tensor has a rule, and its shape on disk fits the rule."""

    architecture: Architecture
    config: Mapping[str, Any]
    sizes: AxisSizes
    tensors: tuple[BoundTensor, ...]
    kinds: tuple[Kind, ...]

    @cached_property
    def kind_of(self) -> Mapping[str, Kind]:
        """The kind of each tensor, by its name."""
        return {name: kind for name, kind, _ in self.tensors}

    @cached_property
    def used_templates(self) -> frozenset[str]:
        """The rule lines that cover a tensor of this checkpoint."""
        return frozenset(kind.template for kind in self.kinds)

    @cached_property
    def in_blocks(self) -> tuple[Kind, ...]:
        """The kinds that count a dimension in blocks (scales, packed integers), one for each rule and its sizes."""
        blocked = [kind for kind in self.kinds if any(dim.counted[0] > 1 for dim in kind.rule.dims)]
        return tuple({(kind.rule, kind.indices): kind for kind in reversed(blocked)}.values())

    @cached_property
    def channels(self) -> frozenset[str]:
        """The axes that may be split unevenly.

        Each is alone in its tp family, is not padded, and encloses no other axis (a head axis encloses its elements).
        """
        alone = {family[0] for family in self.architecture.families.get("tp", ()) if len(family) == 1}
        rules = (rule for template in self.used_templates for rule in self.architecture.tensors[template])
        dims = {dim for rule in rules for shape in rule.shapes for dim in shape.dims}
        enclosing = {axis for axis in alone for dim in dims if encloses(dim, axis)}
        return frozenset(alone - enclosing - {*self.architecture.pad})

    @cached_property
    def with_channels(self) -> tuple[Kind, ...]:
        """The kinds with an axis that may be split unevenly, one for each rule, its sizes and its bits."""
        kinds = (kind for kind in self.kinds if kind.rule.axes & self.channels)
        return tuple({(k.rule, k.indices, k.axes, DTYPE_BITS[k.dtype]): k for k in kinds}.values())

    @cached_property
    def _axes(self) -> frozenset[tuple[frozenset[str], tuple[tuple[str, int], ...]]]:
        return frozenset((kind.axes, kind.indices) for kind in self.kinds)

    def axis_sets(self, *, experts: bool = True) -> tuple[Mapping[str, int], ...]:
        """The distinct sets of axis sizes: one, unless sizes depend on the layer.

        Without ``experts``, tensors of experts do not count.
        """
        axes: dict[tuple[tuple[str, int], ...], set[str]] = {}
        for names, indices in self._axes:
            if experts or not names & self.architecture.expert_axes:
                axes.setdefault(indices, set()).update(names)
        sizes_of = {indices: self.sizes.of(dict(indices)) for indices in axes}
        sets = (tuple((name, sizes_of[at][name]) for name in sorted(names)) for at, names in axes.items())
        return tuple(map(dict, dict.fromkeys(sets)))


def in_order(tensors: Iterable[BoundTensor]) -> list[BoundTensor]:
    """Tensors in the order in which they are stored: wider dtypes first, otherwise the order of the source."""
    return sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.kind.dtype])


def shares_of(
    architecture: Architecture, mesh: Mesh, rank: int, sizes: Mapping[str, int], axes: AbstractSet[str]
) -> dict[str, Share]:
    """A rank's share of each axis, in a tensor with these axes; an axis that is not split is absent."""
    shares: dict[str, Share] = {}
    coordinates = mesh.coordinates(rank)
    for mesh_dim, degree in mesh.degrees:
        if mesh.same_ranks and (mesh_dim == "ep") != bool(axes & architecture.expert_axes):
            continue
        for family in architecture.families.get(mesh_dim, ()):
            present = [axis for axis in family if axis in sizes]
            unit = mesh.unit(family[0]) if mesh_dim == "tp" else None
            if unit is not None:
                shares[family[0]] = Share(degree, coordinates[mesh_dim], unit)
                continue
            parts = deal(present, sizes, degree) if present else None
            if parts is not None:
                shares |= share(parts, coordinates[mesh_dim])
    return shares


def sizes_of_parts(sizes: Mapping[str, int], shares: Mapping[str, Share]) -> dict[str, int]:
    """The size of each axis after the split into these shares."""
    return {axis: shares[axis].run(size).length if axis in shares else size for axis, size in sizes.items()}


def padding_for(model: Model, mesh: Mesh, pad_to: int) -> dict[str, int]:
    """The padded size of each axis that may be padded and does not divide by its degree or by ``pad_to``."""
    padding: dict[str, int] = {}
    degrees = dict(mesh.degrees)
    for mesh_dim, families in model.architecture.families.items():
        degree, axes = degrees.get(mesh_dim, 1), {axis for family in families for axis in family}
        for axis in model.architecture.pad:
            for sizes in model.axis_sets():
                size = sizes.get(axis)
                multiple = math.lcm(degree, pad_to)
                if axis in axes and size is not None and size % multiple:
                    padding[axis] = -(-size // multiple) * multiple
    return padding


def padded_sizes(sizes: Mapping[str, int], padding: Mapping[str, int]) -> dict[str, int]:
    """All sizes, with padded sizes in place of the model's own."""
    return {axis: padding.get(axis, size) for axis, size in sizes.items()}
