"""Writes ``reshard/source/required.json`` from transformers' own classes, built on the meta device.

Of a type that transformers has no class for, the published layouts in ``tests/remote`` take their place: each line of
them is required within its module, but biases and a head, which come with a setting. Of a type without either, what all
others of its architecture file require.

The towers of a type are what is not of its language model: the module of transformers that has the settings of the
text, and the head. Where one rule covers a tower (``model.visual.*``), the lines are the names, with an index for each
list whose length a setting changes.

A line is required within a module if every build that has the module has the line. The builds of a type are the tests'
small models of it, and each of these with one setting changed: those settings on which a condition in the source of the
class depends. A build that fails, or whose names have no rule, is left out.

python -m tools.required
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import json
import re
import resource
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from reshard.formats.errors import ReshardError
from reshard.formats.notation.architecture import ROOT
from reshard.formats.notation.architecture_files import (
    HEADS,
    built_in_architectures,
    find_architecture,
    language_model,
    read_document,
)
from reshard.formats.notation.heads import class_of
from reshard.model.binding import bind
from reshard.model.model import BoundTensor, FullTensor, Model
from reshard.source.completeness import REQUIRED, KnownLines, Present, is_within, modules_around, outermost
from tools.tables import text_of

LEVELS = {"types": 3}
MEMORY, SECONDS = 16 << 30, 10
"""Limits of one build, in bytes and seconds: a setting of 0 may ask for an endless table."""

CLASSES = (
    "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForTextEncoding",
    "AutoModelForSequenceClassification",
)  # fmt: skip
"""Others from which a model may be saved."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that a model would be saved as: its config.json, and name, dtype and shape of each tensor."""

    config: Mapping[str, Any]
    tensors: tuple[FullTensor, ...]
    cls: str = ""
    changed: tuple[str, Any] = ("", None)
    """The setting in which its config is not the first one, and its value."""
    towers: frozenset[str] = frozenset()
    """The names of the tensors that are not of the language model."""
    sections: Mapping[str, tuple[frozenset[str], str]] = field(default_factory=dict)
    """The names that are of each section of the config; and its model type, if it may have another."""


def tables() -> dict[str, Any]:
    """The file's content: for each model type its table, or the name of a type that has the same."""
    from tests.zoo import ZOO

    types = sorted({entry.model_type for entry in ZOO.values()})
    with ProcessPoolExecutor(initializer=limit) as pool:
        tables = dict(zip(types, pool.map(table_of_type, types), strict=True))
    return as_entries(tables | published(types))


def table_of_type(model_type: str) -> Mapping[str, Any]:
    """The table of a type that transformers has a class for."""
    return table_of(list(as_read(saved(model_type))))


def limit() -> None:
    """Bounds the memory of a process."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def with_kin(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The tables, and of each other type what all types of its architecture file have in common."""
    found, file_of = dict(tables), built_in_architectures()
    for kind in sorted(file_of.keys() - tables.keys()):
        others = [table for other, table in tables.items() if file_of.get(other) == file_of[kind]]
        places = [{(module, line) for module, lines in of["always"].items() for line in lines} for of in others]
        always: dict[str, list[str]] = defaultdict(list)
        for module, line in sorted(set.intersection(*places) if places else ()):
            always[module].append(line)
        lines = {line for of in others for line in (*itertools.chain(*of["always"].values()), *of["also"])}
        if others:
            found[kind] = {"always": dict(always), "also": sorted(lines.difference(*always.values()))}
    return found


