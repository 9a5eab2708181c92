"""Files at the place of an output, and the rule that says which of them may be replaced.

A checkpoint may be replaced. Files that belong to no checkpoint are never removed, because only the user could restore
them. A manifest names the files of its checkpoint. Without one, the names are those that Hugging Face and the formats
of other programs give to their files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from reshard.formats.errors import CheckpointError
from reshard.formats.files.checkpoint import ADAPTER_CONFIG, METADATA
from reshard.formats.files.manifest import INTACT_FILE, MANIFEST
from reshard.formats.files.side_files import named_files
from reshard.formats.mesh import RANK_FOLDER
from reshard.formats.store import read_file
from reshard.publishing.locks import check_staging
from reshard.store.selection import INDICES, recorded, weights_named
from reshard.store.staging_names import JOURNAL, STATE, UNFINISHED, json_of, staging_of
from reshard.system import disk_errors

if TYPE_CHECKING:
    from reshard.formats.notation.format import Format

LAST = (ADAPTER_CONFIG, "config.json", "model.safetensors.index.json", MANIFEST)
"""The files that make a place a checkpoint: when files are written one by one, these are written last and removed
first.
"""
_WEIGHTS = re.compile(
    r"(model|adapter_model|pytorch_model)(-\d{5,}-of-\d{5,})?\.(safetensors|bin)|consolidated\.\d+\.pth"
)
_OF_A_RANK = {"config.json", ADAPTER_CONFIG, *INDICES}
_OF_A_MODEL = re.compile(
    r"(generation_|preprocessor_|video_preprocessor_|processor_|tokenizer_|adapter_|hf_quant_|quantize_|quant_)?"
    r"config\.json|tokenizer\.json|tokenizer[\w.]*\.model|[\w.]*\.tiktoken|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|spiece\.model|sentencepiece\.bpe\.model|bpe\.codes"
    r"|chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja"
    r"|(LICENSE|NOTICE|README|USE_POLICY)(\.md|\.txt)?|\.gitattributes|\.cache/huggingface/.+"
)
"""Files beside the weights on the Hub, and those that its client adds."""

_FOLDER = r"(release|iter_\d{7,})/"
"""The folders of weights that a tracker names."""

ReadFile = Callable[[str], bytes | None]
"""The content of a file of a place; None, if it is not there."""


@dataclass(frozen=True)
class Existing:
    """The files that are at the place of an output: their names, and a function that reads one.

    If the place is a folder, empty folders in it are named too, with a ``/`` at the end.
    """

    place: str
    names: frozenset[str]
    read: ReadFile
    is_folder: bool = False

    @property
    def _is_unfinished(self) -> bool:
        """Whether a bucket holds an unfinished output. In a folder, marks do not count: it may be a copy of such a
        bucket.
        """
        return not self.is_folder and any(name.startswith((UNFINISHED, JOURNAL)) for name in self.names)

    def check_replaceable(self, *, overwrite: bool, again: ReadFile = lambda _: None) -> None:
        """Raise CheckpointError unless nothing is there, or a checkpoint, or part of one, that may be replaced.

        It may have no file that belongs to no checkpoint, except files that are written ``again`` as they are.
        """
        if self.names and not self._is_unfinished:
            if self.names.isdisjoint(LAST):
                raise CheckpointError(
                    f"{self.place} holds '{min(self.names)}' and is not a checkpoint, so it is not overwritten",
                    "choose another place",
                )
            if not overwrite:
                raise CheckpointError(f"{self.place} exists", "remove it, choose another place, or pass --overwrite")
        self.refuse_unknown(self.names, again)

    def refuse_unknown(self, names: Collection[str], again: ReadFile = lambda _: None) -> None:
        """Raise CheckpointError if any of the files ``names`` belongs to no checkpoint.

        Those that are written ``again`` with the same content are no loss.
        """
        unknown = [name for name in self.unknown() if name in names] if names else []
        foreign = [name for name in unknown if (new := again(name)) is None or self.read(name) != new]
        if foreign:
            tail = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise CheckpointError(
                f"{self.place} holds '{foreign[0]}'{tail}, not part of the checkpoint there, so it is not overwritten",
                "move away what is yours, or choose another place",
            )

    def unknown(self) -> list[str]:
        """The files that neither the manifest nor a format knows, sorted.

        A place that is marked as unfinished may have files of several outputs.
        """
        accounted = {name for name in self.names if name.startswith(STATE) or name.endswith("/") or _is_of_a_rank(name)}
        manifest = json_of(self.read(MANIFEST))
        remaining = self.names - accounted - {MANIFEST, *recorded(self.read)}
        from reshard.formats.notation.format_file import all_formats  # rarely needed

        if manifest.get("format") == "reshard" and not self._is_unfinished:
            formats = [format for name, format in all_formats().items() if name == manifest.get("layout")]
        else:
            remaining -= {name for name in remaining if _WEIGHTS.fullmatch(name) or _OF_A_MODEL.fullmatch(name)}
            remaining -= {*INDICES, *named_files(self.read), *weights_named(self.read)}
            formats = [*all_formats().values()]
        return sorted(name for name in remaining if not any(_is_of(format, name) for format in formats))


def existing_in(out: Path) -> Existing:
    """List the files in a folder; none if there is no folder."""
    names = list[str]()
    for root, folders, files in os.walk(out):
        folder = Path(root)
        inside = [name for name in folders if (folder / name).is_symlink()] + files
        names += [(folder / name).relative_to(out).as_posix() for name in inside]
        if not folders and not files and folder != out:
            names.append(f"{folder.relative_to(out).as_posix()}/")

    def read(name: str) -> bytes | None:
        return read_file(out / name) if (out / name).is_file() else None

    return Existing(str(out), frozenset(names), read, is_folder=True)


def _is_of_a_rank(name: str) -> bool:
    """Whether a name is that of a file in a rank's folder."""
    folder, _, file = name.partition("/")
    return RANK_FOLDER.fullmatch(folder) is not None and (file in _OF_A_RANK or _WEIGHTS.fullmatch(file) is not None)


