"""A LoRA adapter among the weights that a training run saved: beside its base model or alone, in any container.

PEFT's modules put words into names: ``base_model.model.`` before all of them, ``base_layer`` before what is wrapped,
and beside it ``lora_A.default``, of the adapter ``default``. Without these words the names are those of a base model,
and of an adapter as PEFT saves it. Alpha is not among the weights: ``adapter_config.json`` says it, or verl's
``lora_train_meta.json``. Sources: peft/utils/save_and_load.py (``get_peft_model_state_dict``),
verl/utils/checkpoint/fsdp_checkpoint_manager.py, peft/utils/other.py (``ModulesToSaveWrapper``).
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from reshard.formats.documents import Record, Unfit, number, read_config, read_document, whole
from reshard.formats.errors import CheckpointError, MismatchError, ReshardError, listed
from reshard.formats.files.checkpoint import (
    ADAPTER_CONFIG,
    CONFIG,
    Checkpoint,
    open_checkpoint,
    read_model_config,
    weight_files,
)
from reshard.formats.files.dcp import Distributed
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.files.training import model_files, read_training
from reshard.formats.notation.adapters import LoraSettings, adapter_architecture, of_pattern, settings_of
from reshard.formats.notation.architecture import PREFIX, SETTINGS, Architecture
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.quantization.methods import without_quantization
from reshard.formats.store import FilePath
from reshard.formats.wrappers import without_wrappers
from reshard.model.model import Model
from reshard.model.naming import LoraError, name_all
from reshard.source.folder import Folder
from reshard.source.opening import open_folder
from reshard.source.program_files import weights_folder
from reshard.source.source import Source

META = "lora_train_meta.json"
"""The file that verl writes beside those of the ranks: ``r``, ``lora_alpha`` and ``task_type``."""
SETTINGS_FILES = (ADAPTER_CONFIG, META)
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_(?:[AB]|embedding_[AB]|magnitude_vector))"
    r"(?:\.(?P<adapter>[^.]+))??(?P<end>\.(?:weight|bias))?"
)
_COPY = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<end>.+)")
_WITHIN = re.compile(r"\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?=\.)")
_OF_BASE = re.compile(r"\.(?:base_layer|original_module)(?=\.)")
_RANK = whole(1, 1 << 20)


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
        matches = map(_FACTOR.fullmatch, self.factors.values())
        words = (match["module"].replace(".base_layer", "").rpartition(".")[2] for match in matches if match)
        return tuple(sorted({*words}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in use: the usual one first, then those of single modules."""
        return tuple(dict.fromkeys([self.lora.rank, *self.lora.ranks.values()]))

    @property
    def has_base(self) -> bool:
        """Whether the run also has weights of a module that the adapter changes."""
        matches = map(_FACTOR.fullmatch, self.factors.values())
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
        for module, rank in _ranks_of(self.factors, self.shapes).items() if not lora.targets else ():
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
        names = {stored: self.names.get(stored) or _OF_BASE.sub("", without_wrappers(stored)) for stored in tensors}
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

    def checkpoint(self, folder: Folder) -> Checkpoint:
        """This side's tensors of a folder that transformers would look into. Raises CheckpointError."""
        path = folder.path
        if not self.is_adapter:
            opened = open_checkpoint(path, folder.weights)
        else:
            own = read_model_config(path) if (path / CONFIG).is_file() else None
            given = read_model_config(folder.config) if folder.config is not None else own
            if given is None and self.adapted is None:
                raise CheckpointError(
                    f"{path / CONFIG}: missing", "give a folder that has the model's config.json with --config DIR"
                )
            config = self.config(self.adapted.config if self.adapted is not None else given or {})
            architecture = self.architecture(config) or find_architecture(config, path)
            files = weight_files(path)
            stored = {name: info for file in files for name, info in folder.weights(file)[0].items()}
            opened = Checkpoint(path, config, stored, {}, (*files,), ())
            names = self._spelled_names(architecture, self.beginning(folder.beginning))
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


def apart(
    where: object, names: Iterable[str], own: Callable[[str], bool] = lambda end: False
) -> tuple[dict[str, str], dict[str, str], tuple[str, ...]]:
    """Names of weights by those that are stored: of a base model, and of the LoRA adapters, with the adapters' names.

    ``own`` says whether the model's type itself has names with this end. Raises CheckpointError for a name that is
    there twice.
    """
    base, factors, adapters = dict[str, str](), dict[str, str](), dict[str, None]()
    for stored in names:
        plain = without_wrappers(stored)
        match = _FACTOR.fullmatch(plain)
        if match is not None and not own(plain[match.start("kind") :]):
            end = match["end"] or ""
            if match["kind"] == "lora_magnitude_vector" and match["adapter"]:
                end = ""
            factors[stored] = f"{match['module']}.{match['kind']}{end}"
        elif match := _COPY.fullmatch(plain):
            factors[stored] = f"{match['module']}.{match['end']}"
        elif (within := _WITHIN.search(plain)) is not None and not any(map(own, _ends(plain, within.start() + 1))):
            continue  # the state of a factor
        else:
            base[stored] = _OF_BASE.sub("", plain)
            continue
        if match["adapter"]:
            adapters[match["adapter"]] = None
    for side in (base, factors) if len(adapters) < 2 else (base,):
        first = dict[str, str]()
        for stored, name in side.items():
            if first.setdefault(name, stored) != stored:
                raise CheckpointError(f"{where} has two tensors of one name, '{first[name]}' and '{stored}'")
    return base, factors, tuple(adapters)


def _ends(name: str, begin: int) -> Iterator[str]:
    """Yield the parts of a name that begin at ``begin`` and end before a dot or at the name's end."""
    return (name[begin:end] for end in (*(dot.start() for dot in re.finditer(r"\.", name)), len(name)) if end > begin)


