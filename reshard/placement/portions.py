"""What a program makes of each of a model's tensors: a format applied to the kinds of a model.

A format (``formats.notation.format``) gives the names, and says what is stacked and joined; see
``reshard.placement.arrangement``.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from formats.errors import PlanError
from formats.notation.architecture import Architecture, is_index
from formats.notation.axes import Shape
from formats.notation.components import Component, components, whole, without_first
from formats.notation.format import Format
from formats.notation.format_rules import Cut, Line, Use
from formats.notation.unfused_experts import by_name
from reshard.mesh.stages import divided
from reshard.model.model import BoundTensor, Kind, Model


@dataclass(frozen=True, eq=False)
class Portion:
    """One atom of each tensor of a kind, and what a program makes of it.

    ``target`` is the program's name, with indices as in ``{layer}``; None is the tensor's own. ``stacked`` is the axis
    along which atoms are stacked. With ``by_index``, there is an atom for each index of the first dimension. ``slot``
    is its position among the ``slots`` atoms that are joined. ``order`` has the atom's factors in the order in which
    the program stores them, ``counts`` how many of them each of its dimensions has. Atoms are joined along the
    dimension ``dim``, behind its first ``lead`` factors.
    """

    component: Component
    by_index: bool
    target: str | None
    stacked: str | None
    slot: int
    slots: int
    line: Line | None
    order: tuple[int, ...]
    counts: tuple[int, ...]
    dim: int
    lead: int
    vector: bool = False
    """Whether a scalar is stored with shape ``[1]``."""

    @property
    def cut(self) -> Cut | None:
        """How the format divides it over the ranks, if not by the model's rules."""
        return self.line.ranks.cut if self.line else None

    @property
    def function(self) -> str | None:
        """The function that is stored instead of the elements, if there is one."""
        return self.line.function if self.line else None

    @property
    def outer(self) -> int:
        """The number of factors, in the stored order, before those along which atoms are joined."""
        return sum(self.counts[: self.dim]) + self.lead


Taken = tuple[Portion, ...]
"""What a program makes of the tensors of a kind: all atoms of each."""


def uses_of(model: Model, format: Format) -> dict[Kind, Taken]:
    """What a program makes of each kind of tensors. Raises PlanError for a tensor that no line of its format covers."""
    if format.plain:
        return {kind: (kept_whole(whole(rule_of(model, kind)), None),) for kind in model.kinds}
    check_model_type(model, format)
    return _Reading(model, format).all()


def check_model_type(model: Model, format: Format) -> None:
    """Raise PlanError for a model type that a format is not known to be right for."""
    types = {str(of.get("model_type")) for of in (model.config, model.sizes.settings)}
    if format.types.only and not types & {*format.types.only}:
        raise PlanError(
            f"the model type '{model.config.get('model_type')}' cannot be written as '{format.name}': what "
            f"{format.name} makes of its tensors is not known here",
            f"known are {', '.join(format.types.only)}",
        )
    kind = format.types.name_of(model.config)
    why = format.types.refused.get(kind)
    if (
        why is None
        and format.types.compared
        and not {kind, format.types.class_of(model.config)} & format.types.compared
    ):
        why = f"what {format.loading.program} has of it was not compared"
    if why is not None:
        raise PlanError(f"'{kind}' has no place in the format '{format.name}': {why}")


def rule_of(model: Model, kind: Kind) -> Shape:
    """The rule of a kind from which components are made: blocks that do not reach into another row are counted within
    each row.
    """
    return kind.rule.in_rows(model.sizes.of(dict(kind.indices)))


def in_parts_of(model: Model, kind: Kind, own: Taken, other: Taken) -> Taken:
    """The portions ``own`` of a kind, taken apart as far as in ``other``: the same elements in the same places.

    Then both have the same atoms. Raises PlanError if a stored order cannot be expressed in these parts.
    """
    if any(part.component.label for part in other) and not any(part.component.label for part in own):
        own = tuple(part for each in own for part in _by_label(model, kind, each))
    if any(part.by_index for part in other):
        own = tuple(part if part.by_index else _by_index(kind, part) for part in own)
    halved = {part.component.label: part.component for part in other if part.component.pair is not None}
    return tuple(_in_halves(part, halved.get(part.component.label)) for part in own)


