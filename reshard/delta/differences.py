"""Tensors that differ between two checkpoints, where and how much. Each byte is read once, and memory does not grow.

The distance of two elements is a number, and also counted in units of the dtype's last place. For people, the tensors
of one kind over layers and experts are one row.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import listed
from reshard.formats.files.safetensors import tensor_bytes, unit_of
from reshard.formats.notation.architecture import numbers_in, without_numbers
from reshard.formats.notation.axes import Run, merge_runs
from reshard.formats.quantization.fp8 import E4M3_VALUES
from reshard.model.model import BoundTensor
from reshard.model.naming import spelled_alike
from reshard.move.jobs import ByteProgress, no_progress
from reshard.move.reading import ByteArray
from reshard.source.source import Source
from reshard.store.threads import Shared, work_together
from reshard.system import cpu_count
from reshard.text import Comparison, align, human_bytes, plural, shape_text
from reshard.transforms.tensors import ARITHMETIC, Content, tensors_of

Codes = NDArray[Any]
"""Elements as unsigned integers."""
Numbers = NDArray[np.float64]


def codes_of(content: NDArray[np.uint8], dtype: str) -> Codes:
    """The elements of a piece of a tensor, or its bytes if these hold several."""
    return content.view(f"<u{unit_of(dtype)}")


_VALUES: Mapping[str, Callable[[Codes], NDArray[Any]]] = {
    "F64": lambda codes: codes.view("<f8"),
    "F32": lambda codes: codes.view("<f4"),
    "F16": lambda codes: codes.view("<f2"),
    "BF16": lambda codes: (codes.astype("<u4") << np.uint32(16)).view("<f4"),
    "F8_E5M2": lambda codes: (codes.astype("<u2") << np.uint16(8)).view("<f2"),
    "F8_E4M3": lambda codes: E4M3_VALUES[codes],
}
"""The dtypes of sign and magnitude: what their bits mean. Others (packed integers, scales) have no difference here."""


def largest_ulps(*ulps: int | None) -> int | None:
    """The largest of those that are known."""
    return max((ulp for ulp in ulps if ulp is not None), default=None)


SAME, CHANGED, DTYPE, SHAPE, HERE, THERE = "same", "changed", "other dtype", "other shape", "only here", "only there"
"""The kinds of ``TensorDiff``."""

_WORKERS, _WORKERS_ELSEWHERE = 4, 8


@dataclass(frozen=True)
class TensorDiff:
    """A tensor of two checkpoints. Numbers of differences are None if the dtype has no numbers."""

    name: str
    """Hugging Face's name."""
    kind: str
    """One of: same, changed, other dtype, other shape, only here, only there."""
    dtypes: tuple[str | None, str | None]
    """The dtypes of both sides."""
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    """The shapes of both sides."""
    elements: int = 0
    """The number of elements, or of bytes where a byte holds several elements."""
    changed: int = 0
    """The number of elements that differ in a bit."""
    largest: float | None = None
    """The largest difference."""
    squares: float | None = None
    """The sum of the squares of the differences."""
    ulps: int | None = None
    """The largest difference in units of the dtype's last place; elements that cross zero are left out."""
    other: int = 0
    """The number of changed elements that are infinite or NaN on a side: no difference counts them."""

    @property
    def share(self) -> float:
        """The share of elements that differ."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def rms(self) -> float | None:
        """The root mean square of the differences over all elements."""
        return None if self.squares is None else math.sqrt(self.squares / self.elements)

    def plus(self, a: Codes, b: Codes) -> TensorDiff:
        """The same with some more elements that differ: ``a`` on the one side, ``b`` on the other."""
        tensor, dtype = replace(self, kind=CHANGED, changed=self.changed + a.size), str(self.dtypes[0])
        if dtype not in _VALUES:
            return tensor
        with np.errstate(invalid="ignore"):  # a NaN of the checkpoint's own
            old, new = (_VALUES[dtype](codes).astype(np.float64) for codes in (a, b))
        finite = np.isfinite(old) & np.isfinite(new)
        if not finite.all():
            old, new, a, b = old[finite], new[finite], a[finite], b[finite]
        with np.errstate(over="ignore"):
            difference = np.abs(new - old)
            difference = np.minimum(difference, sys.float_info.max)  # of two float64 of opposite signs
            squares = (self.squares or 0.0) + float(np.dot(difference, difference))
        magnitude = a.dtype.type((1 << (8 * a.itemsize - 1)) - 1)
        has_crossed = np.sign(old) * np.sign(new) < 0
        first, second = ((codes & magnitude)[~has_crossed] for codes in (a, b))
        ulps = int((np.maximum(first, second) - np.minimum(first, second)).max()) if first.size else None
        return replace(
            tensor, largest=max(self.largest or 0.0, float(difference.max(initial=0.0))),
            squares=min(squares, sys.float_info.max), ulps=largest_ulps(self.ulps, ulps),
            other=self.other + finite.size - old.size,
        )  # fmt: skip


@dataclass(frozen=True, repr=False)
class Diff(Comparison):
    """The differences between two checkpoints, tensor by tensor: first those of ``a`` in its order, then those of ``b``
    alone. True if no tensor differs; ``raise_if_different()`` raises MismatchError.
    """

    a: str
    b: str
    tensors: tuple[TensorDiff, ...]
    """Each has a ``name``, a ``kind``, and what differs in numbers."""
    nbytes: int
    """The bytes that were compared, of each side."""
    config: tuple[str, ...] = ()
    """The keys of config.json that differ."""

    @property
    def same(self) -> bool:
        """Whether no tensor differs."""
        return all(tensor.kind == SAME for tensor in self.tensors)

    def __bool__(self) -> bool:
        return self.same

    def of(self, kind: str) -> tuple[TensorDiff, ...]:
        """The tensors of a kind."""
        return tuple(tensor for tensor in self.tensors if tensor.kind == kind)

    @property
    def headline(self) -> str:
        """The answer, and the number of tensors of each kind."""
        kinds = Counter(tensor.kind for tensor in self.tensors)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
        tensors = f"{plural(len(self.tensors), 'tensor')}: {counts}; {human_bytes(self.nbytes)} of each compared."
        return f"{'SAME' if self.same else 'DIFFERENT'}: {tensors}"

    def to_text(self, width: int | None = None) -> str:
        """A table of the tensors that differ, and the answer."""

        rows = rows_of([tensor for tensor in self.tensors if tensor.kind != SAME])
        table = align([HEAD, *rows], right=(1, 3, 4, 5, 6), width=width, elastic=(0,))
        config = [f"config.json differs: {listed(self.config, 5)}."] if self.config else []
        return "\n".join([*(table if rows else []), *config, self.headline])


PIECE = 1 << 19
"""Bytes of each side that are compared at a time: both stay in a processor's cache."""
_PIECE_ELSEWHERE = 4 << 20


