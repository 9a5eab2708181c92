"""Pipeline parallelism: which stage has which layers, what stands before and behind them; split, merge, re-split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import load, merge, plan, split
from reshard.formats.errors import PlanError
from reshard.formats.files.safetensors import read_header
from reshard.formats.mesh import mesh_of
from reshard.mesh.plan import Plan, make_plan
from reshard.mesh.stages import even_stages, is_layered, layers_at
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import remote, store
from tests.marks import one_of_each
from tests.support import LLAMA, command, contents, llama_tensors, without_manifest, write_checkpoint, write_file

FIVE = {**LLAMA, "num_hidden_layers": 5}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A small Llama of 5 layers in two files."""
    return write_checkpoint(tmp_path / "model", files=2, config=FIVE)


def names_on(out: Path, folder: str) -> set[str]:
    return {name for file in (out / folder).glob("*.safetensors") for name in read_header(file).tensors}


def layers_on(out: Path, folder: str) -> list[int]:
    return sorted({int(name.split(".")[2]) for name in names_on(out, folder) if ".layers." in name})


# ------------------------------------------------------------------------------------------------------------ stages


@given(st.integers(1, 200), st.integers(1, 200))
def test_stages_cover_all_layers_and_differ_by_one_at_most(layers: int, degree: int) -> None:
    stages = even_stages(layers, degree)
    assert len(stages) == degree and sum(stages) == layers
    assert max(stages) - min(stages) <= 1
    assert stages[-1] == min(stages), "the last stage has the norm and the head, too"


def test_layers_left_over_are_dealt_as_vllm_deals_them() -> None:
    assert even_stages(8, 4) == (2, 2, 2, 2)
    assert even_stages(3, 2) == (2, 1)
    assert even_stages(33, 4) == (8, 8, 9, 8)
    assert even_stages(10, 4) == (2, 3, 3, 2)
    assert even_stages(11, 4) == (3, 3, 3, 2)


def test_a_stage_has_consecutive_layers_and_the_ends_what_stands_there(llama: Path, tmp_path: Path) -> None:
    split(llama, tmp_path / "out", pp=2)
    first, last = names_on(tmp_path / "out", "rank-00-of-02"), names_on(tmp_path / "out", "rank-01-of-02")
    assert layers_on(tmp_path / "out", "rank-00-of-02") == [0, 1, 2]
    assert layers_on(tmp_path / "out", "rank-01-of-02") == [3, 4], "under their own numbers"
    assert {name for name in first if ".layers." not in name} == {"model.embed_tokens.weight"}
    assert {name for name in last if ".layers." not in name} == {"model.norm.weight", "lm_head.weight"}


def test_the_manifest_and_each_header_say_which_layers_a_stage_has(llama: Path, tmp_path: Path) -> None:
    split(llama, tmp_path / "out", tp=2, pp=2)
    mesh = {"pp": 2, "tp": 2, "stages": [3, 2]}
    assert json.loads((tmp_path / "out" / "reshard.json").read_text())["mesh"] == mesh
    header = read_header(tmp_path / "out" / "pp-01-of-02-tp-00-of-02" / "model.safetensors")
    assert json.loads(header.metadata["reshard"])["mesh"] == mesh
    config = json.loads((tmp_path / "out" / "pp-01-of-02-tp-00-of-02" / "config.json").read_text())
    assert config["num_hidden_layers"] == 5 and config["num_attention_heads"] == 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_on_the_first_stage_and_on_the_last(tmp_path: Path, tied: bool) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}
    model = write_checkpoint(tmp_path / "model", config=config)
    if tied:
        write_file(model / "model.safetensors", [tensor for tensor in llama_tensors() if tensor[0] != "lm_head.weight"])
    found = plan(model, pp=3)
    table = found.layouts["model.embed_tokens.weight"]
    assert sorted(table.boxes) == ([0, 2] if tied else [0])
    split(model, tmp_path / "out", pp=3)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(model)


# ------------------------------------------------------------------------------------------------------------- bytes

MESHES = one_of_each(
    [
        {"pp": 2},
        {"pp": 5},
        {"pp": 2, "tp": 2},
        {"pp": 3, "tp": 4, "pp_layers": (1, 3, 1)},
        {"pp": 3, "pp_layers": (1, 1, 3)},
    ],
    len,
)


