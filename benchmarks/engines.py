"""Shards in the engine that loads them: small models of several kinds at tp 2, and shards with faults, on a CPU.

    python -m benchmarks.engines RESULTS --python ENGINES/vllm/bin/python [--models llama,phi3] [--faults] [--write]

Each model is run three times, as ``reshard verify --engine vllm`` does it: in transformers, in the engine, and as
shards in the engine. Prints a line for each: the verdict, the error of the shards' log-probabilities over the engine's
own noise, and seconds. RESULTS, a file with a line of JSON for each, is added to; what it has already is not run again,
so that a run that was stopped goes on. What the engine could not run stands there with its reason, and is tried again.
With ``--faults`` the shards have the faults that joining makes (tests/verify/program_faults.py). With ``--write`` the
tables are written into docs/measurements.md. Exit code 1: a verdict is wrong, or something was not run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import transformers

from benchmarks.faults import write
from formats.errors import ReshardError
from reshard.api import split
from reshard.storage.opening import open_source
from reshard.storage.source import Source
from tests import zoo
from tests.verify.program_faults import FAULTS, inject
from verify.bytes.exact import open_shards, verify_exact
from verify.engine.compare import Baseline, EngineOptions, EngineReport, run_original, run_shards

SIZES = {
    "hidden_size": 256, "n_embd": 256, "head_dim": 32, "intermediate_size": 192, "ffn_dim": 192,
    "moe_intermediate_size": 64,
}  # fmt: skip
"""What is larger than in the tests: vLLM's attention on a CPU has no kernel for heads smaller than 32."""

KINDS = {
    "llama": "a dense model with grouped queries",
    "llama-biases": "biases, of row-parallel weights too",
    "qwen2-tied": "biases of q, k and v; a tied table",
    "qwen3": "norms of queries and keys",
    "gemma": "norms with 1 added, a scaled embedding that is tied",
    "gemma2": "norms behind, a tied table under one name",
    "gemma3_text": "sliding windows",
    "phi3": "packed qkv and gate_up",
    "falcon-7b": "packed, one KV head, attention beside the MLP",
    "gpt2": "input before output",
    "opt": "learned positions",
    "stablelm": "a part of each head rotates",
    "granite": "multipliers",
    "starcoder2": "an MLP of two layers, norms with biases",
    "mixtral": "stacked experts",
    "qwen3_moe": "stacked experts, a router under another name",
    "gpt_neox": "vLLM's own backend for transformers' modules",
}
"""A model of tests/zoo for each, and what is special about it."""

FAULTY: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("qkv_order", "llama", {"tp": 2}),
    ("gate_and_up", "llama", {"tp": 2}),
    ("rotary_halves", "llama", {"tp": 2}),
    ("padding_in_the_middle", "llama", {"tp": 2}),
    ("layers_by_one", "llama", {"tp": 2}),
    ("kv_replica_of_wrong_head", "llama-kv2", {"tp": 4}),
    ("neighbouring_experts", "qwen3_moe", {"tp": 2}),
)
"""A fault, the model in whose shards it is, and their mesh."""

BEGIN = "<!-- engines, by python -m benchmarks.engines -->\n"


