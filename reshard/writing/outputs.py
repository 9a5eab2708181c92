"""What an output has: its weight files, the small files beside them, and what its manifest says.

There is one class for each form: folders of ranks (``rank_folders.py``), the files of another program (``program.py``)
and one full checkpoint (``full_checkpoint.py``). ``rewrite.py`` writes any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from formats.files.checksum import checksum
from formats.files.sharded import MANIFEST, FileRecord, Manifest, manifest_text
from reshard.engine.reading import Sums
from reshard.planning.arrangement import Arrangement
from reshard.storage.output import Staging
from reshard.storage.source import Source
from reshard.writing.files import NewFile
from reshard.writing.publishing import record_with_sums


class Output(ABC):
    """What is written of a source: an arrangement of its model, divided into files."""

    form: str | None = None
    """The name of the format in a manifest; None for reshard's own."""
    by_rank = False
    """Whether each rank is published on its own."""
    source: Source
    arrangement: Arrangement
    ranks: Sequence[int]
    max_shard_size: int
    files: Sequence[NewFile]
    """The weight files of the model."""
    states: Sequence[Output] = ()
    """What is written with the model, each from a source of its own: states of training."""
    documents: Mapping[str, bytes]
    """The small files beside those of the source, but for the manifest."""
    left_behind: Sequence[str]

    def all_files(self) -> list[NewFile]:
        """The weight files, also of states."""
        return [file for of in (self, *self.states) for file in of.files]

    def load_command(self, out: object) -> str | None:
        """The command by which another program loads the output ``out``."""
        return None

    @property
    def command(self) -> str:
        """What it is called to write this."""
        return "re-split" if self.source.is_split else "split"

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
            "format": self.form,
            "max_shard_size": self.max_shard_size,
        }

    @abstractmethod
    def finish(self, staging: Staging, rank: int) -> Iterator[FileRecord]:
        """Write a rank's own small files; yields the records of all its files."""

    def manifest(
        self, ranks: Mapping[int, tuple[FileRecord, ...]], side_files: Mapping[str, bytes], sums: Sums | None = None
    ) -> Manifest:
        """The manifest that lists ``ranks``, with the checksums of the source files that were read in full."""
        source = self.source
        side = tuple(FileRecord(name, len(data), checksum(data)) for name, data in side_files.items())
        return Manifest(
            source.identity(self.arrangement.plan), record_with_sums(source, sums), source.rules, self.max_shard_size,
            side, ranks, source.inputs, self.form,
        )  # fmt: skip

    def last_documents(self, staging: Staging, sums: Sums) -> dict[str, bytes]:
        """The small files that are written when all weight files are finished, the manifest last."""
        side_files = self.source.read_side_files()
        manifest = self.manifest({rank: tuple(self.finish(staging, rank)) for rank in self.ranks}, side_files, sums)
        return side_files | dict(self.documents) | {MANIFEST: manifest_text(manifest).encode()}
