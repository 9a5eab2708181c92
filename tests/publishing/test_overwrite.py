"""``--overwrite`` replaces a checkpoint, and nothing else: not what is read, and not what a user has put there."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.manifest import MANIFEST
from reshard.formats.notation.format_file import all_formats
from reshard.publishing.existing import Existing, ReadFile
from reshard.store.staging_names import UNFINISHED
from tests import store
from tests.marks import one_of_each
from tests.programs import oracles
from tests.support import contents, write_checkpoint

QUICK = {"huggingface", "vllm", "dcp", "meta"}
"""One form of each container, beside our own."""
MODELS = {"deepseek": "deepseek_v3", "mistral": "mixtral", "torchtitan": "qwen3_moe", "torchtitan-live": "qwen3_moe"}
FORMS = one_of_each([None, "huggingface", *all_formats()], lambda form: form if form in QUICK else None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", files=2)


def links_to(folder: Path, links: Path) -> Path:
    """A folder of links to the files of another."""
    links.mkdir()
    for file in folder.iterdir():
        (links / file.name).symlink_to(file)
    return links


# ---------------------------------------------------------------------------------------------------- the same place


def test_a_folder_of_links_into_the_output(source: Path, tmp_path: Path) -> None:
    links, before = links_to(source, tmp_path / "links"), contents(source)
    with pytest.raises(CheckpointError, match=r"is read, and lies in .*source, which would be replaced"):
        split(links, source, tp=2, overwrite=True)
    assert contents(source) == before
    assert split(links, tmp_path / "out", tp=2).complete


def test_one_file_that_is_a_link_into_the_output(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").symlink_to(source / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"copy/tokenizer\.json is read, and lies in"):
        split(copy, source, tp=2, overwrite=True)


def test_a_link_to_a_file_of_two_names_in_the_output(source: Path, tmp_path: Path) -> None:
    """The bytes would stay under the other name, but not where the link leads."""
    shutil.copytree(source, tmp_path / "second", copy_function=os.link)
    links = links_to(source, tmp_path / "links")
    with pytest.raises(CheckpointError, match="is read, and lies in"):
        split(links, source, tp=2, overwrite=True)


def test_hard_links_into_the_output_are_files_of_their_own(source: Path, tmp_path: Path) -> None:
    """Replacing the output removes one of two names."""
    copy = Path(shutil.copytree(source, tmp_path / "copy", copy_function=os.link))
    before = contents(copy)
    assert split(copy, source, tp=2, overwrite=True).complete
    assert contents(copy) == before


@pytest.mark.parametrize("out", ["", "inside", ".."])
def test_a_second_mount_of_the_same_folder(
    out: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount leads to the same folder as a link does, but no path says so."""
    (tmp_path / "in").mkdir()
    source = source.rename(tmp_path / "in" / "source")
    (tmp_path / "mount").symlink_to(source.parent if out == ".." else source)
    place = tmp_path / "mount" / ("" if out == ".." else out)
    monkeypatch.setattr(os.path, "realpath", os.path.abspath)
    monkeypatch.setattr(Path, "is_symlink", lambda _: False)
    monkeypatch.setattr(Path, "lstat", Path.stat)
    before = contents(source)
    with pytest.raises(CheckpointError, match="the same folder, or one lies in the other"):
        split(source, place, tp=2, overwrite=True)
    assert contents(source) == before


# ------------------------------------------------------------------------------------------------- a user's own files


OWN = ["thesis.txt", "mine/data", "rank-00-of-02/notes.md", "mine.safetensors", "README.md"]


@pytest.mark.parametrize(
    ("form", "own"),
    one_of_each(itertools.product([None, "huggingface", "vllm", "dcp"], OWN), lambda case: case[1]),
)
def test_a_users_own_file_is_named_and_stays(form: str | None, own: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    split(source, tmp_path / "shards", tp=2)
    origin = tmp_path / "shards" if form == "huggingface" else source
    split(origin, out, format=form)
    if form == "huggingface" and own == "README.md":  # a model's card, as far as a checkpoint of Hugging Face's says
        own = "READ.ME"
    (out / own).parent.mkdir(exist_ok=True)
    (out / own).write_text("years")
    before = contents(out)
    with pytest.raises(CheckpointError, match=f"holds '{own}', not part of the checkpoint there") as refusal:
        split(origin, out, format=form, overwrite=True)
    assert refusal.value.hint is not None and contents(out) == before
    (out / own).unlink()
    assert split(origin, out, format=form, overwrite=True).complete


def test_a_link_to_a_folder_is_a_users_own(source: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "out", tp=2)
    (tmp_path / "out" / "data").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="holds 'data', not part of"):
        split(source, tmp_path / "out", tp=2, overwrite=True)


