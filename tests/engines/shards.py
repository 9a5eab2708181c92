"""Shards in the engine that loads them: small models of several kinds, and shards with faults, on a CPU.

    python -m tests.engines.shards RESULTS --python ENGINES/vllm/bin/python [--engine vllm] [--models llama,phi3]
        [--faults] [--write]

Each model is run as ``reshard verify --engine`` does it: in transformers, in the engine if that loads it, and as shards
in the engine. ``--engine megatron`` (``in_megatron``) loads one folder of torch_dist on several meshes, and the older
form on its own; of some it also has Megatron-Core save what it has loaded, which a merge must make the original of,
byte for byte.

Prints a line for each: the verdict, the error of the shards' log-probabilities over the noise, and seconds. RESULTS, a
file with a line of JSON for each, is added to; what it has already is not run again, so that a run that was stopped
goes on. What the engine could not run stands there with its reason, and is tried again. With ``--faults`` the shards
have the faults that joining makes (tests/verify/program_faults.py, megatron_faults.py). With ``--write`` the tables are
written into docs/explanation/evidence.md. Exit code 1: a verdict is wrong, or something was not run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import transformers

from reshard.api import merge, split
from reshard.formats.errors import ReshardError
from reshard.formats.mesh import Mesh, mesh_of
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.bytes.exact import open_shards, verify_exact
from reshard.verify.engine import compare as in_vllm
from reshard.verify.engine.compare import Baseline, EngineOptions, EngineReport
from tests import zoo
from tests.engines import in_megatron
from tests.verify import megatron_faults, program_faults
from tests.verify.program_faults import inject
from tools.measured import write

FAULTS = program_faults.FAULTS | megatron_faults.FAULTS

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

Degrees = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """A model in a format on a mesh, loaded on that mesh or another (``on``), with a fault or without.

    ``again``: what the engine saves of it is merged, and compared with the original.
    """

    model: str
    format: str
    mesh: Degrees
    on: Degrees | None = None
    fault: str | None = None
    again: bool = False

    @property
    def shown(self) -> str:
        """Where it was loaded, and in what format, if the engine has several."""
        mesh = " ".join(f"{key} {degree}" for key, degree in (self.on or self.mesh).items())
        return ", ".join(
            [mesh, *([self.format] if self.format not in ENGINE_CASES else []), *(["saved again"] * self.again)]
        )


_VLLM_FAULTS: tuple[tuple[str, str, Degrees], ...] = (
    ("qkv_order", "llama", {"tp": 2}),
    ("gate_and_up", "llama", {"tp": 2}),
    ("rotary_halves", "llama", {"tp": 2}),
    ("padding_in_the_middle", "llama", {"tp": 2}),
    ("layers_by_one", "llama", {"tp": 2}),
    ("kv_replica_of_wrong_head", "llama-kv2", {"tp": 4}),
    ("neighbouring_experts", "qwen3_moe", {"tp": 2}),
)
_MESHES: Mapping[str, Sequence[Degrees]] = {
    "llama": ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"pp": 2}),
    "llama-kv2": ({"tp": 4},),
    "qwen2-tied": ({"tp": 2, "pp": 2},),
    "qwen3": ({"tp": 2},),
    "mistral": ({"tp": 2},),
    "mixtral": ({"tp": 1}, {"ep": 2}, {"tp": 2, "ep": 2}),
    "qwen3_moe": ({"tp": 2},),
    "qwen2_moe": ({"tp": 2},),
    "deepseek_v2": ({"tp": 2},),
    "deepseek_v3": ({"tp": 2}, {"ep": 2}),
    "deepseek_v3-mtp": ({"tp": 2, "pp": 2},),
    "glm4_moe": ({"tp": 2},),
}
"""On which meshes one folder of Megatron-Core's is loaded."""
_OTHER_FORMS = (
    Case("llama", "megatron-local", {"tp": 1}, {"tp": 2}),
    Case("llama", "megatron-singleton", {"tp": 1}, {"tp": 2}),
    Case("llama", "megatron-legacy", {"tp": 2, "pp": 2}),
    Case("llama-kv2", "megatron-legacy", {"tp": 4}),
    Case("qwen2-tied", "megatron-legacy", {"pp": 2}),
    Case("mixtral", "megatron-legacy", {"tp": 2, "ep": 2}),
    Case("mixtral", "megatron-legacy-sequential", {"ep": 2}),
    Case("mixtral", "megatron-legacy-local", {"tp": 2}),
    Case("deepseek_v3", "megatron-legacy", {"tp": 2}),
    Case("deepseek_v3-mtp", "megatron-legacy", {"tp": 2}),
)

ENGINE_CASES: Mapping[str, Sequence[Case]] = {
    "vllm": (
        *(Case(model, "vllm", {"tp": 2}) for model in KINDS),
        *(Case(model, "vllm", mesh, fault=fault) for fault, model, mesh in _VLLM_FAULTS),
    ),
    "megatron": (
        *(Case(model, "megatron", {"tp": 1}, mesh) for model, meshes in _MESHES.items() for mesh in meshes),
        *_OTHER_FORMS,
        *(Case(model, "megatron", {"tp": 1}, {"tp": 2, "pp": 2}, again=True) for model in ("llama", "deepseek_v3")),
        *(Case("mixtral", "megatron", {"tp": 1}, {"tp": 2}, fault) for fault in megatron_faults.FAULTS),
        Case("llama", "megatron-legacy", {"tp": 2}, fault="q_k_v_one_after_the_other"),
    ),
}