def _is_of(format: Format, name: str) -> bool:
    """Whether a program's format uses a name for a file."""
    fixed = {INTACT_FILE, format.files.tracker, format.files.index, format.settings.file if format.settings else None}
    inside = re.sub(f"^{_FOLDER}", "", name) if format.files.tracker is not None else name
    inside = inside.removeprefix(format.files.place)
    documents = {*format.container.documents} | ({METADATA} if format.files.is_distributed else set())
    return name in fixed or inside in documents or format.files.is_named(inside)


# ------------------------------------------------------------------------------------- whether an output may be there


PAGE = b'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta name="generator" content="reshard '
"""The beginning of each of our pages (``reshard/pages/base.html``)."""


def check_file(file: Path, *, is_page: bool = False) -> None:
    """Raise CheckpointError if a command may not write a file: there is no such folder, or something is there already.

    A page may be there where a page is written. Nothing else is replaced: what a file is for, only its owner knows.
    """
    if not file.absolute().parent.is_dir():
        raise CheckpointError(f"{file}: there is no folder {file.absolute().parent}", "make it first")
    if not os.path.lexists(file):
        return
    with disk_errors(file):
        if not is_page or not file.is_file() or _begin(file) != PAGE:
            what = " and is no page of reshard" if is_page else ""
            raise CheckpointError(f"{file} exists{what}, it will not be overwritten", "choose another name")


def _begin(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(len(PAGE))


def check_place(out: Path, sources: Sequence[Path]) -> None:
    """Raise CheckpointError if no output can be at a place, or if the place or its staging folder overlaps with a
    source.

    ``sources`` are the folders and files of the source. Changes nothing.
    """
    for place in (out, staging_of(out)):
        _check_apart(out, place, sources)
    if not out.parent.is_dir():
        from reshard.formats.hints import meaning, with_hint  # for an error alone

        hub = meaning("upload", ()) if len(out.parts) == 2 else ""  # it may be meant as ORG/NAME
        raise CheckpointError(f"{out.parent}: no such folder", with_hint("make it first", hub))
    if out.is_symlink():
        raise CheckpointError(
            f"{out} is a link, and the output would take its place",
            "give the folder that it leads to",
        )
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} exists and is not a folder")
    if out.is_mount():
        raise CheckpointError(
            f"{out} is the root of a file system, which cannot be replaced", f"give a folder in it, as {out / 'model'}"
        )
    check_staging(out)


def _check_apart(out: Path, place: Path, sources: Sequence[Path]) -> None:
    """Raise CheckpointError if a place that is replaced is or holds something of the source, or lies in it.

    What is compared is what is there, as the file system numbers it: one folder may have several names, by links and
    by mounts.
    """
    target = Path(os.path.realpath(place))  # Path.resolve fails on a link to itself
    around = {*_numbers((target, *target.parents))}
    within = {*_numbers(Path(root, name) for root, _, files in os.walk(target) for name in ("", *files))}
    for source in sources:
        real = Path(os.path.realpath(source))
        numbers = {*_numbers([real])}
        if not (numbers | {*_numbers([real.parent])}) & within and not (numbers & around and real.is_dir()):
            continue
        what = f"{out} and {source} are the same folder, or one lies in the other"
        if not real.is_dir():
            what = f"{source} is read, and lies in {out}, which would be replaced"
        if place != out:
            what = f"{out} would be built in {place}, which is the source {source}, or around or in it"
        raise CheckpointError(what, "choose another output folder")


def _numbers(paths: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """The device and inode of each folder that is there, and of each file that has no second name (a hard link)."""
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            if path.is_dir() or status.st_nlink == 1:
                yield status.st_dev, status.st_ino
