"""Companions of a quantized weight: packed integers, scales and zero points, whose rules follow from the weight's rule.

No tensor of a quantized checkpoint has a rule of its own. ``"in/8 -> out"`` says how GPTQ stores a weight whose rule
is ``output input``: the input first, eight to an integer. ``out`` and ``in`` are the weight's two dimensions,
``(out in)/64`` its elements in one row, in blocks of 64. ``lead`` are the dimensions before them (experts); ``groups``
are groups along the input, which every rank keeps in full. ``heads`` and ``kvheads`` are the heads of queries and of
keys that are the input of an attention's last weight. If a pattern begins with ``stored``, out and in change places in
checkpoints that store the weight input first. ``methods.toml`` has the patterns of each method. See
docs/reference/quantization.md.

Some tensors state the shape of their weight, which on a rank is that of the rank's part: compressed-tensors'
``weight_shape`` is the shape as integers; bitsandbytes' ``quant_state`` is JSON, as bytes, with a setting ``shape``. A
new shape is written into the same number of bytes (JSON is filled up with spaces), so that the first one can be
restored to the byte.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from reshard.formats.documents import lenient_json
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.notation.axes import Dim, Shape, Summand, parse

_NO_DTYPES: Mapping[str, str] = {}
OF_ACTIVATIONS = (
    "input_scale",
    "input_offset",
    "activation_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
)
OF_KEYS = ("k_scale", "v_scale", "kv_scale", "k_zero_point", "v_zero_point")
OF_QUERIES = ("q_scale", "q_zero_point", "prob_scale", "prob_output_scale")
OF_ATTENTION = {*OF_KEYS, *OF_QUERIES}
_STATE_SHAPE = {".weight_shape", *(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))}
_ADVICE: Mapping[str, str] = {
    ".weight.nested_absmax": "256 blocks of 64 share a scale of this double quantization: quantize without it "
    "(bnb_4bit_use_double_quant), or split the unquantized checkpoint and let each rank quantize on load",
}


def is_of_activations(name: str) -> bool:
    """Whether a companion is for activations or the cache, and so says nothing about the weight's values."""
    return name.endswith((*OF_ACTIVATIONS, *OF_ATTENTION, "input_scale_ub"))


@dataclass(frozen=True)
class Companion:
    """A tensor that belongs to a weight."""

    weight: str
    """The weight's name."""
    patterns: tuple[str, ...]
    """The shapes that it may have, in terms of the weight's."""
    of_attention: bool = False
    """Whether it belongs to an attention, of which ``weight`` is the module or one within; then its shapes are in terms
    of the weight that takes the heads in (see ``takes_heads``).
    """
    states_shape: bool = False
    """Whether it says which shape the weight has (see ``stated_shapes``)."""
    advice: str | None = None
    """The hint where a cut would fall into a block of it."""


def _suffixes(name: str) -> Iterable[str]:
    """The ends of a name by which it may belong to a weight.

    ``.weight.absmax`` of ``p.weight.absmax``, the shortest first: what belongs to a module, or to its weight. Then
    ``_scale`` of ``gate_up_proj_scale``, the longest first: what belongs to a parameter that is not a ``weight``.
    """
    last, dots = name.rpartition(".")[2], [place for place, letter in enumerate(name) if letter == "."]
    dotted = (name[place:] for place in reversed(dots[-3:])) if dots else (name,)
    fused = (last[place:] for place, letter in enumerate(last) if letter == "_")
    return (*dotted, *fused, *([""] if last == "weight" or last.endswith("_proj") else []))


def _weight(name: str, suffix: str) -> str:
    base = name.removesuffix(suffix)
    return f"{base}.weight" if suffix.startswith(".") else base


def takes_heads(weight: Shape) -> bool:
    """Whether a weight is the last of an attention: its input is a product of axes, heads first."""
    if weight.output_dim is None:
        return False
    (input_dim,) = {len(weight.dims) - 2, len(weight.dims) - 1} - {weight.output_dim}
    summands = weight.dims[input_dim].summands
    return len(summands) == 1 and _is_of_heads(summands[0])


