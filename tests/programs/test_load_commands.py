"""The command that loads a folder says its degrees, wherever it is printed: with others, programs answer garbage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from reshard.formats.mesh import mesh_of
from reshard.formats.notation.format_file import all_formats, format_of
from tests import store
from tests.support import command, ok, write_checkpoint

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "formats.md"
OPTIONS = {
    "vllm": ["--tensor-parallel-size 2"],
    "sglang": ["--tp 2"],
    "meta": ["--nproc-per-node 2"],
    "megatron-legacy": ["--tensor-model-parallel-size 2"],
    "transformers": ["tp_size=2"],
}


@pytest.mark.parametrize("form", OPTIONS)
def test_split_and_inspect_print_it(form: str, tmp_path: Path) -> None:
    config = json.loads((store.checkpoint("llama") / "config.json").read_text())
    whole = {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 40}
    model = write_checkpoint(tmp_path / "model", config={**config, **whole}, dtype="BF16")
    found = ok("split", model, tmp_path / "out", "--tp", "2", "--as", form)
    (line,) = [line for line in found.stdout.splitlines() if line.startswith("Load it: ")]
    for option in OPTIONS[form]:
        assert re.search(rf"{re.escape(option)}(?![0-9])", line), line
    assert str(tmp_path / "out") in line
    for manifest in (True, False):
        if not manifest:
            (tmp_path / "out" / "reshard.json").unlink()
        shown = command("inspect", tmp_path / "out", "--json")
        of_mesh = manifest or not format_of(form).container.chunks
        assert (line.removeprefix("Load it: ") == json.loads(shown.stdout)["load"]) or not of_mesh, shown
    assert "load it" in command("inspect", tmp_path / "out").stdout


@pytest.mark.parametrize(("form", "place"), [("vllm", "'my model'"), ("dcp", '"my model"')])
def test_a_name_with_a_space_is_quoted(form: str, place: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    found = command("split", model, "my model", "--tp", "2", "--as", form, cwd=tmp_path)
    assert place in found.stdout.splitlines()[-1], found


def test_what_is_not_loaded_by_another_program_has_none(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model")
    assert "Load it" not in ok("split", model, tmp_path / "out", "--tp", "2").stdout
    assert json.loads(command("inspect", tmp_path / "out", "--json").stdout)["load"] is None
    assert "Load it" not in ok("split", model, tmp_path / "rank", "--tp", "2", "--as", "vllm", "--rank", "0").stdout
    assert (
        "--tensor-parallel-size 2"
        in ok("split", model, tmp_path / "rank", "--tp", "2", "--as", "vllm", "--rank", "1").stdout
    )


@pytest.mark.parametrize(
    ("form", "mesh", "options"),
    [
        ("vllm", {"tp": 2, "pp": 4}, "--tensor-parallel-size 2 --pipeline-parallel-size 4"),
        ("vllm", {"tp": 4, "ep": 4, "same_ranks": True}, "--tensor-parallel-size 4 --enable-expert-parallel"),
        ("vllm-0.23", {"tp": 8}, "--tensor-parallel-size 8"),
        ("deepseek", {"tp": 8, "ep": 8, "same_ranks": True}, "--nproc-per-node 8"),
        (
            "megatron-legacy",
            {"tp": 2, "ep": 4, "pp": 3},
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --expert-model-parallel-size 4 "
            "--expert-tensor-parallel-size 2",
        ),
        (
            "megatron-legacy-sequential",
            {"tp": 2, "ep": 2, "same_ranks": True},
            "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
        ),
    ],
)
def test_it_has_every_degree(form: str, mesh: dict[str, int], options: str) -> None:
    assert options in format_of(form).loading.command_of("OUT", mesh_of(**mesh))


@pytest.mark.parametrize("form", all_formats())
def test_a_format_says_its_degree_if_its_files_are_of_ranks(form: str) -> None:
    format = format_of(form)
    has_degree = any(word in format.loading.command for word in ("{tp}", "{ranks}"))
    assert (
        has_degree or format.container.chunks or form == "mistral"
    )  # any mesh loads boxes; Mistral's form is of one rank
    text = DOCS.read_text()
    section = re.search(rf"\n## {re.escape(form)}\n(.*?)(?=\n## |\Z)", text, re.DOTALL)
    if section is not None and not form.startswith("vllm-"):
        assert "| command" in section[1], form