def _dims_of(kind: Kind, own: Portion) -> list[int]:
    """The dimensions of a component in the stored order. Raises PlanError where one of them is taken apart."""
    component, start, dims = own.component, 0, []
    places = {tuple(component.of_dim(dim)): dim for dim in range(len(component.counts))}
    for count in own.counts:
        dim = places.get(own.order[start : start + count])
        if dim is None:
            raise PlanError(
                f"tensor '{kind.name}' is stored in another order within a dimension here and in parts there",
                "write it as huggingface first",
            )
        dims.append(dim)
        start += count
    return dims


def _by_label(model: Model, kind: Kind, own: Portion) -> Iterator[Portion]:
    """A tensor that is stored whole, as its labelled components."""
    dims, parts = _dims_of(kind, own), components(rule_of(model, kind))
    if own.slots > 1:
        raise PlanError(
            f"tensor '{kind.name}' is joined with others here and stored in parts there",
            "write it as huggingface first",
        )
    for slot, part in enumerate(map(without_first, parts) if own.by_index else parts):
        yield replace(
            own, component=part, slot=slot, slots=len(parts), dim=dims.index(part.dim), lead=part.lead,
            order=tuple(place for dim in dims for place in part.of_dim(dim)),
            counts=tuple(part.counts[dim] for dim in dims),
        )  # fmt: skip


def _by_index(kind: Kind, own: Portion) -> Portion:
    """What one index of the first dimension has of a tensor that is stored as a stack of these."""
    if own.order[0] != 0 or own.counts[0] != 1 or own.stacked is not None or (own.slots > 1 and own.dim == 0):
        raise PlanError(
            f"tensor '{kind.name}' is stored by '{kind.rule.dims[0]}' there, and here in another order",
            "write it as huggingface first",
        )
    return replace(
        own, component=without_first(own.component), by_index=True, stacked=kind.rule.dims[0].axis,
        order=tuple(place - 1 for place in own.order[1:]), counts=own.counts[1:], dim=max(own.dim - 1, 0),
    )  # fmt: skip


def _in_halves(own: Portion, other: Component | None) -> Portion:
    """Splits one factor of ``own`` in two where ``other`` has halves or pairs in its place. The stored order stays."""
    if other is None or own.component.pair is not None:
        return own
    place = other.pair
    assert place is not None
    order = tuple(found for each in own.order for found in ((each + (each > place), *([each + 1] * (each == place)))))
    at, ends = own.order.index(place), [*itertools.accumulate(own.counts)]
    dim = next(dim for dim, end in enumerate(ends) if at < end)
    counts = tuple(count + (number == dim) for number, count in enumerate(own.counts))
    inside = dim == own.dim and at < ends[dim] - own.counts[dim] + own.lead
    return replace(own, component=other, order=order, counts=counts, lead=own.lead + inside)


def kept_whole(component: Component, target: str | None) -> Portion:
    """A component that is stored as it is, under this name or its own."""
    order = tuple(range(len(component.factors)))
    return Portion(component, False, target, None, 0, 1, None, order, component.counts, component.dim, component.lead)


