"""A line of a format's data with its sources exchanged: a split by it is wrong, and is mapped back by the same line."""

from __future__ import annotations

import json
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
    with mock.patch.object(format_file, "PROGRAMS", programs), mock.patch.dict(format_file.READ, clear=True):
        yield
