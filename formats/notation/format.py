"""A program's format: names, files and rules. ``format_file.py`` reads it from ``formats/programs/``.

Its rules say which names its tensors have, what they are made of, and which it adds or leaves out. Names have
wildcards: ``**`` is any text, ``*`` text without a dot, ``{expert}`` an index.

A key of a format's file is the name of a field, or stands in the field's ``metadata`` (see ``documents.structure``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import count
from typing import Any, TypeVar

from reshard.formats.documents import (
    READERS,
    Reader,
    items,
    json_object,
    mapping,
    reader_for,
    reader_of,
    record,
    structure,
    text,
    unfit,
    whole,
)
from reshard.formats.errors import NotationError, brief
from reshard.formats.mesh import Mesh
from reshard.formats.notation.expressions import Expression, read_expression
from reshard.formats.notation.heads import class_of, is_headless

T = TypeVar("T")

_WILDCARD = re.compile(r"(^\*\*\.|\*\*|\*|\{\w+\})")
_REGEX = {"**.": r"(?:.*\.)?", "**": ".*", "*": "[^.]*"}
_INDEX = r"\{\w+\}|[0-9]+"
_NUMBER = re.compile(r"\\\{(\w+)(?::\w+)?\\\}")
"""A number's place in a pattern, as ``re.escape`` writes it: ``{rank}`` or ``{rank:02d}``."""


@dataclass(frozen=True)
class Pattern:
    """A name with wildcards."""

    text: str

    @cached_property
    def _parts(self) -> list[str]:
        """Text and wildcards in turn."""
        return _WILDCARD.split(self.text)

    @cached_property
    def _names(self) -> list[str]:
        """The names of the wildcards: of an index its own, of stars ``_0``, ``_1``, …"""
        stars = count()
        return [word[1:-1] if word.startswith("{") else f"_{next(stars)}" for word in self._parts[1::2]]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts = [re.escape(part) for part in self._parts]
        for i, name in enumerate(self._names):
            regex = f"(?P<{name}>{_REGEX.get(self._parts[2 * i + 1], _INDEX)})"
            parts[2 * i + 1] = f"(?P={name})" if name in self._names[:i] else regex
        return re.compile("".join(parts))

    def match(self, name: str) -> Mapping[str, str] | None:
        """Return the texts that the wildcards stand for in a name; None if it does not match."""
        matched = self._regex.fullmatch(name)
        return matched.groupdict() if matched else None

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the name in which the wildcards stand for these texts."""
        parts = [*self._parts]
        parts[1::2] = [values[name] for name in self._names]
        return "".join(parts)

    @cached_property
    def indices(self) -> frozenset[str]:
        """The names of its indices."""
        return frozenset(name for name in self._names if not name.startswith("_"))

    @cached_property
    def stars(self) -> int:
        """The number of ``*`` and ``**``."""
        return sum(name.startswith("_") for name in self._names)


def numbered_names(pattern: str, names: Iterable[str]) -> list[tuple[str, dict[str, int]]]:
    """The names like ``pattern``, a format of Python's such as ``model_{rank:02d}.pt``, with the numbers in them."""
    regex = re.compile(_NUMBER.sub(r"(?P<\1>[0-9]+)", re.sub(r"\\{(tensor|kind)\\}", "[^/]+", re.escape(pattern))))
    matches = ((name, regex.fullmatch(name)) for name in names)
    return [(name, {word: int(n) for word, n in match.groupdict().items()}) for name, match in matches if match]


@dataclass(frozen=True)
class CutRule:
    """The cut of a tensor over ``tp``, in place of the one by the model's rules. With neither axis nor dimension, the
    tensor is replicated.
    """

    axis: str | None = None
    """The axis that is cut."""
    dim: int | None = None
    """The dimension that is cut."""
    parts: int = field(default=1, metadata={"read": whole(1)})
    """The equal parts of the dimension, each of which is divided into equal ranges."""