class _Reading:
    """Applies a format to the kinds of a model."""

    def __init__(self, model: Model, format: Format) -> None:
        self.model, self.format = model, format.of(model.config)
        self._seen = format.types.seen.get(format.types.name_of(model.config))
        self.names = {kind: template_of(model.architecture, kind) for kind in model.kinds}
        self._there = frozenset(self.names.values())
        self._beside = _Beside(model, self.format)
        self._first = {tensor.kind: tensor for tensor in reversed(model.tensors)} if self._beside.lines else {}

    def all(self) -> dict[Kind, Taken]:
        """What the program makes of each kind."""
        found = {kind: list(self._candidates(kind)) for kind in self.model.kinds}
        while True:
            joined: dict[tuple[int, str | None], set[int]] = defaultdict(set)
            for candidates in found.values():
                for portion in candidates[0] if candidates else ():
                    joined[id(portion.line), portion.target].add(portion.slot)
            lacking = [
                kind
                for kind, candidates in found.items()
                if any(
                    portion.line is not None and len(joined[id(portion.line), portion.target]) < portion.slots
                    for portion in (candidates[0] if candidates else ())
                )
            ]
            if not lacking:
                break
            for kind in lacking:
                del found[kind][0]
        dropped = dropped_of(self.model, self.format)
        stored = {tensor.kind for tensor in self.model.tensors if tensor.name not in dropped}
        for kind, candidates in found.items():
            if not candidates and kind not in stored:
                candidates.append((kept_whole(whole(rule_of(self.model, kind)), None),))
            if not candidates:
                raise PlanError(
                    f"tensor '{kind.name}' has no place in the format '{self.format.name}'",
                    f"formats/programs/{self.format.name}.toml has no line for '{self.names[kind]}'",
                )
            self._check(kind)
        return {kind: tuple(map(self._named, candidates[0])) for kind, candidates in found.items()}

    def _check(self, kind: Kind) -> None:
        """Raise PlanError for a tensor that the program cannot have, or is not known to have."""
        if self._seen is not None and self.names[kind] not in self._seen:
            raise PlanError(
                f"tensor '{kind.name}' has no place in the format '{self.format.name}': no model that was compared "
                f"with {self.format.loading.program} has it"
            )
        for refusal in self.format.rules.refusals:
            if refusal.found.match(self.names[kind]) is None or (refusal.scalars and math.prod(kind.shape) > 1):
                continue
            if refusal.when is None or self.model.sizes.evaluate(refusal.when, dict(kind.indices)):
                raise PlanError(
                    f"tensor '{kind.name}' has no place in the format '{self.format.name}': {refusal.why}",
                    "'reshard formats SOURCE' says which formats are possible",
                )

    def _candidates(self, kind: Kind) -> Iterator[Taken]:
        name = self.names[kind]
        uses = list(self._uses(name, kind))
        for use in uses:
            if use.line.part is None:
                one = self._portion(kind, whole(rule_of(self.model, kind)), use)
                yield tuple(self._apart(kind, use)) if use.line.apart else (one,)
        yield from self._in_parts(kind, {use.line.part: use for use in reversed(uses)})
        yield from self._unpacked(kind, name)
        if self.format.rules.keep:
            yield (kept_whole(whole(rule_of(self.model, kind)), name),)

    def _in_parts(self, kind: Kind, uses: Mapping[str | None, Use]) -> Iterator[Taken]:
        """A packed tensor whose components are tensors of the program's, if there are lines for all of them."""
        parts = components(rule_of(self.model, kind))
        if parts and all(part.label in uses for part in parts):
            yield tuple(self._portion(kind, part, uses[part.label]) for part in parts)

    def _uses(self, name: str, kind: Kind) -> Iterator[Use]:
        for use in self.format.rules.uses(name):
            line = use.line
            if line.also or (line.order.by is not None and line.order.by not in kind.rule.axes):
                continue
            if line.condition.without is not None and any(
                line.condition.without.match(other) is not None for other in self._there
            ):
                continue
            if line.condition.beside is not None and not self._beside.holds(use, self._first[kind]):
                continue
            if line.condition.when is None or self.model.sizes.evaluate(line.condition.when, dict(kind.indices)):
                yield use

    def _unpacked(self, kind: Kind, name: str) -> Iterator[Taken]:
        """A packed tensor by its components, if lines cover the names of all of them."""
        parts = {part.label: part for part in components(rule_of(self.model, kind))}
        experts = by_name(name, kind.rule)
        if experts:
            found = {
                label: without_first(parts.get(label) or whole(rule_of(self.model, kind)))
                for label in [*parts, *([] if parts else [None])]
            }
            named = dict(zip(experts, found.values(), strict=True))
        elif parts:
            module, _, leaf = name.rpartition(".")
            parent = module.rpartition(".")[0]
            named = {f"{parent}.{label}_proj.{leaf}": part for label, part in parts.items()}
        else:
            return
        uses = [next(self._uses(new, kind), None) for new in named]
        if all(use is not None for use in uses):
            pairs = zip(named.values(), uses, strict=True)
            yield tuple(self._portion(kind, part, use, by_index=bool(experts)) for part, use in pairs if use)

    def _portion(self, kind: Kind, component: Component, use: Use, *, by_index: bool = False) -> Portion:
        line, sizes = use.line, self.model.sizes.of(dict(kind.indices))
        for axes, halves in ((line.order.pairs, True), (line.order.halves, False)):
            if axes and axes[use.source]:
                component = component.in_two(axes[use.source], sizes, halves=halves)
        dims = list(range(len(component.counts)))
        if line.order.output_first and component.arrow is not None:
            dims[-2:] = [dims[-1], dims[-2]]
        has_arrow = component.arrow is not None and not line.order.output_first
        order = [factor for dim in dims for factor in component.of_dim(dim)]
        if component.pair is not None:
            at = order.index(component.pair)
            order[at], order[at + 1] = order[at + 1], order[at]
        counts = tuple(component.counts[dim] for dim in dims)
        joined = len(dims) - 1 if has_arrow and len(dims) > 1 else 0
        if line.order.ones is not None:
            counts, joined = (
                _with_ones(counts, [str(component.factors[place]) == "1" for place in order], line.order.ones),
                0,
            )
        lead = 0
        if line.order.by is not None:
            begin = sum(counts[:joined])
            inside = [component.factors[place].axis for place in order[begin : begin + counts[joined]]]
            if line.order.by not in inside:
                raise PlanError(f"tensor '{kind.name}': '{line.order.by}' is no factor of '{component.shape}'")
            lead = inside.index(line.order.by) + 1
        return Portion(
            component, by_index, use.target, use.stacked[1:-1] if use.stacked else None, use.source,
            len(line.sources), line, tuple(order), counts, joined, lead,
        )  # fmt: skip

    def _apart(self, kind: Kind, use: Use) -> Iterator[Portion]:
        found = {part.label: part for part in components(rule_of(self.model, kind))}
        for slot, label in enumerate(use.line.apart):
            if label not in found or len(found) != len(use.line.apart):
                raise PlanError(
                    f"tensor '{kind.name}': '{kind.rule}' does not have the parts {', '.join(use.line.apart)}"
                )
            portion = self._portion(kind, found[label], use)
            yield replace(portion, slot=slot, slots=len(use.line.apart))

    def _named(self, portion: Portion) -> Portion:
        if not portion.counts and any(
            pattern.match(str(portion.target)) is not None for pattern in self.format.rules.vectors
        ):
            portion = replace(portion, vector=True)
        for renaming in self.format.rules.names:
            found = renaming.found.match(str(portion.target))
            if found is not None and (renaming.when is None or self.model.sizes.evaluate(renaming.when, {})):
                return replace(portion, target=renaming.new.fill(found))
        return portion


