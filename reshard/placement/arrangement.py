"""The arrangement of a model's elements by a program: its tensors, and the place of each Hugging Face tensor in them.

A format (``formats.notation.format``) is applied to a plan. The smallest things that it moves are *atoms*: a Hugging
Face tensor, a component of a packed one, or one expert's part of either. Each atom is laid out on the mesh like a
tensor. A stored tensor is a list of atoms: stacked along a first dimension, and joined along another. So two
arrangements of one model, on any two meshes, differ in names, in places, and in the order of an atom's factors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from reshard.formats.errors import MismatchError, PlanError
from reshard.formats.files.chunks import Chunk
from reshard.formats.files.safetensors import stated_dtype, tensor_bytes
from reshard.formats.notation.architecture import filled, numbers_in
from reshard.formats.notation.axes import Dim, Shape, Summand
from reshard.formats.notation.format import Constant, CutRule, Format, LaterLayers
from reshard.mesh.plan import Layout, Plan
from reshard.mesh.stages import is_layered, layers_at
from reshard.model.model import BoundTensor, Kind, shares_of
from reshard.placement.geometry import Geometry
from reshard.placement.portions import (
    Portion,
    Portions,
    dropped_of,
    kept_whole,
    refine,
    uses_of,
)
from reshard.placement.stored import Atom, Chunks, Location, RankNames, Stated, Stored


class _StoredAtom(NamedTuple):
    """An atom, on its way into a stored tensor, with that one's name (None: the atom's own) and the indices in it."""

    atom: Atom
    kind: Kind
    portion: Portion
    target: str | None
    at: Mapping[str, int]


class Arrangement:
    """A model's elements on a mesh as a program stores them.

    ``stored`` has the program's tensors, ``placed`` says where each atom is, ``copies`` has the tensors that are stored
    a second time: by the format, or by ``twice``, which has the tensor of each second name. ``chunks`` has the chunks
    of each stored tensor, if the format has any; then the numbers of files stand for ranks. Tensors that keep their
    names have those among ``names``, if they are there.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Mapping[Kind, Portions],
        format: Format,
        chunks: Chunks | None,
        twice: Mapping[str, str],
        names: Mapping[str, str] = {},
    ) -> None:
        format, self._names = format.of(plan.model.config), names
        self.plan, self.parts, self.format, self.chunks, self.twice = plan, parts, format, chunks, twice
        self.ranks = plan.mesh.size
        if chunks is not None:
            self.ranks = 1 + max((number for chunks_of in chunks.values() for number in chunks_of), default=-1)
        self.dropped = dropped_of(plan.model, format)
        self._geometries: dict[tuple[object, ...], Geometry] = {}
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self.stored = tuple(self._stored())
        self.stored += tuple(self._constants(format.rules.constants))
        self.atoms = {atom: Location(t, number) for t in self.stored for number, atom in enumerate(t.atoms)}
        self.copies = [(t.atoms[0], Location(t, 0)) for t in self._copies()]
        self.stored += tuple(location.stored for _, location in self.copies)

    def alike(self, rank: int) -> tuple[object, ...]:
        """A key that ranks share if they have the same tensors: the shapes of each kind, and what names depend on."""
        names = (self.plan.mesh.stage(rank), *self._firsts[rank : rank + 1]) if self.chunks is None else ()
        return *names, *[kind.shape(rank) for kind in self._kinds]

    @cached_property
    def _kinds(self) -> Collection[Geometry]:
        return dict.fromkeys(stored.geometry for stored in self.stored)

    def tensors_of(self, rank: int) -> Iterator[tuple[Stored, tuple[int, ...]]]:
        """A rank's tensors, with their shapes."""
        for stored in self.stored:
            shape = stored.geometry.shape(rank)
            if shape is not None:
                yield stored, stored.constant.shape if stored.constant else shape

    def fixed_of(self, rank: int, stated: Mapping[str, bytes]) -> dict[str, bytes]:
        """The content of those of a rank's tensors that have no element of the model: constants, and padding alone.

        What is ``stated`` of a constant counts.
        """
        contents = dict[str, bytes]()
        for stored, shape in self.tensors_of(rank) if self.format.rules.constants or not self.format.plain else ():
            name = stored.name_on(rank)
            if stored.constant:
                contents[name] = stated.get(stored.name) or stored.constant_bytes(shape)
            elif not self.format.plain and stored.atoms and rank in Location(stored, 0).zeros:
                contents[name] = bytes(tensor_bytes(name, stored.dtype, shape))
        return contents

    def _stated(self, kind: Kind) -> Stated | None:
        """The shape that tensors of a kind state of their weight: the rank's in reshard's own form, else the whole."""
        if kind.stated is None:
            return None
        whole = kind.stated.sizes(kind.sizes)
        is_local = self.format.plain
        return Stated(whole, self.plan.layout(replace(kind, rule=kind.stated, shape=whole)) if is_local else None)

    def _stored(self) -> Iterator[Stored]:
        if self.format.plain and all(
            len(portions) == 1 and not portions[0].component.index for portions in self.parts.values()
        ):
            geometries: dict[Kind, tuple[Geometry, Stated | None]] = {}
            for name, kind, _ in self.plan.model.tensors:  # each is stored as it is: there may be half a million
                if kind not in geometries:
                    layouts = (self._layout(kind, self.parts[kind][0], None, self.plan),)
                    geometries[kind] = Geometry(self.parts[kind], layouts, False), self._stated(kind)
                geometry, stated = geometries[kind]
                yield Stored(self._names.get(name, name), kind.dtype, geometry, (Atom(name),), stated=stated)
            return
        parts_of: dict[str, dict[tuple[int, int], _StoredAtom]] = {}
        for tensor in self.plan.model.tensors:
            for portion in self.parts[tensor.kind] if tensor.name not in self.dropped else ():
                for index in range(tensor.shape[0]) if portion.component.index else (None,):
                    name, place, part = self._part(tensor, portion, index)
                    other = parts_of.setdefault(name, {}).setdefault((place, portion.slot), part)
                    if other is not part:
                        raise PlanError(f"tensors '{other.atom.tensor}' and '{tensor.name}' have one place in '{name}'")
        for name, parts in parts_of.items():
            yield self._join(name, parts)

    def _part(self, tensor: BoundTensor, portion: Portion, index: int | None) -> tuple[str, int, _StoredAtom]:
        """The name of the stored tensor that an atom is a part of, its place in the stack, and the part."""
        name, target, at = tensor.name, portion.target, tensor.indices
        if portion.component.index and index is not None:
            at = {**at, portion.component.index: index}
        place = at[portion.stacked] if portion.stacked is not None else 0
        if target is not None:
            if tensor.kind.template.endswith("*"):
                numbers = {f"number{i}": number for i, number in enumerate(numbers_in(name))}
                at = {**numbers, **self.plan.model.architecture.indices_in(name), **at}
            for layers, end in self._ends.items():  # layers behind the last are called otherwise
                words = layers.old.match(target)
                if words is not None and at.get(layers.index, -1) >= end:
                    if layers.one_stage is not None and self.plan.mesh.pp > 1:
                        raise PlanError(f"tensor '{name}' has no place on several stages: {layers.one_stage}")
                    target = layers.new.fill({**words, layers.new_index: f"{{{layers.new_index}}}"})
                    at = {**at, layers.new_index: at[layers.index] - end}
                    break
            name = filled(target, {axis: number + portion.line.shift for axis, number in at.items()})
        name = self._names.get(name, name) if target is None else name
        return (
            name,
            place,
            _StoredAtom(Atom(tensor.name, portion.component.label, index), tensor.kind, portion, target, at),
        )

    def _join(self, name: str, parts: Mapping[tuple[int, int], _StoredAtom]) -> Stored:
        ordered = [parts[place] for place in sorted(parts)]
        kind, first, cut = ordered[0].kind, ordered[0].portion, ordered[0].portion.line.cut
        if len({place for place, _ in parts}) * first.slots != len(parts):
            why = f"{len(parts)} tensors, which are not {first.slots} for each index"
            raise PlanError(f"'{name}' would be made of {why}")
        dtypes = {part.portion.line.dtype or part.kind.dtype for part in ordered}
        dtypes = {self.format.rules.dtypes.get(dtype, dtype) for dtype in dtypes}
        if len(dtypes) > 1:
            texts = " and ".join(sorted(dtypes))
            raise PlanError(f"'{name}' would be joined from tensors of different dtypes, {texts}")
        portions = tuple(part.portion for part in ordered[: first.slots])
        is_across = self.chunks is None and cut is not None and self._is_across(kind, first, cut)
        laid = self.plan if self.chunks is None and not is_across else self.plan.unsplit
        layouts = tuple(self._layout(part.kind, part.portion, part.atom.at, laid) for part in ordered)
        sizes = {layout.full for layout in layouts[: first.slots]}
        if cut is not None and cut.dim is not None and len(sizes) > 1:  # keys of fewer heads, replicated
            texts = " and ".join(map(str, sorted(sizes)))
            raise PlanError(f"'{name}' would be joined from tensors of sizes {texts}, which was not compared")
        chunks = self.chunks.get(name) if self.chunks is not None else None
        if self.chunks is not None and chunks is None:
            raise MismatchError(f"tensor '{name}' is missing")
        heads = math.prod(layouts[0].full[factor] for factor in first.of_dim(first.dim)[: first.lead])
        if is_across and cut is not None:
            ranks, whole = self.plan.laid[kind].boxes, self._geometry(portions, layouts, None)
            chunks = self._equal_ranges(name, whole, 1, ranks, cut.dim)
        elif first.lead and self.chunks is None and heads % dict(self.plan.mesh.degrees).get("tp", 1):
            ranks = layouts[0].boxes
            layouts = tuple(self._layout(part.kind, part.portion, part.atom.at, self.plan.unsplit) for part in ordered)
            chunks = self._equal_ranges(name, self._geometry(portions, layouts, None), heads, ranks)
        geometry = self._geometry(portions, layouts, chunks)
        atoms = tuple(part.atom for part in ordered)
        return Stored(name, dtypes.pop(), geometry, atoms, None, self._naming(ordered[0]), self._stated(kind))

    def _geometry(
        self, portions: tuple[Portion, ...], layouts: tuple[Layout, ...], chunks: Mapping[int, Chunk] | None
    ) -> Geometry:
        whole = Geometry(portions, layouts, portions[0].stacked is not None)
        whole = self._geometries.setdefault((portions, layouts), whole)
        if chunks is None:
            return whole
        return self._geometries.setdefault((whole, tuple(sorted(chunks.items()))), whole.in_chunks(chunks))

    def _is_across(self, kind: Kind, portion: Portion, cut: CutRule) -> bool:
        """Whether ``tp`` cuts a dimension of several factors into ranges that end within the first."""
        if cut.dim is None or cut.parts > 1 or portion.slots > 1 or cut.dim >= len(portion.component.counts):
            return False
        place, *inner = portion.component.of_dim(cut.dim)
        count = portion.component.shape.sizes(kind.sizes)[place]
        return bool(inner) and count % dict(self.plan.mesh.degrees).get("tp", 1) > 0

    def _equal_ranges(
        self, name: str, geometry: Geometry, heads: int, ranks: Iterable[int], dim: int | None = None
    ) -> Mapping[int, Chunk]:
        """The chunk of each rank where ``tp`` has more ranks than KV heads, or cuts this dimension across its factors:
        equal ranges, wherever they end.
        """
        mesh, shape = self.plan.mesh, geometry.shape(0) or ()
        dim = geometry.portions[0].dim + geometry.is_stack if dim is None else dim
        degree, rows = dict(mesh.degrees)["tp"], shape[dim]
        if degree % heads or rows % degree:
            why = f"{rows} rows do not divide into {degree} equal parts" + (" of one head's group" if heads > 1 else "")
            raise PlanError(f"'{name}' cannot be split over {mesh}: {why}")
        length, outer, inner = rows // degree, shape[:dim], shape[dim + 1 :]
        begins = {rank: mesh.coordinates(rank)["tp"] * length for rank in ranks}
        offsets = {rank: (*(0 for _ in outer), begin, *(0 for _ in inner)) for rank, begin in begins.items()}
        return {rank: Chunk(offset, (*outer, length, *inner)) for rank, offset in offsets.items()}

    def _copies(self) -> Iterator[Stored]:
        """Yield the tensors that are stored a second time, under another name (tied tensors)."""
        model, rules, again = self.plan.model, self.format.rules, dict[str, list[str]]()
        for second, first in self.twice.items():
            again.setdefault(first, []).append(second)
        if not again and not any(line.also for line in rules.lines):
            return
        names = {stored.name for stored in self.stored}
        targets = {kind: [use.target for use in rules.uses(kind.pattern) if use.line.also] for kind in model.kinds}
        for tensor in model.tensors:
            for target in (*targets[tensor.kind], *again.get(tensor.name, ())):
                name, _, part = self._part(tensor, kept_whole(tensor.kind, target), None)
                if name not in names and (self.chunks is None or name in self.chunks):  # a run may have it once
                    names.add(name)
                    yield self._join(name, {(0, 0): part})

    def _naming(self, part: _StoredAtom) -> RankNames | None:
        """The name of a stored tensor by its rank, if it is not the same on all; ``part`` is its first."""
        mesh, firsts, target = self.plan.mesh, self._firsts, str(part.target)
        names = part.portion.line.stage_names if mesh.pp > 1 and not self._has_all_around else {}
        is_counted = firsts and any(f"{{{axis}}}" in target for axis in part.at)
        if self.chunks is not None or not (names or is_counted):
            return None
        stages = {stage: names[end] for stage, end in ((0, "first"), (mesh.pp - 1, "last")) if names.get(end)}
        return RankNames(mesh, target, stages, part.at, firsts)

    @cached_property
    def _firsts(self) -> Sequence[Mapping[str, int]]:
        """For each rank, the numbers from which it counts the indices in names; none if names have the model's own."""
        numbered, mesh, model = self.format.rules.numbered, self.plan.mesh, self.plan.model
        sizes = {axis: size for axis, size in model.sizes.of({}).items() if axis in numbered}
        firsts_of = []
        for rank in range(mesh.size if numbered else 0):
            shares = shares_of(model.architecture, mesh, rank, sizes, frozenset(sizes))
            firsts = {axis: shares[axis].run(size).offset for axis, size in sizes.items() if axis in shares}
            if mesh.pp > 1:
                firsts[model.architecture.layers.text] = layers_at(mesh, mesh.stage(rank)).start
            firsts_of.append(firsts)
        return firsts_of

    @cached_property
    def _has_all_around(self) -> bool:
        """Whether every stage has the tensors before and behind the layers."""
        around = self.format.rules.around_layers
        return around is not None and self.plan.model.sizes.is_true(around)

    @cached_property
    def _ends(self) -> Mapping[LaterLayers, int]:
        """The first index that is called otherwise."""
        sizes = self.plan.model.sizes
        ends = {layers: sizes.evaluate(layers.beyond, {}) for layers in self.format.rules.further}
        return {layers: int(end) for layers, end in ends.items() if end is not None}

    def _layout(self, kind: Kind, portion: Portion, index: int | None, laid: Plan) -> Layout:
        """Return the layout of an atom on the mesh of a plan or, for the unsplit plan, on one rank."""
        alike = (kind, portion, index, laid is self.plan)
        if alike in self._layouts:
            return self._layouts[alike]
        component, cut, places, sizes = portion.component, portion.line.cut, kind.places, kind.sizes
        rule, dealt = component.shape, cut.axis if cut is not None else None
        if component.index:
            places = (*places, (component.index, index or 0))
        if cut is not None and cut.axis is None:  # numbers in place of the model's axes, of which none is dealt
            lengths = rule.sizes(sizes)
            dims = [Dim((Summand((length,)),)) for length in lengths]
            if cut.dim is not None:
                if cut.dim >= len(component.counts):
                    raise PlanError(f"tensor '{kind.name}' is cut along dimension {cut.dim}, which it does not have")
                (place, *inner), parts, dealt = component.of_dim(cut.dim), cut.parts, "range"
                while inner and parts % lengths[place] == 0:  # a factor counts the parts
                    parts //= lengths[place]
                    place, *inner = inner
                degree = parts * dict(laid.mesh.degrees).get("tp", 1)
                if lengths[place] % degree:
                    why = f"{lengths[place]} do not divide by {degree}"
                    raise PlanError(f"tensor '{kind.name}' cannot be split over {laid.mesh}: {why}")
                dims[place] = Dim((Summand((parts, dealt) if parts > 1 else (dealt,)),))
                sizes = {**sizes, dealt: lengths[place] // parts}
            rule = Shape(tuple(dims))
        is_everywhere = self._has_all_around and not is_layered(self.plan.model, kind)
        stages = kind.stages if laid is self.plan and not is_everywhere else None
        shape = rule.sizes(sizes)
        part = replace(kind, rule=rule, sizes=sizes, shape=shape, places=places, stages=stages)
        self._layouts[alike] = laid.layout(part, dealt)
        return self._layouts[alike]

    def _constants(self, constants: Sequence[Constant]) -> Iterator[Stored]:
        sizes = self.plan.model.sizes
        for constant in constants:
            if not sizes.is_true(constant.when):
                continue
            dtype = constant.dtype
            if dtype == "model":
                dtype = stated_dtype(self.plan.model.config) or "BF16"
            if constant.axes:
                constant = replace(constant, shape=tuple(sizes.of({}).get(axis, 0) for axis in constant.axes))
            for stored in self.stored:
                words = next(
                    (words for partner in constant.beside if (words := partner.match(stored.name)) is not None), None
                )
                for name in (pattern.fill(words) for pattern in constant.names) if words is not None else ():
                    geometry = stored.geometry
                    if self.chunks is not None:
                        geometry = geometry.whole.in_chunks(self.chunks.get(name, {}))
                    yield Stored(name, dtype, geometry, (), constant)


def arrangement_of(
    plan: Plan,
    format: Format,
    chunks: Chunks | None = None,
    twice: Mapping[str, str] = {},
    names: Mapping[str, str] = {},
) -> Arrangement:
    """A plan's tensors as a format stores them; ``chunks`` are those of files that are there, ``twice`` and ``names``
    are as there.

    Raises PlanError for a tensor that has no place in the format, MismatchError if the chunks do not fit.
    """
    if format.container.chunks and chunks is None:
        chunks = {}
        for stored in on_mesh(plan, format, twice).stored:
            chunks_of = stored.geometry.chunks_of_ranks()
            if stored.constant is not None:
                chunks_of = {min(chunks_of): Chunk((0,) * len(stored.constant.shape), stored.constant.shape)}
            chunks[stored.name] = chunks_of
    return Arrangement(plan, uses_of(plan.model, format), format, chunks, twice, names)


def on_mesh(plan: Plan, format: Format, twice: Mapping[str, str] = {}) -> Arrangement:
    """The same arrangement without chunks: what each rank of the plan's mesh has of each stored tensor. Raises
    PlanError.
    """
    return Arrangement(plan, uses_of(plan.model, format), format, None, twice)


def align_atoms(source: Arrangement, target: Arrangement) -> tuple[Arrangement, Arrangement]:
    """Two arrangements of one model, refined to the same atoms. Raises PlanError if that is not possible."""
    tensors = zip(source.plan.model.tensors, target.plan.model.tensors, strict=True)
    kinds = dict.fromkeys((one.kind, other.kind) for one, other in tensors)

    def refined(side: Arrangement, beside: Arrangement, pairs: Iterable[tuple[Kind, Kind]]) -> Arrangement:
        parts = dict(side.parts)
        for kind, other in pairs:
            parts[kind] = refine(kind, parts[kind], beside.parts[other])
        same = parts == side.parts
        return side if same else Arrangement(side.plan, parts, side.format, side.chunks, side.twice)

    return refined(source, target, kinds), refined(target, source, ((other, kind) for kind, other in kinds))
