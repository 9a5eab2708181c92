"""An architecture: the meaning of each tensor's dimensions, and the line that covers a name.

It is read here from the parsed form of its file, which a manifest has too: plain strings, lists and tables. The files
are read in ``architecture_files``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from reshard.formats.documents import (
    READERS,
    WRITERS,
    Reader,
    Record,
    Unfit,
    document_of,
    items,
    json_object,
    mapping,
    notation,
    reader_for,
    reader_of,
    record,
    sound,
    structure,
    text,
    unfit,
)
from reshard.formats.errors import NotationError, PlanError
from reshard.formats.notation.axes import Shape, parse
from reshard.formats.notation.components import linear, unfused
from reshard.formats.notation.expressions import Expression, read_expression
from reshard.formats.notation.tables import config_defaults

SETTINGS = "peft_config"
"""The entry of a config for an adapter's own settings, beside those of the model that it changes."""


def one_or_all(values: Sequence[object]) -> Any:
    """The parsed form of values of which one alone stands in no list."""
    texts = document_of(values)
    return texts[0] if len(texts) == 1 else texts


@dataclass(frozen=True)
class Rule:
    """The shape of a tensor."""

    shapes: tuple[Shape, ...] = field(metadata={"key": "shape", "write": one_or_all})
    """The layouts that occur on disk: one must fit the tensor's shape."""
    when: Expression | None = None
    """True of the tensors that have it; None: always."""
    optional: Expression | None = None
    """True where a complete checkpoint may lack the tensor although other tensors demand it (see
    ``reshard.source.completeness``).
    """


@dataclass(frozen=True)
class ModuleRule:
    """Changes of a rank's module of transformers that the rank's own config.json cannot say."""

    when: Expression | None = None
    """True of the models that need them."""
    alone: bool = False
    """Whether the module needs nothing from other ranks (a norm of each head)."""
    sums: str | None = None
    """The row-parallel weight after which the ranks' parts are summed, if that is not at the module's end."""
    split: Mapping[str, Shape] = field(default_factory=dict)
    """The shapes of arguments, buffers and lists of modules that hold all ranks' parts: the rank takes its own."""
    attributes: Mapping[str, Expression] = field(default_factory=dict, metadata={"others": True})
    """Attributes that are set to the rank's own numbers."""


@dataclass(frozen=True)
class Match:
    """The rule line that covers a tensor's name, and the indices found in the name (``{"layer": 3}``)."""

    template: str
    rules: tuple[Rule, ...]
    indices: Mapping[str, int]


@dataclass
class _Node:
    """A trie over the dot-separated segments of names: a literal segment wins over an index.

    ``rest`` is the template that covers every longer name for which there is no other.
    """

    literal: dict[str, _Node] = field(default_factory=dict)
    index: tuple[str, _Node] | None = None
    template: str | None = None
    rest: str | None = None


LONGEST_NAME, DEEPEST = 1000, 100
"""Characters of a template in a plan file, and its parts between dots."""


def _rule(value: object, where: str) -> Rule:
    """A shape alone, or a table of it and its conditions."""
    rule = reader_of(Rule)({"shape": value} if isinstance(value, str) else value, where)
    if not rule.shapes:
        raise NotationError(f"{where}: no shape")
    return rule


READERS |= {Shape: notation(parse), Rule: _rule, ModuleRule: reader_of(ModuleRule)}
WRITERS[Shape] = str


def _by_template(what: str, kind: Any) -> Reader[dict[str, Any]]:
    """A table whose keys are names of tensors or modules, with axes in braces."""

    def read(value: object, where: str) -> dict[str, Any]:
        for template in (lines := json_object(value, where)):
            if len(template) > LONGEST_NAME or template.count(".") > DEEPEST:
                raise unfit(
                    where, f"a table of names of at most {LONGEST_NAME} characters in {DEEPEST} parts", template
                )
        return {template: reader_for(kind)(line, f"{what} '{template}'") for template, line in lines.items()}

    return read


def _lines(tensors: Mapping[str, tuple[Rule, ...]]) -> dict[str, Any]:
    """The lines of ``[tensors]``: a single shape stands alone."""
    lines = {template: document_of(rules) for template, rules in tensors.items()}
    plain = {name: rules[0]["shape"] for name, rules in lines.items() if len(rules) == 1 and len(rules[0]) == 1}
    return lines | {template: shape for template, shape in plain.items() if isinstance(shape, str)}


