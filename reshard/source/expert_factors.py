"""What each A and B of experts is made of in another format of adapters.

Two formats cut the weights of experts into other matrices: ``gate_up_proj`` of all experts here, the ``gate_proj`` of
one expert there. The rows of all of them are rows of the checkpoint's own tensors, so a target's rows are found in the
sources'. Matrices that are joined keep one A if their A's have the same bytes; else the ranks are put side by side,
each with zeros in the rows of the others. So nothing is computed, and the sum that is added to a weight is the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.errors import MismatchError, PlanError
from formats.files.checkpoint import ADAPTER
from formats.files.safetensors import TensorInfo
from formats.notation.adapters import Form, Settings, Wrapped, expert_axes, parameters, stacks_elsewhere, wrapped
from formats.notation.architecture import Architecture
from formats.notation.format import Pattern
from formats.notation.format_file import AdapterFormat
from formats.notation.module_names import ModuleTensor, Part, module_tensors
from reshard.model.model import Model
from reshard.source.low_rank import LINEAR, rows_of, shape_of

Indices = tuple[tuple[str, int], ...]
Rows = NDArray[np.int64]


class Weight(NamedTuple):
    """A matrix of the checkpoint: the line of its tensor, the indices in its name without the expert's, the expert."""

    line: str
    indices: Indices
    expert: int


class Matrices(NamedTuple):
    """The matrices of a parameter: ``tensor`` of ``each``, with these ``indices``. ``expert`` is set if it is one."""

    each: Wrapped
    tensor: ModuleTensor
    indices: Indices
    expert: int | None


@dataclass(frozen=True, eq=False)
class Pair:
    """A and B of a parameter, which lie as in ``form``: ``scale`` is what their product is multiplied by."""

    of: Matrices
    a: TensorInfo
    b: TensorInfo
    form: Form
    sizes: Mapping[str, int]
    scale: float


class Block(NamedTuple):
    """Rows of a target's expert, which are ``own`` of a source's; its ranks begin at ``rank``."""

    expert: int
    rows: Rows
    pair: Pair
    of: int
    own: Rows
    rank: int


@dataclass(frozen=True, eq=False)
class Target:
    """A and B that are made of ``blocks``. ``sizes`` are those of expert, rank, in and out."""

    of: Matrices
    form: Form
    sizes: Mapping[str, int]
    dtype: str
    blocks: tuple[Block, ...]

    @property
    def scale(self) -> float | None:
        """What the product is multiplied by; None if it is zero. Raises PlanError if there are several."""
        found = {block.pair.scale for block in self.blocks}
        if len(found) > 1:
            raise PlanError(
                f"the parts of '{self.of.each.name}' are scaled by {min(found)} and by {max(found)}", _APART
            )
        return next(iter(found), None)


_APART = "only a format in which each expert has its own A and B holds that: peft-per-expert"


@dataclass(frozen=True)
class Experts:
    """The experts of a model with an adapter: where the rows of each parameter lie in the checkpoint's tensors."""

    base: Architecture
    model: Model
    rows: dict[tuple[Part, Indices], Rows] = field(default_factory=dict)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes of experts."""
        return expert_axes(self.base, self.model.config)

    def is_expert(self, each: Wrapped) -> bool:
        """Whether a parameter is of experts: all of them, or one."""
        return each.is_stack or bool(Pattern(each.name).indices & self.axes)

    def matrices(self, each: Wrapped, indices: Mapping[str, int]) -> Matrices:
        """The matrices of a parameter with these indices in its name."""
        tensor = next((tensor for tensor in each.tensors if tensor.parts[0].at is not None), each.tensors[0])
        axis = None if each.is_stack else next(iter(Pattern(each.name).indices & self.axes))
        rest = tuple(sorted((name, index) for name, index in indices.items() if name != axis))
        return Matrices(each, tensor, rest, indices[axis] if axis else None)

    def parts(self, of: Matrices) -> Iterator[tuple[Part, Rows, int]]:
        """The parts of each matrix: the rows of the checkpoint's tensor that it has, and its own first row."""
        begin = 0
        for part in of.tensor.parts:
            rows = self._rows(part, of.indices)
            yield part, rows, begin
            begin += len(rows)

    def sizes(self, of: Matrices) -> dict[str, int]:
        """The sizes of expert, in and out."""
        sizes = self.model.sizes.of(dict(of.indices))
        shape = shape_of(of.tensor.shapes, self.model, dict(of.indices))
        first, second = (dim.size(sizes) for dim in shape.dims[-2:])
        sides = (second, first) if shape.arrow is not None else (first, second)
        experts = 1 if of.expert is not None else shape.dims[0].size(sizes)
        return {"expert": experts, "out": sides[0], "in": sides[1]}

    def _rows(self, part: Part, indices: Indices) -> Rows:
        """The indices along the output of a checkpoint's tensor that a part has."""
        part = part if part.at is None else Part(part.source, part.label)
        if (part, indices) not in self.rows:
            self.rows[part, indices] = np.array(rows_of(self.base, self.model, part, dict(indices)), np.int64)
        return self.rows[part, indices]


# ------------------------------------------------------------------------------------------------------------- targets


def targets(
    experts: Experts, pairs: Sequence[Pair], format: AdapterFormat, same: Callable[[TensorInfo, int, Pair], bytes]
) -> list[Target]:
    """What the A and B of experts are made of in a format. ``same`` gives the bytes of an expert's A.

    Raises PlanError if the format has no place for them.
    """
    sources: dict[Weight, list[tuple[Pair, int, Rows, int]]] = defaultdict(list)
    for pair in pairs:
        for part, rows, begin in experts.parts(pair.of):
            for number in range(pair.sizes["expert"]):
                expert = number if pair.of.expert is None else pair.of.expert
                sources[Weight(part.source, pair.of.indices, expert)].append((pair, number, rows, begin))
    found = dict.fromkeys(_asked(experts, sources, format))
    made = [_Making(experts, sources, of) for of in found]
    apart = {each.of.each.name for each in made if not each.has_one_a(same)}
    if not made:
        raise PlanError(f"the experts of this model have no names in the format '{format.name}'")
    return [each.target(side_by_side=each.of.each.name in apart) for each in made]


