"""The answer of a command that writes: the work done or planned, and the time of each step."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from reshard.formats.errors import listed
from reshard.formats.files.safetensors import DTYPE_BITS
from reshard.formats.mesh import Mesh
from reshard.move.jobs import FilePlan, Job, Places
from reshard.store.staging_names import staging_of
from reshard.system import Share
from reshard.text import Result, human_bytes, plural

LONG = 1.0
"""Seconds of a run that is worth a line on where the time went."""


class Spent(NamedTuple):
    """The seconds that each step took."""

    opening: float
    """Opening the source, with any download of it, and planning."""
    moving: float
    """Reading and writing weight files."""
    publishing: float
    """All that comes after that, and uploading."""


@dataclass(frozen=True, repr=False)
class Summary(Result):
    """The result of a split or merge, or its plan with ``dry_run``."""

    command: str
    """``split``, ``re-split``, ``merge``, or ``write``: one full checkpoint of another."""
    source: str
    out: Path | str
    source_mesh: Mesh
    mesh: Mesh
    tensors: int
    files: int
    nbytes: int
    """The bytes of all weight files."""
    written: int
    """The bytes that this run wrote."""
    padding: Mapping[str, tuple[int, int]]
    """The size before and after, for each padded axis."""
    ranks: tuple[int, ...]
    """The ranks that this run wrote."""
    complete: bool
    """Whether the whole output is there, under its final name."""
    dry_run: bool
    part: Share | None = None
    """This process's part of the files, if several share them: ``files`` and ``nbytes`` count it alone."""
    fetched: int = 0
    """Bytes of weights from a remote source."""
    tried_again: int = 0
    """Requests for weights and headers that were made again after a failure."""
    left_behind: tuple[str, ...] = ()
    """Contents of the source for which the output has no place."""
    note: str | None = None
    """A sentence that a reader of the output must know."""
    load: str | None = None
    """The command that loads another program's format."""
    error: tuple[str, float] | None = None
    """The quantized weight with the largest error, and that error's root mean square relative to the weight's."""
    spent: Spent | None = None
    """Seconds of each step; None if nothing was to be written."""
    planned: Sequence[FilePlan] = field(default=(), compare=False)
    """The weight files that ``dry_run`` would write."""
    moves: Sequence[Job] = field(default=(), compare=False)
    """With ``dry_run``: from where to where."""

    @property
    def headline(self) -> str:
        """One line: the action, the number of tensors and files, and their size."""
        verb = {"split": "split", "re-split": "re-split", "merge": "merged", "write": "wrote"}[self.command]
        ranks, which = self.mesh.size, plural(self.mesh.size, "rank")
        if len(self.ranks) < ranks:
            which = f"{'ranks' if len(self.ranks) > 1 else 'rank'} {', '.join(map(str, self.ranks))} of {ranks}"
        sources = f"{plural(self.source_mesh.size, 'rank')} of " if self.source_mesh.size > 1 else ""
        would = f"would {self.command}" if self.dry_run else verb
        into = "into one checkpoint" if self.command == "merge" else f"into {which}"
        into += f", part {self.part.index} of {self.part.count}" if self.part is not None else ""
        counts = f"{plural(self.tensors, 'tensor')} in {plural(self.files, 'file')}, {human_bytes(self.nbytes)}"
        text = f"{would} {sources}{self.source} {into}: {counts}"
        if self.command == "write":  # the source is as it was
            text = f"{would} one checkpoint{into.removeprefix(f'into {which}')} from {self.source}: {counts}"
        return text[0].upper() + text[1:]

    def to_text(self, width: int | None = None) -> str:
        """One paragraph, the command that loads the result, and where the time of a long run went."""
        lines = [_paragraph(self)]
        if self.load is not None and self.complete:
            lines.append(f"Load it: {self.load}")
        if self.spent is not None and sum(self.spent) >= LONG:
            opening, moving, publishing = self.spent
            lines.append(f"Time: opening {opening:.1f} s, moving {moving:.1f} s, publishing {publishing:.1f} s.")
        return "\n".join(lines)


