"""Correct shards are the same model, and what is wrong with wrong ones is named, by running both on real processes."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import split
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.notation.architecture_files import find_architecture
from reshard.profile.processes import run_processes
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.api import verify
from reshard.verify.forward.compare import ForwardOptions, ForwardReport, run_forward
from reshard.verify.forward.launch import run_ranks
from reshard.verify.forward.noise import SURE
from reshard.verify.rank.group import RankError
from tests import store, zoo
from tests.marks import one_of_each, thorough
from tests.support import change_json
from tests.verify.faults import inject
from tests.verify.forwards import run_forwards
from tests.verify.second_opinion import logits_by_transformers, logits_of_shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# what no other model of this list does: fused experts inside of a model of images, buffers without layers, ...
OTHERS = ["olmo_hybrid", "internvl-gpt_oss", "gpt2-base", "hrm_text", "qwen2_5_omni_thinker", "opt-projected"]
ELSEWHERE = {*zoo.KINDS, "bart", "t5"}
"""Those that are run in another dtype and degree, here or in test_encoder_decoder.py."""


def models() -> list[str]:
    """One of each architecture file that has lines for transformers' modules, which no other test reads.

    That the rules mean what they say is tested without ranks (test_zoo_sanity.py); ``make zoo`` runs all models.
    """
    files = {name: find_architecture({"model_type": zoo.ZOO[name].model_type}, Path()) for name in zoo.one_of_each()}
    return [name for name, file in files.items() if file.modules and name not in ELSEWHERE] + OTHERS


MODELS = models()
PARTS = 3
"""In which the models are run, so that no test is much longer than the others."""
# of the kinds, with 2 KV heads on 4 ranks: where the gradients of the heads that two ranks hold are summed
SHARED = ["llama-biases", "olmo2", "phi3", "gpt_oss", "bamba"]

QUICK = ForwardOptions(seq=16, draws=1)
"""Few draws measure less noise, so the limit is the sharper; an alarm near it is looked at with more of them."""
WITH_GRADIENTS = ForwardOptions(backward=True, seq=16, draws=1)


def pairs(names: Iterable[str], tp: int, dtype: str = "float32", kv: int | None = None) -> list[tuple[Source, Source]]:
    """Models of the zoo, with ``kv`` KV heads, and their shards."""
    return [store.pair(name, dtype, kv=kv, tp=tp) for name in names]


def run_all(found: list[tuple[Source, Source]], options: ForwardOptions) -> list[ForwardReport]:
    """Compare; what an original computes is kept for other tests."""
    return run_forwards(found, options, references=store.REFERENCES)


def show(report: ForwardReport) -> list[tuple[str, str, float]]:
    return [
        (kind, row.name, row.ratio)
        for kind in ("layers", "gradients")
        for row in getattr(report, kind)
        if not row.is_same
    ]


# ------------------------------------------------------------------------------------------------------ correct shards


@pytest.mark.parametrize(
    ("names", "tp", "kv"),
    [
        *(pytest.param(MODELS[part::PARTS], 2, None, marks=thorough) for part in range(PARTS)),
        (["llama-tied"], 4, 2),
        pytest.param(["mllama", "falcon-7b"], 4, 2, marks=thorough),
    ],
    ids=[*(f"files-{part}-2" for part in range(PARTS)), "kv-2-4", "others-kv-2-4"],
)
def test_correct_shards_are_the_same_model(names: Sequence[str], tp: int, kv: int | None) -> None:
    """With 2 KV heads on 4 ranks (the gradients are compared there, too) two share each of them, with the only one of
    Falcon all do; vocabularies are padded where they do not divide. Mllama's modules have their numbers of heads from
    [modules], the query heads of a KV head among them.
    """
    names = [name for name in names if tp in zoo.ZOO[name].degrees]
    for name, report in zip(names, run_all(pairs(names, tp, kv=kv), QUICK), strict=True):
        assert report.is_same, (name, show(report))
        assert report.first is None
        assert (report.ranks, report.dtype) == (tp, "float32")
        assert len(report.layers) >= 5, name


NO_GRADIENT = re.compile(r"correction_bias|^mtp\.|EncDecAttention\.relative_attention_bias")
"""It only chooses experts; transformers does not run it."""


@pytest.mark.parametrize(
    ("names", "tp", "dtype", "kv"),
    [(zoo.KINDS, 2, "bfloat16", None), (SHARED, 4, "float32", 2)],
    ids=["2-bfloat16", "kv-2-4-float32"],
)
@thorough
def test_gradients_are_those_of_the_original(names: Sequence[str], tp: int, dtype: str, kv: int | None) -> None:
    """And so are the states on the way there: one of each kind of model."""
    found = pairs(names, tp, dtype, kv)
    for name, (original, _), report in zip(names, found, run_all(found, WITH_GRADIENTS), strict=True):
        assert report.is_same, (name, show(report))
        assert (report.ranks, report.dtype) == (tp, dtype)
        assert len(report.layers) >= 5, name
        tensors = original.model.tensors
        without = {tensor.name for tensor in tensors} - {row.name for row in report.gradients}
        assert all(NO_GRADIENT.search(tensor) for tensor in without), (name, without)


@thorough
def test_the_row_of_padding_may_be_named_in_a_section() -> None:
    """KOSMOS-2 has its pad_token_id in text_config. Its forward asks for an image: the language model is run."""
    (report,) = run_forwards(pairs(["kosmos-2"], 2), ForwardOptions(backward=True, seq=16, draws=4))
    assert report.is_same, show(report)
    assert "text_model.model.embed_tokens.weight" in {row.name for row in report.gradients}


@thorough
@pytest.mark.parametrize("row", [3, 60])
def test_a_class_that_sets_the_row_of_padding_to_zero_as_it_loads(row: int, tmp_path: Path) -> None:
    """Youtu does: only the rank that has the row may name it."""
    original = zoo.save("youtu", tmp_path / "youtu", settings={"pad_token_id": row})
    split(original, tmp_path / "out", tp=2)
    (report,) = run_forwards([(open_source(original), open_source(tmp_path / "out"))], ForwardOptions(seq=40, draws=4))
    assert report.is_same, show(report)


@thorough
def test_the_row_of_padding_that_a_class_has_of_its_own_or_counts_from_the_end(tmp_path: Path) -> None:
    """MPNet's is row 1 whatever config.json says; -1 is the last one."""
    found = []
    for name, row in (("mpnet", 0), ("llama", -1)):
        original = zoo.save(name, tmp_path / name)
        change_json(original / "config.json", pad_token_id=row)
        split(original, tmp_path / f"{name}-2", tp=2)
        found.append((open_source(original), open_source(tmp_path / f"{name}-2")))
    for report in run_forwards(found, ForwardOptions(backward=True, seq=40, draws=4)):
        assert report.is_same, show(report)


