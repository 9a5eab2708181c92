"""The rules of a program's format: what its tensors are made of, are called, and what else it has or lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from formats.notation.expressions import Expression
from formats.notation.patterns import Pattern


@dataclass(frozen=True)
class Condition:
    """Where a line holds.

    ``when`` is true of the model, no tensor matches ``without``, and one that ``beside`` matches is there, with the
    same indices.
    """

    when: Expression | None = None
    without: Pattern | None = None
    beside: Pattern | None = None


@dataclass(frozen=True)
class Order:
    """In which order the elements are stored.

    ``output_first`` stores what Hugging Face stores input first (``->``) as output, input. ``pairs`` has, for each
    source, the axis whose two halves are stored as pairs (``""``: none); ``halves`` the axis whose pairs are stored as
    halves. ``by`` is the axis behind which the sources are joined: each of its indices has a part of all of them. What
    is joined so is divided over ``tp`` in equal ranges, wherever these end. ``ones`` are the places of dimensions of
    length 1 in what is stored, where Hugging Face's tensor has them elsewhere or has none; None: it has the same.
    """

    output_first: bool = False
    pairs: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    by: str | None = None
    ones: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Cut:
    """How a tensor is divided over ``tp``, in place of what the model's rules say.

    Along an ``axis``; or along a dimension, in equal ranges or in one of each of its equal ``parts``; with neither, not
    at all: every rank has all of it.
    """

    axis: str | None = None
    dim: int | None = None
    parts: int = 1


@dataclass(frozen=True)
class Ranks:
    """Which ranks have what of a tensor.

    ``first_rank`` says that of equal parts all but the first rank's are zeros, ``every_stage`` that every pipeline
    stage has it. ``first_stage`` and ``last_stage`` are other names on the first and the last of several stages.
    """

    cut: Cut | None = None
    first_rank: bool = False
    every_stage: bool = False
    first_stage: str | None = None
    last_stage: str | None = None


@dataclass(frozen=True)
class Line:
    """A tensor of the program's, and what it is made of, where the ``condition`` holds.

    ``apart`` takes the components of a packed tensor apart, and joins them one after the other. With ``part``, the line
    covers that component of a packed tensor alone; all components must have such lines. ``dtype`` is another dtype,
    without loss. ``function`` is the one arithmetic that some program does. With ``also``, the tensor is stored once
    more under the line's name, if no tensor has it (two names of one tensor). ``types`` are the classes and model types
    for which the line holds, as ``config.json`` has them at its top; None: all.
    """

    target: Pattern
    sources: tuple[Pattern, ...]
    condition: Condition = Condition()
    order: Order = Order()
    ranks: Ranks = Ranks()
    apart: tuple[str, ...] = ()
    part: str | None = None
    dtype: str | None = None
    function: str | None = None
    also: bool = False
    types: frozenset[str] | None = None


@dataclass(frozen=True)
class Constant:
    """Tensors that a program has beside another: ``names`` beside each of its tensors that one of ``beside`` matches.

    The dtype ``model`` is that of the model, as ``config.json`` says it. A ``vector`` is as long as the first dimension
    of the tensor that it is beside, of which no rank has a part alone. ``types`` are as in a line.
    """

    beside: tuple[Pattern, ...]
    names: tuple[Pattern, ...]
    dtype: str
    shape: tuple[int, ...]
    value: float
    when: Expression | None = None
    types: frozenset[str] | None = None
    vector: bool = False


@dataclass(frozen=True)
class Dropped:
    """Tensors that a program does not store; with ``beyond``, those whose index is at least that size.

    ``types`` are as in a line.
    """

    found: Pattern
    beyond: Expression | None = None
    when: Expression | None = None
    types: frozenset[str] | None = None


@dataclass(frozen=True)
class Refusal:
    """Tensors that a program cannot have, where ``when`` holds, and ``why``; with ``scalars``, only numbers."""

    found: Pattern
    why: str
    when: Expression | None = None
    scalars: bool = False


@dataclass(frozen=True)
class Renaming:
    """A name of the program's, where ``when`` holds."""

    found: Pattern
    new: Pattern
    when: Expression | None = None


@dataclass(frozen=True)
class Further:
    """Tensors whose index (of ``found``) is at least ``beyond``: they are called ``new``, with an index from 0.

    With ``one_stage``, why a program cannot have them on several pipeline stages.
    """

    found: Pattern
    new: Pattern
    beyond: Expression
    one_stage: str | None = None

    @property
    def index(self) -> str:
        """The index that is at least ``beyond``."""
        (old,) = self.found.indices - self.new.indices
        return old

    @property
    def new_index(self) -> str:
        """The index that counts from 0."""
        (new,) = self.new.indices - self.found.indices
        return new


@dataclass(frozen=True)
class Stack:
    """Tensors that differ in an index (``of``) and are one in the program's files, under ``name``, along a dimension.

    It holds where ``when`` holds. The dimensions of several stand in their order, before the tensors' own.
    """

    of: Pattern
    name: Pattern
    when: Expression | None = None

    @property
    def index(self) -> str:
        """The index that is a dimension."""
        (found,) = self.of.indices - self.name.indices
        return found


@dataclass(frozen=True)
class Demand:
    """What a model and a mesh must be for a program: ``holds`` is true of them. ``why`` says what it is that is not."""

    holds: Expression
    why: str


@dataclass(frozen=True)
class Settings:
    """A program's own config file, ``file``, and what ``config.json`` is to it.

    ``write`` has an expression for each of its entries, over the settings of ``config.json`` and the sizes of axes;
    ``read`` one for each entry of ``config.json``, over its own. ``a.b`` is the entry ``b`` of an object ``a``. What is
    None is left out.
    """

    file: str
    write: Mapping[str, Expression]
    read: Mapping[str, Expression]


@dataclass(frozen=True)
class Use:
    """A line of a format that covers a tensor's name: as which of its ``sources``.

    ``target`` is the name of what the tensor becomes a part of. ``stacked`` is the index that this name does not have,
    as it stands in the old one (``{expert}``).
    """

    line: Line
    source: int
    target: str
    stacked: str | None
