"""A full Hugging Face checkpoint folder: its config, its weight files, and where each tensor lies in them.

``foreign.toml`` names the folders with weights in a form that is not read here, and how to make a checkpoint of each.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from reshard.formats.documents import MAX_CONFIG, MAX_INDEX, is_inside, json_object, read_config, read_document
from reshard.formats.errors import CheckpointError, IncompleteError, brief, listed
from reshard.formats.files.containers import Weights, container_of
from reshard.formats.files.safetensors import SourceFileRecord, TensorInfo, build_header
from reshard.formats.files.side_files import is_side_file
from reshard.formats.quantization.methods import quantization_settings, without_quantization
from reshard.formats.store import FilePath, name_in, walk

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


def is_usable(name: str, names: Iterable[str]) -> bool:
    """Whether a weight file can be read: an adapter with its config, or a file whose series or index is complete."""
    names = {*names}
    if is_adapter(name):
        return name == ADAPTER and ADAPTER_CONFIG in names
    return (
        _SERIES.fullmatch(name) is None
        or not {_SAFE_INDEX, _BIN_INDEX}.isdisjoint(names)
        or any(name in series for series in whole_series(names))
    )


def whole_series(names: Iterable[str]) -> list[list[str]]:
    """The weight files that are numbered (``model-00001-of-00002.safetensors``), if all that their names count are
    there: a list for each name and count.
    """
    series: dict[tuple[str, ...], dict[int, str]] = {}
    for name, match in ((name, _SERIES.fullmatch(name)) for name in sorted(names)):
        if match is not None and not is_adapter(name):
            series.setdefault((match["ending"], match["name"], match["count"]), {})[int(match["number"])] = name
    whole = [files for (*_, count), files in sorted(series.items(), reverse=True) if len(files) == int(count)]
    return [[file for _, file in sorted(of.items())] for of in whole if max(of) == len(of) and 0 not in of]


def is_adapter(name: str) -> bool:
    """Whether a file holds the weights of a PEFT adapter, which is not a checkpoint."""
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


MODEL, _SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MODELOPT = "hf_quant_config.json"
CONFIG = "config.json"
METADATA = ".metadata"
"""The file that says which bytes of ``.distcp`` files belong to which tensor."""
TRACKERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
"""Files that name the folder of a step: DeepSpeed's, and Megatron's."""
_SERIES = re.compile(r"(?P<name>[^/.][^/]*)-(?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.(?P<ending>safetensors|bin)")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it lies on disk."""

    path: FilePath
    config: dict[str, Any]
    """The content of ``config.json``, with ModelOpt's settings (see ``read_model_config``)."""
    tensors: dict[str, TensorInfo]
    """The tensors in source order: file by file as sorted by name, by offset within a file."""
    aliases: dict[str, str]
    """The name of each tensor that shares its bytes with another (tied, ``.bin`` only), with the name under which these
    are kept.
    """
    files: tuple[FilePath, ...]
    records: tuple[SourceFileRecord, ...]
    """The weight files, without what the index leaves out; empty if one is ``.bin``."""
    index: FilePath | bytes | None = None
    """The index; where it is missing or does not fit the files, the content of the right one."""
    index_name: str | None = None
    """The ``*.index.json`` of the weights, if there are several."""
    note: str | None = None
    """A sentence on an index that was put right, and on what it leaves out."""
    renamed: bool = False
    """Whether the names are not those in the files."""


def step_of(tracker: FilePath | str, content: bytes) -> str:
    """The folder of the step that a tracker file of this content names. Raises CheckpointError if it names none."""
    name = text = content.decode("utf-8", "replace").strip()
    if str(tracker).endswith(TRACKERS[-1]):
        name = f"iter_{int(text):07d}" if text.isdecimal() and len(text) < 10 else text
        if not re.fullmatch(r"release|iter_[0-9]{7,}", name):
            raise CheckpointError(f"{tracker}: {brief(text)} is neither a number nor 'release'")
    if not is_inside(name):
        raise CheckpointError(f"{tracker}: {brief(text)} is not the name of a folder")
    return name