def _paragraph(summary: Summary) -> str:
    """Return a paragraph: the action, numbers of tensors and files, bytes, seconds, padding and place."""
    if summary.part is not None and not summary.files:
        return "None of the files is for this process."
    if summary.part is not None and summary.complete and not summary.written and not summary.dry_run:
        return f"None of the files is left to write for this process: {_where(summary)}."
    if not summary.ranks:
        return f"Of {plural(summary.mesh.size, 'rank')} none is left to write for this process: {_where(summary)}."
    parts = [summary.headline]
    if summary.spent is not None:
        seconds = sum(summary.spent)
        parts[0] += f", in {seconds:.2f} s"
        # with little data this is the time of starting, with a Hub id that of the download
        if summary.written >= 100_000_000 and Path(summary.source).exists():
            parts[0] += f" ({summary.written / max(seconds, 1e-9) / 1e9:.2f} GB/s)"
        if summary.written < summary.nbytes:
            parts.append(f"{human_bytes(summary.nbytes - summary.written)} of that had been written before")
    if summary.fetched:
        again = f", {plural(summary.tried_again, 'request')} tried again" if summary.tried_again else ""
        parts.append(f"{human_bytes(summary.fetched)} of the weights were fetched{again}")
    for axis, (full, padded) in summary.padding.items():
        parts.append(f"{axis} padded from {full:,} to {padded:,} with zeros, which merge removes")
    for axis, unit in summary.mesh.uneven:
        units = f", in units of {unit:,}" if unit > 1 else ""
        parts.append(f"uneven parts of {axis}{units}: the last ranks have less")
    if summary.left_behind:
        parts.append(f"left behind: {listed(summary.left_behind, 10)}, which the output has no place for")
    parts += [summary.note] if summary.note else []
    if summary.error is not None:
        name, error = summary.error
        parts.append(f"the largest relative error of a weight is {error:.2%} (root mean square, {name})")
    parts.append(f"nothing was written to {summary.out}" if summary.dry_run else _where(summary))
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def _where(summary: Summary) -> str:
    if summary.complete:
        return f"the result is {summary.out}"
    place, what = summary.out, "parts" if summary.part is not None else "ranks"
    if isinstance(place, Path) and staging_of(place).exists():
        place = staging_of(place)
    return f"other {what} are still missing: see `{shlex.join(['reshard', 'inspect', str(place)])}`"


def file_document(file: FilePlan) -> dict[str, Any]:
    """A planned file as JSON: its size, and where it has which tensor."""
    places = dict(file.layout.places)
    tensors = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": [*tensor.shape],
            "offset": places[tensor.name],
            "bytes": tensor.nbytes,
        }
        for tensor in file.tensors
    }
    return {"file": file.name, "rank": file.rank, "bytes": file.layout.size, "tensors": tensors}


def move_document(job: Job) -> dict[str, Any]:
    """A move as JSON: the tensor, and which part of it lies where before and after it.

    A part is a list of the ``[first, end]`` of its indices for each dimension of ``shape``. Its first element lies at
    byte ``offset`` of the file, and the next one of a dimension as many elements behind as ``strides`` says.
    """
    location = job.sources[0].location
    return {
        "tensor": job.name,
        "shape": [*location.spread.full],
        "from": [entry for places in job.sources for entry in _parts(places)],
        "to": [*_parts(job.targets, job.ranks)],
    }


def _parts(places: Places[Any], ranks: Iterable[int] | None = None) -> Iterator[dict[str, Any]]:
    """The parts of an atom on one side: of all its ranks, or of these."""
    stored, spread = places.location.stored, places.location.spread
    for rank, pieces in sorted(spread.pieces.items()):
        if ranks is not None and rank not in ranks:
            continue
        place = places.on(rank)
        for piece in pieces:
            yield {
                "file": place.file.name,
                "tensor": stored.name_on(rank),
                "dtype": stored.dtype,
                "offset": place.offset + piece.base * DTYPE_BITS[stored.dtype] // 8,
                "strides": [*piece.strides],
                "part": [[[run.offset, run.offset + run.length] for run in runs] for runs in piece.runs],
            }


def move_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """A move as text: a line for the tensor, and one for each of its parts in a file."""
    yield f"{document['tensor']} {document['shape']}"
    for word, parts in (("from", document["from"]), ("to", document["to"])):
        for each in parts:
            part = ", ".join("+".join(f"{first}:{end}" for first, end in runs) for runs in each["part"])
            yield f"  {word:<4} {each['file']} byte {each['offset']:,}: {each['tensor']} {each['dtype']} [{part}]"
