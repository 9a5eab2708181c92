"""The notation: a tensor's shape in named axes, and the part of it on each rank.

``"(kv group head) hidden"`` names every dimension of a query projection. One token per dimension: an axis, an integer,
or a parenthesised sum of products, in which the leftmost factor is slowest (row-major) and ``+`` concatenates summands.
From the text alone follow the size of each dimension and, once axes are dealt to the ranks of a mesh, the runs of
indices that each rank owns. Everything here is pure and knows nothing of files. The text of each tensor is in
``formats/architectures/``, one file per family of models, never in code (see docs/reference/architecture-files.md).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, Union

from reshard.formats.errors import NotationError

Factor = Union[str, int, "Dim"]
Split = Literal["whole", "vector", "column", "row"]
"""The kinds of split: ranks have a whole tensor, a part of a vector, of a matrix's output (column-parallel), or of its
input (row-parallel).
"""

OPEN = "..."

LONGEST, MOST_PARENTHESES = 2000, 100
"""Characters of a shape, and the opening parentheses in it."""
MOST_RUNS = 1 << 20
"""Runs of one dimension that a rank may own: far more than any sensible plan has."""


@dataclass(frozen=True, slots=True)
class Run:
    """The indices ``offset .. offset + length`` of one dimension."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        """The first index after the run."""
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class Share:
    """Part number ``index`` of an axis that is cut into ``parts``: equal parts or, with ``unit``, parts of whole units
    of that many indices.

    With units, each part has the number of units over ``parts``, rounded up; the last parts have what is left, which
    may be nothing. The last unit may be shorter.
    """

    parts: int
    index: int
    unit: int | None = None

    def run(self, size: int) -> Run:
        """The part's indices of an axis of ``size``. Raises NotationError if equal parts do not divide it."""
        if self.unit is None and size % self.parts:
            raise NotationError(f"{size} does not divide into {self.parts} parts")
        length = size // self.parts if self.unit is None else -(-size // (self.unit * self.parts)) * self.unit
        begin = min(self.index * length, size)
        return Run(begin, min(length, size - begin))


@dataclass(frozen=True)
class Summand:
    """A product of factors, slowest first, with the label of the component that it holds, if any."""

    factors: tuple[Factor, ...]
    label: str | None = None

    def __str__(self) -> str:
        text = " ".join(str(factor) for factor in self.factors)
        return f"{self.label}: {text}" if self.label else text


