"""How another program stores the same elements: rewrites of names, and what is joined, stacked or reordered.

A *page* describes a program's format in lines. A line has a name of the program's, and the tensors of Hugging Face's
that it is made of::

    "**.qkv_proj.*" = ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"]
    "**.experts.w2_*" = "**.experts.{expert}.down_proj.*"

Several tensors are joined along their output. An index that is not in the program's name is stacked, as the first
dimension. ``**`` stands for any text, ``*`` for text without a dot, ``{expert}`` for an index. The components of a
packed tensor have names as in models that do not pack them (``q_proj`` of ``qkv_proj``), so one line serves both.
Pages are in ``formats/programs/``; see docs/formats.md. A page may build on another, its ``base``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from formats.errors import NotationError, PlanError, brief, nearest
from formats.mesh import Mesh
from formats.notation.expressions import Expression, read_expression

PAGES = Path(__file__).parents[1] / "programs"

_OfTypes = TypeVar("_OfTypes", "Line", "Constant", "Dropped")

_SPECIAL = re.compile(r"^\*\*\.|\*\*|\*|\{\w+\}")


@dataclass(frozen=True)
class Pattern:
    """A name with wildcards."""

    text: str

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, end, stars, seen = [], 0, 0, set()
        for match in _SPECIAL.finditer(self.text):
            word = match[0]
            parts.append(re.escape(self.text[end : match.start()]))
            if word.startswith("{"):
                parts.append(f"(?P={word[1:-1]})" if word in seen else rf"(?P<{word[1:-1]}>\{{\w+\}}|[0-9]+)")
                seen.add(word)
            else:
                parts.append(
                    {"**.": f"(?P<_{stars}>(?:.*\\.)?)", "**": f"(?P<_{stars}>.*)"}.get(word, rf"(?P<_{stars}>[^.]*)")
                )
                stars += 1
            end = match.end()
        return re.compile("".join([*parts, re.escape(self.text[end:])]))

    def match(self, name: str) -> Mapping[str, str] | None:
        """What the wildcards stand for in a name, or None."""
        found = self._regex.fullmatch(name)
        return found.groupdict() if found else None

    def fill(self, found: Mapping[str, str]) -> str:
        """The name in which the wildcards stand for this."""
        parts, end, stars = [], 0, 0
        for match in _SPECIAL.finditer(self.text):
            parts.append(self.text[end : match.start()])
            if match[0].startswith("{"):
                parts.append(found[match[0][1:-1]])
            else:
                parts.append(found[f"_{stars}"])
                stars += 1
            end = match.end()
        return "".join([*parts, self.text[end:]])

    @cached_property
    def indices(self) -> frozenset[str]:
        """The names of its indices."""
        return frozenset(word[1:-1] for word in _SPECIAL.findall(self.text) if word.startswith("{"))

    @cached_property
    def stars(self) -> int:
        """The number of ``*`` and ``**``."""
        return sum(not word.startswith("{") for word in _SPECIAL.findall(self.text))


@dataclass(frozen=True)
class Line:
    """A tensor of the program's, and what it is made of, where ``when`` holds.

    ``output_first`` stores what Hugging Face stores input first (``->``) as output, input. ``pairs`` has, for each
    source, the axis whose two halves are stored as pairs (``""``: none); ``halves`` the axis whose pairs are stored as
    halves. ``apart`` takes the components of a packed tensor apart, and joins them one after the other. ``dtype`` is
    another dtype, without loss. ``function`` is the one arithmetic that some program does. ``first_rank`` says that of
    equal parts all but the first rank's are zeros, ``whole`` that every rank has all of it, ``every_stage`` that every
    pipeline stage has it. ``deal`` is the axis that is dealt over ``tp`` in place of those that the model's rules deal,
    ``cut`` the dimension, in equal ranges, or in one of each of its equal ``parts``.
    ``by`` is the axis behind which the sources are joined: each of its indices has a part of all of them. What is
    joined ``evenly`` is divided over ``tp`` in equal ranges, wherever these end. With ``part``, the line covers that
    component of a packed tensor alone; all components must have such lines.
    ``first_stage`` and ``last_stage`` are other names on the first and the last of several stages. Where a tensor that
    ``without`` matches is there, the line does not hold; with ``beside`` it holds only where that tensor is there, with
    the same indices. With ``also``, the tensor is stored once more under the line's name, if no tensor has it (two
    names of one tensor). ``ones`` are the places of the dimensions of length 1 in what is stored, where Hugging Face's
    tensor has them elsewhere or has none; None: it has the same. ``types`` are the classes and model types for which
    the line holds, as ``config.json`` has them at its top; None: all.
    """

    target: Pattern
    sources: tuple[Pattern, ...]
    when: Expression | None = None
    output_first: bool = False
    pairs: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    dtype: str | None = None
    function: str | None = None
    first_rank: bool = False
    whole: bool = False
    every_stage: bool = False
    first_stage: str | None = None
    last_stage: str | None = None
    deal: str | None = None
    cut: int | None = None
    parts: int = 1
    by: str | None = None
    part: str | None = None
    evenly: bool = False
    without: Pattern | None = None
    beside: Pattern | None = None
    also: bool = False
    ones: tuple[int, ...] | None = None
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
    """A line of a page that covers a tensor's name: as which of its ``sources``.

    ``target`` is the name of what the tensor becomes a part of. ``stacked`` is the index that this name does not have,
    as it stands in the old one (``{expert}``).
    """

    line: Line
    source: int
    target: str
    stacked: str | None


@dataclass(frozen=True, eq=False)
class Page:
    """A program's format.

    ``load`` is the command that loads a folder ``{out}``, with the degrees that it was written for: ``{ranks}`` of a
    stage, ``{tp}``, ``{pp}``, ``{ep}`` and ``{etp}`` (of tp, for experts). It goes on with ``load_pp`` where there are
    several pipeline stages, with ``load_ep`` where there are several ranks of experts. ``files`` is the name of a
    rank's weight file, ``files_pp`` that of a rank of several pipeline stages, ``files_ep`` of several ranks of
    experts, ``files_pp_ep`` of both. They lie in ``folder``, which the file ``tracker`` names. ``inside`` is the entry
    of a file that has the tensors, ``entries`` are what else stands there. Where ``files`` cannot name several, a
    larger rank has files named as ``parts`` says, with an ``index``. With ``keep``, what no line covers keeps its name.
    The vocabulary is padded to a multiple of ``pad_to`` (0: it is not padded at all) and of the degree or, with
    ``pad_times_degree``, of their product where ``pad_to`` alone does not do, with ``pad_product`` of their product in
    any case. With ``free_padding``, what the program itself wrote may be padded to any size, and its padding may hold
    anything. ``numbered`` has the indices that each rank counts from 0. With ``same_ranks``, experts are dealt whole
    over the ranks of ``tp``. ``engine`` is the engine that ``reshard verify --engine`` runs, and ``load_format`` what
    it calls the format. ``model_types`` are those for which the page is known to be right; empty: the names of its
    lines decide. With ``boxes``, each file says where its pieces begin (see ``formats.files.boxes``), and nothing is
    padded. ``refused`` has the model types of which a page cannot say what the program has, and why; ``classes`` those
    that are known by their class. ``described`` are those for which the page's own lines, names, constants and the rest
    do not hold, but the ones of a file that the program wrote. ``compared`` has, where it is known, the
    types whose tensors were compared, and the classes that run in the same modules of the program. Of those that are
    ``described``, ``seen`` has the names of all tensors that were compared, and ``meshes`` the largest degree of each
    dimension of a mesh that was (None: any degree of it follows from the model's rules). A number that ``vectors``
    matches is stored as a vector of one.
    """

    name: str
    loaded_by: str
    load: str
    files: str
    lines: tuple[Line, ...]
    names: tuple[Renaming, ...]
    constants: tuple[Constant, ...]
    dropped: tuple[Dropped, ...]
    keep: bool
    pad_to: int
    same_ranks: bool
    model_types: tuple[str, ...] = ()
    load_pp: str = ""
    load_ep: str = ""
    files_pp: str | None = None
    files_ep: str | None = None
    files_pp_ep: str | None = None
    folder: str | None = None
    tracker: str | None = None
    inside: str | None = None
    entries: Mapping[str, int | float] = field(default_factory=dict)
    engine: str | None = None
    load_format: str | None = None
    parts: str | None = None
    index: str | None = None
    pad_times_degree: bool = False
    pad_product: bool = False
    free_padding: bool = False
    numbered: tuple[str, ...] = ()
    demands: tuple[Demand, ...] = ()
    settings: Settings | None = None
    refusals: tuple[Refusal, ...] = ()
    vectors: tuple[Pattern, ...] = ()
    ignored: tuple[Pattern, ...] = ()
    """Tensors of no use that older files have."""
    boxes: bool = False
    stacks: tuple[Stack, ...] = ()
    further: tuple[Further, ...] = ()
    """What is called otherwise behind the model's last layer; of several, the first that covers a name."""
    saved: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Files that torch.save writes, with what is in each."""
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON files, with what is in each."""
    extra_state: tuple[Pattern, ...] = ()
    """Weights whose modules ask for a state of their own beside them: an empty one is written."""
    classes: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    compared: frozenset[str] = frozenset()
    meshes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _uses: dict[str, tuple[Use, ...]] = field(default_factory=dict, repr=False)
    _of: dict[str, Page] = field(default_factory=dict, repr=False)

    @property
    def described(self) -> frozenset[str]:
        """The types with lines of their own."""
        return frozenset(self.meshes)

    @property
    def has_parts(self) -> bool:
        """Whether a rank may have several files."""
        return self.parts is not None or "{part" in self.files or "{number" in self.files

    def file_name(self, mesh: Mesh, rank: int, part: int, parts: int = 1) -> str:
        """The name of a rank's weight file, one of ``parts``; ``shard`` and ``number`` count ranks and parts from 1."""
        of_a_stage = mesh.size // mesh.pp
        words = {"rank": rank, "ranks": mesh.size, "part": part, "pp": mesh.stage(rank % mesh.size)}
        words |= {"tp": rank % of_a_stage, "shard": rank + 1, "number": part + 1, "parts": parts}
        words |= {f"{name}_rank": place for name, place in mesh.coordinates(rank % mesh.size).items()}
        words |= {name: 0 for name in ("tp_rank", "pp_rank", "ep_rank") if name not in words}
        name = self.files_of(mesh.pp > 1, dict(mesh.degrees).get("ep", 1) > 1)
        name = (self.parts if parts > 1 and self.parts is not None else name).format_map(words)
        return f"{self.folder}/{name}" if self.folder else name

    def load_command(self, out: object, mesh: Mesh) -> str:
        """The command that loads a folder of this format, with the degrees of its mesh."""
        degrees = {name: dict(mesh.degrees).get(name, 1) for name in ("tp", "ep", "pp")}
        more = (self.load_pp if degrees["pp"] > 1 else "") + (self.load_ep if degrees["ep"] > 1 else "")
        degrees["etp"] = 1 if mesh.same_ranks else degrees["tp"]
        return (self.load + more).format_map({"out": out, "ranks": mesh.size // mesh.pp, **degrees})

    @property
    def is_distributed(self) -> bool:
        """Whether its files are those of a distributed checkpoint of torch's (see ``formats.files.dcp``)."""
        return self.files.endswith(".distcp")

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name is of no use."""
        return any(pattern.match(name) is not None for pattern in self.ignored)

    def files_of(self, pp: bool, ep: bool) -> str:
        """How weight files are named where there are several stages, and several ranks of experts."""
        both = self.files_pp_ep if pp and ep else None
        return both or (self.files_pp if pp else None) or (self.files_ep if ep else None) or self.files

    def of(self, config: Mapping[str, Any]) -> Page:
        """The page with the lines for a model of this config alone."""
        kind = self.type_of(config)
        if kind not in self._of:
            own = self
            if kind in self.meshes:
                own = replace(self, names=(), refusals=(), vectors=())
            self._of[kind] = replace(
                own,
                lines=tuple(self._for(kind, self.lines)),
                constants=tuple(self._for(kind, self.constants)),
                dropped=tuple(self._for(kind, self.dropped)),
                _uses={},
                _of={},
            )
        return self._of[kind]

    def _for(self, kind: str, entries: Iterable[_OfTypes]) -> Iterator[_OfTypes]:
        """The entries that hold for a model type: of one that is ``described``, its own alone."""
        for entry in entries:
            if kind in entry.types if entry.types is not None else kind not in self.meshes:
                yield entry

    def type_of(self, config: Mapping[str, Any]) -> str:
        """What ``types`` call a model of this config: the class, if it is one of ``classes``, or else its type."""
        first = self.class_of(config)
        return first if first in self.classes else str(config.get("model_type"))

    @staticmethod
    def class_of(config: Mapping[str, Any]) -> str:
        """The class of a model of this config, as ``config.json`` says it; empty: it does not."""
        classes = config.get("architectures")
        return str(classes[0]) if isinstance(classes, list) and classes else ""

    def uses(self, name: str) -> Sequence[Use]:
        """The lines that cover a tensor's name, in their order."""
        if name not in self._uses:
            self._uses[name] = tuple(self._find(name))
        return self._uses[name]

    def _find(self, name: str) -> Iterator[Use]:
        for line in self.lines:
            for number, source in enumerate(line.sources):
                found = source.match(name)
                if found is not None:
                    (stacked,) = source.indices - line.target.indices or {None}
                    yield Use(line, number, line.target.fill(found), found[stacked] if stacked else None)


READ: dict[str, Page] = {}
"""The pages that were read, by name: one is read when it is asked for."""


def pages() -> Mapping[str, Page]:
    """The formats of programs, by name."""
    return {name: page_of(name) for name in page_names()}


def page_of(name: str) -> Page:
    """The format of a name. Raises PlanError."""
    if name not in READ:
        if name not in page_names():
            known = f"known formats: {', '.join(page_names())}"
            raise PlanError(
                f"'{name}' is no format that is written here", f"{nearest(name, page_names())} {known}".strip()
            )
        READ[name] = read_page(PAGES / f"{name}.toml")
    return READ[name]


@cache
def page_names() -> Sequence[str]:
    """The names of all formats, sorted."""
    return sorted(path.stem for path in PAGES.glob("*.toml"))


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


def read_page(path: Path, types: Mapping[str, Any] | None = None) -> Page:
    """Read a page, with ``types`` in the place of its file of model types.

    Raises PlanError that names the file and what is wrong in it.
    """
    try:
        document = _with_base(path)
        lines = [line for target, value in document["tensors"].items() for line in _lines(target, value)]
        of_types = types or {}
        if types is None and "types" in document:
            of_types = json.loads((PAGES / document["types"]).read_text(encoding="utf-8"))
        lines += lines_of_types(of_types.get("lines", ()))
        constants = [*document.get("constants", ()), *of_types.get("constants", ())]
        dropped = [_dropped(name, value) for name, value in document["dropped"].items()]
        dropped += [
            replace(_dropped(name, {}), types=frozenset(group["types"]))
            for group in of_types.get("dropped", ())
            for name in group["names"]
        ]
        return Page(
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
    """A page's parsed form with what it takes over from its ``base``. Its own lines stand before those of the base.

    A key that is ``false`` is taken away. Raises NotationError for one that the base does not have.
    """
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    below = _with_base(PAGES / f"{document.pop('base')}.toml") if "base" in document else {}
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