@pytest.mark.parametrize("mesh", MESHES)
def test_without_the_manifest_all_tensors_are_restored(tmp_path: Path, mesh: dict) -> None:
    model = write_checkpoint(tmp_path / "model", config=FIVE)
    split(model, tmp_path / "out", **mesh)
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "merged")
    found = read_header(tmp_path / "merged" / "model.safetensors").tensors
    assert [*found] == [*read_header(model / "model.safetensors").tensors]
    assert verify_exact(open_source(model), tmp_path / "out").verdict == "same"


@pytest.mark.parametrize("mesh", MESHES)
def test_from_any_mesh_to_any_other(llama: Path, tmp_path: Path, mesh: dict) -> None:
    split(llama, tmp_path / "tp4", tp=4)
    split(llama, tmp_path / "direct", **mesh)
    split(tmp_path / "tp4", tmp_path / "there", **mesh)
    assert without_manifest(tmp_path / "there") == without_manifest(tmp_path / "direct")
    split(tmp_path / "there", tmp_path / "back", tp=4)
    assert without_manifest(tmp_path / "back") == without_manifest(tmp_path / "tp4")


def test_ranks_are_written_one_by_one_and_loaded_without_files(llama: Path, tmp_path: Path) -> None:
    split(llama, tmp_path / "whole", tp=2, pp=2)
    for rank in (3, 0, 2, 1):
        assert split(llama, tmp_path / "out", tp=2, pp=2, ranks=[rank]).complete == (rank == 1)
    assert without_manifest(tmp_path / "out") == without_manifest(tmp_path / "whole")
    found = load(llama, tp=2, rank=3, pp=2)
    assert found.keys() == names_on(tmp_path / "out", "pp-01-of-02-tp-01-of-02")


@pytest.mark.parametrize("mesh", one_of_each([{"pp": 2, "ep": 2, "tp": 2}, {"pp": 2, "ep": 2}]))
@pytest.mark.parametrize("same_ranks", [False, True])
def test_with_experts(tmp_path: Path, mesh: dict, same_ranks: bool) -> None:
    mesh = {**mesh, "tp": 2, "same_ranks": True} if same_ranks else mesh
    model = store.checkpoint("qwen3_moe", experts=8)
    split(model, tmp_path / "out", **mesh)
    assert verify_exact(open_source(model), tmp_path / "out").verdict == "same"
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(model)


def test_a_layer_on_the_wrong_stage_is_found(llama: Path, tmp_path: Path) -> None:
    split(llama, tmp_path / "right", pp=2)
    split(llama, tmp_path / "wrong", pp_layers=(2, 3), pp=2)
    for folder in ("rank-00-of-02", "rank-01-of-02"):
        file = tmp_path / "wrong" / folder / "model.safetensors"
        raw = file.read_bytes()
        (tmp_path / "right" / folder / "model.safetensors").write_bytes(
            raw.replace(b'\\"stages\\": [2, 3]', b'\\"stages\\": [3, 2]')
        )
    found = verify_exact(open_source(llama), tmp_path / "right")
    assert found.verdict == "different"


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pp", "6"], "--pp 6 is not possible: there are more stages than layers (5)"),
        (["--pp", "0"], "--pp 0 is not possible: a degree is at least 1"),
        (["--pp", "3", "--pp-layers", "2,3"], "--pp-layers 2,3 is not possible with --pp 3"),
        (["--pp", "1", "--pp-layers", "2,3"], "--pp 1 goes without --pp-layers"),
        (["--pp-layers", "2,2"], "--pp-layers 2,2 is not possible: that is 4 layers of 5"),
        (["--pp-layers", "0,5"], "--pp-layers 0,5 is not possible: a stage has at least one layer"),
        (["--pp-layers", "2,x"], "'2,x' is no list of numbers such as 8,9,9,6"),
    ],
)
@pytest.mark.parametrize("name", ["split", "plan"])
def test_what_is_not_possible_is_refused_in_one_line(
    llama: Path, tmp_path: Path, name: str, arguments: list[str], message: str
) -> None:
    out = [tmp_path / "out"] if name == "split" else []
    done = command(name, llama, *out, *arguments)
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_number_of_stages_follows_from_their_layers(llama: Path, tmp_path: Path) -> None:
    assert command("split", llama, tmp_path / "out", "--pp-layers", "1,3,1").returncode == 0
    assert [layers_on(tmp_path / "out", f"rank-0{i}-of-03") for i in range(3)] == [[0], [1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("albert-groups", "albert.encoder.albert_layer_groups."),
        ("deberta", "deberta.encoder.rel_embeddings.weight"),
        ("zamba", "shared_transf."),
        ("zamba2", "shared_transformer."),
        ("hrm_text", "_module.layers."),
    ],
)
def test_what_several_layers_share_cannot_be_on_one_stage(name: str, tensor: str) -> None:
    with pytest.raises(PlanError, match=r"pp=2 is not possible: every stage would need the tensor ") as error:
        plan(store.checkpoint(name), pp=2)
    assert tensor in error.value.message


