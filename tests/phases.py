"""How often a split goes back: the files of formats/ and reshard/ that run in more than one phase of one request.

``python -m tests.phases`` runs ``reshard split MODEL OUT --tp 4`` on a tiny model under a profiler, and prints each
file with its phases, then how many there are. A *phase* is the innermost function of ``PHASES`` that is being called;
threads that a phase starts belong to ``write``. A file is counted in each phase in which one of its functions is called
from another file. ``VALUES`` (a thing and its arithmetic, no I/O, no state) and ``GROUND`` may be used everywhere, and
do not count.
When functions get other names, change ``PHASES``, never so that two phases become one. ``tests/test_phases.py`` holds
the numbers as a law.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
PHASES = {
    ("reshard/writing/request.py", "start"): "start",
    ("reshard/transforms/opening.py", "open_any"): "open",
    ("reshard/placement/program_plan.py", "plan_for"): "plan",
    ("reshard/mesh/plan.py", "make_plan"): "plan",
    ("reshard/writing/output.py", "Output.__init__"): "output",
    ("reshard/placement/arrangement.py", "arrangement_of"): "output",
    ("reshard/writing/rewrite.py", "rewrite"): "rewrite",
    ("reshard/writing/rewrite.py", "_staging"): "stage",
    ("reshard/publishing/staging.py", "Staging.__enter__"): "stage",
    ("reshard/publishing/staging.py", "Staging.__exit__"): "stage",
    ("reshard/writing/weights.py", "write_files"): "prepare",
    ("reshard/move/moves.py", "jobs_of"): "jobs",
    ("reshard/placement/arrangement.py", "align_atoms"): "jobs",
    ("reshard/move/engine.py", "move"): "write",
    ("reshard/writing/publish.py", "publish"): "publish",
}
"""The functions with which phases begin, each by its file, and the phase."""
GROUND = {
    "formats/files/checksum.py", "formats/documents.py", "formats/store.py", "reshard/system.py", "reshard/text.py",
}  # fmt: skip
"""Bytes, documents, stores and the machine, which any phase may ask."""
VALUES = {
    "formats/errors.py", "formats/mesh.py",
    "formats/notation/axes.py", "formats/notation/expressions.py", "formats/notation/architecture.py",
    "formats/notation/components.py", "formats/notation/format.py", "formats/notation/heads.py",
    "formats/files/safetensors.py", "formats/files/layout.py", "formats/files/manifest.py",
    "formats/files/containers.py",
    "reshard/model/model.py", "reshard/mesh/plan.py", "reshard/mesh/stages.py",
    "reshard/placement/pieces.py", "reshard/placement/portions.py", "reshard/placement/geometry.py",
    "reshard/placement/stored.py", "reshard/placement/arrangement.py", "reshard/placement/kept_fields.py",
    "reshard/source/access.py", "reshard/source/source.py", "reshard/move/jobs.py", "reshard/move/slabs.py",
    "reshard/publishing/records.py", "reshard/store/staging_names.py",
}  # fmt: skip
"""Files of things and their arithmetic: ``tests/test_phases.py`` holds that they do not touch a file or a lock."""


def name_of(file: str) -> str | None:
    """The file of the packages that code is of: ``reshard/formats`` and ``reshard/verify`` are links."""
    if not file.startswith(f"{ROOT}/"):
        return None
    name = file.removeprefix(f"{ROOT}/")
    for package in ("formats/", "verify/"):
        name = name.removeprefix("reshard/") if name.startswith(f"reshard/{package}") else name
    return name if name.startswith(("formats/", "reshard/", "verify/")) else None


class Traced(threading.local):
    """Where a thread is: the files of its calls, its phases, and how many imports it is in."""

    def __init__(self) -> None:
        self.files, self.imports = list[str](), 0
        self.phases = [] if threading.current_thread() is threading.main_thread() else ["write"]


def traced(arguments: Collection[str]) -> Mapping[str, set[str]]:
    """Run a command in this process: the phases of each file, and, by the empty name, all that began."""
    from reshard.__main__ import main

    at, found = Traced(), defaultdict[str, set[str]](set)

    def profile(frame: FrameType, event: str, _: Any) -> None:
        name = name_of(frame.f_code.co_filename) if event in {"call", "return"} else None
        if name is None:
            return
        phase, is_import = PHASES.get((name, frame.f_code.co_qualname)), frame.f_code.co_name == "<module>"
        if event == "call":
            at.imports += is_import
            at.files.append(name)
            if at.imports:
                return
            if phase:
                at.phases.append(phase)
                found[""].add(phase)
            if at.files[-2:-1] != [name]:
                found[name].add(at.phases[-1] if at.phases else "cli")
        else:
            at.imports -= is_import
            if at.files:
                at.files.pop()
            if phase and not at.imports and at.phases and at.phases[-1] == phase:
                at.phases.pop()

    sys.argv = ["reshard", *arguments]
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):
            main()
    except SystemExit as stop:
        if stop.code:
            raise
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def main() -> None:
    from tests.support import write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        model = write_checkpoint(Path(folder, "model"))
        found = {**traced(["split", str(model), str(Path(folder, "out")), "--tp", "4", "-q"])}
    began = found.pop("")
    counted = {name: phases for name, phases in found.items() if name not in VALUES | GROUND}
    for name, phases in sorted(counted.items(), key=lambda item: (-len(item[1]), item[0])):
        print(f"{len(phases):2} {name:45} {' '.join(sorted(phases))}")
    print(f"phases: {' '.join(sorted(began))}")
    more, three = (sum(len(phases) > n for phases in counted.values()) for n in (1, 2))
    print(f"{len(counted)} files, {more} in more than one phase, {three} in three or more")


if __name__ == "__main__":
    main()