def open_checkpoint(path: FilePath, read: Callable[[FilePath], Weights] | None = None) -> Checkpoint:
    """Open a checkpoint folder: find its weights as transformers does, and read every header.

    Files are looked for in this order: ``model.safetensors`` and its index, ``pytorch_model.bin`` and its index,
    numbered files without an index, a single other ``*.safetensors``. No tensor data is read. Of a tensor that is in
    several files, the index names the file. An index that does not fit is left out if the files alone are proof enough:
    no tensor is there twice, and all files are there that their numbers count, or all tensors that the index names.
    Raises ``CheckpointError`` for a folder that is no checkpoint, for files that are damaged, and for an index that
    says something else than the files do. ``read`` is ``read_weights``, or what gives the same.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder")
    if not path.is_dir():
        refuse_foreign(path, [path.name])
        raise CheckpointError(f"{path}: not a folder", "give the folder that holds config.json and the weights")
    names, index_name = _find_weights(path)
    index: FilePath | bytes | None = path / index_name if index_name is not None else None
    indexed = _read_index(path, index_name) if index_name is not None else {}
    if not (path / CONFIG).exists():
        refuse_foreign(path, [DELTA] if (path / DELTA).is_file() else [])
        hint = "a checkpoint needs the config.json that describes its model"
        raise CheckpointError(f"{path / CONFIG}: missing", hint)
    config = read_model_config(path)
    numbered = whole_series(file.name for file in path.iterdir())
    if indexed and not (missing := [file for file in {*indexed.values()} if not (path / file).exists()]):
        names = next((series for series in numbered if {*indexed.values()} <= {*series}), [*{*indexed.values()}])
    elif indexed:
        names = next((series for series in numbered if series[0].endswith(_ending(str(index_name)))), [])
    if not names:
        file = min(missing)
        tensor = next(tensor for tensor in indexed if indexed[tensor] == file)
        raise IncompleteError(
            f"{path / str(index_name)}: tensor {tensor!r} is said to lie in {file!r}, which does not exist",
            "fetch the missing file, or write the index again",
        )
    contents = {path / name: (read or read_weights)(path / name) for name in sorted(names)}
    stored, twice = dict[str, str](), dict[str, list[str]]()
    for weights, (own_tensors, tied, _) in contents.items():
        file = name_in(weights, path)
        for tensor in itertools.chain(own_tensors, tied):
            if stored.setdefault(tensor, file) != file:
                twice.setdefault(tensor, [stored[tensor]]).append(file)
    note = None
    if twice:
        if not indexed:
            tensor, files = next(iter(twice.items()))
            hint = "nothing says which one is meant: fetch the index too, or remove the file that does not belong here"
            raise CheckpointError(f"{path / files[1]}: tensor {tensor!r} is also in {files[0]!r}", hint)
        places = {tensor: twice.get(tensor, [file]) for tensor, file in stored.items()}
        chosen = {tensor: file for tensor, file in indexed.items() if file in places.get(tensor, ())}
        _check_index(path / str(index_name), indexed, stored | chosen, also=True)
        others = [f"{tensor} in {file}" for tensor in places for file in places[tensor] if indexed.get(tensor) != file]
        note = f"left out, because {index_name} does not name them: {listed(others, 3)}"
        only = {file: _only(content, indexed, name_in(file, path)) for file, content in contents.items()}
        contents = {file: content for file, content in only.items() if content[0]}
    elif index_name is not None and indexed != stored:
        if names not in numbered and indexed.keys() != stored.keys():
            _check_index(path / index_name, indexed, stored)
        index, note = None, f"{index_name} does not fit the files, so they were read without it"
    checkpoint = _of_contents(path, config, contents)
    if index is None and len(names) > 1:
        index_name = _SAFE_INDEX if names[0].endswith(_ending(_SAFE_INDEX)) else _BIN_INDEX
        note = note or f"{index_name} is missing; all files that their numbers count are there"
        total = sum(info.nbytes for info in checkpoint.tensors.values())
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(stored.items()))}
        index = (json.dumps(document, indent=2) + "\n").encode()
    return replace(checkpoint, index=index, index_name=index_name if index else None, note=note)


def _ending(index: str) -> str:
    """The ending of the files that an index is for."""
    return index.removesuffix(".index.json").rpartition(".")[2]


def _only(content: Weights, indexed: Mapping[str, str], file: str) -> Weights:
    """A file as if it had no tensors but those that an index says to be in it."""
    tensors, tied, header = content
    kept = {name: info for name, info in tensors.items() if indexed.get(name) == file}
    names = [name for name in tied if indexed.get(name) == file]
    kept |= {name: tensors[tied[name]]._replace(name=name) for name in names if tied[name] not in kept}
    if header is not None and len(kept) < len(tensors):
        raw = build_header([(name, info.dtype, info.shape) for name, info in kept.items()], header.metadata)
        header = replace(header, raw=raw)
    return Weights(kept, {name: tied[name] for name in names if name not in kept}, header)


def has_adapter(folder: FilePath) -> bool:
    """Whether a folder holds a PEFT adapter and no model."""
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
            f"{path} is a PEFT adapter, and there is no config.json of the model that it changes"
            + (f" ({brief(named)})" if named else ""),
            "give a folder that has the model's config.json with --config DIR; or merge the adapter into the model: "
            "reshard merge ADAPTER --into BASE OUT",
        )
    settings = without_quantization(model)
    settings["peft_config"] = read_config(path / ADAPTER_CONFIG)
    return _of_contents(path, settings, {path / ADAPTER: read_weights(path / ADAPTER)})


def has_usual_weights(folder: FilePath) -> bool:
    """Whether a folder has weights, or an index of them, under the names that transformers looks for."""
    return any((folder / name).exists() for name in (MODEL, _SAFE_INDEX, _BIN, _BIN_INDEX))


def _find_weights(folder: FilePath) -> tuple[list[str], str | None]:
    """The files of weights in a folder, or the index that names them.

    Where none has a standard name, the files are numbered, or there is only one ``*.safetensors``.
    """
    for single, index in ((MODEL, _SAFE_INDEX), (_BIN, _BIN_INDEX)):
        if (folder / single).exists():
            named = _read_index(folder, index).values() if (folder / index).exists() else ()
            return ([], index) if single in named else ([single], None)
        if (folder / index).exists():
            return [], index
    here = sorted(file.name for file in folder.iterdir() if not file.name.startswith(".") and not is_adapter(file.name))
    names, numbered = [name for name in here if name.endswith(".safetensors")], whole_series(here)
    if numbered:
        return numbered[0], None
    if not names:
        refuse_foreign(folder, names_in(folder))
        unread = [name for name in here if (folder / name).is_file() and not is_side_file(name, ())]
        instead = f"; found {', '.join(unread[:3])}, which is no format read here" if unread else ""
        raise CheckpointError(
            f"{folder}: no weights: neither {MODEL}, {_SAFE_INDEX}, {_BIN} nor {_BIN_INDEX}{instead}",
            "give the folder that holds config.json and the weights of a Hugging Face checkpoint",
        )
    part = _SERIES.fullmatch(names[0])
    if part is not None and int(part["count"]) > 1:
        count = sum(name.endswith(f"-of-{part['count']}.safetensors") for name in names)
        raise IncompleteError(
            f"{folder}: {count} of {int(part['count'])} files are there ({names[0]}), and no {_SAFE_INDEX}",
            "fetch the other files too",
        )
    if len(names) > 1:
        raise CheckpointError(
            f"{folder}: {len(names)} safetensors files ({names[0]}, {names[1]}, …) and no {_SAFE_INDEX}",
            f"add the {_SAFE_INDEX} that belongs to them, or leave only one file",
        )
    return names, None


def weight_files(folder: FilePath) -> list[FilePath]:
    """The files of a folder's weights, found as transformers does. Raises CheckpointError."""
    names, index = _find_weights(folder)
    return [folder / name for name in sorted(names or {*_read_index(folder, str(index)).values()})]


