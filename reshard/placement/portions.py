"""A format applied to the kinds of a model: the portions of a program's tensors that each kind becomes.

A format (``formats.notation.format``) gives the names, and says what is stacked and joined; see
``reshard.placement.arrangement``.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from reshard.formats.errors import PlanError
from reshard.formats.notation.architecture import filled, numbers_in
from reshard.formats.notation.components import Component, component_names, components, whole
from reshard.formats.notation.format import MODULES, Format, Line, Pattern, Use
from reshard.formats.notation.heads import class_of, is_headless
from reshard.mesh.stages import divided
from reshard.model.model import BoundTensor, Kind, Model


@dataclass(frozen=True, eq=False)
class Portion:
    """One atom of each tensor of a kind, and what a program makes of it."""

    component: Component
    """If it is at an index, it stands for an atom of each index."""
    target: str | None
    """The program's name, with indices as in ``{layer}``; None: the tensor's own."""
    stacked: str | None
    """The axis along which atoms are stacked."""
    slot: int
    """The position among the atoms that are joined."""
    slots: int
    """The number of atoms that are joined."""
    line: Line
    order: tuple[int, ...]
    """The atom's factors in the order in which the program stores them."""
    counts: tuple[int, ...]
    """The number of factors of each dimension."""
    dim: int
    """The dimension along which atoms are joined."""
    lead: int
    """The first factors of that dimension, behind which they are joined."""

    @property
    def function(self) -> str | None:
        """The function that is stored instead of the elements, if there is one."""
        return self.line.function

    @property
    def outer(self) -> int:
        """The number of factors, in the stored order, before those along which atoms are joined."""
        return sum(self.counts[: self.dim]) + self.lead

    def of_dim(self, dim: int) -> tuple[int, ...]:
        """The factors of a stored dimension, in the stored order."""
        start = sum(self.counts[:dim])
        return self.order[start : start + self.counts[dim]] if self.counts else ()


Portions = tuple[Portion, ...]
"""The portions that a program makes of a tensor of some kind: all of its atoms."""


def check_model_type(model: Model, format: Format, *, files: bool = False) -> None:
    """Raise PlanError for a model type that a format is not known to be right for, or has no ``files`` for."""
    types = {str(config.get("model_type")) for config in (model.config, model.sizes.settings)}
    kind, compared, refused = format.types.name_of(model.config), format.types.compared, format.types.refused
    if format.types.only and not types & {*format.types.only} and kind not in {*compared, *refused}:
        raise PlanError(
            f"the model type '{model.config.get('model_type')}' cannot be written as '{format.name}': what "
            f"{format.name} makes of its tensors is not known here",
            f"known are {', '.join(format.types.only)}",
        )
    why = refused.get(kind) or (format.types.beyond.get(kind) if files else None)
    name, cls = kind, class_of(model.config)
    if why is None and cls in format.types.lacking - compared:
        program = format.loading.program.partition(" ")[0]  # its list of classes is of one version
        name, why = cls, f"{program}, as it was read, has no class of this name, nor one that it makes this of"
    elif why is None and format.types.of_tokens and is_headless(model.config):
        name, why = cls, f"{format.loading.program} was looked at for classes with a head for tokens alone"
    elif why is None and compared and not format.types.only and not {kind, cls} & compared:
        why = f"what {format.loading.program} has of it was not compared"
    if why is not None:
        hint = "leave out --names: the names stay" if format.spelling == MODULES else None
        raise PlanError(f"'{name}' has no place in the format '{format.name}': {why}", hint)


_KEPT = Line(Pattern("**"), (Pattern("**"),))


def kept_whole(kind: Kind, target: str | None) -> Portion:
    """Tensors that are stored as they are, under this name or their own."""
    component = whole(kind.rule_in_rows)
    order = tuple(range(len(component.factors)))
    return Portion(component, target, None, 0, 1, _KEPT, order, component.counts, component.dim, component.lead)


