"""A round with an installed reshard, which is the one of the Python that runs this file, and not of a checkout.

    python -I tools/installed.py

Makes a model, splits, re-splits, converts, merges, patches and verifies it, bytes and forward pass, and checks that the
merge has the model's bytes. Ends with the versions that did it. It imports nothing but the standard library, so that it
runs in any environment; ``-I`` keeps the folder that it lies in off the path.
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path

LINES = (
    "demo d", "inspect d/model", "plan d/model --tp 8 --report plan.html", "split d/model tp2 --tp 2",
    "split tp2 vllm --tp 4 --as vllm", "split vllm dcp --as dcp", "merge dcp dcp-merged --max-shard-size 1GB",
    "merge vllm merged", "diff d/model dcp --out delta", "patch d/model delta patched",
    "split d/model fp8 --as huggingface --quantize fp8-block", "verify d/model tp2 --report proof.html",
    "verify d/model vllm --exact-only", "profile d/model --tp 1,2 --seq 8 --phase decode --seconds 0.01",
)  # fmt: skip


def main() -> int:
    """0 if every command does what it should."""
    with tempfile.TemporaryDirectory() as folder:
        for line in LINES:
            done = subprocess.run(
                [sys.executable, "-m", "reshard", *line.split()], cwd=folder, capture_output=True, text=True
            )
            print(f"{'ok' if done.returncode == 0 else 'FAILED':6}  reshard {line}", flush=True)
            if done.returncode:
                print(done.stdout + done.stderr)
                return 1
        model, merged = Path(folder, "d", "model"), Path(folder, "merged")
        names = sorted(path.name for path in model.iterdir())
        same = names == sorted(path.name for path in merged.iterdir())
        if not same or filecmp.cmpfiles(model, merged, names, shallow=False)[0] != names:
            print("FAILED  the merge is not the model, byte for byte")
            return 1
    versions = sorted(
        f"{each.name} {each.version}" for each in distributions() if each.name not in ("pip", "setuptools")
    )
    print(f"Python {sys.version.split()[0]}: {', '.join(versions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
