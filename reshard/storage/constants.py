"""What a program stored in the place of a constant of its format, such as a bias that begins at 0."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from formats.files.safetensors import TensorInfo
from formats.regular_files import open_file
from reshard.storage.source import Source, SourceFile


def with_unlike_constants(source: Source) -> Source:
    """The source, with each constant that has another value as left behind, for Hugging Face has no place for it.

    ``constants`` of the source has its content, where it is one, for a split into the same format. Constants are a few
    numbers each. Raises CheckpointError if a file cannot be read.
    """
    if source.arrangement is None:
        return source
    constants = {each.name: each for each in source.arrangement.stored if each.constant is not None}
    unlike: dict[str, set[bytes]] = {}
    for rank, tensors in enumerate(source.ranks):
        here = {each.name_on(rank): each for each in constants.values()}
        for name, info in tensors.items():
            if name in here:
                content, each = _content(source.files[info.file], info), here[name]
                if content != each.constant_bytes(info.shape):
                    unlike.setdefault(each.name, set()).add(content)
    one = {name: min(found) for name, found in unlike.items() if len(found) == 1}
    whole = {name: content for name, content in one.items() if len(content) == len(constants[name].constant_bytes())}
    left = dict.fromkeys(map(in_general, unlike))
    return dataclasses.replace(source, left_behind=(*source.left_behind, *left), constants=whole)


def in_general(name: str) -> str:
    """A name with a star for each number."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _content(file: SourceFile, info: TensorInfo) -> bytes:
    if file.remote is not None:
        return bytes(file.remote.open()(info.offset, info.offset + info.nbytes))
    with open_file(Path(file.path)) as opened:
        return os.pread(opened.fileno(), info.nbytes, info.offset)
