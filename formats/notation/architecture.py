"""An architecture: what the dimensions of each of its tensors mean, and which of its lines covers a name.

Files of architectures are read in ``architecture_files``; their parsed form is read in ``architecture_document``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from formats.errors import NotationError
from formats.notation.axes import Shape
from formats.notation.expressions import Expression, read_expression

CONFIG_DEFAULTS = Path(__file__).parents[1] / "config_defaults.json"
"""What transformers' configuration classes say where a ``config.json`` says nothing."""


@dataclass(frozen=True)
class Rule:
    """The shape of a tensor, where ``when`` holds (always, if it is None).

    Several ``shapes`` are layouts that occur on disk, of which one must fit the tensor's. Where ``optional`` holds, a
    complete checkpoint may lack the tensor although other tensors demand it (see ``reshard.source.completeness``).
    """

    shapes: tuple[Shape, ...]
    when: Expression | None = None
    optional: Expression | None = None


@dataclass(frozen=True)
class ModuleRule:
    """What a rank's module of transformers has that the rank's own config.json cannot say, where ``when`` holds.

    ``attributes`` are set to the rank's own numbers. ``split`` gives the shapes of arguments, buffers and lists of
    modules that hold all ranks' parts: the rank takes its own. A module that is ``alone`` needs nothing from other
    ranks (a norm of each head). ``sums`` is the row-parallel weight after which the ranks' parts are summed, if that is
    not at the module's end.
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
    """The rules of one family of models. Fields as in the file; see docs/reference/architecture-files.md.

    ``partial``: a user's plan that is for a part of a checkpoint, on purpose. ``inherited`` are the lines of
    ``tensors`` that come from a base, not from the user's file. ``derived`` are those that follow from another line
    (see ``components.unfused``). ``stages`` gives the pipeline stage of a tensor: ``first``, ``last``, ``every`` (each
    stage would need it), or the number of its layer. ``layers`` is the axis of the layers that are dealt to stages, or
    their number.
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
    stages: Mapping[str, Expression] = field(default_factory=dict)
    layers: Expression = field(default_factory=lambda: read_expression("layer"))
    partial: bool = False
    inherited: frozenset[str] = field(compare=False, default=frozenset())
    derived: frozenset[str] = field(compare=False, default=frozenset())
    _root: _Node = field(repr=False, compare=False, default_factory=_Node)
    _stage_root: _Node = field(repr=False, compare=False, default_factory=_Node)
    _module_root: _Node = field(repr=False, compare=False, default_factory=_Node)
    templates: dict[tuple[str, str], str] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What ``reshard.placement.portions.template_of`` has found: it is asked for the same names again and again."""

    def match(self, name: str) -> Match | None:
        """The line that covers a tensor of this name, or None."""
        found = _find(self._root, name)
        return Match(found[0], self.tensors[found[0]], found[1]) if found else None

    def stage_of(self, name: str) -> Expression | None:
        """What ``[stages]`` says of a tensor of this name; None if it says nothing."""
        found = _find(self._stage_root, name)
        return self.stages[found[0]] if found else None

    def form(self, name: str) -> tuple[Hashable, Sequence[str]]:
        """A name without its numbers, and the numbers. Names of one form are covered by one line, and their numbers
        stand for the same indices.
        """
        words = _NUMBERS.split(name)
        numbers = words[1::2]
        literal = [number if number in self._literal_numbers else "" for number in numbers]
        return (*words[::2], *literal), numbers

    def index_places(self, name: str) -> Mapping[str, int]:
        """Which of a name's numbers are indices: their positions among all its numbers, as far as a line knows the
        name.
        """
        *_, (_, places) = _walk(self._root, name)
        return places

    @cached_property
    def _literal_numbers(self) -> frozenset[str]:
        """The numbers that lines have as such: ``mlp.0.weight``."""
        return frozenset(number for template in self.tensors for number in _NUMBERS.findall(template))

    def around(self, module: str) -> Iterator[Match]:
        """The lines of a module's tensors, then those of the module around it, and so on outwards, with the module's
        own indices.
        """
        for node, places in reversed(list(_walk(self._root, module))):
            for template in _below(node):
                yield Match(template, self.tensors[template], _indices(module, places))

    def match_module(self, name: str) -> tuple[tuple[ModuleRule, ...], Mapping[str, int]] | None:
        """The rules under ``[modules]`` for a module of this name, and the indices in it, or None."""
        found = _find(self._module_root, name)
        return (self.modules[found[0]], found[1]) if found else None

    def settings(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of the language model: first its section of ``config.json``, then the rest of the file.

        Last come the defaults of the section's model type, because a published section leaves out settings with default
        values.
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


@lru_cache
def _config_defaults() -> Mapping[str, Mapping[str, Any]]:
    """For each model type, its settings where a ``config.json`` is silent."""
    defaults: Mapping[str, Mapping[str, Any]] = json.loads(CONFIG_DEFAULTS.read_text(encoding="utf-8"))["types"]
    return defaults


def trie(tensors: Iterable[str], prefixes: tuple[str, ...], *, later_wins: bool = False) -> _Node:
    """The templates by the parts of their names, in each spelling.

    Raises NotationError if two cover the same names. With ``later_wins`` the later one is taken instead; a template
    that is itself spelled so wins over another spelling.
    """
    root = _Node()
    spelled = [(template, spelling) for template in tensors for spelling in _spellings(template, prefixes)]
    if later_wins:
        spelled.sort(key=lambda pair: pair[0] == pair[1])
    for template, spelling in spelled:
        node, segments = root, spelling.split(".")
        kind = "rest" if segments[-1] == "*" else "template"
        for segment in segments[: -1 if kind == "rest" else None]:
            axis = segment[1:-1]
            if segment == "*":
                raise NotationError(f"tensor '{template}': '*' stands for the rest of a name, at its end")
            if not (segment.startswith("{") and segment.endswith("}")):
                node = node.literal.setdefault(segment, _Node())
                continue
            if not axis.isidentifier():
                raise NotationError(f"tensor '{template}': '{segment}' is not an axis in braces")
            node.index = node.index or (axis, _Node())
            if node.index[0] != axis:
                known = node.index[0]
                raise NotationError(f"tensor '{template}': the index '{segment}' is called '{{{known}}}' elsewhere")
            node = node.index[1]
        if not later_wins and getattr(node, kind) not in {None, template}:
            raise NotationError(f"the rules '{getattr(node, kind)}' and '{template}' cover the same names")
        setattr(node, kind, template)
    return root


def _spellings(template: str, prefixes: tuple[str, ...]) -> Iterator[str]:
    yield template
    if prefixes and prefixes[0] and template.startswith(prefixes[0]):
        for other in prefixes[1:]:
            yield other + template[len(prefixes[0]) :]
