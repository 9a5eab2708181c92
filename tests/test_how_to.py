"""The how-to pages, line by line to their last, with folders as programs write them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from reshard.api import split
from tests import peft_adapters, store
from tests.marks import one_of_each, thorough
from tests.programs.oracles import checkpoint
from tests.programs.test_megatron import golden
from tests.support import LLAMA, command, contents, write_checkpoint

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
ELSEWHERE = ("--engine", "profile", "live", "s3://", "org/model")
"""What needs an engine, a server, or minutes of measuring: tests of its own run it."""


def lines_of(page: str, **paths: Path) -> list[list[str]]:
    """The commands of a page, with paths in place of its capital words."""
    blocks = re.findall(r"```sh\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    own = [
        line[1:] for line in lines if line[:1] == ["reshard"] and not any(word in " ".join(line) for word in ELSEWHERE)
    ]
    return [[_filled(word, paths) for word in line] for line in own]


def _filled(word: str, paths: Mapping[str, Path]) -> str:
    first, slash, rest = word.partition("/")
    return f"{paths[first]}{slash}{rest}" if first in paths else word


def walk(lines: Sequence[Sequence[str]], folder: Path) -> list[str]:
    """What the commands print. Each of them succeeds."""
    printed = []
    for line in lines:
        done = command(*line, cwd=folder)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        printed.append(done.stdout)
    return printed


RUNS = {
    "torch_dist": ("llama-te-tp2", (), "any: its files have chunks"),
    "legacy": ("llama-te-tp2", ("--legacy",), "tp 2"),
    "legacy of two stages": ("llama-te-tp2-pp2", ("--legacy",), "pp 2 x tp 2"),
    "legacy of experts": ("mixtral-te-tp2-ep2", ("--legacy",), "ep 2 x tp 2"),
}


def megatron(case: str, options: Sequence[str], folder: Path, *numbers: str) -> list[list[str]]:
    """The lines of the page about Megatron, with a run that Megatron-Core wrote, and what trainers put beside it."""
    model = checkpoint("megatron", case.split("-")[0], *numbers)
    run = golden(case, folder / "run", *options, model=model)
    step = (run / "iter_0000001").rename(run / "iter_0001000")
    (run / "latest_checkpointed_iteration.txt").write_text("1000")
    for name in ("run_config.yaml", "modelopt_run_config.yaml"):
        (step / name).write_text("trainer: bridge\n")
    paths = {name: folder / name.lower() for name in ("OUT", "MERGED", "LOAD")}
    return lines_of("megatron-to-vllm", RUN=run, MODEL=model, **paths)


@pytest.mark.parametrize("form", one_of_each(RUNS))
def test_from_megatron_to_vllm(form: str, tmp_path: Path) -> None:
    case, options, mesh = RUNS[form]
    lines = megatron(case, options, tmp_path)
    *_, verify = lines
    assert verify[0] == "verify" and len(lines) == 5
    inspected, *_ = walk([*lines[:-1], [*verify, "--exact-only"]], tmp_path)
    assert re.search(r"loaded by +Megatron-LM", inspected) and re.search(rf"mesh +{mesh}\n", inspected), inspected
    beside = {path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".safetensors"}
    assert beside - {"reshard.json"} == {"config.json"}, beside
    command("merge", lines[1][1], tmp_path / "step", "--config", lines[1][-1])
    assert contents(tmp_path / "step") == contents(tmp_path / "merged")


@thorough
def test_from_megatron_to_vllm_with_the_forward_pass(tmp_path: Path) -> None:
    *_, proof = walk(megatron("llama-te-tp2", (), tmp_path, "--random"), tmp_path)
    assert "SAME" in proof


@thorough
def test_adapters(tmp_path: Path) -> None:
    paths = {name: tmp_path / name.lower() for name in ("OUT", "MERGED", "OTHER", "ALONE")}
    adapter, base = peft_adapters.made("llama", "linear"), store.checkpoint("llama")
    *_, merged, alone = walk(lines_of("adapters", ADAPTER=adapter, BASE=base, **paths), tmp_path)
    assert "SAME" in merged and "SAME" in alone


def test_a_degree(tmp_path: Path) -> None:
    walk(lines_of("degree", SOURCE=store.checkpoint("llama")), tmp_path)
    assert (tmp_path / "plan.html").is_file()


@thorough
def test_verify(tmp_path: Path) -> None:
    split(store.checkpoint("llama"), tmp_path / "out", tp=2)
    dry, exact, *_ = walk(lines_of("verify", MODEL=store.checkpoint("llama"), OUT=tmp_path / "out"), tmp_path)
    assert "original" in dry and exact.startswith("bytes: all equal")
    assert (tmp_path / "proof.html").is_file()


@pytest.mark.parametrize(
    "form",
    one_of_each(
        ["megatron", "megatron-local", "megatron-legacy", "dcp", "mistral", "torchtitan"], lambda form: form[:8]
    ),
)
def test_a_containers_own_files_are_no_side_files(form: str, tmp_path: Path) -> None:
    """Given the folder that holds the weights themselves, with a config.json and a tokenizer in it."""
    heads = {"hidden_size": 64, "head_dim": 8, "intermediate_size": 96, "vocab_size": 64}
    config = LLAMA | heads | ({"model_type": "mistral"} if form == "mistral" else {})
    base, out = write_checkpoint(tmp_path / "base", config=config), tmp_path / "out"
    sizes = {} if form == "megatron-legacy" else {"max_shard_size": 20_000}  # of which there is an index
    split(base, out, tp=1, format=form, **sizes)
    (out / "reshard.json").unlink()
    folder = out / "release" if (out / "release").is_dir() else out
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    for to in ({"tp": 2}, {"tp": 1, "format": "vllm"}, {"tp": 1, "format": "dcp"}):
        split(folder, tmp_path / "again", **to, overwrite=True)
        there = {path.name for path in (tmp_path / "again").iterdir() if path.is_file() and ".json" in path.name}
        assert there - {"params.json"} == {"config.json", "tokenizer.json", "reshard.json"}  # it describes the model
