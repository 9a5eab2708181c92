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
from typing import Any

from reshard.formats.documents import Record, Unfit, number, read_config, read_document, whole
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.files.checkpoint import ADAPTER_CONFIG, CONFIG, weight_files
from reshard.formats.files.training import model_files, read_training
from reshard.formats.notation.adapters import settings_of
from reshard.formats.notation.architecture import Architecture
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.store import FilePath
from reshard.formats.wrappers import without_wrappers
from reshard.model.model import Model
from reshard.model.naming import LoraError
from reshard.source.folder import Folder
from reshard.source.lora_side import FACTOR, META, OF_BASE, LoraRun, LoraSide, ranks_of
from reshard.source.opening import open_folder
from reshard.source.program_files import weights_folder
from reshard.source.source import Source

_COPY = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<end>.+)")
_WITHIN = re.compile(r"\.lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?=\.)")
_RANK = whole(1, 1 << 20)


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
        match = FACTOR.fullmatch(plain)
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
            base[stored] = OF_BASE.sub("", plain)
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
    if not any(map(FACTOR.fullmatch, factors.values())):
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
    ranks = ranks_of(factors, shapes)
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
