"""``reshard demo``: split, re-split both ways, merge, and the proof that nothing changed."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from reshard.cli.options import PATH, Command
from reshard.cli.printing import print_answer, print_lines
from reshard.formats.errors import CheckpointError
from reshard.text import align
from reshard.tiny_model import write_model

STEPS = (
    ("split", "model", "tp4", "--tp", "4"),
    ("split", "tp4", "tp2", "--tp", "2"),
    ("split", "tp4", "tp8", "--tp", "8"),
    ("merge", "tp8", "merged"),
)
"""The commands of the round, to be run in the demo's folder."""


def compare(original: Path, merged: Path) -> list[dict[str, Any]]:
    """Both folders file by file: the sha256 of each file in both, None where it is missing, and whether it came back
    byte for byte.
    """
    files = ((root, file) for root in (original, merged) for file in root.rglob("*") if file.is_file())
    rows = []
    for name in sorted({file.relative_to(root).as_posix() for root, file in files}):
        places = [folder / name for folder in (original, merged)]
        one, other = (hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None for file in places)
        rows.append({"name": name, "original": one, "merged": other, "identical": one is not None and one == other})
    return rows


@click.command(
    "demo",
    cls=Command,
    examples={
        "reshard demo": "in a temporary folder",
        "reshard demo demo": "keep the model and all shards in the folder demo",
        "reshard demo --json": "the checksums as JSON",
    },
)
@click.argument("folder", type=PATH, required=False)
@click.pass_context
def demo_command(context: click.Context, folder: Path | None, as_json: bool) -> bool:
    """Make a tiny model, split it, re-split it, merge it, and compare the files.

    It works in FOLDER, which is kept, or in a temporary folder. Exit code 0: all files came back byte for byte. 1: a
    file came back changed.
    """
    import tempfile

    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = "give a new one, or none for a temporary one"
        raise CheckpointError(f"{folder} exists and is not an empty folder", hint)
    temporary = tempfile.TemporaryDirectory(prefix="reshard-demo-") if folder is None else None
    with temporary or contextlib.nullcontext(folder) as place:
        home, group = Path(str(place)), context.find_root().command
        if not as_json:
            print_lines(f"A Llama with random weights, 4 KV heads and a vocabulary of 1003, in {home / 'model'}", "")
        home.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), contextlib.chdir(home):
            write_model(Path("model"))
            for step in STEPS:
                if not as_json:
                    print_lines(f"$ reshard {' '.join(step)}")
                with group.make_context("reshard", [*step, *(["--quiet"] if as_json else [])]) as of_step:
                    group.invoke(of_step)
            compared = compare(Path("model"), Path("merged"))
    is_same = all(file["identical"] for file in compared)
    cells = [("sha256 of", "model", "merged", "")]
    for file in compared:
        original, merged = ((file[side] or "missing")[:16] for side in ("original", "merged"))
        cells.append((file["name"], original, merged, "same" if file["identical"] else "DIFFERENT"))
    count = f"{sum(file['identical'] for file in compared)} of {len(compared)} files came back byte for byte."
    more = "The folder was temporary: 'reshard demo FOLDER' keeps everything for you to look at."
    if folder is not None:
        more = f"Go on there: cd {shlex.quote(str(folder))}; reshard verify model tp4 --exact-only"
    lines = ["", *align(cells, right=(), width=None), "", count, *([more] if folder is not None or is_same else [])]
    print_answer(as_json, {"folder": folder, "identical": is_same, "files": compared}, *lines)
    return is_same