def find_lora(folder: Folder, adapted: Model | None = None) -> LoraRun | None:
    """The LoRA adapter in a folder, with its settings; None if there is none. Raises CheckpointError."""
    shapes = _shapes_in(folder)
    if not any(".lora_" in name for name in shapes):
        return None
    own = _own_ends(adapted.architecture if adapted is not None else _architecture_of(folder))
    base, factors, adapters = apart(folder.path, shapes, own.__contains__)
    if not any(map(_FACTOR.fullmatch, factors.values())):
        return None
    of_factors = {stored: shapes[stored] for stored in factors}
    settings, stated = _settings_of(folder, factors, of_factors)
    settings_of(settings, stated or folder.path)  # raises for another kind of adapter
    return LoraRun(folder.path, base, factors, of_factors, adapters, settings, stated)


def open_base(folder: Folder, run: LoraRun, *, model: Model | None = None, is_part: bool = False) -> Source:
    """The base model in a run, as if nothing had been wrapped (see ``open_folder``). Raises ReshardError."""
    run.check_base()
    side = copy.copy(folder)
    side.lora = LoraSide(run, is_adapter=False)
    return open_folder(side, model=model, is_part=is_part)


def open_alone(folder: Folder, run: LoraRun, adapted: Model | None = None) -> Source:
    """The adapter in a run: to be merged into the model ``adapted``, or as it is. Raises ReshardError."""
    run.check_one()
    run.check_ranks()
    if adapted is not None:
        run.check_alpha()
    side = copy.copy(folder)  # what was read of the folder is not read again
    side.lora = LoraSide(run, is_adapter=True, adapted=adapted)
    side.kind = "adapter" if folder.kind == "full" else folder.kind
    try:
        return open_folder(side, adapted=adapted)
    except LoraError:
        raise CheckpointError(
            f"{run.path}: its LoRA adapter changes a module that is not known of this model",
            "is config.json that of the adapter's base model? if it is, merge with PEFT (merge_and_unload)",
        ) from None


def _shapes_in(folder: Folder) -> dict[str, tuple[int, ...]]:
    """The shapes of all stored tensors of a full or a distributed checkpoint; of another, none."""
    format = next((format for format in folder.formats if format.files.is_distributed), None)
    if format is not None:
        saved = folder.once(read_training, weights_folder(format, folder.path))
        return {name: tensor.shape for name, tensor in saved.tensors.items()}
    ends = (".safetensors", ".bin", ".index.json")
    if (
        folder.kind != "full"
        or not folder.path.is_dir()
        or not any(f.name.endswith(ends) for f in folder.path.iterdir())
    ):
        return {}
    return {name: info.shape for file in weight_files(folder.path) for name, info in folder.weights(file)[0].items()}


def _architecture_of(folder: Folder) -> Architecture | None:
    """The rules for the config.json that belongs to a folder, if it is found."""
    beside = model_files(folder.path).get(CONFIG) if folder.config is None else folder.config / CONFIG
    with suppress(ReshardError):
        return find_architecture(read_config(beside), folder.path) if beside is not None else None
    return None


def _own_ends(architecture: Architecture | None) -> frozenset[str]:
    """The ends of names with LoRA's words that a model's type has itself."""
    templates = architecture.tensors if architecture is not None else ()
    return frozenset(name[name.index("lora_") :] for name in templates if ".lora_" in name)


# ------------------------------------------------------------------------------------------------------- its settings


def _settings_of(
    folder: Folder, factors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], FilePath | None]:
    """The content of ``adapter_config.json`` or of the file in its place, and that file."""
    path = folder.path
    inside = [weights_folder(format, path) for format in folder.formats if format.files.is_distributed][:1]
    above = path / ".." if path.name in {"", ".."} else path.parent
    places = [*dict.fromkeys([path, path / "lora_adapter", *inside, above])]
    if stated := next((at / ADAPTER_CONFIG for at in places if (at / ADAPTER_CONFIG).is_file()), None):
        return read_config(stated), stated
    if stack := next((name for name in factors.values() if re.search(r"\.(base_layer|experts)\.lora_", name)), None):
        raise CheckpointError(
            f"{path} has A and B of experts ('{stack}'), and no {ADAPTER_CONFIG} says of which parameters",
            f"copy the {ADAPTER_CONFIG} of the training into {path}",
        )
    if stated := next((at / META for at in places if (at / META).is_file()), None):
        return read_document(stated, 1 << 20, _meta)[1], stated
    ranks = _ranks_of(factors, shapes)
    ((usual, _),) = Counter(ranks.values()).most_common(1) or [(1, 0)]
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    return {"peft_type": "LORA", "r": usual, "lora_alpha": None, "rank_pattern": others, "bias": "none"}, None


def _meta(value: object, where: str) -> dict[str, Any]:
    record = Record(value, where)
    rank, alpha = record.get("r", _RANK), record.get("lora_alpha", number)
    alpha = int(alpha) if alpha.is_integer() else alpha
    if alpha <= 0:
        raise Unfit(f"{where}: lora_alpha is {alpha:g}, which changes nothing")
    task = record.get("task_type", lambda value, where: value, None)
    return {"peft_type": "LORA", "task_type": task, "r": rank, "lora_alpha": alpha, "bias": "none"}


def _ranks_of(factors: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The rank of each module by the shape of its A."""
    ranks = dict[str, int]()
    for stored, name in factors.items():
        match, shape = _FACTOR.fullmatch(name), shapes[stored]
        if match is not None and match["kind"] in ("lora_A", "lora_embedding_A") and shape:
            ranks[match["module"].rpartition(PREFIX)[2]] = shape[0]
    return ranks
