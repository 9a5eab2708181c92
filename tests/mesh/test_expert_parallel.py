"""Expert parallelism: experts by name and fused, alone, beside tensor parallelism, and over the same ranks."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from reshard.api import load, merge, plan, split
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.safetensors import build_header, read_header
from reshard.mesh.degrees import valid_degrees
from tests import zoo
from tests.marks import thorough
from tests.support import contents, without_manifest, write_checkpoint

MESHES = {
    "tp4": {"tp": 4},
    "ep2": {"ep": 2},
    "ep3": {"ep": 3},
    "ep2-tp2": {"ep": 2, "tp": 2},
    "ep3-tp4": {"ep": 3, "tp": 4},
    "same2": {"ep": 2, "tp": 2, "same_ranks": True},
}


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
@thorough
def test_any_mesh_to_any_mesh(name, tmp_path):
    source = zoo.save(name, tmp_path / "source", max_shard_size="100KB")
    for mesh, arguments in MESHES.items():
        split(source, tmp_path / mesh, **arguments)
        merge(tmp_path / mesh, tmp_path / f"{mesh}-merged")
        assert contents(tmp_path / f"{mesh}-merged") == contents(source)
    for before in ("tp4", "ep2-tp2", "same2"):
        for after, arguments in MESHES.items():
            if before != after:
                split(tmp_path / before, tmp_path / f"{before}-{after}", **arguments)
                assert without_manifest(tmp_path / f"{before}-{after}") == without_manifest(tmp_path / after)
    for rank in range(4):
        shard = load_file(
            next((tmp_path / "ep2-tp2").glob(f"ep-0{rank // 2}-of-02-tp-0{rank % 2}-of-02/*.safetensors"))
        )
        loaded = load(tmp_path / "tp4", tp=2, rank=rank, ep=2)
        assert loaded.keys() >= shard.keys() and all(loaded[n].equal(t) for n, t in shard.items())


def test_no_expert_stands_twice_and_the_rest_is_on_every_rank(tmp_path):
    source = zoo.save("deepseek_v3", tmp_path / "source")
    full = load_file(source / "model.safetensors")
    split(source, tmp_path / "out", ep=3)
    ranks = [load_file(p) for p in sorted((tmp_path / "out").glob("rank-*/model.safetensors"))]
    for name, whole in full.items():
        holders = [rank for rank in ranks if name in rank]
        if ".experts." in name:
            assert len(holders) == 1 and holders[0] is ranks[int(name.split(".experts.")[1].split(".")[0]) // 2]
        else:
            assert len(holders) == 3
        assert all(rank[name].equal(whole) for rank in holders)


def test_over_the_same_ranks_experts_are_whole_and_all_else_is_cut(tmp_path):
    source = zoo.save("deepseek_v3", tmp_path / "source")
    found = plan(source, tp=2, ep=2, same_ranks=True)
    assert found.mesh.size == 2
    expert = found.layouts["model.layers.1.mlp.experts.4.gate_proj.weight"]
    assert 0 not in expert.boxes and expert.boxes[1].shape == expert.full
    assert (
        found.layouts["model.layers.1.mlp.shared_experts.gate_proj.weight"].boxes[0].shape[0] * 2
        == (found.layouts["model.layers.1.mlp.shared_experts.gate_proj.weight"].full[0])
    )
    assert found.layouts["model.layers.1.mlp.gate.weight"].is_replicated
    split(source, tmp_path / "out", tp=2, ep=2, same_ranks=True)
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_dir()) == ["rank-00-of-02", "rank-01-of-02"]
    config = json.loads((tmp_path / "out/rank-00-of-02/config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    assert config["moe_intermediate_size"] == original["moe_intermediate_size"]
    assert config["num_attention_heads"] * 2 == original["num_attention_heads"]


def test_fused_experts_are_cut_along_their_first_dimension(tmp_path):
    source = zoo.save("gpt_oss", tmp_path / "source")
    full = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    shard = load(source, ep=3, rank=1)
    assert shard[name].equal(full[name][2:4])


def test_degrees(tmp_path):
    source = zoo.save("mixtral", tmp_path / "source")
    assert valid_degrees(plan(source).model, "ep") == [1, 2, 3, 6]
    with pytest.raises(PlanError, match="ep=4 is not possible: 6 experts do not divide by 4"):
        split(source, tmp_path / "out", ep=4)
    with pytest.raises(PlanError, match="over the same ranks both have the same degree"):
        split(source, tmp_path / "out", tp=2, ep=3, same_ranks=True)
    dense = write_checkpoint(tmp_path / "dense")
    with pytest.raises(PlanError, match="ep=2 is not possible: the rules of 'llama' split nothing over ep"):
        split(dense, tmp_path / "out", ep=2)


@pytest.mark.parametrize("arguments", [{"ep": 3, "tp": 2}, {"ep": 2, "max_shard_size": 60_000}])
def test_a_lost_manifest(arguments, tmp_path):
    """All tensors come back, in the order in which a merge of ranks that hold each of them would give them."""
    source = zoo.save("mixtral", tmp_path / "source")
    split(source, tmp_path / "out", **arguments)
    split(source, tmp_path / "tp2", tp=2)
    assert b"places" not in next((tmp_path / "tp2").rglob("*.safetensors")).read_bytes()  # every rank holds all
    for folder in ("out", "tp2"):
        (tmp_path / folder / "reshard.json").unlink()
        merge(tmp_path / folder, tmp_path / f"{folder}-merged")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out-merged/model.safetensors")
    assert before.keys() == after.keys() and all(after[n].equal(t) for n, t in before.items())
    assert contents(tmp_path / "out-merged") == contents(tmp_path / "tp2-merged")
    names = [list(read_header(tmp_path / f"{f}/model.safetensors").tensors) for f in ("source", "out-merged")]
    assert names[0] == names[1]
    split(tmp_path / "out", tmp_path / "again", **{**arguments, "ep": 6})
    split(source, tmp_path / "direct", **{**arguments, "ep": 6})
    assert without_manifest(tmp_path / "again") == without_manifest(tmp_path / "direct")


def test_places_of_other_tensors_are_refused(tmp_path):
    source = zoo.save("mixtral", tmp_path / "source")
    split(source, tmp_path / "out", ep=2)
    (tmp_path / "out/reshard.json").unlink()
    path = tmp_path / "out/rank-00-of-02/model.safetensors"
    header = read_header(path)
    for places in ([[0, 1]], [[0]], 7, {"0": 1}, [[0, -5], [0, len(header.tensors) + 5]]):
        document = json.loads(header.metadata["reshard"]) | {"places": places}
        tensors = [(t.name, t.dtype, t.shape) for t in header.tensors.values()]
        changed = build_header(tensors, {**header.metadata, "reshard": json.dumps(document)})
        path.write_bytes(changed + bytes(sum(t.nbytes for t in header.tensors.values())))
        with pytest.raises(CheckpointError, match=r"rank-00-of-02/model\.safetensors: its header .*places"):
            merge(tmp_path / "out", tmp_path / "merged")
