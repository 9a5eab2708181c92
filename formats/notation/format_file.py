"""How another program stores the same elements: rewrites of names, and what is joined, stacked or reordered.

A *format* is a list of lines. A line has a tensor name of the program, and the Hugging Face tensors that this tensor is
made of::

    "**.qkv_proj.*" = ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"]
    "**.experts.w2_*" = "**.experts.{expert}.down_proj.*"

Several tensors are joined along their output. An index that is not in the program's name is stacked, as the first
dimension. ``**`` stands for any text, ``*`` for text without a dot, ``{expert}`` for an index. The components of a
packed tensor have their names in models that do not pack them (``q_proj`` of ``qkv_proj``), so one line serves both.
Formats are in ``formats/programs/``; see docs/reference/formats.md. A format may build on another, its ``base``.

The files of ``formats/adapters/`` say how programs store A and B of experts: the name and the axes of A and of B, for a
stack of matrices ``expert x y``::

    [lora_A]
    name = "{module}.{wrapped}lora_A.weight"
    axes = "(expert rank) x"

``in`` and ``out`` are the input and the output of a matrix. ``x`` is the side that PEFT takes as the input, ``y`` the
other: by its position, so it may be the output. A file without A and B is a format in which each expert has its own.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from formats.documents import (
    READERS,
    Reader,
    Record,
    Unfit,
    anything,
    items,
    json_object,
    mapping,
    optional,
    reader_of,
    record,
    structure,
    text,
    unfit,
    whole,
)
from formats.errors import NotationError, PlanError, brief
from formats.hints import nearest, with_hint
from formats.notation.expressions import Expression, read_expression
from formats.notation.format import (
    Constant,
    Container,
    Cut,
    Dropped,
    Files,
    Format,
    LaterLayers,
    Line,
    Loading,
    Padding,
    Pattern,
    Refusal,
    Renaming,
    Rules,
    Types,
)

FOLDER = Path(__file__).parents[1] / "adapters"


@dataclass(frozen=True)
class Factor:
    """A or B of all experts: its ``name``, and its ``axes``, dimension by dimension, each slowest first."""

    name: str
    axes: str

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The axes of each dimension."""
        return tuple(tuple(dim.strip("()").split()) for dim in re.findall(r"\([^)]*\)|\w+", self.axes))

    @property
    def side(self) -> str:
        """The axis that is neither expert nor rank: ``in`` or ``out``."""
        return next(axis for dim in self.dims for axis in dim if axis not in {"expert", "rank"})


@dataclass(frozen=True)
class AdapterFormat:
    """How a program stores an adapter.

    ``tried`` says what ran. ``factors`` are A and B of a stack; None: each expert has its own. ``second``: PEFT takes
    the second dimension of a matrix as the input, except in models of the types ``flipped``. ``since`` is the first
    version of PEFT that does so. ``words`` stand in names for those of weights. ``halves``: gate and up lie one after
    the other, also where the checkpoint interleaves them. ``one_scale``: one rank and alpha for all. ``settings`` are
    entries of ``adapter_config.json``.
    """

    name: str
    loaded_by: str
    load: str
    tried: str
    factors: tuple[Factor, Factor] | None
    second: bool = False
    flipped: frozenset[str] = frozenset()
    since: tuple[int, ...] | None = None
    words: Mapping[str, str] = field(default_factory=dict)
    halves: bool = False
    one_scale: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def takes_second(self, model_type: object) -> bool:
        """Whether the second dimension of a matrix is taken as the input in models of this type."""
        return self.second != (str(model_type) in self.flipped)


@cache
def adapter_format_names() -> Sequence[str]:
    """The names of all formats of adapters, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@cache
def adapter_format(name: str) -> AdapterFormat:
    """The format of adapters of this name. Raises PlanError if there is none."""
    names = adapter_format_names()
    if name not in names:
        hint = with_hint(nearest(name, names), f"known formats of adapters: {', '.join(names)}")
        raise PlanError(f"'{name}' is no format of adapters", hint)
    path = FOLDER / f"{name}.toml"
    try:
        return record(lambda fields: _adapter_format(name, fields))(_with_adapter_base(path), "")
    except Unfit as error:
        raise PlanError(f"{path}: {error}") from None


@cache
def versions() -> Sequence[AdapterFormat]:
    """PEFT's own formats, the newest first."""
    formats = [format for format in map(adapter_format, adapter_format_names()) if format.since is not None]
    return sorted(formats, key=lambda format: format.since or (), reverse=True)


