"""Binds a checkpoint to an architecture: finds the rule of every tensor, and checks it against the shape on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from formats.errors import NotationError, PlanError
from formats.mesh import Mesh
from formats.notation.architecture import Architecture, Match, Rule
from formats.notation.axes import Shape
from formats.quantization.companions import Companion, shape_of, stated_shape, takes_heads
from formats.quantization.methods import unknown_method
from reshard.planning.model import BoundTensor, FullTensor, Kind, Model
from reshard.planning.shares import local_sizes, padded_sizes
from reshard.planning.sizes import AxisSizes


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
    allowed = model.used_templates | architecture.inherited
    unused = [template for template in architecture.tensors if template not in allowed]
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
        found = local_sizes(skeleton, mesh, 0, padded_sizes(found, padding), axes)
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
