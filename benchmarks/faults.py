"""The power of ``reshard verify``'s forward: what it says of damaged shards, and of correct ones.

    python -m benchmarks.faults [--models llama,gpt2] [--tp 2,4] [--dtypes float32,bfloat16] [--seeds 5] [--dry]

Puts each fault of tests/verify/faults.py into the shards of small models, runs the forward alone, and keeps the largest
error over noise, whether it was seen, and whether the layer that was named is the one that was damaged. What was not
seen is run once more in float32. Then runs correct shards on other tokens, for each seed. Writes what was measured into
docs/explanation/evidence.md, between its markers; with ``--dry`` prints it instead.
"""

from __future__ import annotations

import argparse
import math
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from reshard.api import split
from reshard.formats.errors import ReshardError
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.forward.compare import ForwardOptions, ForwardReport
from reshard.verify.forward.noise import LIMIT
from tests import zoo
from tests.verify.faults import FAULTS, Fault, Shards, exponent_bit
from tests.verify.forwards import run_forwards
from tools.measured import write

MODELS = ("llama", "gpt2", "mixtral", "phi3", "gpt_neox", "gpt_oss", "deepseek_v3")
DEGREES = (2, 4)
DEFAULTS = ForwardOptions()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALL: dict[str, Fault] = {**FAULTS, "lowest_exponent_bit": partial(exponent_bit, bit=0)}
"""The faults, and the least that a flipped bit of an exponent can do: one element doubled or halved."""


@dataclass(frozen=True)
class Case:
    """A fault in shards: ``place`` is the first place of the model that it damaged."""

    model: str
    tp: int
    dtype: str
    fault: str
    place: str
    original: Source
    shards: Source


@dataclass(frozen=True)
class Found:
    """What the forward said of a case; ``refused`` if it ended in an error instead."""

    case: Case
    ratio: float
    named: str | None
    refused: str | None = None

    @property
    def is_seen(self) -> bool:
        """Whether the shards were not taken for the same model."""
        return self.named is not None or self.refused is not None

    @property
    def is_named(self) -> bool:
        """Whether the place that was named is the one that was damaged."""
        return self.named is not None and place_of_row(self.named) == self.case.place


def pair_of(root: Path, model: str, tp: int, dtype: str) -> tuple[Source, Source]:
    """A model of the zoo and its shards, made once."""
    original, shards = root / f"{model}-{dtype}", root / f"{model}-{dtype}-{tp}"
    if not original.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # where a model's own random start remains in its vectors (gpt_oss: sinks)
            zoo.save(model, original, DTYPES[dtype])
    if not shards.exists():
        split(original, shards, tp=tp)
    return open_source(original), open_source(shards)


def damaged(root: Path, model: str, tp: int, dtype: str, faults: Iterable[str]) -> list[Case]:
    """Shards of a model with each of the faults that applies to it."""
    original, correct = pair_of(root, model, tp, dtype)
    found = []
    for name in faults:
        folder = root / f"{model}-{dtype}-{tp}-{name}"
        shutil.copytree(correct.path, folder)
        shards = Shards(folder, original)
        ALL[name](shards)
        shards.sign()
        if shards.damaged:
            found.append(Case(model, tp, dtype, name, first_place(shards), original, open_source(folder)))
    return found


def first_place(shards: Shards) -> str:
    """Where a model first computes with what was damaged: ``embedding``, ``layer 1``, ``logits``."""

    def position(name: str) -> tuple[int, int]:
        if re.search(r"embed_tokens|embed_in|wte|wpe", name):
            return 0, 0
        layer = shards.indices(name).get("layer")
        return (2, 0) if layer is None else (1, layer)

    part, layer = min(position(name) for name, _ in shards.damaged)
    return ("embedding", f"layer {layer}", "logits")[part]


def place_of_row(name: str) -> str:
    """The place that a row of the report is in."""
    match = re.search(r"\.(\d+)\b", name)
    return f"layer {match[1]}" if match else name


