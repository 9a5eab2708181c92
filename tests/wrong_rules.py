"""Formats' data with sources exchanged: a split by it is wrong, and is mapped back by the same lines."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from reshard.formats.notation import format_file


@contextmanager
def exchanged(folder: Path, file: str, line: str, order: tuple[int, ...]) -> Iterator[None]:
    """In the block, each list that this line of a file in formats/programs has is in another order.

    ``folder`` is for a copy of the files. Raises ValueError if there is no such line.
    """
    programs = Path(shutil.copytree(format_file.PROGRAMS, folder / "programs"))
    text, before, found = (programs / file).read_text(), "", 0
    for each in text.splitlines(keepends=True):
        name, _, value = each.partition(" = " if file.endswith(".toml") else ": ")
        if name.strip() == f'"{line}"' and value.startswith("["):
            sources = json.loads(value[: value.rindex("]") + 1])
            wrong = json.dumps([sources[at] for at in order])
            each, found = each.replace(value[: value.rindex("]") + 1], wrong), found + 1
        before += each
    if not found:
        raise ValueError(f"{file} has no line '{line}'")
    (programs / file).write_text(before)
    with _read_from(programs):
        yield


@contextmanager
def swapped(folder: Path, file: str, one: str, other: str) -> Iterator[None]:
    """In the block, two sources stand in each other's place in all lines of a file in formats/programs.

    ``folder`` is for a copy of the files. Raises ValueError if one of them is not there.
    """
    programs = Path(shutil.copytree(format_file.PROGRAMS, folder / "programs"))
    parts = re.split(f"({re.escape(json.dumps(one))}|{re.escape(json.dumps(other))})", (programs / file).read_text())
    if {*parts[1::2]} != {json.dumps(one), json.dumps(other)}:
        raise ValueError(f"{file} has not both '{one}' and '{other}'")
    places = {json.dumps(one): json.dumps(other), json.dumps(other): json.dumps(one)}
    (programs / file).write_text("".join(places.get(part, part) for part in parts))
    with _read_from(programs):
        yield


@contextmanager
def _read_from(programs: Path) -> Iterator[None]:
    with mock.patch.object(format_file, "PROGRAMS", programs), mock.patch.dict(format_file.READ, clear=True):
        yield
