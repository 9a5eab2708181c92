"""How a program arranges a model's elements: its tensors, and where in each of them a tensor of Hugging Face's lies.

A page (``formats.notation.rewrites``) is applied to a plan. The smallest things that it moves are *atoms*: a tensor of
Hugging Face's, or a component of a packed one, or what one expert has of it. Each is laid out on the mesh as if it were
a tensor. A stored tensor is a list of atoms: stacked along a first dimension, and joined along another. So two
arrangements of one model, on any two meshes, differ in names, in places, and in the order of an atom's factors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from formats.errors import MismatchError, NotationError, PlanError
from formats.files.boxes import At
from formats.files.safetensors import DTYPE_BITS
from formats.mesh import Mesh, mesh_of
from formats.notation.architecture import Architecture, is_index
from formats.notation.axes import Dim, Run, Shape, Summand
from formats.notation.components import Component, components, whole, without_first
from formats.notation.rewrites import Constant, Line, Page, Use
from formats.notation.unfused_experts import by_name
from reshard.planning.boxes import InBoxes, Lies, boxes_on
from reshard.planning.model import BoundTensor, Kind, Model
from reshard.planning.plan import Box, Layout, Plan, layout_of, make_plan, owners_of
from reshard.planning.rows import Rows
from reshard.planning.shares import shares_of
from reshard.planning.stages import divided, layers_at


class Atom(NamedTuple):
    """A tensor of Hugging Face's, or a part of it: a component (by its label), or an index of the first dimension."""

    tensor: str
    label: str | None = None
    at: int | None = None


@dataclass(frozen=True, eq=False)
class Portion:
    """An atom of each tensor of a kind, and what a program makes of it.

    ``target`` is the program's name, with indices as in ``{layer}``; None is the tensor's own. ``stacked`` is the axis
    along which atoms are stacked. ``by_index`` says that an atom is what one index of the first dimension has. ``slot``
    is its place among the ``slots`` things that are joined. ``order`` has the atom's factors in the order in which the
    program stores them, ``counts`` how many of them each of its dimensions has. Atoms are joined along the dimension
    ``dim``, behind its first ``lead`` factors.
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
    """Whether a number is stored as a vector of one."""

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


Boxes = Mapping[str, Mapping[int, At]]
"""The boxes of stored tensors, by the tensor's name and the number of a file."""


@dataclass(frozen=True, eq=False)
class Naming:
    """The name of a stored tensor where it is not the same on all ranks.

    ``targets`` has the program's name on each rank, with indices as in ``{layer}``; ``at`` the numbers of these, and
    ``firsts`` for each rank the number from which it counts them.
    """

    targets: Sequence[str]
    at: Mapping[str, int]
    firsts: Sequence[Mapping[str, int]]

    def on(self, rank: int) -> str:
        """The name on a rank."""
        name, firsts = self.targets[rank], self.firsts[rank]
        return _filled(name, {axis: number - firsts.get(axis, 0) for axis, number in self.at.items()})


