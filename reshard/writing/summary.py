"""How far a split or merge is; what it did, and where the time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from formats.mesh import Mesh
from reshard.store.staging_names import staging_of
from reshard.system import Share
from reshard.text import Result, human_bytes, plural


class State(NamedTuple):
    """How far a split or merge is."""

    written: int
    """Bytes written to the weight files by this run and those before."""
    to_write: int
    """The size of all these files."""
    again: int
    """The requests that were made again."""


Progress = Callable[[State], None]


def no_progress(state: State) -> None:
    """Show no progress."""


LONG = 1.0
"""Seconds of a run that is worth a line on where the time went."""


class Spent(NamedTuple):
    """Where the time went, in seconds."""

    opening: float
    """Opening the source, with any download of it, and planning."""
    moving: float
    """Reading and writing weight files."""
    publishing: float
    """All that comes after that, and uploading."""


@dataclass(frozen=True, repr=False)
class Summary(Result):
    """What a split or merge did, or would do with ``dry_run``.

    ``nbytes`` is the size of all weight files in bytes, ``written`` the part that this run wrote. ``padding`` has the
    size before and after for each padded axis. ``left_behind`` names what the source has besides the model, ``note`` is
    what a reader of the output must know, ``load`` the command that loads another program's format.
    """

    command: str
    source: str
    out: Path | str
    source_mesh: Mesh
    mesh: Mesh
    tensors: int
    files: int
    nbytes: int
    written: int
    padding: Mapping[str, tuple[int, int]]
    ranks: tuple[int, ...]
    complete: bool
    dry_run: bool
    part: Share | None = None
    """The part of the files that this process wrote, if several share them; ``files`` and ``nbytes`` count only that
    part.
    """
    fetched: int = 0
    """Bytes of weights that were fetched from a remote source."""
    tried_again: int = 0
    """The requests for weights and headers that were made again because an earlier one had failed."""
    left_behind: tuple[str, ...] = ()
    note: str | None = None
    load: str | None = None
    error: tuple[str, float] | None = None
    """Of the weights that this run quantized: that with the largest error, and the root mean square of what was lost
    relative to that of its numbers.
    """
    spent: Spent | None = None
    """None if nothing was to be written."""

    @property
    def headline(self) -> str:
        """What was done, to how many tensors and files, and how large they are."""
        size, files = human_bytes(self.nbytes), plural(self.files, "file")
        text = f"{_did(self)}: {plural(self.tensors, 'tensor')} in {files}, {size}"
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
    """What, how many tensors and files, bytes, seconds, padding, where."""
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
        parts.append(f"{axis} padded from {full:,} to {padded:,} with zeros, which merge strips")
    for axis, unit in summary.mesh.uneven:
        parts.append(f"the last ranks have less of {axis}, which goes in units of {unit:,}")
    if summary.left_behind:
        parts.append(f"left behind: {', '.join(summary.left_behind)}, which the output has no place for")
    parts += [summary.note] if summary.note else []
    if summary.error is not None:
        name, error = summary.error
        parts.append(f"the largest relative error of a weight is {error:.2%} (root mean square, {name})")
    parts.append(f"nothing was written to {summary.out}" if summary.dry_run else _where(summary))
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def _did(summary: Summary) -> str:
    verb = {"split": "split", "re-split": "re-split", "merge": "merged", "write": "wrote"}[summary.command]
    ranks, listed = summary.mesh.size, ", ".join(map(str, summary.ranks))
    which = plural(ranks, "rank")
    if len(summary.ranks) < ranks:
        which = f"{'ranks' if len(summary.ranks) > 1 else 'rank'} {listed} of {ranks}"
    sources = f"{plural(summary.source_mesh.size, 'rank')} of " if summary.source_mesh.size > 1 else ""
    would = f"would {summary.command}" if summary.dry_run else verb
    into = {"merge": "into one checkpoint", "write": "as one checkpoint"}.get(summary.command, f"into {which}")
    if summary.part is not None:
        into += f", part {summary.part.index} of {summary.part.count}"
    return f"{would} {sources}{summary.source} {into}"


def _where(summary: Summary) -> str:
    if summary.complete:
        return f"the result is {summary.out}"
    if summary.part is not None:
        place = staging_of(summary.out) if isinstance(summary.out, Path) else summary.out
        return f"other parts are still missing: see 'reshard inspect {place}'"
    return f"other ranks are still missing: see 'reshard inspect {summary.out}'"
