"""Binds a checkpoint to an architecture: finds the rule of every tensor, and checks it against the shape on disk.

No code knows a packing: a packing is a line in ``formats/architectures/``. ``completeness.py`` checks that all required
tensors are there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from reshard.formats.errors import NotationError, PlanError
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import Architecture, Match, Rule
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.axes import Shape
from reshard.formats.notation.tables import config_defaults
from reshard.formats.quantization.companions import Companion, shape_of, stated_shape, takes_heads
from reshard.formats.quantization.methods import unknown_method
from reshard.model.model import AnyTensor, AxisSizes, BoundTensor, Kind, Model, padded_sizes, shares_of, sizes_of_parts
from reshard.model.unknown import UNQUANTIZED, Unknown, dims_by_length, no_rule


def bind(
    architecture: Architecture,
    config: Mapping[str, Any],
    tensors: Iterable[AnyTensor],
    *,
    axes: Mapping[str, int] | None = None,
    every_rule: bool = False,
    mesh: Mesh | None = None,
    padding: Mapping[str, int] | None = None,
) -> Model:
    """Find the rule of every tensor and check it against the shape on disk.

    A rule may have several shapes: only the one that fits is kept, in the model's architecture too. ``axes`` gives
    axis sizes measured earlier. ``mesh`` and ``padding`` describe the shards, for tensors of which only one rank's
    shape is known. With ``every_rule`` (for a user's plan), a rule that covers no tensor is an error, and one that
    hides a divided axis in a plain number. Raises PlanError that names the file, the tensor, the rule, and both shapes.
    """
    sizes, tensors = AxisSizes(architecture, config, axes or {}), list(tensors)
    groups, group_of, all_at = _grouped(tensors, architecture, config, sizes)
    several = [group for group in groups if len(group.shapes) > 1]
    _measure(sizes, (group for group in groups if len(group.shapes) == 1))
    architecture = _with_layouts_on_disk(architecture, several, sizes, mesh or Mesh(), padding or {})
    _measure(sizes, several)

    def members(group: _TensorGroup) -> Iterator[AnyTensor]:
        return (tensor for tensor, of in zip(tensors, group_of, strict=True) if of is group)

    kinds = {group: _kind(group, members(group), architecture, sizes) for group in groups}
    names, kind_of = (tensor.name for tensor in tensors), map(kinds.__getitem__, group_of)
    bound = map(BoundTensor, names, kind_of, all_at)
    model = Model(architecture, config, sizes, tuple(bound), tuple(kinds.values()))
    allowed = model.used_templates | architecture.inherited | architecture.derived
    unused = [template for template in architecture.tensors if template not in allowed]
    if every_rule:
        check_numbers(model)
    if every_rule and unused:
        raise PlanError(
            f"the rule '{unused[0]}' of plan '{architecture.name}' covers no tensor", "remove it from the plan file"
        )
    return model


def shapes_of(rules: Iterable[Rule]) -> list[Shape]:
    """All shapes that a line states."""
    return [shape for rule in rules for shape in rule.shapes]


def _stated_ties(architecture: Architecture, config: Mapping[str, Any]) -> set[bool]:
    """The values that a config has for ``tie_word_embeddings``, and its type's default; none if nothing is tied. A type
    that shares its tables (T5) does so whatever the config says, which is about the head alone. If nothing is said, the
    default of the language model within counts, too: Mistral 3 is tied by default, and Mistral within is not.
    """
    within = architecture.settings(config)
    defaults, of_within = (config_defaults().get(str(each.get("model_type")), {}) for each in (config, within))
    sources = config, within, defaults
    stated = {bool(value) for settings in sources if (value := settings.get("tie_word_embeddings")) is not None}
    if within.get("tie_word_embeddings", config.get("tie_word_embeddings")) is None and "model_type" in within:
        stated.add(bool(of_within.get("tie_word_embeddings")))
    if defaults.get("shares_tables"):
        return {True, *stated}
    return stated if True in stated and not _is_untied(config) else set()


def _is_untied(config: Mapping[str, Any]) -> bool:
    return config.get("tie_word_embeddings") is False


def may_be_tied(architecture: Architecture, config: Mapping[str, Any]) -> bool:
    """Whether the model of a config has tied tensors, by the config or its type."""
    return bool(_stated_ties(architecture, config))


def tied_twice(
    architecture: Architecture,
    config: Mapping[str, Any],
    tensors: Iterable[AnyTensor],
    are_same: Callable[[str, str], bool],
    again: Mapping[str, str] = {},
) -> dict[str, str]:
    """The second names of tied tensors by ``tie_word_embeddings``, each with the first: heads that are the embedding
    once more, and those that may be ``again`` another tensor.

    The default is that of the model type. If the model within says otherwise, the content tells: ``are_same``, as it
    does of layers that share a tensor. A tensor of another dtype or shape is one of its own.
    """
    tensors = list(tensors)
    shared = _shared_by_layers(architecture, tensors, are_same)
    if not (stated := _stated_ties(architecture, config)):
        return shared
    tables = frozenset(filter(architecture.is_table, architecture.tensors))
    ends = tuple({".".join(template.split(".")[-2:]) for template in tables})
    firsts, lasts, others = list[AnyTensor](), list[AnyTensor](), dict[str, AnyTensor]()
    names = {*again, *again.values()}
    for tensor in tensors:
        match = architecture.match(tensor.name) if tensor.name.endswith(ends) else None
        if tensor.name in names:
            others[tensor.name] = tensor
        elif match is not None and match.template in tables:
            stage = architecture.stage_of(tensor.name)
            (lasts if stage is not None and stage.text == "last" else firsts).append(tensor)
    pairs = [(others[name], others[first]) for name, first in again.items() if {name, first} <= others.keys()]
    if _is_untied(config):
        stages = ((pair, architecture.stage_of(pair[0].name)) for pair in pairs)
        pairs, lasts = [pair for pair, stage in stages if stage is None or stage.text != "last"], []
    pairs += [(last, firsts[0]) for last in lasts if len(firsts) == 1]
    alike = ((b.name, a.name) for b, a in pairs if (b.dtype, b.shape, b.local) == (a.dtype, a.shape, a.local))
    return shared | {name: first for name, first in alike if False not in stated or are_same(name, first)}


def _shared_by_layers(
    architecture: Architecture, tensors: Iterable[AnyTensor], are_same: Callable[[str, str], bool]
) -> dict[str, str]:
    """The tensors that a layer has in common with one before it, each with that of the first such layer."""
    shared = tuple(line[:-1] for line, stage in architecture.stages.items() if stage.text == "every" and "{" in line)
    matches = ((architecture.match(tensor.name), tensor) for tensor in (tensors if shared else ()))
    places = ((match, tensor) for match, tensor in matches if match is not None and match.template.startswith(shared))
    firsts, second = defaultdict[tuple[object, ...], list[str]](list), dict[str, str]()
    for match, tensor in sorted(places, key=lambda place: tuple(place[0].indices.values())):
        _, *inner = match.indices.values()
        own = firsts[match.template, *inner, tensor.dtype, tensor.shape, tensor.local]
        if (first := next((name for name in own if are_same(tensor.name, name)), None)) is None:
            own.append(tensor.name)
        else:
            second[tensor.name] = first
    return second


def lines_for(architecture: Architecture, config: Mapping[str, Any], tensors: Iterable[AnyTensor]) -> Architecture:
    """The architecture with only the lines that cover one of these tensors, whether or not the shapes fit."""
    sizes = AxisSizes(architecture, config, {})
    dtypes = {tensor.name: tensor.dtype for tensor in tensors}
    matches = (_line_of(name, architecture, sizes, dtypes)[0] for name in dtypes)
    used = {match.template for match in matches if match is not None}
    return replace(architecture, tensors={name: rules for name, rules in architecture.tensors.items() if name in used})


@dataclass(eq=False)
class _TensorGroup:
    """Tensors that share a line, a rule of that line and its possible shapes; see ``_grouped``."""

    tensor: AnyTensor
    """The first tensor."""
    match: Match
    """The first tensor's match."""
    rule: Rule
    shapes: tuple[Shape, ...]
    belonging: Companion | None = None
    """Set where the tensors belong to quantized weights."""
    all_at: list[tuple[int, ...]] = field(default_factory=list)
    """The indices in each tensor's name."""
    axes: tuple[str, ...] = ()
    """The axes of these indices."""
    indices: tuple[tuple[str, int], ...] = ()
    """The indices on which sizes depend: they are equal in all tensors of the group."""

    @cached_property
    def seen(self) -> Mapping[str, frozenset[int]]:
        """The indices that occur along each axis."""
        return dict(zip(self.axes, map(frozenset, zip(*self.all_at, strict=True)), strict=False))


def _grouped(
    tensors: Iterable[AnyTensor], architecture: Architecture, config: Mapping[str, Any], sizes: AxisSizes
) -> tuple[list[_TensorGroup], list[_TensorGroup], list[tuple[int, ...]]]:
    """The groups, and of each tensor its group and the indices in its name: a checkpoint has few kinds of tensors, and
    many of each.

    The tensors of a group have the same dtype and shape, and names that differ only in numbers. An index separates
    groups where the split depends on it (a layer's, if layers differ in size) or the rank (an expert's). Raises
    PlanError if no rule covers a tensor.
    """
    dtypes = {tensor.name: tensor.dtype for tensor in tensors}
    forms: dict[object, dict[tuple[object, ...], _Form]] = {}  # by the form up to the last number, then by the rest
    head, numbers, of_head = "\0", list[int](), dict[tuple[object, ...], _Form]()
    groups, group_of, all_at = list[_TensorGroup](), list[_TensorGroup](), list[tuple[int, ...]]()
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    for tensor in tensors:
        name, dtype = tensor.name, tensor.dtype
        case = sizes.scheme.case(name, dtypes)
        form = of_head.get((name[len(head) :], dtype, case)) if name.startswith(head) else None
        if form is None:  # neighbours have the same numbers
            words, texts = architecture.form(name)
            head, numbers = name[: len(name) - len(words[len(texts)])], [*map(int, texts)]
            of_head = forms.setdefault((*words[: len(texts)], *words[len(texts) + 1 :]), {})
            spelled = name[len(head) :], dtype, case
            if spelled not in of_head:
                of_head[spelled] = _form_of(name, dtypes, architecture, sizes)
            form = of_head[spelled]
        at = tuple([numbers[place] for place in form.places.values()])
        key = (tensor.shape, tensor.local, *[numbers[place] for place in form.separating.values()])
        group = form.groups.get(key)
        if group is None:
            group = _group_of(tensor, architecture, sizes, dtypes)
            if group is None:
                raise no_rule(_unknown(tensor, architecture, sizes, dtypes), architecture, config, sizes)
            form.groups[key] = group
            groups.append(group)
            indices = {axis: numbers[place] for axis, place in form.separating.items()}
            group.axes, group.indices = tuple(form.places), sizes.key(indices)
        at = same.setdefault(at, at)
        group.all_at.append(at)
        group_of.append(group)
        all_at.append(at)
    return groups, group_of, all_at


def _form_of(name: str, dtypes: Mapping[str, str], architecture: Architecture, sizes: AxisSizes) -> _Form:
    """A form without groups, for names like this one."""
    places, belonging = architecture.index_places(name), belonging_of(name, dtypes, architecture, sizes)
    match = architecture.match(belonging.weight if belonging else name)
    # a tensor without a match may follow any line of its attention, and each line has its own condition
    apart = architecture.dealt | (sizes.indices_for(match.rules) if match else frozenset(places))
    return _Form(places, {axis: place for axis, place in places.items() if axis in apart}, {})


class _Form(NamedTuple):
    """Names that differ only in their numbers, of tensors of one dtype."""

    places: Mapping[str, int]
    """The place of each axis among the numbers."""
    separating: Mapping[str, int]
    """The places of the axes that separate groups."""
    groups: dict[tuple[object, ...], _TensorGroup]
    """The groups by shape and by those numbers."""


def _kind(group: _TensorGroup, members: Iterable[AnyTensor], architecture: Architecture, sizes: AxisSizes) -> Kind:
    """The kind of a group of these tensors. Raises PlanError if the shape on disk or an index does not fit."""
    tensor, match, rule, belonging = group.tensor, group.match, group.shapes[0], group.belonging
    axis_sizes = sizes.of(match.indices)
    try:
        shape = rule.sizes(axis_sizes)
    except NotationError as error:
        raise PlanError(
            f"{tensor.where}: tensor '{tensor.name}': {error.message}: "
            "config.json does not give its size, and no tensor has a dimension of this axis alone"
        ) from None
    if tensor.shape is not None and tensor.shape != shape:
        method = unknown_method(sizes.settings, tensor.name)
        named = " ".join(f"{axis}={axis_sizes[axis]}" for axis in sorted(rule.axes))
        raise PlanError(
            f"{tensor.where}: tensor '{tensor.name}' has shape {list(tensor.shape)}, "
            f"but the rule '{rule}' gives {list(shape)}{' with ' + named if named else ''}",
            f"it is quantized by {method}, a method that is not known here: {UNQUANTIZED}"
            if method
            else (_WRONG_BLOCKS if belonging else _WRONG_RULE),
        )
    for place, axis in enumerate(group.axes):
        size = sizes.counts.get(axis)
        if size is not None and max(group.seen[axis]) >= size:
            other, at = next((t, at) for t, at in zip(members, group.all_at, strict=True) if at[place] >= size)
            why = f"{axis} {at[place]} is out of range, config.json says {size}"
            raise PlanError(f"{other.where}: tensor '{other.name}': {why}")
    return Kind(
        name=tensor.name,
        dtype=tensor.dtype,
        template=match.template,
        pattern=architecture.pattern_of(tensor.name, match.template),
        index_axes=group.axes,
        rule=rule,
        indices=group.indices,
        sizes=sizes.of(dict(group.indices)),
        places=tuple((axis, index) for axis, index in match.indices.items() if axis in architecture.dealt),
        shape=shape,
        stated=stated_shape(group.rule.shapes[0]) if belonging and belonging.states_shape else None,
        advice=belonging.advice if belonging else None,
        count=len(group.all_at),
        layers=next((seen for axis, seen in group.seen.items() if axis not in architecture.dealt), frozenset()),
    )


def _group_of(
    tensor: AnyTensor, architecture: Architecture, sizes: AxisSizes, dtypes: Mapping[str, str]
) -> _TensorGroup | None:
    """A group of the tensor; None if no line covers it."""
    match, belonging = _line_of(tensor.name, architecture, sizes, dtypes)
    if match is None:
        return None
    rule = sizes.holds(match)
    if rule is None and match.template.endswith("*"):
        return None
    if rule is None:
        raise PlanError(f"{tensor.where}: tensor '{tensor.name}': no condition of the rule '{match.template}' holds")
    on_disk = tensor.local if tensor.shape is None else tensor.shape
    if rule.shapes[0].is_open:  # no dimension is split, so one rank's shape is the full shape
        return _TensorGroup(tensor, match, rule, (rule.shapes[0].closed(on_disk or ()),))
    if belonging is None:
        return _TensorGroup(tensor, match, rule, rule.shapes)
    derived = [shape_of(belonging.patterns, shape, on_disk) for shape in rule.shapes]
    if None in derived:
        raise PlanError(
            f"{tensor.where}: tensor '{tensor.name}' has shape {list(tensor.shape or ())}; "
            f"for a weight '{rule.shapes[derived.index(None)]}' it should be one of "
            + ", ".join(f"'{pattern}'" for pattern in belonging.patterns)
        )
    return _TensorGroup(tensor, match, rule, tuple(shape for shape in derived if shape is not None), belonging)


def _unknown(tensor: AnyTensor, architecture: Architecture, sizes: AxisSizes, dtypes: Mapping[str, str]) -> Unknown:
    """A tensor without a line, and all tensors without one."""
    has_none = dict[object, bool]()
    lacking = list[str]()
    for name in dtypes:
        form = architecture.form(name)[0], dtypes[name]
        if form not in has_none:
            has_none[form] = _line_of(name, architecture, sizes, dtypes)[0] is None
        if has_none[form]:
            lacking.append(name)
    return Unknown(tensor, [*dtypes], lacking)


def _line_of(
    name: str, architecture: Architecture, sizes: AxisSizes, dtypes: Mapping[str, str]
) -> tuple[Match | None, Companion | None]:
    """The line that covers a tensor. A companion of a quantized weight takes the line of that weight."""
    belonging = belonging_of(name, dtypes, architecture, sizes)
    if belonging is None or not belonging.of_attention:
        return architecture.match(belonging.weight if belonging else name), belonging
    rules = ((match, sizes.holds(match)) for match in architecture.around(belonging.weight))
    return next((match for match, rule in rules if rule and any(map(takes_heads, rule.shapes))), None), belonging


def _with_layouts_on_disk(
    architecture: Architecture,
    several: Sequence[_TensorGroup],
    sizes: AxisSizes,
    mesh: Mesh,
    padding: Mapping[str, int],
) -> Architecture:
    """Keep the one shape that fits each tensor, and in each rule the shapes that its tensors have.

    Several shapes may fit one tensor. Then all tensors with the same end of their name (``self_attn.qkv_proj``, with
    its companions) decide together, because they are laid out in the same way.
    """
    fitting = dict[_TensorGroup, set[int]]()
    for group in several:  # the positions of the shapes that fit it, or one rank's part where only that is known
        lengths_of, tensor = sizes.of(group.match.indices), group.tensor
        if tensor.shape is None:
            axes = frozenset().union(*(shape.axes for shape in group.shapes), group.match.indices)
            padded = padded_sizes(lengths_of, padding)
            lengths_of = sizes_of_parts(padded, shares_of(architecture, mesh, 0, padded, axes))
        alternatives: list[tuple[int, ...] | None] = []
        for shape in group.shapes:
            try:
                alternatives.append(shape.sizes(lengths_of))
            except NotationError:
                alternatives.append(None)
        on_disk = tensor.local if tensor.shape is None else tensor.shape
        fitting[group] = {place for place, lengths in enumerate(alternatives) if lengths == on_disk}
        if not fitting[group]:
            pairs = zip(group.shapes, alternatives, strict=True)
            choices = " and ".join(f"'{shape}' {list(lengths or ())}" for shape, lengths in pairs)
            raise PlanError(
                f"{tensor.where}: tensor '{tensor.name}' has shape {list(on_disk or ())}, and the rule gives {choices}",
                _WRONG_RULE,
            )
    common: dict[str, set[int]] = {}
    for group, places in fitting.items():
        end = _ending(group.match.template)
        common[end] = common.get(end, places) & places
    chosen: dict[tuple[str, int], set[int]] = {}
    for group, places in fitting.items():
        options = sorted(places if len(places) == 1 else common[_ending(group.match.template)])
        if len({re.sub(r"[\[\]]", "", str(group.shapes[place])) for place in options}) != 1:
            tensor, choices = group.tensor, " and ".join(f"'{group.shapes[place]}'" for place in sorted(places))
            raise PlanError(
                f"{tensor.where}: tensor '{tensor.name}' has shape {list(tensor.shape or tensor.local or ())}, "
                f"which may be either of {choices}",
                "save the plan with 'reshard plan SOURCE --save FILE', leave one shape, pass it with --plan FILE",
            )
        chosen.setdefault((group.match.template, group.match.rules.index(group.rule)), set()).add(options[0])
        group.shapes = (group.shapes[options[0]],)
    lines = dict(architecture.tensors)
    for (template, number), places in chosen.items():
        rules = [*lines[template]]
        shapes = tuple(shape for place, shape in enumerate(rules[number].shapes) if place in places)
        lines[template] = (*rules[:number], replace(rules[number], shapes=shapes), *rules[number + 1 :])
    return replace(architecture, tensors=lines) if chosen else architecture


def _ending(template: str) -> str:
    """The module's name behind the last index of a line's name; for a tensor of an adapter, that of the weight it adds
    to.
    """
    return _ADAPTERS.sub("", template.rpartition(".")[0].rpartition("}.")[2])


_ADAPTERS = re.compile(r"(\.base_layer)*\.lora_[AB]$")


def belonging_of(
    name: str, dtypes: Mapping[str, str], architecture: Architecture, sizes: AxisSizes
) -> Companion | None:
    """The quantized weight that a tensor belongs to, or None for a plain weight; a packed weight belongs to itself.

    ``dtypes`` has the dtype of every tensor by its name.
    """
    dtype = dtypes[name]
    packed = dtype in {"U8", "I8", "I32"}  # an element may have several values: the weight's own rule may not fit
    return sizes.scheme.companion(name, dtype, dtypes) if packed or architecture.match(name) is None else None


def check_numbers(model: Model) -> None:
    """Raise PlanError for a user's line that keeps a matrix whole on every rank although one of its plain numbers is
    the size of an axis that ranks divide.

    A line that is the model type's own is taken as it is.
    """
    architecture = model.architecture
    try:
        known = find_architecture(model.config, Path()).tensors
    except PlanError:
        known = {}
    for kind in model.kinds:
        rules, dims = architecture.tensors[kind.template], kind.rule.dims
        is_stated = kind.rule in shapes_of(rules)  # no companion, no '...'
        is_own = kind.template in architecture.inherited or kind.rule in shapes_of(known.get(kind.template, ()))
        if not is_stated or is_own or len(dims) < 2 or kind.rule.axes & (architecture.dealt - architecture.expert_axes):
            continue
        known_dims = dims_by_length(architecture, model.sizes.of(architecture.indices_in(kind.name)))
        for number in (dim.size({}) for dim in dims if not dim.axes):
            divided = [dim for dim in known_dims.get(number, ()) if dim.axes & architecture.dealt]
            if number > 1 and divided:
                raise PlanError(
                    f"the line '{kind.template}' = '{kind.rule}' of plan '{architecture.name}' has {number} as a plain "
                    f"number, the size of '{divided[0]}': every rank would hold all of it",
                    "write the axes of each dimension, or '...' if that is meant",
                )


def _measure(sizes: AxisSizes, groups: Iterable[_TensorGroup]) -> None:
    """Measure the axes whose size the config does not give.

    The size comes from a dimension in which the axis stands alone, or from the indices in names.
    """
    first: dict[str, str] = {}
    for group in groups:
        tensor, rule, match = group.tensor, group.shapes[0], group.match
        for counted in match.indices.keys() - sizes.counts.keys():
            sizes.measured[counted] = max(sizes.measured.get(counted, 0), max(group.seen[counted]) + 1)
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


_WRONG_RULE = "either config.json does not belong to these weights, or the rule is wrong for them (see --plan)"


_WRONG_BLOCKS = "either config.json does not belong to these weights, or their scale blocks have another size"
