"""A tied table that a trainer saved under both names is one tensor: compared, written once, and no extra one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from reshard import verify
from reshard.api import diff, load, merge, patch, split
from reshard.formats.errors import ReshardError
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.marks import one_of_each
from tests.support import LLAMA, change_tensor, contents, form_of, write_file, write_tied_twice

CONFIG = LLAMA | {
    "hidden_size": 64, "intermediate_size": 32, "vocab_size": 36, "num_hidden_layers": 1, "head_dim": 8,
    "dtype": "bfloat16",
}  # fmt: skip
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def both(tmp_path: Path) -> Path:
    return write_tied_twice(tmp_path / "both", CONFIG)


@pytest.fixture
def once(both: Path, tmp_path: Path) -> Path:
    """The same checkpoint as transformers saves it."""
    tensors = load_file(both / "model.safetensors")
    del tensors[HEAD]
    return in_safetensors(tmp_path / "once", tensors, both)


def in_safetensors(folder: Path, tensors: dict[str, torch.Tensor], model: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    write_file(folder / "model.safetensors", [(name, "BF16", tuple(t.shape)) for name, t in tensors.items()])
    data = (folder / "model.safetensors").read_bytes()
    size = sum(t.nbytes for t in tensors.values())
    content = b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors.values())
    (folder / "model.safetensors").write_bytes(data[:-size] + content)
    return folder


def in_dcp(folder: Path, model: Path) -> Path:
    """As FSDP2 saves it."""
    dcp.save(load_file(model / "model.safetensors"), checkpoint_id=folder, no_dist=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


def names(folder: Path) -> set[str]:
    return {name for tensors in open_source(folder).ranks for name in tensors}


FORMS = [(form, 2) for form in (None, "vllm", "megatron", "dcp", "dcp modules", "torchtitan")] + [
    (None, 1),
    ("vllm", 4),
]


@pytest.mark.parametrize(
    ("is_dcp", "form", "tp"),
    one_of_each([(is_dcp, *form) for is_dcp in (False, True) for form in FORMS],
                lambda case: case[0] or (case[1] in (None, "vllm") and case[1])),
)  # fmt: skip
def test_every_format_has_it_as_often_as_it_stores_it(
    is_dcp: bool, form: str | None, tp: int, both: Path, once: Path, tmp_path: Path
) -> None:
    source, chosen = in_dcp(tmp_path / "dcp", both) if is_dcp else both, form_of(form)
    split(source, tmp_path / "out", tp=tp, **chosen)
    split(once, tmp_path / "direct", tp=tp, **chosen)
    kept = {HEAD} if form == "dcp" else set()  # it has the names of what was saved
    assert names(tmp_path / "out") == names(tmp_path / "direct") | kept
    report = verify_exact(open_source(both), tmp_path / "out")
    assert report.verdict == "same" and not report.extra
    report = verify_exact(open_source(once), tmp_path / "out")
    assert not report.extra and not report.missing
    assert diff(once, tmp_path / "out").same and diff(tmp_path / "out", both).same
    merge(tmp_path / "out", tmp_path / "merged")
    merged = contents(tmp_path / "merged")["model.safetensors"]
    assert (merged == (both / "model.safetensors").read_bytes()) == (source == both), "the original's file again"
    assert (HEAD in load_file(tmp_path / "merged/model.safetensors")) == (source == both)
    assert {verify_exact(open_source(of), tmp_path / "merged").verdict for of in (once, both)} == {"same"}
    assert HEAD not in load(tmp_path / "out", rank=0)


@pytest.mark.parametrize("run", [
    lambda source, out: split(source, out, tp=2),
    lambda source, out: split(source, out, tp=2, format="vllm"),
    lambda source, out: split(source, out, tp=2, format="dcp"),
    lambda source, out: load(source, tp=2, rank=1),
    lambda source, out: diff(source, source),
])  # fmt: skip
@pytest.mark.parametrize("is_dcp", [False, True])
def test_copies_that_differ_are_named_and_refused(
    run: Callable[[Path, Path], object], is_dcp: bool, both: Path, tmp_path: Path
) -> None:
    change_tensor(both / "model.safetensors", HEAD, at=4607)
    source = in_dcp(tmp_path / "dcp", both) if is_dcp else both
    with pytest.raises(ReshardError, match=f"'{HEAD}' in .* should be '{TABLE}' once more") as error:
        run(source, tmp_path / "out")
    assert error.value.hint is not None and '"tie_word_embeddings": false' in error.value.hint
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_verify_compares_the_copies_in_the_original_and_in_the_shards(both: Path, once: Path, tmp_path: Path) -> None:
    split(both, tmp_path / "out", tp=2)
    merge(tmp_path / "out", tmp_path / "merged")
    change_tensor(tmp_path / "merged/model.safetensors", HEAD)
    report = verify_exact(open_source(once), tmp_path / "merged")
    assert report.verdict == "different" and report.first is not None and report.first.stored == HEAD
    split(once, tmp_path / "direct", tp=2)
    (tmp_path / "direct/reshard.json").unlink()
    change_tensor(both / "model.safetensors", HEAD)
    report = verify_exact(open_source(both), tmp_path / "direct")
    assert report.verdict == "different" and report.first is not None
    assert report.first.stored == HEAD and report.first.file == str(both / "model.safetensors")


def test_a_delta_gives_the_files_again(both: Path, once: Path, tmp_path: Path) -> None:
    for number, (base, other) in enumerate([(once, both), (both, once), (both, both)]):
        delta, out = tmp_path / f"delta{number}", tmp_path / f"out{number}"
        assert diff(base, other, out=delta).same
        patch(base, delta=delta, out=out)
        assert contents(out) == contents(other)


@pytest.mark.parametrize(("settings", "is_one"), [
    ({"tie_word_embeddings": False}, False),
    ({"tie_word_embeddings": None}, False),  # llama's default
    ({"tie_word_embeddings": None, "model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, True),
    ({"tie_word_embeddings": False, "model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, False),
])  # fmt: skip
def test_config_json_or_the_model_type_says_that_it_is_tied(settings: dict, is_one: bool, both: Path) -> None:
    config = {key: value for key, value in (CONFIG | settings).items() if value is not None}
    (both / "config.json").write_text(json.dumps(config))
    source = open_source(both)
    assert (HEAD in source.names) is not is_one and dict(source.twice) == ({HEAD: TABLE} if is_one else {})


def without_ties(file: Path) -> dict[str, Any]:
    """A config.json without a word on ties, and without one on those of the model within."""
    config = json.loads(file.read_text())
    config |= {"text_config": {key: value for key, value in config["text_config"].items() if "tie_word" not in key}}
    config = {key: value for key, value in config.items() if "tie_word" not in key}
    file.write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(("model", "is_own"), [("mistral3", True), ("gemma3", False)])
def test_the_language_model_within_says_whether_it_is_tied(model: str, is_own: bool, tmp_path: Path) -> None:
    """By the default of its type, where config.json says nothing: Mistral Small 3.2 has a head of its own."""
    shutil.copytree(store.checkpoint(model), tmp_path / "model")
    without_ties(tmp_path / "model/config.json")
    tensors = load_file(tmp_path / "model/model.safetensors")
    table, head = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    for is_copy in (True, False):
        tensors[head] = tensors[table].clone() if is_copy else tensors[table] + 1
        save_file(tensors, tmp_path / "model/model.safetensors")
        if not is_own and not is_copy:
            with pytest.raises(ReshardError, match="once more"):
                split(tmp_path / "model", tmp_path / "out", tp=1)
        else:
            assert dict(open_source(tmp_path / "model").twice) == ({head: table} if is_copy else {})


def test_a_head_of_another_shape_is_one_of_its_own(both: Path, tmp_path: Path) -> None:
    tensors = load_file(both / "model.safetensors")
    tensors[HEAD] = tensors[HEAD].float()
    folder = in_safetensors(tmp_path / "wide", {name: t for name, t in tensors.items() if name != HEAD}, both)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    write_file(folder / "model-00002-of-00002.safetensors", [(HEAD, "F32", tuple(tensors[HEAD].shape))])
    index = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {HEAD: "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert HEAD in open_source(folder).names


@pytest.mark.parametrize("form", [None, "vllm", "dcp"])
def test_both_are_cast(both: Path, tmp_path: Path, form: str | None) -> None:
    mesh = {} if form == "dcp" else {"tp": 2}
    shards = tmp_path / "shards"
    split(both, shards, format=form, dtype="fp32", **mesh)
    merge(shards, tmp_path / "merged")
    assert verify(both, shards, exact_only=True, dtype="fp32", quiet=True).verdict == "same"
    merged, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", both))
    assert merged.keys() == original.keys()
    assert all(torch.equal(t.nan_to_num(), original[name].float().nan_to_num()) for name, t in merged.items())


def test_a_head_of_its_own_is_moved_to_vllm_and_runs(tmp_path: Path) -> None:
    """Of Mistral 3, whose config.json says nothing of ties, as transformers 4 saved it."""
    shutil.copytree(store.checkpoint("mistral3"), tmp_path / "model")
    config = without_ties(tmp_path / "model/config.json")
    tensors = load_file(tmp_path / "model/model.safetensors")
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model/model.safetensors", {"format": "pt"})
    split(tmp_path / "model", tmp_path / "vllm", tp=2, format="vllm")
    rank = load_file(tmp_path / "vllm" / "model-rank-1-part-0.safetensors")
    head, table = (rank[f"language_model.{name}.weight"] for name in ("lm_head", "model.embed_tokens"))
    assert not torch.equal(head, table) and "tie_word_embeddings" not in config
    assert verify(tmp_path / "model", tmp_path / "vllm", quiet=True).verdict == "same"


@pytest.mark.parametrize(("model", "name"), [("lfm2_vl", "lfm2-vl"), ("evolla", "EvollaModel")])
def test_a_type_is_known_by_the_name_of_its_first_publication(model: str, name: str, tmp_path: Path) -> None:
    shutil.copytree(store.checkpoint(model), tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": name}))
    split(tmp_path / "model", tmp_path / "shards", tp=2)
    split(store.checkpoint(model), tmp_path / "same", tp=2)
    ours, theirs = (load_file(tmp_path / each / "rank-00-of-02/model.safetensors") for each in ("shards", "same"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
