"""The check that a checkpoint has all tensors that it must have, by its rules, its config.json and its other tensors.

A rule that covers no tensor is normal, because an architecture file describes many models. So no rule alone demands a
tensor. The tensors that are there demand others:

- If one layer (or expert) has a tensor, all have it.
- A model has an embedding of its vocabulary, and a head if config.json says that the two are not tied.
- Tensors that all models of a type have, this one has (``required.json``).

``when`` and ``optional`` in a rule state the exceptions of a model. MTP layers may be missing, because publishers leave
them out; or they are all that is there, as a draft for the model that has the rest.

``required.json`` has the lines that transformers' own class has for every model of a type, whatever the settings; for a
type without such a class, the lines that published checkpoints have. ``python -m tools.required`` writes it. A line is
demanded within a module: if the module has any tensor, it must have that of the line. A checkpoint may spell a part of
its names in another way (experts that a quantizer names one by one). Nothing is demanded of a part that has other
lines.

A tower is an encoder of images or sound, or the modules between it and the language model. A checkpoint has all of a
tower or nothing. It has all if config.json has the tower's section, and names a class that has the tower. The file has
the lines of towers that one rule covers (``model.visual.*``), too.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from reshard.formats.errors import CheckpointError, MismatchError, NotationError
from reshard.formats.files.chunks import check_tiling
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.notation.architecture import ROOT, SETTINGS, LineNames, Match, filled
from reshard.formats.notation.architecture_files import built_in_file, language_model
from reshard.formats.notation.heads import TOKENS, class_of, head_of, is_headless
from reshard.formats.quantization.companions import is_of_activations
from reshard.formats.store import FilePath
from reshard.mesh.stages import predicts_further
from reshard.model.model import BoundTensor, Kind, Model, check_members
from reshard.placement.arrangement import Arrangement
from reshard.placement.stored import Chunks

REQUIRED = Path(__file__).parent / "required.json"


@dataclass(frozen=True)
class Tower:
    """A module of a model type that a language model alone does not have."""

    classes: frozenset[str]
    """The classes that have it; empty: any for which config.json has all sections."""
    sections: tuple[str, ...] = ()
    """Sections of config.json: if one is null, the tower is not there."""
    types: frozenset[str] = frozenset()
    """The model types, in the section of its own, for which its lines are known; empty: any."""

    def is_known(self, config: Mapping[str, Any]) -> bool:
        """Whether the tower's lines hold for the tower in this ``config.json``."""
        stated = setting_at(config, f"{self.sections[0]}.model_type") if self.types else None
        return stated is None or stated in self.types

    def is_of(self, config: Mapping[str, Any]) -> bool:
        """Whether the model of a ``config.json`` has the tower, by the class and the sections there."""
        named = config.get("architectures")
        default: Mapping[str, Any] | None = {} if self.classes else None
        has_sections = all(isinstance(setting_at(config, each, default), Mapping) for each in self.sections)
        return isinstance(named, list) and bool(named) and has_sections and named[0] in (self.classes or named)