def _asked(experts: Experts, sources: Mapping[Weight, object], format: AdapterFormat) -> Iterator[Matrices]:
    """The matrices that are made: those that have rows of a source, and what PEFT wraps with them."""
    parts: dict[str, list[tuple[Wrapped, ModuleTensor]]] = defaultdict(list)
    wrapped_with: dict[str, list[tuple[Wrapped, ModuleTensor]]] = defaultdict(list)
    there: set[tuple[str, Indices, int | None]] = set()
    for each in _parameters(experts, {weight.line for weight in sources}, format):
        if format.since is not None:
            wrapped_with[each.module].append((each, each.tensors[0]))
        for tensor in each.tensors:
            for part in tensor.parts:
                parts[part.source].append((each, tensor))
    for line, indices, expert in sources:
        if line not in parts:
            raise PlanError(f"'{line}' has no place in the format '{format.name}'")
        for each, tensor in dict.fromkeys(parts[line]):
            for other, own in [(each, tensor), *wrapped_with[each.module]]:
                of = Matrices(other, own, indices, None if each.is_stack else expert)
                if (other.name, indices, of.expert) not in there:
                    there.add((other.name, indices, of.expert))
                    yield of


def _parameters(experts: Experts, lines: set[str], format: AdapterFormat) -> Iterator[Wrapped]:
    """The parameters of experts in a format, of which some row is in one of these lines."""
    base, config = experts.base, experts.model.config
    modules = {tensor.name for tensor in module_tensors(base, config)}
    if format.factors is None:
        for name, tensors in parameters(base, config).items():
            each = Wrapped(tensors, f"{name.removesuffix('weight')}")
            if tensors[0].dims == 2 and name.endswith(".weight") and experts.is_expert(each):
                yield each
    elif format.since is None:
        yield from (each for _, each in stacks_elsewhere(base, config, (format.name,)) if each.name in modules)
    else:
        names = {
            name
            for name, tensors in parameters(base, config).items()
            for part in chain.from_iterable(tensor.parts for tensor in tensors)
            if tensors[0].dims == 3 and part.source in lines and name in modules
        }
        wanted = Settings(1, {}, tuple(sorted(names)), format.since)
        yield from (each for each in wrapped(base, config, wanted) if each.is_stack)


@dataclass(frozen=True)
class _Making:
    """A target, before the ranks of its A are known."""

    experts: Experts
    sources: Mapping[Weight, Sequence[tuple[Pair, int, Rows, int]]]
    of: Matrices

    @cached_property
    def blocks(self) -> list[Block]:
        """The rows of each expert that a source has."""
        found = []
        for part, rows, begin in self.experts.parts(self.of):
            for number in range(self.experts.sizes(self.of)["expert"]):
                expert = number if self.of.expert is None else self.of.expert
                for pair, of, there, first in self.sources.get(Weight(part.source, self.of.indices, expert), ()):
                    _, mine, theirs = np.intersect1d(rows, there, assume_unique=True, return_indices=True)
                    if len(mine):
                        found.append(Block(number, mine + begin, pair, of, theirs + first, 0))
        return found

    @cached_property
    def factors(self) -> Mapping[int, Sequence[tuple[Pair, int]]]:
        """The pairs, and the experts in them, whose A each expert has."""
        found: dict[int, dict[tuple[Pair, int], None]] = defaultdict(dict)
        for block in self.blocks:
            found[block.expert][block.pair, block.of] = None
        return {expert: [*pairs] for expert, pairs in found.items()}

    def has_one_a(self, content: Callable[[TensorInfo, int, Pair], bytes]) -> bool:
        """Whether the parts of each expert have one A."""
        return all(
            len({(pair.sizes["rank"], pair.scale) for pair, _ in pairs}) == 1
            and all(content(pair.a, of, pair) == content(pairs[0][0].a, pairs[0][1], pairs[0][0]) for pair, of in pairs)
            for pairs in self.factors.values()
            if len(pairs) > 1
        )

    def target(self, *, side_by_side: bool) -> Target:
        """The target, with the ranks of different A's side by side."""
        ranks = [1]
        places: dict[tuple[int, Pair, int], int] = {}
        for expert, pairs in self.factors.items():
            at = 0
            for pair, of in pairs:
                places[expert, pair, of] = at if side_by_side else 0
                at = at + pair.sizes["rank"] if side_by_side else pair.sizes["rank"]
            ranks.append(at)
        blocks = tuple(block._replace(rank=places[block.expert, block.pair, block.of]) for block in self.blocks)
        dtypes = {info.dtype for block in blocks for info in (block.pair.a, block.pair.b)}
        if len(dtypes) > 1:
            shown = " and ".join(sorted(dtypes))
            raise MismatchError(f"{ADAPTER}: the parts of '{self.of.each.name}' have different dtypes, {shown}")
        form = self.of.each.forms[0] if self.of.each.is_stack else LINEAR
        sizes = {**self.experts.sizes(self.of), "rank": max(ranks)}
        return Target(self.of, form, sizes, next(iter(dtypes), "F32"), blocks)


def shapes(target: Target) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and of B."""
    a, b = (
        tuple(math.prod(target.sizes[axis] for axis in dim) for dim in factor.dims)
        for factor in (target.form.a, target.form.b)
    )
    return a, b