class Stored(NamedTuple):
    """A tensor of a program's. ``atoms`` are in the order of the stack, then of the slots.

    ``naming`` has its name on each rank, if it is not the same on all.
    """

    name: str
    dtype: str
    geometry: Geometry | InBoxes
    atoms: tuple[Atom, ...]
    constant: Constant | None = None
    naming: Naming | None = None

    def name_on(self, rank: int) -> str:
        """Its name on a rank."""
        return self.naming.on(rank) if self.naming else self.name


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the atoms of a stored tensor lie in it, on every rank. Stored tensors of equal layouts share it.

    ``portions`` are its slots, ``layouts`` the layouts of its atoms: those of the first index of the stack, and so on.
    """

    portions: tuple[Portion, ...]
    layouts: tuple[Layout, ...]
    is_stack: bool
    bits: int

    @cached_property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.layouts[0].ranks

    def shape(self, rank: int) -> tuple[int, ...] | None:
        """The shape on a rank; None if it has no part of the tensor."""
        return self._on(rank)[0]

    def lies(self, rank: int, number: int) -> Lies | None:
        """Where an atom lies on a rank; None if it has no part of it."""
        return self._on(rank)[1][number]

    def _on(self, rank: int) -> tuple[tuple[int, ...] | None, list[Lies | None]]:
        if rank not in self._found:
            self._found[rank] = self._compute(rank)
        return self._found[rank]

    @cached_property
    def _found(self) -> dict[int, tuple[tuple[int, ...] | None, list[Lies | None]]]:
        return {}

    def _compute(self, rank: int) -> tuple[tuple[int, ...] | None, list[Lies | None]]:
        slots = len(self.portions)
        lies: list[Lies | None] = [None] * len(self.layouts)
        shape: tuple[int, ...] | None = None
        count, size = 0, 0
        for start in range(0, len(self.layouts), slots):
            if rank not in self.layouts[start].boxes:
                continue
            if shape is None or not self.is_stack:
                shape, found, size = self._one(rank, start)
            first = count * size
            for slot, (base, rows) in enumerate(found):
                if rank not in self.layouts[start + slot].empty:
                    lies[start + slot] = Lies(first + base, rows)
            count += 1
        if shape is None:
            return None, lies
        return ((count, *shape) if self.is_stack else shape), lies

    def _one(self, rank: int, start: int) -> tuple[tuple[int, ...], list[Lies], int]:
        """The shape of one index of the stack, where its atoms lie in it, and its size in bytes."""
        portions = self.portions
        lengths = [_lengths(self.layouts[start + slot], rank, portions[slot].order) for slot in range(len(portions))]
        first, outer = portions[0], math.prod(lengths[0][: portions[0].outer])
        inner = [
            self._bytes(math.prod(found[portion.outer :])) for portion, found in zip(portions, lengths, strict=True)
        ]
        stride, base, lies = sum(inner), 0, []
        for nbytes in inner:
            lies.append(Lies(base, Rows(nbytes, stride) if outer > 1 and nbytes < stride else None))
            base += nbytes
        return _stored_shape(portions, lengths, first), lies, outer * stride

    def _bytes(self, elements: int) -> int:
        nbytes, rest = divmod(elements * self.bits, 8)
        if rest:
            raise PlanError(f"elements of {self.bits} bits would be cut within a byte")
        return nbytes


def _lengths(layout: Layout, rank: int, order: Sequence[int]) -> list[int]:
    """The local length of each factor, in the stored order."""
    dims = layout.boxes[rank].dims
    return [sum(run.length for run in dims[place]) for place in order]


def _stored_shape(portions: Sequence[Portion], lengths: Sequence[Sequence[int]], first: Portion) -> tuple[int, ...]:
    shape, start = [], 0
    for dim, count in enumerate(first.counts):
        if dim == first.dim and len(portions) > 1:
            lead = math.prod(lengths[0][start : start + first.lead])
            own = [
                math.prod(found[start + portion.lead : start + portion.counts[dim]])
                for portion, found in zip(portions, lengths, strict=True)
            ]
            shape.append(lead * sum(own))
        else:
            shape.append(math.prod(lengths[0][start : start + count]))
        start += count
    if not first.counts and (len(portions) > 1 or first.vector):  # numbers, joined to a vector
        shape.append(len(portions))
    return tuple(shape)


# ------------------------------------------------------------------------------------------- applying a page to a model


def uses_of(model: Model, page: Page) -> dict[Kind, Taken]:
    """What a program makes of each kind of tensors. Raises PlanError for a tensor that no line of its page covers."""
    check_model_type(model, page)
    return _Reading(model, page).all()


def check_model_type(model: Model, page: Page) -> None:
    """Raise PlanError for a model type of which a page does not know what the program makes of it."""
    types = {str(of.get("model_type")) for of in (model.config, model.sizes.settings)}
    if page.model_types and not types & {*page.model_types}:
        raise PlanError(
            f"the model type '{model.config.get('model_type')}' cannot be written as '{page.name}': what {page.name} "
            "makes of its tensors is not known here",
            f"known are {', '.join(page.model_types)}",
        )
    why = page.refused.get(page.type_of(model.config))
    if why is not None:
        raise PlanError(f"'{page.type_of(model.config)}' has no place in the format '{page.name}': {why}")


def stored_like(kind: Kind, portions: Taken, other: Taken) -> Taken:
    """The same, in the parts in which ``other`` takes the tensors of this kind."""
    if len(portions) == 1 and portions[0].component.label is None and not portions[0].by_index and _is_apart(other):
        portions = _in_parts(kind, portions[0], other)
    if len(portions) != len(other):
        return portions
    return tuple(_like(own, part) for own, part in zip(portions, other, strict=True))


def unchanged(model: Model) -> dict[Kind, Taken]:
    """What Hugging Face makes of its own tensors: each is stored as it is."""
    return {kind: (_kept(whole(kind.rule), None),) for kind in model.kinds}


def _is_apart(portions: Taken) -> bool:
    return len(portions) > 1 or portions[0].by_index


def _in_parts(kind: Kind, own: Portion, parts: Taken) -> Taken:
    """A tensor that is stored whole, as its parts."""
    if own.order != tuple(range(len(own.order))):
        raise PlanError(f"tensor '{kind.name}' is stored in another order and in parts, which is not possible yet")
    return tuple(
        replace(
            _kept(part.component, own.target), by_index=part.by_index, slot=slot, slots=len(parts), line=own.line,
            stacked=kind.rule.dims[0].axis if part.by_index else None,
        )
        for slot, part in enumerate(parts)
    )  # fmt: skip


def _like(own: Portion, other: Portion) -> Portion:
    """A portion whose atom has the factors of ``other``'s, where that has more of them (halves)."""
    is_same = (own.by_index, own.component.label) == (other.by_index, other.component.label)
    if not is_same or len(other.component.factors) <= len(own.component.factors):
        return own
    return replace(
        _kept(other.component, own.target), by_index=own.by_index, slot=own.slot, slots=own.slots, line=own.line
    )


