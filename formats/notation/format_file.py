"""How another program stores the same elements: rewrites of names, and what is joined, stacked or reordered.

A *format* describes a program's format in lines. A line has a name of the program's, and the tensors of Hugging Face's
that it is made of::

    "**.qkv_proj.*" = ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"]
    "**.experts.w2_*" = "**.experts.{expert}.down_proj.*"

Several tensors are joined along their output. An index that is not in the program's name is stacked, as the first
dimension. ``**`` stands for any text, ``*`` for text without a dot, ``{expert}`` for an index. The components of a
packed tensor have names as in models that do not pack them (``q_proj`` of ``qkv_proj``), so one line serves both.
Formats are in ``formats/programs/``; see docs/formats.md. A format may build on another, its ``base``.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from formats.errors import NotationError, PlanError, brief, nearest
from formats.notation.expressions import Expression, read_expression
from formats.notation.format import Format
from formats.notation.format_rules import Constant, Demand, Dropped, Further, Line, Refusal, Renaming, Settings, Stack
from formats.notation.patterns import Pattern

PROGRAMS = Path(__file__).parents[1] / "programs"

READ: dict[str, Format] = {}
"""The formats that were read, by name: one is read when it is asked for."""


def all_formats() -> Mapping[str, Format]:
    """The formats of programs, by name."""
    return {name: format_of(name) for name in format_names()}


def format_of(name: str) -> Format:
    """The format of a name. Raises PlanError."""
    if name not in READ:
        if name not in format_names():
            known = f"known formats: {', '.join(format_names())}"
            raise PlanError(
                f"'{name}' is no format that is written here", f"{nearest(name, format_names())} {known}".strip()
            )
        READ[name] = read_format(PROGRAMS / f"{name}.toml")
    return READ[name]


@cache
def format_names() -> Sequence[str]:
    """The names of all formats, sorted."""
    return sorted(path.stem for path in PROGRAMS.glob("*.toml"))


_LINE_KEYS = {
    "from",
    "when",
    "output_first",
    "pairs",
    "halves",
    "apart",
    "dtype",
    "function",
    "first_rank",
    "whole",
    "every_stage",
    "first_stage",
    "last_stage",
    "deal",
    "cut",
    "parts",
    "by",
    "part",
    "evenly",
    "without",
    "beside",
    "also",
    "ones",
}


def read_format(path: Path, types: Mapping[str, Any] | None = None) -> Format:
    """Read a format, with ``types`` in the place of its file of model types.

    Raises PlanError that names the file and what is wrong in it.
    """
    try:
        document = _with_base(path)
        lines = [line for target, value in document["tensors"].items() for line in _lines(target, value)]
        of_types = types or {}
        if types is None and "types" in document:
            of_types = json.loads((PROGRAMS / document["types"]).read_text(encoding="utf-8"))
        lines += lines_of_types(of_types.get("lines", ()))
        constants = [*document.get("constants", ()), *of_types.get("constants", ())]
        dropped = [_dropped(name, value) for name, value in document["dropped"].items()]
        dropped += [
            replace(_dropped(name, {}), types=frozenset(group["types"]))
            for group in of_types.get("dropped", ())
            for name in group["names"]
        ]
        return Format(
            name=path.stem,
            loaded_by=document["loaded_by"],
            load=document["load"],
            files=document["files"],
            lines=tuple(lines),
            names=tuple(_renamings(document["names"])),
            constants=tuple(map(_constant, constants)),
            dropped=tuple(dropped),
            keep=document.get("keep", False),
            pad_to=document.get("pad_vocabulary_to", 1),
            same_ranks=document.get("same_ranks", False),
            model_types=tuple(document.get("model_types", ())),
            load_pp=document.get("load_pp", ""),
            load_ep=document.get("load_ep", ""),
            files_pp=document.get("files_pp"),
            files_ep=document.get("files_ep"),
            files_pp_ep=document.get("files_pp_ep"),
            folder=document.get("folder"),
            tracker=document.get("tracker"),
            inside=document.get("inside"),
            entries=document.get("entries", {}),
            engine=document.get("engine"),
            load_format=document.get("load_format"),
            parts=document.get("parts"),
            index=document.get("index"),
            pad_times_degree=document.get("pad_times_degree", False),
            pad_product=document.get("pad_product", False),
            free_padding=document.get("free_padding", False),
            numbered=tuple(document.get("numbered", ())),
            demands=tuple(Demand(read_expression(holds), why) for holds, why in document["demands"].items()),
            settings=_settings(document["config"]) if "config" in document else None,
            refusals=tuple(_refusal(name, value) for name, value in document["refused"].items()),
            vectors=tuple(map(Pattern, document.get("vectors", ()))),
            ignored=tuple(map(Pattern, document.get("ignored", ()))),
            boxes=document.get("boxes", False),
            stacks=tuple(_stack(of, value) for of, value in document["stacks"].items()),
            further=tuple(_further(found, value) for found, value in document["further"].items()),
            saved=document.get("saved", {}),
            documents=document.get("documents", {}),
            extra_state=tuple(map(Pattern, document.get("extra_state", ()))),
            classes=frozenset(of_types.get("classes", ())),
            refused={name: group["why"] for group in of_types.get("refused", ()) for name in group["types"]},
            compared=frozenset(of_types.get("compared", ())),
            meshes=of_types.get("meshes", {}),
            seen={name: _names(group["tensors"]) for group in of_types.get("seen", ()) for name in group["types"]},
        )
    except (NotationError, KeyError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from None


def _with_base(path: Path) -> dict[str, Any]:
    """A format's parsed form with what it takes over from its ``base``. Its own lines stand before those of the base.

    A key that is ``false`` is taken away. Raises NotationError for one that the base does not have.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    below = _with_base(PROGRAMS / f"{document.pop('base')}.toml") if "base" in document else {}
    for table in _TABLES:
        own, inherited = document.get(table, {}), below.get(table, {})
        for key in own:
            if own[key] is False and key not in inherited:
                raise NotationError(f"'{key} = false' under [{table}] takes away what no base has")
        document[table] = {
            key: value for key, value in {**own, **_without(inherited, own)}.items() if value is not False
        }
    return {key: value for key, value in {**below, **document}.items() if value is not False}


