"""How another program stores the same elements: rewrites of names, and what is joined, stacked or reordered.

A *format* is a list of lines. A line has a tensor name of the program, and the Hugging Face tensors that this tensor is
made of::

    "**.qkv_proj.*" = ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"]
    "**.experts.w2_*" = "**.experts.{expert}.down_proj.*"

Several tensors are joined along their output. An index that is not in the program's name is stacked, as the first
dimension. ``**`` stands for any text, ``*`` for text without a dot, ``{expert}`` for an index. The components of a
packed tensor have their names in models that do not pack them (``q_proj`` of ``qkv_proj``), so one line serves both.
Formats are in ``formats/programs/``; see docs/reference/formats.md. A format may build on another, its ``base``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from formats.documents import (
    Reader,
    Record,
    Unfit,
    anything,
    items,
    json_object,
    mapping,
    number,
    optional,
    record,
    text,
    truth,
    whole,
)
from formats.errors import NotationError, PlanError, brief
from formats.hints import nearest, with_hint
from formats.notation.adapter_file import adapter_format_names
from formats.notation.expressions import Expression, read_expression
from formats.notation.format import Container, Files, Format, Loading, Padding, Rules, Types
from formats.notation.format_rules import (
    Condition,
    Constant,
    Cut,
    Demand,
    Dropped,
    Further,
    Line,
    Order,
    Ranks,
    Refusal,
    Renaming,
    Settings,
    Stack,
)
from formats.notation.patterns import Pattern

T = TypeVar("T")

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
        own, inherited = json_object(document.get(table, {}), table), below.get(table, {})
        for key in own:
            if own[key] is False and key not in inherited:
                raise NotationError(f"'{key} = false' under [{table}] takes away what no base has")
        more = {key: value for key, value in inherited.items() if key not in own}
        document[table] = {key: value for key, value in {**own, **more}.items() if value is not False}
    return {key: value for key, value in {**below, **document}.items() if value is not False}


_TABLES = ("models", "tensors", "names", "dropped", "demands", "refused", "stacks", "further", "documents")


@dataclass(frozen=True)
class _OfTypes:
    """The table that a tool writes: what is known of each model type, and the rules that hold for some types."""

    types: Types
    lines: tuple[Line, ...]
    constants: tuple[Constant, ...]
    dropped: tuple[Dropped, ...]


def _of_types(fields: Record) -> _OfTypes:
    _table(fields, "made_with", text)
    refused = _all(fields, "refused", record(lambda of: (_set(of, "types"), of.get("why", text))))
    seen = _all(fields, "seen", record(lambda of: (_set(of, "types"), _names(of.get("tensors", _ENDS)))))
    dropped = _all(fields, "dropped", record(lambda of: (_set(of, "types"), of.get("names", items(_pattern)))))
    types = Types(
        classes=_set(fields, "classes"),
        refused={name: why for names, why in refused for name in names},
        compared=_set(fields, "compared"),
        meshes=_table(fields, "meshes", mapping(optional(whole(1)))),
        seen={name: tensors for names, tensors in seen for name in names},
    )
    return _OfTypes(
        types,
        tuple(lines_of_types(fields.find("lines", anything, []))),
        _all(fields, "constants", record(_constant)),
        tuple(Dropped(pattern, types=names) for names, patterns in dropped for pattern in patterns),
    )


def _format(name: str, fields: Record, of_types: _OfTypes) -> Format:
    no_engine: tuple[str | None, str | None] = (None, None)
    engine = fields.find("engine", _engine, no_engine)
    return Format(
        name=name,
        loading=Loading(
            fields.get("loaded_by", text), fields.get("load", text), fields.find("load_pp", text, ""),
            fields.find("load_ep", text, ""), *engine,
        ),
        files=fields.get("files", _files),
        rules=_rules(fields, of_types),
        container=Container(
            chunks=fields.find("chunks", truth, False),
            inside=fields.find("inside", text, None),
            entries=fields.find("entries", json_object, {}),
            documents=_table(fields, "documents", json_object),
            extra_state=_all(fields, "extra_state", _pattern),
            ignored=_all(fields, "ignored", _pattern),
        ),
        padding=Padding(fields.find("pad_vocabulary_to", _padded, None), fields.find("free_padding", truth, False)),
        types=replace(of_types.types, only=_all(fields, "model_types", text)),
        demands=tuple(Demand(read_expression(holds), why) for holds, why in _table(fields, "demands", text).items()),
        settings=fields.find("config", record(_settings), None),
        same_ranks=fields.find("same_ranks", truth, False),
        plain=fields.find("plain", truth, False),
    )  # fmt: skip


def _rules(fields: Record, of_types: _OfTypes) -> Rules:
    of_models = [_of_types_alone(*each) for each in _table(fields, "models", anything).items()]
    own = _model_rules(fields)
    return Rules(
        lines=(*(line for rules in of_models for line in rules.lines), *own.lines, *of_types.lines),
        names=(*(new for rules in of_models for new in rules.names), *own.names),
        constants=(*own.constants, *(each for rules in of_models for each in rules.constants), *of_types.constants),
        dropped=(*own.dropped, *(each for rules in of_models for each in rules.dropped), *of_types.dropped),
        refusals=tuple(_refusal(*each) for each in _table(fields, "refused", anything).items()),
        stacks=tuple(_stack(*each) for each in _table(fields, "stacks", anything).items()),
        further=tuple(_further(*each) for each in _table(fields, "further", anything).items()),
        vectors=_all(fields, "vectors", _pattern),
        numbered=_all(fields, "numbered", text),
        keep=fields.find("keep", truth, False),
    )


@dataclass(frozen=True)
class _ModelRules:
    """What a program makes of all models, or of those of some model types."""

    lines: tuple[Line, ...]
    names: tuple[Renaming, ...]
    constants: tuple[Constant, ...]
    dropped: tuple[Dropped, ...]


def _model_rules(fields: Record) -> _ModelRules:
    tensors, names = _table(fields, "tensors", anything), _table(fields, "names", anything)
    return _ModelRules(
        lines=tuple(line for target, entries in tensors.items() for line in _lines(target, entries)),
        names=tuple(new for found, entries in names.items() for new in _renamings(found, entries)),
        constants=_all(fields, "constants", record(_constant)),
        dropped=tuple(_dropped(*each) for each in _table(fields, "dropped", anything).items()),
    )


def _of_types_alone(names: str, value: object) -> _ModelRules:
    """What stands under ``[models."a, b"]``: it holds for these model types alone."""
    types = [name.strip() for name in names.split(",")]
    if "" in types:
        raise Unfit(f"'{names}' names a model type without a name")
    condition = f"model_type in {types}" if len(types) > 1 else f"model_type == {types[0]!r}"
    where = f"models.{names}"
    rules = {
        table: [_only(each, condition, f"{where}.{table}") for each in found]
        if isinstance(found, list)
        else {
            key: _each_only(_MEANT.get(table, ""), each, condition, f"{where}.{table}.'{key}'")
            for key, each in json_object(found, f"{where}.{table}").items()
        }
        for table, found in json_object(value, where).items()
    }
    return record(_model_rules)(rules, where)


_MEANT = {"tensors": "from", "names": "to"}
"""For each kind of table, the key that a plain value stands for."""


def _each_only(key: str, value: Any, condition: str, where: str) -> list[dict[str, Any]] | dict[str, Any]:
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return [_only(each, condition, where) for each in value]
    return _only(value if isinstance(value, dict) else {key: value}, condition, where)


def _only(value: object, condition: str, where: str) -> dict[str, Any]:
    """The entry, where a further condition holds."""
    entry = json_object(value, where)
    own = text(entry["when"], f"{where}.when") if "when" in entry else None
    if own == "":
        raise Unfit(f"{where}.when should be a condition")
    return {**entry, "when": condition if own is None else f"{condition} and ({own})"}


# ------------------------------------------------------------------------------------------------------------- readers


def _all(fields: Record, key: str, reader: Reader[T]) -> tuple[T, ...]:
    """The items of a list that may be missing."""
    none: tuple[T, ...] = ()
    return fields.find(key, items(reader), none)


def _table(fields: Record, key: str, reader: Reader[T]) -> dict[str, T]:
    """The entries of a table that may be missing, in their order."""
    none: dict[str, T] = {}
    return fields.find(key, mapping(reader), none)


def _set(fields: Record, key: str) -> frozenset[str]:
    return frozenset(_all(fields, key, text))


def _pattern(value: object, where: str) -> Pattern:
    return Pattern(text(value, where))


def _expression(value: object, where: str) -> Expression:
    return read_expression(text(value, where))


def _one_or_more(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    return lambda value, where: items(reader)(value if isinstance(value, list) else [value], where)


_ENDS = mapping(items(text))


def _engine(value: object, where: str) -> tuple[str | None, str | None]:
    """An engine, and what it calls the format if that is another name."""
    if isinstance(value, str):
        return value, None
    return record(lambda fields: (fields.get("name", text), fields.find("format", text, None)))(value, where)


def _files(value: object, where: str) -> Files:
    """The name of a rank's weight file, or a table of such names."""
    table = {"name": value} if isinstance(value, str) else value
    keys = ("pp", "ep", "pp_ep", "parts", "index", "folder", "tracker")
    return record(lambda fields: Files(fields.get("name", text), *(fields.find(key, text, None) for key in keys)))(
        table, where
    )


