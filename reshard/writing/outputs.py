"""What an output has: its weight files, the small files beside them, and what its manifest says.

There is one class for each form: folders of ranks (``rank_folders.py``), the files of another program (``program.py``)
and one full checkpoint (``full_checkpoint.py``). ``rewrite.py`` writes any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

from formats.files.checksum import checksum
from formats.files.sharded import MANIFEST, FileRecord, Manifest, SourceRecord, manifest_text
from formats.notation.format import Format
from reshard.move.reading import Sums
from reshard.placement.arrangement import Arrangement
from reshard.publishing.existing import Existing
from reshard.publishing.journal import Finished
from reshard.source.source import Source
from reshard.writing.shard_files import NewFile


class Output(ABC):
    """What is written of a source: an arrangement of its model, divided into files."""

    format: Format | None = None
    """None for reshard's own."""
    folders: Sequence[str] = ()
    """The folders of ranks that are added to an output; none, if it is written as a whole."""
    source: Source
    arrangement: Arrangement
    ranks: Sequence[int]
    max_shard_size: int
    is_cut_by_size: bool = True
    """Whether a smaller ``max_shard_size`` makes more and smaller files of the same model."""
    files: Sequence[NewFile]
    """The weight files of the model."""
    states: Sequence[Output] = ()
    """What is written with the model, each from a source of its own: states of training."""
    documents: Mapping[str, bytes]
    """The small files besides those of the source, without the manifest."""
    left_behind: Sequence[str]

    def all_files(self) -> list[NewFile]:
        """The weight files, also of states."""
        return [file for of in (self, *self.states) for file in of.files]

    def load_command(self, out: object) -> str | None:
        """The command by which another program loads the output ``out``."""
        return None

    @property
    def command(self) -> str:
        """The command that writes this, in words."""
        return "re-split" if self.source.is_split else "split"

    @property
    def _format_name(self) -> str | None:
        return self.format.name if self.format is not None else None

    @property
    def task(self) -> dict[str, Any]:
        """The task: only a run with an equal one may use the finished files of this run."""
        identity = self.source.identity(self.arrangement.plan)
        return {
            "command": "split",
            "source": identity.source,
            "mesh": identity.mesh.to_document(),
            "padding": dict(identity.padding),
            "plan": identity.plan,
            "format": self._format_name,
            "max_shard_size": self.max_shard_size,
        }

    @abstractmethod
    def records(self, finished: Mapping[str, Finished], rank: int) -> Sequence[FileRecord]:
        """The records of a rank's files, all of which are finished."""

    def rank_documents(self, rank: int) -> Mapping[str, bytes]:
        """A rank's own small files."""
        return {}

    def manifest(
        self, ranks: Mapping[int, tuple[FileRecord, ...]], side_files: Mapping[str, bytes], sums: Sums | None = None
    ) -> Manifest:
        """The manifest that lists ``ranks``, with the checksums of the source files that were read in full."""
        source = self.source
        side = tuple(starmap(record_of, side_files.items()))
        return Manifest(
            source.identity(self.arrangement.plan), _record_with_sums(source, sums),
            source.manifest_rules(self._format_name), self.max_shard_size, side, ranks, source.inputs,
            self._format_name,
        )  # fmt: skip

    def check_existing(self, there: Existing, *, overwrite: bool) -> None:
        """Raise CheckpointError unless this output may replace what is at its place."""
        there.check_replaceable(self.source.read_side_files(), overwrite=overwrite)

    def with_others(self, manifest: Manifest) -> Manifest:
        """The manifest, with what is already in the output and stays there."""
        return manifest

    def last_documents(self, finished: Mapping[str, Finished], sums: Sums) -> dict[str, bytes]:
        """The small files that are written when all weight files are finished, the manifest last."""
        side_files = self.source.read_side_files()
        ranks = {rank: tuple(self.records(finished, rank)) for rank in self.ranks}
        manifest = self.with_others(self.manifest(ranks, side_files, sums))
        own = {name: content for rank in self.ranks for name, content in self.rank_documents(rank).items()}
        return own | side_files | dict(self.documents) | {MANIFEST: manifest_text(manifest).encode()}


def record_of(name: str, content: bytes) -> FileRecord:
    """The record of a small file."""
    return FileRecord(name, len(content), checksum(content))


def _record_with_sums(source: Source, sums: Sums | None) -> SourceRecord:
    """The record of the original, with the checksums of the files of a full checkpoint that were read in full."""
    record = source.record
    if source.checkpoint is None or sums is None:
        return record
    found = {file.name: sums.checksum(file) for file in sums.of}
    return replace(record, files=tuple(replace(file, checksum=found[file.name]) for file in record.files))