@dataclass(frozen=True)
class Architecture:
    """The rules of one family of models. Fields as in the file; see docs/reference/architecture-files.md."""

    name: str
    families: Mapping[str, tuple[tuple[str, ...], ...]] = field(metadata={"key": "parallel"})
    pad: tuple[str, ...] = field(metadata={"key": None})
    tensors: Mapping[str, tuple[Rule, ...]] = field(metadata={"write": _lines})
    model_types: tuple[str, ...] = field(default=(), metadata={"read": items(text)})
    prefixes: tuple[str, ...] = field(default=("",), metadata={"read": items(text)})
    sizes: Mapping[str, Expression] = field(default_factory=dict)
    config: Mapping[str, Expression] = field(default_factory=dict)
    modules: Mapping[str, tuple[ModuleRule, ...]] = field(
        default_factory=dict, metadata={"read": _by_template("module", tuple[ModuleRule, ...])}
    )
    stages: Mapping[str, Expression] = field(default_factory=dict, metadata={"read": _by_template("stage", Expression)})
    """The pipeline stage of a tensor: ``first``, ``last``, ``every`` (each stage would need it), or the number of its
    layer.
    """
    float32: Mapping[str, Expression] = field(default_factory=dict)
    """Parts of names of tensors that are not cast to a dtype of 16 bits, and where that holds."""
    partial: bool = False
    """Whether a user's plan is for a part of a checkpoint, on purpose."""
    sections: tuple[str, ...] = field(default=(), metadata={"key": "section", "write": one_or_all})
    inherited: frozenset[str] = field(compare=False, default=frozenset(), metadata={"key": None})
    """The lines of ``tensors`` that come from a base, not from the user's file."""
    derived: frozenset[str] = field(compare=False, default=frozenset(), metadata={"key": None})
    """The lines that follow from another line (see ``components.unfused``)."""

    @cached_property
    def tries(self) -> Mapping[str, _Node]:
        """The names of tensors, stages and modules. Raises NotationError where two lines cover the same names."""
        return {
            "tensors": trie(self.tensors, self.prefixes),
            "stages": trie(self.stages, self.prefixes, later_wins=True),
            "modules": trie(self.modules, self.prefixes),
        }

    @property
    def layers(self) -> Expression:
        """The axis of the layers that are dealt to stages, or their number."""
        return self.stages.get("layers", read_expression("layer"))

    @cached_property
    def dealt(self) -> frozenset[str]:
        """The axes that ranks divide."""
        return frozenset(axis for families in self.families.values() for family in families for axis in family)

    @cached_property
    def expert_axes(self) -> frozenset[str]:
        """The axes that expert parallelism divides."""
        return frozenset(axis for family in self.families.get("ep", ()) for axis in family)

    def match(self, name: str) -> Match | None:
        """The line that covers a tensor of this name, or None."""
        covering = _find(self.tries["tensors"], name)
        return Match(covering[0], self.tensors[covering[0]], covering[1]) if covering else None

    def stated(self, name: str) -> str:
        """A name as a line has it in one of the prefixes: with the root, or without it."""
        module = name.rpartition(".")[0]
        known, match = next(((each, m) for each in (name, f"{module}.weight") if (m := self.match(each))), ("", None))
        if match is None:
            return name
        for spelling in spellings(match.template, self.prefixes):
            filled_in = filled(spelling, match.indices)
            if known == filled_in or (filled_in.endswith("*") and known.startswith(filled_in[:-1])):
                return name
        return with_other_root(name)

    def covers(self, template: str) -> bool:
        """Whether a line covers the names of a template; the line may end in ``*``."""
        return template in self.tensors or self.match(with_first_indices(template)) is not None

    def stage_of(self, name: str) -> Expression | None:
        """Return the line of ``[stages]`` for a tensor of this name; None if there is none."""
        match = _find(self.tries["stages"], name)
        return self.stages[match[0]] if match else None

    def is_table(self, template: str) -> bool:
        """Whether a line outside all layers has a vector for each token of the vocabulary."""
        shapes = (shape for rule in self.tensors[template] for shape in rule.shapes) if "{" not in template else ()
        axes = ([dim.axis for dim in shape.dims] for shape in shapes)
        return any(
            len(axes_of_dim) == 2 and None not in axes_of_dim and not {*axes_of_dim}.isdisjoint(self.pad)
            for axes_of_dim in axes
        )

    def stays_float32(self, name: str, settings: Mapping[str, Any], dtype: str) -> bool:
        """Whether a tensor of this name stays float32 in a cast to ``bf16`` or ``fp16``."""
        known = {**settings, "dtype": dtype}
        return any(part in name and when.evaluate(known.get) for part, when in self.float32.items())

    def form(self, name: str) -> tuple[tuple[str, ...], Sequence[str]]:
        """A name without its numbers (the words around them, one more than these, and then some), and the numbers.
        Names of one form are covered by one line, and their numbers stand for the same indices.
        """
        words = _NUMBERS.split(name)
        numbers = words[1::2]
        literal = [number if number in self._literal_numbers else "" for number in numbers]
        return (*words[::2], *literal), numbers

    def index_places(self, name: str) -> Mapping[str, int]:
        """Return the positions of a name's indices among all numbers in it, as far as a line knows the name."""
        *_, (_, places) = _walk(self.tries["tensors"], name)
        return places

    def indices_in(self, name: str) -> dict[str, int]:
        """The indices in a name, as far as a line knows it, outermost first."""
        return _indices(name, self.index_places(name))

    def in_general(self, name: str, other: Callable[[int, str], str | None] = lambda number, before: None) -> str:
        """A name with its indices as ``{layer}``, as far as a line knows it. ``other`` gives the name of a further
        number by its position among all numbers and the word before it; None: it stays a number. So does one that
        lines have as such.
        """
        way = [*_walk(self.tries["tensors"], name)]
        axes = {place: axis for axis, place in way[-1][1].items()}
        words, number = name.split("."), 0
        for i, word in enumerate(words):
            if is_index(word):
                is_literal = i + 1 < len(way) and number not in axes
                axis = axes.get(number) or (None if is_literal else other(number, words[i - 1] if i else ""))
                words[i] = f"{{{axis}}}" if axis else word
                number += 1
        return ".".join(words)

    def pattern_of(self, name: str, template: str) -> str:
        """A name with its indices as ``{layer}``, in the architecture's own spelling. ``template`` is the line that
        covers it or, of a scale, its weight.
        """
        is_open = template.endswith("*")
        general = self.in_general(name, (lambda number, before: f"number{number}") if is_open else lambda *_: None)
        match = self.match(name)
        if general == template or (match is not None and match.template == template and not is_open):
            return template
        module, prefix = template.rpartition(".")[0], self.prefixes[0] if self.prefixes else ""
        inner = module[len(prefix) :] if prefix and module.startswith(prefix) else module
        at = general.find(f"{inner}.")
        return (prefix if module.startswith(prefix) else "") + general[at:] if at >= 0 else general

    @cached_property
    def _literal_numbers(self) -> frozenset[str]:
        """The numbers that lines have as such: ``mlp.0.weight``."""
        return frozenset(number for template in self.tensors for number in _NUMBERS.findall(template))

    def around(self, module: str) -> Iterator[Match]:
        """The lines of a module's tensors, then those of the module around it, and so on outwards, with the module's
        own indices.
        """
        for node, places in reversed(list(_walk(self.tries["tensors"], module))):
            for template in _below(node):
                yield Match(template, self.tensors[template], _indices(module, places))

    def match_module(self, name: str) -> tuple[tuple[ModuleRule, ...], Mapping[str, int]] | None:
        """The rules under ``[modules]`` for a module of this name, and the indices in it, or None."""
        match = _find(self.tries["modules"], name)
        return (self.modules[match[0]], match[1]) if match else None

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of the language model: first its section of ``config.json``, then the rest of the file.

        Last come the defaults of the section's model type, because a published section leaves out settings with default
        values.
        """
        settings, inner = dict(config), config
        for key in self.section(config):
            inner = inner[key]
            settings |= inner
        return settings if inner is config else {**config_defaults().get(str(inner.get("model_type")), {}), **settings}

    def section(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The keys that lead to the language model's settings in ``config.json``, to the first section that is there;
        none if they are at its top.
        """
        for section in self.sections:
            keys, inner = tuple(section.split(".")), config
            for key in keys:
                inner = inner.get(key, {}) if isinstance(inner, Mapping) else {}
            if inner and isinstance(inner, Mapping):
                return keys
        return ()


