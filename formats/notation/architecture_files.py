"""Architecture files: reading one with its bases, finding the one for a ``config.json``, writing one.

The form of a file is described in docs/reference/architecture-files.md. ``formats/architectures/`` has the built-in
files, and ``formats/architectures/bases/`` what several of them share. A user's own plan file has the same form.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from reshard.formats.errors import CheckpointError, PlanError, brief
from reshard.formats.notation.architecture import (
    SETTINGS,
    Architecture,
    architecture_from_document,
    one_or_all,
    to_document,
)
from reshard.formats.notation.tables import newer_than_tables
from reshard.formats.store import FilePath, read_file

MAX_PLAN = 16 << 20
"""Bytes of a plan file."""
BUILT_IN = Path(__file__).parents[1] / "architectures"
BASES = BUILT_IN / "bases"
HEADS = BASES / "heads.toml"
"""Rules that every built-in architecture has beside its own, for heads that replace a language model's."""
STAGES = BASES / "stages.toml"
"""Rules for the tensors behind the layers of most models. Every architecture has them beside its own file."""


def load_architecture(path: Path) -> Architecture:
    """Read an architecture file, with its bases. Raises PlanError that names the file and the line at fault."""
    return architecture_of(read_document(path), path)


def architecture_of(document: Mapping[str, Any], path: Path) -> Architecture:
    """The architecture of a file's parsed form, with its bases. Raises PlanError."""
    stated = document.get("tensors")
    architecture = _read(with_bases(document, path), path)
    return replace(architecture, inherited=frozenset(architecture.tensors.keys() - set(stated or ())))


def read_document(path: Path) -> dict[str, Any]:
    """The parsed form of a file as it stands, without its bases. Raises PlanError."""
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


@cache
def _shared(path: Path) -> Mapping[str, Any]:
    """The parsed form of a file that others build on. It is the same for all of them: they make copies."""
    return read_document(path)


# ------------------------------------------------------------------------------------------------------------ bases

_TABLES = ("sizes", "parallel", "config", "tensors", "modules", "stages", "float32")
_OWN = ("name", "model_types", "classes")
"""Keys that hold for a file alone, and not for those that build on it."""
INSIDE = "language_model"
"""The key of a file for towers around a language model of any type. Its value is the base to take if config.json names
no type.
"""