def refine(kind: Kind, one: Portions, other: Portions) -> Portions:
    """The portions ``one`` of a kind, in atoms and factors as fine as ``other``'s. Elements stay in their places.

    Refined by each other, both sides have the same atoms. Raises PlanError if a stored order cannot be expressed so.
    """
    finer, portions = {part.component.label: part.component for part in other}, one
    if None not in finer and one[0].component.label is None:  # what is whole here, as its labelled components
        (portion,) = one
        if portion.slots > 1:
            raise _not_in_parts(kind, "joined with others here and stored in parts")
        stored_as = {tuple(portion.component.of_dim(dim)): dim for dim in range(len(portion.component.counts))}
        dims = [stored_as.get(portion.of_dim(dim), -1) for dim in range(len(portion.counts))]
        if -1 in dims:
            raise _not_in_parts(kind, "stored in another order within a dimension here and in parts")
        own = [part.at_index() if portion.component.index else part for part in components(kind.rule_in_rows)]
        portions = ()
        for slot, component in enumerate(own):
            of_dims = [component.of_dim(dim) for dim in dims]
            order, counts, at = tuple(itertools.chain(*of_dims)), tuple(map(len, of_dims)), dims.index(component.dim)
            part = replace(portion, component=component, slot=slot, slots=len(own), dim=at, lead=component.lead)
            portions = (*portions, replace(part, order=order, counts=counts))
    is_indexed, refined = any(component.index for component in finer.values()), list[Portion]()
    for part in portions:
        if is_indexed and part.component.index is None:  # the atoms of each index
            index, is_joined = kind.rule.dims[0], part.slots > 1 and part.dim == 0
            if part.order[0] != 0 or part.counts[0] != 1 or part.stacked is not None or is_joined:
                raise _not_in_parts(kind, f"stored by '{index}' there, and here in another order", "")
            order, dim = tuple(place - 1 for place in part.order[1:]), max(part.dim - 1, 0)
            component, counts = part.component.at_index(), part.counts[1:]
            part = replace(part, component=component, order=order, counts=counts, stacked=index.axis, dim=dim)
        theirs = finer.get(part.component.label, part.component)
        place = theirs.pair
        if place is not None and part.component.pair is None:  # two factors in place of one
            dim = next(dim for dim in range(len(part.counts)) if place in part.of_dim(dim))
            is_lead = dim == part.dim and place in part.of_dim(dim)[: part.lead]
            order = tuple(new for f in part.order for new in (f + (f > place), *([f + 1] if f == place else [])))
            counts = tuple(count + (number == dim) for number, count in enumerate(part.counts))
            part = replace(part, component=theirs, order=order, counts=counts, lead=part.lead + is_lead)
        refined.append(part)
    return tuple(refined)


def _not_in_parts(kind: Kind, how: str, where: str = " there") -> PlanError:
    return PlanError(f"tensor '{kind.name}' is {how}{where}", "write it as huggingface first")