def is_index(segment: str) -> bool:
    """Whether a segment of a tensor's name is the number of a layer, an expert, …"""
    return segment.isdecimal() and segment.isascii() and len(segment) < 10


_NUMBERS = re.compile(r"(?<![^.])([0-9]{1,9})(?![^.])")
"""The same, within a name."""


def without_numbers(name: str, mark: str = "*") -> str:
    """A name with a mark in place of each number."""
    return _NUMBERS.sub(mark, name)


def numbers_in(name: str) -> list[int]:
    """The numbers in a name."""
    return [*map(int, _NUMBERS.findall(name))]


def filled(name: str, indices: Mapping[str, int]) -> str:
    """A name with numbers in place of ``{layer}`` and its like, as far as they are given."""
    return _INDEX.sub(lambda index: str(indices.get(index[1], index[0])), name) if "{" in name else name


def with_first_indices(name: str) -> str:
    """The first of the names that a line covers."""
    return _INDEX.sub("0", name)


_INDEX = re.compile(r"\{(\w+)\}")


def _walk(node: _Node, name: str) -> Iterator[tuple[_Node, dict[str, int]]]:
    """The nodes on the way of a name, as far as there is one, with the indices found so far: the places of their axes
    among the name's numbers.
    """
    places: dict[str, int] = {}
    place = 0
    yield node, places
    for segment in name.split("."):
        is_number = is_index(segment)
        if segment in node.literal:
            node = node.literal[segment]
        elif node.index is not None and is_number:
            places = {**places, node.index[0]: place}
            node = node.index[1]
        else:
            return
        place += is_number
        yield node, places


