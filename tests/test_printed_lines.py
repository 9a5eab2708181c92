"""What a message tells one to type or to write: it is taken from the message, letter by letter, and works."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support import LLAMA, command, llama_tensors, write_checkpoint, write_file

MORE = {
    "a vector": ("model.layers.{}.scale", (20,)),
    "a number": ("model.temperature", ()),
    "a vector of an expert": ("model.layers.{}.mlp.experts.0.offset", (5,)),
    "a strange name": ('model."odd" = scale', (3,)),
    "a scale of a split weight": ("model.layers.1.mlp.up_proj.scale", (24,)),
    "a matrix": ("model.layers.{}.gate.weight", (24, 20)),
    "a matrix of an axis": ("model.layers.{}.gate.weight", (37, 7)),
    "a matrix of no axis": ("model.layers.0.gate.weight", (7, 11)),
    "a tensor of three dimensions": ("model.conv.weight", (4, 5, 6)),
}
UNKNOWN = LLAMA | {"model_type": "nobody_knows"}


@pytest.mark.parametrize("which", MORE)
def test_a_line_of_a_hint_is_taken_and_leaves_no_weight_whole(which: str, tmp_path: Path) -> None:
    name, shape = MORE[which]
    folder = write_checkpoint(tmp_path / "model")
    names = dict.fromkeys(name.format(layer) for layer in range(LLAMA["num_hidden_layers"]))
    write_file(folder / "model.safetensors", [*llama_tensors(), *((each, "BF16", shape) for each in names)])
    refused = command("plan", "model", "--tp", "2", cwd=tmp_path)
    assert refused.returncode == 2 and "has no rule" in refused.stderr
    line = re.search(r"add the line (.* = \".*\")(?: with .*)?, and pass it", refused.stderr)
    assert (line is None) == (which in {"a scale of a split weight", "a matrix of no axis"}), refused.stderr
    if line is not None:
        assert command("plan", "model", "--save", "rules.toml", cwd=tmp_path).returncode == 2  # and it is written
        rules = tmp_path / "rules.toml"
        rules.write_text(f"{rules.read_text()}\n{line[1]}\n")
        done = command("split", "model", "out", "--tp", "2", "--plan", "rules.toml", cwd=tmp_path)
        assert ("cannot read '?" in done.stderr) if "?" in line[1] else (done.returncode == 0), done.stderr


@pytest.mark.parametrize("place", ["out", "the out"])
@pytest.mark.parametrize("form", [(), ("--as", "vllm")], ids=["own", "vllm"])
@pytest.mark.parametrize("share", [("--rank", "1"), ("--part", "0/2")], ids=lambda share: share[0])
def test_the_command_that_says_what_is_missing(
    share: tuple[str, ...], form: tuple[str, ...], place: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model")
    done = command("split", "model", place, "--tp", "2", *form, *share, "--max-shard-size", "10KB", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = re.search(r"missing: see `(reshard inspect .*)`\.", done.stdout)
    assert printed is not None, done.stdout
    shown = command(*shlex.split(printed[1])[1:], cwd=tmp_path)
    assert shown.returncode == 1 and shown.stdout and not shown.stderr, shown.stderr


def test_a_draft_is_tried_before_it_is_announced(tmp_path: Path) -> None:
    """On its source: what does not fit is said, and the file is there to be edited."""
    folder = write_checkpoint(tmp_path / "model", config=UNKNOWN)
    done = command("plan", "model", "--draft", "good.toml", cwd=tmp_path)
    assert done.returncode == 0 and "degrees 1, 2, 4" in done.stderr
    assert command("split", "model", "out", "--tp", "2", "--plan", "good.toml", cwd=tmp_path).returncode == 0
    printed = re.search(r"'reshard (verify .*)' decide", done.stderr)
    assert printed is not None
    shown = command(*shlex.split(printed[1].replace("OUT", "out")), "--exact-only", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    forgotten = command("verify", "model", "out", "--exact-only", cwd=tmp_path)
    assert forgotten.returncode == 2 and "split with --plan FILE" in forgotten.stderr
    shutil.rmtree(folder)
    write_checkpoint(folder, config=UNKNOWN)
    tensors = [tensor for tensor in llama_tensors() if tensor[0] != "model.layers.1.mlp.up_proj.weight"]
    write_file(folder / "model.safetensors", tensors)
    done = command("plan", "model", "--draft", "bad.toml", cwd=tmp_path)
    assert done.returncode == 2 and "do not fit yet" in done.stderr and "up_proj" in done.stderr
    assert (tmp_path / "bad.toml").exists()
