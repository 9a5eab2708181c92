"""The names that the tensors of a source have in an output: the source's, published ones or those of modules."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.format import MODULES, PUBLISHED, SOURCE_NAMES
from reshard.formats.notation.spellings import Spellings
from reshard.source.source import Source


def published_names(source: Source) -> dict[str, str]:
    """The published names of tensors that have other ones, by all lines of the model's type, and the first names of
    tied tensors by their second ones: a published checkpoint has each tensor once.

    Raises CheckpointError if they are not known, and for a tensor that is several in published checkpoints.
    """
    model, seconds = source.model, dict(source.aliases)
    with suppress(PlanError):
        architecture = find_architecture(model.config, source.path)
        spellings = Spellings(architecture, model.config)
        are_published = spellings.are_published(kind.name for kind in model.kinds)
        why = spellings.refusal if not are_published else None
        if joined := next((kind.name for kind in model.kinds if spellings.is_joined(kind.name)), None):
            why = f"'{joined}' is a tensor of transformers' modules, and not all names here can be read as theirs"
        if why is not None:
            raise CheckpointError(f"{source.path}: {why}", "leave out --names: the names stay")
        spell = architecture.stated if are_published else spellings.published
        if not all(spell(kind.name) in {kind.name, None} for kind in model.kinds):
            published = ((tensor.name, spell(tensor.name)) for tensor in model.tensors)
            return seconds | {name: found for name, found in published if found is not None and found != name}
    return seconds


def module_names(source: Source) -> dict[str, str]:
    """The names of transformers' modules for tensors that have other ones, if each tensor is one of a module's. Raises
    CheckpointError.
    """
    model = source.model
    spellings = Spellings(model.architecture, model.config)
    why, hint = spellings.refusal, "leave out --names: the ranks have the published ones"
    if apart := next((kind.name for kind in model.kinds if spellings.is_apart(kind.name)), None):
        why = f"transformers' modules have '{apart}' joined with others or in another order, and a rank does not"
    if why is not None:
        raise CheckpointError(f"{source.path}: {why}", hint)
    spelled = ((tensor.name, spellings.in_modules(tensor.name)) for tensor in model.tensors)
    return {name: found for name, found in spelled if found not in {name, None}}


class WrittenNames(NamedTuple):
    """The names of tensors in the folders of ranks."""

    renamed: dict[str, str]
    """The names by those of the model, where they differ."""
    spelling: str | None = None
    """Their kind, if they are not the published ones."""
    note: str | None = None
    """The reason why they are not those of the source, which were asked for."""


def rank_names(source: Source, names: str | None) -> WrittenNames:
    """The names of a source's tensors in the folders of ranks: those of the source, published ones or those of modules.
    Raises CheckpointError for names that are asked for by their kind and cannot be had.
    """
    if names == MODULES:
        return WrittenNames(module_names(source), MODULES)
    if names == SOURCE_NAMES and source.names_of == MODULES:
        try:
            return WrittenNames(module_names(source), MODULES)
        except CheckpointError as error:
            why = error.message.removeprefix(f"{source.path}: ")
            return WrittenNames({}, note=f"ranks have the published names, as {why}")
    return WrittenNames(published_names(source) if names == PUBLISHED else {})
