"""A LoRA adapter that a training run saved: its names, shapes and settings, and each side of the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from reshard.formats.errors import CheckpointError, MismatchError, listed
from reshard.formats.files.checkpoint import (
    ADAPTER_CONFIG,
    CONFIG,
    Checkpoint,
    open_checkpoint,
    read_model_config,
    weight_files,
)
from reshard.formats.files.containers import Weights
from reshard.formats.files.dcp import Distributed
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.notation.adapters import LoraSettings, adapter_architecture, of_pattern, settings_of
from reshard.formats.notation.architecture import PREFIX, SETTINGS, Architecture
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.quantization.methods import without_quantization
from reshard.formats.store import FilePath
from reshard.formats.wrappers import without_wrappers
from reshard.model.model import Model
from reshard.model.naming import name_all

META = "lora_train_meta.json"
"""The file that verl writes beside those of the ranks: ``r``, ``lora_alpha`` and ``task_type``."""
SETTINGS_FILES = (ADAPTER_CONFIG, META)
FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_(?:[AB]|embedding_[AB]|magnitude_vector))"
    r"(?:\.(?P<adapter>[^.]+))??(?P<end>\.(?:weight|bias))?"
)
OF_BASE = re.compile(r"\.(?:base_layer|original_module)(?=\.)")


@dataclass(frozen=True)
class LoraRun:
    """A LoRA adapter in a folder, and the base model beside it."""

    path: FilePath
    base: Mapping[str, str]
    """Stored names, with those of a model that is not wrapped."""
    factors: Mapping[str, str]
    """Stored names, with those of an adapter as PEFT saves it."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the factors."""
    adapters: tuple[str, ...]
    """The names that PEFT knows the adapters by."""
    settings: Mapping[str, Any]
    """The content of ``adapter_config.json``."""
    stated: FilePath | None
    """The file that has the settings; without one, alpha is None."""

    @cached_property
    def lora(self) -> LoraSettings:
        """The settings, read. Raises PlanError."""
        return settings_of(self.settings, self.stated or self.path)

    @property
    def modules(self) -> tuple[str, ...]:
        """The last words of the names of the modules that it changes."""
        matches = map(FACTOR.fullmatch, self.factors.values())
        words = (match["module"].replace(".base_layer", "").rpartition(".")[2] for match in matches if match)
        return tuple(sorted({*words}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in use: the usual one first, then those of single modules."""
        return tuple(dict.fromkeys([self.lora.rank, *self.lora.ranks.values()]))

    @property
    def has_base(self) -> bool:
        """Whether the run also has weights of a module that the adapter changes."""
        matches = map(FACTOR.fullmatch, self.factors.values())
        modules = {match["module"].replace(".base_layer", "") for match in matches if match}
        return any(name.rpartition(".")[0] in modules for name in self.base.values())

    @property
    def text(self) -> str:
        """The adapters, their ranks, alpha, modules, and whether the base model is there."""
        said = "its alpha is not there"
        if self.lora.alpha is not None and self.stated is not None:
            said = f"alpha {self.lora.alpha:g} by {self.stated.name}"
        words = [listed(self.adapters)] if self.adapters else []
        words += [f"rank {listed(self.ranks)}", said, f"on {listed(self.modules, 8)}"]
        words.append("with its base model" if self.has_base else "without its base model")
        return ", ".join(words)

    def check_base(self) -> None:
        """Raise CheckpointError if the adapter is there without its base model."""
        if not self.has_base:
            raise CheckpointError(
                f"{self.path} has a LoRA adapter, and not the weights of its base model",
                "merge it into them: reshard merge RUN --into BASE OUT; alone: reshard split RUN OUT --as peft",
            )

    def check_alpha(self) -> None:
        """Raise CheckpointError if nothing says the adapter's alpha, so that it cannot be merged."""
        if self.lora.alpha is None:
            why = f"neither {ADAPTER_CONFIG} nor {META} is there" if self.stated is None else f"{self.stated} lacks it"
            raise CheckpointError(
                f"{self.path} has a LoRA adapter, and no alpha: {why}",
                f"copy the {ADAPTER_CONFIG} of the training into {self.path}; 'reshard split RUN OUT --as peft' writes "
                "the adapter without it",
            )

    def check_ranks(self) -> None:
        """Raise MismatchError if the settings say other ranks than the tensors have."""
        lora = self.lora
        for module, rank in ranks_of(self.factors, self.shapes).items() if not lora.targets else ():
            if (stated := of_pattern(lora.ranks, module, lora.rank)) != rank:
                where = self.stated or self.path
                raise MismatchError(
                    f"{self.path}: '{module}' has rank {rank}, and {where} says {stated}",
                    f"give the {ADAPTER_CONFIG} that was saved with these tensors",
                )

    def check_one(self) -> None:
        """Raise CheckpointError if there are several adapters."""
        if len(self.adapters) > 1:
            raise CheckpointError(
                f"{self.path} has {len(self.adapters)} LoRA adapters, {listed(self.adapters)}",
                "save the one that is meant alone (PEFT's save_pretrained with selected_adapters)",
            )


@dataclass(frozen=True)
class LoraSide:
    """One side of a run with an adapter, as which its folder is opened: the base model, or the adapter alone.

    An adapter is one to ``adapted``, or to the model of the run's config.json.
    """

    run: LoraRun
    is_adapter: bool
    adapted: Model | None = None

    @property
    def names(self) -> Mapping[str, str]:
        """The names of this side's tensors, by the stored ones."""
        return self.run.factors if self.is_adapter else self.run.base

    def of_distributed(self, saved: Distributed) -> Distributed:
        """This side's tensors of a distributed checkpoint."""
        return replace(saved, tensors={name: saved.tensors[stored] for stored, name in self.names.items()})

    def of_file(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """This side's tensors of those that are stored, also by second names."""
        names = {stored: self.names.get(stored) or OF_BASE.sub("", without_wrappers(stored)) for stored in tensors}
        others = self.run.base if self.is_adapter else self.run.factors
        return {names[n]: info._replace(name=names[n]) for n, info in tensors.items() if n not in others}

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of this side's model: the run's, or that of the model which the adapter changes."""
        if not self.is_adapter:
            return dict(config)
        return {**without_quantization(config), SETTINGS: dict(self.run.settings)}

    def architecture(self, config: Mapping[str, Any]) -> Architecture | None:
        """The rules of an adapter to a model that is known."""
        return adapter_architecture(self.adapted.architecture, config, self.run.path) if self.adapted else None

    def spelled(self, name: str) -> str:
        """Return a name of this side, with PEFT's prefix if the side is the adapter."""
        return name if not self.is_adapter or name.startswith(PREFIX) else PREFIX + name

    def beginning(self, chosen: str | None) -> str | None:
        """Return the prefix of this side's names, given the prefix that a user chose for the base."""
        if not self.is_adapter or chosen is None:
            return chosen
        return f"{chosen.removesuffix('.')}.".removesuffix(PREFIX) or None

    def checkpoint(
        self, path: FilePath, read: Callable[[FilePath], Weights], config_folder: FilePath | None, beginning: str | None
    ) -> Checkpoint:
        """This side's tensors of a folder that transformers would look into, of which ``read`` reads a file.

        ``config_folder`` and ``beginning``: as they are given for the base. Raises CheckpointError.
        """
        if not self.is_adapter:
            opened = open_checkpoint(path, read)
        else:
            own = read_model_config(path) if (path / CONFIG).is_file() else None
            given = read_model_config(config_folder) if config_folder is not None else own
            if given is None and self.adapted is None:
                raise CheckpointError(
                    f"{path / CONFIG}: missing", "give a folder that has the model's config.json with --config DIR"
                )
            config = self.config(self.adapted.config if self.adapted is not None else given or {})
            architecture = self.architecture(config) or find_architecture(config, path)
            files = weight_files(path)
            stored = {name: info for file in files for name, info in read(file)[0].items()}
            opened = Checkpoint(path, config, stored, {}, (*files,), ())
            names = self._spelled_names(architecture, self.beginning(beginning))
            tensors = {name: stored[old]._replace(name=name) for name, old in names.items()}
            return replace(opened, tensors=tensors)
        names = {stored: self.names[stored] for stored in opened.tensors if stored in self.names}
        tensors = {name: opened.tensors[stored]._replace(name=name) for stored, name in names.items()}
        aliases = {self.names.get(a, a): names[of] for a, of in opened.aliases.items() if of in names}
        return replace(opened, tensors=tensors, aliases=aliases, records=(), index=None, index_name=None)

    def _spelled_names(self, architecture: Architecture, beginning: str | None) -> dict[str, str]:
        """The names that PEFT gives the adapter's tensors, and the stored ones."""
        names, where = self.names, self.run.path

        def spell(name: str) -> str | None:
            return spelled if architecture.match(spelled := self.spelled(name)) is not None else None

        return dict(name_all(where, names, spell, beginning).known)


def ranks_of(factors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The rank of each module by the shape of its A."""
    ranks = dict[str, int]()
    for stored, name in factors.items():
        match, shape = FACTOR.fullmatch(name), shapes[stored]
        if match is not None and match["kind"] in ("lora_A", "lora_embedding_A") and shape:
            ranks[match["module"].rpartition(PREFIX)[2]] = shape[0]
    return ranks
