"""Real sizes: DeepSeek-V3 in sparse files with true headers, and steps, pieces and blocks as they are shipped.

``benchmarks.planning`` and ``benchmarks.speed`` say in what time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.checkpoints import DEEPSEEK_V3, deepseek_v3_tensors, write_sparse
from reshard.api import plan
from reshard.formats.mesh import Mesh
from reshard.mesh.degrees import refusal, valid_degrees
from tests.marks import thorough
from tests.support import LLAMA, change_tensor, contents, write_checkpoint


@thorough
def test_deepseek_v3_is_planned(tmp_path):
    tensors = list(deepseek_v3_tensors())
    assert len(tensors) > 90_000
    folder = write_sparse(tmp_path / "source", DEEPSEEK_V3, tensors, files=163)
    found = plan(folder, tp=16)
    assert len(found.layouts) == len(tensors)
    assert valid_degrees(found.model) == [1, 2, 4, 8, 16]
    why = refusal(found.model, Mesh((("tp", 32),)))
    assert why is not None and "is 16 blocks of 128, which do not divide by 32" in str(why)
    box = found.layouts["model.layers.7.mlp.experts.200.down_proj.weight_scale_inv"].boxes[3]
    assert box.shape == (56, 1)


LARGE = LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32_001, "num_hidden_layers": 2}
"""A checkpoint of 180 MB: two steps of work, and tensors that are larger than any piece."""


def reshard(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the tests' own processes have small sizes (tests/conftest.py)."""
    command = [sys.executable, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])


@thorough
def test_sizes_as_they_are_shipped(tmp_path):
    source = write_checkpoint(tmp_path / "source", files=2, config=LARGE)
    assert sum(file.stat().st_size for file in source.glob("*.safetensors")) > 2 * 64 << 20
    steps = [
        ["split", source, tmp_path / "four", "--tp", "4"],
        ["split", tmp_path / "four", tmp_path / "vllm", "--tp", "2", "--as", "vllm"],
        ["merge", tmp_path / "vllm", tmp_path / "merged"],
    ]
    for step in steps:
        done = reshard(*step)
        assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "merged") == contents(source)
    for shards in ("four", "vllm"):
        assert reshard("verify", source, tmp_path / shards, "--exact-only", "--quiet").stdout == "same\n"
    change_tensor(tmp_path / "four" / "rank-03-of-04" / "model.safetensors", "model.layers.1.mlp.down_proj.weight")
    done = reshard("verify", source, tmp_path / "four", "--exact-only")
    assert done.returncode == 1 and "model.layers.1.mlp.down_proj.weight" in done.stdout