def _with_ones(counts: Sequence[int], is_one: Sequence[bool], places: Sequence[int]) -> tuple[int, ...]:
    """The number of factors of each dimension, with the dimensions of length 1 at these places and no others.

    The factor of one that goes is the next dimension's, or else the last's; one that comes has none.
    """
    found, start, waiting = list[int](), 0, 0
    for count in counts:
        if all(is_one[start : start + count]):
            waiting += count
        else:
            found.append(count + waiting)
            waiting = 0
        start += count
    if waiting and found:
        found[-1] += waiting
    for place in sorted(places):
        found.insert(place, 0)
    return tuple(found)


class _Beside:
    """Which of a model's tensors have another beside them, for the lines of a format that ask for one."""

    def __init__(self, model: Model, format: Format) -> None:
        self._architecture, self._format = model.architecture, format
        self.lines = [line for line in format.rules.lines if line.condition.beside is not None]
        self._names = {kind: template_of(model.architecture, kind) for kind in model.kinds} if self.lines else {}
        wanted = {other for name in self._names.values() for other in self._others(name)}
        self._axes = {kind: tuple(model.architecture.index_places(kind.name)) for kind in self._names}
        self._there: dict[str, set[tuple[int, ...]]] = {name: set() for name in wanted}
        for tensor in model.tensors if wanted else ():
            if self._names[tensor.kind] in wanted:
                self._there[self._names[tensor.kind]].add(tensor.at)

    def holds(self, use: Use, tensor: BoundTensor) -> bool:
        """Whether a tensor has beside it what a line that covers it asks for."""
        return self._has(self._other(use, self._names[tensor.kind]), tensor)

    def key(self, tensor: BoundTensor) -> tuple[bool, ...]:
        """What a tensor has beside it, of all that lines that cover it ask for."""
        return tuple(self._has(other, tensor) for other in self._others(self._names[tensor.kind]))

    def _has(self, other: str, tensor: BoundTensor) -> bool:
        numbers = dict(zip(self._axes[tensor.kind], tensor.at, strict=True))
        axes = [segment[1:-1] for segment in other.split(".") if segment.startswith("{")]
        return tuple(numbers.get(axis, -1) for axis in axes) in self._there[other]

    def _others(self, name: str) -> list[str]:
        return [
            self._other(use, name) for use in self._format.rules.uses(name) if use.line.condition.beside is not None
        ]

    @staticmethod
    def _other(use: Use, name: str) -> str:
        assert use.line.condition.beside is not None
        return use.line.condition.beside.fill(use.line.sources[use.source].match(name) or {})


