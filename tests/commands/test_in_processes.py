"""What is computed, in worker processes: the bytes of one thread, and how all of them end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.store.staging_names import staging_of
from tests import store
from tests.marks import one_of_each
from tests.support import LLAMA, command, contents, write_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads do the work")

CONFIG = LLAMA | {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 200, "dtype": "bfloat16",
}  # fmt: skip

CASES = {
    "cast": "split model OUT --tp 2 --dtype fp16",
    "quantized": "split model OUT --tp 2 --quantize fp8-block",
    "dequantized": "split fp8 OUT --as huggingface --dequantize",
    "adapted": "split model OUT --as huggingface --adapter adapter",
    "averaged": "average model model OUT",
}

PROGRAM = """
import os, signal, time
from pathlib import Path
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from reshard.__main__ import main
from reshard.move import jobs

jobs.DEFAULT, parent, fork, write = jobs.Sizes(step=100_000, small=1000, piece=50_000), os.getpid(), os.fork, os.pwrite
forks, writes, turn = [], [], os.pipe()
os.write(turn[1], b"1")

def counted():
    forks.append(None)
    return fork()

def watched(*arguments):
    writes.append(None)
    if os.getpid() != parent and len(writes) == {writes}:
        os.read(turn[0], 1)  # the other worker waits
        while not any(b'"steps"' in path.read_bytes() for path in Path({staging!r}).glob(".reshard-journal-*")):
            time.sleep(0.01)
        {then}
        os.write(turn[1], b"1")
    return write(*arguments)

os.fork, os.pwrite = counted, watched
try:
    main()
finally:
    print("forks:", len(forks))
"""
"""reshard with small steps. A worker does something after some writes; at last it says how often it was forked."""


@pytest.fixture(scope="module")
def sources() -> Path:
    def make(folder: Path) -> None:
        write_checkpoint(folder / "model", files=2, config=CONFIG)
        torch.manual_seed(0)
        for file in (folder / "model").glob("*.safetensors"):
            tensors = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in load_file(file).items()}
            save_file(tensors, file, {"format": "pt"})
        command("split", "model", "fp8", "--as", "huggingface", "--quantize", "fp8-block", cwd=folder)
        names = [f"base_model.model.model.layers.{i}.self_attn.{each}_proj" for i in range(2) for each in "qkvo"]
        factors = {f"{name}.lora_A.weight": torch.randn(4, 256) for name in names}
        factors |= {f"{name}.lora_B.weight": torch.randn(256, 4) for name in names}
        (folder / "adapter").mkdir()
        save_file(factors, folder / "adapter/adapter_model.safetensors", {"format": "pt"})
        targets = [f"{each}_proj" for each in "qkvo"]
        settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
        (folder / "adapter/adapter_config.json").write_text(json.dumps(settings))
        for name, line in CASES.items():
            done = command(*line.replace("OUT", f"of-{name}").split(), "--workers", "1", cwd=folder)
            assert done.returncode == 0, done.stderr

    return store.made("computed-in-processes", make)


def run(sources: Path, line: str, out: Path, writes: int = 0, then: str = "pass") -> tuple[int, str, str]:
    """The exit code, what it printed, and its messages."""
    program = PROGRAM.format(writes=writes, then=then, staging=str(staging_of(out)))
    words = line.replace("OUT", str(out)).split()
    done = subprocess.run(
        [sys.executable, "-c", program, *words], cwd=sources, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("name", "count"), one_of_each([(name, 3) for name in CASES] + [("cast", 1)]))
def test_the_bytes_are_those_of_one_thread(name: str, count: int, sources: Path, tmp_path: Path) -> None:
    code, printed, messages = run(sources, f"{CASES[name]} --workers {count}", tmp_path / "out")
    assert code == 0, messages
    assert f"forks: {count if count > 1 else 0}" in printed
    assert contents(tmp_path / "out") == contents(sources / f"of-{name}")
    assert name != "quantized" or "The largest relative error of a weight is 2." in printed, "it comes from all workers"


def test_what_is_only_moved_is_moved_by_threads(sources: Path, tmp_path: Path) -> None:
    code, printed, _ = run(sources, "split model OUT --tp 2 --workers 3", tmp_path / "out")
    assert code == 0 and "forks: 0" in printed


ENDS = [
    ("os.kill(os.getpid(), signal.SIGKILL)", 2),
    ("os.kill(parent, signal.SIGINT); signal.pause()", 130),
    ("os.kill(parent, signal.SIGTERM); signal.pause()", 143),
    ("os.kill(parent, signal.SIGKILL); signal.pause()", -9),
    ("raise OSError(28, 'No space left on device')", 2),
]
"""What a worker does, and the exit code of the command."""


@pytest.mark.parametrize(("then", "code"), one_of_each(ENDS))
def test_the_same_command_goes_on(then: str, code: int, sources: Path, tmp_path: Path) -> None:
    """After a worker was killed, could not write, after Ctrl-C and a scheduler's signal, after all were killed."""
    out, line = tmp_path / "out", f"{CASES['cast']} --workers 2"
    ended, _, messages = run(sources, line, out, 25, then)
    assert ended == code, messages
    assert [*staging_of(out).rglob("*.incomplete")], "it has been at work"
    if "getpid" in then:
        assert messages.startswith("Error: a worker process was ended by SIGKILL\nHint: ")
    elif "raise" in then:
        assert messages.startswith("Error: cannot write") and "No space left on device" in messages
    elif code > 2:
        assert "are kept: the same command goes on from there" in messages
    ended, _, messages = run(sources, line, out)
    assert ended == 0, messages
    assert contents(out) == contents(sources / "of-cast") and not staging_of(out).exists()


def test_an_error_in_a_worker_is_that_of_a_thread(sources: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", files=2, config=CONFIG)  # random bytes: some are too large for fp16
    line = f"split {model} OUT --tp 2 --dtype fp16 --workers"
    code, _, messages = run(sources, f"{line} 3", tmp_path / "out")
    assert code == 1 and "would become infinite" in messages and not [*tmp_path.glob("out*")]
    alone = command(*line.replace("OUT", str(tmp_path / "out")).split(), "1", cwd=sources)
    assert messages.splitlines()[1:] == alone.stderr.splitlines()[1:], "another tensor, perhaps"


def test_a_source_that_changes_meanwhile_is_refused(sources: Path, tmp_path: Path) -> None:
    model = shutil.copytree(sources / "model", tmp_path / "model")
    then = f"os.utime({str(model / 'model-00001-of-00002.safetensors')!r})"
    code, _, messages = run(sources, f"average {model} {model} OUT --workers 2", tmp_path / "out", 25, then)
    assert code == 1 and "changed" in messages and not (tmp_path / "out").exists()
