"""Models that take more than one row of tokens: encoders with decoders, speech, decoders of another's states."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.forward.compare import ForwardOptions
from reshard.verify.rank.layers import vocab_parallel
from reshard.verify.rank.trace import Places, inputs_of, random_ids, run, running
from tests import store, zoo
from tests.marks import thorough
from tests.support import changed_tensors
from tests.verify.forwards import run_forwards
from tests.verify.test_forward import QUICK, WITH_GRADIENTS, run_all, show

pytestmark = thorough


# each way in which a model takes its inputs, ties its tables, and lets a decoder see an encoder
MODELS = ["t5", "mt5", "umt5-encoder", "longt5-global", "bart", "mbart", "marian-two-vocabularies", "bart-causal",
          "trocr", "m2m_100", "whisper", "whisper-causal", "t5gemma", "t5gemma2"]  # fmt: skip


def pair(name: str, tp: int) -> tuple[Source, Source]:
    return store.pair(name, tp=tp)


@pytest.mark.parametrize(("names", "tp", "kv"), [(MODELS, 2, None), (["t5", "t5gemma"], 4, 2)], ids=["2", "kv-2-4"])
def test_gradients_of_both_sides(names: list[str], tp: int, kv: int | None) -> None:
    """With 2 KV heads on 4 ranks two of them share each."""
    pairs = [store.pair(name, kv=kv, tp=tp) for name in names]
    for name, (original, _), report in zip(names, pairs, run_all(pairs, WITH_GRADIENTS), strict=True):
        assert report.is_same, (name, show(report))
        without = {tensor.name for tensor in original.model.tensors} - {row.name for row in report.gradients}
        unused = ("EncDecAttention.relative_attention_bias.weight", ".weights", "final_logits_bias", ".version")
        frozen = ("vision_tower.", "multi_modal_projector.", "encoder.embed_positions.weight")
        assert not [n for n in without if not n.endswith(unused) and not any(part in n for part in frozen)], name


def test_streamed_both_sides_start_from_the_original() -> None:
    names = ["t5", "whisper", "t5gemma2"]
    options = ForwardOptions(streamed=True, seq=16, draws=2)
    for name, report in zip(names, run_forwards([pair(name, 2) for name in names], options), strict=True):
        assert report.is_same, (name, show(report))
        rows = [row.name for row in report.layers]
        assert [row for row in rows if row.endswith(" embedding")] == {
            "t5": ["encoder.block embedding", "decoder.block embedding"],
            "whisper": ["model.encoder.layers embedding", "model.decoder.layers embedding"],
            "t5gemma2": ["model.encoder.text_model.layers embedding", "model.decoder.layers embedding"],
        }[name]


_T5, _LAYER = "encoder.block.0.layer.0.SelfAttention", "model.decoder.layers.{}.encoder_attn"
FAULTS = {
    "t5": [
        (f"{_T5}.relative_attention_bias.weight", f"{_T5}.o"),
        ("decoder.block.1.layer.1.EncDecAttention.k.weight", "decoder.block.1.layer.1.EncDecAttention.o"),
        ("shared.weight", "encoder.block embedding"),
    ],
    "mt5": [("lm_head.weight", "logits")],
    "bart": [(_LAYER.format(1) + ".v_proj.weight", _LAYER.format(1) + ".out_proj"), ("final_logits_bias", "logits")],
    "marian-two-vocabularies": [("model.decoder.embed_tokens.weight", "model.decoder.layers embedding")],
    "bart-causal": [
        (_LAYER.format(0) + ".k_proj.bias", None),
        (_LAYER.format(0) + ".q_proj.bias", _LAYER.format(0) + ".out_proj"),
    ],
    "whisper": [("model.encoder.layers.2.self_attn.q_proj.bias", "model.encoder.layers.2.self_attn.out_proj")],
    "whisper-causal": [(_LAYER.format(0) + ".v_proj.weight", _LAYER.format(0) + ".out_proj")],
    "t5gemma": [("model.decoder.layers.1.cross_attn.k_proj.weight", "model.decoder.layers.1.cross_attn.o_proj")],
}


def test_a_fault_of_either_side_is_seen_where_it_is(tmp_path: Path) -> None:
    """A rank's part of one tensor, turned around. What a bias of keys adds to all scores alike changes nothing."""
    cases = [(name, tensor, first) for name, faults in FAULTS.items() for tensor, first in faults]
    pairs = []
    for i, (name, tensor, _) in enumerate(cases):
        original, shards = pair(name, 2)
        shutil.copytree(shards.path, tmp_path / str(i))
        file = tmp_path / str(i) / "rank-01-of-02" / "model.safetensors"
        with changed_tensors(file) as tensors:
            tensors[tensor] = tensors[tensor].flip(*range(tensors[tensor].dim())).contiguous()
        pairs.append((original, open_source(tmp_path / str(i))))
    for (name, tensor, first), report in zip(cases, run_forwards(pairs, QUICK), strict=True):
        assert report.first == first, (name, tensor, show(report)[:3])