class _FormatOnKinds:
    """Applies a format to the kinds of a model."""

    def __init__(self, model: Model, format: Format) -> None:
        self.model, self.format = model, format.of(model.config)
        self.names = {kind: kind.pattern for kind in model.kinds}
        self._names = frozenset(self.names.values())
        beside = _beside(model, self.format)
        first = {tensor.kind: tensor for tensor in reversed(model.tensors)} if beside is not None else {}
        self._beside = {kind: beside(tensor) for kind, tensor in first.items()} if beside is not None else {}

    def candidates(self, kind: Kind) -> Iterator[Portions]:
        """Yield the portions that lines make of a kind, the best first: of the whole tensor, of its components, or
        unchanged.
        """
        rule, name = kind.rule_in_rows, self.names[kind]
        parts, is_whole = self.format.rules.parts_of(name), False
        for use in self._uses(name, kind):
            is_whole = True
            yield (self._portion(kind, whole(rule), use),)
        for names in component_names(name, rule):
            uses = [(part, next(self._uses(new, kind), None)) for new, part in names.items()]
            if uses and all(use for _, use in uses):
                yield tuple(self._portion(kind, part, use) for part, use in uses if use)
        if self.format.rules.keep and not parts:
            yield (kept_whole(kind, name if self.format.rules.renames else None),)
        elif not is_whole and not {component.label for component in components(rule)} >= {*parts}:
            raise PlanError(f"tensor '{kind.name}': '{kind.rule}' does not have the parts {', '.join(parts)}")

    def check(self, kind: Kind) -> None:
        """Raise PlanError for a tensor that the program cannot have, or is not known to have."""
        seen, name = self.format.types.seen.get(self.format.types.name_of(self.model.config)), self.names[kind]
        lacking = f"tensor '{kind.name}' has no place in the format '{self.format.name}'"
        if seen is not None and name not in seen:
            raise PlanError(f"{lacking}: no model that was compared with {self.format.loading.program} has it")
        for refusal in self.format.rules.refusals:
            is_of_it = refusal.old.match(name) is not None and not (refusal.scalars and math.prod(kind.shape) > 1)
            if is_of_it and self.model.sizes.is_true(refusal.when, dict(kind.indices)):
                raise PlanError(f"{lacking}: {refusal.why}", "'reshard formats SOURCE' says which formats are possible")

    def _uses(self, name: str, kind: Kind) -> Iterator[Use]:
        for use in self.format.rules.uses(name):
            line = use.line
            if line.also or (line.by is not None and line.by not in kind.rule.axes):
                continue
            if line.without is not None and any(line.without.match(other) is not None for other in self._names):
                continue
            if line.share and dict(kind.indices).get(str(use.stacked)) not in self._members(use):
                continue
            if line.beside is not None and not self._beside[kind][id(use)]:
                continue
            if self.model.sizes.is_true(line.when, dict(kind.indices)):
                yield use

    def _members(self, use: Use) -> range:
        """The indices of the stack that a tensor becomes a part of."""
        return use.line.members(self.model.sizes.counts.get(str(use.stacked), 0))

    def _portion(self, kind: Kind, component: Component, use: Use) -> Portion:
        line = use.line
        for axes, halves in ((line.pairs, True), (line.halves, False)):
            if axes and (axis := axes[use.source % len(axes)]):  # one is for all sources
                component = component.in_two(axis, kind.sizes, halves=halves)
        dims = list(range(len(component.counts)))
        if line.output_first and component.arrow is not None:
            dims[-2:] = [dims[-1], dims[-2]]
        joined = len(dims) - 1 if component.arrow is not None and not line.output_first and len(dims) > 1 else 0
        joined = joined if line.dim is None else line.dim
        order = [factor for dim in dims for factor in component.of_dim(dim)]
        if component.pair is not None:
            at = order.index(component.pair)
            order[at], order[at + 1] = order[at + 1], order[at]
        counts = tuple(component.counts[dim] for dim in dims)
        if line.ones is not None:
            counts, joined = _with_ones(counts, [str(component.factors[f]) == "1" for f in order], line.ones), 0
        lead = 0
        if line.by is not None:
            begin = sum(counts[:joined])
            inside = [component.factors[place].axis for place in order[begin : begin + counts[joined]]]
            if line.by not in inside:
                raise PlanError(f"tensor '{kind.name}': '{line.by}' is not a factor of '{component.shape}'")
            lead = inside.index(line.by) + 1
        slots = len(line.sources)
        return Portion(component, use.target, use.stacked, use.source, slots, line, tuple(order), counts, joined, lead)

    def named(self, portion: Portion) -> Portion:
        """A portion under its last name. A number that is to be a vector has a dimension of length 1."""
        target, rules = str(portion.target), self.format.rules
        if not portion.counts and any(vector.match(target) is not None for vector in rules.vectors):
            portion = replace(portion, counts=(0,))
        for name in rules.names:
            words = name.old.match(target)
            if words is not None and self.model.sizes.is_true(name.when):
                return replace(portion, target=name.new.fill(words))
        return portion


