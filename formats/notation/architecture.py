"""An architecture: what the dimensions of each of its tensors mean, read from one TOML file.

The form of the file is described in docs/design.md; ``formats/architectures/`` holds the built-in ones, and a user's
own plan file has the same form.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from formats.documents import Reader, Unfit, items, json_object, mapping, sound, text, truth, unfit
from formats.errors import CheckpointError, NotationError, PlanError, brief
from formats.notation.axes import Shape, parse
from formats.notation.expressions import Expression, read_expression
from formats.notation.unfused_experts import by_name
from formats.regular_files import read_file

MAX_PLAN = 16 << 20
"""Bytes of a plan file."""
LONGEST_NAME, DEEPEST = 1000, 100
"""Characters of a template in a plan file, and its parts between dots."""
BUILT_IN = Path(__file__).parents[1] / "architectures"
HEADS = Path(__file__).parents[1] / "heads.toml"
"""Rules that every built-in architecture has beside its own: what stands in the place of a language model's head."""
CONFIG_DEFAULTS = Path(__file__).parents[1] / "config_defaults.json"
"""What transformers' configuration classes say where a ``config.json`` says nothing."""


@dataclass(frozen=True)
class Rule:
    """The shape of a tensor, where ``when`` holds (always, if it is None).

    Several ``shapes`` are layouts that occur on disk, of which one must fit the tensor's. Where ``optional`` holds, a
    complete checkpoint may lack the tensor although it has those that stand beside it (see ``reshard.complete``).
    """

    shapes: tuple[Shape, ...]
    when: Expression | None = None
    optional: Expression | None = None


@dataclass(frozen=True)
class ModuleRule:
    """What a rank's module of transformers has that the rank's own config.json cannot say, where ``when`` holds.

    ``attributes`` are set to the rank's own numbers; ``split`` gives the shape of what the module shares with all ranks
    (an argument of its forward, a buffer, a list of modules) and a rank has its part of. A module that is ``alone``
    needs nothing of other ranks (a norm of each head). ``sums`` is the weight of a module whose results are summed
    where it is used, because the module goes on from there.
    """

    attributes: Mapping[str, Expression]
    split: Mapping[str, Shape]
    when: Expression | None = None
    alone: bool = False
    sums: str | None = None


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


@dataclass(frozen=True)
class Architecture:
    """The rules of one family of models. Fields as in the file; see docs/design.md.

    ``partial`` says of a user's plan that it is for a part of a checkpoint, on purpose.
    """

    name: str
    model_types: tuple[str, ...]
    prefixes: tuple[str, ...]
    sections: tuple[str, ...]
    sizes: Mapping[str, Expression]
    families: Mapping[str, tuple[tuple[str, ...], ...]]
    pad: tuple[str, ...]
    config: Mapping[str, Expression]
    tensors: Mapping[str, tuple[Rule, ...]]
    modules: Mapping[str, tuple[ModuleRule, ...]] = field(default_factory=dict)
    partial: bool = False
    _root: _Node = field(repr=False, compare=False, default_factory=_Node)
    _module_root: _Node = field(repr=False, compare=False, default_factory=_Node)

    def match(self, name: str) -> Match | None:
        """The line that covers a tensor of this name, or None."""
        found = _find(self._root, name)
        return Match(found[0], self.tensors[found[0]], found[1]) if found else None

    def form(self, name: str) -> tuple[Hashable, Sequence[str]]:
        """What is left of a name without its numbers, and these. Names of one form are covered by one line, and their
        numbers stand for the same indices.
        """
        words = _NUMBERS.split(name)
        numbers = words[1::2]
        literal = [number if number in self._literal_numbers else "" for number in numbers]
        return (*words[::2], *literal), numbers

    def index_places(self, name: str) -> Mapping[str, int]:
        """Which of a name's numbers are indices: the places among all its numbers, as far as the name is known."""
        *_, (_, places) = _walk(self._root, name)
        return places

    @cached_property
    def _literal_numbers(self) -> frozenset[str]:
        """The numbers that lines have as such: ``mlp.0.weight``."""
        return frozenset(number for template in self.tensors for number in _NUMBERS.findall(template))

    def around(self, module: str) -> Iterator[Match]:
        """The lines of a module's tensors, then of what it is a part of, and so on outwards, with the module's own
        indices.
        """
        for node, places in reversed(list(_walk(self._root, module))):
            for template in _below(node):
                yield Match(template, self.tensors[template], _indices(module, places))

    def match_module(self, name: str) -> tuple[tuple[ModuleRule, ...], Mapping[str, int]] | None:
        """The rules under ``[modules]`` for a module of this name, and the indices in it, or None."""
        found = _find(self._module_root, name)
        return (self.modules[found[0]], found[1]) if found else None

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of ``config.json`` that speaks of the language model; the rest of it stands behind.

        Last come the defaults of the section's model type: a section is published without what is equal to them.
        """
        settings, inner = dict(config), config
        for key in self.section(config):
            inner = inner[key]
            settings |= inner
        return settings if inner is config else {**_config_defaults().get(str(inner.get("model_type")), {}), **settings}

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
    """Whether a part of a tensor's name is the number of a layer, an expert, …"""
    return segment.isdecimal() and segment.isascii() and len(segment) < 10


