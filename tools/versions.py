"""The page of versions: with which version of which program what was tried, from what tests and tools record."""

from __future__ import annotations

import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tools.floors import floors

ROOT = Path(__file__).parents[1]
MADE_WITH = {
    "formats/programs/vllm.json": "names and elements of its models",
    "tests/oracles/vllm/observed.json": "what it says of each small model",
    "tests/oracles/vllm/registry.json": "its classes of models",
    "formats/programs/sglang.json": "names and elements of its models with towers",
    "tests/oracles/sglang/observed.json": "what it says of each small model",
    "formats/programs/transformers.json": "names and shapes of its modules",
    "formats/config_defaults.json": "defaults of its configs",
    "formats/heads.json": "its classes with heads",
    "verify/bytes/kept.json": "what its classes keep in float32",
    "reshard/source/required.json": "tensors that a model must have",
}
"""Tables that say with which version they were made, and what they have of the program."""
ENGINES = ("vllm", "megatron", "megatron-0.19", "torchtitan", "deepspeed", "sglang")
"""The environments of ``make engines``, each named after the file with its packages, and its program in it."""


def versions_text() -> str:
    """Our own packages, then other programs."""
    pinned = _pinned("constraints.txt")
    lines = ["| package | oldest that is allowed | the tests run with |", "|---|---|---|"]
    lines += [f"| {name} | {floor} | {pinned.get(name, '–')} |" for name, floor in sorted(floors().items())]
    lines += ["", "| program | version | what was done with it | record |", "|---|---|---|---|"]
    rows = defaultdict[tuple[str, str], list[tuple[str, str]]](list)
    for program, version, what, record in _rows():
        rows[program, version].append((what, record))
    for (program, version), done in sorted(rows.items()):
        whats, records = (dict.fromkeys(each) for each in zip(*sorted(done), strict=True))
        lines.append(f"| {program} | {version} | {'; '.join(whats)} | {', '.join(records)} |")
    return "\n".join([*lines, ""])


def _pinned(file: str) -> dict[str, str]:
    """The versions in a list of requirements."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))


def _rows() -> Iterator[tuple[str, str, str, str]]:
    """Program, version, what was done, and where that is recorded."""
    for file, what in MADE_WITH.items():
        for program, version in json.loads((ROOT / file).read_text(encoding="utf-8"))["made_with"].items():
            yield program, version, what, f"`{file}`"
    for name in ENGINES:
        packages = _pinned(f"tests/engines/{name}.txt")
        (program,) = (each for each in packages if each.startswith(name.partition("-")[0]) and "fsdp" not in each)
        yield program, packages[program], "loads what reshard writes (`make engines`)", f"`tests/engines/{name}.txt`"
    for (program, version), cases in sorted(_trainers().items()):
        yield program, version, f"wrote folders that the tests read ({cases})", "`tests/oracles/trainers/`"


def _trainers() -> dict[tuple[str, str], int]:
    """The number of folders that each version of a trainer wrote."""
    counts = defaultdict[tuple[str, str], int](int)
    with tarfile.open(ROOT / "tests/oracles/trainers/fixtures.tar.xz") as archive:
        for member in archive:
            if member.name.endswith("case.json") and (file := archive.extractfile(member)) is not None:
                for program, version in json.load(file)["versions"].items():
                    counts[program, version.partition("+")[0]] += 1
    return counts
