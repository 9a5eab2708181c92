"""What ``split`` and ``merge`` share: how they are carried out, and the summary."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.cli.errors import resumable, work_is_done
from reshard.cli.printing import print_json, print_lines, print_path
from reshard.cli.progress import Progress

if TYPE_CHECKING:
    from reshard.writing.rewrite import WriteRequest
    from reshard.writing.summary import Summary

_Request = TypeVar("_Request", bound="WriteRequest")


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
        summary = command(dataclasses.replace(request, progress=lambda state: shown(*state)))
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
        print_lines(str(dataclasses.replace(summary, source=source)))  # as it was given


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
        "time": {key: round(value, 3) for key, value in summary.spent._asdict().items()} if summary.spent else None,
        "note": summary.note,
        "load": summary.load,
        "left_behind": list(summary.left_behind),
        "padding": {axis: {"size": size, "padded": padded} for axis, (size, padded) in summary.padding.items()},
    }