_NUMBERS = re.compile(r"(?<![^.])([0-9]{1,9})(?![^.])")
"""The same, within a name."""


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
    numbers = _NUMBERS.findall(name)
    return {axis: int(numbers[place]) for axis, place in places.items()}


def _find(node: _Node, name: str) -> tuple[str, dict[str, int]] | None:
    """The template that covers a name, and the indices found in the name."""
    way, length = list(_walk(node, name)), name.count(".") + 1
    last, places = way[-1]
    if len(way) > length and last.template is not None:
        return last.template, _indices(name, places)
    rest = ((node.rest, _indices(name, found)) for node, found in reversed(way[:length]) if node.rest is not None)
    return next(rest, None)


def _below(node: _Node) -> Iterator[str]:
    """The templates below a node that need no further index."""
    for child in node.literal.values():
        if child.template is not None:
            yield child.template
        yield from _below(child)


def load_architecture(path: Path) -> Architecture:
    """Read an architecture file. Raises PlanError that names the file and the line at fault."""
    return architecture_from_document(_document(path), path.stem, str(path))


def _document(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise PlanError(f"plan file {path} does not exist")
    try:
        return tomllib.loads(read_file(path, MAX_PLAN).decode())
    except CheckpointError as error:
        raise PlanError(f"plan file {error.message}", error.hint) from None
    except RecursionError:
        raise PlanError(f"plan file {path} cannot be read: it is nested too deeply") from None
    except ValueError as error:  # no UTF-8, no TOML, or a number of too many digits
        raise PlanError(f"plan file {path} cannot be read: {error}") from None


def architecture_from_document(document: Mapping[str, Any], name: str, where: str) -> Architecture:
    """Build an architecture from the parsed form of its file (as also kept in a manifest)."""
    try:
        for key, reader in _FORM.items():
            if key in document:
                reader(sound(document[key]), key)
        return _build(document, name)
    except NotationError as error:
        raise PlanError(f"plan file {where}: {error.message}", error.hint) from None
    except Unfit as error:
        raise PlanError(f"plan file {where} does not have the form of an architecture file: {error}") from None


# What the parsed form of a file is: readers of formats.documents.


def _formula(value: object, where: str) -> None:
    """An expression, which may be written as the number that it is."""
    if not isinstance(value, (str, int, float)):
        raise unfit(where, "an expression", value)


def _one_or_more(reader: Reader[None]) -> Reader[None]:
    def read(value: object, where: str) -> None:
        items(reader)(value if isinstance(value, list) else [value], where)

    return read


def _text(value: object, where: str) -> None:
    text(value, where)


def _named(reader: Reader[None]) -> Reader[None]:
    """An object of templates: names of tensors or modules, with axes in braces."""

    def read(value: object, where: str) -> None:
        for template, line in json_object(value, where).items():
            if len(template) > LONGEST_NAME or template.count(".") > DEEPEST:
                raise unfit(
                    where, f"a table of names of at most {LONGEST_NAME} characters in {DEEPEST} parts", template
                )
            reader(line, f"{where}.{template}")

    return read


def _rule_form(value: object, where: str) -> None:
    """A shape, or a table with a shape or several, and conditions."""
    if not isinstance(value, str):
        for key, item in json_object(value, where).items():
            (_one_or_more(_text) if key == "shape" else _formula)(item, f"{where}.{key}")


def _module_form(value: object, where: str) -> None:
    for key, item in json_object(value, where).items():
        if key == "split":
            mapping(text)(item, f"{where}.split")
        else:
            (text if key in {"when", "sums"} else _formula)(item, f"{where}.{key}")


def _parallel_form(value: object, where: str) -> None:
    for key, item in json_object(value, where).items():
        (items(text) if key == "pad" else items(items(text)))(item, f"{where}.{key}")


_FORM: Mapping[str, Reader[Any]] = {
    "name": text,
    "model_types": items(text),
    "classes": items(text),
    "prefixes": items(text),
    "section": _one_or_more(_text),
    "partial": truth,
    "sizes": mapping(_formula),
    "config": mapping(_formula),
    "parallel": _parallel_form,
    "tensors": _named(_one_or_more(_rule_form)),
    "modules": _named(_one_or_more(_module_form)),
}
_KEYS = _FORM.keys()


def _build(document: Mapping[str, Any], name: str) -> Architecture:
    unknown = document.keys() - _KEYS
    if unknown:
        raise NotationError(f"unknown key '{min(unknown)}' (known: {', '.join(sorted(_KEYS))})")
    parallel = dict(document.get("parallel", {}))
    pad = tuple(parallel.pop("pad", ()))
    prefixes, section = tuple(document.get("prefixes", ("",))), document.get("section", ())
    tensors = {template: _rules(template, value) for template, value in document.get("tensors", {}).items()}
    if not tensors:
        raise NotationError("no rules under [tensors]")
    modules = {template: _module_rules(template, value) for template, value in document.get("modules", {}).items()}
    return Architecture(
        name=document.get("name", name),
        model_types=tuple(document.get("model_types", ())),
        prefixes=prefixes,
        sections=(section,) if isinstance(section, str) else tuple(section),
        sizes={axis: read_expression(str(text)) for axis, text in document.get("sizes", {}).items()},
        families={dim: tuple(tuple(family) for family in families) for dim, families in parallel.items()},
        pad=pad,
        config={key: read_expression(str(text)) for key, text in document.get("config", {}).items()},
        tensors=tensors,
        modules=modules,
        partial=document.get("partial", False) is True,
        _root=_trie(tensors, prefixes),
        _module_root=_trie(modules, prefixes),
    )


def _rules(template: str, value: Any) -> tuple[Rule, ...]:
    entries = value if isinstance(value, list) else [value]
    rules = []
    for entry in entries:
        line = {"shape": entry} if isinstance(entry, str) else entry
        if line.keys() - {"when", "shape", "optional"} or "shape" not in line:
            raise NotationError(f"tensor '{template}': a rule is a shape, or a table of 'shape', 'when' and 'optional'")
        try:
            when, optional = (_condition(line[key]) if key in line else None for key in ("when", "optional"))
            shapes = line["shape"] if isinstance(line["shape"], list) else [line["shape"]]
            if not shapes:
                raise NotationError("no shape")
            rules.append(Rule(tuple(parse(shape) for shape in shapes), when, optional))
        except NotationError as error:
            raise NotationError(f"tensor '{template}': {error.message}") from None
    return tuple(rules)


def _condition(value: Any) -> Expression:
    return read_expression("True" if value is True else value)


def _module_rules(template: str, value: Any) -> tuple[ModuleRule, ...]:
    rules = []
    for line in value if isinstance(value, list) else [value]:
        try:
            when = read_expression(line["when"]) if "when" in line else None
            split = {name: parse(shape) for name, shape in line.get("split", {}).items()}
            texts = {name: str(text) for name, text in line.items() if name not in {"when", "split", "alone", "sums"}}
            attributes = {name: read_expression(text) for name, text in texts.items()}
            rules.append(ModuleRule(attributes, split, when, line.get("alone", False) is True, line.get("sums")))
        except NotationError as error:
            raise NotationError(f"module '{template}': {error.message}") from None
    return tuple(rules)


def _trie(tensors: Iterable[str], prefixes: tuple[str, ...]) -> _Node:
    root = _Node()
    for template in tensors:
        for spelling in _spellings(template, prefixes):
            node, segments = root, spelling.split(".")
            kind = "rest" if segments[-1] == "*" else "template"
            for segment in segments[: -1 if kind == "rest" else None]:
                node = _child(node, segment, template)
            if getattr(node, kind) not in {None, template}:
                raise NotationError(f"the rules '{getattr(node, kind)}' and '{template}' cover the same names")
            setattr(node, kind, template)
    return root


def _child(node: _Node, segment: str, template: str) -> _Node:
    if segment == "*":
        raise NotationError(f"tensor '{template}': '*' stands for the rest of a name, at its end")
    if not (segment.startswith("{") and segment.endswith("}")):
        return node.literal.setdefault(segment, _Node())
    axis = segment[1:-1]
    if not axis.isidentifier():
        raise NotationError(f"tensor '{template}': '{segment}' is not an axis in braces")
    if node.index is None:
        node.index = (axis, _Node())
    elif node.index[0] != axis:
        raise NotationError(f"tensor '{template}': the index '{segment}' is called '{{{node.index[0]}}}' elsewhere")
    return node.index[1]


def _spellings(template: str, prefixes: tuple[str, ...]) -> Iterator[str]:
    yield template
    if prefixes and prefixes[0] and template.startswith(prefixes[0]):
        for other in prefixes[1:]:
            yield other + template[len(prefixes[0]) :]


# ------------------------------------------------------------------------------------------------- the built-in ones


@lru_cache(maxsize=1)
def built_in_architectures() -> Mapping[str, Path]:
    """The file of each model type that has one."""
    found: dict[str, Path] = {}
    for path in sorted(BUILT_IN.glob("*.toml")):
        for model_type in _names(path, "model_types"):
            if model_type in found:
                raise PlanError(f"model type '{model_type}' stands in {found[model_type].name} and in {path.name}")
            found[model_type] = path
    return found


def find_architecture(config: Mapping[str, Any], where: Path) -> Architecture:
    """The built-in architecture for a ``config.json``, with the rules for heads of any kind.

    Raises PlanError with the nearest known model types.
    """
    model_type = config.get("model_type")
    hint = "'reshard plan SOURCE --draft FILE' writes a draft; check it (docs/design.md), pass it with --plan FILE"
    path = built_in_file(config)
    if path is None and "_diffusers_version" in config:
        raise PlanError(
            f"{where} is a model of diffusers ({brief(config.get('_class_name'))}), which is no language model",
            "give the folder of a model that transformers loads, such as the pipeline's text_encoder",
        )
    if path is None and not isinstance(model_type, str):
        raise PlanError(f"{where / 'config.json'} has no model_type", hint)
    if path is None:
        near = difflib.get_close_matches(str(model_type), built_in_architectures(), n=3, cutoff=0.4)
        names = f" (nearest known: {', '.join(near)})" if near else ""
        raise PlanError(f"unknown model_type '{model_type}' in {where / 'config.json'}{names}", hint)
    return _built_in(path)


@lru_cache
def _built_in(path: Path) -> Architecture:
    document = _document(path)
    own = document["tensors"]
    document["tensors"] = {**_document(HEADS)["tensors"], **_experts_by_name(own), **own}
    return architecture_from_document(document, path.stem, str(path))


def _experts_by_name(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The lines for experts that quantizers name one by one, in addition to those of fused ones."""
    found: dict[str, Any] = {}
    for template in (name for name in tensors if "experts." in name):
        for rule in _rules(template, tensors[template]):
            names: dict[str, list[str]] = {}
            for shape in rule.shapes:
                for name, own in by_name(template, shape).items():
                    names.setdefault(name, []).append(str(own))
            for name, shapes in names.items():
                condition = {"when": rule.when.text} if rule.when else {}
                found.setdefault(name, []).append({"shape": [*dict.fromkeys(shapes)], **condition})
    return found


@lru_cache
def _config_defaults() -> Mapping[str, Mapping[str, Any]]:
    """For each model type, its settings where a ``config.json`` is silent."""
    defaults: Mapping[str, Mapping[str, Any]] = json.loads(CONFIG_DEFAULTS.read_text(encoding="utf-8"))
    return defaults


def built_in_file(config: Mapping[str, Any]) -> Path | None:
    """The file for a ``config.json``: that of its model type or, if it has none, of its class (``architectures``)."""
    if isinstance(config.get("model_type"), str):
        return _file_with("model_types", (config["model_type"],))
    classes = config.get("architectures")
    named = classes[:8] if isinstance(classes, list) else ()
    return _file_with("classes", tuple(name for name in named if isinstance(name, str)))


@lru_cache
def _file_with(key: str, names: tuple[str, ...]) -> Path | None:
    """Parses the files that mention a name: parsing all takes longer than planning."""
    for path in sorted(BUILT_IN.glob("*.toml")) if names else ():
        text = path.read_text(encoding="utf-8")
        if any(json.dumps(name) in text and name in _names(path, key) for name in names):
            return path
    return None


def _names(path: Path, key: str) -> Sequence[str]:
    names: Sequence[str] = tomllib.loads(path.read_text(encoding="utf-8")).get(key, ())
    return names


# ------------------------------------------------------------------------------------------------------- writing


def to_document(architecture: Architecture) -> dict[str, Any]:
    """The parsed form of an architecture's file: plain strings, lists and dicts.

    Without ``[modules]``: shards do not depend on it.
    """
    parallel: dict[str, Any] = {dim: [list(family) for family in fams] for dim, fams in architecture.families.items()}
    if architecture.pad:
        parallel["pad"] = list(architecture.pad)
    document: dict[str, Any] = {
        "name": architecture.name,
        "model_types": list(architecture.model_types),
        "prefixes": list(architecture.prefixes),
        "sizes": {axis: expression.text for axis, expression in architecture.sizes.items()},
        "parallel": parallel,
        "config": {key: expression.text for key, expression in architecture.config.items()},
        "tensors": {template: _rule_document(rules) for template, rules in architecture.tensors.items()},
    }
    if architecture.partial:
        document["partial"] = True
    if architecture.sections:
        document["section"] = architecture.sections[0] if len(architecture.sections) == 1 else [*architecture.sections]
    return document


def _rule_document(rules: tuple[Rule, ...]) -> Any:
    if len(rules) == 1 and rules[0] == Rule(rules[0].shapes[:1]):
        return str(rules[0].shapes[0])
    lines = []
    for rule in rules:
        shapes = [str(shape) for shape in rule.shapes]
        line: dict[str, Any] = {"shape": shapes[0] if len(shapes) == 1 else shapes}
        line |= {"when": rule.when.text} if rule.when else {}
        lines.append(line | ({"optional": rule.optional.text} if rule.optional else {}))
    return lines


def module_document(rules: Sequence[ModuleRule]) -> Any:
    """The parsed form of a line of ``[modules]``."""
    lines = []
    for rule in rules:
        line: dict[str, Any] = {"when": rule.when.text} if rule.when else {}
        line |= {name: expression.text for name, expression in rule.attributes.items()}
        line |= {"alone": True} if rule.alone else {}
        line |= {"sums": rule.sums} if rule.sums else {}
        lines.append(line | ({"split": {name: str(shape) for name, shape in rule.split.items()}} if rule.split else {}))
    return lines[0] if len(lines) == 1 else lines


def to_toml(architecture: Architecture) -> str:
    """The text of an architecture file, in the form that ``load_architecture`` reads."""
    document = to_document(architecture)
    tables = {key: document.pop(key) for key in ("sizes", "parallel", "config", "tensors")}
    if architecture.modules:
        tables["modules"] = {name: module_document(rules) for name, rules in architecture.modules.items()}
    lines = [f"{key} = {_toml(value)}" for key, value in document.items()]
    for key, table in tables.items():
        lines += ["", f"[{key}]"]
        lines += [f"{_toml(name)} = {_toml(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{_toml(key) if '.' in key else key} = {_toml(item)}" for key, item in value.items())
            + " }"
        )
    return json.dumps(value, ensure_ascii=False)