@pytest.mark.parametrize(
    ("names", "dtype"),
    [(["llama-tied", "gpt2", "mixtral", "olmo2", "gpt_oss"], "bfloat16"), (["llama-tied", "gpt2"], "float32")],
    ids=["bfloat16", "float32"],
)
@thorough
def test_streamed_each_block_starts_from_the_original(names: list[str], dtype: str, tmp_path: Path) -> None:
    """The fault of one block is its own, and those after it are right."""
    options = ForwardOptions(streamed=True, draws=4)
    found = pairs(names, 2, dtype)
    original, shards = found[0]
    damaged = tmp_path / "shards"
    shutil.copytree(shards.path, damaged)
    assert inject("qkv_order", damaged, original)
    *right, wrong = run_forwards([*found, (original, open_source(damaged))], options)
    for name, report in zip(names, right, strict=True):
        assert report.is_same, (name, show(report))
    assert wrong.first == "model.layers.1.self_attn.o_proj"
    assert all(row.name.startswith("model.layers.1") for row in wrong.layers if not row.is_same)


@thorough
def test_report_says_what_was_measured() -> None:
    original, shards = pairs(["mixtral"], 2, "bfloat16")[0]
    report = run_forward(original, shards, ForwardOptions(batch=3, seq=20, seed=5))
    assert json.loads(json.dumps(dataclasses.asdict(report)))["is_same"] is True
    logits = report.logits
    assert logits is not None
    assert (report.batch, report.seq, report.seed, logits.positions) == (3, 20, 5, 60)
    assert (report.dtype, report.exact_dtype, report.backend, report.device) == (
        "bfloat16",
        "float32",
        "threads",
        "cpu",
    )
    assert 0 < logits.kl < 0.1 and 0 < logits.own_kl < 0.1
    assert 0 < logits.relative_error < 0.1 and 0 < logits.own_relative_error < 0.1
    assert logits.agreement == 1 - len(logits.mismatches) / 60
    assert sum(count for _, count, _ in logits.histogram) == 60 * 101
    assert report.choices == 3 * 60
    names = [row.name for row in report.layers]
    assert names[0] == "embedding" and names[-1] == "logits"
    assert {
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.mlp.gate choice 1",
        "model.layers.2.mlp.experts",
        "model.layers.2",
    } < {*names}