def _read_index(folder: FilePath, name: str) -> dict[str, str]:
    """Read ``*.index.json``: the file of each tensor, which lies in the folder."""
    path = folder / name
    _, content = read_document(path, MAX_INDEX, json_object)
    file_of = content.get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointError(f"{path}: no 'weight_map' from tensors to files", "fetch or write the index again")
    first = {file: tensor for tensor, file in reversed(file_of.items()) if isinstance(file, str)}
    for tensor, file in file_of.items():
        if not isinstance(file, str) or not file:
            what = f"tensor {tensor!r} should be mapped to a file name, not to {brief(file)}"
            raise CheckpointError(f"{path}: {what}", "fetch or write the index again")
    for file, tensor in first.items():
        if not is_inside(file) or "\\" in file:
            raise CheckpointError(
                f"{path}: tensor {tensor!r} is said to lie in {file!r}, outside the folder",
                "an index names only files of its own folder; do not trust this one",
            )
    plain = {file: PurePosixPath(file).as_posix() for file in first}  # "./a" and "a" are one file
    # each name is one object in memory with that in a header, of half a million
    return {sys.intern(tensor): plain[file] for tensor, file in file_of.items()}


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


def _of_contents(folder: FilePath, config: dict[str, Any], contents: Mapping[FilePath, Weights]) -> Checkpoint:
    """A checkpoint of weight files that have no tensor twice."""
    tensors: dict[str, TensorInfo] = {}
    aliases: dict[str, str] = {}
    records: list[SourceFileRecord] = []
    for path, (own_tensors, tied, header) in contents.items():
        tensors.update(own_tensors)
        aliases.update(tied)
        name = name_in(path, folder)
        if header is not None:
            size = len(header.raw) + sum(info.nbytes for info in own_tensors.values())
            records.append(SourceFileRecord(name, size, None, header.raw))
    is_safetensors = len(records) == len(contents)
    return Checkpoint(folder, config, tensors, aliases, (*contents,), (*records,) if is_safetensors else ())


def read_weights(path: FilePath) -> Weights:
    """Read which tensors a weight file has, and where they lie. Raises CheckpointError."""
    return container_of(path.name).read(path)


def _check_index(path: FilePath, indexed: dict[str, str], stored: dict[str, str], *, also: bool = False) -> None:
    """Raise CheckpointError unless the index and the files agree on the file of each tensor; with ``also``, files may
    have tensors that the index does not name.
    """
    for name, file in indexed.items():
        if file != (place := stored.get(name)):
            what = f" and lies in {place!r}" if place is not None else ", which lacks it"
            hint = "the index and the files are of different versions: fetch both again"
            raise CheckpointError(f"{path}: tensor {name!r} is said to lie in {file!r}{what}", hint)
    for name in () if also else stored.keys() - indexed.keys():
        raise CheckpointError(
            f"{path}: tensor {name!r} lies in {stored[name]!r}, but the index does not name it",
            "give the index that was written with these files, or remove the file that does not belong here",
        )
