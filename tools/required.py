"""Writes ``reshard/source/required.json`` from transformers' own classes, built on the meta device.

Of a type that transformers has no class for, the published layouts in ``tests/remote`` take their place: each line of
them is required within its module, but biases and a head, which come with a setting. Of a type without either, what all
others of its architecture file require.

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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reshard.formats.errors import ReshardError
from reshard.formats.notation.architecture_files import (
    HEADS,
    built_in_architectures,
    find_architecture,
    language_model,
    read_document,
)
from reshard.formats.notation.format import Types
from reshard.model.binding import bind
from reshard.model.model import FullTensor
from reshard.source.completeness import REQUIRED, Present, is_within, modules_around, outermost
from tools.tables import text_of

LEVELS = {"types": 3}
MEMORY, SECONDS = 16 << 30, 10
"""What one build may take: a setting of 0 may ask for a table without end."""

CLASSES = (
    "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForTextEncoding",
    "AutoModelForSequenceClassification",
)  # fmt: skip
"""Others from which a model may be saved."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint of a model would hold: its config.json, and name, dtype and shape of each tensor."""

    config: Mapping[str, Any]
    tensors: tuple[FullTensor, ...]


def tables() -> dict[str, Any]:
    """The file's content: for each model type its table, or the name of a type that has the same."""
    from tests.zoo import ZOO

    types = sorted({entry.model_type for entry in ZOO.values()})
    return as_entries(
        {model_type: table_of(list(as_read(saved(model_type)))) for model_type in types} | published(types)
    )


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
        saves[str(each.config.get("model_type") or Types.class_of(each.config))].append(
            Saved(each.config, tuple(tensors))
        )
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
    return tables


def is_head(line: str, build: Present) -> bool:
    """Whether a line is of a table behind the layers, which tied weights need not have."""
    stage = build.architecture.stage_of(line)
    return build.architecture.is_table(line) and stage is not None and stage.text == "last"


# ------------------------------------------------------------------------------------------------------- the builds


def saved(model_type: str) -> list[Saved]:
    """The tests' models of a type, and the first of them saved from other classes and with one setting changed."""
    from tests.zoo import ZOO

    given = [(cls, settings) for kind, cls, settings in (e.build.args for e in ZOO.values()) if kind == model_type]
    cls, settings = given[0]
    first = built(model_type, cls, settings)
    given += [(other, settings) for other in CLASSES]
    given += [(cls, changed) for changed in changes(first, settings)]
    found = {frozenset(first.state_dict()): first}
    for other, changed in given[1:]:
        try:
            model = built(model_type, other, changed)
        except Exception:  # the class or the setting is not for this type
            continue
        found.setdefault(frozenset(model.state_dict()), model)
    return [each for model in found.values() for each in written(model)]


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
    """What ``save_pretrained`` would write; nothing if transformers cannot write such a model."""
    from transformers.core_model_loading import revert_weight_conversion

    tied = set(model.all_tied_weights_keys)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    saved = ((key, tensor) for key, tensor in model.state_dict().items() if key not in tied)
    state = {key: tensor for key, tensor in saved if not any(re.search(name, key) for name in ignored)}
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    try:
        tensors = revert_weight_conversion(model, state)
    except (ValueError, RuntimeError):
        return
    yield Saved(config, tuple(FullTensor(name, _dtype(t), tuple(t.shape), "") for name, t in tensors.items()))


def as_read(found: Iterable[Saved]) -> Iterator[Present]:
    """The checkpoints bound to the rules of their type, without those that do not fit them."""
    for each in found:
        try:
            yield Present(bind(find_architecture(each.config, Path()), each.config, each.tensors))
        except ReshardError:
            continue


def _dtype(tensor: Any) -> str:
    return "F32" if tensor.is_floating_point() else "I64"


# ----------------------------------------------------------------------------------------------- what may be changed


def changes(model: Any, settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings with one of them changed, at the top or in the section of the language model."""
    from transformers import PreTrainedConfig

    asked = asked_in_source(type(model))
    general = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    for section, config in sections(model.config):
        asked_here = {**asked, **asked_in_source(type(config))}
        for name, value in config.to_dict().items():
            for other in () if name in general else others(value, asked_here.get(name)):
                if section is None:
                    yield {**settings, name: other}
                else:
                    yield {**settings, section: {**settings.get(section, {}), name: other}}


def sections(config: Any) -> Iterator[tuple[str | None, Any]]:
    """The top of a config as ``None``, and the section of its language model by name."""
    yield None, config
    text = config.get_text_config()
    for name in config.sub_configs:
        if getattr(config, name, None) is text:
            yield name, text


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


def table_of(builds: Sequence[Present]) -> dict[str, Any]:
    """The lines of a type: those that a module of it brings with it, by module, and the others."""
    lines = {line for build in builds for line in build.model.used_templates if is_own(line, build)}
    floats = {kind.template for build in builds for kind in build.model.kinds if kind.dtype == "F32"} & lines
    stacks = {outermost(line) for line in lines} - {""}
    dealt = {stack for stack in stacks if any(build.is_dealt(stack) for build in builds)}
    towers = {tower_of(stack, dealt) for stack in stacks - dealt}
    heads = read_document(HEADS)["tensors"]
    always: dict[str, list[str]] = defaultdict(list)
    for line in sorted(floats - heads.keys()):
        if not line.endswith("*") and not any(is_within(line, tower) for tower in towers):
            modules = demanding(line, lines, {list_of(stack) for stack in dealt})
            module = next((each for each in modules if holds(line, each, builds)), None)
            if module is not None:
                always[module].append(line)
    return {"always": dict(sorted(always.items())), "also": sorted(lines.difference(*always.values()))}


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
    """Whether a line stands in each member of a stack that has the module, where the rules do not excuse it."""
    if not any(is_within(each, module) for build in builds for each in build.lines if each != line):
        return False
    return not any(
        stack == outermost(line)
        and line not in there
        and any(is_within(each, module) for each in there)
        and line in build.architecture.tensors
        and all(build.needed(line, place) for place in build.places(line, at))
        for build in builds
        for stack, at, there in build.members()
    )


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    import transformers

    made_with = {"transformers": transformers.__version__}
    REQUIRED.write_text(text_of({"types": tables()}, made_with, LEVELS), encoding="utf-8")
