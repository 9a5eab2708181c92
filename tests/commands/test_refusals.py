"""Shards that do not belong together, sources that contradict themselves: each refused with one line that names the
place.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from reshard.api import load, merge, plan, split
from reshard.formats.errors import CheckpointError, MismatchError, PlanError, ReshardError
from reshard.formats.files.safetensors import build_header, read_header
from reshard.mesh.degrees import valid_degrees
from reshard.source.opening import open_source
from tests.support import (
    LLAMA,
    change_tensor,
    changed_json,
    contents,
    llama_tensors,
    write_checkpoint,
    write_file,
    write_folder,
)


@pytest.fixture
def source(tmp_path):
    return write_checkpoint(tmp_path / "source")


@pytest.fixture
def shards(source, tmp_path):
    split(source, tmp_path / "shards", tp=8)
    return tmp_path / "shards"


@contextmanager
def refused(error: type[ReshardError], *words: str) -> Iterator[None]:
    """Expects an error of one line with all the words in it."""
    with pytest.raises(error) as caught:
        yield
    message = caught.value.message
    assert "\n" not in message and all(word in message for word in words), message


def rewrite(path, change):
    """Change the text of a small file."""
    path.write_text(change(path.read_text()))


def test_a_missing_rank(shards, tmp_path):
    shutil.rmtree(shards / "rank-03-of-08")
    with refused(CheckpointError, "rank-03-of-08", "missing"):
        merge(shards, tmp_path / "out")
    (shards / "reshard.json").unlink()
    with refused(CheckpointError, "rank-03-of-08", "rank 3 of 8", "missing"):
        merge(shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_lists_no_weights_of_a_rank(shards, tmp_path):
    with changed_json(shards / "reshard.json") as document:
        document["ranks"][3]["files"] = [f for f in document["ranks"][3]["files"] if f["name"].endswith("config.json")]
    with refused(CheckpointError, "the files of rank 3 of 8 are missing"):
        merge(shards, tmp_path / "out")


def test_a_missing_file(shards, tmp_path):
    (shards / "rank-03-of-08/config.json").unlink()
    with refused(CheckpointError, "rank-03-of-08/config.json", "missing"):
        merge(shards, tmp_path / "out")


def test_a_truncated_shard(shards, tmp_path):
    file = shards / "rank-03-of-08/model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 5)
    with refused(CheckpointError, "rank-03-of-08/model.safetensors", "bytes"):
        merge(shards, tmp_path / "out")


@pytest.mark.parametrize("manifest", [True, False])
def test_shards_of_another_source(shards, tmp_path, manifest):
    other = write_checkpoint(tmp_path / "other", seed=1)
    split(other, tmp_path / "theirs", tp=8)
    shutil.copy(tmp_path / "theirs/rank-03-of-08/model.safetensors", shards / "rank-03-of-08/model.safetensors")
    if not manifest:
        (shards / "reshard.json").unlink()
    with refused(MismatchError, "rank-03-of-08/model.safetensors", "different sources"):
        merge(shards, tmp_path / "out")


@pytest.mark.parametrize("manifest", [True, False])
def test_shards_of_another_mesh(source, shards, tmp_path, manifest):
    split(source, tmp_path / "four", tp=4)
    shutil.copy(tmp_path / "four/rank-03-of-04/model.safetensors", shards / "rank-03-of-08/model.safetensors")
    if not manifest:
        (shards / "reshard.json").unlink()
    with refused((MismatchError, CheckpointError), "rank-03-of-08/model.safetensors"):
        merge(shards, tmp_path / "out")


@pytest.mark.parametrize("manifest", [True, False])
def test_one_rank_in_the_place_of_another(shards, tmp_path, manifest):
    shutil.copy(shards / "rank-02-of-08/model.safetensors", shards / "rank-03-of-08/model.safetensors")
    if not manifest:
        (shards / "reshard.json").unlink()
    with refused(MismatchError, "rank-03-of-08", "is a shard of"):
        merge(shards, tmp_path / "out")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_replicas_that_differ(shards, tmp_path, name):
    """KV heads are on two ranks each here, norms on all."""
    change_tensor(shards / "rank-05-of-08/model.safetensors", name, at=3)
    (shards / "reshard.json").unlink()
    with refused(MismatchError, name, "rank-05-of-08", "differs"):
        merge(shards, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("command", ["merge", "split", "rank"])
def test_a_checksum_that_does_not_match(shards, tmp_path, command):
    change_tensor(shards / "rank-05-of-08/model.safetensors", "model.layers.1.mlp.down_proj.weight")
    with refused(MismatchError, "rank-05-of-08/model.safetensors", "checksum"):
        if command == "merge":
            merge(shards, tmp_path / "out")
        else:
            split(shards, tmp_path / "out", tp=4, ranks=[2] if command == "rank" else None)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_padding_that_is_not_zero(shards, tmp_path):
    change_tensor(shards / "rank-07-of-08/model.safetensors", "lm_head.weight", at=199)
    (shards / "reshard.json").unlink()
    with refused(MismatchError, "rank-07-of-08/model.safetensors", "padding of tensor 'lm_head.weight'"):
        merge(shards, tmp_path / "out")


def test_a_tensor_that_one_rank_lacks(shards, tmp_path):
    path = shards / "rank-03-of-08/model.safetensors"
    header = read_header(path)
    kept = [t for t in header.tensors.values() if t.name != "model.norm.weight"]
    data = path.read_bytes()
    body = b"".join(data[t.offset : t.offset + t.nbytes] for t in kept)
    path.write_bytes(build_header([(t.name, t.dtype, t.shape) for t in kept], header.metadata) + body)
    (shards / "reshard.json").unlink()
    with refused(MismatchError, "model.norm.weight", "missing in the files of rank 3"):
        merge(shards, tmp_path / "out")


def test_a_file_that_was_not_written_by_split(shards, tmp_path):
    write_file(shards / "rank-03-of-08/model.safetensors", [("a", "F32", (2,))])
    (shards / "reshard.json").unlink()
    with refused(CheckpointError, "rank-03-of-08/model.safetensors", "does not say which rank"):
        merge(shards, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: "{", ("reshard.json", "not valid JSON")),
        (lambda text: "[]", ("reshard.json", "should be a JSON object and is []")),
        (lambda text: text.replace('"version": 1', '"version": 99'), ("reshard.json", "version 99")),
        (lambda text: text.replace('"tp": 8', '"tp": -1'), ("reshard.json", "not a mesh dimension")),
        (
            lambda text: text.replace('"rank-03-of-08/model.safetensors"', '"../other/model.safetensors"'),
            ("points outside",),
        ),
        (lambda text: text.replace('"name": "model.safetensors"', '"name": "/etc/passwd"'), ("points outside",)),
    ],
)
def test_a_manifest_that_cannot_be_trusted(shards, tmp_path, change, words):
    rewrite(shards / "reshard.json", change)
    with refused(CheckpointError, *words):
        merge(shards, tmp_path / "out")


def test_merge_of_a_full_checkpoint(source, tmp_path):
    with refused(CheckpointError, "full checkpoint"):
        merge(source, tmp_path / "out")


def test_a_config_that_contradicts_the_shapes(source, tmp_path):
    rewrite(source / "config.json", lambda text: text.replace('"num_key_value_heads": 4', '"num_key_value_heads": 2'))
    with refused(PlanError, "k_proj.weight", "[24, 20]", "[12, 20]", "(kv head) hidden"):
        split(source, tmp_path / "out", tp=2)


def test_a_config_whose_numbers_do_not_divide(source, tmp_path):
    rewrite(source / "config.json", lambda text: text.replace('"num_key_value_heads": 4', '"num_key_value_heads": 3'))
    with refused(PlanError, "8 / 3 is not a whole number"):
        split(source, tmp_path / "out", tp=2)


def test_a_layer_beyond_the_last(tmp_path):
    source = write_folder(tmp_path / "source", LLAMA | {"num_hidden_layers": 2}, llama_tensors())
    with refused(PlanError, "model.layers.2", "layer 2 is out of range", "2"):
        split(source, tmp_path / "out", tp=2)


def test_a_tensor_without_a_rule(tmp_path):
    source = write_folder(tmp_path / "source", LLAMA, [*llama_tensors(), ("model.extra.weight", "F32", (3, 5))])
    with pytest.raises(PlanError) as error:
        split(source, tmp_path / "out", tp=2)
    assert "model.safetensors: tensor 'model.extra.weight' (F32, 3x5) has no rule" in error.value.message
    assert "plan_file=FILE" in str(error.value.hint) and "3 5" not in str(error.value.hint)
    write_file(source / "model.safetensors", [*llama_tensors(), ("model.extra.weight", "F32", (0, 5))])
    with pytest.raises(PlanError) as error:
        split(source, tmp_path / "out", tp=2)
    assert '"model.extra.weight" = "..."' in str(error.value.hint)  # no expression has a dimension of 0


@pytest.mark.parametrize(
    ("tp", "words"),
    [(3, ("8 attention heads do not divide by 3",)), (16, ("do not divide by 16",)), (0, ("at least 1",))],
)
def test_degrees_that_are_not_possible(source, tmp_path, tp, words):
    with refused(PlanError, f"tp={tp} is not possible", *words):
        split(source, tmp_path / "out", tp=tp)
    assert valid_degrees(plan(source).model) == [1, 2, 4, 8]


def test_a_diagonal_is_refused(tmp_path):
    """One mesh dimension over two dimensions of a tensor would leave most of it with nobody."""
    source = write_folder(tmp_path / "source", {}, [("a", "F32", (4, 4)), ("b", "F32", (4,))])
    path = tmp_path / "plan.toml"
    path.write_text('[parallel]\ntp = [["ff"]]\n[tensors]\na = "ff ff"\nb = "ff"\n')
    with refused(PlanError, "tensor 'a'", "in more than one place"):
        split(source, tmp_path / "out", tp=2, plan_file=path)


def test_load_of_a_rank_that_is_not_there(source):
    with refused(PlanError, "rank=9"):
        load(source, tp=4, rank=9)


def test_nothing_is_changed_by_a_refusal(source, shards, tmp_path):
    before = contents(source), contents(shards)
    for call in (lambda: split(source, tmp_path / "out", tp=3), lambda: merge(source, tmp_path / "out")):
        with pytest.raises(ReshardError):
            call()
    assert (contents(source), contents(shards)) == before
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("names", ["published", "modules"])
def test_names_of_a_plan_without_a_format(names, source):
    with refused(PlanError, "names is not possible", "a plan of ranks has the model's names"):
        plan(source, tp=2, names=names)


def test_an_index_that_changes_after_it_was_read(shards, tmp_path):
    """It is read again where its content is written."""
    merge(shards, tmp_path / "merged", max_shard_size="3KB")
    opened = open_source(tmp_path / "merged")
    rewrite(tmp_path / "merged" / "model.safetensors.index.json", lambda text: text + " ")
    with refused(MismatchError, "model.safetensors.index.json", "was changed"):
        opened.check_unchanged()