def largest(report: ForwardReport) -> float:
    """The largest error over noise, infinite where there is NaN."""
    return max(row.ratio if not math.isnan(row.ratio) else math.inf for row in report.layers)


def check(cases: Sequence[Case], options: ForwardOptions = DEFAULTS) -> list[Found]:
    """Run the forward on cases of one degree, in one launch; one by one if that fails."""
    try:
        reports = run_forwards([(case.original, case.shards) for case in cases], options)
    except ReshardError as error:
        if len(cases) == 1:
            return [Found(cases[0], math.inf, None, error.message)]
        return [found for case in cases for found in check([case], options)]
    return [Found(case, largest(report), report.first) for case, report in zip(cases, reports, strict=True)]


# ------------------------------------------------------------------------------------------------------- the document


@dataclass
class Measured:
    """Everything so far. ``again`` are the faults not seen, in float32; ``noise`` has each dtype's at all places."""

    faults: list[Found] = field(default_factory=list)
    again: list[Found] = field(default_factory=list)
    correct: list[tuple[str, int, str, int, float]] = field(default_factory=list)
    noise: dict[str, list[float]] = field(default_factory=dict)

    def to_markdown(self) -> str:
        lines = [
            f"Measured on {platform.machine()} CPU, torch {torch.__version__}, on random tokens, 2 x 32, with "
            f"the tests' small models of 3 layers. {self._summary()}",
        ]
        for dtype in dict.fromkeys(found.case.dtype for found in self.faults):
            lines += ["", *self._table(dtype)]
        return "\n".join([*lines, "", *self._again(), *self._correct()]) + "\n"

    def _summary(self) -> str:
        seen = [found for found in self.faults if found.is_seen]
        right = [found for found in seen if found.is_named]
        hidden = sorted({found.case.fault.replace("_", " ") for found in self.faults if not found.is_seen})
        where = sorted({found.case.dtype for found in self.faults if not found.is_seen})
        text = (
            f"Of {len(self.faults)} damaged checkpoints {len(seen)} were seen, and of these {len(right)} with the layer"
            f" that was damaged named first. "
        )
        if hidden:
            text += f"Not seen, in some of the models: {' and '.join(hidden)}, in {' and '.join(where)}. "
        others = [found for found in self.faults if found.case.fault.replace("_", " ") not in hidden]
        if others:
            least = min(others, key=lambda found: found.ratio)
            case = least.case
            text += (
                f"{'Every other' if hidden else 'Every'} fault measures {least.ratio:.3g} or more ({case.model}, tp "
                f"{case.tp}, {case.dtype}, {case.fault.replace('_', ' ')}); the limit is {LIMIT:g}."
            )
        return text

    def _table(self, dtype: str) -> list[str]:
        found = {(f.case.fault, f.case.model, f.case.tp): f for f in self.faults if f.case.dtype == dtype}
        models = [model for model in MODELS if any(key[1] == model for key in found)]
        degrees = sorted({key[2] for key in found})
        lines = [
            f"In {dtype}, at tp {' / '.join(map(str, degrees))}:",
            "",
            "| Fault | " + " | ".join(models) + " |",
            "|---" * (len(models) + 1) + "|",
        ]
        for fault in ALL:
            cells = []
            for model in models:
                here = [found.get((fault, model, tp)) for tp in degrees]
                measured = {key[2] for key in found if key[1] == model}
                cells.append(" / ".join(map(_cell, here)) if any(here) else "" if measured else "?")
            lines.append(f"| {fault.replace('_', ' ')} | " + " | ".join(cells) + " |")
        return lines

    def _again(self) -> list[str]:
        if not self.again:
            return []
        seen = [found for found in self.again if found.is_seen]
        named = sum(found.is_named for found in seen)
        least = min(found.ratio for found in self.again)
        return [
            f"The {len(self.again)} that were not seen, run once more with `--compute-dtype float32`: {len(seen)} "
            f"seen, {named} with the right layer; the smallest ratio is {least:.3g}.",
            "",
        ]

    def _correct(self) -> list[str]:
        if not self.correct:
            return ["Correct shards have not been measured."]
        worst = max(self.correct, key=lambda run: run[-1])
        alarms = sum(not run[-1] <= LIMIT for run in self.correct)
        models, degrees, dtypes, seeds = (list(dict.fromkeys(run[i] for run in self.correct)) for i in range(4))
        lines = [
            f"Correct shards: {len(self.correct)} runs over {len(models)} models, tp {' and '.join(map(str, degrees))},"
            f" {' and '.join(map(str, dtypes))}, and {len(seeds)} seeds of the tokens. False alarms: {alarms}. The "
            f"largest ratio in any run is {worst[-1]:.2f} ({worst[0]}, tp {worst[1]}, {worst[2]}, seed {worst[3]}).",
            "",
            "| Largest ratio, correct shards | " + " | ".join(map(str, models)) + " |",
            "|---" * (len(models) + 1) + "|",
        ]
        for dtype in dtypes:
            for tp in degrees:
                cells = []
                for model in models:
                    ratios = [run[-1] for run in self.correct if run[:3] == (model, tp, dtype)]
                    cells.append(f"{max(ratios):.2f}" if ratios else "")
                lines.append(f"| {dtype}, tp {tp} | " + " | ".join(cells) + " |")
        noises = [f"{min(x):.2g} to {max(x):.2g} in {dtype}" for dtype, x in self.noise.items()]
        lines += ["", f"The noise itself, relative to the values at a place: {', '.join(noises)}."]
        return lines