def _indices(name: str, places: Mapping[str, int]) -> dict[str, int]:
    numbers = numbers_in(name)
    return {axis: numbers[place] for axis, place in places.items()}


def _find(node: _Node, name: str) -> tuple[str, dict[str, int]] | None:
    """The template that covers a name, and the indices found in the name."""
    way, length = list(_walk(node, name)), name.count(".") + 1
    last, places = way[-1]
    if len(way) > length and last.template is not None:
        return last.template, _indices(name, places)
    open_ends = ((node.rest, _indices(name, axes)) for node, axes in reversed(way[:length]) if node.rest is not None)
    return next(open_ends, None)


class LineNames:
    """Finds the line of each name among some lines, in each spelling."""

    def __init__(self, lines: Iterable[str], prefixes: tuple[str, ...]) -> None:
        self._root = trie(lines, prefixes)

    def find(self, name: str) -> tuple[str, dict[str, int]] | None:
        """The line that covers a name, and the indices in the name, outermost first."""
        return _find(self._root, name)


def _below(node: _Node) -> Iterator[str]:
    """The templates below a node that need no further index."""
    for child in node.literal.values():
        if child.template is not None:
            yield child.template
        yield from _below(child)


def trie(tensors: Iterable[str], prefixes: tuple[str, ...], *, later_wins: bool = False) -> _Node:
    """The templates by the parts of their names, in each spelling.

    Raises NotationError if two cover the same names. With ``later_wins`` the later one is taken instead; a template
    that is itself spelled so wins over another spelling.
    """
    root = _Node()
    spelled = [(template, spelling) for template in tensors for spelling in spellings(template, prefixes)]
    spelled.sort(key=lambda pair: (pair[0] == pair[1]) == later_wins)
    for template, spelling in spelled:
        node, kind = _node_of(root, template, spelling), "rest" if spelling.endswith("*") else "template"
        if not later_wins and getattr(node, kind) not in {None, template}:
            raise NotationError(f"the rules '{getattr(node, kind)}' and '{template}' cover the same names")
        setattr(node, kind, template)
    for template, spelling in spelled:  # with the root, or without it, where no line says another thing
        with suppress(NotationError):
            node = _node_of(root, template, with_other_root(spelling))
            kind = "rest" if spelling.endswith("*") else "template"
            setattr(node, kind, getattr(node, kind) or template)
    return root


