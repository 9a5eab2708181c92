"""Spellings of the names of a model's tensors: as published, or as transformers' own modules have them.

A checkpoint may have other names than the modules (``block_sparse_moe`` for ``mlp``), each expert by name where the
module has one tensor ``experts.gate_up_proj``, or a packed tensor where modules have its components.
``formats/programs/transformers.json`` says which tensors a module's tensor is made of.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from reshard.formats.errors import NotationError
from reshard.formats.notation.architecture import (
    ROOT,
    Architecture,
    LineNames,
    Match,
    Rule,
    filled,
    numbers_in,
    with_first_indices,
    with_other_root,
    without_numbers,
)
from reshard.formats.notation.axes import Dim, Shape, Summand
from reshard.formats.notation.components import component_names
from reshard.formats.notation.expressions import Expression
from reshard.formats.notation.format import MODULES, Pattern, Rules, Use
from reshard.formats.notation.format_file import format_of, in_published
from reshard.formats.notation.heads import NO_HEAD, class_of, head_of


@dataclass(frozen=True)
class SourcePart:
    """One source of a module's tensor: a checkpoint's tensor, by its template, whole or only the component ``label``.

    With ``at`` the source is one matrix of a stack: its number is that index of the module's name.
    """

    source: str
    label: str | None = None
    at: str | None = None


Shapes = tuple[tuple[Shape, Expression | None], ...]
"""The shapes that a tensor may have, each with its condition."""


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of a module, and the checkpoint's tensors that it is made of, joined along their output."""

    name: str
    parts: tuple[SourcePart, ...]
    shapes: Shapes
    """A rule of it has one shape for each of the sources'."""
    stacked: str | None = None
    """The index of the sources' names that is its first dimension."""
    turned: bool = False
    """Whether the sources have their input first, and it has its output first."""
    halves: str = ""
    """The axis whose pairs of rows it has as halves."""
    shift: int = 0
    """The difference of the number in its name from that of the source."""

    @property
    def is_whole(self) -> bool:
        """Whether it is one of the checkpoint's tensors, with all its indices."""
        return self.stacked is None and len(self.parts) == 1 and self.parts[0].label is None

    @property
    def dims(self) -> int:
        """The number of dimensions of its first shape; 0 if it may have any."""
        first = self.shapes[0][0] if self.shapes else None
        return 0 if first is None or first.is_open else len(first.dims)


def module_tensors(base: Architecture, config: Mapping[str, Any]) -> Iterator[ModuleTensor]:
    """Return the tensors of transformers' modules for a config.json, in place of those of a checkpoint's lines.

    Of a model type that is not known there, they are the checkpoint's.
    """
    rules = format_of("transformers").of(config).rules
    joined: dict[tuple[int, str, bool], dict[int, tuple[Use, SourcePart, Shapes]]] = defaultdict(dict)
    for template, rules_of in base.tensors.items():
        shapes = tuple(shapes_in(rules_of))
        yield from _below(template, shapes, rules, base)
        for candidates in ([(template, SourcePart(template), shapes)], *_components(template, *shapes[0])):
            covering = [[use for use in rules.uses(name) if not use.line.also] for name, _, _ in candidates]
            if candidates and all(covering):
                break
        else:
            yield ModuleTensor(template, (SourcePart(template),), shapes)
            continue
        for found, (_, part, of_part) in zip(covering, candidates, strict=True):
            for use in (use for use in found if use is found[0] or use.line.share):
                joined[id(use.line), use.target, part.label is not None][use.source] = use, part, of_part
    for slots in joined.values():
        uses, parts, shapes_of = zip(*(slots[slot] for slot in sorted(slots)), strict=True)
        use, name = uses[0], uses[0].target
        if len(slots) == len(use.line.sources):
            turned = use.line.output_first and any(shape.arrow is not None for shape, _ in shapes_of[0])
            ways = use.stacked, turned, next(iter(use.line.halves), ""), use.line.shift
            yield ModuleTensor(name, parts, tuple(_joined(use, shapes_of)), *ways)