def _padded(value: object, where: str) -> Expression:
    expression = _expression(value, where)
    if not {*expression.names} <= {"size", "tp"}:
        raise Unfit(f"{where}: '{expression.text}' should be over size and tp")
    return expression


def _settings(fields: Record) -> Settings:
    write, read = (fields.get(way, mapping(_expression)) for way in ("write", "read"))
    return Settings(fields.get("file", text), write, read)


def _lines(target: str, value: object) -> Iterator[Line]:
    """The lines of a target: the sources of one, or a table of it, or a list of tables."""
    is_list = isinstance(value, list) and not all(isinstance(each, str) for each in value)
    for entry in items(anything)(value, target) if is_list else [value]:
        yield record(lambda fields: _line(target, fields))(
            entry if isinstance(entry, dict) else {"from": entry}, f"'{target}'"
        )


def _line(target: str, fields: Record) -> Line:
    sources = fields.get("from", _one_or_more(_pattern))
    line = Line(
        target=Pattern(target),
        sources=sources,
        condition=Condition(
            when=fields.find("when", _expression, None),
            without=fields.find("without", _pattern, None),
            beside=fields.find("beside", _pattern, None),
        ),
        order=Order(
            output_first=fields.find("output_first", truth, False),
            pairs=_of_each(fields.find("pairs", _one_or_more(text), ()), sources),
            halves=_of_each(fields.find("halves", _one_or_more(text), ()), sources),
            by=fields.find("by", text, None),
            ones=fields.find("ones", items(whole(0)), None),
        ),
        ranks=Ranks(
            cut=fields.find("cut", _cut, None),
            first_rank=fields.find("first_rank", truth, False),
            every_stage=fields.find("every_stage", truth, False),
            first_stage=fields.find("first_stage", text, None),
            last_stage=fields.find("last_stage", text, None),
        ),
        apart=_all(fields, "apart", text),
        part=fields.find("part", text, None),
        dtype=fields.find("dtype", text, None),
        function=fields.find("function", text, None),
        also=fields.find("also", truth, False),
    )
    if line.order.ones is not None and len(sources) > 1:
        raise NotationError(f"'{target}': 'ones' is for what is made of one tensor")
    for source in sources:
        if source.stars != line.target.stars or len(source.indices - line.target.indices) > 1:
            raise NotationError(f"'{target}': '{source.text}' has other wildcards")
    return line


