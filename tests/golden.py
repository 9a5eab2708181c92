"""Golden bytes: a hash of everything that is written, for 398 cases: models x quantization x formats x meshes.

``python -m tests.golden`` compares the cases with ``tests/golden.txt`` and prints what differs; ``--write`` writes the
table anew. The commit says why a line changes. ``tests/test_golden.py`` compares a sample.

The sources are random numbers under the names and shapes of small models (``tests/oracles/vllm/models``), and small
quantized checkpoints: nothing in the table depends on how transformers or torch make a model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reshard.api import merge, split
from reshard.formats.errors import ReshardError
from reshard.formats.files.safetensors import build_header, tensor_bytes
from tests.dequantize import METHODS
from tests.programs.oracles import ORACLES
from tests.programs.quantized import make
from tests.source.test_quantized import checkpoint
from tests.support import contents

TABLE = Path(__file__).parent / "golden.txt"
ONE = {"workers": 1, "fsync": False}

MODELS = (
    "llama", "llama_kv2", "gpt2", "bloom", "falcon", "phi3", "gpt_neox", "gpt_bigcode", "gemma3", "mixtral",
    "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4", "mamba", "mamba2", "qwen3_next", "granitemoehybrid",
)  # fmt: skip
QUANTIZED: Mapping[str, Callable[[Path], Path]] = {
    **{
        f"{model}+{method}": (lambda folder, of=(model, method): make(folder, *of))
        for model, method in [
            ("llama", "fp8-block"), ("llama", "fp8-tensor"), ("llama", "float8-channel"), ("llama", "packed-4"),
            ("llama", "gptq"), ("qwen3_moe", "awq"), ("deepseek_v3", "fp8-block"), ("mixtral", "float8-channel"),
        ]
    },
    **{
        f"{packing}+{method}": (lambda folder, of=(method, packing): checkpoint(folder, METHODS[of[0]], of[1])[0])
        for packing, method in [
            ("packed", "fp8-block"), ("packed", "packed-4"), ("column and row", "bitsandbytes-nf4"),
            ("packed", "bitsandbytes-nf4"), ("experts fused", "gpt-oss"), ("column and row", "compressed-nvfp4"),
        ]
    },
}  # fmt: skip
TARGETS: Mapping[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "tp 3 uneven": {"tp": 3, "uneven": True},
    "ep 2 tp 2": {"ep": 2, "tp": 2},
    "ep 2 same ranks": {"ep": 2, "tp": 2, "same_ranks": True},
    "pp 2 tp 2": {"pp": 2, "tp": 2},
    "in parts": {"tp": 2, "max_shard_size": 20_000},
    **{
        " ".join([form, *(f"{key} {value}" for key, value in mesh.items())]): {"format": form, **mesh}
        for form, mesh in [
            ("vllm", {"tp": 2}), ("vllm", {"tp": 4}), ("vllm", {"pp": 2}), ("vllm-0.23", {"tp": 2}),
            ("sglang", {"tp": 2}),
            ("transformers", {"tp": 2}), ("dcp", {"tp": 2}), ("dcp", {"tp": 2, "names": "modules"}),
            ("torchtitan", {"tp": 2}), ("torchtitan-0.2", {"tp": 2}), ("megatron", {"tp": 2}), ("megatron", {"pp": 2}),
            ("megatron-local", {"tp": 1}),
            ("megatron-singleton", {"tp": 1}), ("megatron-legacy", {"tp": 2}), ("megatron-legacy", {"tp": 2, "pp": 2}),
            ("megatron-legacy-local", {"tp": 1}), ("megatron-legacy-sequential", {"tp": 1}), ("meta", {"tp": 2}),
            ("mistral", {"tp": 1}), ("deepseek", {"tp": 2}), ("deepspeed-universal", {}),
        ]
    },
}  # fmt: skip


def source(name: str, folder: Path) -> Path:
    """A checkpoint of random bytes with the tensors of a model, or a small quantized one."""
    if name in QUANTIZED:
        return QUANTIZED[name](folder)
    described = json.loads((ORACLES / "vllm" / "models" / f"{name}.json").read_text())
    tensors = [(tensor, "BF16", tuple(shape)) for tensor, shape in described["tensors"].items()]
    draw = np.random.default_rng(zlib.crc32(name.encode()))
    numbers = draw.uniform(0.5, 1.5, sum(tensor_bytes(*each) for each in tensors) // 2).astype(np.float32)
    folder.mkdir()
    config = {**described["config"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    data = (numbers.view("<u4") >> 16).astype("<u2").tobytes()
    (folder / "model.safetensors").write_bytes(build_header(tensors, {"format": "pt"}) + data)
    return folder


def digest(files: Mapping[str, bytes]) -> str:
    """A hash of files by their names; of a manifest that without what depends on when and where it was made."""
    found = hashlib.sha256()
    for name, content in sorted(files.items()):
        if name.startswith(".reshard"):
            continue
        if name == "reshard.json":
            document = json.loads(content)
            document["source"].pop("location", None)
            content = json.dumps({key: value for key, value in document.items() if key != "inputs"}).encode()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def of_source(name: str, only: Callable[[str], bool] = lambda case: True) -> Iterator[tuple[str, str]]:
    """The cases of a source that are not refused: the hash of what is written, and that of what it merges to."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made = source(name, folder / "source")
        for target, given in TARGETS.items():
            case = f"{name} | {target}"
            if not only(case):
                continue
            out, merged = folder / target, folder / "merged"
            try:
                split(made, out, **given, **ONE)
            except ReshardError:
                continue
            merge(out, merged, **ONE)
            yield case, f"{digest(contents(out))} {digest(contents(merged))}"
            for each in sorted(merged.iterdir()):
                each.unlink()
            merged.rmdir()


def known() -> dict[str, str]:
    """The table."""
    lines = (line.rsplit(": ", 1) for line in TABLE.read_text().splitlines())
    return {line[0]: line[1] for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found = {case: value for name in (*MODELS, *QUANTIZED) for case, value in of_source(name)}
    if given.write:
        TABLE.write_text("".join(f"{case}: {value}\n" for case, value in found.items()))
        return 0
    wanted = known()
    wrong = [case for case in {**wanted, **found} if wanted.get(case) != found.get(case)]
    for case in wrong:
        print(f"{case}: {found.get(case)}, the table has {wanted.get(case)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