@dataclass(frozen=True)
class Dim:
    """One dimension: products that lie one after the other, counted in blocks of ``step`` indices (the last may be
    shorter). A block has ``per`` entries in the tensor.

    Both are 1 except in quantized checkpoints: a scale for 128 rows, an integer that packs 8 of them, three integers
    that pack 32. A last factor that was quantized on its own (``apart``, in square brackets) is counted in blocks by
    itself: they begin anew with each of its repetitions.
    """

    summands: tuple[Summand, ...]
    step: int = 1
    per: int = 1
    apart: bool = False

    @property
    def whole(self) -> Dim:
        """The same dimension, not counted in blocks."""
        return self.in_blocks(1, 1)

    def in_blocks(self, step: int, per: int) -> Dim:
        """The same dimension counted in blocks, within each part if the parts were quantized on their own."""
        if self.part is None:
            return replace(self, step=step, per=per)
        *rows, _ = self.summands[0].factors
        return replace(self, summands=(Summand((*rows, self.part.in_blocks(step, per)), self.summands[0].label),))

    @property
    def part(self) -> Dim | None:
        """The last factor, if it was quantized on its own: the other factors repeat it."""
        last = self.summands[0].factors[-1]
        return last if isinstance(last, Dim) and last.apart else None

    @property
    def counted(self) -> tuple[int, int]:
        """The indices and the entries of a block."""
        return (self.step, self.per) if self.part is None else self.part.counted

    def places(self, indices: int) -> int:
        """Return the number of entries that the first ``indices`` indices take."""
        return -(-indices * self.per // self.step)

    def unfolded(self, sizes: Mapping[str, int]) -> tuple[Dim, ...]:
        """A product of dimensions as several dimensions, if no block reaches from one row into the next; else the
        dimension itself.

        ``((a b) (c d))/64`` is ``(a b) (c d)/64`` if ``c d`` is a multiple of 64: the same elements in the same order,
        but a rank owns one box of them, not a run in every row.
        """
        factors = self.summands[0].factors
        if len(self.summands) > 1 or len(factors) < 2 or not all(isinstance(factor, Dim) for factor in factors):
            return (self,)
        *rows, last = (factor for factor in factors if isinstance(factor, Dim))
        if (self.step, self.per) == (1, 1):
            return (*rows, last)
        return (*rows, replace(last, step=self.step, per=self.per)) if last.size(sizes) % self.step == 0 else (self,)

    def in_rows(self, sizes: Mapping[str, int]) -> Dim:
        """Return the same dimension as a product of rows and the blocks of one row."""
        factors = self.unfolded(sizes)
        return self if len(factors) == 1 else Dim((Summand(factors),))

    @property
    def axis(self) -> str | None:
        """The axis that stands alone in this dimension, if one does."""
        if len(self.summands) == 1 and len(self.summands[0].factors) == 1 and self.step == 1:
            factor = self.summands[0].factors[0]
            return factor if isinstance(factor, str) else None
        return None

    @property
    def axes(self) -> frozenset[str]:
        """Every axis named in this dimension."""
        return frozenset().union(*(_axes(factor) for summand in self.summands for factor in summand.factors))

    def size(self, sizes: Mapping[str, int]) -> int:
        """The number of indices. Raises NotationError for an axis without a size."""
        whole = sum(math.prod(_factor_size(factor, sizes) for factor in summand.factors) for summand in self.summands)
        return self.places(whole)

    def __str__(self) -> str:
        single = len(self.summands) == 1 and len(self.summands[0].factors) == 1 and not self.summands[0].label
        text = " + ".join(str(summand) for summand in self.whole.summands)
        text = f"[{text}]" if self.apart else text if single else f"({text})"
        step, per = self.counted
        places = f"*{per}" if per > 1 else ""
        return text if step == 1 else f"{text}{places}/{step}"


@dataclass(frozen=True)
class Shape:
    """A tensor's dimensions; those before ``arrow`` are input, if the checkpoint stores the input first.

    An open shape has a ``...`` for all dimensions that a tensor has besides ``dims``, none of them dealt. It counts as
    one dimension for ``arrow``.
    """

    dims: tuple[Dim, ...]
    arrow: int | None = None
    open_at: int | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.arrow))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def axes(self) -> frozenset[str]:
        """Every axis named in the shape."""
        return frozenset().union(*(dim.axes for dim in self.dims))

    @property
    def is_open(self) -> bool:
        """Whether the shape has a ``...``."""
        return self.open_at is not None

    def closed(self, lengths: Sequence[int]) -> Shape:
        """The shape of a tensor with dimensions of these lengths, with numbers in place of ``...``."""
        if self.open_at is None:
            return self
        count = max(len(lengths) - len(self.dims), 0)
        closing = tuple(Dim((Summand((length,)),)) for length in lengths[self.open_at : self.open_at + count])
        arrow = self.arrow + count - 1 if self.arrow is not None and self.arrow > self.open_at else self.arrow
        return Shape((*self.dims[: self.open_at], *closing, *self.dims[self.open_at :]), arrow)

    @property
    def output_dim(self) -> int | None:
        """The dimension of a matrix that is its output: the second to last, or the last after an arrow."""
        if len(self.dims) < 2:
            return None
        return len(self.dims) - (1 if self.arrow is not None else 2)

    @property
    def input_dims(self) -> frozenset[int]:
        """The dimensions of a matrix that are its input: those before an arrow, or the last one, ignoring plain numbers
        after it. A tensor with only one named dimension is not a matrix.
        """
        if self.arrow is not None:
            return frozenset(range(self.arrow))
        named = [i for i, dim in enumerate(self.dims) if dim.axes]
        last = max([1, *named])
        is_matrix = last == len(self.dims) - 1 or len(named) > 1
        return frozenset({last}) if is_matrix and len(self.dims) > 1 else frozenset()

    def split(self, dealt: AbstractSet[str], experts: AbstractSet[str]) -> Split:
        """Return the kind of split of a tensor of this shape if ranks have parts of the axes ``dealt``.

        The axes of ``experts`` do not count: a stack is split as each of its matrices or vectors is.
        """
        leading = next((i for i, dim in enumerate(self.dims[:-1]) if dim.axis not in experts), len(self.dims) - 1)
        inner = {i for i, dim in enumerate(self.dims) if dim.axes & (dealt - experts)}
        if not inner:
            return "whole"
        if len(self.dims) - leading == 1:
            return "vector"
        if self.input_dims & inner:
            return "row"
        outer = [dim for i, dim in enumerate(self.dims) if i >= leading and i not in inner]
        is_one_row = all(not dim.axes and dim.size({}) == 1 for dim in outer)  # "1 -> vocab"
        return "vector" if is_one_row else "column"

    def unfolded(self, sizes: Mapping[str, int]) -> Shape:
        """The same elements in the same order, with each dimension unfolded (see ``Dim.unfolded``)."""
        dims = [dim.unfolded(sizes) for dim in self.dims]
        if all(len(parts) == 1 for parts in dims):
            return self
        arrow = self.arrow if self.arrow is None else sum(len(parts) for parts in dims[: self.arrow])
        return replace(self, dims=tuple(dim for parts in dims for dim in parts), arrow=arrow)

    def in_rows(self, sizes: Mapping[str, int]) -> Shape:
        """The same elements in the same dimensions, each as a product of what it unfolds to (see ``Dim.unfolded``)."""
        return replace(self, dims=tuple(dim.in_rows(sizes) for dim in self.dims))

    def sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The plain shape for the given axis sizes."""
        return tuple(dim.size(sizes) for dim in self.dims)

    def __str__(self) -> str:
        words = [str(dim) for dim in self.dims]
        if self.open_at is not None:
            words.insert(self.open_at, OPEN)
        if self.arrow is not None:
            words.insert(self.arrow, "->")
        return " ".join(words)


# --------------------------------------------------------------------------------------------------- parsing

_TOKEN = re.compile(
    r"\s*(->|\.\.\.|(?:\*\s*[0-9]{0,18}\s*)?/\s*[0-9]{0,18}(?![0-9])|[()[\]+*]|[A-Za-z_][A-Za-z0-9_]*(?:\s*:)?"
    r"|[0-9]{1,18}(?![0-9]))\s*"
)
_CLOSING = {"(": ")", "[": "]"}


@cache
def parse(text: str) -> Shape:
    """Read a shape such as ``"(kv group head) hidden"``.

    Raises NotationError that shows the text and where it goes wrong.
    """
    dims: list[Dim] = []
    arrow: int | None = None
    open_at: int | None = None
    for token in (tokens := _tokens(text)):
        if token == "->":
            if arrow is not None:
                raise NotationError(f"shape '{text}': an arrow stands once, between two dimensions")
            arrow = len(dims) + (open_at is not None)
        elif token == OPEN:
            if open_at is not None:
                raise NotationError(f"shape '{text}': '{OPEN}' stands once")
            open_at = len(dims)
        elif token == "(":
            dim = _parse_sum(text, tokens)
            brackets = str(dim).count("[")
            if brackets and (brackets > 1 or len(dim.summands) > 1 or dim.part is None):
                raise NotationError(f"shape '{text}': square brackets stand once, around the last factor")
            dims.append(dim)
        elif token[0] in "*/":
            per, _, step = token.partition("/")
            step_of, per_of = int(step.strip() or 0), int(per.strip("* ") or not per)
            if not dims or dims[-1].counted != (1, 1) or not step_of or not per_of:
                raise NotationError(
                    f"shape '{text}': '/' stands between a dimension and the size of its blocks, as in 'ff/128' or "
                    "'ff*3/32'"
                )
            dims[-1] = dims[-1].in_blocks(step_of, per_of)
        else:
            dims.append(Dim((Summand((_atom(text, token),)),)))
    if arrow in {0, len(dims) + (open_at is not None)}:
        raise NotationError(f"shape '{text}': an arrow stands once, between two dimensions")
    return Shape(tuple(dims), arrow, open_at)


def _tokens(text: str) -> Iterator[str]:
    if len(text) > LONGEST or text.count("(") > MOST_PARENTHESES:
        raise NotationError(
            f"shape '{text}': at most {LONGEST:,} characters and {MOST_PARENTHESES} parentheses are a shape"
        )
    position = 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotationError(f"shape '{text}': cannot read '{text[position:].strip()}'")
        yield match[1]
        position = match.end()


def _parse_sum(text: str, tokens: Iterator[str], close: str = ")") -> Dim:
    """Read summands up to the closing parenthesis or bracket."""
    summands: list[Summand] = []
    factors: list[Factor] = []
    label: str | None = None
    for token in tokens:
        if token in {close, "+"}:
            if not factors:
                raise NotationError(f"shape '{text}': nothing stands before '{token}'")
            summands.append(Summand(tuple(factors), label))
            if token == close:
                return Dim(tuple(summands), apart=close == "]")
            factors, label = [], None
        elif token in _CLOSING:
            factors.append(_parse_sum(text, tokens, _CLOSING[token]))
        elif token.endswith(":"):
            if factors or label:
                raise NotationError(f"shape '{text}': a label stands at the start of its summand")
            label = token[:-1].rstrip()
        else:
            factors.append(_atom(text, token))
    raise NotationError(f"shape '{text}': a {'parenthesis' if close == ')' else 'bracket'} is not closed")


def _atom(text: str, token: str) -> str | int:
    if token.isdigit():
        if int(token) == 0:
            raise NotationError(f"shape '{text}': a size of 0")
        return int(token)
    if not token.isidentifier():
        raise NotationError(f"shape '{text}': '{token}' stands where an axis or a number should")
    return token


def _axes(factor: Factor) -> frozenset[str]:
    return factor.axes if isinstance(factor, Dim) else frozenset({factor} if isinstance(factor, str) else ())


def _factor_size(factor: Factor, sizes: Mapping[str, int]) -> int:
    if isinstance(factor, int):
        return factor
    if isinstance(factor, Dim):
        return factor.size(sizes)
    try:
        return sizes[factor]
    except KeyError:
        raise NotationError(f"axis '{factor}' has no size") from None


# ------------------------------------------------------------------------------------------------- ownership


def owned(dim: Dim, sizes: Mapping[str, int], shares: Mapping[str, Share]) -> tuple[Run, ...]:
    """The runs of a dimension that a rank owns, increasing and disjoint, given its share of each dealt axis.

    Axes without a share are owned whole. The indices in these runs, counted from 0, are the rank's own. Raises
    NotationError if a block of the dimension would be cut.
    """
    runs, start = list[Run](), 0
    for summand in dim.summands:
        factors = [(_factor_runs(factor, sizes, shares), _factor_size(factor, sizes)) for factor in summand.factors]
        runs += (Run(start + run.offset, run.length) for run in product_runs(factors, summand))
        start += math.prod(size for _, size in factors)
    if dim.step > 1:
        runs = [*merge_runs(runs)]
        for run in runs:
            if run.offset % dim.step or (run.end % dim.step and run.end != start):
                raise NotationError(f"rows {run.offset} to {run.end} of '{dim.whole}' cut a block of {dim.step}")
        ends = ((dim.places(run.offset), dim.places(run.end)) for run in runs)
        runs = [Run(begin, end - begin) for begin, end in ends]
    return tuple(merge_runs(runs))


def product_runs(factors: Sequence[tuple[Sequence[Run], int]], what: object = "a stored dimension") -> list[Run]:
    """The runs of a product of factors, each with its own runs and its size, slowest first.

    Raises NotationError if there are too many; ``what`` names the product in it.
    """
    inner, inner_size = [Run(0, 1)], 1
    for outer, size in reversed(factors):
        if inner == [Run(0, inner_size)]:
            inner = [Run(run.offset * inner_size, run.length * inner_size) for run in outer]
        else:
            if sum(run.length for run in outer) * len(inner) > MOST_RUNS:
                raise NotationError(f"'{what}' has more than {MOST_RUNS:,} runs on a rank")
            indices = (index for run in outer for index in range(run.offset, run.end))
            inner = list(merge_runs(Run(i * inner_size + run.offset, run.length) for i in indices for run in inner))
        inner_size *= size
    return inner


def product_boxes(begin: int, length: int, sizes: Sequence[int]) -> Iterator[tuple[Run, ...]]:
    """A range of a row-major product of ``sizes`` as boxes, in order: a run of each factor."""
    if not sizes:
        yield ()
        return
    inner, end = math.prod(sizes[1:]), begin + length
    while begin < end:
        first, start = divmod(begin, inner)
        if start or end - begin < inner:
            count = min(inner - start, end - begin)
            yield from ((Run(first, 1), *box) for box in product_boxes(start, count, sizes[1:]))
        else:
            whole = (end - begin) // inner
            count = whole * inner
            yield (Run(first, whole), *(Run(0, size) for size in sizes[1:]))
        begin += count


def _factor_runs(factor: Factor, sizes: Mapping[str, int], shares: Mapping[str, Share]) -> list[Run]:
    if isinstance(factor, Dim):
        return list(owned(factor, sizes, shares))
    size = _factor_size(factor, sizes)
    share = shares.get(factor) if isinstance(factor, str) else None
    if share is None:
        return [Run(0, size)]
    try:
        run = share.run(size)
    except NotationError as error:
        raise NotationError(f"axis '{factor}' of size {error.message}") from None
    return [run] if run.length else []


def merge_runs(runs: Iterable[Run]) -> Iterator[Run]:
    """Join neighbouring runs of an increasing sequence."""
    last: Run | None = None
    for run in runs:
        if last is not None and last.end == run.offset:
            last = Run(last.offset, last.length + run.length)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def segments(holders: Mapping[int, Sequence[Run]], ends: Iterable[int] = ()) -> Iterator[tuple[Run, frozenset[int]]]:
    """Cut a dimension at ``ends``, and wherever other holders have it, given the runs of each: all parts, in order,
    with their holders.
    """
    starts = sorted({*ends, *(end for runs in holders.values() for run in runs for end in (run.offset, run.end))})
    place = {start: number for number, start in enumerate(starts)}
    holders_of: list[list[int]] = [[] for _ in starts]
    for holder, runs in holders.items():
        for run in runs:
            for number in range(place[run.offset], place[run.end]):
                holders_of[number].append(holder)
    for number, (begin, end) in enumerate(itertools.pairwise(starts)):
        yield Run(begin, end - begin), frozenset(holders_of[number])


# --------------------------------------------------------------------------------------------------- dealing


def deal(family: Sequence[str], sizes: Mapping[str, int], degree: int) -> dict[str, int] | None:
    """Return the number of parts of each axis of a family, so that together they absorb ``degree``; None if they
    cannot.

    The first axis takes as much as divides it (the greatest common divisor), the next one of the rest, and so on.
    """
    parts: dict[str, int] = {}
    remaining = degree
    for axis in family:
        parts[axis] = math.gcd(sizes[axis], remaining)
        remaining //= parts[axis]
    return parts if remaining == 1 else None


def share(parts: Mapping[str, int], rank: int) -> dict[str, Share]:
    """Return the share that ``rank`` has of each axis of a family: its coordinates, with the first axis slowest."""
    shares: dict[str, Share] = {}
    for axis in reversed(list(parts)):
        shares[axis] = Share(parts[axis], rank % parts[axis])
        rank //= parts[axis]
    return shares


def degrees(family: Sequence[str], sizes: Mapping[str, int], limit: int) -> set[int]:
    """Every degree up to ``limit`` that a family can absorb."""
    whole = math.prod(sizes[axis] for axis in family)
    up_to = min(math.isqrt(whole), limit)
    candidates = {d for i in range(1, up_to + 1) if whole % i == 0 for d in (i, whole // i)}
    return {degree for degree in candidates if degree <= limit and deal(family, sizes, degree) is not None}


def unit_of(dim: Dim, axis: str, sizes: Mapping[str, int]) -> int:
    """Return the number of neighbouring indices of an axis that together fill whole blocks of a dimension; 1 if the
    dimension is not counted in blocks.

    For ``ff`` in ``(ff 2)/128`` it is 64. (It does not check that a block begins where the axis does: see ``owned``.)
    """
    return math.lcm(1, *(dim.step // math.gcd(dim.step, stride) for stride in _strides(dim, axis, sizes)))


def _strides(dim: Dim, axis: str, sizes: Mapping[str, int]) -> Iterator[int]:
    """Yield the number of a dimension's indices within one index of an axis, at each place where the axis
    stands in it.
    """
    for summand in dim.summands:
        stride = 1
        for factor in reversed(summand.factors):
            if isinstance(factor, Dim):
                yield from (stride * inner for inner in _strides(factor, axis, sizes))
            elif factor == axis:
                yield stride
            stride *= _factor_size(factor, sizes)


def encloses(dim: Dim, axis: str) -> bool:
    """Whether other axes lie within one index of an axis, as the elements of a head lie within ``kv`` of
    ``(kv head)``.
    """
    return any(
        (axis in _axes(factor) and any(map(_axes, summand.factors[place + 1 :])))
        or (isinstance(factor, Dim) and encloses(factor, axis))
        for summand in dim.summands
        for place, factor in enumerate(summand.factors)
    )