TABLES = {"vllm": "engines", "megatron": "megatron"}
"""The name of the table of each engine in the page."""


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
        sizes = {} if name.endswith("-mtp") else SIZES  # its layer that predicts a further token has sizes of its own
        zoo.save(name.removesuffix("-kv2"), folder, settings={**sizes, **more})
    return folder


def shards_of(root: Path, original: Path, form: str, mesh: Degrees) -> Path:
    """Its shards, made once, of which every byte is right."""
    folder = root / "-".join([original.name, form, *(f"{key}{degree}" for key, degree in mesh.items())])
    if not folder.exists():
        split(original, folder, format=form, **{"tp": 1, **mesh})
    report = verify_exact(open_source(original), folder)
    if report.verdict != "same":
        raise ReshardError(f"{folder.name}: {report.problems or report.missing or report.first}")
    return folder


class Runs:
    """Runs models and their shards; each original once."""

    def __init__(self, root: Path, engine: str, options: EngineOptions) -> None:
        self._root, self._engine, self._options = root, engine, options
        self._originals: dict[str, Baseline | ReshardError] = {}

    def run(self, case: Case) -> Result:
        """Run one."""
        started, engine = time.monotonic(), self._engine
        try:
            found = self._measure(case)
        except ReshardError as error:
            seconds = time.monotonic() - started
            return Result(engine, case.model, case.shown, case.fault, "not run", seconds=seconds, why=error.message)
        verdict, seconds = "same" if found.is_same else "different", time.monotonic() - started
        return Result(engine, case.model, case.shown, case.fault, verdict, found.ratio, asdict(found), seconds)

    def _measure(self, case: Case) -> EngineReport:
        original = checkpoint(self._root, case.model)
        source = open_source(original)
        folder = shards_of(self._root, original, case.format, case.mesh)
        if case.fault is not None:
            folder = Path(shutil.copytree(folder, self._root / f"{folder.name}-{case.fault}", dirs_exist_ok=True))
            if not inject(FAULTS[case.fault], folder, source).damaged:
                raise ReshardError(f"'{case.fault}' changes nothing in {folder.name}")
        shards = open_shards(folder, source)
        assert isinstance(shards, Source)
        baseline, saved = self._original(case.model, source), self._root / f"{folder.name}-saved"
        if self._engine == "vllm":
            return in_vllm.run_shards(baseline, shards)
        mesh = _mesh(case.on) if case.on else None
        report = in_megatron.run_shards(baseline, shards, mesh, saved if case.again else None)
        if case.again:
            merge(saved, self._root / "merged", config=original, overwrite=True)
            merged = verify_exact(source, self._root / "merged")
            if merged.verdict != "same":
                raise ReshardError(f"what {case.format} saved is not the original: {merged.problems or merged.first}")
        return report

    def _original(self, model: str, source: Source) -> Baseline:
        if model not in self._originals:
            try:
                run = in_vllm if self._engine == "vllm" else in_megatron
                self._originals[model] = run.run_original(source, self._options)
            except ReshardError as error:
                self._originals[model] = error
        found = self._originals[model]
        if isinstance(found, ReshardError):
            raise found
        return found


def _mesh(degrees: Degrees) -> Mesh:
    return mesh_of(degrees.get("tp", 1), degrees.get("ep", 1), pp=degrees.get("pp", 1))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--engine", choices=[*ENGINE_CASES], default="vllm")
    parser.add_argument("--python", required=True, help="the python of the engine's environment")
    parser.add_argument("--models", help="default: all")
    parser.add_argument("--without", default="", help="a model and a format that this version names otherwise")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/explanation/evidence.md")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    file: Path = arguments.results
    before = [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    found = {(r.engine, r.model, r.mesh, r.fault): r for r in before}
    wanted = [
        case
        for case in ENGINE_CASES[arguments.engine]
        if (arguments.faults or not case.fault) and (not arguments.models or case.model in arguments.models.split(","))
        if arguments.without != f"{case.model}:{case.format}"
    ]
    with tempfile.TemporaryDirectory(prefix="reshard-engines-") as folder, file.open("a") as kept:
        runs = Runs(Path(folder), arguments.engine, EngineOptions(arguments.python))
        for case in wanted:
            key = (arguments.engine, case.model, case.shown, case.fault)
            if key not in found or found[key].verdict == "not run":
                found[key] = runs.run(case)
                print(json.dumps(asdict(found[key])), file=kept, flush=True)
            print(found[key], flush=True)
    wrong = [result for result in found.values() if not result.is_right]
    if arguments.write:
        write(TABLES[arguments.engine], to_markdown([r for r in found.values() if r.engine == arguments.engine]))
    print(f"{len(found)} runs, {len(found) - len(wrong)} as they should be")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