def makes_heads(weight: Shape) -> bool:
    """Whether a weight's output, or a part of it, is a product of axes, heads first: queries, keys or values."""
    return weight.output_dim is not None and any(map(_is_of_heads, weight.dims[weight.output_dim].summands))


def _is_of_heads(summand: Summand) -> bool:
    return len(summand.factors) > 1 and isinstance(summand.factors[0], str)


# ---------------------------------------------------------------------------------------------------------- shapes


@lru_cache(maxsize=4096)
def shape_of(patterns: tuple[str, ...], weight: Shape, shape: tuple[int, ...] | None) -> Shape | None:
    """The rule of a weight's companion given the weight's, chosen among its patterns by the dimensions on disk.

    Only the number of dimensions and those that are plain numbers choose, so that a rank's own shape chooses the same.
    """
    for pattern in patterns:
        rule = _substitute(pattern, weight)
        if rule is not None and (shape is None or rule.is_open or _fits(rule, shape)):
            return rule.closed(shape or ())
    return None


def stated_shape(weight: Shape) -> Shape:
    """The dimensions of a weight as a tensor that states its shape has them: output before input."""
    if weight.arrow is None:
        return weight
    *lead, first, last = weight.dims
    return Shape((*lead, last, first))


def _fits(rule: Shape, shape: tuple[int, ...]) -> bool:
    if len(rule.dims) != len(shape):
        return False
    return all(dim.axes or dim.size({}) == length for dim, length in zip(rule.dims, shape, strict=True))


def _substitute(text: str, weight: Shape) -> Shape | None:
    """Put the weight's dimensions in the place of ``lead``, ``out``, ``in``; None if the weight is no matrix."""
    as_stored = text.startswith("stored ")
    pattern = parse(text.removeprefix("stored "))
    output = weight.output_dim
    if not pattern.axes:
        return pattern
    if output is None:
        return None
    outer, inner = weight.dims[output], weight.dims[2 * len(weight.dims) - 3 - output]
    known = {"lead": weight.dims[:-2], "out": (outer,), "in": (inner,), "groups": (_all_groups(inner),)}
    if "heads" in text:
        (heads,) = inner.summands
        known |= {"heads": (Dim((Summand(heads.factors[:-1]),)),), "kvheads": (Dim((Summand(heads.factors[:1]),)),)}
    dims: list[Dim] = []
    for dim in pattern.dims:
        if (word := dim.whole.axis) is not None:
            dims += (one if dim.counted == (1, 1) else one.in_blocks(*dim.counted) for one in known[word])
        elif dim.axes:
            (row,) = dim.summands
            factors = tuple(one for factor in row.factors for one in known[str(factor)])
            dims.append(replace(dim, summands=(Summand(factors),)))
        else:
            dims.append(dim)
    if as_stored and weight.arrow is not None:
        dims[-2:] = reversed(dims[-2:])
        return Shape(tuple(dims), len(dims) - 1)
    arrow = None if pattern.arrow is None else pattern.arrow + len(dims) - len(pattern.dims)
    return Shape(tuple(dims), arrow)


def _all_groups(inner: Dim) -> Dim:
    """An axis of its own, never dealt and measured on disk, for the number of groups of an input dimension."""
    return Dim((Summand(("groups_" + "_".join(re.findall(r"\w+", str(inner))),)),))


# --------------------------------------------------------------------------------------------------------- schemes


#: The patterns of one kind of tensor, or why it is refused.
Entry: TypeAlias = "tuple[str, ...] | PlanError"
#: By the ends of tensors' names, as in ``methods.toml``.
Table: TypeAlias = Mapping[str, Entry]