def as_entries(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each table, or the name of the first type that has the same."""
    first: dict[str, str] = {}
    same = {kind: first.setdefault(json.dumps(tables[kind]), kind) for kind in sorted(tables)}
    return {kind: tables[kind] if same[kind] == kind else same[kind] for kind in same}


def published(others: Collection[str]) -> dict[str, Mapping[str, Any]]:
    """The tables of the types of published layouts, but for ``others``."""
    from tests.remote import REMOTE

    saves: dict[str, list[Saved]] = defaultdict(list)
    for each in REMOTE.values():
        tensors = (FullTensor(name, "F32", shape, "") for name, shape in each.tensors.items())
        saves[str(each.config.get("model_type") or class_of(each.config))].append(Saved(each.config, tuple(tensors)))
    tables = {}
    for kind in sorted(saves.keys() - {*others}):
        if not (builds := list(as_read(saves[kind]))):
            continue
        heads = {line for each in builds for line in each.model.used_templates if is_head(line, each)}
        table = table_of(builds)
        tables[kind] = {"always": {}, "also": table["also"]}
        for module, lines in table["always"].items():
            free = [line for line in lines if line.endswith("bias") or line in heads]
            tables[kind]["always"] |= {module: [line for line in lines if line not in free]}
            tables[kind]["also"] = sorted({*tables[kind]["also"], *free})
        if towers := published_towers(builds):
            tables[kind]["towers"] = dict(sorted(towers.items()))
    return tables


def published_towers(builds: Sequence[Build]) -> dict[str, Any]:
    """The towers of a published layout that one rule covers each, if its config.json has a section for them."""
    found = dict[str, Any]()
    for build in builds:
        settings = (key for key, value in build.model.config.items() if isinstance(value, dict))
        sections = [key for key in settings if re.search("vision|visual|vit_|audio", key)]
        for line in build.model.used_templates if sections else ():
            if line.endswith(".*") and "{" not in line and line not in read_document(HEADS)["tensors"]:
                kinds = [key for key in sections if ("audio" in key) == ("audio" in line)]
                found[line.removesuffix(".*")] = {"classes": [], "sections": kinds or sections, "types": []}
    return found


def is_head(line: str, build: Present) -> bool:
    """Whether a line is of a table behind the layers, which a model with tied weights need not have."""
    stage = build.architecture.stage_of(line)
    return build.architecture.is_table(line) and stage is not None and stage.text == "last"


# ------------------------------------------------------------------------------------------------------- the builds


def saved(model_type: str) -> list[Saved]:
    """The tests' models of a type, and the first of them saved from other classes and with one setting changed."""
    from tests.zoo import ZOO

    given = [(cls, settings) for kind, cls, settings in (e.build.args for e in ZOO.values()) if kind == model_type]
    cls, settings = given[0]
    first = built(model_type, cls, settings)
    as_given = [(cls, settings, ("", None)) for cls, settings in given]
    as_given += [(other, settings, ("", None)) for other in CLASSES]
    as_given += [(cls, changed, change) for changed, change in changes(first, settings)]
    found = {frozenset(first.state_dict()): (first, ("", None))}
    for other, changed, change in as_given[1:]:
        try:
            model = built(model_type, other, changed)
        except Exception:  # the class or the setting is not for this type
            continue
        found.setdefault(frozenset(model.state_dict()), (model, change))
    return [replace(each, changed=change) for model, change in found.values() for each in written(model)]


def built(model_type: str, cls: str, settings: Mapping[str, Any]) -> Any:
    """A model without numbers. Raises what transformers raises if the class or the settings do not fit."""
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    given: Any = getattr(transformers, cls)
    config = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(dict(settings)))
    if cls.startswith("Auto"):
        given = given._model_mapping[type(config)]
        given = given[0] if isinstance(given, tuple) else given
    with limited(), torch.device("meta"), no_init_weights():
        return given(config)


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError after some seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def written(model: Any) -> Iterator[Saved]:
    """Yield the checkpoint that ``save_pretrained`` would write; nothing if transformers cannot write such a model."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(model.all_tied_weights_keys)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    saved = ((key, tensor) for key, tensor in model.state_dict().items() if key not in tied)
    state = {key: tensor for key, tensor in saved if not any(re.search(name, key) for name in ignored)}
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    towers, sections = frozenset[str](), dict[str, tuple[frozenset[str], str]]()
    try:
        tensors = revert_weight_conversion(model, dict(state))
        for section, modules in modules_of(model).items():
            names = {key for key in state if any(is_within(key, module) for module in modules)}
            inside = frozenset(revert_weight_conversion(model, {key: state[key] for key in names}))
            if section is None:
                towers = frozenset(tensors) - inside
            else:
                sections[section] = inside, free_type(model.config, section)
    except (ValueError, RuntimeError):
        return
    saved = tuple(FullTensor(name, _dtype(t), tuple(t.shape), "") for name, t in tensors.items())
    yield Saved(config, saved, type(model).__name__, towers=towers, sections=sections)


def modules_of(model: Any) -> dict[str | None, list[str]]:
    """The modules with the settings of each section of a config; under ``None``, those of the language model.

    Nothing of a model without towers.
    """
    text = model.config.get_text_config()
    paths = {id(config): path for path, config in sections(model.config) if path}
    found: dict[str | None, list[str]] = defaultdict(list)
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        if config is text and config is not model.config:
            found[None].append(name)
        elif id(config) in paths and hasattr(module, "save_pretrained"):
            found[".".join(paths[id(config)])].append(name)
    if None not in found:
        return {}
    with suppress(NotImplementedError, AttributeError):
        head = model.get_output_embeddings()
        found[None] += [name for name, module in model.named_modules() if module is head]
    return found


def free_type(config: Any, section: str) -> str:
    """The model type of a section that may have any; empty if the class says which."""
    from transformers import AutoConfig

    *outer_keys, key = section.split(".")
    for each in outer_keys:
        config = getattr(config, each)
    return str(getattr(config, key).model_type) if config.sub_configs.get(key) is AutoConfig else ""


def as_read(found: Iterable[Saved]) -> Iterator[Build]:
    """The checkpoints bound to the rules of their type, without those that do not fit them, and those in which a rule
    for all of a tower covers names that the first checkpoint has with a root.
    """
    bound = list[tuple[Saved, Model]]()
    for each in found:
        with suppress(ReshardError):
            model = bind(find_architecture(each.config, Path()), each.config, each.tensors)
            first = bound[0][1].used_templates if bound else ()
            if not any(line.endswith("*") and ROOT + line in first for line in model.used_templates):
                bound.append((each, model))
    builds = [
        {dotted(own_name(tensor, model)) for tensor in model.tensors if tensor.name in each.towers}
        for each, model in bound
    ]
    known = KnownLines({}, frozenset(in_general(builds)) - {""})
    for each, model in bound:
        present = Build(model, known)
        present.saved = each
        yield present


class Build(Present):
    """A checkpoint, with what is known of how it was made."""

    saved: Saved

    @cached_property
    def tower_lines(self) -> frozenset[str]:
        """The lines of its towers."""
        return self.lines_within(self.saved.towers)

    def lines_within(self, names: Set[str]) -> frozenset[str]:
        """The lines of some tensors, without heads and tables of the vocabulary."""
        lines = {line for line, places in self.lines.items() for found in places.values() if found[0].name in names}
        tables = {line for line in lines & self.architecture.tensors.keys() if self.architecture.is_table(line)}
        dealt = {line for line in lines if outermost(line) and self.is_dealt(outermost(line))}
        return frozenset(lines - read_document(HEADS)["tensors"].keys() - tables - dealt)


def own_name(tensor: BoundTensor, model: Model) -> str:
    """The name of a tensor that a rule for all of a module covers, with the architecture's first prefix; else empty."""
    stem, (first, *others) = tensor.template[:-1], model.architecture.prefixes or ("",)
    if not tensor.template.endswith(".*") or "{" in stem or tensor.template in read_document(HEADS)["tensors"]:
        return ""
    spelled = [prefix + stem.removeprefix(first) for prefix in (first, *others) if stem.startswith(first)] or [stem]
    name = model.architecture.stated(tensor.name)
    spelled = [each for each in spelled if name.startswith(each)]
    return stem + name[len(max(spelled, key=len)) :]