# -------------------------------------------------------------------------------------------------------- wrong shards

WRONG = [
    ("llama", "gate_and_up", "model.layers.1.mlp.down_proj"),
    ("llama-biases", "row_bias_on_every_rank", "model.layers.1.self_attn.o_proj"),
    ("phi3", "packed_by_plain_chunks", "model.layers.1.self_attn.o_proj"),
    ("gpt2", "two_heads", "transformer.h.1.attn.c_proj"),
    ("gpt_neox", "qkv_order", "gpt_neox.layers.1.attention.dense"),
    ("mixtral", "one_expert", "model.layers.1.mlp.experts"),
    ("mixtral", "router", "model.layers.1.mlp.gate choice 1"),
    ("gpt_oss", "row_bias_on_every_rank", "model.layers.1.self_attn.o_proj"),
    ("deepseek_v3", "rotary_halves", "model.layers.1.self_attn.o_proj"),
    ("llama", "another_ranks_file", "embedding"),
    ("llama", "vocabulary_by_one", "logits"),
]


@pytest.mark.parametrize("wrong", one_of_each([WRONG[:3], WRONG[3:]]))
def test_wrong_shards_are_not_and_the_place_is_named(wrong: list[tuple[str, str, str]], tmp_path: Path) -> None:
    jobs = []
    for name, fault, _ in wrong:
        original, shards = pairs([name], 2, "bfloat16")[0]
        damaged = tmp_path / f"{name}-{fault}"
        shutil.copytree(shards.path, damaged)
        assert inject(fault, damaged, original)
        jobs.append((original, open_source(damaged)))
    for (name, fault, place), report in zip(wrong, run_forwards(jobs, QUICK), strict=True):
        assert not report.is_same, (name, fault)
        assert report.first == place, (name, fault, report.verdict)
        assert place in report.verdict


@pytest.mark.parametrize("rank", [0, 1])
@thorough
def test_a_norm_that_is_wrong_on_one_rank_only(rank: int, tmp_path: Path) -> None:
    original, shards = pairs(["llama"], 2)[0]
    damaged = tmp_path / "shards"
    shutil.copytree(shards.path, damaged)
    file = next((damaged / shards.plan.mesh.folder(rank)).glob("*.safetensors"))
    header = open_source(damaged).ranks[rank]
    tensors = load_file(file)
    tensors["model.norm.weight"] *= 1.5
    metadata = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])["__metadata__"]
    save_file({name: tensors[name] for name in header}, file, metadata=metadata)
    report = run_forward(original, open_source(damaged))
    assert report.first == "logits"
    assert {row.name for row in report.layers if not row.is_same} == {"logits"}


def test_a_rank_that_cannot_load_is_one_error(tmp_path: Path) -> None:
    original, shards = pairs(["llama"], 2)[0]
    damaged = tmp_path / "shards"
    shutil.copytree(shards.path, damaged)
    source = open_source(damaged)
    config = damaged / "rank-01-of-02" / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 36', '"intermediate_size": 40'))
    expected = r"rank 1 of 2 failed: .*/rank-01-of-02: 'model.layers.0.mlp.\w+.weight' has shape .*36.* model has .*40"
    with pytest.raises(RankError, match=expected) as error:
        run_forward(original, source)
    assert error.value.rank == 1


