"""Split, merge and re-split, byte for byte. Every model of the zoo: tests/test_zoo_sanity.py."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import load, merge, split
from reshard.formats.errors import MismatchError, PlanError
from reshard.formats.files.safetensors import DTYPE_BITS, read_header
from reshard.move.jobs import Sizes
from reshard.source.opening import open_source
from tests import zoo
from tests.marks import thorough
from tests.support import (
    LLAMA,
    contents,
    llama_tensors,
    trained_checkpoint,
    weights_of,
    without_manifest,
    write_checkpoint,
    write_file,
)


def test_shards_are_those_of_hand_written_slices(tmp_path):
    source = write_checkpoint(tmp_path / "source", files=3, dtype="F32")
    split(source, tmp_path / "out", tp=4)
    full: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        full |= load_file(file)
    for rank in range(4):
        shard = load_file(tmp_path / f"out/rank-{rank:02d}-of-04/model.safetensors")
        assert shard.keys() == full.keys()
        for name, whole in full.items():
            if "norm" in name:
                expected = whole
            elif "o_proj" in name or "down_proj" in name:
                expected = whole.chunk(4, dim=1)[rank]
            elif "embed" in name or "lm_head" in name:
                expected = torch.cat([whole, torch.zeros(3, 20)]).chunk(4)[rank]
            else:
                expected = whole.chunk(4)[rank]
            assert shard[name].view(torch.uint8).equal(expected.contiguous().view(torch.uint8)), name


def test_a_rank_folder_is_an_ordinary_checkpoint(tmp_path):
    import transformers

    source = zoo.save("llama", tmp_path / "source")
    split(source, tmp_path / "out", tp=8)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out/rank-05-of-08")
    state = load_file(tmp_path / "out/rank-05-of-08/model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert model.config.num_key_value_heads == 1


@pytest.mark.parametrize(
    ("pad", "rows"), [(0, [0, None]), (18, [18, None]), (19, [None, 0]), (36, [None, 17]), (-1, [None, 17])]
)
def test_a_rank_has_the_row_of_padding_or_none(pad: int, rows: list[int | None], tmp_path: Path) -> None:
    """The row of another rank is no row of its own: some classes set it to zero as they load."""
    split(write_checkpoint(tmp_path / "source", config=LLAMA | {"pad_token_id": pad}), tmp_path / "out", tp=2)
    configs = [json.loads((tmp_path / f"out/rank-0{rank}-of-02/config.json").read_text()) for rank in (0, 1)]
    assert [config["pad_token_id"] for config in configs] == rows


def test_a_type_that_counts_positions_from_the_row_of_padding_keeps_it(tmp_path: Path) -> None:
    split(zoo.save("roberta", tmp_path / "model", settings={"pad_token_id": 1}), tmp_path / "out", tp=2)
    configs = [json.loads((tmp_path / f"out/rank-0{rank}-of-02/config.json").read_text()) for rank in (0, 1)]
    assert [config["pad_token_id"] for config in configs] == [1, 1]


def test_load_reads_what_split_writes_from_any_source(tmp_path):
    source = zoo.save("phi3", tmp_path / "source")
    split(source, tmp_path / "tp4", tp=4)
    split(source, tmp_path / "tp2", tp=2)
    for rank in range(4):
        expected = load_file(tmp_path / f"tp4/rank-{rank:02d}-of-04/model.safetensors")
        for origin in (source, tmp_path / "tp2", tmp_path / "tp4"):
            found = load(origin, tp=4, rank=rank)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
    whole = weights_of(source)
    found = load(tmp_path / "tp4")  # packed: a shard's parts are not neighbours here
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)


TOWER_PLAN = """
[sizes]
hidden = "hidden_size"
ff = "intermediate_size"
vocab = "vocab_size"
layer = "num_hidden_layers"
[parallel]
tp = [["ff"], ["vocab"]]
pad = ["vocab"]
[tensors]
"model.embed_tokens.weight" = "vocab hidden"
"model.layers.{layer}.self_attn.*" = "..."
"model.layers.{layer}.mlp.gate_proj.weight" = "ff hidden"
"model.layers.{layer}.mlp.up_proj.weight" = "ff hidden"
"model.layers.{layer}.mlp.down_proj.weight" = "hidden ff"
"model.layers.{layer}.*" = "hidden"
"model.norm.weight" = "hidden"
"lm_head.weight" = "vocab hidden"
"tower.*" = "..."
"""


def test_what_has_an_open_rule_is_whole_on_every_rank(tmp_path):
    """A tower of any shapes, quantized or not, beside a language model that is split; a re-split and a merge know
    them.
    """
    source = write_checkpoint(tmp_path / "source", files=2, dtype="F32")
    tower = {
        "tower.conv": (4, 3, 2, 2),
        "tower.scale": (),
        "tower.a.weight": (5, 7),
        "tower.a.weight_scale_inv": (1, 1),
    }
    write_file(source / "model-00001-of-00001.safetensors", [(name, "F32", shape) for name, shape in tower.items()])
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tower, "model-00001-of-00001.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    plan_file = tmp_path / "mine.toml"
    plan_file.write_text(TOWER_PLAN)
    access = {"plan_file": plan_file}
    split(source, tmp_path / "tp4", tp=4, **access)
    whole = load_file(source / "model-00001-of-00001.safetensors")
    for rank in range(4):
        shard = load_file(tmp_path / f"tp4/rank-{rank:02d}-of-04/model.safetensors")
        assert all(shard[name].numpy().tobytes() == whole[name].numpy().tobytes() for name in tower)
        assert shard["lm_head.weight"].shape == (10, 20)
    split(tmp_path / "tp4", tmp_path / "tp2", tp=2)
    merge(tmp_path / "tp2", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


def test_a_language_model_beside_towers_is_split_as_it_is_alone(tmp_path):
    """Gemma 3n with its towers, which transformers builds of other packages, under the names of its checkpoints."""
    alone = zoo.save("gemma3n_text", tmp_path / "alone")
    whole = tmp_path / "whole"
    whole.mkdir()
    config = json.loads((alone / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "gemma3n", "text_config": config}))
    towers = {"model.vision_tower.timm_model.conv_stem.conv.weight": torch.randn(4, 3, 3, 3),
              "model.audio_tower.conformer.0.attention.attn.per_dim_scale": torch.randn(8),
              "model.embed_vision.embedding.weight": torch.randn(5, 8)}  # fmt: skip
    text = load_file(alone / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in text.items()}
    save_file({**renamed, **towers}, whole / "model.safetensors")
    split(alone, tmp_path / "alone4", tp=4)
    split(whole, tmp_path / "whole4", tp=4)
    for rank in range(4):
        folder = f"rank-{rank:02d}-of-04"
        expected = load_file(tmp_path / "alone4" / folder / "model.safetensors")
        found = load_file(tmp_path / "whole4" / folder / "model.safetensors")
        assert found.keys() == renamed.keys() | towers.keys()
        assert all(found[name.replace("model.", "model.language_model.")].equal(t) for name, t in expected.items())
        assert all(found[name].equal(tensor) for name, tensor in towers.items())
        own = json.loads((tmp_path / "whole4" / folder / "config.json").read_text())
        assert own["text_config"] == json.loads((tmp_path / "alone4" / folder / "config.json").read_text())


def test_every_dtype_passes_untouched(tmp_path):
    """Random bits in every dtype of the format: NaN payloads, negative zeros, values that no arithmetic would keep."""
    config = LLAMA | {"num_hidden_layers": len(DTYPE_BITS), "intermediate_size": 32, "head_dim": 8}
    folder = write_checkpoint(tmp_path / "source", config=config)
    dtypes = {f"layers.{layer}.": dtype for layer, dtype in enumerate(DTYPE_BITS)}
    tensors = [
        (name, next((each for at, each in dtypes.items() if at in name), "BF16"), shape)
        for name, _, shape in llama_tensors(config)
    ]
    write_file(folder / "model.safetensors", tensors)
    split(folder, tmp_path / "4", tp=4)
    for file in (tmp_path / "4").rglob("*.safetensors"):
        for info in read_header(file).tensors.values():
            assert info.offset % max(1, DTYPE_BITS[info.dtype] // 8) == 0, "each is aligned in its file"
    split(tmp_path / "4", tmp_path / "8", tp=8)
    merge(tmp_path / "8", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(folder)


def test_elements_smaller_than_a_byte_are_not_cut(tmp_path):
    source = write_checkpoint(tmp_path / "source", dtype="F4")
    with pytest.raises(
        PlanError, match=r"down_proj.weight' \(F4\): elements 0 to 3 of 'ff' begin or end within a byte"
    ):
        split(source, tmp_path / "out", tp=8)
    assert not list(tmp_path.glob("out*"))


def test_padding_is_zero_recorded_and_stripped_once(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    summary = split(source, tmp_path / "out", tp=8, pad_vocab_to=64)
    assert summary.padding == {"vocab": (37, 64)}
    last = load_file(tmp_path / "out/rank-07-of-08/model.safetensors")["lm_head.weight"]
    assert last.shape[0] == 8 and not last.view(torch.uint8).any()
    assert json.loads((tmp_path / "out/rank-07-of-08/config.json").read_text())["vocab_size"] == 8
    split(tmp_path / "out", tmp_path / "out4", tp=4)
    split(source, tmp_path / "direct4", tp=4)
    assert without_manifest(tmp_path / "out4") == without_manifest(tmp_path / "direct4"), "padding is not padded again"
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    with pytest.raises(PlanError, match=r"tp=4 is not possible: a vocabulary of 37 does not divide by 4"):
        split(source, tmp_path / "refused", tp=4, pad_vocab=False)
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_bin_checkpoints_and_their_tied_tensors(tmp_path, tied):
    config = LLAMA | {"num_hidden_layers": 1, "tie_word_embeddings": tied}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    state = {name: torch.randn(shape) for name, _, shape in llama_tensors(config)}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, source / "pytorch_model.bin")
    split(source, tmp_path / "out", tp=4)
    shard = load_file(tmp_path / "out/rank-00-of-04/model.safetensors")
    assert ("lm_head.weight" in shard) is not tied, "stored once where the source stores once"
    merge(tmp_path / "out", tmp_path / "merged")
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in merged.items())
    assert state.keys() - merged.keys() == ({"lm_head.weight"} if tied else set())


def test_a_real_trained_checkpoint(tmp_path):
    source = trained_checkpoint()
    split(source, tmp_path / "tp4", tp=4)
    split(tmp_path / "tp4", tmp_path / "tp3", tp=3)
    merge(tmp_path / "tp3", tmp_path / "merged")
    before, after = (
        (hashlib.sha256((p / "model.safetensors").read_bytes()).hexdigest()) for p in (source, tmp_path / "merged")
    )
    assert before == after


@pytest.mark.parametrize("steps", [1 << 26, 1000])
def test_one_pass(tmp_path, monkeypatch, steps):
    """Each source byte is read once and each target byte written once, by one thread or several, headers and 64 bytes
    a tensor for the fingerprint aside.
    """
    source = write_checkpoint(tmp_path / "source", files=3)
    log, own = tmp_path / "log", threading.get_ident()
    real_read, real_write = os.preadv, os.pwrite

    def note(kind, count):
        with log.open("a") as file:
            file.write(f"{kind} {count} {threading.get_ident()}\n")
        return count

    def read(descriptor, buffers, offset):
        time.sleep(0.002 if steps < 1 << 20 else 0)  # so that no thread is done before the next one has begun
        kind = "sample" if threading.get_ident() == own else "read"  # fingerprints are taken where it is planned
        return note(kind, real_read(descriptor, buffers, offset))

    def write(descriptor, data, offset):
        return note("written", real_write(descriptor, data, offset))

    def traffic(kind):
        lines = [line.split() for line in log.read_text().splitlines()]
        threads = {thread for _, _, thread in lines} - {str(own)}
        assert len(threads) > 1 if steps < 1 << 20 else len(threads) == 1
        return sum(int(count) for found, count, _ in lines if found == kind)

    def again(path):
        raise AssertionError(f"{path} is read a second time for its checksum")

    monkeypatch.setattr("reshard.move.reading.file_checksum", again)
    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwrite", write)
    options = {"sizes": Sizes(step=steps, small=1000)}

    def check(folder: Path, out: Path) -> None:
        files = list(folder.rglob("*.safetensors"))
        infos = [info for file in files for info in read_header(file).tensors.values()]
        assert traffic("read") == sum(info.nbytes for info in infos)
        assert traffic("sample") <= 64 * len(infos)
        assert traffic("written") == sum(f.stat().st_size for f in out.rglob("*.safetensors"))
        log.unlink()

    split(source, tmp_path / "four", tp=4, **options)
    check(source, tmp_path / "four")
    split(tmp_path / "four", tmp_path / "eight", tp=8, **options)
    check(tmp_path / "four", tmp_path / "eight")
    merge(tmp_path / "eight", tmp_path / "merged", **options)
    check(tmp_path / "eight", tmp_path / "merged")
    monkeypatch.setattr("reshard.move.reading._ROW", 0)  # short rows are read whole
    load(source, tp=4, rank=1)
    owned = sum(i.nbytes for i in read_header(tmp_path / "four/rank-01-of-04/model.safetensors").tensors.values())
    lines = [line.split() for line in log.read_text().splitlines()]
    assert sum(int(count) for kind, count, _ in lines if kind == "read") == owned, "one rank reads only its own bytes"


def test_a_users_plan(tmp_path):
    """A model that nobody knows, with a plan file of the same form as the built-in ones."""
    config = {"model_type": "mine", "hidden_size": 8, "width": 12}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file({"up": torch.randn(12, 8), "down": torch.randn(8, 12)}, source / "model.safetensors")
    plan = tmp_path / "mine.toml"
    plan.write_text(
        '[sizes]\nhidden = "hidden_size"\n[parallel]\ntp = [["ff"]]\n[tensors]\nup = "ff hidden"\ndown = "hidden ff"\n'
    )
    access = {"plan_file": plan}
    split(source, tmp_path / "out", tp=3, **access)
    assert load_file(tmp_path / "out/rank-02-of-03/model.safetensors")["down"].shape == (8, 4)
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    (tmp_path / "out/reshard.json").unlink()
    with pytest.raises(PlanError, match="unknown model_type 'mine'"):
        merge(tmp_path / "out", tmp_path / "merged2")
    other = tmp_path / "other.toml"
    other.write_text(plan.read_text().replace('up = "ff hidden"', 'up = "(1 ff) hidden"'))
    with pytest.raises(MismatchError, match="split by another plan than 'other'"):
        merge(tmp_path / "out", tmp_path / "merged2", plan_file=other)
    merge(tmp_path / "out", tmp_path / "merged2", **access)
    plan.write_text(plan.read_text() + 'bias = "ff"\n')
    with pytest.raises(PlanError, match="the rule 'bias' of plan 'mine' covers no tensor"):
        split(source, tmp_path / "out2", tp=3, **access)


def test_sizes_of_a_users_plan_may_be_of_each_layer(tmp_path: Path) -> None:
    source, plan = tmp_path / "source", tmp_path / "mine.toml"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "mine", "hidden_size": 8, "widths": [12, 24]}))
    tensors = {f"{layer}.up": torch.randn(width, 8) for layer, width in enumerate((12, 24))}
    save_file(tensors, source / "model.safetensors")
    plan.write_text(
        '[sizes]\nhidden = "hidden_size"\nff = "widths[layer]"\n[parallel]\ntp = [["ff"]]\n'
        '[tensors]\n"{layer}.up" = "ff hidden"\n'
    )
    split(source, tmp_path / "out", tp=3, plan_file=plan)
    shard = load_file(tmp_path / "out/rank-02-of-03/model.safetensors")
    assert torch.equal(shard["1.up"], tensors["1.up"][16:]) and torch.equal(shard["0.up"], tensors["0.up"][8:])
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


TWO_LAYOUTS = """
model_types = ["two"]
[sizes]
hidden = "hidden"
ff = "ff"
[parallel]
tp = [["ff"]]
[tensors]
"w" = { shape = ["hidden -> (gate: ff + up: ff)", "(gate: ff + up: ff) hidden"] }
"v" = "ff"
"""


def _two_layouts(folder: Path, shape: tuple[int, int], hidden: int, ff: int) -> tuple[Path, dict[str, torch.Tensor]]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "two", "hidden": hidden, "ff": ff}))
    tensors = {"w": torch.arange(shape[0] * shape[1]).reshape(shape).float(), "v": torch.arange(float(ff))}
    save_file(tensors, folder / "model.safetensors")
    return folder, tensors


@pytest.mark.parametrize("input_first", [True, False])
def test_of_several_layouts_the_one_on_disk_is_taken(tmp_path, input_first):
    plan = tmp_path / "two.toml"
    plan.write_text(TWO_LAYOUTS)
    source, full = _two_layouts(tmp_path / "full", (5, 24) if input_first else (24, 5), 5, 12)
    for tp in (4, 2):
        split(source, tmp_path / f"tp{tp}", tp=tp, plan_file=plan)
        for rank in range(tp):
            held = load_file(tmp_path / f"tp{tp}/rank-{rank:02d}-of-{tp:02d}/model.safetensors")["w"]
            halves = full["w"].chunk(2, dim=int(input_first))
            mine = [half.chunk(tp, dim=int(input_first))[rank] for half in halves]
            assert torch.equal(held, torch.cat(mine, dim=int(input_first)))
    split(tmp_path / "tp4", tmp_path / "again", tp=2)
    assert without_manifest(tmp_path / "again") == without_manifest(tmp_path / "tp2")
    (tmp_path / "again/reshard.json").unlink()
    merge(tmp_path / "again", tmp_path / "back", plan_file=plan)
    assert {k: v.tolist() for k, v in load_file(tmp_path / "back/model.safetensors").items()} == {
        k: v.tolist() for k, v in full.items()
    }


def test_a_layout_that_shapes_do_not_tell_is_refused(tmp_path):
    plan = tmp_path / "two.toml"
    plan.write_text(TWO_LAYOUTS)
    source, _ = _two_layouts(tmp_path / "square", (8, 8), 8, 4)
    with pytest.raises(PlanError, match=r"'w' has shape \[8, 8\], which may be either of .* and") as error:
        split(source, tmp_path / "out", tp=2, plan_file=plan)
    assert "leave one shape" in str(error.value.hint)
    source, _ = _two_layouts(tmp_path / "odd", (8, 9), 8, 4)
    with pytest.raises(PlanError, match=r"'w' has shape \[8, 9\], and the rule gives .* \[8, 8\] and .* \[8, 8\]"):
        split(source, tmp_path / "out", tp=2, plan_file=plan)
    # whole, the shape tells; of a rank, only the manifest does
    source, full = _two_layouts(tmp_path / "wide", (8, 16), 8, 8)
    split(source, tmp_path / "out", tp=2, plan_file=plan)
    merge(tmp_path / "out", tmp_path / "back")
    assert torch.equal(load_file(tmp_path / "back/model.safetensors")["w"], full["w"])
    (tmp_path / "out/reshard.json").unlink()
    with pytest.raises(PlanError, match="may be either of"):
        merge(tmp_path / "out", tmp_path / "lost", plan_file=plan)


def fingerprint(shards: Path) -> str:
    identity = open_source(shards).stated
    assert identity is not None
    return identity.source


@pytest.mark.parametrize(
    ("small", "steps", "piece", "write"),
    [(0, 600, 64, 50), (0, 10_000, 100, 4096), (0, 1 << 20, 7, 3), (500, 600, 64, 50), (1 << 20, 10_000, 100, 4096)],
)
@thorough
def test_the_size_of_a_step_changes_nothing(tmp_path, monkeypatch, steps, piece, write, small):
    source = write_checkpoint(tmp_path / "source", files=3)
    for tp in (4, 8):
        split(source, tmp_path / f"tp{tp}", tp=tp)
    options = {"sizes": Sizes(step=steps, small=small, together=steps, write=write, piece=piece)}
    split(source, tmp_path / "small4", tp=4, **options)
    split(tmp_path / "tp4", tmp_path / "small8", tp=8, **options)
    split(tmp_path / "tp8", tmp_path / "again4", tp=4, **options)
    merge(tmp_path / "tp8", tmp_path / "merged", **options)
    assert contents(tmp_path / "small4") == contents(tmp_path / "tp4")
    assert without_manifest(tmp_path / "small8") == without_manifest(tmp_path / "tp8")
    assert without_manifest(tmp_path / "again4") == without_manifest(tmp_path / "tp4")
    assert contents(tmp_path / "merged") == contents(source)