def _kept(component: Component, target: str | None) -> Portion:
    order = tuple(range(len(component.factors)))
    return Portion(component, False, target, None, 0, 1, None, order, component.counts, component.dim, component.lead)


class _Reading:
    """Applies a page to the kinds of a model."""

    def __init__(self, model: Model, page: Page) -> None:
        self.model, self.page = model, page.of(model.config)
        self.names = {kind: template_of(model.architecture, kind) for kind in model.kinds}
        self._there = frozenset(self.names.values())
        self._beside = _Beside(model, self.page)
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
        dropped = dropped_of(self.model, self.page)
        stored = {tensor.kind for tensor in self.model.tensors if tensor.name not in dropped}
        for kind, candidates in found.items():
            if not candidates and kind not in stored:
                candidates.append((_kept(whole(kind.rule), None),))
            if not candidates:
                raise PlanError(
                    f"tensor '{kind.name}' has no place in the format '{self.page.name}'",
                    f"its page formats/programs/{self.page.name}.toml has no line for '{self.names[kind]}'",
                )
            self._check(kind)
        return {kind: tuple(map(self._named, candidates[0])) for kind, candidates in found.items()}

    def _check(self, kind: Kind) -> None:
        """Raise PlanError for a tensor that the program cannot have."""
        for refusal in self.page.refusals:
            if refusal.found.match(self.names[kind]) is None or (refusal.scalars and math.prod(kind.shape) > 1):
                continue
            if refusal.when is None or self.model.sizes.evaluate(refusal.when, dict(kind.indices)):
                raise PlanError(
                    f"tensor '{kind.name}' has no place in the format '{self.page.name}': {refusal.why}",
                    "docs/formats.md says what it can hold",
                )

    def _candidates(self, kind: Kind) -> Iterator[Taken]:
        name = self.names[kind]
        uses = list(self._uses(name, kind))
        for use in uses:
            if use.line.part is None:
                yield tuple(self._apart(kind, use)) if use.line.apart else (self._portion(kind, whole(kind.rule), use),)
        yield from self._in_parts(kind, {use.line.part: use for use in reversed(uses)})
        yield from self._unpacked(kind, name)
        if self.page.keep:
            yield (_kept(whole(kind.rule), name),)

    def _in_parts(self, kind: Kind, uses: Mapping[str | None, Use]) -> Iterator[Taken]:
        """A packed tensor whose components are tensors of the program's, if there are lines for all of them."""
        parts = components(kind.rule)
        if parts and all(part.label in uses for part in parts):
            yield tuple(self._portion(kind, part, uses[part.label]) for part in parts)

    def _uses(self, name: str, kind: Kind) -> Iterator[Use]:
        for use in self.page.uses(name):
            line = use.line
            if line.also or (line.by is not None and line.by not in kind.rule.axes):
                continue
            if line.without is not None and any(line.without.match(other) is not None for other in self._there):
                continue
            if line.beside is not None and not self._beside.holds(use, self._first[kind]):
                continue
            if line.when is None or self.model.sizes.evaluate(line.when, dict(kind.indices)):
                yield use

    def _unpacked(self, kind: Kind, name: str) -> Iterator[Taken]:
        """A packed tensor by its components, if lines cover the names of all of them."""
        parts = {part.label: part for part in components(kind.rule)}
        experts = by_name(name, kind.rule)
        if experts:
            found = {
                label: without_first(parts.get(label) or whole(kind.rule))
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
        for axes, halves in ((line.pairs, True), (line.halves, False)):
            if axes and axes[use.source]:
                component = component.in_two(axes[use.source], sizes, halves=halves)
        dims = list(range(len(component.counts)))
        if line.output_first and component.arrow is not None:
            dims[-2:] = [dims[-1], dims[-2]]
        has_arrow = component.arrow is not None and not line.output_first
        order = [factor for dim in dims for factor in component.of_dim(dim)]
        if component.pair is not None:
            at = order.index(component.pair)
            order[at], order[at + 1] = order[at + 1], order[at]
        counts = tuple(component.counts[dim] for dim in dims)
        joined = len(dims) - 1 if has_arrow and len(dims) > 1 else 0
        lead = 0
        if line.by is not None:
            begin = sum(counts[:joined])
            inside = [component.factors[place].axis for place in order[begin : begin + counts[joined]]]
            if line.by not in inside:
                raise PlanError(f"tensor '{kind.name}': '{line.by}' is no factor of '{component.shape}'")
            lead = inside.index(line.by) + 1
        return Portion(
            component, by_index, use.target, use.stacked[1:-1] if use.stacked else None, use.source,
            len(line.sources), line, tuple(order), counts, joined, lead,
        )  # fmt: skip

    def _apart(self, kind: Kind, use: Use) -> Iterator[Portion]:
        found = {part.label: part for part in components(kind.rule)}
        for slot, label in enumerate(use.line.apart):
            if label not in found or len(found) != len(use.line.apart):
                raise PlanError(
                    f"tensor '{kind.name}': '{kind.rule}' does not have the parts {', '.join(use.line.apart)}"
                )
            portion = self._portion(kind, found[label], use)
            yield replace(portion, slot=slot, slots=len(use.line.apart))

    def _named(self, portion: Portion) -> Portion:
        if not portion.counts and any(pattern.match(str(portion.target)) is not None for pattern in self.page.vectors):
            portion = replace(portion, vector=True)
        for renaming in self.page.names:
            found = renaming.found.match(str(portion.target))
            if found is not None and (renaming.when is None or self.model.sizes.evaluate(renaming.when, {})):
                return replace(portion, target=renaming.new.fill(found))
        return portion


class _Beside:
    """Which of a model's tensors have another beside them, for the lines of a page that ask for one."""

    def __init__(self, model: Model, page: Page) -> None:
        self._architecture, self._page = model.architecture, page
        self.lines = [line for line in page.lines if line.beside is not None]
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
        return [self._other(use, name) for use in self._page.uses(name) if use.line.beside is not None]

    @staticmethod
    def _other(use: Use, name: str) -> str:
        assert use.line.beside is not None
        return use.line.beside.fill(use.line.sources[use.source].match(name) or {})


def apart_by_lines(model: Model, page: Page) -> Model:
    """The same model, in which all tensors of a kind are covered by the same lines of a page."""
    beside = _Beside(model, page.of(model.config))
    return divided(model, beside.key) if beside.lines else model


def template_of(architecture: Architecture, kind: Kind) -> str:
    """The name of a kind's tensors with its indices as ``{layer}``, in the architecture's own spelling."""
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


# ------------------------------------------------------------------------------------------------------- arrangements


class Placed(NamedTuple):
    """An atom's stored tensor, and its number there."""

    stored: Stored
    number: int

    @property
    def portion(self) -> Portion:
        """What the program makes of it."""
        portions = self.stored.geometry.portions
        return portions[self.number % len(portions)]

    @property
    def layout(self) -> Layout:
        """Its layout on the mesh, with a dimension for each of its factors."""
        return self.stored.geometry.layouts[self.number]

    def is_zero(self, rank: int) -> bool:
        """Whether a rank has zeros in its place, because a rank before it has the same part."""
        if self.portion.line is None or not self.portion.line.first_rank:
            return False
        boxes = self.layout.boxes
        return any(boxes[other].dims == boxes[rank].dims for other in boxes if other < rank)

    @property
    def zeros(self) -> frozenset[int]:
        """The ranks that have zeros in its place."""
        if self.portion.line is None or not self.portion.line.first_rank:
            return frozenset()
        return frozenset(rank for rank in self.layout.boxes if self.is_zero(rank))

    @property
    def in_rows(self) -> bool:
        """Whether it does not lie in one piece on some rank."""
        geometry = self.stored.geometry
        lies = (geometry.lies(rank, self.number) for rank in range(geometry.ranks))
        return any(found is not None and found.rows is not None for found in lies)


class _Part(NamedTuple):
    """An atom, on its way into a stored tensor."""

    atom: Atom
    portion: Portion
    layout: Layout
    dtype: str
    at: Mapping[str, int]


class Arrangement:
    """A model's elements on a mesh as a program stores them.

    ``stored`` has its tensors, ``placed`` where each atom is, ``copies`` where some are once more. With ``boxes``,
    those of each stored tensor, the numbers of files stand for ranks.
    """

    def __init__(
        self, plan: Plan, taken: Mapping[Kind, Taken], page: Page | None = None, boxes: Boxes | None = None
    ) -> None:
        self.plan, self.taken, self.page, self.boxes = plan, taken, page, boxes
        self._laid = plan if boxes is None else make_plan(plan.model, Mesh(), padding=plan.padding)
        self.ranks = plan.mesh.size
        if boxes is not None:
            self.ranks = 1 + max((number for found in boxes.values() for number in found), default=-1)
        self.dropped = dropped_of(plan.model, page) if page else frozenset()
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._owners: dict[tuple[object, ...], frozenset[int] | None] = {}
        self._geometries: dict[tuple[object, ...], Geometry] = {}
        self._boxed: dict[tuple[object, ...], InBoxes] = {}
        self._even: dict[tuple[object, ...], tuple[Layout, ...]] = {}
        self._index_axes: dict[Kind, tuple[str, ...]] = {}
        self.stored = tuple(self._stored())
        self.stored += tuple(self._constants(page.constants if page else ()))
        self.placed = {atom: Placed(each, number) for each in self.stored for number, atom in enumerate(each.atoms)}
        self.copies = [(each.atoms[0], Placed(each, 0)) for each in self._copies()]
        self.stored += tuple(placed.stored for _, placed in self.copies)

    def held(self, rank: int) -> Iterator[tuple[Stored, tuple[int, ...]]]:
        """A rank's tensors, with their shapes."""
        for each in self.stored:
            shape = each.geometry.shape(rank)
            if shape is not None:
                yield each, each.constant.shape if each.constant else shape

    def _stored(self) -> Iterator[Stored]:
        found: dict[str, dict[tuple[int, int], _Part]] = {}
        layouts: dict[tuple[Kind, Portion, int | None], Layout] = {}
        for tensor in self.plan.model.tensors:
            for portion in self.taken[tensor.kind] if tensor.name not in self.dropped else ():
                dtype = (portion.line.dtype if portion.line else None) or tensor.dtype
                for index in range(tensor.shape[0]) if portion.by_index else (None,):
                    name, place, at = self._name(tensor, portion, index)
                    key = (tensor.kind, portion, index)
                    if key not in layouts:
                        layouts[key] = self._layout(tensor.kind, portion, index)
                    part = _Part(Atom(tensor.name, portion.component.label, index), portion, layouts[key], dtype, at)
                    other = found.setdefault(name, {}).setdefault((place, portion.slot), part)
                    if other is not part:
                        raise PlanError(f"tensors '{other.atom.tensor}' and '{tensor.name}' have one place in '{name}'")
        for name, atoms in found.items():
            yield self._join(name, atoms)

    def _join(self, name: str, parts: Mapping[tuple[int, int], _Part]) -> Stored:
        places = sorted(parts)
        ordered = [parts[place] for place in places]
        first = ordered[0]
        slots, is_stack = first.portion.slots, first.portion.stacked is not None
        if len({place for place, _ in places}) * slots != len(places):
            raise PlanError(f"'{name}' would be made of {len(places)} tensors, which are not {slots} for each index")
        dtypes = {part.dtype for part in ordered}
        if len(dtypes) > 1:
            shown = " and ".join(sorted(dtypes))
            raise PlanError(f"'{name}' would be joined from tensors of different dtypes, {shown}")
        portions = tuple(part.portion for part in ordered[:slots])
        layouts = self._evenly(name, portions, tuple(part.layout for part in ordered))
        key = (portions, layouts, first.dtype)
        if key not in self._geometries:
            self._geometries[key] = Geometry(portions, layouts, is_stack, DTYPE_BITS[first.dtype])
        whole_one = self._geometries[key]
        geometry = whole_one if self.boxes is None else self._in_boxes(name, whole_one, self.boxes)
        atoms = tuple(part.atom for part in ordered)
        return Stored(name, first.dtype, geometry, atoms, naming=self._naming(first.portion, first.at))

    def _evenly(self, name: str, portions: tuple[Portion, ...], layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """The layouts of what is joined, where its ranks have equal ranges of it."""
        line, mesh = portions[0].line, self._laid.mesh
        if line is None or not line.evenly or dict(mesh.degrees).get("tp", 1) == 1:
            return layouts
        key = (portions, layouts)
        if key not in self._even:
            try:
                self._even[key] = evenly(portions, layouts, mesh)
            except NotationError as error:
                raise PlanError(f"'{name}' cannot be split over {mesh}: {error.message}", error.hint) from None
        return self._even[key]

    def _in_boxes(self, name: str, geometry: Geometry, boxes: Boxes) -> InBoxes:
        if name not in boxes:
            raise MismatchError(f"tensor '{name}' is missing")
        key = (geometry, tuple(sorted(boxes[name].items())))
        if key not in self._boxed:
            self._boxed[key] = InBoxes(geometry, boxes[name], self.ranks)
        return self._boxed[key]

    def _copies(self) -> Iterator[Stored]:
        """What is stored a second time, under another name."""
        found = copies_of(self.plan.model, self.page) if self.page else {}
        there = {each.name for each in self.stored}
        for tensor in self.plan.model.tensors if found else ():
            for target in found.get(tensor.kind, ()):
                portion = _kept(whole(tensor.kind.rule), target)
                name, _, at = self._name(tensor, portion, None)
                if name not in there:
                    layout = self._layout(tensor.kind, portion, None)
                    yield self._join(name, {(0, 0): _Part(Atom(tensor.name), portion, layout, tensor.dtype, at)})

    def _naming(self, portion: Portion, at: Mapping[str, int]) -> Naming | None:
        """The name of a stored tensor on each rank, if it is not the same on all."""
        mesh, target = self.plan.mesh, str(portion.target)
        own = {"first": portion.line.first_stage, "last": portion.line.last_stage} if portion.line else {}
        is_staged = mesh.pp > 1 and any(own.values())
        if self.boxes is not None or not (is_staged or (self._firsts and any(f"{{{axis}}}" in target for axis in at))):
            return None
        stages = {0: own.get("first"), mesh.pp - 1: own.get("last")} if is_staged else {}
        key = (target, *stages.items())
        if key not in self._targets:
            self._targets[key] = tuple(stages.get(mesh.stage(rank)) or target for rank in range(mesh.size))
        return Naming(self._targets[key], at, self._firsts or ({},) * mesh.size)

    @cached_property
    def _targets(self) -> dict[tuple[object, ...], tuple[str, ...]]:
        return {}

    @cached_property
    def _firsts(self) -> Sequence[Mapping[str, int]]:
        """For each rank, the numbers from which it counts the indices in names; none if names have the model's own."""
        numbered, mesh, model = self.page.numbered if self.page else (), self.plan.mesh, self.plan.model
        sizes = {axis: size for axis, size in model.sizes.of({}).items() if axis in numbered}
        found = []
        for rank in range(mesh.size if numbered else 0):
            shares = shares_of(model, mesh, rank, sizes, frozenset(sizes))
            firsts = {axis: shares[axis].run(size).offset for axis, size in sizes.items() if axis in shares}
            if mesh.pp > 1:
                firsts[model.architecture.layers.text] = layers_at(mesh, mesh.stage(rank)).start
            found.append(firsts)
        return found

    def _name(self, tensor: BoundTensor, portion: Portion, index: int | None) -> tuple[str, int, Mapping[str, int]]:
        """The program's name, the place in the stack, and the indices in the name."""
        at = dict(zip(self._axes(tensor.kind), tensor.at, strict=True))
        if index is not None:
            at[str(tensor.kind.rule.dims[0].axis)] = index
        place = at[portion.stacked] if portion.stacked is not None else 0
        if portion.target is None:
            return tensor.name, place, at
        if "{number" in portion.target:
            numbers = (segment for segment in tensor.name.split(".") if is_index(segment))
            at |= {f"number{i}": int(number) for i, number in enumerate(numbers)}
        return _filled(portion.target, at), place, at

    def _axes(self, kind: Kind) -> tuple[str, ...]:
        if kind not in self._index_axes:
            self._index_axes[kind] = tuple(self.plan.model.architecture.index_places(kind.name))
        return self._index_axes[kind]

    def _layout(self, kind: Kind, portion: Portion, index: int | None) -> Layout:
        places = kind.places
        if portion.by_index:
            places = (*places, (str(kind.rule.dims[0].axis), int(index or 0)))
        rule, sizes = portion.component.shape, self.plan.model.sizes.of(dict(kind.indices))
        if portion.line is not None and portion.line.whole:
            rule = Shape(tuple(Dim((Summand((length,)),)) for length in rule.sizes(sizes)))
        deal = portion.line.deal if portion.line is not None else None
        model = _dealt_along(self.plan.model, deal) if deal else self.plan.model
        stages = None if portion.line is not None and portion.line.every_stage else kind.stages
        owned = (places, kind.indices, rule.axes, stages)
        part = replace(kind, rule=rule, shape=rule.sizes(sizes), places=places, stages=stages)
        if owned not in self._owners:
            is_dealt = places or stages is not None
            self._owners[owned] = owners_of(self._laid.model, self._laid.mesh, part) if is_dealt else None
        owners = self._owners[owned]
        key = (rule, kind.indices, part.shape, DTYPE_BITS[kind.dtype] % 8, owners, deal)
        if key not in self._layouts:
            self._layouts[key] = layout_of(model, self._laid.mesh, part, self._laid.padding, owners)
        return self._layouts[key]

    def _constants(self, constants: Sequence[Constant]) -> Iterator[Stored]:
        sizes = self.plan.model.sizes
        for constant in constants:
            if constant.when is not None and not sizes.evaluate(constant.when, {}):
                continue
            for each in self.stored:
                found = next((found for of in constant.beside if (found := of.match(each.name)) is not None), None)
                for name in constant.names if found is not None else ():
                    yield Stored(name.fill(found or {}), self._dtype(constant), each.geometry, (), constant)

    def _dtype(self, constant: Constant) -> str:
        if constant.dtype != "model":
            return constant.dtype
        config = self.plan.model.config
        return _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), "BF16")