def with_bases(document: Mapping[str, Any], path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file's parsed form with what it takes over from its bases, key by key: the later base wins, the file itself
    wins over all. A key that is ``false`` is removed. In names of a base, its first prefix is replaced by the file's
    own. ``above`` are the files that build on it. Raises PlanError.
    """
    merged, above = dict[str, Any](), (*above, path)
    for base in _bases(document, path):
        if base in above:
            way = " -> ".join(file.stem for file in (*above[above.index(base) :], base))
            raise PlanError(f"plan file {path}: its bases go round in a circle: {way}")
        whole: Mapping[str, Any] = with_bases(_shared(base), base, above)
        if base.stem == document.get(INSIDE):
            whole, document = _inside(whole, document)
        merged = _merged(merged, {key: value for key, value in whole.items() if key not in _OWN}, base)
    return _merged(merged, document, path)


def _bases(document: Mapping[str, Any], path: Path) -> list[Path]:
    names = document.get("base", [])
    if INSIDE in document and isinstance(names, list):
        names = [document[INSIDE], *names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PlanError(f"plan file {path}: 'base' is a list of names, such as [\"llama\"], not {brief(names)}")
    files = _base_files()
    for name in names:
        if name not in files:
            near = difflib.get_close_matches(name, files, n=3, cutoff=0.4)
            hint = f"the nearest that there are: {', '.join(near)}" if near else None
            raise PlanError(f"plan file {path}: there is no base {brief(name)}", hint)
    return [files[name] for name in names]


@lru_cache(maxsize=1)
def _base_files() -> Mapping[str, Path]:
    """Return the files that an architecture file may build on, by name: the shared parts, and the built-in
    architectures.
    """
    return {path.stem: path for path in (*sorted(BUILT_IN.glob("*.toml")), *sorted(BASES.glob("*.toml")))}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any], path: Path) -> dict[str, Any]:
    merged = {**below, **{key: value for key, value in above.items() if key not in {"base", INSIDE, *_TABLES}}}
    for name in (name for name in _TABLES if name in below or name in above):
        if not isinstance(above.get(name, {}), dict):
            merged[name] = above[name]  # refused with the rest of the form
            continue
        inherited, stated = below.get(name, {}), above.get(name, {})
        if name in {"tensors", "modules", "stages"}:
            inherited = _respelled(inherited, _first_prefix(below), _first_prefix(merged))
        for key, value in stated.items():
            if value is False and key not in inherited:
                raise PlanError(
                    f"plan file {path}: '{key} = false' under [{name}] removes nothing: no base has it",
                    'as an expression, write it in quotes: "False"',
                )
        merged[name] = {key: value for key, value in {**inherited, **stated}.items() if value is not False}
    return merged


def _first_prefix(document: Mapping[str, Any]) -> str:
    """Return the first of a file's prefixes, with which it spells its own names; "" if it has none."""
    prefixes = document.get("prefixes")
    return prefixes[0] if isinstance(prefixes, list) and prefixes and isinstance(prefixes[0], str) else ""


def _respelled(lines: Mapping[str, Any], old: str, after: str) -> Mapping[str, Any]:
    """Lines whose names start with another prefix."""
    if old in {"", after}:
        return lines
    return {after + name.removeprefix(old) if name.startswith(old) else name: at for name, at in lines.items()}


# ---------------------------------------------------------------------------------------- a language model inside


_MODEL, _HEAD = "model.", "lm_head.weight"


def _inside(whole: Mapping[str, Any], around: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The rules of a language model as they hold within towers, and the file of the towers around it.

    What stands beside its layers, such as its head, is beside them in each place that it may have
    (``language_model.lm_head``). transformers' own classes with towers make a head of their own, whatever the language
    model calls its head. The towers have the places of a language model that calls itself otherwise (``transformer.``).
    """
    first_prefix, tensors = _first_prefix(whole), {_HEAD: "vocab hidden", **whole.get("tensors", {})}
    prefixes = around.get("prefixes", [])
    places = [prefix.removesuffix(_MODEL) for prefix in prefixes if prefix.endswith(f".{_MODEL}")]
    outer = {name: line for name, line in tensors.items() if first_prefix and not name.startswith(first_prefix)}
    spelled = {place + name: line for place in places for name, line in outer.items()}
    if first_prefix not in {"", _MODEL}:
        around = {**around, "prefixes": [*prefixes, *(place + first_prefix for place in places)]}
    return {**whole, "tensors": {**tensors, **spelled}}, around


@dataclass(frozen=True)
class Inside:
    """The language model of a model with towers: its type and its file, and the first prefixes of both files."""

    model_type: str
    file: Path
    own_prefix: str
    prefix: str
    towers: frozenset[str]
    """The lines that the file of the towers has itself."""

    def spelled(self, template: str) -> str:
        """A line of the language model's file, as the model with towers has it."""
        is_within = template.startswith(self.own_prefix)
        return self.prefix + template.removeprefix(self.own_prefix) if is_within else template


def language_model(config: Mapping[str, Any]) -> Inside | None:
    """The language model inside, if the file for a ``config.json`` is for towers, and the model's type has a file."""
    path = built_in_file(config)
    if path is None or INSIDE not in (document := _shared(path)):
        return None
    inner = config
    for key in _built_in(path).section(config):
        inner = inner[key]
    file = built_in_file({"model_type": inner.get("model_type")}) if inner is not config else None
    if file is None or INSIDE in (text := _shared(file)):
        return None
    towers = with_bases({key: value for key, value in document.items() if key != INSIDE}, path)
    prefix = _first_prefix(with_bases(text, file))
    return Inside(inner["model_type"], file, prefix, _first_prefix(document), frozenset(towers.get("tensors", ())))


# ------------------------------------------------------------------------------------------------- the built-in ones


@lru_cache(maxsize=1)
def built_in_architectures() -> Mapping[str, Path]:
    """The file of each model type that has one."""
    file_of: dict[str, Path] = {}
    for path in sorted(BUILT_IN.glob("*.toml")):
        for model_type in _shared(path).get("model_types", ()):
            if model_type in file_of:
                raise PlanError(f"model type '{model_type}' stands in {file_of[model_type].name} and in {path.name}")
            file_of[model_type] = path
    return file_of


def find_architecture(config: Mapping[str, Any], where: FilePath) -> Architecture:
    """The built-in architecture for a ``config.json``, with the rules for heads of any kind.

    Raises PlanError with the nearest known model types.
    """
    model_type = config.get("model_type")
    hint = "'reshard plan SOURCE --draft FILE' writes a draft of its rules; check it, pass it with --plan FILE"
    path = built_in_file(config)
    if path is None and "_diffusers_version" in config:
        raise PlanError(
            f"{where} is a model of diffusers ({brief(config.get('_class_name'))}), which is not a language model",
            "give the folder of a model that transformers loads, such as the pipeline's text_encoder",
        )
    if path is None and not isinstance(model_type, str):
        raise PlanError(f"{where / 'config.json'} has no model_type", hint)
    if path is None:
        near = difflib.get_close_matches(str(model_type), built_in_architectures(), n=3, cutoff=0.4)
        names = f" (nearest known: {', '.join(near)})" if near else ""
        newer = f"; {newer}" if (newer := newer_than_tables(config)) else ""
        raise PlanError(f"unknown model_type '{model_type}' in {where / 'config.json'}{names}{newer}", hint)
    inside = language_model(config)
    architecture = _built_in(path, inside.file.stem if inside else None)
    if SETTINGS not in config:
        return architecture
    from reshard.formats.notation.adapters import adapter_architecture  # rarely needed

    return adapter_architecture(architecture, config, where)


@cache  # there are more of them than a cache keeps by default
def _built_in(path: Path, inside: str | None = None) -> Architecture:
    """The architecture of a file; if it is for towers, with a language model of the file ``inside``."""
    document = with_bases(read_document(path) | ({INSIDE: inside} if inside else {}), path)
    return _read({**document, "tensors": {**_shared(HEADS)["tensors"], **document["tensors"]}}, path)


def _read(document: dict[str, Any], path: Path) -> Architecture:
    """The architecture of a form with its bases, with what all files say of the stages behind its own lines."""
    if isinstance(stages := document.get("stages", {}), dict):  # else it is refused with the rest of the form
        common = _shared(STAGES)
        respelled = _respelled(common["stages"], _first_prefix(common), _first_prefix(document))
        document = {**document, "stages": {**respelled, **stages}}
    return architecture_from_document(document, path.stem, str(path))


def built_in_file(config: Mapping[str, Any]) -> Path | None:
    """The file for a ``config.json``: that of its model type or, if it has none, of its class (``architectures``)."""
    if isinstance(config.get("model_type"), str):
        return _file_with("model_types", (config["model_type"],))
    classes = config.get("architectures")
    named = classes[:8] if isinstance(classes, list) else ()
    return _file_with("classes", tuple(name for name in named if isinstance(name, str)))


@cache
def _file_with(key: str, names: tuple[str, ...]) -> Path | None:
    """Parses the files that mention a name: parsing all takes longer than planning."""
    for path in sorted(BUILT_IN.glob("*.toml")) if names else ():
        text = path.read_text(encoding="utf-8")
        if any(json.dumps(name) in text and name in _shared(path).get(key, ()) for name in names):
            return path
    return None


def to_toml(architecture: Architecture) -> str:
    """The text of one plain file, without bases, in the form that ``load_architecture`` reads."""
    import tomli_w

    modules = {name: one_or_all(rules) for name, rules in architecture.modules.items()}
    document = to_document(architecture)
    tensors = document.pop("tensors")  # behind the modules: most of a file, and what a person adds lines to
    text: str = tomli_w.dumps({**document, **({"modules": modules} if modules else {}), "tensors": tensors})
    return text
