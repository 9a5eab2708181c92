"""The plan: an architecture's rules bound to a checkpoint's tensors, and what each rank of a mesh owns of them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from formats.documents import LARGEST
from formats.errors import NotationError, PlanError, brief
from formats.files.safetensors import DTYPE_BITS
from formats.mesh import Mesh
from formats.notation.architecture import Architecture, Match, Rule, is_index
from formats.notation.axes import Dim, Factor, Run, Shape, Share, deal, degrees, encloses, owned, share, unit_of
from formats.notation.expressions import Expression
from formats.quantization.block_size import block_size
from formats.quantization.companions import (
    Companion,
    Scheme,
    scheme_of,
    shape_of,
    stated_shape,
    takes_heads,
    unknown_method,
)
from reshard.planning.reasons import cuts_blocks, does_not_divide, too_few_units


class FullTensor(NamedTuple):  # there may be half a million of these: a dataclass takes four times as long to make
    """A tensor of the unsplit checkpoint; ``where`` names its file in errors, ``shape`` is None where only rules know
    it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    where: str
    held: tuple[int, ...] | None = None  # what one rank has, where the full shape is not known


@dataclass(frozen=True)
class Box:
    """What a rank holds of a tensor: the owned runs of each padded dimension, and its local shape as it is stored."""

    dims: tuple[tuple[Run, ...], ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """One way in which tensors lie on a mesh, shared by all tensors of equal rule, sizes and shape.

    ``stored`` is the shape in the unsplit checkpoint. ``full`` is the same but for what belongs to quantized weights
    and is stored in one row, which is unfolded (see ``Dim.unfolded``), as is ``rule``; ``padded`` with the zeros that
    a degree needs. ``boxes`` has an entry a rank, None for a rank that holds nothing of it (another rank's expert).
    ``dealt_by_name`` says that there may be such ranks.
    """

    rule: Shape
    full: tuple[int, ...]
    padded: tuple[int, ...]
    boxes: tuple[Box | None, ...]
    stored: tuple[int, ...]
    parallel_dims: frozenset[int]
    dealt_by_name: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of it."""
        return not self.parallel_dims and not self.dealt_by_name

    def box(self, rank: int) -> Box:
        """What a rank holds that is known to hold some of it."""
        box = self.boxes[rank]
        assert box is not None
        return box


class Entry(NamedTuple):
    """A tensor, the rule line that covers it, and its layout."""

    name: str
    dtype: str
    template: str
    layout: Layout
    stated: Layout | None = None
    """That of the weight, for a tensor that states which shape it has."""


_DEEPEST, _MOST_STEPS = 30, 10_000
"""Sizes that refer to a further one, and those that are looked up to know all. Built-in plans need 2 and 43."""


class AxisSizes:
    """The size of every axis for a tensor's indices: from the config, or else as measured on disk."""

    def __init__(self, architecture: Architecture, config: Mapping[str, Any], known: Mapping[str, int]) -> None:
        self._architecture = architecture
        self.settings = architecture.settings(config)
        self.measured: dict[str, int] = dict(known)
        self._index_names = frozenset(
            segment[1:-1] for name in architecture.tensors for segment in name.split(".") if segment.startswith("{")
        )
        self._cache: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        self._steps = 0

    @cached_property
    def scheme(self) -> Scheme:
        """How weights are quantized, by the config."""
        return scheme_of(self.settings)

    @cached_property
    def _used_indices(self) -> frozenset[str]:
        expressions = list(self._architecture.sizes.values())
        expressions += [r.when for rules in self._architecture.tensors.values() for r in rules if r.when is not None]
        return self._index_names & frozenset().union(*(expression.names for expression in expressions))

    def indices_for(self, rules: Sequence[Rule]) -> frozenset[str]:
        """The axes in names on whose index it depends which of a line's rules holds, and how its tensors are split.

        An axis is dealt together with its family.
        """
        axes = frozenset().union(*(shape.axes for rule in rules for shape in rule.shapes))
        families = (family for found in self._architecture.families.values() for family in found)
        axes = axes.union(*(family for family in families if axes & {*family}))
        names = frozenset().union(*(rule.when.names for rule in rules if rule.when))
        while True:
            sizes = [self._architecture.sizes[axis] for axis in axes if axis in self._architecture.sizes]
            names = names.union(*(expression.names for expression in sizes))
            more = names - self._index_names - axes
            if not more & self._architecture.sizes.keys():
                return names & self._index_names
            axes |= more

    @cached_property
    def varying(self) -> frozenset[str]:
        """The axes whose size depends on an index in the tensor's name."""
        sizes, found = self._architecture.sizes, frozenset[str]()
        while True:
            more = frozenset(axis for axis, e in sizes.items() if e.names & (self._index_names | found))
            if more == found:
                return found
            found = more

    @cached_property
    def configured(self) -> frozenset[str]:
        """The axes in names whose size the config gives."""
        return frozenset(axis for axis in self._index_names if axis in self.counts)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many indices a name may have, of each axis that stands in names."""
        named = {axis: self._config_size(axis, {}, ()) for axis in self._index_names & self._architecture.sizes.keys()}
        return {axis: size for axis, size in named.items() if size is not None}

    def key(self, indices: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """What of a tensor's indices its sizes depend on."""
        if not self._used_indices:
            return ()
        return tuple((name, indices[name]) for name in sorted(self._used_indices) if name in indices)

    def of(self, indices: Mapping[str, int]) -> dict[str, int]:
        """The sizes for a tensor with these indices; an axis that nobody knows is absent."""
        key = self.key(indices)
        if key not in self._cache:
            self._steps = 0
            values = {axis: self._config_size(axis, dict(key), ()) for axis in self._architecture.sizes}
            self._cache[key] = {axis: value for axis, value in values.items() if value is not None}
        return {**self.measured, **self._cache[key]}

    def holds(self, match: Match) -> Rule | None:
        """The first rule of a line whose condition holds."""
        self._steps = 0
        for rule in match.rules:
            if rule.when is None or self.evaluate(rule.when, match.indices):
                return rule
        return None

    def evaluate(self, expression: Expression, indices: Mapping[str, int]) -> Any:
        """What an expression gives for a tensor with these indices."""
        return expression.evaluate(lambda name: self._look_up(name, indices, ()))

    def count(
        self, axis: str, indices: Mapping[str, int], *, without: Callable[[str], bool] = lambda _: False
    ) -> int | None:
        """The size that the config gives an axis, as if it lacked some settings; None if it gives none."""
        expression = self._architecture.sizes.get(axis)
        if expression is None:
            return None
        try:
            value = expression.evaluate(lambda name: None if without(name) else self._look_up(name, indices, (axis,)))
        except NotationError:
            return None
        return int(value) if isinstance(value, (int, float)) else None

    def _config_size(self, axis: str, indices: Mapping[str, int], below: tuple[str, ...]) -> int | None:
        expression = self._architecture.sizes[axis]
        self._steps += 1
        if len(below) > _DEEPEST or self._steps > _MOST_STEPS:
            raise PlanError(f"plan '{self._architecture.name}': the sizes refer to each other without end")
        try:
            value = expression.evaluate(lambda name: self._look_up(name, indices, (*below, axis)))
        except NotationError as error:
            plan = self._architecture.name
            raise PlanError(
                f"config.json does not fit the plan '{plan}': axis '{axis}' = {error.message}", error.hint
            ) from None
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # a width times a factor
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise PlanError(f"config.json: axis '{axis}' = '{expression.text}' is {brief(value)}, not a size")
        return value

    def _look_up(self, name: str, indices: Mapping[str, int], below: tuple[str, ...]) -> Any:
        if name in self._index_names:
            return indices.get(name)
        if name in self._architecture.sizes and name not in below:
            return self._config_size(name, indices, below)
        return self.settings.get(name)


@dataclass(frozen=True, eq=False)
class Kind:
    """The tensors that differ in nothing but in indices on which nothing depends, with the shape that holds for them.

    ``name`` is that of the first of them. ``indices`` are those of a name that sizes depend on, ``places`` those along
    axes that may be dealt to ranks (experts). There are ``count`` of them, in ``layers``: their indices along the
    outermost axis of a name that is not dealt.
    """

    name: str
    dtype: str
    template: str
    rule: Shape
    indices: tuple[tuple[str, int], ...]
    places: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    stated: Shape | None
    """The weight's, for a tensor that states which shape it has."""
    advice: str | None
    """What to do where a rank's boundary would cut a block of it."""
    count: int
    layers: frozenset[int]

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes of its shape, and those of its name that may be dealt."""
        return self.rule.axes | {axis for axis, _ in self.places}


class BoundTensor(NamedTuple):
    """A tensor by its name, of which kind it is, and all indices in its name, outermost first."""

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
    def template(self) -> str:
        """The rule line that covers it."""
        return self.kind.template


@dataclass(frozen=True)
class Model:
    """An architecture that fits a checkpoint: every tensor has a rule, and every rule the shape on disk."""

    architecture: Architecture
    config: Mapping[str, Any]
    sizes: AxisSizes
    tensors: tuple[BoundTensor, ...]
    kinds: tuple[Kind, ...]

    @cached_property
    def used_templates(self) -> frozenset[str]:
        """The rule lines that cover a tensor of this checkpoint."""
        return frozenset(kind.template for kind in self.kinds)

    @cached_property
    def in_blocks(self) -> tuple[Kind, ...]:
        """What counts a dimension in blocks (scales and packed integers), one for each rule and its sizes."""
        blocked = [kind for kind in self.kinds if any(dim.counted[0] > 1 for dim in kind.rule.dims)]
        return tuple({(kind.rule, kind.indices): kind for kind in reversed(blocked)}.values())

    @cached_property
    def expert_axes(self) -> frozenset[str]:
        """The axes that expert parallelism deals."""
        return frozenset(axis for family in self.architecture.families.get("ep", ()) for axis in family)

    @cached_property
    def channels(self) -> frozenset[str]:
        """The axes that may be dealt unevenly: each is a family of its own over tp that is not padded, and nothing lies
        within an index of it, as a head's elements lie within a head.
        """
        alone = {family[0] for family in self.architecture.families.get("tp", ()) if len(family) == 1}
        rules = (rule for template in self.used_templates for rule in self.architecture.tensors[template])
        dims = {dim for rule in rules for shape in rule.shapes for dim in shape.dims}
        enclosing = {axis for axis in alone for dim in dims if encloses(dim, axis)}
        return frozenset(alone - enclosing - {*self.architecture.pad})

    @cached_property
    def with_channels(self) -> tuple[Kind, ...]:
        """What has an axis which may be dealt unevenly, one for each rule, its sizes and its bits."""
        found = (kind for kind in self.kinds if kind.rule.axes & self.channels)
        return tuple({(k.rule, k.indices, k.axes, DTYPE_BITS[k.dtype]): k for k in found}.values())

    @cached_property
    def _axes(self) -> frozenset[tuple[frozenset[str], tuple[tuple[str, int], ...]]]:
        return frozenset((kind.axes, kind.indices) for kind in self.kinds)

    def axis_sets(self, *, experts: bool = True) -> tuple[Mapping[str, int], ...]:
        """The distinct sizes of axes that occur (one, unless sizes depend on the layer); without those of experts
        alone, if so asked.
        """
        axes: dict[tuple[tuple[str, int], ...], set[str]] = {}
        for names, indices in self._axes:
            if experts or not names & self.expert_axes:
                axes.setdefault(indices, set()).update(names)
        restricted = []
        for indices, found in axes.items():
            sizes = self.sizes.of(dict(indices))
            restricted.append({name: sizes[name] for name in sorted(found)})
        return tuple(dict(pairs) for pairs in dict.fromkeys(tuple(sizes.items()) for sizes in restricted))


def in_order(tensors: Iterable[BoundTensor]) -> list[BoundTensor]:
    """Tensors in the order in which they are to be stored: wide items first, then as in the source."""
    return sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.kind.dtype])


def bind(
    architecture: Architecture,
    config: Mapping[str, Any],
    tensors: Iterable[FullTensor],
    *,
    known: Mapping[str, int] | None = None,
    every_rule: bool = False,
    mesh: Mesh | None = None,
    padding: Mapping[str, int] | None = None,
) -> Model:
    """Find the rule of every tensor and check it against the shape on disk.

    Of a rule with several shapes the one that fits is kept, in the model's architecture too. ``known`` gives sizes
    measured earlier; ``mesh`` and ``padding`` say how tensors lie of which only a rank's shape is known. With
    ``every_rule`` a rule that covers no tensor is an error (a user's plan). Raises PlanError that names the file, the
    tensor, the rule, and both shapes.
    """
    sizes = AxisSizes(architecture, config, known or {})
    tensors = list(tensors)
    alike = _Alike(architecture, sizes, {tensor.name: tensor.dtype for tensor in tensors})
    of_each = [alike.take_in(tensor) for tensor in tensors]
    covered = alike.covered
    several = [each for each in covered if len(each.shapes) > 1]
    _measure(sizes, (each for each in covered if len(each.shapes) == 1))
    architecture = _with_layouts_on_disk(architecture, several, sizes, mesh or Mesh(), padding or {})
    _measure(sizes, several)
    kinds = {each: _kind(each, alike) for each in covered}
    bound = (BoundTensor(tensor.name, kinds[each], at) for tensor, (each, at) in zip(tensors, of_each, strict=True))
    model = Model(architecture, config, sizes, tuple(bound), tuple(kinds.values()))
    unused = [template for template in architecture.tensors if template not in model.used_templates]
    if every_rule and unused:
        raise PlanError(
            f"the rule '{unused[0]}' of plan '{architecture.name}' covers no tensor", "remove it from the plan file"
        )
    return model


def lines_for(architecture: Architecture, config: Mapping[str, Any], tensors: Iterable[FullTensor]) -> Architecture:
    """An architecture with those lines alone that cover some of these tensors, whether or not they fit."""
    tensors, sizes = list(tensors), AxisSizes(architecture, config, {})
    dtypes = {tensor.name: tensor.dtype for tensor in tensors}
    matches = (_line_of(tensor, architecture, sizes, dtypes)[0] for tensor in tensors)
    used = {match.template for match in matches if match is not None}
    return replace(architecture, tensors={name: rules for name, rules in architecture.tensors.items() if name in used})


@dataclass(eq=False)
class _Covered:
    """What tensors that are alike have in common: the line that covers them, the rule of that line, the shapes that
    they may have by it, and what they belong to. ``tensor`` and ``match`` are the first one's.

    ``axes`` are those of the indices in their names; ``indices`` the indices that all of them have and that sizes
    depend on; ``all_at`` has the indices of each.
    """

    tensor: FullTensor
    match: Match
    rule: Rule
    shapes: tuple[Shape, ...]
    belonging: Companion | None = None
    tensors: list[FullTensor] = field(default_factory=list)
    all_at: list[tuple[int, ...]] = field(default_factory=list)
    axes: tuple[str, ...] = ()
    indices: tuple[tuple[str, int], ...] = ()

    @cached_property
    def seen(self) -> Mapping[str, frozenset[int]]:
        """All indices along each axis."""
        return dict(zip(self.axes, map(frozenset, zip(*self.all_at, strict=True)), strict=False))


@dataclass(frozen=True, eq=False)
class _Form:
    """Names that differ in numbers alone: the axes of those numbers that are indices, with their places among the
    numbers, and the axes along which tensors are not alike.
    """

    places: tuple[tuple[str, int], ...]
    apart: frozenset[str]

    @cached_property
    def at(self) -> tuple[int, ...]:
        """The places of the indices."""
        return tuple(place for _, place in self.places)

    @cached_property
    def apart_at(self) -> tuple[int, ...]:
        """The places of those that tell tensors apart."""
        return tuple(place for axis, place in self.places if axis in self.apart)


class _Alike:
    """Finds what covers a tensor, once for all that are alike: checkpoints have few kinds of tensors and many of each.

    Tensors are alike whose names differ in numbers alone, none of them an index on which it depends how they are split
    (a layer's, where layers have several sizes) or which rank holds them (an expert's), and which have the same dtype
    and shape.
    """

    def __init__(self, architecture: Architecture, sizes: AxisSizes, dtypes: Mapping[str, str]) -> None:
        self.architecture, self.sizes, self._dtypes = architecture, sizes, dtypes
        self.dealt = {axis for families in architecture.families.values() for family in families for axis in family}
        self._forms: dict[tuple[object, ...], _Form] = {}
        self._covered: dict[tuple[object, ...], _Covered] = {}
        self._layers: dict[frozenset[int], frozenset[int]] = {}
        self._at: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def covered(self) -> tuple[_Covered, ...]:
        """What was found, in the order of the first tensors."""
        return tuple(self._covered.values())

    def take_in(self, tensor: FullTensor) -> tuple[_Covered, tuple[int, ...]]:
        """What covers a tensor, and the indices in its name. Raises PlanError if nothing does."""
        name, dtype, shape, _, held = tensor
        words, texts = self.architecture.form(name)
        spelled = (words, dtype, self.sizes.scheme.case(name, self._dtypes))
        form = self._forms.get(spelled)
        if form is None:
            form = self._forms[spelled] = self._form(tensor)
        numbers = [*map(int, texts)]
        at = tuple([numbers[place] for place in form.at])
        at = self._at.setdefault(at, at)
        key = (form, shape, held, *[numbers[place] for place in form.apart_at])
        found = self._covered.get(key)
        if found is None:
            found = self._covered[key] = _rule_of(tensor, self.architecture, self.sizes, self._dtypes)
            indices = {axis: numbers[place] for axis, place in form.places if axis in form.apart}
            found.axes, found.indices = tuple(axis for axis, _ in form.places), self.sizes.key(indices)
        found.tensors.append(tensor)
        found.all_at.append(at)
        return found, at

    def layers(self, each: _Covered) -> frozenset[int]:
        """The indices of the outermost axis that is not dealt, one set for all that have the same."""
        found = next((seen for axis, seen in each.seen.items() if axis not in self.dealt), frozenset[int]())
        return self._layers.setdefault(found, found)

    def _form(self, tensor: FullTensor) -> _Form:
        places = self.architecture.index_places(tensor.name)
        belonging = belonging_of(tensor.name, self._dtypes, self.architecture, self.sizes)
        match = self.architecture.match(belonging.weight if belonging else tensor.name)
        # without a match of its own it may go by any line of its attention, each with its condition
        apart = self.sizes.indices_for(match.rules) if match else frozenset(places)
        return _Form(tuple(places.items()), apart | self.dealt)


def _kind(each: _Covered, alike: _Alike) -> Kind:
    """What is known of tensors that are alike, once the shape on disk is known to fit."""
    tensor, match, rule, belonging = each.tensor, each.match, each.shapes[0], each.belonging
    method = unknown_method(alike.sizes.settings, tensor.name)
    hint = (
        f"it is quantized by {method}, a method that is not known here: {_UNQUANTIZED}"
        if method
        else (_WRONG_BLOCKS if belonging else _WRONG_RULE)
    )
    shape = _fit(tensor, rule, alike.sizes.of(match.indices), hint)
    _check_indices(each, alike.sizes)
    return Kind(
        name=tensor.name,
        dtype=tensor.dtype,
        template=match.template,
        rule=rule,
        indices=each.indices,
        places=tuple((axis, index) for axis, index in match.indices.items() if axis in alike.dealt),
        shape=shape,
        stated=stated_shape(each.rule.shapes[0]) if belonging and belonging.states_shape else None,
        advice=belonging.advice if belonging else None,
        count=len(each.tensors),
        layers=alike.layers(each),
    )


def _rule_of(tensor: FullTensor, architecture: Architecture, sizes: AxisSizes, dtypes: Mapping[str, str]) -> _Covered:
    match, belonging = _line_of(tensor, architecture, sizes, dtypes)
    if match is None:
        raise _no_rule(tensor, architecture, sizes.settings)
    rule = sizes.holds(match)
    if rule is None:
        raise PlanError(f"{tensor.where}: tensor '{tensor.name}': no condition of the rule '{match.template}' holds")
    on_disk = tensor.held if tensor.shape is None else tensor.shape
    if rule.shapes[0].is_open:  # no dimension is dealt, so that one rank's shape is the full one
        return _Covered(tensor, match, rule, (rule.shapes[0].closed(on_disk or ()),))
    if belonging is None:
        return _Covered(tensor, match, rule, rule.shapes)
    derived = [shape_of(belonging.patterns, shape, on_disk) for shape in rule.shapes]
    if None in derived:
        raise PlanError(
            f"{tensor.where}: tensor '{tensor.name}' has shape {list(tensor.shape or ())}; "
            f"for a weight '{rule.shapes[derived.index(None)]}' it should be one of "
            + ", ".join(f"'{pattern}'" for pattern in belonging.patterns)
        )
    return _Covered(tensor, match, rule, tuple(shape for shape in derived if shape is not None), belonging)


def _line_of(
    tensor: FullTensor, architecture: Architecture, sizes: AxisSizes, dtypes: Mapping[str, str]
) -> tuple[Match | None, Companion | None]:
    """The line that covers a tensor, or that of the quantized weight that it belongs to."""
    belonging = belonging_of(tensor.name, dtypes, architecture, sizes)
    if belonging is not None:
        return _weight_of(belonging, architecture, sizes), belonging
    return architecture.match(tensor.name), None


def _with_layouts_on_disk(
    architecture: Architecture,
    several: Sequence[_Covered],
    sizes: AxisSizes,
    mesh: Mesh,
    padding: Mapping[str, int],
) -> Architecture:
    """Leave each tensor the one shape that fits, and each rule of the architecture those that its tensors have.

    Where several fit one tensor, those decide of which the names end alike (all ``self_attn.qkv_proj`` and what belongs
    to them): they are laid out in one way.
    """
    fitting = [_layouts_on_disk(each, architecture, sizes, mesh, padding) for each in several]
    common: dict[str, set[int]] = {}
    for each, places in zip(several, fitting, strict=True):
        end = _ending(each.match.template)
        common[end] = common.get(end, {*places}) & {*places}
    chosen: dict[tuple[str, int], set[int]] = {}
    for each, places in zip(several, fitting, strict=True):
        left = places if len(places) == 1 else sorted(common[_ending(each.match.template)])
        if len({each.shapes[place].joined for place in left}) != 1:
            raise _layout_in_doubt(each, places)
        chosen.setdefault((each.match.template, each.match.rules.index(each.rule)), set()).add(left[0])
        each.shapes = (each.shapes[left[0]],)
    if not chosen:
        return architecture
    tensors = {
        template: tuple(
            replace(rule, shapes=tuple(shape for i, shape in enumerate(rule.shapes) if i in chosen[template, number]))
            if (template, number) in chosen
            else rule
            for number, rule in enumerate(rules)
        )
        for template, rules in architecture.tensors.items()
    }
    return replace(architecture, tensors=tensors)


def _ending(template: str) -> str:
    """The module's name behind the last index of a line's name."""
    return template.rpartition(".")[0].rpartition("}.")[2]


def _layouts_on_disk(
    each: _Covered, architecture: Architecture, sizes: AxisSizes, mesh: Mesh, padding: Mapping[str, int]
) -> list[int]:
    """Which of several shapes fit a tensor, as a whole or as a rank has its part of it."""
    found, tensor = sizes.of(each.match.indices), each.tensor
    if tensor.shape is None:
        skeleton = Model(architecture, sizes.settings, sizes, (), ())
        axes = frozenset().union(*(shape.axes for shape in each.shapes), each.match.indices)
        found = _local(skeleton, mesh, 0, _padded(found, padding), axes)
    on_disk = tensor.held if tensor.shape is None else tensor.shape
    given = [_sizes_or_none(shape, found) for shape in each.shapes]
    fitting = [place for place, lengths in enumerate(given) if lengths == on_disk]
    if fitting:
        return fitting
    shown = " and ".join(f"'{shape}' {list(lengths or ())}" for shape, lengths in zip(each.shapes, given, strict=True))
    raise PlanError(
        f"{tensor.where}: tensor '{tensor.name}' has shape {list(on_disk or ())}, and the rule gives {shown}",
        _WRONG_RULE,
    )


def _layout_in_doubt(each: _Covered, places: Sequence[int]) -> PlanError:
    tensor = each.tensor
    shown = " and ".join(f"'{each.shapes[place]}'" for place in places)
    return PlanError(
        f"{tensor.where}: tensor '{tensor.name}' has shape {list(tensor.shape or tensor.held or ())}, "
        f"which may be either of {shown}",
        "save the plan with 'reshard plan SOURCE --save FILE', leave one shape, pass it with --plan FILE",
    )


def _sizes_or_none(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    try:
        return shape.sizes(sizes)
    except NotationError:
        return None


def belonging_of(
    name: str, dtypes: Mapping[str, str], architecture: Architecture, sizes: AxisSizes
) -> Companion | None:
    """The quantized weight that a tensor belongs to (a packed one to itself); None of a weight as rules have it.

    ``dtypes`` are those of all tensors by name.
    """
    dtype = dtypes[name]
    packed = dtype in {"U8", "I8", "I32"}  # perhaps several values in one element: the weight's own rule may not fit
    return sizes.scheme.companion(name, dtype, dtypes) if packed or architecture.match(name) is None else None


def dequantized(plan: Plan) -> Plan:
    """The plan of the same model on the same mesh with plain weights in the place of quantized ones."""
    model, kept, weights = plan.model, [], set()
    dtypes = {tensor.name: tensor.dtype for tensor in model.tensors}
    for tensor in model.tensors:
        belonging = belonging_of(tensor.name, dtypes, model.architecture, model.sizes)
        if belonging is None:
            kept.append(FullTensor(tensor.name, tensor.dtype, tensor.shape, "plan"))
        else:
            weights.add(belonging.weight)
    if not weights:
        return plan
    missing = sorted(weights - {tensor.name for tensor in kept})
    tensors = [*kept, *(FullTensor(name, "BF16", None, "plan") for name in missing)]
    plain = bind(model.architecture, model.config, tensors, known=model.sizes.measured)
    return make_plan(plain, plan.mesh, padding=plan.padding)


def _weight_of(belonging: Companion, architecture: Architecture, sizes: AxisSizes) -> Match | None:
    """The line of the weight that a tensor belongs to."""
    if not belonging.of_attention:
        return architecture.match(belonging.weight)
    rules = ((match, sizes.holds(match)) for match in architecture.around(belonging.weight))
    return next((match for match, rule in rules if rule is not None and any(map(takes_heads, rule.shapes))), None)


def _no_rule(tensor: FullTensor, architecture: Architecture, settings: Mapping[str, Any]) -> PlanError:
    shown = "x".join(map(str, tensor.shape)) if tensor.shape is not None else "?"
    what = f"{tensor.where}: tensor '{tensor.name}' ({tensor.dtype}, {shown}) has no rule in plan '{architecture.name}'"
    method = unknown_method(settings, tensor.name)
    if method is not None:
        return PlanError(f"{what}: the model is quantized by {method}, a method that is not known here", _UNQUANTIZED)
    save = "save the plan with 'reshard plan SOURCE --save FILE'"
    module = tensor.name.rpartition(".")[0]
    weight = architecture.match(f"{module}.weight")
    if weight is not None:  # numbers would make it whole on every rank, which is wrong for a part of a split weight
        rule = f"'{weight.rules[0].shapes[0]}'"
        beside = f"say its dimensions in the axes of '{module}.weight' beside it ({rule}) if it belongs to that"
        return PlanError(what, f"{save}, add a line for it, and pass it with --plan FILE; {beside}")
    line = f'"{tensor.name}" = "{" ".join(map(str, tensor.shape or ()))}"'
    return PlanError(what, f"{save}, add a line such as {line}, pass it with --plan FILE")


def _measure(sizes: AxisSizes, found: Iterable[_Covered]) -> None:
    """Take the size of an axis that the config does not give from a dimension in which it stands alone, or from the
    indices in names.
    """
    first: dict[str, str] = {}
    for each in found:
        tensor, rule, match = each.tensor, each.shapes[0], each.match
        for counted in match.indices.keys() - sizes.configured:
            sizes.measured[counted] = max(sizes.measured.get(counted, 0), max(each.seen[counted]) + 1)
        if tensor.shape is None or len(rule.dims) != len(tensor.shape):
            continue
        configured: dict[str, int] | None = None
        for dim, length in zip(rule.dims, tensor.shape, strict=True):
            axis = dim.axis
            if axis is None or (axis in first and sizes.measured[axis] == length):
                continue
            if configured is None:
                configured = sizes.of(match.indices)
            if axis not in configured:
                sizes.measured[axis], first[axis] = length, tensor.name
            elif axis in first:
                raise PlanError(
                    f"{tensor.where}: tensor '{tensor.name}' has {length} for the axis '{axis}', "
                    f"'{first[axis]}' has {sizes.measured[axis]}"
                )


_UNQUANTIZED = "split the model as it was before it was quantized, or quantized by a method in docs/quantization.md"
_WRONG_RULE = "either config.json does not belong to these weights, or the rule is wrong for them (see --plan)"
_WRONG_BLOCKS = "either config.json does not belong to these weights, or they are quantized in blocks of another size"


def _fit(tensor: FullTensor, rule: Shape, sizes: Mapping[str, int], hint: str) -> tuple[int, ...]:
    try:
        expected = rule.sizes(sizes)
    except NotationError as error:
        raise PlanError(
            f"{tensor.where}: tensor '{tensor.name}': {error.message}: "
            "the config does not say it, and no tensor has it alone in a dimension"
        ) from None
    if tensor.shape is not None and tensor.shape != expected:
        named = " ".join(f"{axis}={sizes[axis]}" for axis in sorted(rule.axes))
        raise PlanError(
            f"{tensor.where}: tensor '{tensor.name}' has shape {list(tensor.shape)}, "
            f"but the rule '{rule}' gives {list(expected)}{' with ' + named if named else ''}",
            hint,
        )
    return expected


def _check_indices(each: _Covered, sizes: AxisSizes) -> None:
    for place, axis in enumerate(each.axes):
        size = sizes.counts.get(axis)
        if size is None or max(each.seen[axis]) < size:
            continue
        tensor, at = next((t, at) for t, at in zip(each.tensors, each.all_at, strict=True) if at[place] >= size)
        raise PlanError(
            f"{tensor.where}: tensor '{tensor.name}': {axis} {at[place]} is out of range, config.json says {size}"
        )


# ------------------------------------------------------------------------------------------------------ on a mesh


@dataclass(frozen=True)
class Plan:
    """What each rank of a mesh owns of every tensor.

    ``padding`` gives the padded size of each axis that is padded.
    """

    model: Model
    mesh: Mesh
    padding: Mapping[str, int]
    laid: Mapping[Kind, Entry]
    """The first tensor of each kind."""

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """All tensors by their names."""
        return {tensor.name: self.laid[tensor.kind]._replace(name=tensor.name) for tensor in self.model.tensors}

    def rank_sizes(self, rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes of the axes as ``rank`` holds them."""
        padded = _padded(sizes, self.padding)
        shares = shares_of(self.model, self.mesh, rank, padded, frozenset())
        if self.mesh.same_ranks:  # what only experts have is whole
            outside = {axis for found in self.model.axis_sets(experts=False) for axis in found}
            shares = {axis: part for axis, part in shares.items() if axis in outside}
            shares |= shares_of(self.model, self.mesh, rank, padded, self.model.expert_axes)
        return _parts(padded, shares)


def make_plan(
    model: Model,
    mesh: Mesh,
    *,
    pad: bool = True,
    pad_to: int = 1,
    padding: Mapping[str, int] | None = None,
) -> Plan:
    """Deal a model's axes to the ranks of a mesh.

    ``pad_to`` asks for padded axes (the vocabulary) in multiples of it; with ``pad=False`` an axis that does not
    divide is refused; ``padding`` gives the padded sizes of shards that exist. Raises PlanError that names the axis,
    its size and the valid degrees.
    """
    check_degrees(model, mesh, pad=pad)
    if padding is None:
        padding = _padding(model, mesh, pad_to) if pad else {}
    layouts: dict[tuple[object, ...], Layout] = {}
    owners_of: dict[tuple[object, ...], frozenset[int] | None] = {}
    laid: dict[Kind, Entry] = {}
    for kind in model.kinds:
        expert = (kind.places, kind.indices, kind.axes)
        if kind.places and expert not in owners_of:
            owners_of[expert] = _owners(model, mesh, kind)
        owners = owners_of.get(expert) if kind.places else None
        key = (kind.rule, kind.indices, kind.shape, DTYPE_BITS[kind.dtype] % 8, owners)
        if key not in layouts:
            layouts[key] = _layout(model, mesh, kind, padding, owners)
            _check_whole_bytes(kind, layouts[key])
        stated = (kind.stated, kind.indices, owners)
        if kind.stated is not None and stated not in layouts:
            shape = kind.stated.sizes(model.sizes.of(dict(kind.indices)))
            weight = replace(kind, rule=kind.stated, shape=shape)
            layouts[stated] = _layout(model, mesh, weight, padding, owners)
        laid[kind] = Entry(kind.name, kind.dtype, kind.template, layouts[key], layouts[stated] if kind.stated else None)
    return Plan(model, mesh, padding, laid)


def _owners(model: Model, mesh: Mesh, tensor: Kind) -> frozenset[int] | None:
    """The ranks that hold a tensor whose name says which expert's it is; None where every rank does."""
    if mesh.degrees[0][0] == "tp" and len(mesh.degrees) == 1:
        return None
    sizes = model.sizes.of(dict(tensor.indices))
    found = []
    for rank in range(mesh.size):
        shares = shares_of(model, mesh, rank, sizes, tensor.axes)
        parts = [
            (index * shares[axis].parts // sizes[axis], shares[axis].index)
            for axis, index in tensor.places
            if axis in shares
        ]
        if all(part == own for part, own in parts):
            found.append(rank)
    return None if len(found) == mesh.size else frozenset(found)


def _layout(
    model: Model, mesh: Mesh, tensor: Kind, padding: Mapping[str, int], owners: frozenset[int] | None
) -> Layout:
    sizes = model.sizes.of(dict(tensor.indices))
    padded_sizes = _padded(sizes, padding)
    rule = tensor.rule.unfolded(sizes)
    boxes: list[Box | None] = []
    for rank in range(mesh.size):
        if owners is not None and rank not in owners:
            boxes.append(None)
            continue
        shares = shares_of(model, mesh, rank, padded_sizes, tensor.axes)
        try:
            runs = [owned(dim, padded_sizes, shares) for dim in rule.dims]
        except NotationError as error:
            raise PlanError(
                f"tensor '{tensor.name}' cannot be split over {mesh}: {error.message}", error.hint
            ) from None
        lengths = iter([sum(run.length for run in dim) for dim in runs])
        shape = tuple(math.prod(itertools.islice(lengths, len(dim.unfolded(sizes)))) for dim in tensor.rule.dims)
        boxes.append(Box(tuple(runs), shape))
    dealt = {axis for axis, part in shares_of(model, mesh, 0, padded_sizes, tensor.axes).items() if part.parts > 1}
    parallel = frozenset(i for i, dim in enumerate(rule.dims) if dim.axes & dealt)
    _check_padding(tensor, padding)
    _check_every_element_is_owned(model.architecture, tensor, dealt)
    full, padded = rule.sizes(sizes), rule.sizes(padded_sizes)
    return Layout(rule, full, padded, tuple(boxes), tensor.shape, parallel, owners is not None)


def _check_whole_bytes(tensor: Kind, layout: Layout) -> None:
    """Elements smaller than a byte are not cut within one."""
    bits = DTYPE_BITS[tensor.dtype]
    for box in layout.boxes if bits % 8 else ():
        for run in box.dims[-1] if box and box.dims else ():
            if run.offset * bits % 8 or run.length * bits % 8:
                raise PlanError(
                    f"tensor '{tensor.name}' ({tensor.dtype}): elements {run.offset} to {run.end} "
                    f"of '{tensor.rule.dims[-1]}' begin or end within a byte"
                )


def _check_padding(tensor: Kind, padding: Mapping[str, int]) -> None:
    for dim in tensor.rule.dims:
        inside = dim.axes & padding.keys()
        if inside and dim.axis is None:
            raise PlanError(
                f"tensor '{tensor.name}': the axis '{min(inside)}' is not alone in '{dim}', so it cannot be padded"
            )


def _check_every_element_is_owned(architecture: Architecture, tensor: Kind, dealt: set[str]) -> None:
    """A mesh dimension may split a tensor along one family, each axis once (else ranks own only a diagonal)."""
    for mesh_dim, families in architecture.families.items():
        split = [family for family in families if dealt & tensor.rule.axes & {*family}]
        repeated = any(_times(tensor.rule.dims, axis) > 1 for family in split for axis in dealt & {*family})
        if len(split) > 1 or repeated:
            raise PlanError(
                f"tensor '{tensor.name}': '{tensor.rule}' is split by {mesh_dim} in more than one place, "
                "so that no rank would own some of its elements"
            )


def _times(dims: Sequence[Dim], axis: str) -> int:
    """How often an axis multiplies itself: over dimensions and the factors of a product, not the blocks of a sum."""
    return sum(max(sum(_factor_times(f, axis) for f in block.factors) for block in dim.blocks) for dim in dims)


def _factor_times(factor: Factor, axis: str) -> int:
    return _times([factor], axis) if isinstance(factor, Dim) else int(factor == axis)


def shares_of(
    model: Model, mesh: Mesh, rank: int, sizes: Mapping[str, int], axes: AbstractSet[str]
) -> dict[str, Share]:
    """What a rank has of each axis, in a tensor with these axes."""
    shares: dict[str, Share] = {}
    coordinates = mesh.coordinates(rank)
    for mesh_dim, degree in mesh.degrees:
        if mesh.same_ranks and (mesh_dim == "ep") != bool(axes & model.expert_axes):
            continue
        for family in model.architecture.families.get(mesh_dim, ()):
            known = [axis for axis in family if axis in sizes]
            unit = mesh.unit(family[0]) if mesh_dim == "tp" else None
            if unit is not None:
                shares[family[0]] = Share(degree, coordinates[mesh_dim], unit)
                continue
            parts = deal(known, sizes, degree) if known else None
            if parts is not None:
                shares |= share(parts, coordinates[mesh_dim])
    return shares


def _local(model: Model, mesh: Mesh, rank: int, sizes: Mapping[str, int], axes: AbstractSet[str]) -> dict[str, int]:
    return _parts(sizes, shares_of(model, mesh, rank, sizes, axes))


def _parts(sizes: Mapping[str, int], shares: Mapping[str, Share]) -> dict[str, int]:
    return {axis: shares[axis].run(size).length if axis in shares else size for axis, size in sizes.items()}


def _padding(model: Model, mesh: Mesh, pad_to: int) -> dict[str, int]:
    padding: dict[str, int] = {}
    for mesh_dim, degree in mesh.degrees:
        axes = {axis for family in model.architecture.families.get(mesh_dim, ()) for axis in family}
        for axis in model.architecture.pad:
            for sizes in model.axis_sets():
                size = sizes.get(axis)
                multiple = math.lcm(degree, pad_to)
                if axis in axes and size is not None and size % multiple:
                    padding[axis] = -(-size // multiple) * multiple
    return padding


def _padded(sizes: Mapping[str, int], padding: Mapping[str, int]) -> dict[str, int]:
    return {axis: padding.get(axis, size) for axis, size in sizes.items()}


# -------------------------------------------------------------------------------------------------------- degrees


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a degree is not possible: the family that does not absorb it, its sizes, and the unit that it is dealt in if
    it is dealt unevenly; or the block that would be cut, and what to do about it.
    """

    degree: int
    family: tuple[tuple[str, int], ...]
    cut: str | None = None
    advice: str | None = None
    unit: int | None = None

    def __str__(self) -> str:
        if self.cut is not None:
            return self.cut
        if self.unit is not None:
            return too_few_units(*self.family[0], self.unit, self.degree)
        return does_not_divide(self.family, self.degree)


def refusal(
    model: Model, mesh_dim: str, degree: int, *, pad: bool = True, same_ranks: bool = False, uneven: bool = False
) -> Refusal | None:
    """Why ``degree`` is not possible along a mesh dimension, or None if it is.

    With ``same_ranks`` experts stay whole; with ``uneven`` the last ranks may have less (see ``unevenly``).
    """
    mesh = Mesh(((mesh_dim, degree),), same_ranks)
    return _refusal(model, unevenly(model, mesh) if uneven else mesh, pad=pad)


def _refusal(model: Model, mesh: Mesh, *, pad: bool) -> Refusal | None:
    """Why a mesh of one dimension is not possible."""
    ((mesh_dim, degree),) = mesh.degrees
    for family, sizes in _families(model, mesh_dim, pad=pad, same_ranks=mesh.same_ranks):
        unit = mesh.unit(family[0])
        if unit is not None:
            is_refused = not Share(degree, degree - 1, unit).run(sizes[family[0]]).length
        else:
            is_refused = deal(family, sizes, degree) is None
        if is_refused:
            return Refusal(degree, tuple((axis, sizes[axis]) for axis in family), unit=unit)
    return _cut_block(model, mesh, pad=pad)


def _cut_block(model: Model, mesh: Mesh, *, pad: bool) -> Refusal | None:
    """The first tensor of a quantized weight in which a mesh would cut a block."""
    padding = _padding(model, mesh, 1) if pad else {}
    for tensor in model.in_blocks:
        sizes = _padded(model.sizes.of(dict(tensor.indices)), padding)
        try:
            for rank in range(mesh.size):
                shares = shares_of(model, mesh, rank, sizes, tensor.axes)
                for dim in tensor.rule.unfolded(sizes).dims:
                    owned(dim, sizes, shares)
        except NotationError as error:
            why = cuts_blocks(dim, sizes, shares) or error.message
            return Refusal(mesh.size, (), f"tensor '{tensor.name}': {why}", tensor.advice)
    return None


def unevenly(model: Model, mesh: Mesh) -> Mesh:
    """The same mesh with units for those of the model's channels that it cannot have in equal parts (or not without
    cutting a block of a quantized weight).

    A unit is the least common multiple of what the tensors with that axis need, so that no rank cuts a block.
    """
    degree, units = dict(mesh.degrees).get("tp", 1), _units(model, experts=not mesh.same_ranks)
    sets = model.axis_sets(experts=not mesh.same_ranks)
    uneven = {
        axis: unit
        for axis, unit in sorted(units.items())
        if degree > 1 and any(sizes.get(axis, 0) % (degree * unit) for sizes in sets)
    }
    return replace(mesh, uneven=tuple(uneven.items()))


def _units(model: Model, *, experts: bool) -> dict[str, int]:
    """The unit of each axis that may be dealt unevenly; with ``experts`` those of experts' tensors count."""
    units = dict.fromkeys(model.channels, 1)
    for tensor in model.with_channels:
        if not experts and tensor.axes & model.expert_axes:
            continue
        sizes = model.sizes.of(dict(tensor.indices))
        *outer, last = tensor.rule.unfolded(sizes).dims
        whole_bytes = replace(last, step=math.lcm(last.step, 8 // math.gcd(8, DTYPE_BITS[tensor.dtype])))
        for axis in tensor.rule.axes & model.channels:
            units[axis] = math.lcm(units[axis], *(unit_of(dim, axis, sizes) for dim in (*outer, whole_bytes)))
    return units


def valid_degrees(
    model: Model,
    mesh_dim: str = "tp",
    *,
    pad: bool = True,
    same_ranks: bool = False,
    uneven: bool = False,
    limit: int = 1024,
) -> list[int]:
    """Every degree that all families can absorb, in increasing order up to ``limit``; with ``uneven`` those too of
    which the last ranks have less.
    """
    families = list(_families(model, mesh_dim, pad=pad, same_ranks=same_ranks))
    if not families:  # nothing is dealt, or only what may be padded
        return list(range(1, limit + 1)) if _is_dealt(model, mesh_dim) else [1]
    free = model.channels if uneven and mesh_dim == "tp" else frozenset[str]()
    least = min([limit, *(sizes[family[0]] for family, sizes in families if family[0] in free)])
    fixed = [degrees(family, sizes, limit) for family, sizes in families if family[0] not in free]
    found = sorted(set(range(1, least + 1)).intersection(*fixed))
    if uneven:
        return [d for d in found if refusal(model, mesh_dim, d, pad=pad, same_ranks=same_ranks, uneven=True) is None]
    return [d for d in found if _cut_block(model, Mesh(((mesh_dim, d),), same_ranks), pad=pad) is None]


def _families(
    model: Model, mesh_dim: str, *, pad: bool, same_ranks: bool
) -> Iterable[tuple[list[str], Mapping[str, int]]]:
    for family in model.architecture.families.get(mesh_dim, ()):
        for sizes in model.axis_sets(experts=mesh_dim == "ep" or not same_ranks):
            present = [axis for axis in family if axis in sizes]
            if present and not (pad and set(present) <= set(model.architecture.pad)):
                yield present, sizes


def _is_dealt(model: Model, mesh_dim: str) -> bool:
    axes = {axis for family in model.architecture.families.get(mesh_dim, ()) for axis in family}
    return any(axes & sizes.keys() for sizes in model.axis_sets())


def check_degrees(model: Model, mesh: Mesh, *, pad: bool = True) -> None:
    """Raise PlanError for a degree that some family of axes does not absorb, with the valid ones."""
    for axis, _ in mesh.uneven:
        if axis not in model.channels:
            raise PlanError(f"{mesh}: the axis '{axis}' cannot be dealt unevenly")
    for mesh_dim, degree in mesh.degrees:
        if degree == 1:
            continue
        why = _refusal(model, replace(mesh, degrees=((mesh_dim, degree),)), pad=pad)
        if why is not None:
            valid = valid_degrees(
                model, mesh_dim, pad=pad, same_ranks=mesh.same_ranks, uneven=bool(mesh.uneven and mesh_dim == "tp")
            )
            ways = "".join(f", or {way}" for way in other_ways(model, mesh, mesh_dim, why, pad=pad))
            advice = f"; {why.advice}" if why.advice else ""
            hint = f"valid degrees: {', '.join(map(str, valid))}{ways}{advice}"
            raise PlanError(f"--{mesh_dim} {degree} is not possible: {why}", hint)
        if not _is_dealt(model, mesh_dim):
            raise PlanError(f"--{mesh_dim} {degree} is not possible: the plan deals no axis over {mesh_dim}")


def other_ways(model: Model, mesh: Mesh, mesh_dim: str, why: Refusal, *, pad: bool) -> Iterable[str]:
    """The options with which a refused degree is possible."""
    degree = dict(mesh.degrees)[mesh_dim]
    if refusal(model, mesh_dim, degree, pad=pad, same_ranks=mesh.same_ranks, uneven=True) is None:
        yield "--uneven"
    if mesh.degrees == (("tp", degree),) and _is_dealt(model, "ep"):
        tried = (refusal(model, dim, degree, pad=pad, same_ranks=True) for dim in ("tp", "ep"))
        if all(found is None for found in tried):
            yield f"--tp {degree} --ep {degree} --same-ranks"
    begins_anew = any(dim.part is not None for tensor in model.in_blocks for dim in tensor.rule.dims)
    if why.cut is not None and block_size(model.config) and not begins_anew:
        yield "--refine-blocks"


# --------------------------------------------------------------------------------------------------- rank configs


def rank_config(plan: Plan, rank: int) -> dict[str, Any]:
    """The ``config.json`` of a rank: the source's, with the counts that this rank holds."""
    architecture, config = plan.model.architecture, copy.deepcopy(dict(plan.model.config))
    target = config
    for key in architecture.section(config):
        target = target[key]
    for key, expression in architecture.config.items():
        for inner, last, indices in _places(target, key.split("."), {}):
            value = _config_value(plan, rank, expression, inner.get(last), indices)
            if last in inner or (value is not None and inner is target):
                inner[last] = value
    return config


def with_sizes_of_whole(plan: Plan, config: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's ``config.json`` with the whole model's numbers in the place of those that follow from its sizes."""
    architecture, found = plan.model.architecture, copy.deepcopy(dict(config))
    ours: dict[str, Any] = found
    whole: dict[str, Any] = dict(plan.model.config)
    for key in architecture.section(plan.model.config):
        ours, whole = ours.get(key) or {}, whole[key]
    for key, expression in architecture.config.items():
        if not expression.names & architecture.sizes.keys():
            continue
        places = zip(*(_places(settings, key.split("."), {}) for settings in (ours, whole)), strict=False)
        for (inner, last, _), (outer, _, _) in places:
            inner.pop(last, None)
            inner |= {last: outer[last]} if last in outer else {}
    return found


def _places(
    settings: dict[str, Any], path: Sequence[str], indices: Mapping[str, int]
) -> Iterable[tuple[dict[str, Any], str, Mapping[str, int]]]:
    """Where a key of ``[config]`` is kept: the settings, the last part of the key, and the indices on the way."""
    first, *rest = path
    if not rest:
        yield settings, first, indices
        return
    keys = [key for key in settings if is_index(key)] if first.startswith("{") else [first]
    for key in keys:
        if isinstance(settings.get(key), dict):
            found = {first[1:-1]: int(key)} if first.startswith("{") else {}
            yield from _places(settings[key], rest, {**indices, **found})


def _config_value(plan: Plan, rank: int, expression: Any, original: Any, indices: Mapping[str, int]) -> Any:
    sizes = plan.model.sizes
    if isinstance(original, list) and expression.names & sizes.varying:
        return [_at(plan, rank, expression, {"layer": i}) for i in range(len(original))]
    return _at(plan, rank, expression, indices)


def _at(plan: Plan, rank: int, expression: Any, indices: Mapping[str, int]) -> Any:
    sizes = plan.model.sizes
    local = plan.rank_sizes(rank, sizes.of(indices))
    return expression.evaluate(lambda name: local[name] if name in local else sizes.settings.get(name))
