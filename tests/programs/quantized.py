"""Small quantized checkpoints, and what vLLM allocates and loads for them on two ranks.

    python -m tests.programs.quantized make FOLDER       # the checkpoints
    VLLM_PYTHON tests/oracles/vllm/dump_quantized.py FOLDER DUMPS
    python -m tests.programs.quantized record DUMPS      # writes tests/oracles/vllm/quantized.json.xz

The models are those of tests/oracles/vllm/models; the linear layers of their blocks are quantized, in blocks and groups
of 8. The fixture has, for each model and method, a hash of the checkpoint, and for each rank the dtype, the shape and a
hash of the elements of each tensor. What vLLM never sets is ``unset``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from reshard.formats.files.safetensors import build_header, read_header
from tests.dequantize import _FLOAT, _INPUT, _INT8, Method, Stored, _awq, _gptq, _groups, _packed, _scaled
from tests.programs.oracles import ORACLES

FIXTURE = ORACLES / "vllm" / "quantized.json.xz"
MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "stablelm", "olmo2", "mixtral",
    "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "minimax_m2",
)  # fmt: skip
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_OF_8 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 8, "dynamic": True, "symmetric": True}
_BLOCK = {**_FLOAT, "strategy": "block", "block_structure": [8, 8]}


def _compressed(weights: dict[str, Any], inputs: dict[str, Any], layout: str) -> dict[str, Any]:
    return _groups({"targets": ["Linear"], "weights": weights, "input_activations": inputs}, layout)


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
METHODS: dict[str, Method] = {
    "fp8-block": _scaled({**_FP8, "weight_block_size": [8, 8]}, "block", scale=".weight_scale_inv", block=(8, 8)),
    "fp8-tensor": _scaled(_FP8, ""),
    "fp8-static": _scaled(_STATIC_FP8, "", extra=_INPUT),
    "gptq": _gptq(4, 8, sym=True),
    "gptq-8": _gptq(8, 8, sym=True),
    "gptq-one-group": _gptq(4, -1, sym=True),
    "awq": _awq(8),
    "packed-4": _packed(4, 8),
    "packed-4-zeros": _packed(4, 8, symmetric=False),
    "packed-8-channel": _packed(8, None),
    "int8-channel": _scaled(
        _compressed({**_INT8, "symmetric": True}, {**_TOKENS, "type": "int"}, "int-quantized"), "out 1", dtype="I8"
    ),
    "int8-static": _scaled(
        _compressed({**_INT8, "symmetric": True}, {**_STATIC, "type": "int"}, "int-quantized"), "out 1", dtype="I8",
        extra=_INPUT,
    ),
    "float8-tensor": _scaled(_compressed({**_FLOAT, "strategy": "tensor"}, _TOKENS, "float-quantized"), "1"),
    "float8-static": _scaled(
        _compressed({**_FLOAT, "strategy": "tensor"}, _STATIC, "float-quantized"), "1", extra=_INPUT
    ),
    "float8-channel": _scaled(_compressed({**_FLOAT, "strategy": "channel"}, _TOKENS, "float-quantized"), "out 1"),
    "float8-block": _scaled(_compressed(_BLOCK, _OF_8, "float-quantized"), "block", block=(8, 8)),
}  # fmt: skip
CASES = [(model, method) for method in METHODS for model in MODELS]

_LINEAR = re.compile(r"\.(?:\w+_proj(?:_with_mqa)?|w[123])\.weight$")


def make(folder: Path, model: str, method: str) -> Path:
    """Write one checkpoint."""
    of, described = METHODS[method], json.loads((ORACLES / "vllm" / "models" / f"{model}.json").read_text())
    rng = np.random.default_rng(0)
    dtype = "F16" if method.startswith(("gptq", "awq")) and model not in {"gemma2", "gemma3"} else "BF16"
    tensors: dict[str, Stored] = {}
    plain: list[str] = []
    for name, shape in described["tensors"].items():
        if _LINEAR.search(name) and len(shape) == 2 and not (shape[0] % 8 or shape[1] % 8):
            module = name.removesuffix(".weight")
            found = of.encode(rng, tuple(shape))
            tensors |= {module + end: _as(dtype, x.array) if x.dtype == "F16" else x for end, x in found.items()}
            continue
        if len(shape) == 2:
            plain.append(name.removesuffix(".weight"))
        tensors[name] = _as(dtype, rng.uniform(0.5, 1.5, shape).astype(np.float32))
    settings = dict(of.settings)
    if settings["quant_method"] == "compressed-tensors":
        settings["ignore"] = plain
    elif settings["quant_method"] != "gptq":
        settings["modules_to_not_convert"] = plain
    config = {
        **described["config"],
        "dtype": {"F16": "float16", "BF16": "bfloat16"}[dtype],
        "quantization_config": settings,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    header = build_header([(name, t.dtype, t.array.shape) for name, t in tensors.items()], {"format": "pt"})
    (folder / "model.safetensors").write_bytes(header + b"".join(t.array.tobytes() for t in tensors.values()))
    return folder


def _as(dtype: str, numbers: np.ndarray[Any, Any]) -> Stored:
    """Numbers in the dtype of the model, of 16 bits."""
    if dtype == "F16":
        return Stored("F16", numbers.astype(np.float16))
    return Stored("BF16", (numbers.astype(np.float32).view("<u4") >> 16).astype(np.uint16))


def described(folder: Path) -> dict[str, dict[str, str]]:
    """What the files of each rank hold: dtype, shape and hash of each tensor."""
    found = {}
    for file in sorted(folder.glob("model-rank-*.safetensors")):
        content = file.read_bytes()
        tensors = read_header(file).tensors.values()
        found[file.name] = {
            info.name: f"{info.dtype} {list(info.shape)} {_hash(content[info.offset : info.offset + info.nbytes])}"
            for info in sorted(tensors)
        }
    return found


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _recorded(dumps: Path) -> Iterator[tuple[str, Any]]:
    for model, method in CASES:
        folder = dumps / f"{model}+{method}"
        if files := described(folder):
            unset = set((folder / "unset").read_text().split())
            for tensors in files.values():
                tensors |= {name: f"{text.rpartition(' ')[0]} unset" for name, text in tensors.items() if name in unset}
            yield f"{model} {method}", {"source": (folder / "source").read_text(), "files": files}
        else:
            yield f"{model} {method}", (folder / "refused").read_text().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "record"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "record":
        FIXTURE.write_bytes(lzma.compress(json.dumps(dict(_recorded(arguments.folder))).encode()))
        return
    for model, method in CASES:
        folder = make(arguments.folder / f"{model}+{method}", model, method)
        (folder / "source").write_text(source_hash(folder))


def recorded() -> dict[str, Any]:
    """The fixture."""
    found: dict[str, Any] = json.loads(lzma.decompress(FIXTURE.read_bytes()))
    return found


def source_hash(folder: Path) -> str:
    """A hash of a checkpoint's weights."""
    return _hash((folder / "model.safetensors").read_bytes())


if __name__ == "__main__":
    main()