def _with_adapter_base(path: Path) -> dict[str, Any]:
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    base = document.pop("base", None)
    return document if base is None else _with_adapter_base(path.parent / f"{base}.toml") | document


def version_of(version: str | None) -> tuple[int, ...] | None:
    """The numbers of a version: at most three. None if it has none."""
    match = re.match(r"\d{1,4}(\.\d{1,4}){1,2}", version or "")
    return tuple(map(int, match[0].split("."))) if match else None


def _adapter_format(name: str, fields: Record) -> AdapterFormat:
    a, b = (fields.find(key, optional(reader_of(Factor)), None) for key in ("lora_A", "lora_B"))
    return structure(
        AdapterFormat,
        fields,
        name=name,
        factors=None if a is None or b is None else (a, b),
        second=fields.find("input", text, "first") == "second",
        since=version_of(fields.find("since", text, "")),
    )


T = TypeVar("T")
Rule = TypeVar("Rule", Line, Renaming, Constant, Dropped)
Renames = TypeVar("Renames", Renaming, LaterLayers)

PROGRAMS = Path(__file__).parents[1] / "programs"

READ: dict[str, Format] = {}
"""The formats that were read, by name. A format is read when it is first asked for."""


def all_formats() -> Mapping[str, Format]:
    """The formats of programs, by name."""
    return {name: format_of(name) for name in format_names()}


def format_of(name: str) -> Format:
    """The format of this name. Raises PlanError if there is none."""
    if name not in READ:
        if name in adapter_format_names():
            raise PlanError(f"'{name}' is a format of adapters", f"'reshard split ADAPTER OUT --as {name}' writes it")
        if name not in format_names():
            names = names_to_write()
            hint = with_hint(nearest(name, names), f"known formats: {', '.join(names)}")
            raise PlanError(f"'{name}' is no format that is written here", hint)
        READ[name] = read_format(PROGRAMS / f"{name}.toml")
    return READ[name]


def format_to_write(name: str | None) -> Format:
    """The format that ``--as`` names; reshard's own without a name. Raises PlanError if there is none."""
    return OWN if not name else HUGGING_FACE if name == HUGGING_FACE.name else format_of(name)


@cache
def format_names() -> Sequence[str]:
    """The names of all formats, sorted."""
    return sorted(path.stem for path in PROGRAMS.glob("*.toml"))


def names_to_write() -> Sequence[str]:
    """What ``--as`` offers, sorted: the formats of programs and of adapters, and Hugging Face's own.

    A name with ``-live`` is of what a program has in memory: no program loads such files.
    """
    return sorted([HUGGING_FACE.name, *adapter_format_names(), *(n for n in format_names() if not n.endswith("-live"))])