def _below(template: str, shapes: Shapes, rules: Rules, base: Architecture) -> Iterator[ModuleTensor]:
    """The tensors of an open line of the architecture for which the rules alone have lines of their own."""
    for line in rules.lines if template.endswith("*") else ():
        names = [pattern.text.replace("**", "*") for pattern in (line.target, *line.sources)]
        if len(names) == 2 and not line.also and names[1].startswith(template[:-1]) and names[1] not in base.tensors:
            yield ModuleTensor(names[0], (SourcePart(names[1]),), shapes, shift=line.shift)


def _components(name: str, shape: Shape, when: Expression | None) -> Iterator[list[tuple[str, SourcePart, Shapes]]]:
    """The components of a checkpoint's tensor, in each way that lines of formats may name them."""
    for names in component_names(name, shape) if not shape.is_open else ():
        parts = list[tuple[str, SourcePart, Shapes]]()
        for own_name, part in names.items():
            factors = [part.factors[place] for place in part.of_dim(part.dim)]
            dim = Dim((Summand(tuple(factor for factor in factors if str(factor) != "1") or (1,)),))
            own = Shape((*shape.dims[: part.dim], dim, *shape.dims[part.dim + 1 :]), shape.arrow)
            parts += [(own_name, SourcePart(name, part.label), ((own, when),))] if part.index is None else []
        yield parts


def shapes_in(rules: Sequence[Rule]) -> Iterator[tuple[Shape, Expression | None]]:
    """The shapes of rules, each with its condition."""
    return ((shape, rule.when) for rule in rules for shape in rule.shapes)


def _joined(use: Use, shapes_of: Sequence[Shapes]) -> Iterator[tuple[Shape, Expression | None]]:
    """The shapes of a tensor that is joined of these, one for each shape that all of them have."""
    for alternatives in zip(*shapes_of, strict=False):
        shapes = [shape for shape, _ in alternatives]
        if any(shape.is_open for shape in shapes):
            yield from alternatives if len(shapes) == 1 else ()
            continue
        shape_of = shapes[0]
        if use.line.output_first and shape_of.arrow is not None:
            shape_of = Shape((*shape_of.dims[:-2], shape_of.dims[-1], shape_of.dims[-2]))
        if len(shapes) > 1:
            at = (shape_of.output_dim or 0) if use.line.dim is None else use.line.dim
            dims = [shape.dims[at] for shape in shapes]
            sum_of = Dim(tuple(Summand((dim,), f"part{place}") for place, dim in enumerate(dims)))
            shape_of = Shape((*shape_of.dims[:at], sum_of, *shape_of.dims[at + 1 :]), shape_of.arrow)
        if use.stacked:
            arrow = None if shape_of.arrow is None else shape_of.arrow + 1
            shape_of = Shape((Dim((Summand((use.stacked,)),)), *shape_of.dims), arrow)
        yield shape_of, alternatives[0][1]


def _forms(name: str) -> tuple[str, str]:
    """A name, and the same with the root or without it."""
    return name, with_other_root(name)


