"""``reshard inspect`` of what is in another program's format: which format, by whom, which mesh, what is missing."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from reshard.api import inspect, split
from reshard.formats.errors import ReshardError
from reshard.source.opening import open_source
from tests.programs.oracles import checkpoint
from tests.support import LLAMA, change_json, changed_json, command, refused, write_checkpoint


def said(folder: Path) -> tuple[int, dict[str, Any]]:
    done = command("inspect", folder, "--json")
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks of vLLM, each in several files."""
    folder = tmp_path_factory.mktemp("inspect") / "out"
    split(checkpoint("vllm", "llama"), folder, tp=2, format="vllm", max_shard_size=30_000)
    return folder


@pytest.fixture
def shards(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "out"))


def test_what_reshard_wrote(shards: Path) -> None:
    code, found = said(shards)
    assert code == 0 and found["complete"] and not found["problems"]
    assert (found["kind"], found["format"], found["written_by_reshard"]) == ("split checkpoint", "vllm", True)
    assert "vLLM" in found["loaded_by"]
    assert found["mesh"] == {"tp": 2} and found["ranks_present"] == [0, 1]
    files = [*shards.glob("*.safetensors")]
    assert found["files"] == len(files) > 2 and found["bytes"] == sum(file.stat().st_size for file in files)
    assert found["padding"]["vocab"]["padded"] % 64 == 0
    text = command("inspect", shards).stdout
    for line in ("format      vllm", "loaded by   vLLM", "written by  reshard", "mesh        tp 2", "complete    yes"):
        assert line in text


def test_what_the_program_wrote_itself(shards: Path) -> None:
    _, before = said(shards)
    (shards / "reshard.json").unlink()
    code, found = said(shards)
    assert code == 0 and found["written_by_reshard"] is False
    for key in ("format", "mesh", "dtypes", "parameters", "tensors", "files", "bytes"):
        assert found[key] == before[key]
    assert "written by  not known (there is no reshard.json)" in command("inspect", shards).stdout


def test_experts_on_ranks_of_their_own(tmp_path: Path) -> None:
    split(checkpoint("vllm", "qwen3_moe"), tmp_path / "out", tp=2, ep=2, same_ranks=True, format="vllm")
    _, before = said(tmp_path / "out")
    (tmp_path / "out" / "reshard.json").unlink()
    _, found = said(tmp_path / "out")
    assert found["mesh"] == before["mesh"] and found["complete"]


def test_stages(tmp_path: Path) -> None:
    split(checkpoint("vllm", "llama"), tmp_path / "out", tp=2, pp=2, format="vllm")
    _, before = said(tmp_path / "out")
    assert before["complete"] and before["mesh"]["pp"] == 2
    (tmp_path / "out" / "reshard.json").unlink()
    code, found = said(tmp_path / "out")
    assert code == 0 and found["mesh"] == before["mesh"]
    for file in (tmp_path / "out").glob("model-pp-1-tp-0-*"):
        file.unlink()
    code, found = said(tmp_path / "out")
    assert code == 1 and found["ranks_missing"] == [2]


def test_deepseek(tmp_path: Path) -> None:
    split(checkpoint("deepseek", "deepseek_v3"), tmp_path / "out", tp=2, format="deepseek")
    code, found = said(tmp_path / "out")
    assert (code, found["format"], found["complete"]) == (0, "deepseek", True)
    (tmp_path / "out" / "reshard.json").unlink()
    (tmp_path / "out" / "model1-mp2.safetensors").unlink()
    code, found = said(tmp_path / "out")
    assert (code, found["ranks_missing"], found["problems"]) == (1, [1], ["rank 1 of tp 2 is missing"])


@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_missing_rank(shards: Path, has_manifest: bool) -> None:
    for file in shards.glob("model-rank-0-*"):
        file.unlink()
    if not has_manifest:
        (shards / "reshard.json").unlink()
    code, found = said(shards)
    assert code == 1 and not found["complete"]
    assert (found["ranks_missing"], found["ranks_present"]) == ([0], [1])
    assert found["problems"] == ["rank 0 of tp 2 is missing"]


def test_a_manifest_that_does_not_list_all_ranks(shards: Path) -> None:
    with changed_json(shards / "reshard.json") as manifest:
        for file in manifest["ranks"].pop()["files"]:
            (shards / file["name"]).unlink()
    code, found = said(shards)
    assert code == 1 and found["ranks_missing"] == [1]
    assert "the files of rank 1 of 2 are missing" in refused("merge", shards, shards.parent / "merged")


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_missing_part(shards: Path, has_manifest: bool, last: bool) -> None:
    parts = sorted(shards.glob("model-rank-1-*"), key=lambda file: int(file.stem.rpartition("-")[2]))
    gone = parts[-1 if last else 1]
    gone.unlink()
    if not has_manifest:
        (shards / "reshard.json").unlink()
    code, found = said(shards)
    assert code == 1 and not found["complete"] and found["ranks_missing"] == []
    if has_manifest:
        assert gone.name in found["problems"][0] and "missing" in found["problems"][0]
    else:
        assert "is missing in the files of rank 1" in found["problems"][0]


def test_a_damaged_manifest(shards: Path) -> None:
    (shards / "reshard.json").write_text("{")
    code, found = said(shards)
    assert code == 1 and "vllm" in found["format"] and "reshard.json" in found["problems"][0]


def test_the_format_whose_names_fit_is_told(tmp_path: Path) -> None:
    """Of two formats with the same names of files: where a layer is too many, the other one would miss names."""
    source = write_checkpoint(tmp_path / "source", config=LLAMA | {"num_hidden_layers": 2})
    for form in ("vllm", "sglang"):
        out = tmp_path / form
        split(source, out, tp=2, format=form)
        (out / "reshard.json").unlink()
        change_json(out / "config.json", num_hidden_layers=1)
        (problem,) = said(out)[1]["problems"]
        assert "layer 1 is out of range, config.json says 1" in problem


@pytest.mark.parametrize("form", [None, "vllm", "megatron-legacy"])
@pytest.mark.parametrize("has_manifest", [True, False])
def test_what_is_called_complete_can_be_opened_and_nothing_else(
    form: str | None, has_manifest: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    split(checkpoint("megatron", "llama"), out, tp=2, format=form)
    if not has_manifest:
        (out / "reshard.json").unlink()
    for file in sorted(path for path in out.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for left in (None, content[: len(content) // 2]):
            file.unlink(missing_ok=True)
            if left is not None:
                file.write_bytes(left)
            try:
                open_source(out)
            except ReshardError as refusal:
                with suppress(ReshardError):  # no checkpoint at all
                    report = inspect(out)
                    assert not report.complete or report.refused, (file, refusal)
            else:
                assert inspect(out).complete, file
        file.write_bytes(content)
