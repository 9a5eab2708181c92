"""A full Hugging Face checkpoint folder: its config, its weight files, and where each tensor lies in them.

``foreign.toml`` names the folders with weights in a form that is not read here, and how to make a checkpoint of each.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.formats.documents import MAX_CONFIG, MAX_INDEX, is_inside, json_object, read_config, read_document
from reshard.formats.errors import CheckpointError, brief
from reshard.formats.files.safetensors import Header, SourceFileRecord, TensorInfo, read_header
from reshard.formats.quantization.methods import quantization_settings, without_quantization
from reshard.formats.store import FilePath, name_in, read_ranges, sorted_paths, walk

DELTA = "delta.json"
"""The file by which a delta is known (``delta.py``)."""
_MOST = 10_000
"""Names that are looked at."""


def refuse_foreign(where: FilePath | str, names: Iterable[str]) -> None:
    """Raise CheckpointError if files of these names (relative, with ``/``) are of a known kind that is not read."""
    names = sorted(names)
    for kind in tomllib.loads((Path(__file__).parent / "foreign.toml").read_text(encoding="utf-8"))["kinds"]:
        for name in (name for name in names if re.fullmatch(kind["files"], name)):
            raise CheckpointError(f"{where} is {kind['what'].format(name)}", kind["hint"])


def is_usable(name: str, names: Container[str]) -> bool:
    """Whether a file of weights can be read, with what stands beside it."""
    if is_adapter(name):
        return name == ADAPTER and ADAPTER_CONFIG in names
    needs_index = re.fullmatch(r"pytorch_model-\d+-of-\d+\.bin", name) is not None
    return not needs_index or _BIN_INDEX in names


def is_adapter(name: str) -> bool:
    """Whether a file holds the weights of a PEFT adapter, which are no checkpoint."""
    return name.startswith("adapter_model.")


def names_in(folder: FilePath) -> list[str]:
    """The names of files in a folder and up to two levels below it, as far as they can be read."""
    names: list[str] = []
    for root, folders, files in walk(folder):
        below = name_in(root, folder)
        if below.count("/") == 1:
            folders.clear()
        names += [name if below == "." else f"{below}/{name}" for name in files]
        if len(names) > _MOST:
            break
    return names[:_MOST]


#: Endings of files that hold weights in some format; such files are never side files.
WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".distcp", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ckpt",
    ".npz",
)  # fmt: skip

MODEL, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MODELOPT = "hf_quant_config.json"
CONFIG = "config.json"
METADATA = ".metadata"
"""What says which bytes of ``.distcp`` files hold which tensor."""
TRACKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
"""Files that name the folder of a step: DeepSpeed's, and Megatron's."""
_SAMPLES = 1024
_SAMPLE = 64


Weights = tuple[dict[str, TensorInfo], dict[str, str], Header | None]
"""The tensors in a weight file, its tied names, and its header if it is safetensors."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it lies on disk.

    ``config`` is the content of ``config.json``, with ModelOpt's settings (see ``read_model_config``).
    ``tensors`` are in source order: file by file as sorted by name, by offset within a file. ``aliases`` maps the name
    of a tensor that shares its bytes with another (tied, ``.bin`` only) to the name under which these are kept.
    ``records`` say what the weight files are; they are empty if one is ``.bin``. ``index`` is the content of
    ``index_name``, the ``*.index.json`` of the weights, if there is one.
    """

    path: FilePath
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    aliases: dict[str, str]
    files: tuple[FilePath, ...]
    records: tuple[SourceFileRecord, ...]
    index: bytes | None = None
    index_name: str | None = None


def step_of(tracker: FilePath | str, content: bytes) -> str:
    """The folder of the step that a tracker file of this content names. Raises CheckpointError if it names none."""
    name = text = content.decode("utf-8", "replace").strip()
    if str(tracker).endswith(TRACKERS[-1]):
        name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else text
        if not re.fullmatch(r"release|iter_[0-9]{7,}", name):
            raise CheckpointError(f"{tracker}: {brief(text)} is neither a number nor 'release'")
    if not is_inside(name):
        raise CheckpointError(f"{tracker}: {brief(text)} is no name of a folder")
    return name


def open_checkpoint(path: FilePath, read: Callable[[FilePath], Weights] | None = None) -> Checkpoint:
    """Open a checkpoint folder: find its weights as transformers does, and read every header.

    Files are looked for in this order: ``model.safetensors`` and its index, ``pytorch_model.bin`` and its index, a
    single other ``*.safetensors``. No tensor data is read. Raises ``CheckpointError`` for a folder that is no
    checkpoint, for files that are damaged, and for an index that says something else than the files do.
    ``read`` is ``read_weights``, or what gives the same.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder")
    if not path.is_dir():
        refuse_foreign(path, [path.name])
        raise CheckpointError(f"{path}: not a folder", "give the folder that holds config.json and the weights")
    single, index_name = _find_weights(path)
    index, indexed = _read_index(path, index_name) if index_name is not None else (None, {})
    if single is not None and indexed and single not in indexed.values():
        raise CheckpointError(
            f"{path}: both {single} and {index_name} are there, and the index does not name {single}",
            "move away the one that is not this model",
        )
    if not (path / CONFIG).exists():
        refuse_foreign(path, [DELTA] if (path / DELTA).is_file() else [])
        hint = "a checkpoint needs the config.json that describes its model"
        raise CheckpointError(f"{path / CONFIG}: missing", hint)
    config = read_model_config(path)
    checkpoint = _read_files(path, config, {*indexed.values()} or [str(single)], read or read_weights)
    if index_name is not None:
        stored = {name: name_in(info.file, path) for name, info in checkpoint.tensors.items()}
        stored |= {alias: stored[original] for alias, original in checkpoint.aliases.items()}
        _check_index(path / index_name, indexed, stored)
    return replace(checkpoint, index=index, index_name=index_name)