# -------------------------------------------------------------------------------------------------- what a model takes


def _model(name: str) -> nn.Module:
    with torch.device("meta"):
        return zoo.ZOO[name].build()


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("llama", {"input_ids": (2, 9), "attention_mask": (2, 9)}),
        ("gpt2", {"input_ids": (2, 9), "attention_mask": (2, 9)}),  # its config could ask for an encoder's states
        ("t5-encoder", {"input_ids": (2, 9), "attention_mask": (2, 9)}),
        ("t5", {"input_ids": (2, 9), "attention_mask": (2, 9), "decoder_input_ids": (2, 9)}),
        ("whisper", {"input_features": (2, 6, 26), "decoder_input_ids": (2, 9)}),
        ("whisper-causal", {"input_ids": (2, 9), "attention_mask": (2, 9), "encoder_outputs": (2, 9, 80)}),
        ("bart-causal", {"input_ids": (2, 9), "attention_mask": (2, 9), "encoder_hidden_states": (2, 9, 80)}),
        ("trocr", {"input_ids": (2, 9), "attention_mask": (2, 9), "encoder_hidden_states": (2, 9, 36)}),
        ("blip-2", {"input_ids": (2, 9), "attention_mask": (2, 9)}),
    ],
)
def test_inputs_are_what_the_forward_asks_for(name: str, shapes: dict[str, tuple[int, ...]]) -> None:
    model = _model(name)
    found = inputs_of(model, torch.arange(18).reshape(2, 9), torch.bfloat16)
    assert {key: tuple(value.shape) for key, value in found.items()} == shapes
    assert all(value.dtype == torch.bfloat16 for value in found.values() if value.is_floating_point())
    assert (running(model) is model) == (name != "blip-2")


def test_each_side_has_tokens_of_its_own_vocabulary_and_none_of_padding() -> None:
    model = _model("marian-two-vocabularies")  # 101 and 93 tokens
    ids = random_ids(model, 8, 60, seed=0, avoided=0)
    both = inputs_of(model, ids, torch.float32, avoided=0)
    assert (int(both["input_ids"].max()), int(both["decoder_input_ids"].max())) == (100, 92)
    assert (int(both["input_ids"].min()), int(both["decoder_input_ids"].min())) == (1, 1)


def test_no_more_tokens_than_the_decoder_of_a_sound_has_positions_for() -> None:
    assert random_ids(_model("whisper"), 1, 70, seed=0).shape == (1, 64)


class _Turns(nn.Module):
    """Two turns through one block, which doubles."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, 1, bias=False)])
        nn.init.constant_(self.layers[0].weight, 2)

    def forward(self, input_ids: Tensor, **_: object) -> dict[str, Tensor]:
        x = input_ids[..., None].float()
        return {"logits": self.layers[0](self.layers[0](x))}


def test_fed_states_are_those_of_each_turn() -> None:
    model, ids = _Turns(), torch.ones(1, 1, dtype=torch.long)
    places = Places({"layers.0": model.layers[0]}, {})
    fed = {"embedding": 3, "layers.0": 5, "layers.0 call 2": 7}
    feed = {name: torch.full((1, 1, 1), float(value)) for name, value in fed.items()}
    found = run(model, {"input_ids": ids}, places, feed=feed).states
    assert {name: value.item() for name, value in found.items()} == {
        "embedding": 1, "layers.0": 6, "layers.0 call 2": 10, "logits": 7,
    }  # fmt: skip


@pytest.mark.parametrize(("first_row", "expected"), [(4, 1), (5, 0), (0, -1), (6, -1)])
def test_a_token_with_a_vector_of_its_own_is_known_by_its_row_of_a_rank(first_row: int, expected: int) -> None:
    """T5Gemma 2's table has one beside its rows; a rank looks up rows from 0 on."""
    table = nn.Embedding(4, 1)
    table.eoi_token_index = 5
    vocab_parallel(table, first_row, None)
    assert table.eoi_token_index == expected