def test_rules_that_a_plan_file_says_of_stages_are_followed(llama: Path, tmp_path: Path) -> None:
    rules = tmp_path / "mine.toml"
    assert command("plan", llama, "--save", rules).returncode == 0
    text = rules.read_text().replace('"model.norm.*" = "last"', '"model.norm.*" = "first"')
    rules.write_text(text)
    access = {"plan_file": rules}
    found = plan(llama, pp=2, **access)
    assert sorted(found.layouts["model.norm.weight"].boxes) == [0]
    split(llama, tmp_path / "out", pp=2, **access)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(llama), "the manifest says it, too"
    rules.write_text(text.replace("[stages]", '[stages]\n"model.layers.{layer}.mlp.*" = "no_such_setting"'))
    with pytest.raises(PlanError, match="'no_such_setting' is null for 'model"):
        plan(llama, pp=2, **access)


# --------------------------------------------------------------------------------------------------------- all models

SHARED = {
    "albert-groups", "deberta", "deberta-v2", "deberta-v3", "hrm_text", "inkling2", "inkling2_text", "zamba", "zamba2",
}  # fmt: skip
"""Models whose layers share weights, or have them in one place."""
REFUSED = {*SHARED, "albert", "longcat_flash", "t5-encoder", "t5-classes", "umt5-encoder", "t5gemma-encoder"}
"""Those, models of one layer, and encoders of models whose decoder is dealt."""


def stages_of(found: Plan) -> dict[str, frozenset[int]]:
    return {tensor.name: tensor.kind.stages or frozenset() for tensor in found.model.tensors}


def check_layers(found: Plan) -> None:
    """Each layer is on one stage, as the mesh says; only what stands outside the layers may be on two."""
    layers = found.model.architecture.layers.text
    of = {tensor.name: tensor.kind for tensor in found.model.tensors}
    for name, stages in stages_of(found).items():
        assert stages and (len(stages) == 1 or stages == {0, found.mesh.pp - 1}), name
        place = found.model.architecture.index_places(name).get(layers)
        number = None if place is None else [int(part) for part in name.split(".") if part.isdigit()][place]
        if is_layered(found.model, of[name]) and found.model.architecture.stage_of(name) is None:
            assert number is not None
            (stage,) = stages
            at = layers_at(found.mesh, stage)
            assert number in at or (stage == found.mesh.pp - 1 and number >= at.stop), name


@pytest.mark.parametrize("name", one_of_each(remote.REMOTE, lambda name: remote.REMOTE[name].degrees))
def test_every_other_model_is_staged(name: str) -> None:
    folder = store.made(f"remote-{name}", lambda part: remote.save(name, part))
    model = open_source(folder).model
    if model.sizes.counts.get("layer") == 1:
        with pytest.raises(PlanError, match="more stages than layers"):
            make_plan(model, mesh_of(pp=2))
    elif remote.REMOTE[name].file == "medusa":
        with pytest.raises(PlanError, match="does not give the number of layers"):
            make_plan(model, mesh_of(pp=2))
    elif name in {"iquestloopcoder", "ouro"}:
        with pytest.raises(PlanError, match="every stage would need the tensor"):
            make_plan(model, mesh_of(pp=2))
    else:
        check_layers(make_plan(model, mesh_of(pp=2)))


def test_rules_of_an_older_split_are_not_guessed_at(llama: Path) -> None:
    model = open_source(llama).model
    older = replace(model, architecture=replace(model.architecture, stages={}))
    with pytest.raises(PlanError, match=r"pp=2 is not possible: the rules 'llama' have no \[stages\]"):
        make_plan(older, mesh_of(pp=2))
