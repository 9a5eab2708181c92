"""One full Hugging Face checkpoint: the original's files again, or new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from formats.errors import MismatchError
from formats.files.safetensors import TensorInfo, build_header, tensor_bytes
from formats.files.sharded import MANIFEST, FileRecord
from reshard.mesh.plan import Plan, make_plan
from reshard.model.model import in_order
from reshard.move.reading import Sums
from reshard.placement.arrangement import arrangement_of
from reshard.publishing.journal import Finished
from reshard.source.source import UNSPLIT, Source
from reshard.writing.files import DEFAULT_SHARD_SIZE
from reshard.writing.outputs import Output
from reshard.writing.shard_files import NewFile, index_text, new_file, partition


class FullCheckpoint(Output):
    """The files of a full checkpoint and its index: as in the source's manifest, if it has one."""

    def __init__(self, source: Source, max_shard_size: int | None) -> None:
        """With ``max_shard_size`` (bytes) new files of at most this size are written."""
        plan = make_plan(source.model, UNSPLIT)
        self.source, self.arrangement, self.ranks = source, arrangement_of(plan, None), (0,)
        self.max_shard_size, self.left_behind = max_shard_size or DEFAULT_SHARD_SIZE, source.left_behind
        self.is_cut_by_size = not self._is_restored(max_shard_size)
        self.files, self.documents = self._anew() if self.is_cut_by_size else self._original()

    def _is_restored(self, max_shard_size: int | None) -> bool:
        return bool(self.source.record.files) and max_shard_size is None

    def _original(self) -> tuple[list[NewFile], dict[str, bytes]]:
        record = self.source.record
        _check_restorable(self.source, self.arrangement.plan)
        index = {record.index_name: record.index} if record.index_name and record.index is not None else {}
        return [
            NewFile(f.name, 0, f.header, f.size, f.places, expected=f.checksum, summed=f.checksum is not None)
            for f in record.files
        ], index

    def _anew(self) -> tuple[list[NewFile], dict[str, bytes]]:
        model = self.arrangement.plan.model
        sizes = {kind: tensor_bytes(kind.name, kind.dtype, kind.shape) for kind in model.kinds}
        tensors = ((name, kind.dtype, kind.shape, sizes[kind]) for name, kind, _ in in_order(model.tensors))
        shards = partition(tensors, self.max_shard_size)
        headers = [build_header(shard.tensors, {"format": "pt"}) for shard in shards]
        files = [new_file(shard, "", 0, header, summed=False) for shard, header in zip(shards, headers, strict=True)]
        return files, {"model.safetensors.index.json": index_text(shards).encode()} if len(shards) > 1 else {}

    @property
    def command(self) -> str:
        """A merge of what is split, else written anew."""
        return "merge" if self.source.is_split else "write"

    @property
    def task(self) -> dict[str, Any]:
        """The task: the source and the files."""
        files = [[file.name, file.size] for file in self.files]
        return {"command": "merge", "source": self.source.record.id, "files": files}

    def records(self, finished: Mapping[str, Finished], rank: int) -> Sequence[FileRecord]:
        """It has no manifest, so nothing is recorded."""
        return ()

    def last_documents(self, finished: Mapping[str, Finished], sums: Sums) -> dict[str, bytes]:
        """The index and the source's own files."""
        return dict(self.documents) | self.source.read_side_files()


def _check_restorable(source: Source, plan: Plan) -> None:
    """Raise MismatchError unless the headers in the manifest describe exactly the tensors of the shards."""
    kept: dict[str, TensorInfo] = {}
    for file in source.record.files:
        kept.update(file.tensors)
    for name, kind, _ in plan.model.tensors:
        info = kept.pop(name, None)
        if info is None or info.shape != kind.shape or info.dtype != kind.dtype:
            raise MismatchError(
                f"{source.path / MANIFEST}: its source files do not have tensor '{name}' as the shards have it"
            )
    if kept:
        raise MismatchError(f"{source.path}: tensor '{min(kept)}' is in the manifest's source files, but in no shard")