@dataclass(frozen=True)
class Result:
    """What one run said: ``same``, ``different`` or ``not run``, and then why."""

    engine: str
    model: str
    mesh: str
    fault: str | None
    verdict: str
    ratio: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    why: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether correct shards are the same, and others are not."""
        return self.verdict == ("different" if self.fault else "same")

    def __str__(self) -> str:
        what = f"{self.model} {self.mesh}" + (f", {self.fault}" if self.fault else "")
        measured = f"error {self.report['error']:.2g}, noise {self.report['noise']:.2g}" if self.report else self.why
        return f"{what:48} {self.verdict:9} {self.ratio:10.3g}  {self.seconds:4.0f} s  {measured}".rstrip()


def checkpoint(root: Path, name: str) -> Path:
    """A model of the tests in the sizes that engines have kernels for, made once."""
    folder = root / name
    if not folder.exists():
        more = {"num_key_value_heads": 2} if name == "llama-kv2" else {}
        zoo.save(name.removesuffix("-kv2"), folder, settings={**SIZES, **more})
    return folder


def shards_of(root: Path, original: Path, engine: str, mesh: Mapping[str, int]) -> Path:
    """Its shards, made once, of which every byte is right."""
    folder = root / "-".join([original.name, engine, *(f"{key}{degree}" for key, degree in mesh.items())])
    if not folder.exists():
        split(original, folder, form=engine, **mesh)
    report = verify_exact(open_source(original), folder)
    if report.verdict != "same":
        raise ReshardError(f"{folder.name}: {report.problems or report.missing or report.first}")
    return folder


class Runs:
    """Runs models and their shards; each original once."""

    def __init__(self, root: Path, options: EngineOptions) -> None:
        self._root, self._options = root, options
        self._originals: dict[str, Baseline | ReshardError] = {}

    def run(self, model: str, mesh: Mapping[str, int], fault: str | None) -> Result:
        """Run one."""
        started, shown = time.monotonic(), " ".join(f"{key} {degree}" for key, degree in mesh.items())
        engine = self._options.name
        try:
            found = self._measure(model, mesh, fault)
        except ReshardError as error:
            seconds = time.monotonic() - started
            return Result(engine, model, shown, fault, "not run", seconds=seconds, why=error.message)
        verdict, seconds = "same" if found.is_same else "different", time.monotonic() - started
        return Result(engine, model, shown, fault, verdict, found.ratio, asdict(found), seconds)

    def _measure(self, model: str, mesh: Mapping[str, int], fault: str | None) -> EngineReport:
        original = checkpoint(self._root, model)
        source = open_source(original)
        folder = shards_of(self._root, original, self._options.name, mesh)
        if fault is not None:
            folder = Path(shutil.copytree(folder, self._root / f"{folder.name}-{fault}", dirs_exist_ok=True))
            if not inject(fault, folder, source).damaged:
                raise ReshardError(f"'{fault}' changes nothing in {folder.name}")
        shards = open_shards(folder, source)
        assert isinstance(shards, Source)
        return run_shards(self._original(model, source), shards)

    def _original(self, model: str, source: Source) -> Baseline:
        if model not in self._originals:
            try:
                self._originals[model] = run_original(source, self._options)
            except ReshardError as error:
                self._originals[model] = error
        found = self._originals[model]
        if isinstance(found, ReshardError):
            raise found
        return found


def to_markdown(results: Sequence[Result]) -> str:
    """What was measured: correct shards, and shards with faults."""
    correct, faulty = ([r for r in results if bool(r.fault) is has] for has in (False, True))
    rows = [("model", "", "mesh", "error", "noise", "ratio", "seconds")]
    rows += [(r.model, KINDS.get(r.model, ""), r.mesh, *_numbers(r), f"{r.seconds:.0f}") for r in correct]
    lines = _table(rows)
    if faulty:
        rows = [("fault", "model", "mesh", "error", "noise", "ratio")]
        rows += [(_said(str(r.fault)), r.model, r.mesh, *_numbers(r)) for r in faulty]
        lines += ["", *_table(rows)]
    return "\n".join(lines) + "\n"


def _said(fault: str) -> str:
    return str(FAULTS[fault].__doc__).partition("\n")[0].rstrip(".")


def _numbers(result: Result) -> tuple[str, str, str]:
    if not result.report:
        return f"not run: {result.why}", "", ""
    return f"{result.report['error']:.1e}", f"{result.report['noise']:.1e}", f"{result.ratio:.3g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def _wanted(models: Sequence[str], faults: bool) -> Iterator[tuple[str, Mapping[str, int], str | None]]:
    yield from ((model, {"tp": 2}, None) for model in models)
    yield from ((model, mesh, fault) for fault, model, mesh in FAULTY if faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--python", required=True, help="the python of the engine's environment")
    parser.add_argument("--models", default=",".join(KINDS))
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/measurements.md")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    file: Path = arguments.results
    before = [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    found = {(r.engine, r.model, r.mesh, r.fault): r for r in before}
    models = [name for name in arguments.models.split(",") if name]
    with tempfile.TemporaryDirectory(prefix="reshard-engines-") as folder, file.open("a") as kept:
        runs = Runs(Path(folder), EngineOptions(arguments.engine, python=arguments.python))
        for model, mesh, fault in _wanted(models, arguments.faults):
            key = (arguments.engine, model, " ".join(f"{name} {degree}" for name, degree in mesh.items()), fault)
            if key not in found or found[key].verdict == "not run":
                found[key] = runs.run(model, mesh, fault)
                print(json.dumps(asdict(found[key])), file=kept, flush=True)
            print(found[key], flush=True)
    wrong = [result for result in found.values() if not result.is_right]
    if arguments.write:
        write(to_markdown([*found.values()]), BEGIN)
    print(f"{len(found)} runs, {len(found) - len(wrong)} as they should be")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