def _node_of(root: _Node, template: str, spelling: str) -> _Node:
    """The node of a spelling of a template, which is made if it is not there. Raises NotationError."""
    node, segments = root, spelling.split(".")
    for segment in segments[: -1 if segments[-1] == "*" else None]:
        axis = segment[1:-1]
        if not (segment.startswith("{") and segment.endswith("}")):
            node = node.literal.setdefault(segment, _Node())
            continue
        if not axis.isidentifier():
            raise NotationError(f"tensor '{template}': '{segment}' is not an axis in braces")
        node.index = node.index or (axis, _Node())
        if node.index[0] != axis:
            other = node.index[0]
            raise NotationError(f"tensor '{template}': the index '{segment}' is called '{{{other}}}' elsewhere")
        node = node.index[1]
    return node


ROOT = "model."
"""The module of transformers around all parts of a model but its head: names have it, or not."""
PREFIX = "base_model.model."
"""The prefix of module names in an adapter."""


def with_other_root(name: str) -> str:
    """A name without the root if it has it, else with it."""
    prefix = PREFIX if name.startswith(PREFIX) else ""
    inner = name.removeprefix(prefix)
    return prefix + (inner.removeprefix(ROOT) if inner.startswith(ROOT) else ROOT + inner)


def spellings(template: str, prefixes: Sequence[str]) -> Iterator[str]:
    """A template with each of an architecture's prefixes, its own first."""
    first, *others = prefixes or ("",)
    yield template
    if first and template.startswith(first):
        yield from (other + template.removeprefix(first) for other in others)


def architecture_from_document(document: Mapping[str, Any], name: str, where: str) -> Architecture:
    """Build an architecture from the parsed form of its file (as also kept in a manifest)."""
    try:
        return record(partial(_architecture, name))(sound(dict(document)), "")
    except NotationError as error:
        raise PlanError(f"plan file {where}: {error.message}", error.hint) from None
    except Unfit as error:
        raise PlanError(f"plan file {where} does not have the form of an architecture file: {error}") from None


def _architecture(name: str, fields: Record) -> Architecture:
    stated = fields.get("tensors", _by_template("tensor", tuple[Rule, ...]), {})
    parallel = {**fields.get("parallel", json_object, {})}
    pad = items(text)(parallel.pop("pad", []), "parallel.pad")
    fields.get("classes", items(text), ())
    if not stated:
        raise NotationError("no rules under [tensors]")
    tensors = with_experts(stated)
    architecture = structure(
        Architecture,
        fields,
        name=fields.get("name", text, name),
        families=mapping(items(items(text)))(parallel, "parallel"),
        pad=pad,
        tensors=tensors,
        derived=frozenset(tensors.keys() - stated.keys()),
    )
    if any(not family for families in architecture.families.values() for family in families):
        raise NotationError("a family under [parallel] has no axes")
    _ = architecture.tries  # lines that cover the same names are refused here
    return architecture


def with_experts(tensors: Mapping[str, tuple[Rule, ...]]) -> dict[str, tuple[Rule, ...]]:
    """Lines of tensors, with lines for experts that quantizers name one by one in addition to those of fused ones."""
    rules_of: dict[str, tuple[Rule, ...]] = {}
    for template, rules in tensors.items():
        for rule in rules:
            parts = [part for shape in rule.shapes for part in unfused(template, shape).items()]
            for name in dict.fromkeys(name for name, _ in parts):
                shapes = dict.fromkeys(linear(expert_part) for other, expert_part in parts if other == name)
                rules_of[name] = (*rules_of.get(name, ()), Rule(tuple(shapes), rule.when))
    return {**rules_of, **tensors}


def to_document(architecture: Architecture) -> dict[str, Any]:
    """The parsed form of an architecture's file: plain strings, lists and dicts.

    Without ``[modules]``: shards do not depend on it.
    """
    order = {"name": "", "model_types": [], "prefixes": [""], "sizes": {}, "parallel": {}, "config": {}, "tensors": {}}
    document: dict[str, Any] = order | document_of(replace(architecture, modules={}))
    document["parallel"] |= {"pad": [*architecture.pad]} if architecture.pad else {}
    return document