def setting_at(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The setting of a ``config.json`` at keys with dots between them."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key, default) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True)
class KnownLines:
    """The lines of a model type."""

    always: Mapping[str, tuple[str, ...]]
    """The lines that each module always has."""
    all: frozenset[str]
    """All lines."""
    towers: Mapping[str, Tower] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    """The setting that says how many members a tower's stack has."""

    @cached_property
    def modules(self) -> frozenset[str]:
        """The modules that have one of the lines."""
        return frozenset(module for line in self.all for module in modules_around(line))

    @cached_property
    def of_stack(self) -> Mapping[str, Mapping[str, tuple[str, ...]]]:
        """``always`` by the outermost stack around the module, "" outside all stacks."""
        lines_of: dict[str, dict[str, tuple[str, ...]]] = defaultdict(dict)
        for module, lines in self.always.items():
            lines_of[outermost(module)][module] = lines
        return lines_of

    def lacking(
        self, stack: str, present: Set[str], *, strange: Set[str] = frozenset(), is_draft: bool = False
    ) -> Iterator[str]:
        """The lines that a member of a stack (or with "", the whole checkpoint) must have besides those ``present``.

        ``strange`` are further names that no line has. The layers of a draft have lines of their own beside those of
        other layers.
        """
        unknown = (line for line in (*present, *strange) if line not in self.all and not line.endswith("bias"))
        around = ((*modules_around(line), "") for line in unknown)
        others = {next(part for part in parts if part in self.modules or not part) for parts in around} - {""}
        other_layers = {part for part in others if part.endswith("}")}
        others -= other_layers
        if other_layers and not is_draft:  # layers of another class under the same type
            return
        modules = {module for line in present for module in modules_around(line)}
        for module, lines in self.of_stack.get(stack, {}).items():
            for line in lines if module in modules else ():
                if line not in present and not any(is_within(line, part) for part in others):
                    yield line


def is_within(line: str, module: str) -> bool:
    """Whether a line belongs to a module; every line belongs to the module ""."""
    return not module or line.startswith(f"{module}.")


def modules_around(line: str) -> Iterator[str]:
    """Yield the modules around a line, innermost first, without the whole model."""
    module = line.rpartition(".")[0]
    while module:
        yield module
        module = module.rpartition(".")[0]


def outermost(template: str) -> str:
    """A template up to its first index: ``model.layers.{layer}``; empty if it has none."""
    return template[: template.find("}") + 1]


def lines_of(config: Mapping[str, Any]) -> KnownLines | None:
    """The lines of a model of this ``config.json``, by its type or, if it has none, its class; None if not known.

    With towers, they are those of the towers, and those of the language model's own type without its head, which may be
    that of the towers' class.
    """
    towers, inside = known_lines(str(config.get("model_type") or class_of(config))), language_model(config)
    inner = known_lines(inside.model_type) if inside is not None else None
    if towers is not None and (others := [name for name, each in towers.towers.items() if not each.is_known(config)]):
        always = {
            module: tuple(line for line in lines if not any(is_within(line, other) for other in others))
            for module, lines in towers.always.items()
        }
        towers = replace(towers, always=always)
    if inside is None or inner is None:
        return towers
    always = dict(towers.always) if towers is not None else {}
    for module, lines in inner.always.items():
        own = (inside.spelled(line) for line in lines if line.startswith(inside.own_prefix))
        spelled = inside.spelled(f"{module}.")[:-1]
        always[spelled] = (*always.get(spelled, ()), *own)
    inner_lines = frozenset(map(inside.spelled, inner.all))
    return replace(towers, always=always, all=towers.all | inner_lines) if towers else KnownLines(always, inner_lines)


@lru_cache
def known_lines(model_type: str) -> KnownLines | None:
    """The lines of a model type, or None if the file does not have the type."""
    entry = _file().get(model_type)
    if isinstance(entry, str):  # the same as another type's
        return known_lines(entry)
    if entry is None:
        return None
    always = {module: tuple(lines) for module, lines in entry["always"].items()}
    towers = {
        name: Tower(frozenset(tower["classes"]), tuple(tower["sections"]), frozenset(tower["types"]))
        for name, tower in entry.get("towers", {}).items()
    }
    return KnownLines(always, frozenset(entry["also"]).union(*always.values()), towers, entry.get("stacks", {}))


@lru_cache(maxsize=1)
def _file() -> Mapping[str, Any]:
    types: Mapping[str, Any] = json.loads(REQUIRED.read_text(encoding="utf-8"))["types"]
    return types


T = TypeVar("T")
At = tuple[int, ...]
"""The indices in a name, outermost first."""
Missing = tuple[str, At, str]
"""The line of a missing tensor, its indices, and its name as this checkpoint would spell it."""

_RECOMPUTED = (
    ".inv_freq", ".position_ids", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
)  # fmt: skip
"""Frequencies, positions and masks in old checkpoints, sometimes in a few layers only. No loader reads them."""


def check_stored(arrangement: Arrangement, ranks: Sequence[Mapping[str, TensorInfo]], path: FilePath) -> None:
    """Raise MismatchError unless each rank has exactly the tensors, dtypes and shapes of an arrangement."""
    if arrangement.chunks is not None:
        _check_chunks(arrangement, arrangement.chunks, ranks, path)
        return
    for rank, tensors in enumerate(ranks):
        unknown = dict(tensors)
        for stored, shape in arrangement.tensors_of(rank):
            name = stored.name_on(rank)
            info = unknown.pop(name, None)
            if info is None:
                raise MismatchError(f"{path}: tensor '{name}' is missing in the files of rank {rank}")
            if info.shape != shape or info.dtype != stored.dtype:
                raise MismatchError(
                    f"{info.file}: tensor '{name}' is {info.dtype} {list(info.shape)}, rank {rank} of "
                    f"{arrangement.plan.mesh} has {stored.dtype} {list(shape)}"
                )
        if unknown:
            raise MismatchError(f"{path}: tensor '{min(unknown)}' of rank {rank} does not belong to this model")


def _check_chunks(
    arrangement: Arrangement, chunks: Chunks, ranks: Sequence[Mapping[str, TensorInfo]], path: FilePath
) -> None:
    """Raise MismatchError unless the chunks are exactly those of the tensors of an arrangement."""
    unknown = set(chunks)
    for stored in arrangement.stored:
        unknown.discard(stored.name)
        if stored.constant is not None and not chunks.get(stored.name):
            continue  # whoever wrote it did without
        check_tiling(stored.name, chunks[stored.name], stored.whole_shape, path)
        infos = (tensors[stored.name] for tensors in ranks if stored.name in tensors)
        other = next((info for info in infos if info.dtype != stored.dtype), None)
        if other is not None:
            raise MismatchError(f"{other.file}: tensor '{stored.name}' is {other.dtype}, it should be {stored.dtype}")
    if unknown:
        raise MismatchError(f"{path}: tensor '{min(unknown)}' does not belong to this model")


def check_complete(model: Model, where: FilePath) -> tuple[str, ...]:
    """The towers of its type that a language model alone is without; none if it has any of them.

    Raises CheckpointError if tensors are missing, with the first name and the count; never for a partial plan.
    """
    if model.architecture.partial:
        return ()
    present = Present(model)
    wanted = () if present.is_draft else sorted(present.towers)
    if gone := [name for name in wanted if not any(map(present.has, {name, name.removeprefix(ROOT), ROOT + name}))]:
        name = (model.config.get("architectures") or [""])[0]
        raise CheckpointError(
            f"{where}: no tensor of '{present.spelled(gone[0])}' is there, which the class '{name}' of config.json has",
            "fetch the missing files; for the language model alone, give the config.json of such a model: its class "
            "under 'architectures', and no settings of a tower",
        )
    names = sorted(set(_missing(present)), key=_in_order)
    if names:
        one = len(names) == 1
        raise CheckpointError(
            f"{where}: tensor '{names[0]}' is missing"
            + ("" if one else f", and {len(names) - 1:,} more")
            + _untied(model, names)
            + f", by the rules '{model.architecture.name}', config.json and the {len(model.tensors):,} tensors there",
            "fetch the missing files; if it is partial on purpose, pass --plan FILE with 'partial = true'",
        )
    towers = present.known.towers if present.known else {}
    has_any = present.strange or present.is_draft or any(map(present.has, towers))
    return () if has_any else tuple(map(present.spelled, towers))


def _untied(model: Model, names: Iterable[str]) -> str:
    """In words, that a head is among the missing tensors, which the class has and config.json does not tie."""
    rules, config = model.architecture, model.config
    matches = (rules.match(name) for name in names)
    lacks_table = any(match is not None and rules.is_table(match.template) for match in matches)
    is_there = any(map(rules.is_table, model.used_templates & rules.tensors.keys()))
    if not lacks_table or not is_there or head_of(config) != TOKENS or config.get("tie_word_embeddings") is not False:
        return ""
    return f" (the class '{class_of(config)}' has it, and it is not tied: 'tie_word_embeddings' is false)"


def _in_order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """A sort key: layer 2 comes before layer 10, and tensors outside all layers come last."""
    parts = [(int(segment), "") if segment.isdigit() else (-1, segment) for segment in name.split(".")]
    return all(number < 0 for number, _ in parts), parts


def missing(model: Model) -> Iterator[str]:
    """The names of the missing tensors; a name may come more than once."""
    return _missing(Present(model))


def _missing(present: Present) -> Iterator[str]:
    for find in (
        _missing_layers, _missing_in_stacks, _missing_companions, _missing_vocabulary, _missing_always, _missing_towers
    ):  # fmt: skip
        for line, at, name in find(present):
            if not present.is_draft or (at and (present.is_named_draft or present.is_further(_stack(line), at))):
                yield name


# ----------------------------------------------------------------------------------------------- what is there


@lru_cache(maxsize=4096)
def _stack(template: str) -> str:
    """The part of a rule's name up to its last index: ``model.layers.{layer}``."""
    return template[: template.rfind("}") + 1]


@lru_cache(maxsize=4096)
def _axes(stack: str) -> tuple[str, ...]:
    return tuple(segment[1:-1] for segment in stack.split(".") if segment.startswith("{"))


def _outer(stack: str) -> str:
    return _stack(stack.rpartition(".")[0])


def _known_of(model: Model) -> KnownLines | None:
    """The lines of a model's type, if its rules are the built-in ones; of an adapter, none."""
    built_in, config = built_in_file(model.config), model.config
    is_known = built_in is not None and built_in.stem == model.architecture.name and SETTINGS not in config
    return lines_of(config) if is_known else None


class Present:
    """The tensors of a checkpoint, by the line that covers them and the indices in their names.

    A stack is a list of layers or experts, and a member is one of them. ``stacks`` has, for each stack and each member
    that is there, the lines and the inner stacks that occur in this member. ``dealt`` are the axes that are split over
    ranks, without those that may be padded (the vocabulary). A rule for all of a tower (``model.visual.*``) has the
    lines that ``known`` has of it; ``strange`` are the names that have none.
    """

    def __init__(self, model: Model, known: KnownLines | None = None) -> None:
        self.model, self.architecture, self.sizes = model, model.architecture, model.sizes
        self.known = known or _known_of(model)
        self.dealt = self.architecture.dealt - {*self.architecture.pad}
        own = weakref.proxy(self)  # a cycle would keep the places of all tensors until Python looks for garbage
        self.is_dealt, self.counts = cache(partial(Present._is_dealt, own)), cache(partial(Present._counts, own))
        self.lines: dict[str, dict[At, list[BoundTensor]]] = {}
        line_of: dict[Kind, dict[At, list[BoundTensor]]] = {}
        for kind in model.kinds:
            if not kind.template.endswith("*") and not is_of_activations(kind.name):
                line_of[kind] = self.lines.setdefault(kind.template, {})
        open_lines = self.known.all - self.architecture.tensors.keys() if self.known else ()
        names, strange = LineNames(open_lines, self.architecture.prefixes), set[str]()
        for tensor in model.tensors:
            if tensor.kind in line_of:
                line_of[tensor.kind].setdefault(tensor.at, []).append(tensor)
            elif tensor.template.endswith("*") and "{" not in tensor.template:
                line, indices = names.find(tensor.name) or names.find(ROOT + tensor.name) or ("", {})
                if line:
                    self.lines.setdefault(line, {}).setdefault(tuple(indices.values()), []).append(tensor)
                else:
                    strange.add(tensor.kind.pattern)
        self.strange = frozenset(strange)
        self.stacks: dict[str, dict[At, frozenset[str]]] = {}
        with_one_more = cache(lambda inside, inner: inside | {inner})  # most members share what is in them
        for template, places in self.lines.items():
            for stack, inner in _around(template):
                depth, members = len(_axes(stack)), self.stacks.setdefault(stack, {})
                for at in {at[:depth] for at in places}:
                    members[at] = with_one_more(members.get(at, frozenset()), inner)

    def _is_dealt(self, stack: str) -> bool:
        """Whether a tensor of a stack is sharded; a tower is replicated."""
        rules = (rules for template, rules in self.architecture.tensors.items() if template.startswith(f"{stack}."))
        shapes = (shape for each in rules for rule in each for shape in rule.shapes)
        return _axes(stack)[-1] in self.dealt or any(shape.axes & self.dealt for shape in shapes)

    def _counts(self, stack: str, outer: At) -> tuple[int | None, int | None]:
        """Return the number of members of a stack, first without the layers that predict further tokens, then with
        them.

        None if the config does not say.
        """
        axis, indices = _axes(stack)[-1], dict(zip(_axes(stack), outer, strict=False))
        counts = self.sizes.count(axis, indices, without=predicts_further), self.sizes.count(axis, indices)
        check_members(axis, counts[1], len(self.model.tensors))
        return counts

    def needed(self, template: str, at: At) -> bool:
        """Whether a line must have a tensor at these indices, given that it has one at others."""
        rules, weight = self.architecture.tensors.get(template), template.removesuffix(".bias") + ".weight"
        if template.endswith(_RECOMPUTED):
            return False
        has_weight = at in self.lines.get(weight, ()) or weight not in self.architecture.tensors
        if template.endswith(".bias") and not has_weight and not self.needed(weight, at):
            return False  # no module has a bias alone
        if rules is None:
            return True
        indices = dict(zip(_axes(template), at, strict=False))
        try:
            rule = self.sizes.holds(Match(template, rules, indices))
            return rule is not None and not (rule.optional and self.sizes.evaluate(rule.optional, indices))
        except NotationError:  # config.json lacks a setting of the condition
            return False

    def count(self, stack: str, outer: At) -> int | None:
        """Return the number of members that a stack must have.

        None if the config does not say, or if the stack is of MTP layers or of a tower that the class need not have.
        """
        if predicts_further(stack) or self.is_dealt(stack):
            return None if predicts_further(stack) else self.counts(stack, outer)[0]
        demanded = self.known is not None and any(is_within(stack, tower) for tower in self.towers)
        count = setting_at(self.model.config, self.known.stacks.get(stack, "")) if self.known and demanded else None
        if not isinstance(count, int):
            return None
        check_members(stack, count, len(self.model.tensors))
        return count

    @cached_property
    def towers(self) -> frozenset[str]:
        """The towers that the class in config.json has, if the checkpoint spells none of them in another way."""
        known, rules = self.known, self.architecture
        if known is None:
            return frozenset()
        own = (line for line in self.lines if line not in rules.tensors or not rules.is_table(line))
        others = (line for line in (*own, *self.strange) if "." in line and line not in known.all)
        others = (name for name in others if (at := rules.stage_of(name)) is None or at.text != "last")  # no head
        if any(known.modules.isdisjoint(modules_around(line)) for line in others):
            return frozenset()
        return frozenset(name for name, tower in known.towers.items() if tower.is_of(self.model.config))

    def has(self, module: str) -> bool:
        """Whether a module has any tensor."""
        return any(is_within(line, module) for line in (*self.lines, *self.strange))

    def is_further(self, stack: str, at: At) -> bool:
        """Whether a member of a stack, or a member of a stack around it, is an MTP layer."""
        for inner, _ in _around(f"{stack}."):
            outer = at[: len(_axes(inner)) - 1]
            count, whole = self.counts(inner, outer)
            if predicts_further(inner) or (count != whole and (count is None or at[len(outer)] >= count)):
                return True
        return False

    def may_lack(self, stack: str, at: At) -> bool:
        """Whether a member of a stack may be left out: it is an MTP layer of a model that is not a draft."""
        return not self.is_draft and self.is_further(stack, at)

    @cached_property
    def is_named_draft(self) -> bool:
        """Whether the class in config.json is one of MTP layers that are published apart."""
        classes = self.model.config.get("architectures")
        return isinstance(classes, list) and bool(classes) and predicts_further(str(classes[0]).lower())

    @cached_property
    def is_draft(self) -> bool:
        """Whether these are MTP layers published apart: all layers predict further tokens, or the class says so.

        Everything outside these layers belongs to the model for which they draft.
        """
        layers = [(stack, at) for stack, members in self.stacks.items() if len(_axes(stack)) == 1 for at in members]
        return self.is_named_draft or (bool(layers) and all(self.is_further(*layer) for layer in layers))

    def members(self) -> Iterator[tuple[str, At, frozenset[str]]]:
        """The members of the outermost stacks, and as ("", ()) the whole checkpoint, with the lines of each."""
        lines_of: dict[tuple[str, At], set[str]] = defaultdict(set)
        lines = {line: places for line, places in self.lines.items() if not line.endswith(_RECOMPUTED)}
        for template, places in lines.items():
            stack = outermost(template)
            for at in {at[:1] for at in places} if stack else ():
                lines_of[stack, at].add(template)
        yield "", (), frozenset(lines)
        for (stack, at), inside in lines_of.items():
            if not self.may_lack(stack, at):
                yield stack, at, frozenset(inside)

    def places(self, template: str, at: At) -> list[At]:
        """The indices that a line of a member of an outermost stack must have; one set if no size says how many."""
        places = [at]
        for axis in _axes(template)[len(at) :]:
            indices = dict(zip(_axes(template), places[0], strict=False))
            stack = template[: template.find(f"{{{axis}}}") + len(axis) + 2]
            count = self.sizes.count(axis, indices) or self.count(stack, places[0]) or 1
            places = [(*place, index) for place in places for index in range(count)]
        return places

    def as_in(self, inner: str, other: At, at: At) -> Iterator[Missing]:
        """The tensors that a line or stack must have at some indices, as it has them at others."""
        for template, places in self.lines.items():
            if template == inner or template.startswith(f"{inner}."):
                for place, tensors in places.items():
                    if place[: len(other)] == other and self.needed(template, to := (*at, *place[len(at) :])):
                        yield from ((template, to, _moved(tensor.name, other, at)) for tensor in tensors)

    def spelled(self, template: str, at: At = ()) -> str:
        """The name of a tensor as this checkpoint would spell it."""
        first, *further = self.architecture.prefixes or ("",)
        name = filled(template, dict(zip(_axes(template), at, strict=True)))
        if not template.startswith(first):
            return name
        # as the names that begin alike: towers may have another prefix than the language model
        inside = next((m for m in modules_around(template) if any(is_within(line, m) for line in self.lines)), "")
        lines = sorted(self.lines, key=lambda line: not is_within(line, inside))
        there = (next(iter(self.lines[line].values()))[0].name for line in lines)
        starts = [first, *sorted(further, key=len, reverse=True)]
        prefix = next((start for other in there for start in starts if other.startswith(start)), first)
        return prefix + name[len(first) :]


def _around(template: str) -> Iterator[tuple[str, str]]:
    """The stacks around a line, innermost first, each with its content: the line first, then the inner stack."""
    inner, stack = template, _stack(template)
    while stack:
        yield stack, inner
        inner, stack = stack, _outer(stack)


def _moved(name: str, old: At, new: At) -> str:
    """A tensor's name with other indices."""
    segments, position = name.split("."), 0
    for old_index, new_index in zip(old, new, strict=False):
        position = segments.index(str(old_index), position)
        segments[position] = str(new_index)
        position += 1
    return ".".join(segments)


# ------------------------------------------------------------------------------------------------- what is missing


def _missing_layers(present: Present) -> Iterator[Missing]:
    """A tensor of each layer, if the checkpoint has no sharded tensor at all, but for the vocabulary."""
    rules = present.architecture.tensors
    there = (rule for line in present.lines for rule in rules.get(line, ()))
    if any(shape.axes & present.dealt for rule in there for shape in rule.shapes):
        return
    counts = ((line, present.count(_stack(line), ())) for line in rules if len(_axes(_stack(line))) == 1)
    line, count = next(((line, count) for line, count in counts if count), ("", 0))
    yield from ((line, (index,), present.spelled(line, (index,))) for index in range(count))


def _lacking(members: Iterable[tuple[At, frozenset[T]]]) -> Iterator[tuple[At, T, At]]:
    """Yield each member that lacks something, the thing it lacks, and a member that has this and everything that it
    has.
    """
    kinds: dict[frozenset[T], list[At]] = defaultdict(list)
    for at, inside in members:
        kinds[inside].append(at)
    for few, many in itertools.permutations(kinds, 2):
        if few < many:
            yield from ((at, each, kinds[many][0]) for at in kinds[few] for each in many - few)


def _missing_in_stacks(present: Present) -> Iterator[Missing]:
    """The tensors of layers (or experts) that are missing as a whole, as the nearest full layer has them; and those
    that one layer lacks and another has, if the other has all lines of the first.
    """
    for stack, members in present.stacks.items():
        groups: dict[At, set[int]] = defaultdict(set)
        for at in members:
            groups[at[:-1]].add(at[-1])
        for outer, indices in groups.items():
            if present.may_lack(_outer(stack), outer):
                continue
            count = present.count(stack, outer)
            for index in sorted({*range(max(indices) + 1 if count is None else count)} - indices):
                # the nearest of those with most lines shows what it must have
                near = min(indices, key=lambda other: (-len(members[(*outer, other)]), abs(other - index)))
                yield from present.as_in(stack, (*outer, near), (*outer, index))
        if present.is_dealt(stack):
            complete = ((at, inside) for at, inside in members.items() if not present.may_lack(stack, at))
            for at, inner, other in _lacking(complete):
                yield from present.as_in(inner, other, at)


def _missing_companions(present: Present) -> Iterator[Missing]:
    """The companions that a quantized weight has in one layer and lacks in another, if its dtype is the same."""
    first: dict[Kind, tuple[str, str]] = {}  # the name of a tensor of each kind, with all indices set to 0
    for line, places in present.lines.items():
        if max(map(len, places.values())) == 1:
            continue
        for at, tensor in ((at, tensor) for at, tensors in places.items() for tensor in tensors):
            if tensor.kind not in first:
                first[tensor.kind] = _moved(tensor.name, at, (0,) * len(at)), tensor.dtype
        of_places = ((at, frozenset([first[tensor.kind] for tensor in tensors])) for at, tensors in places.items())
        for at, (name, _), _ in _lacking(of_places):
            yield line, at, _moved(name, (0,) * len(at), at)


def _missing_vocabulary(present: Present) -> Iterator[Missing]:
    """The embedding of the vocabulary, and the head if config.json and the names say that the two are not tied.

    A base model has no head, and is saved without the prefix.
    """
    rules, config = present.architecture, present.model.config
    tables = [line for line in rules.tensors if rules.is_table(line) and not line.endswith(("*", "bias"))]
    stored = [line for line in tables if line in present.lines]
    ties = (config.get("tie_word_embeddings"), present.sizes.settings.get("tie_word_embeddings"))
    is_whole = rules.prefixes[:1] != ("",) and any(() in present.lines[line] for line in stored)
    has_head = (
        len(tables) > 1 and head_of(config) == TOKENS and is_whole and ties[0] is False and True not in ties
        and all(present.lines[line][()][0].name.startswith(line.rpartition(".")[0]) for line in stored)
    )  # fmt: skip
    is_none = len(tables) == 1 and is_headless(config)  # the only one is a head
    count = 2 if has_head else 0 if is_none else min(1, len(tables))
    lacking = (line for line in tables if line not in stored and present.needed(line, ()))
    yield from ((line, (), present.spelled(line)) for line in itertools.islice(lacking, max(0, count - len(stored))))


def _missing_always(present: Present) -> Iterator[Missing]:
    """Yield tensors that transformers' class of this model type always has and that are missing, if its rules are built
    in.
    """
    lines = present.known
    if lines is None:
        return
    lacking: dict[tuple[str, frozenset[str]], list[str]] = {}
    for stack, at, stored in present.members():
        if (stack, stored) not in lacking:
            found = lines.lacking(stack, stored, strange=present.strange, is_draft=present.is_draft)
            lacking[stack, stored] = sorted(found)
        for line in lacking[stack, stored]:
            places = present.places(line, at)
            if present.architecture.covers(line) and all(present.needed(line, place) for place in places):
                yield from ((line, place, present.spelled(line, place)) for place in places)


def _missing_towers(present: Present) -> Iterator[Missing]:
    """All tensors of the towers that the class in config.json has, and of which there is none."""
    for tower in sorted(tower for tower in present.towers if not present.has(tower)):
        lines = itertools.chain(*present.known.always.values()) if present.known else ()
        for line in (line for line in lines if is_within(line, tower)):
            yield from ((line, place, present.spelled(line, place)) for place in present.places(line, ()))
