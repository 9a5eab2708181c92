"""The parsed form of an architecture's file, which a manifest has too: plain strings, lists and tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from formats.documents import Record, Unfit, items, json_object, mapping, record, sound, text, truth, unfit
from formats.errors import NotationError, PlanError
from formats.notation.architecture import Architecture, ModuleRule, Rule, trie
from formats.notation.axes import parse
from formats.notation.components import linear, unfused
from formats.notation.expressions import Expression, read_expression

LONGEST_NAME, DEEPEST = 1000, 100
"""Characters of a template in a plan file, and its parts between dots."""
T = TypeVar("T")


def architecture_from_document(document: Mapping[str, Any], name: str, where: str) -> Architecture:
    """Build an architecture from the parsed form of its file (as also kept in a manifest)."""
    try:
        return record(partial(_architecture, name))(sound(dict(document)), "")
    except NotationError as error:
        raise PlanError(f"plan file {where}: {error.message}", error.hint) from None
    except Unfit as error:
        raise PlanError(f"plan file {where} does not have the form of an architecture file: {error}") from None


def _architecture(name: str, fields: Record) -> Architecture:
    formulas, texts, none = mapping(_formula), items(text), dict[str, Any]()
    nothing: tuple[str, ...] = ()
    as_they_are: tuple[str, ...] = ("",)
    prefixes = fields.find("prefixes", texts, as_they_are)
    own = fields.find("tensors", partial(_by_template, _rules), none)
    modules = fields.find("modules", partial(_by_template, _module_rules), none)
    stages = fields.find("stages", partial(_by_template, lambda _, value, where: _formula(value, where)), none)
    layers = stages.pop("layers", read_expression("layer"))
    parallel = {**fields.find("parallel", json_object, none)}
    pad = texts(parallel.pop("pad", []), "parallel.pad")
    fields.find("classes", texts, nothing)
    if not own:
        raise NotationError("no rules under [tensors]")
    experts = _experts(own)
    tensors = {**experts, **own}
    return Architecture(
        name=fields.find("name", text, name),
        model_types=fields.find("model_types", texts, nothing),
        prefixes=prefixes,
        sections=fields.find("section", _one_or_more, nothing),
        sizes=fields.find("sizes", formulas, none),
        families=mapping(items(texts))(parallel, "parallel"),
        pad=pad,
        config=fields.find("config", formulas, none),
        tensors=tensors,
        modules=modules,
        stages=stages,
        layers=layers,
        partial=fields.find("partial", truth, False),
        derived=frozenset(experts.keys() - own.keys()),
        _root=trie(tensors, prefixes),
        _stage_root=trie(stages, prefixes, later_wins=True),
        _module_root=trie(modules, prefixes),
    )


def _formula(value: object, where: str) -> Expression:
    """An expression, which may be written as the number that it is."""
    if not isinstance(value, (str, int, float)):
        raise unfit(where, "an expression", value)
    return read_expression(str(value))


def _one_or_more(value: object, where: str) -> tuple[str, ...]:
    return items(text)(value if isinstance(value, list) else [value], where)


def _by_template(read: Callable[[str, Any, str], T], value: object, where: str) -> dict[str, T]:
    """A table whose keys are names of tensors or modules, with axes in braces."""
    for template in (lines := json_object(value, where)):
        if len(template) > LONGEST_NAME or template.count(".") > DEEPEST:
            raise unfit(where, f"a table of names of at most {LONGEST_NAME} characters in {DEEPEST} parts", template)
    return {template: read(template, line, f"{where}.{template}") for template, line in lines.items()}


def _rules(template: str, value: object, where: str) -> tuple[Rule, ...]:
    """A line of ``[tensors]``: a shape, or one table or several. Raises NotationError that names the template."""
    rules = []
    for entry in value if isinstance(value, list) else [value]:
        line = {"shape": entry} if isinstance(entry, str) else json_object(entry, where)
        if line.keys() - {"when", "shape", "optional"} or "shape" not in line:
            raise NotationError(f"tensor '{template}': a rule is a shape, or a table of 'shape', 'when' and 'optional'")
        try:
            conditions = (
                _formula(line[key], f"{where}.{key}") if key in line else None for key in ("when", "optional")
            )
            shapes = tuple(map(parse, _one_or_more(line["shape"], f"{where}.shape")))
            if not shapes:
                raise NotationError("no shape")
            rules.append(Rule(shapes, *conditions))
        except NotationError as error:
            raise NotationError(f"tensor '{template}': {error.message}") from None
    return tuple(rules)


def _module_rules(template: str, value: object, where: str) -> tuple[ModuleRule, ...]:
    rules = []
    for entry in value if isinstance(value, list) else [value]:
        line = dict(json_object(entry, where))
        try:
            alone, sums, when = line.pop("alone", False), line.pop("sums", None), line.pop("when", None)
            split = mapping(text)(line.pop("split", {}), f"{where}.split")
            shapes = {name: parse(shape) for name, shape in split.items()}
            condition = None if when is None else read_expression(text(when, f"{where}.when"))
            attributes = mapping(_formula)(line, where)
            own = None if sums is None else text(sums, f"{where}.sums")
            rules.append(ModuleRule(attributes, shapes, condition, alone is True, own))
        except NotationError as error:
            raise NotationError(f"module '{template}': {error.message}") from None
    return tuple(rules)


def _experts(tensors: Mapping[str, tuple[Rule, ...]]) -> dict[str, tuple[Rule, ...]]:
    """The lines for experts that quantizers name one by one, in addition to those of fused ones."""
    found: dict[str, tuple[Rule, ...]] = {}
    for template, rules in tensors.items():
        for rule in rules:
            parts = [part for shape in rule.shapes for part in unfused(template, shape).items()]
            for name in dict.fromkeys(name for name, _ in parts):
                shapes = dict.fromkeys(linear(own) for other, own in parts if other == name)
                found[name] = (*found.get(name, ()), Rule(tuple(shapes), rule.when))
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
    lines: list[dict[str, Any]] = []
    for rule in rules:
        shapes, conditions = [str(shape) for shape in rule.shapes], {"when": rule.when, "optional": rule.optional}
        lines.append({"shape": shapes[0] if len(shapes) == 1 else shapes})
        lines[-1] |= {key: condition.text for key, condition in conditions.items() if condition}
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
