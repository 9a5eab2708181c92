"""An adapter in vLLM, on a CPU: loaded as a LoRA, and in the weights that reshard wrote.

    python -m tests.engines.lora_vllm --python ENGINES/vllm/bin/python [--cases llama:linear,...]

For each case, greedy tokens of: transformers with PEFT's adapter; vLLM with the adapter loaded (``enable_lora``), at tp
1 and 2; vLLM with what ``merge --into`` and ``split --adapter --as vllm`` wrote, at tp 1 and 2. All must be the same,
and their log-probabilities within rounding. vLLM with the base model alone must answer otherwise. What vLLM does not
load is named. Exit code 1: something is not as it should be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from reshard.api import merge, split
from tests import peft_adapters, zoo
from tests.engines.serve import PROMPTS
from tests.engines.shards import checkpoint
from tests.engines.vllm_run import NotRunError, in_vllm

CASES = ("llama:linear", "mixtral:linear", "mixtral:experts")
REFUSED = ("mixtral:linear", "mixtral:experts")
"""vLLM 0.32 wraps all experts for a LoRA of whatever module, and needs Triton for them: not so on a CPU."""
TOKENS, LENGTH = 16, 64
LARGEST = 1e-3
"""Log-probabilities in float32 differ by at most so much."""

Answer = Sequence[Sequence[tuple[int, float]]]


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the python of vLLM's environment")
    parser.add_argument("--cases", default=",".join(CASES), help="models of tests/zoo, and what is changed")
    arguments = parser.parse_args()
    wrong = []
    for case in arguments.cases.split(","):
        with tempfile.TemporaryDirectory(prefix="reshard-lora-") as folder:
            wrong += [f"{case}: {line}" for line in compare(Path(folder), arguments.python, case)]
    print("\n".join(wrong) or "all as it should be")
    sys.exit(1 if wrong else 0)


def compare(root: Path, python: str, case: str) -> list[str]:
    """What is wrong with one case; prints what was measured."""
    name, kind = case.split(":")
    base, adapter = checkpoint(root, name), root / "adapter"
    peft_adapters.save(base, adapter, kind)
    merge(base, root / "merged", adapter=adapter)
    runs: dict[str, tuple[Path, str, int, Path | None]]
    runs = {"base": (base, "auto", 1, None), "merged": (root / "merged", "auto", 1, None)}
    for tp in (1, 2):
        split(base, root / f"shards-{tp}", tp=tp, format="vllm", adapter=adapter)
        runs |= {
            f"LoRA, tp {tp}": (base, "auto", tp, adapter),
            f"shards, tp {tp}": (root / f"shards-{tp}", "sharded_state", tp, None),
        }
    wanted, wrong = in_transformers(base, adapter), []
    for title, (folder, form, tp, lora) in runs.items():
        try:
            lengths, how = (TOKENS, LENGTH), {"load_format": form, "dtype": "float32", "adapter": lora}
            found = in_vllm(root, python, folder, tp, PROMPTS, *lengths, **how)["answers"]
        except NotRunError as error:
            print(f"{case}: {title}: not run: {error}", flush=True)
            wrong += [] if case in REFUSED and "LoRA" in title else [f"{title} was not run"]
            continue
        same, largest = distance(wanted, found)
        print(f"{case}: {title}: {same} of {len(PROMPTS) * TOKENS} tokens as PEFT's, {largest:.1e}", flush=True)
        is_same = same == len(PROMPTS) * TOKENS and largest < LARGEST
        if is_same == (title == "base"):
            wrong.append(f"{title} answers {'like' if is_same else 'otherwise than'} the base model with the adapter")
    return wrong


def distance(one: Answer, other: Answer) -> tuple[int, float]:
    """How many tokens are equal, and the largest difference of the log-probabilities of equal ones."""
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    equal = [abs(a[1] - b[1]) for a, b in pairs if a[0] == b[0]]
    return len(equal), max(equal, default=0.0)


def in_transformers(base: Path, adapter: Path) -> Answer:
    """What transformers answers, with PEFT's adapter beside the model."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(zoo.class_of(base).from_pretrained(base, dtype=torch.float32), adapter).eval()
    found = []
    for prompt in PROMPTS:
        ids, answer = [*prompt], []
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
            answer.append((int(logits.argmax()), float(logits.log_softmax(-1).max())))
            ids.append(answer[-1][0])
        found.append(answer)
    return found


if __name__ == "__main__":
    main()