def test_a_manifest_that_names_no_texts_names_no_files(source: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "out", tp=2)
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    manifest["side_files"][0]["name"] = ["config.json"]
    (tmp_path / "out" / MANIFEST).write_text(json.dumps(manifest))
    assert split(source, tmp_path / "out", tp=2, overwrite=True).complete  # with the same config.json


def test_a_users_own_file_in_a_rank_that_is_written_again(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    split(source, out, tp=2)
    (out / "rank-01-of-02" / "log.txt").write_text("loss 2.1")
    with pytest.raises(CheckpointError, match=r"holds 'rank-01-of-02/log.txt'"):
        split(source, out, tp=2, ranks=[1], overwrite=True)
    split(source, out, tp=2, ranks=[0], overwrite=True)
    assert (out / "rank-01-of-02" / "log.txt").read_text() == "loss 2.1"


@pytest.mark.parametrize("form", FORMS)
def test_every_file_of_every_format_may_be_overwritten(form: str | None, tmp_path: Path) -> None:
    """With its manifest and without."""
    is_metas = form in ("meta", "torchtitan-0.2")
    model = oracles.checkpoint("meta", "llama3") if is_metas else store.checkpoint(MODELS.get(form or "", "llama"))
    source = Path(shutil.copytree(model, tmp_path / "source"))
    (source / "notes.txt").write_text("the source's own, which each output has")
    split(source, tmp_path / "shards", tp=2)
    origin, out = tmp_path / "shards" if form == "huggingface" else source, tmp_path / "out"
    try:
        split(origin, out, format=form, max_shard_size=20_000)
    except PlanError:
        split(origin, out, format=form)
    assert split(origin, out, format=form, overwrite=True).complete
    (out / "reshard.json").unlink(missing_ok=True)
    assert split(origin, out, format=form, overwrite=True).complete
    (out / "reshard.json").unlink(missing_ok=True)
    (source / "notes.txt").unlink()
    if form != "huggingface":
        with pytest.raises(
            CheckpointError, match=r"holds 'notes.txt', not part"
        ):  # of another, which nobody has listed
            split(origin, out, format=form, overwrite=True)


def unknown(names: list[str], read: ReadFile) -> list[str]:
    return Existing("out", frozenset(names), read).unknown()


def test_what_the_hubs_client_puts_into_a_folder_is_known() -> None:
    config = b'{"auto_map": {"AutoModel": "modeling_mine.Mine"}}'
    names = [
        ".gitattributes", ".cache/huggingface/download/config.json.metadata", "config.json", "generation_config.json",
        "model-00001-of-00002.safetensors", "tokenizer.model", "modeling_mine.py", "LICENSE", "README.md",
        "additional_chat_templates/tool_use.jinja", "special_tokens_map.json", "original-weights.safetensors",
    ]  # fmt: skip
    index = b'{"weight_map": {"a": "original-weights.safetensors"}}'
    files = {"config.json": config, "model.safetensors.index.json": index}
    assert unknown(names, files.get) == []
    assert unknown([*names, "train.py", ".git/HEAD"], files.get) == [".git/HEAD", "train.py"]


def test_an_unfinished_place_may_hold_files_of_several_outputs() -> None:
    manifest = b'{"format": "reshard", "ranks": [], "side_files": []}'
    names = ["reshard.json", "model-rank-0-part-0.safetensors", "tokenizer.json", "thesis.txt"]
    assert unknown(names, {"reshard.json": manifest}.get) == sorted(names[1:])
    assert unknown([*names, UNFINISHED], {"reshard.json": manifest}.get) == ["thesis.txt"]


def test_a_merge_over_another_checkpoint(source: Path, tmp_path: Path) -> None:
    split(source, tmp_path / "shards", tp=2)
    (source / "mine").mkdir()
    (source / "mine" / "data").write_text("years")
    before = contents(source)
    with pytest.raises(CheckpointError, match="holds 'mine/data'"):
        merge(tmp_path / "shards", source, overwrite=True)
    assert contents(source) == before


def test_one_rank_does_not_replace_a_full_checkpoint(source: Path, tmp_path: Path) -> None:
    """Its folder would lie beside the old weights."""
    out = Path(shutil.copytree(source, tmp_path / "out"))
    before = contents(out)
    with pytest.raises(CheckpointError, match="a checkpoint that is not in folders of ranks"):
        split(source, out, tp=2, ranks=[0], overwrite=True)
    assert contents(out) == before
    assert split(source, out, tp=2, overwrite=True).complete
    assert split(source, out, tp=2, ranks=[0], overwrite=True).complete  # over itself


def test_one_rank_does_not_go_beside_another_programs_files(source: Path, tmp_path: Path) -> None:
    """Their manifest has the same source and the same mesh."""
    split(source, tmp_path / "out", tp=2, format="sglang")
    before = contents(tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds shards in the format 'sglang'"):
        split(source, tmp_path / "out", tp=2, ranks=[0], overwrite=True)
    assert contents(tmp_path / "out") == before