def uses_of(model: Model, format: Format) -> dict[Kind, Portions]:
    """Return the portions of each kind of tensors. Raises PlanError for a tensor that no line of the format covers."""
    if format.plain:
        return {kind: (kept_whole(kind, None),) for kind in model.kinds}
    check_model_type(model, format)
    reading = _FormatOnKinds(model, format)
    readings = {kind: [*reading.candidates(kind)] for kind in model.kinds}
    lacking: list[Kind] | None = None
    while lacking is None or lacking:  # a line that joins applies only if all its sources are there
        joined: dict[tuple[int, str | None], set[int]] = defaultdict(set)
        first = {kind: candidates[0] for kind, candidates in readings.items() if candidates}
        for portion in itertools.chain(*first.values()):
            joined[id(portion.line), portion.target].add(portion.slot)
        lacking = [
            kind
            for kind, portions in first.items()
            if any(len(joined[id(part.line), part.target]) < part.slots for part in portions)
        ]
        for kind in lacking:
            del readings[kind][0]
    dropped = dropped_of(model, format)
    stored = {tensor.kind for tensor in model.tensors if tensor.name not in dropped} if dropped else {*readings}
    for kind, candidates in readings.items():
        if kind not in stored:
            continue
        if not candidates:
            raise PlanError(
                f"tensor '{kind.name}' has no place in the format '{format.name}'",
                f"formats/programs/{format.name}.toml has no line for '{reading.names[kind]}'",
            )
        reading.check(kind)
    return {
        kind: tuple(map(reading.named, portions[0])) if portions else (kept_whole(kind, None),)
        for kind, portions in readings.items()
    }


def _with_ones(counts: Sequence[int], is_one: Sequence[bool], places: Sequence[int]) -> tuple[int, ...]:
    """The number of factors of each dimension, with the dimensions of length 1 at these places and no others.

    The factor of one that goes is the next dimension's, or else the last's; one that comes has none.
    """
    merged, start, waiting = list[int](), 0, 0
    for count in counts:
        if all(is_one[start : start + count]):
            waiting += count
        else:
            merged.append(count + waiting)
            waiting = 0
        start += count
    if waiting and merged:
        merged[-1] += waiting
    for place in sorted(places):
        merged.insert(place, 0)
    return tuple(merged)


def _beside(model: Model, format: Format) -> Callable[[BoundTensor], Mapping[int, bool]] | None:
    """Tells, by the id of a line's use, whether the model has the tensors that the line asks for beside this tensor.

    None if no line asks.
    """
    asked: dict[str, dict[int, str]] = {}
    for pattern in {kind.pattern for kind in model.kinds} if any(line.beside for line in format.rules.lines) else ():
        uses = ((use, use.line.beside, use.line.sources[use.source]) for use in format.rules.uses(pattern))
        asked[pattern] = {id(use): to.fill(of.match(pattern) or {}) for use, to, of in uses if to is not None}
    others = {other for of_pattern in asked.values() for other in of_pattern.values()}
    tensors = (tensor for tensor in (model.tensors if others else ()) if tensor.kind.pattern in others)
    present = {filled(tensor.kind.pattern, tensor.indices) for tensor in tensors}

    def beside(tensor: BoundTensor) -> Mapping[int, bool]:
        return {use: filled(to, tensor.indices) in present for use, to in asked[tensor.kind.pattern].items()}

    return beside if asked else None


def apart_by_lines(model: Model, format: Format) -> Model:
    """The same model with kinds divided so that the same lines of a format cover all tensors of a kind."""
    beside = _beside(model, format.of(model.config))
    return divided(model, lambda tensor: tuple(beside(tensor).values())) if beside is not None else model


def dropped_of(model: Model, format: Format) -> frozenset[str]:
    """The tensors that a program does not store."""
    names: set[str] = set()
    for dropped in format.of(model.config).rules.dropped:
        if not model.sizes.is_true(dropped.when):
            continue
        end = model.sizes.evaluate(dropped.beyond, {}) if dropped.beyond is not None else 0
        covered: dict[Kind, list[str]] = {}
        for kind in model.kinds if end is not None else ():
            match = dropped.old.match(kind.pattern)
            if match is not None:
                covered[kind] = [match[axis][1:-1] for axis in dropped.old.indices]
        for tensor in model.tensors if covered else ():
            axes = covered.get(tensor.kind)
            if axes is not None and all(_number(tensor, axis) >= end for axis in axes):
                names.add(tensor.name)
    return frozenset(names)


def _number(tensor: BoundTensor, axis: str) -> int:
    """The number of an index in a tensor's name; ``number0`` is the first of one that an open line covers."""
    if axis in tensor.kind.index_axes:
        return tensor.at[tensor.kind.index_axes.index(axis)]
    return numbers_in(tensor.name)[int(axis.removeprefix("number"))]