class Pair(NamedTuple):
    """The same bytes of a tensor on both sides, from byte ``begin`` on."""

    begin: int
    left: ByteArray
    right: ByteArray


def pairs(sides: Sequence[Content], nbytes: int, piece: int = PIECE) -> Iterator[Pair]:
    """The bytes of a tensor on both sides, in order, at most ``piece`` at a time."""
    for begin in range(0, nbytes, piece):
        end = min(begin + piece, nbytes)
        a, b = (np.frombuffer(side.read(ARITHMETIC, begin, end), np.uint8) for side in sides)
        yield Pair(begin, a, b)


Keep = Callable[[str, Pair, bool], None]
"""Takes in bytes of a tensor on both sides, and whether they are the same; called by several threads, for each tensor
from one.
"""


def differences(
    a: Source, b: Source, keep: Keep | None = None, progress: ByteProgress = no_progress, *, aliases: bool = False
) -> Diff:
    """Compare two checkpoints of one model; with ``aliases``, tied tensors under each name. Raises ReshardError.

    Names are those of the second.
    """
    spelled = spelled_alike(b.model, a.model)
    of_a, of_b = ({tensor.name: tensor for tensor in side.model.tensors} for side in (a, b))
    for side, named in ((a, of_a), (b, of_b)):
        named.update({second: named[first]._replace(name=second) for second, first in side.aliases.items() if aliases})
    if spelled:
        of_a = {(new := spelled.get(name, name)): tensor._replace(name=new) for name, tensor in of_a.items()}
    known = {name: _known(tensor, of_b.get(name)) for name, tensor in of_a.items()}
    compared_names = [name for name, tensor in known.items() if tensor.kind == SAME]
    sizes = {name: tensor_bytes(name, of_a[name].dtype, of_a[name].shape) for name in compared_names}
    total, moved = sum(sizes.values()), 0
    elsewhere = a.is_remote or b.is_remote
    contents = [tensors_of(side) for side in (a, b)] if compared_names else []
    contents = [{spelled.get(n, n): tensor for n, tensor in contents[0].items()}, contents[1]] if spelled else contents

    def compare(_: int, report: Callable[[int], None]) -> None:
        for name in names:
            dtype, tensor = of_a[name].dtype, known[name]
            both, piece = [side[name].content for side in contents], _PIECE_ELSEWHERE if elsewhere else PIECE
            for pair in pairs(both, sizes[name], piece):
                whole = pair.left.size // 8 * 8  # words first: that is faster
                same = np.array_equal(pair.left[:whole].view("<u8"), pair.right[:whole].view("<u8"))
                same = same and bool((pair.left[whole:] == pair.right[whole:]).all())
                if keep is not None:
                    keep(name, pair, same)
                if not same:
                    left_codes, right_codes = codes_of(pair.left, dtype), codes_of(pair.right, dtype)
                    wrong = left_codes != right_codes
                    tensor = tensor.plus(left_codes[wrong], right_codes[wrong])
                report(pair.left.size)
            known[name] = tensor

    def compared(nbytes: int) -> None:
        nonlocal moved
        moved += nbytes
        progress(moved, total)

    names = Shared(compared_names)
    work_together(_WORKERS_ELSEWHERE if elsewhere else min(_WORKERS, cpu_count()), compare, compared)
    there = [TensorDiff(n, THERE, (None, t.dtype), (None, t.shape)) for n, t in of_b.items() if n not in of_a]
    a.check_unchanged()
    b.check_unchanged()
    config_a, config_b = ({key: json.dumps(value) for key, value in side.model.config.items()} for side in (a, b))
    config = tuple(sorted({key for key, _ in config_a.items() ^ config_b.items()}))
    return Diff(a.display_name, b.display_name, (*known.values(), *there), total, config)


