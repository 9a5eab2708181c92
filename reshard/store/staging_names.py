"""Names of reshard's own folders and files, beside an output while it is built, by which it recognises them.

A folder ``OUT.partial`` with a journal was made by reshard; without one it is refused.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from reshard.formats.errors import CheckpointError

STATE = ".reshard-"
"""The prefix of names that tell how far an output is."""
UNFINISHED = f"{STATE}unfinished"
"""The object that says that an output is still being uploaded."""
COMMON = f"{STATE}common"
"""The lock that each process takes to begin and to end."""
JOURNAL = f"{STATE}journal-"
"""The prefix of a journal's name: a locked file, or an object, that tells which files a process writes and has
written.
"""
BUILT = "output"
"""The folder in a staging folder that gets the name of the output."""
SUFFIX = ".partial"


def check_name(out: str | Path) -> None:
    """Raise CheckpointError for a folder without a name of its own (``.``, ``..`` or ``/``)."""
    if Path(out).name in {"", ".."}:
        raise CheckpointError(f"'{out}' is not a name for a new folder", "give another name")


def staging_of(out: Path) -> Path:
    """The folder in which an output is built."""
    return out.with_name(out.name + SUFFIX) if out.name else out / SUFFIX  # . and / have no name


def task_name(task: Mapping[str, Any]) -> str:
    """The name of a task, a JSON document: its command and its digest."""
    digest = blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=16).hexdigest()
    return f"{task['command']}-{digest}"


def not_begun(labels: Collection[str]) -> list[str]:
    """The parts of an output (``part-0-of-4``) that have not begun, given those that have."""
    counts = {int(label.rpartition("-")[2]) for label in labels if label.startswith("part-")}
    all_of = (f"part-{index}-of-{count}" for count in sorted(counts) for index in range(count))
    return [label for label in all_of if label not in labels]


_CHECK = ', "check": '


def journal_line(entry: Mapping[str, Any], begin: str = "") -> str:
    """A line of a journal: JSON, with a checksum of the entry and of the line with which its run began."""
    text = json.dumps(entry)
    return f"{text[:-1]}{_CHECK}{_check_of(text, begin)}\n"


def _check_of(text: str, begin: str) -> str:
    return f'"{blake2b((begin + text).encode(), digest_size=8).hexdigest()}"}}'


def entries_in(lines: Iterable[str], *kinds: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the entries of a journal whose first key is one of ``kinds``, each with the line that its run began with.

    A run begins with an entry whose first key is ``task``. A line whose checksum is not right is none.
    """
    first, begin, wanted = "", dict[str, Any](), tuple(f'{{"{kind}"' for kind in kinds)
    for line in lines:
        is_begin = line.startswith('{"task"')
        if is_begin:
            first, begin = "", {}
        if is_begin or line.startswith(wanted):
            text, _, check = line.removesuffix("\n").rpartition(_CHECK)
            if check == _check_of(text + "}", first):
                entry = json.loads(text + "}")
                first, begin = (line, entry) if is_begin else (first, begin)
                if line.startswith(wanted):
                    yield begin, entry


def journal_in(content: bytes | None, *kinds: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The entries of a journal in a bucket (see ``entries_in``)."""
    return entries_in((content or b"").decode(errors="replace").splitlines(keepends=True), *kinds)


def json_of(content: bytes | None) -> dict[str, Any]:
    """A JSON object; empty if the content is not one."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(content or b"")
        return document if isinstance(document, dict) else {}
    return {}