Dotted = tuple[str, ...]


def dotted(name: str) -> Dotted:
    """The parts of a name."""
    return tuple(name.split("."))


def in_general(builds: Sequence[Set[Dotted]], number: int = 1) -> Iterator[str]:
    """The names of several builds, with an index for the numbers of a list whose length differs, or whose members are
    alike. Other numbers, as those of a sequence of some modules, stay.
    """
    heads = {name[0] for build in builds for name in build if name and name[0]}
    members = [{int(name[0]) for name in build if name and name[0].isdigit()} for build in builds]
    if any(members) and is_list(builds, [each for each in members if each]):
        inside = [{name[1:] for name in build if name and name[0].isdigit()} for build in builds]
        for rest in in_general(inside, number + 1):
            yield f"{{n{number}}}.{rest}" if rest else f"{{n{number}}}"
        heads = {head for head in heads if not head.isdigit()}
    for head in sorted(heads):
        inside = [{name[1:] for name in build if name and name[0] == head} for build in builds]
        yield from (f"{head}.{rest}" if rest else head for rest in in_general(inside, number))
    if any(() in build for build in builds):
        yield ""


def is_list(builds: Sequence[Set[Dotted]], members: Sequence[Set[int]]) -> bool:
    """Whether numbers in names count the members of a list, and do not name modules that differ."""
    if any(each != {*range(len(each))} for each in members) or max(map(len, members)) < 2:
        return False
    of_member: dict[tuple[int, str], set[Dotted]] = defaultdict(set)
    for at, build in enumerate(builds):
        for name in build:
            if name and name[0].isdigit():
                of_member[at, name[0]].add(name[1:])
    kinds = {(at, frozenset(rest)) for (at, _), rest in of_member.items()}
    return len({*map(len, members)}) > 1 or len(kinds) < len(of_member)


