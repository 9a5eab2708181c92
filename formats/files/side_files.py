"""Side files: those that a loader reads beside the weights. One rule holds for folders, the Hub and buckets.

Only a file that is named here belongs to the model. Other forms of the weights, checksums, training states and marks of
other programs do not belong to it: after a change of the weights they would describe another model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from pathlib import PurePosixPath

from reshard.formats.documents import MAX_CONFIG, is_inside, lenient_json
from reshard.formats.store import FilePath, name_in, read_file, sorted_paths, walk

LARGEST = 64 << 20
"""Bytes of a side file; a ``tokenizer.json`` of 260,000 tokens has 33 MB."""
NAMING = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json", "modules.json")
"""The documents that name code, tokenizer files, and the folders of further modules."""

_OWN = r"(?!\.|fsdp_config\.json|zero_to_fp32\.py|latest_checkpointed_iteration\.txt)"
"""No names with a dot before them, and none of a training program's own files."""
# fmt: off
_NAMES = re.compile(_OWN + "(" + "|".join((
    r".*\.(md|txt|rst|html?|cff|bib|ya?ml|toml|jinja2?|png|jpe?g|gif|svg|webp|bmp|ico)",  # texts and pictures
    r"(licen[sc]e|notice|copying|readme|authors|citation|\w*policy)([._-][^.]*|.*\.pdf)?",
    r".*\.(py|cpp|cc|c|cu|cuh|h|hpp)",  # custom code
    r".*(config|param|token|vocab|merges|tekken|template|processor|normalizer|modules|prompt|label).*\.json",
    r".*\.(tiktoken|spm|bpe|codes|vocab)|(sp|.*(token|piece|spm|bpe|vocab|text).*)\.model(\.v\d+\w*)?",
)) + ")", re.IGNORECASE)
# fmt: on
_FOLDERS = re.compile(r"additional_chat_templates|\w*(tokenizer|processor)")
"""The folders that transformers reads although no document names them."""


def find_side_files(folder: FilePath) -> tuple[FilePath, ...]:
    """The side files in a checkpoint's folder, config.json first, whether it is there or not."""
    config, paths = folder / "config.json", list[FilePath]()
    named = {*named_files(lambda name: _content(folder / name))}
    inner = {parent.as_posix() for name in named for parent in PurePosixPath(name).parents}
    for root, folders, files in walk(folder):
        below = "" if root == folder else f"{name_in(root, folder)}/"
        folders[:] = [name for name in folders if below + name in inner or (not below and _FOLDERS.fullmatch(name))]
        for path in (root / name for name in files if is_side_file(below + name, named)):
            if path.is_file() and path.stat().st_size <= LARGEST and path != config:
                paths.append(path)
    return (config, *sorted_paths(paths))


def is_side_file(name: str, named: Container[str], size: int = 0) -> bool:
    """Whether a file is a side file. ``name`` is relative to the folder; ``named`` are files that documents name."""
    folder, _, file = name.rpartition("/")
    is_known = not folder or _FOLDERS.fullmatch(folder) is not None or f"{folder}/" in named
    return size <= LARGEST and (name in named or (is_known and _NAMES.fullmatch(file) is not None))


def named_files(read: Callable[[str], bytes | None], documents: Iterable[str] = NAMING) -> Iterator[str]:
    """The files that a model's documents name, and the folders (with ``/``) that these lie in.

    ``read`` gives the content of a document; None, if it is not there. A document that is damaged names none.
    """
    for document in documents:
        content: object = None
        with suppress(ValueError):
            content = lenient_json((read(document) or b"").decode())
        names: list[object] = []
        if isinstance(content, list):  # the modules of sentence-transformers
            paths = [module.get("path") for module in content if isinstance(module, dict)]
            names += [f"{path}/config.json" for path in paths if path and isinstance(path, str)]
        elif isinstance(content, dict):
            if document != NAMING[0]:  # of a tokenizer; config.json may name weights
                names += [value for key, value in content.items() if key.endswith("_file")]
            code = content.get("auto_map")
            for value in code.values() if isinstance(code, dict) else ():
                for module in value if isinstance(value, list) else [value]:
                    if isinstance(module, str) and "." in module and "--" not in module:  # else in another repository
                        names.append(f"{module.rpartition('.')[0]}.py")
        for name in names:
            if isinstance(name, str) and is_inside(name):
                yield name
                yield from (f"{parent}/" for parent in PurePosixPath(name).parents[:-1])


def _content(path: FilePath) -> bytes | None:
    with suppress(Exception):
        return read_file(path, MAX_CONFIG) if path.is_file() else None
    return None