@dataclass(frozen=True)
class Scheme:
    """The companions of weights, by module."""

    general: Table
    """The companions in all modules."""
    named: tuple[tuple[re.Pattern[str], Table], ...] = ()
    """Companions by regular expression; the first match wins."""
    within: Mapping[str, Table] = field(default_factory=dict)
    """Companions by the end of a module's name, with its submodules."""

    def companion(
        self, name: str, dtype: str | None = None, dtypes: Mapping[str, str] = _NO_DTYPES
    ) -> Companion | None:
        """The weight that a tensor belongs to; None if it belongs to none.

        A weight that is itself packed (``dtype`` U8: two values to a byte) belongs to itself. ``dtypes`` are those of
        the checkpoint's tensors by name: one method may quantize weights in two ways. Raises PlanError for a tensor of
        a method that cannot be split.
        """
        table = self.table(name.rpartition(".")[0])
        for suffix in _suffixes(name):
            base, weight = name.removesuffix(suffix), _weight(name, suffix)
            of_weight = table.get(f"{suffix} of {dtypes.get(weight)}")
            patterns = of_weight or table.get(f"{suffix} {dtype}") or table.get(suffix)
            if isinstance(patterns, PlanError):
                raise PlanError(f"tensor '{name}' cannot be split: {patterns.message}", patterns.hint)
            if patterns is not None:
                if suffix.removeprefix(".") in OF_ATTENTION:
                    return Companion(base, patterns, of_attention=True)
                return Companion(weight, patterns, states_shape=suffix in _STATE_SHAPE, advice=_ADVICE.get(suffix))
        return None

    def case(self, name: str, dtypes: Mapping[str, str]) -> tuple[object, ...]:
        """Names that differ in numbers alone belong to weights of which the names differ in numbers alone, where this
        is the same.
        """
        if not (self.named or self.within or self._ends_of_weights):
            return ()
        table = self.table(name.rpartition(".")[0])
        asked = [suffix for suffix in self._ends_of_weights if name.endswith(suffix)]
        return id(table), *[dtypes.get(_weight(name, suffix)) for suffix in asked]

    @cached_property
    def _ends_of_weights(self) -> frozenset[str]:
        """The ends of a name after which it matters in some table what dtype the weight has."""
        tables = (self.general, *(table for _, table in self.named), *self.within.values())
        different = {id(table): table for table in tables}.values()
        return frozenset(key.rpartition(" of ")[0] for table in different for key in table if " of " in key)

    def table(self, module: str) -> Table:
        """The table for a module."""
        for expression, table in self.named:
            if expression.match(module):
                return table
        if not self.within:
            return self.general
        words = module.split(".")  # the longest name; of two with the same end the one with more before it
        ends = (end for end in range(len(words), 0, -1) if words[end - 1] in self._ends)
        names = (".".join(words[begin:end]) for end in ends for begin in range(end))
        return next((self.within[name] for name in names if name in self.within), self.general)

    @cached_property
    def _ends(self) -> frozenset[str]:
        return frozenset(name.rpartition(".")[2] for name in self.within)


_INTEGERS = {"I32": "i", "I64": "q"}
_SHAPE = re.compile(rb'"shape": \[([^\]]*)\]')


def restated(data: bytes, dtype: str, old: Sequence[int], after: Sequence[int]) -> bytes:
    """A statement of the shape ``old``, made one of ``after``: as many bytes.

    Raises CheckpointError, in which the tensor is yet to be named, where it states another shape, or where ``old``
    could not be put back to the byte.
    """
    kind = _INTEGERS.get(dtype)
    stated = [number for (number,) in struct.iter_unpack(f"<{kind}", data)] if kind else _shape_in_json(data)
    if stated != list(old):
        raise CheckpointError(f"states the shape {stated} for a weight of shape {list(old)}")
    if list(after) == list(old):
        return data
    if kind:
        return struct.pack(f"<{len(after)}{kind}", *after)
    spans = [match.span(1) for match in _SHAPE.finditer(data)]
    begin, end = spans[0] if len(spans) == 1 else (0, 0)
    was, now = (", ".join(map(str, shape)).encode().ljust(end - begin) for shape in (old, after))
    new = data[:begin] + now + data[end:]
    if data[begin:end] != was or len(new) != len(data) or _shape_in_json(new) != list(after):
        raise CheckpointError(
            f"states the shape {stated} in a form that cannot be put back to the byte",
            "as bitsandbytes writes it, it is '\"shape\": [rows, columns]', once: load it and save it again",
        )
    return new


def _shape_in_json(data: bytes) -> Any:
    """The shape that is stated; None if none is."""
    try:
        document = lenient_json(data.decode())
    except ValueError:
        return None
    return document.get("shape") if isinstance(document, dict) else None
