"""The rules of a program's format: its tensors' names, what they are made of, and which it adds or leaves out.

A key of a format's file is the name of a field, or stands in the field's ``metadata`` (see ``format_file.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from formats.notation.expressions import Expression
from formats.notation.patterns import Pattern


@dataclass(frozen=True)
class Cut:
    """How a tensor is divided over ``tp``, in place of what the model's rules say.

    Along an ``axis``, or along a dimension ``dim``; with neither, the tensor is replicated. A dimension is divided into
    equal ranges, or each of its equal ``parts`` is.
    """

    axis: str | None = None
    dim: int | None = None
    parts: int = 1


@dataclass(frozen=True)
class Line:
    """A tensor of the program's, and what it is made of.

    The line holds where ``when`` is true of the model, no tensor matches ``without``, and some tensor matches
    ``beside``, with the same indices. ``types`` are the classes and model types for which it holds, as ``config.json``
    has them at its top; None: all.

    ``output_first`` stores what Hugging Face stores input first (``->``) as output, input. ``pairs`` has, for each
    source, the axis whose two halves are stored as pairs (``""``: none); ``halves`` the axis whose pairs are stored as
    halves. ``by`` is the axis within which the sources are joined: each of its indices has its part of every source.
    Such a tensor is divided over ``tp`` in equal ranges, wherever these end. ``ones`` are the positions of dimensions
    of length 1 in the stored tensor; None: they are where Hugging Face's tensor has them.

    ``on`` says which ranks have what the model's rules do not divide: ``first rank`` (the others hold zeros in its
    place), ``every stage`` of a pipeline, or its other names on the stages ``first`` and ``last``.

    ``dtype`` is a wider dtype, without loss. ``function`` is a computation that the program stores the result of. With
    ``also``, the tensor is stored once more under the line's name, if no tensor has it (two names of one tensor).
    """

    target: Pattern
    sources: tuple[Pattern, ...] = field(metadata={"key": "from"})
    when: Expression | None = None
    without: Pattern | None = None
    beside: Pattern | None = None
    output_first: bool = False
    pairs: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    by: str | None = None
    ones: tuple[int, ...] | None = None
    cut: Cut | None = None
    on: str | Mapping[str, str] | None = None
    dtype: str | None = None
    function: str | None = None
    also: bool = False
    types: frozenset[str] | None = None

    @property
    def stage_names(self) -> Mapping[str, str]:
        """Other names on the first and the last of several pipeline stages."""
        return self.on if isinstance(self.on, Mapping) else {}


@dataclass(frozen=True)
class Constant:
    """Constant tensors that a program adds: ``names`` beside each of its tensors that one of ``beside`` matches.

    The dtype ``model`` is the one that ``config.json`` gives. With ``axes``, the shape is that of these axes. ``types``
    are as in a line.
    """

    beside: tuple[Pattern, ...]
    names: tuple[Pattern, ...]
    dtype: str
    value: float
    shape: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    when: Expression | None = None
    types: frozenset[str] | None = None


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
    """Tensors that a program cannot have, where ``when`` holds, and ``why``; with ``scalars``, only scalars."""

    found: Pattern
    why: str
    when: Expression | None = None
    scalars: bool = False


@dataclass(frozen=True)
class Renaming:
    """A name of the program's, where ``when`` holds.

    A *stack* is a renaming that leaves an index out: tensors that differ in it are one tensor in the program's files,
    with a dimension for it. The dimensions of several stacks come in their order, before the tensors' own.
    """

    found: Pattern
    new: Pattern = field(metadata={"key": "to"})
    when: Expression | None = None

    @property
    def index(self) -> str:
        """The index that only the old name has."""
        (old,) = self.found.indices - self.new.indices
        return old


@dataclass(frozen=True, kw_only=True)
class LaterLayers(Renaming):
    """Tensors whose index is at least ``beyond`` (MTP): the new name has an index of its own, from 0.

    ``one_stage`` says why a program cannot have them on several pipeline stages; None: it can.
    """

    beyond: Expression
    one_stage: str | None = None

    @property
    def new_index(self) -> str:
        """The index that counts from 0."""
        (new,) = self.new.indices - self.found.indices
        return new


@dataclass(frozen=True)
class Settings:
    """A program's own config file, ``file``, and how it is made from ``config.json`` and back.

    ``write`` has an expression for each of its entries, over the settings of ``config.json`` and the sizes of axes;
    ``read`` one for each entry of ``config.json``, over its own. ``a.b`` is the entry ``b`` of an object ``a``. What is
    None is left out.
    """

    file: str
    write: Mapping[str, Expression]
    read: Mapping[str, Expression]


@dataclass(frozen=True)
class Use:
    """A line of a format that covers a tensor's name, and which of its ``sources`` the tensor is.

    ``target`` is the name of the stored tensor that it becomes a part of. ``stacked`` is the index that only the old
    name has.
    """

    line: Line
    source: int
    target: str
    stacked: str | None