_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _filled(name: str, at: Mapping[str, int]) -> str:
    """A name with numbers in place of ``{layer}`` and its like."""
    if "{" in name:
        for axis, number in at.items():
            name = name.replace(f"{{{axis}}}", str(number))
    return name


def evenly(portions: Sequence[Portion], layouts: Sequence[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    """The layouts of joined atoms of which each rank of ``tp`` has an equal range, wherever it ends.

    Raises NotationError for a range that is no product of runs of the atoms' factors.
    """
    first, degree = portions[0], dict(mesh.degrees)["tp"]
    places = [of.order[sum(of.counts[: of.dim]) :][: of.counts[of.dim]] for of in portions]
    count = math.prod(layouts[0].full[place] for place in places[0][: first.lead])
    if count % degree == 0:
        return tuple(layouts)
    sizes = [[layout.full[p] for p in of[first.lead :]] for layout, of in zip(layouts, places, strict=True)]
    total = sum(map(math.prod, sizes))
    length, rest = divmod(count * total, degree)
    if rest or first.lead != 1 or total % length:
        raise NotationError(f"{count * total} rows do not divide into {degree} equal parts of one head's group")
    boxes: list[dict[int, Box]] = [{} for _ in layouts]
    for rank in layouts[0].boxes:
        lead, begin = divmod(mesh.coordinates(rank)["tp"] * length, total)
        for slot, (layout, of) in enumerate(zip(layouts, places, strict=True)):
            size = math.prod(sizes[slot])
            inside = Run(min(max(begin, 0), size), max(min(begin + length, size) - max(begin, 0), 0))
            begin -= size
            dims = list(layout.boxes[rank].dims)
            for place, runs in zip(of, ((Run(lead, 1),), *_as_product(inside, sizes[slot])), strict=True):
                dims[place] = runs
            boxes[slot][rank] = Box(tuple(dims), tuple(sum(run.length for run in dim) for dim in dims))
    return tuple(
        replace(layout, boxes=of, parallel_dims=layout.parallel_dims | {*places[slot]})
        for slot, (layout, of) in enumerate(zip(layouts, boxes, strict=True))
    )


def _as_product(run: Run, sizes: Sequence[int]) -> Iterator[tuple[Run, ...]]:
    """The runs of each factor, slowest first, whose product a run is; raises NotationError if there are none."""
    for number in range(len(sizes)):
        inner = math.prod(sizes[number + 1 :])
        if run.offset % inner == 0 and run.length % inner == 0:
            outer, run = Run(run.offset // inner, run.length // inner), Run(0, inner)
        elif run.offset // inner == (run.end - 1) // inner:
            outer, run = Run(run.offset // inner, 1), Run(run.offset % inner, run.length)
        else:
            raise NotationError(f"a rank would have {run.length} rows from row {run.offset} on, in heads of {inner}")
        yield (outer,) if outer.length else ()


def _dealt_along(model: Model, axis: str) -> Model:
    """A model of which ``tp`` deals this axis and no other."""
    families = {**model.architecture.families, "tp": ((axis,),)}
    return replace(model, architecture=replace(model.architecture, families=families))


def permuted(layout: Layout, order: Sequence[int]) -> Layout:
    """The same layout with its dimensions in another order."""
    boxes = {rank: replace(box, dims=tuple(box.dims[place] for place in order)) for rank, box in layout.boxes.items()}
    full, padded = (tuple(sizes[place] for place in order) for sizes in (layout.full, layout.padded))
    return replace(layout, full=full, padded=padded, boxes=boxes)


def arrangement_of(plan: Plan, page: Page, boxes: Boxes | None = None) -> Arrangement:
    """A plan's tensors as a program stores them; ``boxes`` are those of files that are there.

    Raises PlanError for a tensor that the program has no place for, MismatchError if the boxes do not fit.
    """
    if page.boxes and boxes is None:
        stored = unboxed(plan, page).stored
        boxes = {each.name: boxes_on(each.geometry) for each in stored if isinstance(each.geometry, Geometry)}
    return Arrangement(plan, uses_of(plan.model, page), page, boxes)


def unboxed(plan: Plan, page: Page) -> Arrangement:
    """The same without boxes: what each rank of the plan's mesh has of what is stored. Raises PlanError."""
    return Arrangement(plan, uses_of(plan.model, page), page)


def copies_of(model: Model, page: Page) -> dict[Kind, list[str]]:
    """The further names of the tensors of each kind that a program stores twice: tied ones."""
    page, found = page.of(model.config), dict[Kind, list[str]]()
    for kind in model.kinds if any(line.also for line in page.lines) else ():
        name = template_of(model.architecture, kind)
        targets = [use.target for use in page.uses(name) if use.line.also]
        if targets:
            found[kind] = targets
    return found


def dropped_of(model: Model, page: Page) -> frozenset[str]:
    """The tensors that a program does not store."""
    found: set[str] = set()
    for dropped in page.dropped:
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


def program_mesh(
    model: Model, page: Page, tp: int, ep: int, same_ranks: bool, pp: int = 1, pp_layers: Sequence[int] = ()
) -> Mesh:
    """The mesh of ``--tp``, ``--ep`` and ``--pp`` for a program, which may deal experts over the ranks of ``--tp``.

    Raises PlanError for degrees that are not possible, and for stages of which the program's file names say nothing.
    """
    if page.same_ranks and ep == 1 and tp > 1 and model.expert_axes:
        ep, same_ranks = tp, True
    if pp > 1 and page.files_pp is None:
        raise PlanError(f"--pp {pp} is not possible with the format '{page.name}': its ranks have all layers")
    return mesh_of(tp, ep, same_ranks, pp, pp_layers)
