"""How a program arranges a model's elements: its tensors, and where each Hugging Face tensor lies in them.

A format (``formats.notation.format``) is applied to a plan. The smallest things that it moves are *atoms*: a Hugging
Face tensor, a component of a packed one, or one expert's part of either. Each atom is laid out on the mesh like a
tensor. A stored tensor is a list of atoms: stacked along a first dimension, and joined along another. So two
arrangements of one model, on any two meshes, differ in names, in places, and in the order of an atom's factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from formats.errors import MismatchError, NotationError, PlanError
from formats.files.chunks import Chunk
from formats.files.safetensors import DTYPE_BITS, stated_dtype
from formats.mesh import Mesh
from formats.notation.architecture import is_index
from formats.notation.axes import Dim, Run, Shape, Summand
from formats.notation.components import whole
from formats.notation.format import Format
from formats.notation.format_rules import Constant, Further
from reshard.mesh.plan import Box, Layout, Plan, layout_of, owners_of
from reshard.mesh.stages import layers_at
from reshard.model.model import BoundTensor, Kind, Model
from reshard.model.shares import shares_of
from reshard.placement.chunks import chunks_on
from reshard.placement.geometry import Geometry
from reshard.placement.pieces import product_boxes
from reshard.placement.portions import (
    Portion,
    Taken,
    copies_of,
    dropped_of,
    in_parts_of,
    kept_whole,
    rule_of,
    uses_of,
)
from reshard.placement.stored import Atom, Chunks, Naming, Placed, Stated, Stored, filled


class _Part(NamedTuple):
    """An atom, on its way into a stored tensor."""

    atom: Atom
    portion: Portion
    layout: Layout
    dtype: str
    at: Mapping[str, int]
    stated: Stated | None = None


class Arrangement:
    """A model's elements on a mesh as a program stores them.

    ``stored`` has the program's tensors, ``placed`` says where each atom is, ``copies`` has the tensors that are stored
    a second time. ``chunks`` has the chunks of each stored tensor, if the format has any; then the numbers of files
    stand for ranks.
    """

    def __init__(self, plan: Plan, taken: Mapping[Kind, Taken], format: Format, chunks: Chunks | None = None) -> None:
        format = format.of(plan.model.config)
        self.plan, self.taken, self.format, self.chunks = plan, taken, format, chunks
        self._laid = plan if chunks is None else plan.unsplit
        self.ranks = plan.mesh.size
        if chunks is not None:
            self.ranks = 1 + max((number for found in chunks.values() for number in found), default=-1)
        self.dropped = dropped_of(plan.model, format)
        self._geometries: dict[tuple[object, ...], Geometry] = {}
        self._chunked: dict[tuple[object, ...], Geometry] = {}
        self._even: dict[tuple[object, ...], tuple[Layout, ...]] = {}
        self._index_axes: dict[Kind, tuple[str, ...]] = {}
        self.stored = tuple(self._stored())
        self.stored += tuple(self._constants(format.rules.constants))
        self.placed = {atom: Placed(each, number) for each in self.stored for number, atom in enumerate(each.atoms)}
        self.copies = [(each.atoms[0], Placed(each, 0)) for each in self._copies()]
        self.stored += tuple(placed.stored for _, placed in self.copies)

    def taken_apart(self, taken: Mapping[Kind, Taken]) -> Arrangement:
        """The same arrangement with tensors taken apart in another way (see ``in_parts_of``)."""
        return self if taken == self.taken else Arrangement(self.plan, taken, self.format, self.chunks)

    def _stated(self, kind: Kind) -> Stated | None:
        """The shape that tensors of a kind state of their weight: the rank's in reshard's own form, else the whole."""
        if kind.stated is None:
            return None
        own = self.plan.laid[kind].stated if self.format.plain else None
        whole = kind.stated.sizes(self.plan.model.sizes.of(dict(kind.indices)))
        return (lambda holder: whole) if own is None else (lambda holder: own.boxes[holder].shape)

    def held(self, rank: int) -> Iterator[tuple[Stored, tuple[int, ...]]]:
        """A rank's tensors, with their shapes."""
        shapes: dict[Geometry, tuple[int, ...] | None] = {}
        for each in self.stored:
            if each.geometry not in shapes:
                shapes[each.geometry] = each.geometry.shape(rank)
            shape = shapes[each.geometry]
            if shape is not None:
                yield each, each.constant.shape if each.constant else shape

    def _unchanged(self) -> Iterator[Stored]:
        """The tensors of a model each of which is stored as it is: there may be half a million."""
        geometries: dict[Kind, tuple[Geometry, Stated | None]] = {}
        for name, kind, _ in self.plan.model.tensors:
            if kind not in geometries:
                layouts = (self._layout(kind, self.taken[kind][0], None),)
                geometries[kind] = Geometry(self.taken[kind], layouts, False), self._stated(kind)
            geometry, stated = geometries[kind]
            yield Stored(name, kind.dtype, geometry, (Atom(name),), stated=stated)

    def _stored(self) -> Iterator[Stored]:
        if self.format.plain and all(len(of) == 1 and not of[0].by_index for of in self.taken.values()):
            yield from self._unchanged()
            return
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
                    atom, stated = Atom(tensor.name, portion.component.label, index), self._stated(tensor.kind)
                    part = _Part(atom, portion, layouts[key], dtype, at, stated)
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
        if first.portion.cut is not None and first.portion.cut.dim is not None:
            _check_equal(name, ordered[:slots])
        layouts = self._evenly(name, portions, tuple(part.layout for part in ordered))
        key = (portions, layouts)
        if key not in self._geometries:
            self._geometries[key] = Geometry(portions, layouts, is_stack)
        whole_one = self._geometries[key]
        geometry = whole_one if self.chunks is None else self._in_chunks(name, whole_one, self.chunks)
        atoms = tuple(part.atom for part in ordered)
        naming = self._naming(first.atom.tensor, first.portion, first.at)
        return Stored(name, first.dtype, geometry, atoms, None, naming, first.stated)

    def _evenly(self, name: str, portions: tuple[Portion, ...], layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        """The layouts of what is joined, where its ranks have equal ranges of it."""
        line, mesh = portions[0].line, self._laid.mesh
        if line is None or line.order.by is None or dict(mesh.degrees).get("tp", 1) == 1:
            return layouts
        key = (portions, layouts)
        if key not in self._even:
            try:
                self._even[key] = evenly(portions, layouts, mesh)
            except (NotationError, PlanError) as error:
                raise PlanError(f"'{name}' cannot be split over {mesh}: {error.message}", error.hint) from None
        return self._even[key]

    def _in_chunks(self, name: str, geometry: Geometry, chunks: Chunks) -> Geometry:
        if name not in chunks:
            raise MismatchError(f"tensor '{name}' is missing")
        key = (geometry, tuple(sorted(chunks[name].items())))
        if key not in self._chunked:
            self._chunked[key] = geometry.in_chunks(chunks[name])
        return self._chunked[key]

    def _copies(self) -> Iterator[Stored]:
        """What is stored a second time, under another name."""
        found = copies_of(self.plan.model, self.format)
        there = {each.name for each in self.stored}
        for tensor in self.plan.model.tensors if found else ():
            for target in found.get(tensor.kind, ()):
                portion = kept_whole(whole(rule_of(self.plan.model, tensor.kind)), target)
                name, _, at = self._name(tensor, portion, None)
                if name not in there:
                    layout = self._layout(tensor.kind, portion, None)
                    yield self._join(name, {(0, 0): _Part(Atom(tensor.name), portion, layout, tensor.dtype, at)})

    def _naming(self, tensor: str, portion: Portion, at: Mapping[str, int]) -> Naming | None:
        """The name of a stored tensor on each rank, if it is not the same on all."""
        mesh = self.plan.mesh
        target, at = self._placed_further(tensor, str(portion.target), at)
        own = {"first": portion.line.ranks.first_stage, "last": portion.line.ranks.last_stage} if portion.line else {}
        is_staged = mesh.pp > 1 and any(own.values())
        if self.chunks is not None or not (is_staged or (self._firsts and any(f"{{{axis}}}" in target for axis in at))):
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
        numbered, mesh, model = self.format.rules.numbered, self.plan.mesh, self.plan.model
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
        target, places = self._placed_further(tensor.name, portion.target, at)
        return filled(target, places), place, places

    def _placed_further(self, tensor: str, target: str, at: Mapping[str, int]) -> tuple[str, Mapping[str, int]]:
        """The program's name and the indices in it, where layers behind the last are called otherwise."""
        for further in self.format.rules.further:
            words = further.found.match(target)
            end = self._ends.get(further)
            if words is None or end is None or at.get(further.index, -1) < end:
                continue
            if further.one_stage is not None and self.plan.mesh.pp > 1:
                raise PlanError(f"tensor '{tensor}' has no place on several stages: {further.one_stage}")
            words = {**words, further.new_index: f"{{{further.new_index}}}"}
            return further.new.fill(words), {**at, further.new_index: at[further.index] - end}
        return target, at

    @cached_property
    def _ends(self) -> Mapping[Further, int]:
        """The first index that is called otherwise."""
        sizes = self.plan.model.sizes
        found = {each: sizes.evaluate(each.beyond, {}) for each in self.format.rules.further}
        return {each: int(end) for each, end in found.items() if end is not None}

    def _axes(self, kind: Kind) -> tuple[str, ...]:
        if kind not in self._index_axes:
            self._index_axes[kind] = tuple(self.plan.model.architecture.index_places(kind.name))
        return self._index_axes[kind]

    def _layout(self, kind: Kind, portion: Portion, index: int | None) -> Layout:
        places = kind.places
        if portion.by_index:
            places = (*places, (str(kind.rule.dims[0].axis), int(index or 0)))
        rule, sizes = portion.component.shape, self.plan.model.sizes.of(dict(kind.indices))
        cut, deal = portion.cut, portion.cut.axis if portion.cut else None
        if cut is not None and deal is None:
            rule = Shape(tuple(Dim((Summand((length,)),)) for length in rule.sizes(sizes)))
        model = _dealt_along(self.plan.model, deal) if deal else self.plan.model
        stages = None if portion.line is not None and portion.line.ranks.every_stage else kind.stages
        owned = (places, kind.indices, rule.axes, stages)
        part = replace(kind, rule=rule, shape=rule.sizes(sizes), places=places, stages=stages)
        if owned not in self._laid.owners:
            is_dealt = places or stages is not None
            self._laid.owners[owned] = owners_of(self._laid.model, self._laid.mesh, part) if is_dealt else None
        owners = self._laid.owners[owned]
        key = (rule, kind.indices, part.shape, DTYPE_BITS[kind.dtype] % 8, owners, cut)
        if key not in self._laid.layouts:
            layout = layout_of(model, self._laid.mesh, part, self._laid.padding, owners)
            if cut is not None and cut.dim is not None:
                layout = _in_ranges(kind.name, layout, portion, self._laid.mesh)
            self._laid.layouts[key] = layout
        return self._laid.layouts[key]

    def _constants(self, constants: Sequence[Constant]) -> Iterator[Stored]:
        sizes = self.plan.model.sizes
        for constant in constants:
            if constant.when is not None and not sizes.evaluate(constant.when, {}):
                continue
            for each in self.stored:
                found = next((found for of in constant.beside if (found := of.match(each.name)) is not None), None)
                if found is None:
                    continue
                if constant.vector:
                    constant = replace(constant, shape=_whole_shape(each)[:1])
                for pattern in constant.names:
                    name, geometry = pattern.fill(found), each.geometry
                    if geometry.chunks is not None:
                        geometry = geometry.whole.in_chunks((self.chunks or {}).get(name, {}))
                    yield Stored(name, self._dtype(constant), geometry, (), constant)

    def _dtype(self, constant: Constant) -> str:
        if constant.dtype != "model":
            return constant.dtype
        return stated_dtype(self.plan.model.config) or "BF16"


def evenly(portions: Sequence[Portion], layouts: Sequence[Layout], mesh: Mesh) -> tuple[Layout, ...]:
    """The layouts of joined atoms, if each rank of ``tp`` has an equal range of the joined tensor, wherever it ends.

    Raises NotationError for a range that is not a product of runs of the atoms' factors.
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
            boxes_inside = [*product_boxes(inside.offset, inside.length, sizes[slot])]
            if len(boxes_inside) > 1:
                raise PlanError(
                    f"rows {inside.offset} to {inside.end} of {size} are neither whole heads nor within one"
                )
            runs_inside = [(run,) for run in boxes_inside[0]] if boxes_inside else [()] * len(sizes[slot])
            for place, runs in zip(of, ((Run(lead, 1),), *runs_inside), strict=True):
                dims[place] = runs
            boxes[slot][rank] = Box(tuple(dims), tuple(sum(run.length for run in dim) for dim in dims))
    return tuple(
        replace(layout, boxes=of, parallel_dims=layout.parallel_dims | {*places[slot]})
        for slot, (layout, of) in enumerate(zip(layouts, boxes, strict=True))
    )


def _check_equal(name: str, parts: Sequence[_Part]) -> None:
    """Raise PlanError if what is cut and joined has unequal sizes: fewer heads of keys, which may be replicated."""
    sizes = {part.layout.full for part in parts}
    if len(sizes) > 1:
        shown = " and ".join(map(str, sorted(sizes)))
        raise PlanError(f"'{name}' would be joined from tensors of sizes {shown}, which was not compared")


def _in_ranges(name: str, layout: Layout, portion: Portion, mesh: Mesh) -> Layout:
    """The layout of what a line cuts along a dimension, whatever the model's rules say. Raises PlanError."""
    assert portion.cut is not None and portion.cut.dim is not None
    place, parts = sum(portion.component.counts[: portion.cut.dim]), portion.cut.parts
    last = place + portion.component.counts[portion.cut.dim] - 1
    while place < last and parts % layout.full[place] == 0:  # a factor counts the parts
        parts, place = parts // layout.full[place], place + 1
    degree, length = dict(mesh.degrees).get("tp", 1), layout.full[place]
    if length % (degree * parts):
        raise PlanError(f"tensor '{name}' cannot be split over {mesh}: {length} do not divide by {degree * parts}")
    size, boxes = length // (degree * parts), {}
    for rank, box in layout.boxes.items():
        first = mesh.coordinates(rank).get("tp", 0) * size
        runs = tuple(Run(first + part * degree * size, size) for part in range(parts))
        dims = (*box.dims[:place], runs if degree > 1 else (Run(0, length),), *box.dims[place + 1 :])
        boxes[rank] = Box(dims, tuple(sum(run.length for run in dim) for dim in dims))
    return replace(layout, boxes=boxes, parallel_dims=layout.parallel_dims | {place})


def _dealt_along(model: Model, axis: str) -> Model:
    """A model of which ``tp`` deals this axis and no other."""
    families = {**model.architecture.families, "tp": ((axis,),)}
    return replace(model, architecture=replace(model.architecture, families=families))


def arrangement_of(plan: Plan, format: Format, chunks: Chunks | None = None) -> Arrangement:
    """A plan's tensors as a format stores them; ``chunks`` are those of files that are there.

    Raises PlanError for a tensor that has no place in the format, MismatchError if the chunks do not fit.
    """
    if format.container.chunks and chunks is None:
        stored = on_mesh(plan, format).stored
        chunks = {each.name: _chunks_of(each) for each in stored}
    return Arrangement(plan, uses_of(plan.model, format), format, chunks)


def same_atoms(source: Arrangement, target: Arrangement) -> tuple[Arrangement, Arrangement]:
    """Two arrangements of one model, taken apart into the same atoms. Raises PlanError if that is not possible."""
    here, there = source.plan.model, target.plan.model
    pairs = dict.fromkeys(zip((t.kind for t in here.tensors), (t.kind for t in there.tensors), strict=True))
    own, other = source.taken, target.taken
    mine = {kind: in_parts_of(here, kind, own[kind], other[theirs]) for kind, theirs in pairs}
    theirs = {theirs: in_parts_of(there, theirs, other[theirs], own[kind]) for kind, theirs in pairs}
    return source.taken_apart(mine), target.taken_apart(theirs)


def _whole_shape(stored: Stored) -> tuple[int, ...]:
    """The shape of a tensor of which no rank has a part alone."""
    if stored.geometry.chunks is not None:
        return stored.whole_shape
    shapes = map(stored.geometry.shape, stored.geometry.holders)
    return next(shape for shape in shapes if shape is not None)


def _chunks_of(stored: Stored) -> Mapping[int, Chunk]:
    chunks = chunks_on(stored.geometry.whole)
    if stored.constant is None:
        return chunks
    shape = stored.constant.shape
    return {min(chunks): Chunk((0,) * len(shape), shape)}


def on_mesh(plan: Plan, format: Format) -> Arrangement:
    """The same arrangement without chunks: what each rank of the plan's mesh has of each stored tensor. Raises
    PlanError.
    """
    return Arrangement(plan, uses_of(plan.model, format), format)