def apart_by_lines(model: Model, format: Format) -> Model:
    """The same model with kinds divided so that the same lines of a format cover all tensors of a kind."""
    beside = _Beside(model, format.of(model.config))
    return divided(model, beside.key) if beside.lines else model


def template_of(architecture: Architecture, kind: Kind) -> str:
    """The name of a kind's tensors with its indices as ``{layer}``, in the architecture's own spelling."""
    key = kind.name, kind.template
    if key not in architecture.templates:
        architecture.templates[key] = _template_of(architecture, kind)
    return architecture.templates[key]


def _template_of(architecture: Architecture, kind: Kind) -> str:
    general = _general(architecture, kind.name, rest=kind.template.endswith("*"))
    if general == kind.template or _is_same_line(architecture, kind):
        return kind.template
    module, prefix = kind.template.rpartition(".")[0], architecture.prefixes[0] if architecture.prefixes else ""
    inner = module[len(prefix) :] if prefix and module.startswith(prefix) else module
    at = general.find(f"{inner}.")
    return prefix + general[at:] if at >= 0 and module.startswith(prefix) else general


def _is_same_line(architecture: Architecture, kind: Kind) -> bool:
    """Whether the name itself is covered by the kind's line; a scale's is not, but its weight's."""
    match = architecture.match(kind.name)
    return match is not None and match.template == kind.template and not kind.template.endswith("*")


def _general(architecture: Architecture, name: str, *, rest: bool) -> str:
    """A name with its indices as ``{layer}``; with ``rest``, also with its other numbers, as ``{number0}``."""
    axes = {place: axis for axis, place in architecture.index_places(name).items()}
    segments, number = name.split("."), 0
    for i, segment in enumerate(segments):
        if is_index(segment):
            if number in axes:
                segments[i] = f"{{{axes[number]}}}"
            elif rest:
                segments[i] = f"{{number{number}}}"
            number += 1
    return ".".join(segments)


def copies_of(model: Model, format: Format) -> dict[Kind, list[str]]:
    """The second names of the tensors (tied ones) that a program stores twice, by kind."""
    format, found = format.of(model.config), dict[Kind, list[str]]()
    for kind in model.kinds if any(line.also for line in format.rules.lines) else ():
        name = template_of(model.architecture, kind)
        targets = [use.target for use in format.rules.uses(name) if use.line.also]
        if targets:
            found[kind] = targets
    return found


def dropped_of(model: Model, format: Format) -> frozenset[str]:
    """The tensors that a program does not store."""
    found: set[str] = set()
    for dropped in format.of(model.config).rules.dropped:
        if dropped.when is not None and not model.sizes.evaluate(dropped.when, {}):
            continue
        end = model.sizes.evaluate(dropped.beyond, {}) if dropped.beyond is not None else 0
        covered: dict[Kind, list[int]] = {}
        for kind in model.kinds:
            match = dropped.found.match(template_of(model.architecture, kind))
            if match is None or end is None:
                continue
            axes = [*model.architecture.index_places(kind.name)]
            covered[kind] = [axes.index(match[axis][1:-1]) for axis in dropped.found.indices]
        for tensor in model.tensors if covered else ():
            places = covered.get(tensor.kind)
            if places is not None and all(tensor.at[place] >= end for place in places):
                found.add(tensor.name)
    return frozenset(found)