def _cut(value: object, where: str) -> Cut:
    """``false``, an axis, a dimension, or a table of a dimension and its parts."""
    if value is False:
        return Cut()
    if isinstance(value, str):
        return Cut(axis=value)
    table = value if isinstance(value, dict) else {"dim": value}
    return record(lambda of: Cut(dim=of.get("dim", whole(0)), parts=of.find("parts", whole(1), 1)))(table, where)


def lines_of_types(groups: object) -> list[Line]:
    """Lines that hold for some model types, from a table that a tool writes. Raises ValueError, NotationError."""
    read = items(record(lambda fields: (_set(fields, "types"), fields.get("tensors", mapping(anything)))))
    return [
        replace(line, types=types)
        for types, tensors in read(groups, "lines")
        for target, value in tensors.items()
        for line in _lines(target, value)
    ]


def _names(table: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """The names of tensors, of which a table has the ends by their beginning."""
    return frozenset(f"{head}.{end}" if head else end for head, ends in table.items() for end in ends)


def _of_each(found: tuple[str, ...], sources: Sequence[Pattern]) -> tuple[str, ...]:
    """The values, one a source: a single value is taken for all. Raises NotationError if the lengths differ."""
    found *= len(sources) if len(found) == 1 else 1
    if found and len(found) != len(sources):
        raise NotationError(f"{brief([*found])} has another length than the sources")
    return found


def _renamings(found: str, value: Any) -> Iterator[Renaming]:
    for entry in value if isinstance(value, list) else [value]:
        yield record(
            lambda fields: Renaming(Pattern(found), fields.get("to", _pattern), fields.find("when", _expression, None))
        )(entry if isinstance(entry, dict) else {"to": entry}, f"'{found}'")


def _constant(fields: Record) -> Constant:
    return Constant(
        beside=fields.get("beside", _one_or_more(_pattern)),
        names=fields.get("names", items(_pattern)),
        dtype=fields.get("dtype", text),
        shape=_all(fields, "shape", whole(0)),
        value=fields.get("value", number),
        when=fields.find("when", _expression, None),
        types=fields.find("types", lambda value, where: frozenset(items(text)(value, where)), None),
        vector=fields.find("vector", truth, False),
    )


def _refusal(found: str, value: object) -> Refusal:
    return record(
        lambda fields: Refusal(
            Pattern(found), fields.get("why", text), fields.find("when", _expression, None),
            fields.find("scalars", truth, False),
        )
    )(value, f"'{found}'")  # fmt: skip


def _stack(of: str, value: object) -> Stack:
    stack = record(
        lambda fields: Stack(Pattern(of), fields.get("name", _pattern), fields.find("when", _expression, None))
    )({"name": value} if isinstance(value, str) else value, f"'{of}'")
    if stack.of.stars != stack.name.stars or len(stack.of.indices - stack.name.indices) != 1:
        raise NotationError(f"'{of}' should have one index more than '{stack.name.text}'")
    return stack


def _further(found: str, value: object) -> Further:
    further = record(
        lambda fields: Further(
            Pattern(found), fields.get("to", _pattern), fields.get("beyond", _expression),
            fields.find("one_stage", text, None),
        )
    )(value, f"'{found}'")  # fmt: skip
    one, other = further.found, further.new
    if one.stars != other.stars or len(one.indices - other.indices) != 1 or len(other.indices - one.indices) != 1:
        raise NotationError(f"'{found}' and '{other.text}' should differ in one index")
    return further


def _dropped(found: str, value: object) -> Dropped:
    return record(
        lambda fields: Dropped(
            Pattern(found), fields.find("beyond", _expression, None), fields.find("when", _expression, None)
        )
    )(value, f"'{found}'")


OWN, HUGGING_FACE = (read_format(PROGRAMS / "plain" / f"{name}.toml") for name in ("reshard", "huggingface"))
"""The formats that store tensors as Hugging Face does: that of ranks' folders, and that of one full checkpoint."""