@pytest.mark.parametrize("name", ["xlstm", "deberta"])
@thorough
def test_an_original_that_does_not_run_in_its_dtype_is_one_line(name: str) -> None:
    """transformers multiplies float32 by 16 bits there, in the whole model as well; in float32 the shards run."""
    original, shards = pairs([name], 2, "bfloat16")[0]
    with pytest.raises(RankError, match=r"runs the original in float32, but not in bfloat16: .* dtype") as error:
        run_forward(original, shards)
    assert error.value.hint == 'compute_dtype="float32" compares the models in float32'
    assert run_forward(original, shards, ForwardOptions(compute_dtype="float32")).is_same


def test_requests_that_make_no_sense() -> None:
    original, shards = pairs(["llama"], 2)[0]
    with pytest.raises(CheckpointError, match="is split: the forward needs the full checkpoint"):
        run_forward(shards, shards)
    with pytest.raises(ReshardError, match="dtype=int8 is not possible: it is float32, bfloat16 or float16"):
        run_forward(original, shards, ForwardOptions(compute_dtype="int8"))
    with pytest.raises(CheckpointError, match="no tokenizer for a prompt"):
        run_forward(original, shards, ForwardOptions(prompt="hello"))


@thorough
def test_no_more_tokens_than_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoBERTa's table has rows that are no positions. Random tokens are fewer; a prompt is refused."""
    report = run_forward(*pairs(["roberta"], 2)[0], ForwardOptions(batch=1, seq=1000, draws=0))
    assert report.is_same and report.seq == 63
    for model, most in (("gpt2", 36), ("roberta", 63)):
        ids = {"input_ids": torch.ones(1, most + 1)}
        tokenizer = SimpleNamespace(from_pretrained=lambda *_, ids=ids, **__: lambda *_, **__: ids)
        monkeypatch.setattr("transformers.AutoTokenizer", tokenizer)
        with pytest.raises(ReshardError, match=f"it has {most + 1} tokens, and the model positions for {most}"):
            run_forward(*pairs([model], 2)[0], ForwardOptions(prompt="a long text"))


@thorough
def test_an_alarm_near_the_limit_is_looked_at_with_more_draws(tmp_path: Path) -> None:
    """A fault that is as small as the tail of some tokens' rounding stays one."""
    original, shards = pairs(["gpt2"], 2, "bfloat16")[0]
    assert run_forward(original, shards).draws == 7
    damaged = tmp_path / "shards"
    shutil.copytree(shards.path, damaged)
    assert inject("two_heads", damaged, original)
    small = run_forward(original, open_source(damaged))
    assert not small.is_same and small.first == "transformer.h.1.attn.c_proj"
    assert small.draws == 31 and max(row.ratio for row in small.layers) < SURE


# ------------------------------------------------------------------------------------------------------ second opinion


@thorough
def test_transformers_own_tensor_parallelism_agrees() -> None:
    names = ["llama", "qwen3", "phi3"]
    paths = [(original.path, shards.path) for original, shards in pairs(names, 2)]
    ids = torch.arange(60).reshape(2, 30)
    theirs = run_processes(logits_by_transformers, 2, [original for original, _ in paths], ids)
    ours = run_ranks(logits_of_shards, 2, paths, ids)
    for rank in range(2):
        for name, one, other in zip(names, theirs[rank], ours[rank], strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", one_of_each(["llama-classifier", "gemma4", "embedding_gemma2"], kind=len))
def test_a_rank_without_the_row_of_padding_knows_its_token(name: str, tmp_path: Path) -> None:
    """The classes look for it in their inputs; a rank's config.json has null if the row is elsewhere."""
    split(store.checkpoint(name), tmp_path / "out", tp=4)
    assert verify(store.checkpoint(name), tmp_path / "out").verdict == "same"
