"""What a program stored in the place of a constant of its format, such as a bias that begins at 0."""

from __future__ import annotations

import dataclasses
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from formats.files.safetensors import TensorInfo
from formats.regular_files import open_file
from reshard.storage.remote import NEAR, Range, Read, joined
from reshard.storage.source import Source, SourceFile
from reshard.storage.threads import Threads

_REQUESTS = 16
"""Requests that are under way at a time."""


def with_unlike_constants(source: Source) -> Source:
    """The source, with each constant that has another value as left behind, for Hugging Face has no place for it.

    ``constants`` of the source has its content, where it is one, for a split into the same format. Constants are a few
    numbers each. Raises CheckpointError if a file cannot be read.
    """
    if source.format is None or not source.format.rules.constants:
        return source
    constants = {each.name: each for each in source.arrangement.stored if each.constant is not None}
    found: list[tuple[str, TensorInfo]] = []
    for rank, tensors in enumerate(source.ranks):
        here = {each.name_on(rank): each.name for each in constants.values()}
        found += [(here[name], info) for name, info in tensors.items() if name in here]
    if not found:
        return source
    unlike: dict[str, set[bytes]] = {}
    for (name, info), content in zip(found, _contents(source, [info for _, info in found]), strict=True):
        if content != constants[name].constant_bytes(info.shape):
            unlike.setdefault(name, set()).add(content)
    one = {name: min(contents) for name, contents in unlike.items() if len(contents) == 1}
    whole = {name: content for name, content in one.items() if len(content) == len(constants[name].constant_bytes())}
    left = dict.fromkeys(map(in_general, unlike))
    return dataclasses.replace(source, left_behind=(*source.left_behind, *left), constants=whole)


def in_general(name: str) -> str:
    """A name with a star for each number."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _contents(source: Source, tensors: Sequence[TensorInfo]) -> list[bytes]:
    """The bytes of tensors; what lies close together in a file that is elsewhere is one request."""
    wanted: dict[Path, list[Range]] = {}
    for info in tensors:
        wanted.setdefault(info.file, []).append((info.offset, info.offset + info.nbytes))
    read = {name: _reader(source.files[name]) for name in wanted}
    parts = [(name, *part) for name in sorted(wanted) for part in joined(wanted[name], NEAR)]
    if source.is_elsewhere:
        with Threads(min(_REQUESTS, len(parts))) as threads:
            contents = threads.map(lambda part: read[part[0]](*part[1:]), parts)
    else:
        contents = [read[name](begin, end) for name, begin, end in parts]

    def content(info: TensorInfo) -> bytes:
        number = bisect_right(parts, (info.file, info.offset), key=lambda part: part[:2]) - 1
        start = info.offset - parts[number][1]
        return bytes(contents[number][start : start + info.nbytes])

    return [content(info) for info in tensors]


def _reader(file: SourceFile) -> Read:
    if file.remote is not None:
        return file.remote.open()

    def read(begin: int, end: int) -> memoryview:
        with open_file(Path(file.path)) as opened:
            return memoryview(os.pread(opened.fileno(), end - begin, begin))

    return read
