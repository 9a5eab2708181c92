"""Correct shards of every small model of tests/zoo, forward: at tp 2, 4 and 8, in float32 and bfloat16.

    python -m benchmarks.zoo_forward RESULTS [--models llama,gpt2] [--runs 4:bfloat16,8:float32] [--write]

Prints a line for each model, degree and dtype: the verdict, the largest error over noise, and seconds. RESULTS, a file
with a line of JSON for each, is added to; what it has already is not run again, so that a run that was stopped goes on.
With ``--write`` the counts are written into docs/explanation/evidence.md, between its markers, at the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from benchmarks.faults import largest, pair_of
from reshard.formats.errors import ReshardError
from reshard.mesh.totals import rows_of
from reshard.source.source import Source
from reshard.verify.forward.compare import ForwardReport, run_forward
from reshard.verify.forward.noise import LIMIT
from tests.zoo import ZOO
from tools.measured import write

RUNS = ((4, "bfloat16"), (8, "float32"), (8, "bfloat16"), (4, "float32"), (2, "bfloat16"), (2, "float32"))


@dataclass(frozen=True)
class Result:
    """What one run said. ``verdict`` is ``same``, ``different`` or ``refused``, ``first`` the place or the error.

    ``shares`` says that some ranks hold the same part of a split tensor, as of a KV head; ``seconds`` of the forward.
    """

    model: str
    tp: int
    dtype: str
    verdict: str
    ratio: float
    first: str | None
    seconds: float
    tied: bool
    padded: bool
    shares: bool

    def __str__(self) -> str:
        name = f"{self.model} tp {self.tp} {self.dtype}"
        return f"{name:44} {self.verdict:9} {self.ratio:6.2f} {self.seconds:5.1f} s  {self.first or ''}".rstrip()


def result(run: tuple[str, int, str], pair: tuple[Source, Source], found: ForwardReport | ReshardError) -> Result:
    """Put down what a run of shards said, and what is special about them."""
    original, shards = pair
    plan = shards.plan
    config = transformers.AutoConfig.from_pretrained(original.path).get_text_config()
    special = {
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
        "padded": bool(plan.padding),
        "shares": any(max(row.copies, default=1) > 1 and not row.kind.endswith("replicated") for row in rows_of(plan)),
    }
    if isinstance(found, ReshardError):
        # Without the temporary folder.
        message = found.message.replace(f"{original.path.parent}/", "")
        return Result(*run, "refused", 0.0, message, 0.0, **special)
    verdict = "same" if found.is_same else "different"
    return Result(*run, verdict, largest(found), found.first, found.seconds, **special)


def check(root: Path, run: tuple[str, int, str]) -> Result:
    """Run a model at a degree in a dtype."""
    pair = pair_of(root, *run)
    try:
        return result(run, pair, run_forward(*pair))
    except ReshardError as error:
        return result(run, pair, error)


def to_markdown(results: Sequence[Result]) -> str:
    """The counts, by degree and dtype."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [
        f"Measured on {platform.machine()} CPU, {versions}, on 2 x 32 random tokens. {_summary(results)}",
        "",
        "| | models | the same | largest ratio | tied embeddings | padded vocabulary | ranks share parts |",
        "|---" * 7 + "|",
    ]
    for tp, dtype in sorted({(r.tp, r.dtype) for r in results}, key=lambda key: (key[1] != "float32", key[0])):
        here = [r for r in results if (r.tp, r.dtype) == (tp, dtype)]
        worst = max(here, key=lambda r: r.ratio)
        counts = [len(here), sum(r.verdict == "same" for r in here), f"{worst.ratio:.2f} ({worst.model})"]
        counts += [sum(getattr(r, name) for r in here) for name in ("tied", "padded", "shares")]
        lines.append(f"| tp {tp}, {dtype} | " + " | ".join(map(str, counts)) + " |")
    others: dict[tuple[str, str, str], list[int]] = {}
    for r in sorted(results, key=lambda r: (r.model, r.dtype, r.tp)):
        if r.verdict != "same":
            how = f"different at {r.first}, {r.ratio:.2f}" if r.verdict == "different" else f"{r.verdict}: {r.first}"
            others.setdefault((r.model, r.dtype, re.sub(r"rank \d+ of \d+ failed: ", "", how)), []).append(r.tp)
    if others:
        lines += ["", "Not the same, or not run:", ""]
    for (model, dtype, how), degrees in others.items():
        lines.append(f"- {model}, {dtype}, tp {', '.join(map(str, degrees))}: {how}")
    return "\n".join(lines) + "\n"


def _summary(results: Sequence[Result]) -> str:
    same = [r for r in results if r.verdict == "same"]
    ratios = sorted(r.ratio for r in same)
    high = sum(ratio > 2 for ratio in ratios)
    return (
        f"Of {len(results)} runs over {len({r.model for r in results})} models {len(same)} say that the shards are the "
        f"same model. Half of them have a largest ratio below {ratios[len(ratios) // 2]:.2f}, and {high} one above 2; "
        f"the limit is {LIMIT:g}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--runs", default=",".join(f"{tp}:{dtype}" for tp, dtype in RUNS))
    parser.add_argument("--write", action="store_true", help="put the counts into evidence.md")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    file: Path = arguments.results
    results = [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(r.model, r.tp, r.dtype) for r in results}
    for degree, dtype in (text.split(":") for text in arguments.runs.split(",")):
        runs = [(name, int(degree), dtype) for name in arguments.models.split(",") if int(degree) in ZOO[name].degrees]
        runs = [run for run in runs if run not in done]
        for run in runs:
            with tempfile.TemporaryDirectory(prefix="reshard-zoo-") as folder, file.open("a") as kept:
                results.append(check(Path(folder), run))
                print(results[-1], flush=True)
                print(json.dumps(asdict(results[-1])), file=kept, flush=True)
    if arguments.write:
        write("zoo", to_markdown(results))
    else:
        print(to_markdown(results))


if __name__ == "__main__":
    main()