def has_adapter(folder: FilePath) -> bool:
    """Whether a folder holds a PEFT adapter, and no model."""
    names = (ADAPTER, ADAPTER_CONFIG)
    return all((folder / name).is_file() for name in names) and not has_usual_weights(folder)


def open_adapter(path: FilePath, base: FilePath | None, known: dict[str, Any] | None = None) -> Checkpoint:
    """Open a PEFT adapter. Its config is that of the model that it changes, with the adapter's as ``peft_config``.

    The model's is ``known``, or lies in the folder ``base``, or in the adapter's own. Without these, it is looked for
    in the folder that ``adapter_config.json`` names. Raises CheckpointError.
    """
    named = read_config(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    folders = [base] if base is not None else [path, *([Path(named)] if isinstance(named, str) and named else [])]
    config = next((folder / "config.json" for folder in folders if (folder / "config.json").is_file()), None)
    model = known or (read_config(config) if config is not None else None)
    if model is None:
        raise CheckpointError(
            f"{path} is a PEFT adapter, and there is no config.json of the model that it changes ({brief(named)})",
            "give a folder that has the model's config.json with --config DIR; or merge the adapter into the model: "
            "reshard merge ADAPTER --into BASE OUT",
        )
    settings = without_quantization(model)
    settings["peft_config"] = read_config(path / ADAPTER_CONFIG)
    return _read_files(path, settings, (ADAPTER,), read_weights)


def has_usual_weights(folder: FilePath) -> bool:
    """Whether a folder has weights, or an index of them, under the names that transformers looks for."""
    return any((folder / name).exists() for name in (MODEL, _SAFE_INDEX, _BIN, _BIN_INDEX))


def fingerprint(checkpoint: Checkpoint) -> str:
    """An id of the weights, in hex, that does not depend on where or in which files they lie.

    SHA-256 over name, dtype and shape of all tensors, sorted by name, and the samples: two fine-tunes of one model
    differ. Raises ``CheckpointError`` if a file can no longer be read.
    """
    ranges = samples(checkpoint)
    contents = {(file, begin): content for (file, begin, _), content in zip(ranges, read_ranges(ranges), strict=True)}
    digest = hashlib.sha256()
    kinds = {kind: json.dumps(kind)[1:] for kind in {(t.dtype, t.shape) for t in checkpoint.tensors.values()}}
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        digest.update(f"[{json.dumps(name)}, {kinds[info.dtype, info.shape]}".encode())  # [name, dtype, shape]
        digest.update(contents.get((info.file, _middle(info)[0]), b""))
    return digest.hexdigest()


def samples(checkpoint: Checkpoint) -> list[tuple[FilePath, int, int]]:
    """The bytes that the fingerprint takes of the weights: a file, the first byte, and the one behind the last.

    These are up to 64 bytes from the middle of a tensor; of more than 1024 tensors, 1024 at equal distances in the
    order of their names.
    """
    names = sorted(checkpoint.tensors)
    count = min(len(names), _SAMPLES)
    chosen = (checkpoint.tensors[names[i * len(names) // count]] for i in range(count))
    return [(info.file, *_middle(info)) for info in chosen]


def _middle(info: TensorInfo) -> tuple[int, int]:
    length = min(_SAMPLE, info.nbytes)
    begin = info.offset + (info.nbytes - length) // 2
    return begin, begin + length


def _find_weights(folder: FilePath) -> tuple[str | None, str | None]:
    """The one file of weights in a folder, and the index of several: at least one of them.

    Where none has a standard name, the file is the only ``*.safetensors``.
    """
    for usual in ((MODEL, _SAFE_INDEX), (_BIN, _BIN_INDEX)):
        single, index = (name if (folder / name).exists() else None for name in usual)
        if single or index:
            return single, index
    names = sorted(file.name for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    names = [name for name in names if not is_adapter(name)]
    if not names:
        refuse_foreign(folder, names_in(folder))
        unread = sorted(file.name for file in folder.iterdir() if file.name.endswith(WEIGHT_SUFFIXES))
        instead = f"; found {', '.join(unread[:3])}, which is no format read here" if unread else ""
        raise CheckpointError(
            f"{folder}: no weights: neither {MODEL}, {_SAFE_INDEX}, {_BIN} nor {_BIN_INDEX}{instead}",
            "give the folder that holds config.json and the weights of a Hugging Face checkpoint",
        )
    if len(names) > 1:
        raise CheckpointError(
            f"{folder}: {len(names)} safetensors files ({names[0]}, {names[1]}, …) and no {_SAFE_INDEX}",
            f"add the {_SAFE_INDEX} that belongs to them, or leave only one file",
        )
    part = re.search(r"-(\d+)-of-(\d+)\.safetensors$", names[0])
    if part and int(part[2]) != 1:
        raise CheckpointError(
            f"{folder}: {names[0]} is one file of {int(part[2])}, and there is no {_SAFE_INDEX}",
            "fetch the other files and the index too",
        )
    return names[0], None


def _read_index(folder: FilePath, name: str) -> tuple[bytes, dict[str, str]]:
    """Read ``*.index.json``: its text, and the file of each tensor, which lies in the folder."""
    path = folder / name
    raw, content = read_document(path, MAX_INDEX, json_object)
    file_of = content.get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f"{path}: no 'weight_map' from tensors to files", "fetch or write the index again")
    first = {file: tensor for tensor, file in reversed(file_of.items()) if isinstance(file, str)}
    for tensor, file in file_of.items():
        if not isinstance(file, str) or not file:
            raise CheckpointError(f"{path}: tensor {tensor!r} should be mapped to a file name, not to {brief(file)}")
    for file, tensor in first.items():
        if not is_inside(file) or "\\" in file:
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is said to lie in {file!r}, outside the folder",
                "an index names only files of its own folder; do not trust this one",
            )
        if not (folder / file).exists():
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is said to lie in {file!r}, which does not exist",
                "fetch the missing file, or write the index again",
            )
    plain = {file: PurePosixPath(file).as_posix() for file in first}  # "./a" and "a" are one file
    return raw, {tensor: plain[file] for tensor, file in file_of.items()}


def read_model_config(folder: FilePath) -> dict[str, Any]:
    """``config.json`` with the settings of NVIDIA ModelOpt, which also stand in ``hf_quant_config.json`` or only there.

    That file holds ``{"producer": {"name": "modelopt", …}, "quantization": {"quant_algo": "NVFP4", …}}``: ModelOpt,
    modelopt/torch/export/unified_export_hf.py; vLLM, model_executor/layers/quantization/modelopt.py. Raises
    CheckpointError if one is damaged.
    """
    config, path = read_config(folder / CONFIG), folder / MODELOPT
    if quantization_settings(config) or not path.is_file():
        return config
    _, content = read_document(path, MAX_CONFIG, json_object)
    if not isinstance(content.get("quantization"), dict):
        return config
    return {**config, "quantization_config": {"quant_method": "modelopt", **content}}


def _read_files(
    folder: FilePath, config: dict[str, Any], names: Iterable[str], read: Callable[[FilePath], Weights]
) -> Checkpoint:
    """A checkpoint of these weight files; reads the headers of all."""
    records: list[SourceFileRecord] = []
    tensors: dict[str, TensorInfo] = {}
    aliases: dict[str, str] = {}
    files = {folder / name: name for name in sorted(names)}
    for path, name in files.items():
        own_tensors, tied, header = read(path)
        for tensor in (*own_tensors, *tied):
            if tensor in tensors or tensor in aliases:
                first = tensors[aliases.get(tensor, tensor)].file.name
                raise CheckpointError(
                    f"{path}: tensor {tensor!r} is also in {first!r}", "remove the file that does not belong here"
                )
        tensors.update(own_tensors)
        aliases.update(tied)
        records += [SourceFileRecord(name, path.stat().st_size, None, header.raw)] if header is not None else []
    is_safetensors = len(records) == len(files)
    return Checkpoint(folder, config, tensors, aliases, (*files,), (*records,) if is_safetensors else ())


def read_weights(path: FilePath) -> Weights:
    """What a weight file has. Raises CheckpointError."""
    if path.name.endswith(".safetensors"):
        header = read_header(path)
        return header.tensors, {}, header
    from reshard.formats.files.torch_archive import read_bin  # rarely needed

    return (*read_bin(path), None)


def _check_index(path: FilePath, indexed: dict[str, str], stored: dict[str, str]) -> None:
    """Check that the index and the files agree on the file of each tensor."""
    if indexed == stored:
        return
    hint = "the index and the files are of different versions: fetch both again"
    for name, file in indexed.items():
        if file != (place := stored.get(name)):
            what = f" and lies in {place!r}" if place is not None else ", which lacks it"
            raise CheckpointError(f"{path}: tensor {name!r} is said to lie in {file!r}{what}", hint)
    name = next(name for name in stored if name not in indexed)
    raise CheckpointError(f"{path}: tensor {name!r} lies in {stored[name]!r}, but the index does not name it", hint)


def find_side_files(folder: FilePath) -> tuple[FilePath, ...]:
    """Files that belong to the model and are no weights; folders with weights of their own are left out whole."""
    paths: list[FilePath] = []
    for root, folders, files in walk(folder):
        if root != folder and any(name.endswith(WEIGHT_SUFFIXES) for name in files):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            weights = name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
            if not weights and not name.startswith(".") and (root / name).is_file():
                paths.append(root / name)
    config = folder / "config.json"
    return (config, *sorted_paths(file for file in paths if file != config))