def _cell(found: Found | None) -> str:
    if found is None:
        return ""
    if found.refused is not None:
        return "error"
    text = "∞" if math.isinf(found.ratio) else f"{found.ratio:.1e}" if found.ratio >= 1e4 else f"{found.ratio:.3g}"
    text = re.sub(r"e\+0?(\d)", r"e\1", text)
    return f"**{text}**" if not found.is_seen else text if found.is_named else f"{text}†"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tp", default=",".join(map(str, DEGREES)))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--seeds", type=int, default=5, help="of the tokens, for correct shards")
    parser.add_argument("--dry", action="store_true", help="print, and leave the document as it is")
    arguments = parser.parse_args()
    models, dtypes = arguments.models.split(","), arguments.dtypes.split(",")
    degrees = [int(tp) for tp in arguments.tp.split(",")]
    measured, began = Measured(), time.monotonic()

    def keep(what: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {what}", flush=True)
        if not arguments.dry:
            write("faults", measured.to_markdown())

    with tempfile.TemporaryDirectory(prefix="reshard-faults-") as folder:
        root = Path(folder)
        for tp in degrees:
            for model in models:
                cases = [case for dtype in dtypes for case in damaged(root, model, tp, dtype, ALL)]
                found = check(cases)
                measured.faults += found
                hidden = [each.case for each in found if not each.is_seen]
                if hidden:
                    measured.again += check(hidden, ForwardOptions(compute_dtype="float32"))
                for each in found:
                    if not each.is_named:
                        case = each.case
                        print(
                            f"          {case.model} tp {case.tp} {case.dtype} {case.fault}, in {case.place}: "
                            f"{each.refused or each.named or 'not seen'} ({each.ratio:.3g})"
                        )
                keep(f"{model}, tp {tp}: {sum(each.is_seen for each in found)} of {len(found)} seen")
                for case in cases:
                    shutil.rmtree(case.shards.path)
            runs = [(model, tp, dtype) for model in models for dtype in dtypes]
            for seed in range(arguments.seeds):
                reports = run_forwards([pair_of(root, *run) for run in runs], ForwardOptions(seed=seed))
                measured.correct += [(*run, seed, largest(r)) for run, r in zip(runs, reports, strict=True)]
                for (_, _, dtype), report in zip(runs, reports, strict=True):
                    measured.noise.setdefault(dtype, []).extend(row.noise for row in report.layers if row.noise)
                keep(f"correct, tp {tp}, seed {seed}: {max(map(largest, reports)):.2f}")
    if arguments.dry:
        print(measured.to_markdown())


if __name__ == "__main__":
    main()