class Spellings:
    """The spellings of a model's tensors, by an architecture and a config.json: those that are published, and those of
    transformers' modules.
    """

    def __init__(self, architecture: Architecture, config: Mapping[str, Any]) -> None:
        self._architecture, self._tensors = architecture, [*module_tensors(architecture, config)]
        format = format_of("transformers").of(config)
        self._of_types, self._published = format.rules, in_published().of(config).rules
        self.refusal = format.types.refused.get(format.types.name_of(config))
        """The reason for which names in modules are not known; None if they are, or if transformers lacks the type."""
        self._of_form: dict[Hashable, list[str] | None] = {}
        is_bare = head_of(config) == NO_HEAD and class_of(config) not in format.types.classes
        is_observed = class_of(config) in format.types.classes and self.refusal is None
        self._is_known = not is_bare and (is_observed or bool(self._of_types.lines or self._published.lines))

    @cached_property
    def _joined(self) -> frozenset[str]:
        """Tensors that modules make of several, or of a part of one: their names, and the architecture's lines."""
        names = {tensor.name for tensor in self._tensors if not tensor.is_whole}
        matches = map(self._architecture.match, map(with_first_indices, names))
        lines = {match.template for match in matches if match is not None}
        return frozenset({*names, *(line for line in lines if not line.endswith("*"))})

    def is_joined(self, name: str) -> bool:
        """Whether modules make this tensor of several, or of a part of one."""
        match, found = self._architecture.match(name), self._module_names.find(name)
        return (match is not None and match.template in self._joined) or (found or ("",))[0] in self._joined

    @cached_property
    def _module_names(self) -> LineNames:
        names = {t.name for t in self._tensors if t.name not in {part.source for part in t.parts}}
        with suppress(NotationError):
            return LineNames(names, self._architecture.prefixes)
        return LineNames(names, ())

    @cached_property
    def _renamed(self) -> Mapping[str, str]:
        """The modules' templates by checkpoints' templates, for tensors that are the same in both."""
        return {tensor.parts[0].source: tensor.name for tensor in self._tensors if tensor.is_whole}

    @cached_property
    def _shifts(self) -> Mapping[str, int]:
        return {tensor.name: tensor.shift for tensor in self._tensors if tensor.shift}

    @cached_property
    def _sources(self) -> Mapping[str, str]:
        """The same the other way, where they differ: of lines that give the same name, the first counts."""
        rules = self._of_types
        lines = {id(line): place for place, line in enumerate(rules.lines)}
        pairs = [(source, name) for source, name in self._renamed.items() if name != source]
        pairs.sort(key=lambda pair: -min((lines[id(use.line)] for use in rules.uses(pair[0])), default=0))
        return {name: source for source, name in pairs}

    def tensor(self, name: str) -> Hashable:
        """Return a key that all names of a tensor share: the module's tensor, or else the line and the indices."""
        match = self._architecture.match(name)
        if match is not None and match.template.endswith("*"):
            name = self._architecture.stated(name)  # with the root that the line has
        name = next((form for form in _forms(name) if self.in_modules(form) not in {form, None}), name)
        spelled, (module, _, leaf) = self.in_modules(name), name.rpartition(".")
        if spelled is None and match is None and leaf != "weight" and self._architecture.match(f"{module}.weight"):
            return self.tensor(f"{module}.weight"), leaf  # it belongs to a weight
        if spelled is not None or match is None or match.template.endswith("*"):
            return (spelled or name).removeprefix(ROOT)
        return match.template.removeprefix(ROOT), *match.indices.values()

    def in_modules(self, name: str) -> str | None:
        """The name of a tensor as transformers itself spells it; None if no module has this tensor, as a whole."""
        if (found := self._of_module(name)) is not None:
            return found[0]
        match = self._architecture.match(name)
        return self._by_lines(self._of_types, name, match) if match and match.template in self._renamed else None

    def _of_module(self, name: str) -> tuple[str, str] | None:
        """A name as modules have it, with the root or without, and the same in the architecture's own spelling; None if
        it is not one of those that modules alone have.
        """
        found, match = self._module_names.find(name), self._architecture.match(name)
        if found is None:
            return None
        stem, numbers = filled(*found), {axis: n - self._shifts.get(found[0], 0) for axis, n in found[1].items()}
        source = filled(self._sources.get(found[0], found[0]), numbers)
        if not stem.endswith("*"):
            return stem, source
        use = self._use(self._of_types, name, match) if match is not None else None
        is_own = match is not None and not match.template.endswith("*")
        if is_own or (use is not None and len(use.line.sources[use.source].text) > len(stem)):
            return None
        spelled = next((form for form in _forms(name) if form.startswith(stem[:-1])), None)
        return None if spelled is None else (spelled, source[:-1] + spelled.removeprefix(stem[:-1]))

    def published(self, name: str) -> str | None:
        """The name of a tensor in published checkpoints of its type and class; None if it is not known, or if it is one
        of several there.
        """
        form, numbers = self._architecture.form(name)
        if form not in self._of_form:  # there may be half a million names, of few forms
            found = self._published_name(name)
            if found is not None and self._architecture.form(found)[1] != numbers:
                return found
            self._of_form[form] = None if found is None else without_numbers(found, "\0").split("\0")
        words = self._of_form[form]
        return None if words is None else words[0] + "".join(map("".join, zip(numbers, words[1:], strict=True)))

    def _published_name(self, name: str) -> str | None:
        module, _, leaf = name.rpartition(".")
        if not self._is_known or self.is_joined(name):
            return None
        name = (self._of_module(name) or (name, name))[1]
        if self.is_joined(name):
            return None
        if (match := self._architecture.match(name)) is not None:
            return self._by_lines(self._published, name, match)
        of_weight = self.published(f"{module}.weight") if leaf != "weight" else None
        return None if of_weight is None else of_weight.removesuffix("weight") + leaf

    def are_published(self, names: Iterable[str]) -> bool:
        """Whether these have the tensor for which names in modules are not known: modules have another in its place."""
        words = (self.refusal or "").split("'")  # a reason begins with a tensor, or is that nothing was observed
        wanted = without_numbers(words[1]) if len(words) > 2 and not words[0] else None
        return any(without_numbers(self._architecture.stated(name)) == wanted for name in names)

    def second_names(self, names: Collection[str]) -> dict[str, str]:
        """The names of tensors that modules hold under a second name, each with that of the first."""
        found, tensors = dict[str, str](), dict[Hashable, str]()
        lines = [line for line in self._of_types.lines if line.also and self._is_known]
        are_numbered = any(line.target.indices for line in lines)
        for line in lines:
            forms = _forms(line.target.text)
            among = names if line.target.indices else [form for form in forms if form in names][:1]
            for second in among:
                matches = (Pattern(form).match(second) for form in forms)
                if (words := next((words for words in matches if words is not None), None)) is None:
                    continue
                tensors = tensors or {self.tensor(name): name for name in names if are_numbered or not numbers_in(name)}
                if (first := tensors.get(self.tensor(line.sources[0].fill(words)), second)) != second:
                    found[second] = first
        for second, first in found.items():
            while found.get(first, second) != second:
                first = found[first]
            found[second] = first
        return found

    def is_second(self, name: str) -> bool:
        """Whether modules hold a tensor once more under this name, with the root or without."""
        return any(pattern.match(name) is not None for pattern in self._seconds)

    @cached_property
    def _seconds(self) -> Sequence[Pattern]:
        targets = (line.target.text for line in self._of_types.lines if line.also)
        return [Pattern(form) for target in targets for form in _forms(target)]

    def only(self, names: str) -> Callable[[str], str | None]:
        """A spelling that knows only names that are ``published``, or those of ``modules``."""
        spell = self.in_modules if names == MODULES else self.published
        return lambda name: name if spell(name) == name else None

    def are_of_modules(self, names: Iterable[str]) -> bool:
        """Whether tensors have the names that transformers' modules have, and not the published ones: most of them, or
        with another root.
        """
        if not self._is_known:
            return any(map(self.is_joined, names))
        exact, rooted = 0, 0
        for name in names:
            of_modules, published, forms = self.in_modules(name), self.published(name), _forms(name)
            exact += (of_modules == name) - (published == name)
            rooted += (of_modules in forms) - (published in forms)
        return (exact or rooted) > 0

    def is_apart(self, name: str) -> bool:
        """Whether modules have a tensor otherwise: as one with others, in parts, turned, or in another order."""
        match = self._architecture.match(name)
        return match is not None and match.template in self._apart

    @cached_property
    def _apart(self) -> frozenset[str]:
        others = (t for t in self._tensors if t.turned or t.halves or not t.is_whole)
        return frozenset(part.source for tensor in others for part in tensor.parts)

    def _use(self, rules: Rules, name: str, match: Match) -> Use | None:
        """The line that covers a whole tensor of any name; ``match`` is the architecture's line of it."""
        pattern = self._architecture.pattern_of(name, match.template)
        return next((use for use in rules.uses(pattern) if not use.line.also), None)

    def _by_lines(self, rules: Rules, name: str, match: Match) -> str:
        """A name, in whatever prefix, as lines spell it."""
        name = self._architecture.stated(name) if match.template.endswith("*") else name  # with the line's root
        use, numbers = self._use(rules, name, match), enumerate(numbers_in(name))
        target = use.target if use is not None else self._architecture.pattern_of(name, match.template)
        known = {**self._architecture.indices_in(name), **match.indices}
        known = {**{f"number{place}": number for place, number in numbers}, **known}
        shift = use.line.shift if use is not None else 0
        return filled(target, {axis: number + shift for axis, number in known.items()})
