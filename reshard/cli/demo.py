"""``reshard demo``: split, re-split both ways, merge, and the proof that nothing changed.

Its tiny model is a Llama of random weights, the same bytes on every machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.options import PATH, Command
from reshard.cli.printing import print_answer, print_lines
from reshard.formats.errors import CheckpointError
from reshard.formats.files.safetensors import build_header
from reshard.text import align

if TYPE_CHECKING:
    import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 1003,
    "dtype": "bfloat16",
}
"""4 KV heads, so that 8 ranks hold each of them twice; a vocabulary that no degree divides, so that it is padded."""


def write_model(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Write a Llama-shaped checkpoint of random bf16 weights, in two files with an index; always the same bytes."""
    folder.mkdir(parents=True)
    shapes = _shapes(config)
    names = list(shapes)
    half = len(names) // 2
    parts = {"model-00001-of-00002.safetensors": names[:half], "model-00002-of-00002.safetensors": names[half:]}
    from numpy.random import PCG64

    generator = PCG64(0)
    total = 0
    for file, part in parts.items():
        with (folder / file).open("wb") as stream:
            stream.write(build_header([(name, "BF16", shapes[name]) for name in part], {"format": "pt"}))
            for name in part:
                total += stream.write(_random_bf16(generator, shapes[name]))
    weight_map = {name: file for file, part in parts.items() for name in part}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (ff, hidden),
            f"{prefix}.mlp.up_proj.weight": (ff, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ff),
        }
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def _random_bf16(generator: np.random.PCG64, shape: tuple[int, ...]) -> bytes:
    """Values of a trained model's scale; bf16 is the upper half of float32. Norms lie around 1.

    Each is the sum of four random bytes, about its mean, in steps of 2 ** -13, and none is rounded: a normal
    distribution takes logarithms, whose last bit depends on the processor.
    """
    import numpy as np

    count = math.prod(shape)
    words = generator.random_raw(-(-count // 2)).astype("<u8")
    sums = words.view(np.uint8)[: 4 * count].reshape(count, 4).sum(axis=1, dtype=np.int32) - 510
    values = np.ldexp(sums.astype(np.float32), -13)
    if len(shape) == 1:
        values += np.float32(1)
    return bytes((values.view("<u4") >> 16).astype("<u2").data)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


STEPS = (
    ("split", "model", "tp4", "--tp", "4"),
    ("split", "tp4", "tp2", "--tp", "2"),
    ("split", "tp4", "tp8", "--tp", "8"),
    ("merge", "tp8", "merged"),
)
"""The commands of the round, to be run in the demo's folder."""


def compare(original: Path, merged: Path) -> list[dict[str, Any]]:
    """Both folders file by file: the sha256 of each file in both, None where it is missing, and whether it came back
    byte for byte.
    """
    files = ((root, file) for root in (original, merged) for file in root.rglob("*") if file.is_file())
    rows = []
    for name in sorted({file.relative_to(root).as_posix() for root, file in files}):
        places = [folder / name for folder in (original, merged)]
        one, other = (hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None for file in places)
        rows.append({"name": name, "original": one, "merged": other, "identical": one is not None and one == other})
    return rows


@click.command(
    "demo",
    cls=Command,
    examples={
        "reshard demo": "in a temporary folder",
        "reshard demo demo": "keep the model and all shards in the folder demo",
        "reshard demo --json": "the checksums as JSON",
    },
)
@click.argument("folder", type=PATH, required=False)
@click.pass_context
def demo_command(context: click.Context, folder: Path | None, as_json: bool) -> bool:
    """Make a tiny model, split it, re-split it, merge it, and compare the files.

    It works in FOLDER, which is kept, or in a temporary folder. Exit code 0: all files came back byte for byte. 1: a
    file came back changed.
    """
    import tempfile

    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        hint = "give a new one, or none for a temporary one"
        raise CheckpointError(f"{folder} exists and is not an empty folder", hint)
    temporary = tempfile.TemporaryDirectory(prefix="reshard-demo-") if folder is None else None
    with temporary or contextlib.nullcontext(folder) as place:
        home, group = Path(str(place)), context.find_root().command
        if not as_json:
            print_lines(f"A Llama with random weights, 4 KV heads and a vocabulary of 1003, in {home / 'model'}", "")
        home.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), contextlib.chdir(home):
            write_model(Path("model"))
            for step in STEPS:
                if not as_json:
                    print_lines(f"$ reshard {' '.join(step)}")
                with group.make_context("reshard", [*step, *(["--quiet"] if as_json else [])]) as of_step:
                    group.invoke(of_step)
            compared = compare(Path("model"), Path("merged"))
    is_same = all(file["identical"] for file in compared)
    cells = [("sha256 of", "model", "merged", "")]
    for file in compared:
        original, merged = ((file[side] or "missing")[:16] for side in ("original", "merged"))
        cells.append((file["name"], original, merged, "same" if file["identical"] else "DIFFERENT"))
    count = f"{sum(file['identical'] for file in compared)} of {len(compared)} files came back byte for byte."
    gone = "The folder was temporary: 'reshard demo FOLDER' keeps everything for you to look at."
    lines = ["", *align(cells, right=(), width=None), "", count, *([gone] if folder is None and is_same else [])]
    print_answer(as_json, {"folder": folder, "identical": is_same, "files": compared}, *lines)
    return is_same