def read_format(path: Path, table: Mapping[str, Any] | None = None) -> Format:
    """Read a format, with ``table`` in the place of its table of model types.

    Raises PlanError that names the file and what is wrong in it.
    """
    try:
        document = _with_base(path)
        types = document.pop("types", None)
        if table is None and types is not None:
            table = json.loads((PROGRAMS / text(types, "types")).read_text(encoding="utf-8"))
        of_types = record(_of_types)(dict(table or {}), "")
        return record(lambda fields: _format(path.stem, fields, of_types))(document, "")
    except (NotationError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from None


def _with_base(path: Path) -> dict[str, Any]:
    """A format's parsed form with what it takes over from its ``base``. Its own lines stand before those of the base.

    A key that is ``false`` is taken away. Raises NotationError for one that the base does not have.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    below = _with_base(PROGRAMS / f"{document.pop('base')}.toml") if "base" in document else {}
    for table in _TABLES:
        stated, inherited = json_object(document.get(table, {}), table), below.get(table, {})
        for key in stated:
            if stated[key] is False and key not in inherited:
                raise NotationError(f"'{key} = false' under [{table}] takes away what no base has")
        taken_over = {key: value for key, value in inherited.items() if key not in stated}
        document[table] = {key: value for key, value in {**stated, **taken_over}.items() if value is not False}
    return {key: value for key, value in {**below, **document}.items() if value is not False}


_TABLES = ("models", "tensors", "names", "dropped", "demands", "refused", "stacks", "further", "documents")


def _of_types(table: Record) -> tuple[Types, Rules]:
    """The table that a tool writes: what is known of each model type, and the rules that hold for some types."""
    _table(table, "made_with", text)
    seen = _of_each_type(table, "seen", "tensors", mapping(items(text)))
    types = Types(
        classes=_set(table, "classes"),
        refused=_reasons(table, "refused"),
        beyond=_reasons(table, "beyond"),
        compared=_set(table, "compared"),
        meshes=_table(table, "meshes", mapping(optional(whole(1)))),
        seen={
            name: frozenset(f"{head}.{end}" if head else end for head, ends in tensors.items() for end in ends)
            for names, tensors in seen
            for name in names
        },
    )
    return types, Rules(
        lines=tuple(lines_of_types(table.find("lines", anything, []))),
        constants=_all(table, "constants", reader_of(Constant)),
        dropped=tuple(
            Dropped(pattern, types=names)
            for names, patterns in _of_each_type(table, "dropped", "names", items(_pattern))
            for pattern in patterns
        ),
    )


def _reasons(table: Record, key: str) -> Mapping[str, str]:
    return {name: why for names, why in _of_each_type(table, key, "why", text) for name in names}


def _of_each_type(table: Record, key: str, field: str, reader: Reader[T]) -> tuple[tuple[frozenset[str], T], ...]:
    """What entries say of some types under the key ``field``."""
    return _all(table, key, record(lambda entry: (_set(entry, "types"), entry.get(field, reader))))


def _format(name: str, table: Record, general: tuple[Types, Rules]) -> Format:
    padding = structure(Padding, table)
    if padding.to is not None and not {*padding.to.names} <= {"size", "tp"}:
        raise Unfit(f"pad_vocabulary_to: '{padding.to.text}' should be over size and tp")
    demands = _table(table, "demands", text).items()
    return structure(
        Format,
        table,
        name=name,
        loading=structure(Loading, table),
        rules=_rules(table, general[1]),
        container=structure(Container, table, documents=_table(table, "documents", json_object)),
        padding=padding,
        types=replace(general[0], only=_all(table, "model_types", text)),
        demands=tuple((read_expression(condition), why) for condition, why in demands),
    )


def _rules(table: Record, of_types: Rules) -> Rules:
    """All rules of a file. Lines and names for some model types stand before those for all."""
    some = [_of_models(*dropped) for dropped in _table(table, "models", anything).items()]
    general = _model_rules(table)
    return structure(
        Rules,
        table,
        lines=tuple(line for rules in (*some, general, of_types) for line in rules.lines),
        names=tuple(name for rules in (*some, general) for name in rules.names),
        constants=tuple(constant for rules in (general, *some, of_types) for constant in rules.constants),
        dropped=tuple(dropped for rules in (general, *some, of_types) for dropped in rules.dropped),
        refusals=tuple(_named(Refusal, table, "refused")),
        stacks=_checked(0, _named(Renaming, table, "stacks", "to")),
        further=_checked(1, _named(LaterLayers, table, "further")),
    )


def _model_rules(table: Record) -> Rules:
    """What a program makes of all models, or of those of some model types."""
    lines = _table(table, "tensors", anything).items()
    return Rules(
        lines=tuple(line for target, entries in lines for line in _lines(target, entries)),
        names=tuple(_named(Renaming, table, "names", "to")),
        constants=_all(table, "constants", reader_of(Constant)),
        dropped=tuple(_named(Dropped, table, "dropped")),
    )


def _of_models(names: str, value: object) -> Rules:
    """What stands under ``[models."a, b"]``: it holds for these model types alone."""
    types = [name.strip() for name in names.split(",")]
    if "" in types:
        raise Unfit(f"'{names}' names a model type without a name")
    condition = f"model_type in {types}" if len(types) > 1 else f"model_type == {types[0]!r}"

    def only(rules: Iterable[Rule]) -> tuple[Rule, ...]:
        texts = ((rule, f" and ({rule.when.text})" if rule.when else "") for rule in rules)
        return tuple(replace(rule, when=read_expression(condition + suffix)) for rule, suffix in texts)

    rules = record(_model_rules)(value, f"models.{names}")
    return Rules(only(rules.lines), only(rules.names), only(rules.constants), only(rules.dropped))


def _lines(target: str, value: object) -> Iterator[Line]:
    """The lines of a target: the sources of one, or a table of it, or a list of tables."""
    is_list = isinstance(value, list) and not all(isinstance(item, str) for item in value)
    for entry in items(anything)(value, target) if is_list else [value]:
        table = entry if isinstance(entry, dict) else {"from": entry}
        line = record(partial(structure, Line, target=Pattern(target)))(table, f"'{target}'")
        if line.ones is not None and len(line.sources) > 1:
            raise NotationError(f"'{target}': 'ones' is for what is made of one tensor")
        for source in line.sources:
            if source.stars != line.target.stars or len(source.indices - line.target.indices) > 1:
                raise NotationError(f"'{target}': '{source.text}' has other wildcards")
        pairs, halves = (_of_each(axes, len(line.sources)) for axes in (line.pairs, line.halves))
        yield replace(line, pairs=pairs, halves=halves)


def _of_each(values: tuple[str, ...], count: int) -> tuple[str, ...]:
    """A value for each source: a single one is taken for all. Raises NotationError if the lengths differ."""
    values *= count if len(values) == 1 else 1
    if values and len(values) != count:
        raise NotationError(f"{brief([*values])} has another length than the sources")
    return values


def lines_of_types(groups: object) -> list[Line]:
    """Lines that hold for some model types, from a table that a tool writes. Raises ValueError, NotationError."""
    read_groups = items(record(lambda table: (_set(table, "types"), table.get("tensors", mapping(anything)))))
    return [
        replace(line, types=types)
        for types, tensors in read_groups(groups, "lines")
        for target, value in tensors.items()
        for line in _lines(target, value)
    ]


def _checked(new: int, renamings: Iterable[Renames]) -> tuple[Renames, ...]:
    """The same, of which each has one index that its new name has not, and so many that only this has."""
    renamings = tuple(renamings)
    for one, other in ((renaming.old, renaming.new) for renaming in renamings):
        if one.stars != other.stars or (len(one.indices - other.indices), len(other.indices - one.indices)) != (1, new):
            how = "differ in one index" if new else "differ in an index that only the first has"
            raise NotationError(f"'{one.text}' and '{other.text}' should {how}")
    return renamings


# ------------------------------------------------------------------------------------------------------------- readers


def _pattern(value: object, where: str) -> Pattern:
    return Pattern(text(value, where))


def _expression(value: object, where: str) -> Expression:
    try:
        return read_expression(text(value, where))
    except NotationError as error:
        raise Unfit(f"{where}: {error.message}") from None


def _cut(value: object, where: str) -> Cut:
    """``false``, an axis, a dimension, or a table of a dimension and its parts."""
    if value is False:
        return Cut()
    if isinstance(value, str):
        return Cut(axis=value)
    table = value if isinstance(value, dict) else {"dim": value}
    return record(lambda entry: Cut(dim=entry.get("dim", whole(0)), parts=entry.find("parts", whole(1), 1)))(
        table, where
    )


def _on(value: object, where: str) -> str | Mapping[str, str]:
    """Ranks, or other names on stages."""
    if isinstance(value, dict):
        stages = ("first", "last")
        return record(lambda entry: {key: name for key in stages if (name := entry.find(key, text, ""))})(value, where)
    if value not in {"first rank", "every stage"}:
        raise unfit(where, "'first rank', 'every stage' or a table", value)
    return str(value)


def _files(value: object, where: str) -> Files:
    """The name of a rank's weight file, or a table of such names."""
    return reader_of(Files)({"name": value} if isinstance(value, str) else value, where)


READERS.update({Pattern: _pattern, Expression: _expression, Cut: _cut, str | Mapping[str, str]: _on})
READERS[Files] = _files


def _all(table: Record, key: str, reader: Reader[T]) -> tuple[T, ...]:
    """The items of a list that may be missing."""
    none: tuple[T, ...] = ()
    return table.find(key, items(reader), none)


def _table(table: Record, key: str, reader: Reader[T]) -> dict[str, T]:
    """The entries of a table that may be missing, in their order."""
    none: dict[str, T] = {}
    return table.find(key, mapping(reader), none)


def _named(kind: Callable[..., T], table: Record, key: str, plain: str = "") -> Iterator[T]:
    """The rules of a table whose keys are patterns. A value that is no table is that of the key ``plain``."""
    for name, value in _table(table, key, anything).items():
        for entry in value if plain and isinstance(value, list) else [value]:
            fields = entry if isinstance(entry, dict) or not plain else {plain: entry}
            yield record(partial(structure, kind, old=Pattern(name)))(fields, f"'{name}'")


def _set(table: Record, key: str) -> frozenset[str]:
    return frozenset(_all(table, key, text))


OWN, HUGGING_FACE = (read_format(PROGRAMS / "plain" / f"{name}.toml") for name in ("reshard", "huggingface"))
"""The formats that store tensors as Hugging Face does: that of ranks' folders, and that of one full checkpoint."""