_TABLES = ("tensors", "names", "dropped", "demands", "refused", "stacks", "further")


def _without(inherited: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in inherited.items() if key not in own}


def _settings(table: Mapping[str, Any]) -> Settings:
    write, read = ({key: read_expression(text) for key, text in table[way].items()} for way in ("write", "read"))
    return Settings(table["file"], write, read)


def _lines(target: str, value: Any) -> Iterator[Line]:
    for entry in value if isinstance(value, list) and not all(isinstance(each, str) for each in value) else [value]:
        table = entry if isinstance(entry, dict) else {"from": entry}
        if table.keys() - _LINE_KEYS:
            raise NotationError(f"'{target}': unknown key '{min(table.keys() - _LINE_KEYS)}'")
        sources = table["from"] if isinstance(table["from"], list) else [table["from"]]
        line = Line(
            target=Pattern(target),
            sources=tuple(Pattern(source) for source in sources),
            when=_condition(table),
            output_first=table.get("output_first", False),
            pairs=_of_each(table.get("pairs", ()), sources),
            halves=_of_each(table.get("halves", ()), sources),
            apart=tuple(table.get("apart", ())),
            dtype=table.get("dtype"),
            function=table.get("function"),
            first_rank=table.get("first_rank", False),
            whole=table.get("whole", False),
            every_stage=table.get("every_stage", False),
            first_stage=table.get("first_stage"),
            last_stage=table.get("last_stage"),
            deal=table.get("deal"),
            cut=table.get("cut"),
            parts=table.get("parts", 1),
            by=table.get("by"),
            part=table.get("part"),
            evenly=table.get("evenly", False),
            without=Pattern(table["without"]) if "without" in table else None,
            beside=Pattern(table["beside"]) if "beside" in table else None,
            also=table.get("also", False),
            ones=tuple(table["ones"]) if "ones" in table else None,
        )
        if line.ones is not None and len(sources) > 1:
            raise NotationError(f"'{target}': 'ones' is for what is made of one tensor")
        for source in line.sources:
            if source.stars != line.target.stars or len(source.indices - line.target.indices) > 1:
                raise NotationError(f"'{target}': '{source.text}' has other wildcards")
        yield line


def lines_of_types(groups: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Lines that hold for some model types, from a file that a program writes (see ``tools``)."""
    return [
        replace(line, types=frozenset(group["types"]))
        for group in groups
        for target, value in group["tensors"].items()
        for line in _lines(target, value)
    ]


def _names(table: Mapping[str, Sequence[str]]) -> frozenset[str]:
    """The names of tensors, of which a table has the ends by their beginning."""
    return frozenset(f"{head}.{end}" if head else end for head, ends in table.items() for end in ends)


def _of_each(value: Any, sources: Sequence[str]) -> tuple[str, ...]:
    """A value for each source: one for all, or a list."""
    found = (value,) * len(sources) if isinstance(value, str) else tuple(value)
    if found and len(found) != len(sources):
        raise NotationError(f"{brief(value)} has another length than the sources")
    return found


def _renamings(table: Mapping[str, Any]) -> Iterator[Renaming]:
    for found, value in table.items():
        for entry in value if isinstance(value, list) else [value]:
            to = entry if isinstance(entry, dict) else {"to": entry}
            yield Renaming(Pattern(found), Pattern(to["to"]), _condition(to))


def _constant(entry: Mapping[str, Any]) -> Constant:
    names = tuple(Pattern(name) for name in entry["names"])
    shape, beside = tuple(entry.get("shape", ())), entry["beside"]
    patterns = tuple(map(Pattern, beside if isinstance(beside, list) else [beside]))
    types = frozenset(entry["types"]) if "types" in entry else None
    return Constant(
        patterns, names, entry["dtype"], shape, float(entry["value"]), _condition(entry), types,
        entry.get("vector", False),
    )  # fmt: skip


def _refusal(name: str, value: Mapping[str, Any]) -> Refusal:
    return Refusal(Pattern(name), value["why"], _condition(value), value.get("scalars", False))


def _stack(of: str, value: Any) -> Stack:
    table = value if isinstance(value, dict) else {"name": value}
    stack = Stack(Pattern(of), Pattern(table["name"]), _condition(table))
    if stack.of.stars != stack.name.stars or len(stack.of.indices - stack.name.indices) != 1:
        raise NotationError(f"'{of}' should have one index more than '{stack.name.text}'")
    return stack


def _further(found: str, value: Mapping[str, Any]) -> Further:
    further = Further(Pattern(found), Pattern(value["to"]), read_expression(value["beyond"]), value.get("one_stage"))
    one, other = further.found, further.new
    if one.stars != other.stars or len(one.indices - other.indices) != 1 or len(other.indices - one.indices) != 1:
        raise NotationError(f"'{found}' and '{other.text}' should differ in one index")
    return further


def _dropped(name: str, value: Any) -> Dropped:
    table = value if isinstance(value, dict) else {}
    beyond = read_expression(table["beyond"]) if "beyond" in table else None
    return Dropped(Pattern(name), beyond, _condition(table))


def _condition(table: Mapping[str, Any]) -> Expression | None:
    return read_expression(table["when"]) if "when" in table else None