def _dtype(tensor: Any) -> str:
    return "F32" if tensor.is_floating_point() else "I64"


# ----------------------------------------------------------------------------------------------- what may be changed


def changes(model: Any, settings: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], tuple[str, Any]]]:
    """The settings with one of them changed, at the top or in a section, or without a section; and the change."""
    from transformers import PreTrainedConfig

    asked = asked_in_source(type(model))
    general = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    for keys, config in sections(model.config):
        asked_here = {**asked, **asked_in_source(type(config))}
        if keys:
            yield with_setting(settings, keys, None), (".".join(keys), None)
        for name, value in config.to_dict().items():
            for other in () if name in general else others(value, asked_here.get(name)):
                yield with_setting(settings, (*keys, name), other), (".".join((*keys, name)), other)


def with_setting(settings: Mapping[str, Any], keys: Sequence[str], value: Any) -> Mapping[str, Any]:
    """The settings with another value at some keys."""
    first, *rest = keys
    return {**settings, first: with_setting(settings.get(first) or {}, rest, value) if rest else value}


def sections(config: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A config, and each section inside, with the keys that lead to it."""
    yield keys, config
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if hasattr(inner, "sub_configs"):
            yield from sections(inner, (*keys, name))


def others(value: Any, constants: set[str] | None) -> Iterable[Any]:
    """Other values of a setting; ``constants`` are those that it is compared with, None if no condition asks for it."""
    if isinstance(value, bool):
        return (not value,)
    if constants is None:
        return ()
    if isinstance(value, (int, float)):
        return [other for other in (None, 0, 7) if other != value]
    if isinstance(value, str):
        return sorted(constants - {value})
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return [[each] * len(value) for each in sorted({*value, *constants})]
    return (4, *sorted(constants)) if value is None else ()


def asked_in_source(cls: type) -> Mapping[str, set[str]]:
    """The names on which a condition (or the length of a list) depends in the files beside a class."""
    folder = Path(inspect.getfile(cls)).parent
    found: dict[str, set[str]] = defaultdict(set)
    for path in (*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py")):
        for name, constants in asked_in(path).items():
            found[name] |= constants
    return found


@cache
def asked_in(path: Path) -> Mapping[str, set[str]]:
    """The names in the conditions of a file, each with the strings that stand in the same condition."""
    found: dict[str, set[str]] = defaultdict(set)
    for condition in conditions(ast.parse(path.read_text(encoding="utf-8"))):
        parts = list(ast.walk(condition))
        constants = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
        for part in parts:
            if isinstance(part, (ast.Attribute, ast.Name)):
                found[part.attr if isinstance(part, ast.Attribute) else part.id] |= constants
    return found


def conditions(node: ast.AST) -> Iterator[ast.AST]:
    """The conditions in a piece of code that may decide what a model is made of, and the lengths of its lists."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and ("forward" in child.name or "validate" in child.name):
            continue
        if isinstance(child, (ast.If, ast.IfExp)):
            yield child.test
        elif isinstance(child, (ast.BoolOp, ast.Compare)):
            yield child
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id == "range":
            yield from child.args
        yield from conditions(child)


# -------------------------------------------------------------------------------------------------- what is required


def table_of(builds: Sequence[Build]) -> dict[str, Any]:
    """The lines of a type: those that a module of it brings with it, by module, and the others; and its towers."""
    used = {line for build in builds for line in build.model.used_templates if is_own(line, build)}
    of_towers = frozenset[str]().union(*(build.tower_lines for build in builds))
    lines = used | of_towers
    floats = {
        line
        for build in builds
        for line, places in build.lines.items()
        if any(tensor.kind.dtype == "F32" for tensors in places.values() for tensor in tensors)
    } & lines
    stacks = {outermost(line) for line in lines} - {""}
    dealt = {stack for stack in stacks if any(build.is_dealt(stack) for build in builds)}
    unknown = {tower_of(stack, dealt) for stack in stacks - dealt if not any(is_within(e, stack) for e in of_towers)}
    heads = read_document(HEADS)["tensors"]
    towers, counts = towers_of(builds, of_towers), counts_of(builds, of_towers)
    always: dict[str, list[str]] = defaultdict(list)
    for line in sorted(floats - heads.keys()):
        if not line.endswith("*") and not any(is_within(line, tower) for tower in unknown):
            modules = demanding(line, lines, {list_of(stack) for stack in dealt})
            if line in of_towers:  # of a language model alone, none is demanded
                modules = (each for each in modules if any(is_within(f"{each}.", tower) for tower in towers))
            module = next((each for each in modules if holds(line, each, builds)), None)
            if module is not None:
                always[module].append(line)
    table: dict[str, Any] = {"always": dict(sorted(always.items()))}
    table["also"] = sorted(lines.difference(*always.values()))
    return table | ({"towers": dict(sorted(towers.items()))} if towers else {}) | ({"stacks": counts} if counts else {})


def towers_of(builds: Sequence[Build], of_towers: Set[str]) -> dict[str, Any]:
    """The towers of a type: the classes and the sections of a config that bring each with them.

    A tower is the largest module that has nothing of the language model.
    """
    text = {module for build in builds for line in build.lines.keys() - of_towers for module in modules_around(line)}
    text |= {stack for build in builds for stack in build.stacks if build.is_dealt(stack)}
    around = (reversed([module for module in modules_around(line) if module not in text]) for line in of_towers)
    found: dict[str, Any] = {}
    for tower in sorted({module for modules in around for module in itertools.islice(modules, 1)}):
        holding = [build for build in builds if build.has(tower)]
        own = {
            (section, kind)
            for build in holding
            for section, (names, kind) in build.saved.sections.items()
            if any(is_within(line, tower) for line in build.lines_within(names))
        }
        without = [build for build in builds if build not in holding]
        named = {build.saved.changed[0] for build in without if build.saved.changed[1] is None}
        needed = {section for build in builds for section in build.saved.sections if section in named}
        sections = sorted({section for section, _ in own}) or sorted(needed or every_section(builds))
        others = {build.saved.cls for build in without if build.saved.changed[1] or not build.saved.changed[0]}
        found[tower] = {
            "classes": sorted({build.saved.cls for build in holding} - others),
            "sections": sections,
            "types": sorted({kind for _, kind in own} - {""}) if len(sections) == 1 else [],
        }
    return {tower: entry for tower, entry in found.items() if entry["sections"]}


def every_section(builds: Sequence[Build]) -> set[str]:
    """The sections of towers in the configs of some builds."""
    return {section for build in builds for section in build.saved.sections}


def counts_of(builds: Sequence[Build], of_towers: Set[str]) -> dict[str, str]:
    """The setting that says how many members each stack of a tower has: the number changes with it."""
    found: dict[str, str] = {}
    for stack in sorted({outermost(line) for line in of_towers} - {""}):
        for build in builds:
            name, value = build.saved.changed
            count = len(build.stacks.get(stack, ()))
            before = [len(other.stacks.get(stack, ())) for other in builds if other.saved.changed[0] != name]
            if count and count == value and not isinstance(value, bool) and count not in before:
                found[stack] = name
    return found


def is_own(line: str, build: Present) -> bool:
    """Whether a line is of the type itself, not of a language model inside, which has a table of its own.

    A draft, which is known by its class, has other layers than that.
    """
    inside = language_model(build.model.config)
    return inside is None or line in inside.towers or "model_type" not in build.model.config


def tower_of(stack: str, dealt: Set[str]) -> str:
    """The largest module with a stack of layers, but without any that is sharded."""
    return next(
        module
        for module in reversed([*modules_around(f"{stack}.")])
        if not any(is_within(each, module) for each in dealt)
    )


def list_of(stack: str) -> str:
    """The module that has a stack of layers: ``model`` of ``model.layers.{layer}``."""
    return outer(outer(stack))


def outer(module: str) -> str:
    """The module around another."""
    return module.rpartition(".")[0]


def demanding(line: str, lines: Set[str], roots: Set[str]) -> Iterator[str]:
    """The modules that may bring a line with them: those around it, the largest first, then those beside it.

    A model saved without its tower lacks all of the tower: a part of it is brought by the tower alone.
    """
    stack, leaf = outermost(line), outer(line)
    around = [*reversed(list(modules_around(line)))]
    if stack:
        around = [each for each in around if is_within(f"{each}.", stack)]
    else:
        above = {module for root in roots for module in modules_around(f"{root}.")}
        around = [each for each in around if each not in above or (each in roots and each == outer(leaf))]
    modules = sorted({module for other in lines for module in modules_around(other)})
    beside = [each for each in modules if outer(each) in around and each not in around]
    yield from (each for each in around if each != leaf)
    yield from sorted(beside, key=lambda each: -each.count("."))
    if leaf in around:
        yield leaf


def holds(line: str, module: str, builds: Sequence[Present]) -> bool:
    """Whether each member of a stack that has the module has the line too, unless the rules excuse it."""
    if not any(is_within(each, module) for build in builds for each in build.lines if each != line):
        return False
    return not any(
        stack == outermost(line)
        and line not in there
        and any(is_within(each, module) for each in there)
        and build.architecture.covers(line)
        and all(build.needed(line, place) for place in build.places(line, at))
        for build in builds
        for stack, at, there in build.members()
    )


if __name__ == "__main__":
    import transformers

    made_with = {"transformers": transformers.__version__}
    REQUIRED.write_text(text_of({"types": tables()}, made_with, LEVELS), encoding="utf-8")
