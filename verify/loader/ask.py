"""Asks a program's own loader about shards, in the program's Python, and reports its answer.

Neither placement nor rules of reshard are asked: the witness gets two folders and the degrees of a mesh.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.formats.errors import CheckpointError, refused
from reshard.text import plural
from reshard.verify.ending import run_program, temporary_folder

ROOM = Path(__file__).parent
PROGRAMS = {"vllm": "vLLM", "sglang": "SGLang", "torchtitan": "torchtitan", "transformers": "transformers",
            "megatron": "Megatron-Core"}  # fmt: skip
"""The programs that have a file in this room."""
TIMEOUT = 24 * 3600.0
_START = """
import sys, types
for name, folders in (("reshard", []), ("reshard.verify", [sys.argv[1]])):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = folders
from reshard.verify.loader.witness import main
main(sys.argv[2])
"""
"""In the engine's Python: this room under its name, without the rest of reshard and what that imports."""


class UncheckedFormatError(CheckpointError):
    """The program's loader did not answer for all ranks: nothing is said of the format."""


@dataclass(frozen=True)
class LoaderReport:
    """The answer of a program's own loader."""

    name: str
    """The program, with its version."""
    ranks: int
    """The number of ranks that were played."""
    tensors: int
    """The number of tensors that these have."""
    loaded: int
    """The number of tensors that the loader fills."""
    constants: int
    """The number of the others, which stay as they were built."""
    differences: tuple[str, ...] = ()
    """A line for each tensor that differs."""
    ignored: tuple[str, ...] = ()
    """The names that the program takes from neither folder."""
    unchecked: str | None = None
    """The reason why not all could be asked."""
    has_values: bool = True
    """Whether it loads values; one that does not says names, dtypes, shapes and offsets alone."""

    @property
    def evidence(self) -> str:
        """The grounds that it gives the format, in words that go on after its name."""
        if self.has_values:
            return f"as {self.name}'s own loader has it"
        return f"with names and shapes as in the sharded_state_dict of {self.name}, the rest by reshard's lines alone"

    @property
    def is_same(self) -> bool:
        """Whether no tensor differs among those that were asked about."""
        return not self.differences

    @property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        if self.differences:
            further = f" (and {len(self.differences) - 1:,} more)" if len(self.differences) > 1 else ""
            what = f"{self.name}'s own loader" if self.has_values else f"The sharded_state_dict of {self.name}"
            text = f"{what} differs from the shards in {self.differences[0]}{further}."
        elif self.unchecked is None and not self.has_values:
            of = f"{plural(self.tensors, 'tensor')} on {plural(self.ranks, 'rank')}"
            text = f"The sharded_state_dict of {self.name} asks for all {of} and no others, by name, dtype and shape, "
            text += "each element once, as the chunks have it. Of values, and of rows inside a tensor, it says nothing."
        elif self.unchecked is None:
            kinds = f"{self.loaded:,} loaded, {plural(self.constants, 'constant')}"
            of = f"all {plural(self.tensors, 'tensor')} of {plural(self.ranks, 'rank')}"
            text = f"{self.name}'s own loader puts the same bytes into {of} ({kinds}); no rule of reshard was asked."
        else:
            return ""  # the error says why
        if self.ignored:
            text += f" It takes '{self.ignored[0]}' from neither folder"
            text += f", nor {len(self.ignored) - 1:,} more." if len(self.ignored) > 1 else "."
        return text

    def __str__(self) -> str:
        """The lines that are printed above the verdict."""
        found = "the same" if self.is_same else f"{plural(len(self.differences), 'tensor')} differ"
        found = "unchecked" if self.is_same and self.unchecked else found
        head = f"loader: {self.name}, {plural(self.ranks, 'rank')}, {plural(self.tensors, 'tensor')}: {found}"
        shown = [f"  {line}" for line in self.differences[:10]]
        further = len(self.differences) - len(shown)
        return "\n".join([head, *shown, *([f"  and {further:,} more"] if further else [])])


def program_of(engine: str | None, shards: object, form: str) -> str:
    """The program whose loader takes shards of this form. Raises SettingError if none of this room does."""
    if engine not in PROGRAMS:
        known = ", ".join(PROGRAMS.values())
        raise refused("loader", None, f"{shards} has {form}, and the loaders that are known here are those of {known}")
    return engine


def check_python(setting: str, python: str, program: str) -> None:
    """Raise SettingError unless the program is installed for the Python interpreter that a setting names."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({program!r}) is None)"
    advice = f"give the python of an environment that has {PROGRAMS[program]}"
    try:
        found = subprocess.run([python, "-c", probe], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
    except OSError as error:
        raise refused(setting, python, error.strerror or str(error), advice=advice) from None
    if not found:
        raise refused(setting, python, f"it has no {PROGRAMS[program]}", advice=advice)


def python_of(python: str) -> str:
    """The command of an interpreter, from whatever folder it is run."""
    return str(Path(python).absolute()) if "/" in python else python


def ask(
    python: str, program: str, original: Path, shards: Path, degrees: Mapping[str, int], dtype: str | None,
    form: str | None, progress: Callable[[str], None] = lambda _: None,
) -> LoaderReport:  # fmt: skip
    """Have a program load the original as each rank of a mesh, and compare the shards. Raises ReshardError."""
    progress(f"original in {PROGRAMS[program]}'s own loader")
    with temporary_folder("reshard-loader-") as scratch:
        request = {"program": program, "original": str(original.resolve()), "shards": str(shards.resolve()),
                   "scratch": str(scratch), "dtype": dtype, "form": form, **degrees}  # fmt: skip
        (scratch / "request.json").write_text(json.dumps(request), encoding="utf-8")
        command = [python_of(python), "-c", _START, str(ROOM.parent), str(scratch / "request.json")]
        status, output = run_program(command, "the loader", TIMEOUT, scratch)  # its folder has nothing to import
        file = scratch / "answer.json"
        if not file.exists():
            said = next((line for line in reversed(output.splitlines()) if line.strip()), f"status {status}")
            unchecked = f"{PROGRAMS[program]}'s loader ended without an answer: {said}"
            return LoaderReport(PROGRAMS[program], 0, 0, 0, 0, unchecked=unchecked)
        answer: Any = json.loads(file.read_text(encoding="utf-8"))
    if (layout := answer.get("layout")) is not None:
        count, differing = layout["tensors"], tuple(layout["differences"])
        return LoaderReport(answer["name"], layout["ranks"], count, 0, 0, differing, has_values=False)
    ranks = answer["ranks"]
    loaded, constants = (sum(rank[key] for rank in ranks) for key in ("loaded", "constants"))
    lines, ignored = ([line for rank in ranks for line in rank[key]] for key in ("differences", "ignored"))
    return LoaderReport(
        answer["name"], len(ranks), loaded + constants, loaded, constants, tuple(lines),
        tuple(dict.fromkeys(ignored)), answer["stopped"],
    )  # fmt: skip
