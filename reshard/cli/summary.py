"""What ``split`` and ``merge`` share: how they are carried out, and the summary."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.cli.errors import resumable, work_is_done
from reshard.cli.printing import print_json, print_lines, print_path
from reshard.cli.progress import Progress
from reshard.text import human_bytes, plural

if TYPE_CHECKING:
    from reshard.writing.rewrite import WriteRequest
    from reshard.writing.summary import Spent, Summary

_Request = TypeVar("_Request", bound="WriteRequest")
LONG = 1.0
"""Seconds of a run that is worth a line on where the time went."""


def without_numpys_threads() -> None:
    """Have numpy start none for linear algebra: they are not used, and would spin beside the work."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def carry_out(
    command: Callable[[_Request], Summary], request: _Request, progress: str, *, as_json: bool, quiet: bool
) -> None:
    """Split or merge, show how far it is, and print what was done. After Ctrl-C, say what is kept."""
    started = time.monotonic()
    with (
        resumable(),
        Progress(command.__name__, how="none" if quiet or as_json else progress) as shown,
    ):
        summary = command(dataclasses.replace(request, progress=shown.moving))
    seconds = time.monotonic() - started
    with work_is_done():
        print_summary(summary, str(request.source), seconds, as_json=as_json, quiet=quiet)


def print_summary(summary: Summary, source: str, seconds: float, *, as_json: bool, quiet: bool) -> None:
    """Print what was done: one paragraph, one JSON document, or the output's path alone."""
    if as_json:
        print_json(_document(summary, seconds))
    elif quiet:
        print_path(summary.out)
    else:
        print_lines(_text(summary, source, seconds))
        if summary.load is not None and summary.complete:
            print_lines(f"Load it: {summary.load}")
        if summary.spent is not None and seconds >= LONG:
            print_lines(time_text(summary))


def _document(summary: Summary, seconds: float) -> dict[str, Any]:
    return {
        "command": summary.command,
        "dry_run": summary.dry_run,
        "source": summary.source,
        "out": str(summary.out),
        "source_mesh": summary.source_mesh.to_document(),
        "mesh": summary.mesh.to_document(),
        "ranks": list(summary.ranks),
        "part": [summary.part.index, summary.part.count] if summary.part else None,
        "complete": summary.complete,
        "tensors": summary.tensors,
        "files": summary.files,
        "bytes": summary.nbytes,
        "bytes_written": summary.written,
        "bytes_fetched": summary.fetched,
        "requests_tried_again": summary.tried_again,
        "seconds": round(seconds, 3),
        "time": _time(summary.spent) if summary.spent else None,
        "note": summary.note,
        "load": summary.load,
        "left_behind": list(summary.left_behind),
        "padding": {axis: {"size": size, "padded": padded} for axis, (size, padded) in summary.padding.items()},
    }


def _time(spent: Spent) -> dict[str, Any]:
    """Where the time went: of the run in seconds, and of the processes that moved bytes, each counted by itself."""
    phases = {key: round(getattr(spent, key), 3) for key in ("opening", "moving", "publishing")}
    return {**phases, "processes": {key: round(value, 3) for key, value in spent.processes._asdict().items()}}


def time_text(summary: Summary) -> str:
    """One line: the seconds of each phase, and what the processes did while bytes were moved."""
    spent = summary.spent
    assert spent is not None
    reading = "waiting for the source" if summary.fetched else "reading"
    shares = {reading if what == "reading" else what: value for what, value in spent.processes._asdict().items()}
    total = sum(shares.values())
    text = f"Time: opening {spent.opening:.1f} s, moving {spent.moving:.1f} s"
    if total:
        text += f" ({', '.join(f'{what} {value / total:.0%}' for what, value in shares.items())})"
    return f"{text}, publishing {spent.publishing:.1f} s."


def _text(summary: Summary, source: str, seconds: float) -> str:
    """One paragraph: what, how many tensors and files, bytes, seconds, padding, where."""
    if summary.part is not None and summary.complete and not summary.written and not summary.dry_run:
        return f"None of the files is left to write for this process: {_where(summary)}."
    if not summary.ranks:
        return f"Of {plural(summary.mesh.size, 'rank')} none is left to write for this process: {_where(summary)}."
    size, files = human_bytes(summary.nbytes), plural(summary.files, "file")
    parts = [f"{_did(summary, source)}: {plural(summary.tensors, 'tensor')} in {files}, {size}"]
    if not summary.dry_run:
        parts[0] += f", in {seconds:.2f} s"
        # with little data this is the time of starting, with a Hub id that of the download
        if summary.written >= 100_000_000 and Path(source).exists():
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
    parts.append(f"nothing was written to {summary.out}" if summary.dry_run else _where(summary))
    return ". ".join(part[0].upper() + part[1:] for part in parts) + "."


def _did(summary: Summary, source: str) -> str:
    verb = {"split": "split", "re-split": "re-split", "merge": "merged", "write": "wrote"}[summary.command]
    ranks, listed = summary.mesh.size, ", ".join(map(str, summary.ranks))
    which = plural(ranks, "rank")
    if len(summary.ranks) < ranks:
        which = f"{'ranks' if len(summary.ranks) > 1 else 'rank'} {listed} of {ranks}"
    before = f"{plural(summary.source_mesh.size, 'rank')} of " if summary.source_mesh.size > 1 else ""
    would = f"would {summary.command}" if summary.dry_run else verb
    into = {"merge": "into one checkpoint", "write": "as one checkpoint"}.get(summary.command, f"into {which}")
    if summary.part is not None:
        into += f", part {summary.part.index} of {summary.part.count}"
    return f"{would} {before}{source} {into}"


def _where(summary: Summary) -> str:
    if summary.complete:
        return f"the result is {summary.out}"
    if summary.part is not None:
        from reshard.store.staging_names import staging_of

        place = staging_of(summary.out) if isinstance(summary.out, Path) else summary.out
        return f"other parts are still missing: see 'reshard inspect {place}'"
    return f"other ranks are still missing: see 'reshard inspect {summary.out}'"