def _cut(value: object, where: str) -> CutRule:
    """``false``, an axis, a dimension, or a table of a dimension and its parts."""
    if value is False or isinstance(value, str):
        return CutRule(axis=value or None)
    return reader_of(CutRule)(value if isinstance(value, dict) else {"dim": value}, where)


def _on(value: object, where: str) -> str | Mapping[str, str]:
    """Ranks, or other names on stages."""
    if isinstance(value, dict):
        stages = ("first", "last")
        return record(lambda entry: {key: name for key in stages if (name := entry.get(key, text, ""))})(value, where)
    if value != "first rank":
        raise unfit(where, "'first rank' or a table", value)
    return str(value)


READERS |= {Pattern: lambda value, where: Pattern(text(value, where)), CutRule: _cut, str | Mapping[str, str]: _on}


@dataclass(frozen=True)
class Line:
    """A tensor of the program, and the tensors that it is made of."""

    target: Pattern = field(metadata={"key": None})
    sources: tuple[Pattern, ...] = field(metadata={"key": "from"})
    when: Expression | None = None
    """True of the models for which the line holds."""
    without: Pattern | None = None
    """A tensor that must be absent."""
    beside: Pattern | None = None
    """A tensor that must be there, with the same indices."""
    output_first: bool = False
    """Whether Hugging Face's input first (``->``) is stored as output, input."""
    pairs: tuple[str, ...] = ()
    """The axis whose two halves are stored as pairs, for each source or one for all (``""``: none)."""
    halves: tuple[str, ...] = ()
    """The axis whose pairs are stored as halves."""
    by: str | None = None
    """The axis within which the sources are joined: each index has its part of every source. Such a tensor is divided
    over ``tp`` in equal ranges, wherever these end.
    """
    dim: int | None = None
    """The dimension along which sources are joined, if not their output (matrices in a stack)."""
    ones: tuple[int, ...] | None = None
    """The positions of dimensions of length 1 in the stored tensor; None: where Hugging Face's has them."""
    share: tuple[int, ...] = ()
    """A number and a count: a stack has this one of so many equal ranges of its index."""
    shift: int = 0
    """The difference of the number in the target's name from that of the sources."""
    cut: CutRule | None = None
    on: str | Mapping[str, str] | None = None
    """The ranks that have what the model's rules do not divide: ``first rank`` (the others hold zeros), or its other
    names on the stages ``first`` and ``last`` of a pipeline.
    """
    dtype: str | None = None
    """A wider dtype, without loss."""
    function: str | None = None
    """The computation whose result the program stores."""
    also: bool = False
    """Whether the tensor is stored once more under the line's name, if no tensor has it (two names of one tensor)."""
    types: frozenset[str] | None = field(default=None, metadata={"key": None})
    """The classes and model types for which it holds, as ``config.json`` has them at its top; None: all."""

    def __post_init__(self) -> None:
        """Raise NotationError if the entries do not fit together."""
        if self.ones is not None and len(self.sources) > 1:
            raise NotationError(f"'{self.target.text}': 'ones' is for what is made of one tensor")
        if self.share and not (len(self.share) == 2 and 0 <= self.share[0] < self.share[1]):
            raise NotationError(f"'{self.target.text}': 'share' should be a number and a count above it")
        for source in self.sources:
            if source.stars != self.target.stars or len(source.indices - self.target.indices) > 1:
                raise NotationError(f"'{self.target.text}': '{source.text}' has other wildcards")
        for axes in (self.pairs, self.halves):
            if len(axes) not in {0, 1, len(self.sources)}:
                raise NotationError(f"{brief([*axes])} has another length than the sources")

    @property
    def keeps_shape(self) -> bool:
        """Whether the program's tensor has the dimensions of its source."""
        changes = (self.output_first, self.by, self.ones is not None, self.cut, self.function)
        return [source.indices for source in self.sources] == [self.target.indices] and not any(changes)

    def words_of(self, name: str) -> Mapping[str, str] | None:
        """The texts that wildcards stand for in the names of the sources of a tensor; None if it is not the target."""
        words = self.target.match(name)
        if words is None or not self.shift:
            return words
        return {word: str(int(value) - self.shift) if value.isdecimal() else value for word, value in words.items()}

    def members(self, size: int) -> range:
        """The indices of its stack, of an axis of this size."""
        number, count = self.share or (0, 1)
        each = -(-size // count)
        return range(number * each, min((number + 1) * each, size))

    @property
    def stage_names(self) -> Mapping[str, str]:
        """Other names on the first and the last of several pipeline stages."""
        return self.on if isinstance(self.on, Mapping) else {}


@dataclass(frozen=True)
class Constant:
    """Constant tensors that a program adds."""

    beside: tuple[Pattern, ...]
    """The tensors of the program beside which they are."""
    names: tuple[Pattern, ...]
    """Their names, beside each of these."""
    dtype: str
    """A dtype, or ``model``: the one that ``config.json`` gives."""
    value: float
    shape: tuple[int, ...] = ()
    axes: tuple[str, ...] = ()
    """The axes whose sizes are the shape."""
    when: Expression | None = None
    types: frozenset[str] | None = None
    """The classes and model types for which they hold; None: all."""


@dataclass(frozen=True)
class Dropped:
    """Tensors that a program does not store; with ``beyond``, those whose index is at least that size.

    ``types`` are as in a line.
    """

    old: Pattern = field(metadata={"key": None})
    beyond: Expression | None = None
    when: Expression | None = None
    types: frozenset[str] | None = field(default=None, metadata={"key": None})


@dataclass(frozen=True)
class RefusedTensors:
    """Tensors that a program cannot have, where ``when`` holds, and ``why``; with ``scalars``, only scalars."""

    old: Pattern = field(metadata={"key": None})
    why: str
    when: Expression | None = None
    scalars: bool = False


@dataclass(frozen=True)
class Renaming:
    """A name of the program's, where ``when`` holds.

    A *stack* is a renaming that leaves an index out: tensors that differ in it are one tensor in the program's files,
    with a dimension for it. The dimensions of several stacks come in their order, before the tensors' own.
    """

    old: Pattern = field(metadata={"key": None})
    new: Pattern = field(metadata={"key": "to"})
    when: Expression | None = None

    @property
    def index(self) -> str:
        """The index that only the old name has."""
        (old,) = self.old.indices - self.new.indices
        return old


@dataclass(frozen=True, kw_only=True)
class LaterLayers(Renaming):
    """Tensors of layers after the last (MTP): the new name has an index of its own, from 0."""

    beyond: Expression
    """The smallest index of such a tensor."""
    one_stage: str | None = None
    """The reason why a program cannot have them on several pipeline stages; None: it can."""

    @property
    def new_index(self) -> str:
        """The index that counts from 0."""
        (new,) = self.new.indices - self.old.indices
        return new


@dataclass(frozen=True)
class ProgramConfig:
    """A program's own config file, and how it is made from ``config.json`` and back. ``a.b`` is the entry ``b`` of an
    object ``a``; None is left out.
    """

    file: str
    write: Mapping[str, Expression]
    """An expression for each of its entries, over the settings of ``config.json`` and the sizes of axes."""
    read: Mapping[str, Expression]
    """An expression for each entry of ``config.json``, over the entries of this file."""


def _named(kind: Callable[..., T], plain: str) -> Reader[tuple[T, ...]]:
    """Return the reader of a table of rules, or lists of them, by pattern. A value that is not a table stands for its
    key ``plain``.
    """
    first = fields(kind)[0].name  # type: ignore[arg-type]

    def read(value: object, where: str) -> tuple[T, ...]:
        rules = []
        for name, entry in json_object(value, where).items():
            is_list = isinstance(entry, list) and not all(isinstance(item, str) for item in entry)
            for stated in entry if is_list else [entry]:
                table = stated if isinstance(stated, dict) else {plain: stated}
                named: dict[str, Any] = {first: Pattern(name)}
                rules.append(record(partial(structure, kind, **named))(table, f"'{name}'"))
        return tuple(rules)

    return read


LINES = _named(Line, "from")


def of_types(key: str, reader: Reader[T]) -> Reader[tuple[tuple[frozenset[str], T], ...]]:
    """Return the reader of entries for some ``types``, under a key."""
    return items(record(lambda entry: (entry.get("types", reader_for(frozenset[str])), entry.get(key, reader))))


def _of_each(key: str, reader: Reader[T]) -> Reader[Mapping[str, T]]:
    """The same by type."""
    return lambda value, where: {
        name: content for names, content in of_types(key, reader)(value, where) for name in names
    }


def lines_of_types(groups: object) -> tuple[Line, ...]:
    """Lines that hold for some model types, from a table that a tool writes. Raises ValueError, NotationError."""
    lines_of = of_types("tensors", LINES)(groups, "lines")
    return tuple(replace(line, types=types) for types, lines in lines_of for line in lines)


def _whole_names(value: object, where: str) -> frozenset[str]:
    ends_of = mapping(items(text))(value, where)
    return frozenset(f"{head}.{end}" if head else end for head, ends in ends_of.items() for end in ends)


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


@dataclass(frozen=True)
class Files:
    """The names of a rank's weight files."""

    name: str
    """The usual name."""
    pp: str | None = None
    """The name with several pipeline stages."""
    ep: str | None = None
    """The name with several ranks of experts."""
    pp_ep: str | None = None
    """The name with both."""
    parts: str | None = None
    """The names of a rank's files if there are several and ``name`` cannot number them."""
    index: str | None = None
    """The index of such files."""
    folder: str | None = None
    """The folder in which all lie."""
    tracker: str | None = None
    """The file that names the folder."""
    weights: str = ""
    """The ``{kind}`` of the model's own, if each ``{tensor}`` has a file; states of the optimizer have other kinds."""
    masters: tuple[str, ...] = ()
    """The kinds of states that take the place of a weight."""

    def is_named(self, name: str) -> bool:
        """Whether a file's name is that of a weight file."""
        patterns = filter(None, (self.name, self.pp, self.ep, self.pp_ep, self.parts))
        return any(numbered_names(pattern, [name]) for pattern in patterns)

    @property
    def has_parts(self) -> bool:
        """Whether a rank may have several files."""
        return self.parts is not None or "{part" in self.name or "{number" in self.name

    @property
    def is_distributed(self) -> bool:
        """Whether a training program reads the files, with its states (see ``formats.files.training``)."""
        return self.name.endswith(".distcp") or self.is_single

    @property
    def is_single(self) -> bool:
        """Whether each tensor, and each state of one, has a file of its own."""
        return "{tensor}" in self.name

    @property
    def place(self) -> str:
        """The prefix of each file's name: the folder, with ``/``."""
        return f"{self.folder}/" if self.folder else ""

    def of(self, pp: bool, ep: bool) -> str:
        """The name where there are several stages, and several ranks of experts."""
        both = self.pp_ep if pp and ep else None
        return both or (self.pp if pp else None) or (self.ep if ep else None) or self.name

    def name_of(self, mesh: Mesh, rank: int, part: int, parts: int = 1, **words_of: str) -> str:
        """The name of a rank's weight file, one of ``parts``; ``shard`` and ``number`` count ranks and parts from 1.

        ``words_of`` has the tensor and the kind, where each has a file.
        """
        of_a_stage, rank_of_mesh = mesh.size // mesh.pp, rank % mesh.size
        words: dict[str, int | str] = {"rank": rank, "ranks": mesh.size, "part": part, "pp": mesh.stage(rank_of_mesh)}
        words |= {**words_of, "tp": rank % of_a_stage, "shard": rank + 1, "number": part + 1, "parts": parts}
        words |= {f"{name}_rank": place for name, place in mesh.coordinates(rank_of_mesh).items()}
        words["folder"] = mesh.folder(rank_of_mesh)
        words |= {name: 0 for name in ("tp_rank", "pp_rank", "ep_rank") if name not in words}
        name = self.of(mesh.pp > 1, dict(mesh.degrees).get("ep", 1) > 1)
        return self.place + (self.parts if parts > 1 and self.parts is not None else name).format_map(words)


READERS[Files] = lambda value, where: reader_of(Files)({"name": value} if isinstance(value, str) else value, where)


@dataclass(frozen=True)
class ContainerSettings:
    """The contents of files beside tensors."""

    chunks: bool = False
    """Whether each file says where its chunks begin (see ``formats.files.chunks``)."""
    inside: str | None = None
    """The entry of a file that has the tensors."""
    entries: Mapping[str, int | float] = field(default_factory=dict)
    """The other entries."""
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further files: JSON, or pickles as torch.save writes them if the name ends with ``.pt``."""
    extra_state: Mapping[str, str] = field(default_factory=dict)
    """The modules that expect an ``_extra_state``, by their weights, as patterns: an empty one is written."""
    ignored: tuple[Pattern, ...] = ()
    """Unneeded tensors in older files."""

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name is ignored."""
        return any(pattern.match(name) is not None for pattern in self.ignored)


@dataclass(frozen=True)
class Padding:
    """The padded size of the vocabulary, a multiple of the degree."""

    to: Expression | None = field(default=None, metadata={"key": "pad_vocabulary_to"})
    """A further divisor, as an expression over ``size`` and ``tp``; 0: there is no padding at all."""
    free: bool = field(default=False, metadata={"key": "free_padding"})
    """Whether a folder that the program itself wrote may be padded to any size, with any values."""

    def __post_init__(self) -> None:
        """Raise NotationError for an expression over anything else."""
        if self.to is not None and not {*self.to.names} <= {"size", "tp"}:
            raise NotationError(f"pad_vocabulary_to: '{self.to.text}' should be over size and tp")

    def multiple(self, sizes: Iterable[int], tp: int) -> int:
        """Return the number of which padded sizes are a multiple, on ``tp`` ranks; 0 if sizes are not padded."""
        if self.to is None:
            return 1
        return max((int(self.to.evaluate({"size": size, "tp": tp}.__getitem__)) for size in sizes), default=1)


@dataclass(frozen=True)
class Loading:
    """The program that loads the format."""

    program: str = field(metadata={"key": "loaded_by"})
    command: str = field(metadata={"key": "load"})
    """Loads a folder ``{out}``, with the degrees that it was written for: ``{ranks}`` of a stage, ``{tp}``, ``{pp}``,
    ``{ep}`` and ``{etp}`` (the tp degree of experts).
    """
    pp: str = field(default="", metadata={"key": "load_pp"})
    """The command's end if there are several pipeline stages."""
    ep: str = field(default="", metadata={"key": "load_ep"})
    """The command's end if there are several ranks of experts."""
    engine: str | None = None
    """The engine that ``reshard verify`` runs (``--engine``), and whose loader it asks (``--loader``)."""
    engine_format: str | None = None
    """The engine's name of the format."""

    def command_of(self, out: object, mesh: Mesh) -> str:
        """The command that loads a folder of this format, with the degrees of its mesh."""
        degrees = {name: dict(mesh.degrees).get(name, 1) for name in ("tp", "ep", "pp")}
        options = (self.pp if degrees["pp"] > 1 else "") + (self.ep if degrees["ep"] > 1 else "")
        degrees["etp"] = 1 if mesh.same_ranks else degrees["tp"]
        place = out if '"{out}"' in self.command else shlex.quote(str(out))  # a line of Python, or of a shell
        return (self.command + options).format_map({"out": place, "ranks": mesh.size // mesh.pp, **degrees})


@dataclass(frozen=True)
class Types:
    """The model types that the format is known for. Most come from a table that a tool writes."""

    only: tuple[str, ...] = field(default=(), metadata={"key": None})
    """The types for which it is known to be right; if empty, any model whose tensors the lines cover is written."""
    classes: frozenset[str] = frozenset()
    """Types that are identified by their class."""
    refused: Mapping[str, str] = field(default_factory=dict, metadata={"read": _of_each("why", text)})
    """Types that cannot be written, and why."""
    beyond: Mapping[str, str] = field(default_factory=dict, metadata={"read": _of_each("why", text)})
    """Types whose modules have more than checkpoints, as buffers or under a second name: no files are written for them.
    """
    lacking: frozenset[str] = frozenset()
    """Classes that the program does not have."""
    of_tokens: bool = field(default=False, metadata={"key": None})
    """Whether the program has only classes with a head for tokens."""
    compared: frozenset[str] = frozenset()
    """The types whose tensors were compared, and the classes that run in the same modules of the program."""
    meshes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    """For each type that uses only rules of its own, the largest degree of each dimension of a mesh that was compared
    (None: any degree).
    """
    seen: Mapping[str, frozenset[str]] = field(
        default_factory=dict, metadata={"read": _of_each("tensors", _whole_names)}
    )
    """For each such type, the names of all tensors that were compared."""
    published: tuple[Line, ...] = field(default=(), metadata={"read": lambda value, where: lines_of_types(value)})
    """Lines for the names in published checkpoints, where these are not those of the architecture's lines."""
    made_with: Mapping[str, str] = field(default_factory=dict)
    """The programs' versions."""

    def name_of(self, config: Mapping[str, Any]) -> str:
        """Return the table's name for a model of this config: its class, if that is one of ``classes``, or else its
        type.
        """
        first = class_of(config)
        return first if first in self.classes else str(config.get("model_type"))


@dataclass(frozen=True, eq=False)
class Rules:
    """The rules by which a program stores tensors."""

    lines: tuple[Line, ...] = field(default=(), metadata={"key": "tensors", "read": LINES})
    names: tuple[Renaming, ...] = field(default=(), metadata={"read": _named(Renaming, "to")})
    constants: tuple[Constant, ...] = ()
    dropped: tuple[Dropped, ...] = field(default=(), metadata={"read": _named(Dropped, "when")})
    refusals: tuple[RefusedTensors, ...] = field(
        default=(), metadata={"key": "refused", "read": _named(RefusedTensors, "why")}
    )
    stacks: tuple[Renaming, ...] = field(default=(), metadata={"read": _named(Renaming, "to")})
    further: tuple[LaterLayers, ...] = field(default=(), metadata={"read": _named(LaterLayers, "to")})
    """Renamings of tensors of layers after the model's last (MTP); the first that covers a name is taken."""
    vectors: tuple[Pattern, ...] = ()
    """Scalars that are stored with shape ``[1]``."""
    numbered: tuple[str, ...] = ()
    """Indices that each rank counts from 0."""
    keep: bool = False
    """Whether a tensor that no line covers keeps its name."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Wider dtypes, without loss, in which the model's are stored."""
    around_layers: Expression | None = None
    """True of models of which all pipeline stages have the tensors before and behind the layers."""
    _uses: dict[str, list[Use]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Raise NotationError for a stack, or a further layer, that does not leave out one index."""
        for renaming in (*self.stacks, *self.further):
            old, new, is_further = renaming.old, renaming.new, isinstance(renaming, LaterLayers)
            differing = (len(old.indices - new.indices), len(new.indices - old.indices))
            if old.stars != new.stars or differing != (1, is_further):
                how = "differ in one index" if is_further else "differ in an index that only the first has"
                raise NotationError(f"'{old.text}' and '{new.text}' should {how}")

    @property
    def renames(self) -> bool:
        """Whether tensors have other names than in the checkpoint."""
        return bool(self.lines or self.names or self.further)

    def uses(self, name: str) -> Sequence[Use]:
        """The lines that cover a tensor's name, in their order."""
        if name not in self._uses:
            uses = list[Use]()
            for line, (number, source) in (
                (row, numbered) for row in self.lines for numbered in enumerate(row.sources)
            ):
                words = source.match(name)
                if words is not None:
                    (index,) = source.indices - line.target.indices or {None}
                    stacked = words[index].strip("{}") if index else None
                    uses.append(Use(line, number, line.target.fill(words), stacked))
            self._uses.setdefault(name, uses)  # at once and once: a use is the same object in every thread
        return self._uses[name]

    def parts_of(self, name: str) -> list[str]:
        """The labels of the components of a tensor that lines name: ``q`` of ``….weight.q``."""
        return list(dict.fromkeys(label for pattern, label in self._parts if pattern.match(name) is not None))

    @cached_property
    def _parts(self) -> list[tuple[Pattern, str]]:
        """The patterns in lines that end in the label of a component: the text before it, and the label."""
        sources = (source.text.rpartition(".") for line in self.lines for source in line.sources)
        labels = [(name, label) for name, _, label in sources if name.endswith((".*", ".weight", ".bias"))]
        return [(Pattern(name), label) for name, label in labels if label.isidentifier()]


SOURCE_NAMES, PUBLISHED, MODULES = "source", "published", "modules"
"""Names of a checkpoint's tensors: the source's, the published ones, or those of transformers' modules."""

RULES = ("lines", "names", "constants", "dropped", "refusals", "stacks", "further")
"""The fields of ``Rules`` that may be of some model types alone."""


def _demands(value: object, where: str) -> tuple[tuple[Expression, str], ...]:
    return tuple((read_expression(condition), why) for condition, why in mapping(text)(value, where).items())


@dataclass(frozen=True, eq=False)
class Format:
    """A program's format."""

    name: str = field(metadata={"key": None})
    loading: Loading = field(metadata={"flat": True})
    files: Files
    rules: Rules
    container: ContainerSettings = field(default=ContainerSettings(), metadata={"flat": True})
    padding: Padding = field(default=Padding(), metadata={"flat": True})
    types: Types = field(default=Types(), metadata={"key": None})
    demands: tuple[tuple[Expression, str], ...] = field(default=(), metadata={"read": _demands})
    """Conditions on a model and a mesh, each with the message if it is false."""
    settings: ProgramConfig | None = field(default=None, metadata={"key": "config"})
    """The program's own config file."""
    same_ranks: bool = False
    """Whether the ranks of tp hold whole experts."""
    plain: bool = False
    """Whether it stores the tensors of the model or of a rank as Hugging Face does, under their own names."""
    modules: bool = False
    """Whether it has the names of transformers' own modules."""
    spelling: str | None = field(default=None, metadata={"key": None})
    """``modules``, where a format that takes any names is used with those."""
    _of: dict[tuple[str, bool], Format] = field(init=False, repr=False, default_factory=dict)

    @property
    def takes_any_names(self) -> bool:
        """Whether tensors keep their names in this format, published ones or those of transformers' modules."""
        return self.plain or (self.rules.keep and not self.rules.renames)

    @property
    def of_states(self) -> Format:
        """The format of what has a tied tensor once, as an optimizer's states, unless a run saved it once more."""
        lines = tuple(line for line in self.rules.lines if not line.also)
        return replace(self, rules=replace(self.rules, lines=lines))

    def of(self, config: Mapping[str, Any]) -> Format:
        """The format with the rules for a model of this config alone."""
        kind, headless = self.types.name_of(config), is_headless(config)
        if (kind, headless) not in self._of:
            is_own = kind in self.types.meshes  # a type with rules of its own has these alone
            rules = replace(self.rules, names=(), refusals=(), vectors=(), keep=True) if is_own else self.rules
            only: dict[str, Any] = {
                name: tuple(r for r in getattr(rules, name) if (not is_own if r.types is None else kind in r.types))
                for name in ("lines", "constants", "dropped")
            }
            if is_own:  # but layers that no model of the program's has
                only["dropped"] += tuple(r for r in rules.dropped if r.types is None and r.beyond is not None)
            if headless:  # a table of the vocabulary is tied to nothing
                only["lines"] = tuple(line for line in only["lines"] if line.without is None)
            self._of.setdefault((kind, headless), replace(self, rules=replace(rules, **only)))
        return self._of[kind, headless]