def _known(tensor: BoundTensor, other: BoundTensor | None) -> TensorDiff:
    """Compare two tensors by their headers alone."""
    if other is None:
        return TensorDiff(tensor.name, HERE, (tensor.dtype, None), (tensor.shape, None))
    kind = DTYPE if tensor.dtype != other.dtype else SHAPE if tensor.shape != other.shape else SAME
    elements = tensor_bytes(tensor.name, tensor.dtype, tensor.shape) // unit_of(tensor.dtype) if kind == SAME else 0
    return TensorDiff(tensor.name, kind, (tensor.dtype, other.dtype), (tensor.shape, other.shape), elements)


HEAD = ("tensor", "tensors", "what", "elements", "largest", "rms", "ulp")
"""The columns of a row."""


def rows_of(tensors: Sequence[TensorDiff]) -> list[tuple[str, ...]]:
    """The cells of a table of tensors that differ; empty where there is nothing to say.

    Those of one name, kind, dtype and number of dimensions are one row, with all numbers in the name:
    ``layers.{10..14}.mlp``.
    """
    groups: dict[tuple[object, ...], list[TensorDiff]] = {}
    for tensor in tensors:
        ranks = tuple(shape and len(shape) for shape in tensor.shapes)
        groups.setdefault((without_numbers(tensor.name, "{}"), tensor.kind, tensor.dtypes, ranks), []).append(tensor)
    rows = []
    for (template, kind, *_), alike in groups.items():
        numbers = zip(*(numbers_in(tensor.name) for tensor in alike), strict=True)
        parts = zip(["", *map(_ranges, numbers)], str(template).split("{}"), strict=True)
        cells = [str(kind), "", "", "", ""]
        if kind == CHANGED:
            other, elements = sum(tensor.other for tensor in alike), sum(tensor.elements for tensor in alike)
            cells[0] += f" ({other:,} inf or NaN)" if other else ""
            cells[1] = percent_text(share_of(alike))
            if alike[0].largest is not None:
                rms = math.sqrt(sum(tensor.squares or 0.0 for tensor in alike) / elements)
                ulps = largest_ulps(*(tensor.ulps for tensor in alike))
                largest = max(tensor.largest or 0.0 for tensor in alike)
                cells[2:] = f"{largest:.3g}", f"{rms:.3g}", "" if ulps is None else f"{ulps:,}"
        elif kind in (DTYPE, SHAPE):
            shapes = [shape_text(shape or ()) for shape in alike[0].shapes]
            cells[0] += f" {' -> '.join(map(str, alike[0].dtypes if kind == DTYPE else shapes))}"
        rows.append(("".join(text for pair in parts for text in pair), f"{len(alike):,}", *cells))
    return rows


def _ranges(numbers: Sequence[int]) -> str:
    """``{0..3,7}``; a number alone as it is."""
    runs = ((run.offset, run.end - 1) for run in merge_runs(Run(number, 1) for number in sorted({*numbers})))
    texts = [f"{a}..{b}" if b > a + 1 else f"{a},{b}" if b > a else str(a) for a, b in runs]
    text = ",".join(texts)
    return text if text.isdigit() else f"{{{text}}}"


def share_of(tensors: Sequence[TensorDiff]) -> float:
    """The share of the compared elements of these that differ."""
    elements = sum(tensor.elements for tensor in tensors)
    return sum(tensor.changed for tensor in tensors) / elements if elements else 0.0


def percent_text(share: float) -> str:
    """``3.1 %``. A share that is not zero never shows as zero, nor one below all as all."""
    if share == 1.0:
        return "100 %"
    return f"{share * 100:.2g} %" if share < 0.995 else "99.9 %" if share < 0.9995 else ">99.9 %"
