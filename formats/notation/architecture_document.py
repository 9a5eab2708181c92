"""The parsed form of an architecture's file, which a manifest has too: plain strings, lists and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from formats.documents import Reader, Unfit, items, json_object, mapping, sound, text, truth, unfit
from formats.errors import NotationError, PlanError
from formats.notation.architecture import Architecture, ModuleRule, Rule, trie
from formats.notation.axes import parse
from formats.notation.expressions import Expression, read_expression
from formats.notation.unfused_experts import by_name

LONGEST_NAME, DEEPEST = 1000, 100
"""Characters of a template in a plan file, and its parts between dots."""


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
    "stages": _named(_formula),
}
_KEYS = _FORM.keys()


def _build(document: Mapping[str, Any], name: str) -> Architecture:
    unknown = document.keys() - _KEYS
    if unknown:
        raise NotationError(f"unknown key '{min(unknown)}' (known: {', '.join(sorted(_KEYS))})")
    parallel = dict(document.get("parallel", {}))
    pad = tuple(parallel.pop("pad", ()))
    prefixes, section = tuple(document.get("prefixes", ("",))), document.get("section", ())
    own = document.get("tensors", {})
    if not own:
        raise NotationError("no rules under [tensors]")
    experts = _experts_by_name(own)
    tensors = {template: read_rules(template, value) for template, value in {**experts, **own}.items()}
    modules = {template: _module_rules(template, value) for template, value in document.get("modules", {}).items()}
    stages = {template: read_expression(str(text)) for template, text in document.get("stages", {}).items()}
    layers = stages.pop("layers", read_expression("layer"))
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
        stages=stages,
        layers=layers,
        partial=document.get("partial", False) is True,
        derived=frozenset(experts.keys() - own.keys()),
        _root=trie(tensors, prefixes),
        _stage_root=trie(stages, prefixes, later_wins=True),
        _module_root=trie(modules, prefixes),
    )


def read_rules(template: str, value: Any) -> tuple[Rule, ...]:
    """A line of ``[tensors]``: a shape, or one table or several. Raises NotationError that names the template."""
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


def _experts_by_name(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The lines for experts that quantizers name one by one, in addition to those of fused ones."""
    found: dict[str, Any] = {}
    for template in (name for name in tensors if "experts." in name):
        for rule in read_rules(template, tensors[template]):
            names: dict[str, list[str]] = {}
            for shape in rule.shapes:
                for name, own in by_name(template, shape).items():
                    names.setdefault(name, []).append(str(own))
            for name, shapes in names.items():
                condition = {"when": rule.when.text} if rule.when else {}
                found.setdefault(name, []).append({"shape": [*dict.fromkeys(shapes)], **condition})
    return found


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
    if architecture.stages:
        stages = {"layers": architecture.layers, **architecture.stages}
        document["stages"] = {name: where.text for name, where in stages.items()}
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
