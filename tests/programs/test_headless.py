"""A class of transformers that has no head for tokens: no program's format gets one that is made of the embedding."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto as auto

import reshard
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.notation.format_file import format_of
from reshard.formats.notation.heads import TOKENS, head_of, is_headless
from reshard.formats.notation.tables import HEADS
from tests.marks import one_of_each, thorough
from tests.support import LLAMA, llama_tensors, write_checkpoint, write_file
from tools import engine_names
from tools.heads import table

_WITH = ("CAUSAL_LM", "SEQ_TO_SEQ", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING", "WITH_LM_HEAD", "MULTIMODAL_LM")
_WITHOUT = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "NEXT_SENTENCE")


def classes(words: tuple[str, ...]) -> set[str]:
    """The classes in those of transformers' tables whose name has one of these words."""
    found: set[str] = set()
    for name in dir(auto):
        if name.endswith("_MAPPING_NAMES") and any(word in name for word in words):
            for value in getattr(auto, name).values():
                found |= {value} if isinstance(value, str) else {*value}
    return found


@thorough
def test_the_table_says_what_transformers_says() -> None:
    assert HEADS.read_text() == table(), "run make docs"


def test_the_table_says_whether_a_class_has_a_head() -> None:
    heads, others = classes(_WITH), classes(_WITHOUT)
    assert len(heads) > 300 and len(others) > 300
    assert not {name for name in heads if is_headless({"architectures": [name]})}
    assert not {name for name in others - heads if not is_headless({"architectures": [name]})}
    assert not is_headless({}) and not is_headless({"architectures": []}) and not is_headless({"architectures": "x"})


HEADED_CLASSES = {
    TOKENS: ["LlamaForCausalLM", "MarianMTModel", "GPT2DoubleHeadsModel", "BertForMaskedLM", "StrangeLMHeadModel"],
    "none": ["BertModel", "StrangeModel"],
    "score": ["LlamaForSequenceClassification", "StrangeForSequenceClassification"],
    "classifier": ["BertForSequenceClassification"],
    "classification_head": ["BartForSequenceClassification"],
    "qa_outputs": ["LlamaForQuestionAnswering"],
    "v_head": ["InternLM2ForRewardModel"],
    None: ["Strange", ""],
}


@pytest.mark.parametrize(("name", "head"), [(name, head) for head, names in HEADED_CLASSES.items() for name in names])
def test_the_head_of_a_class(name: str, head: str | None) -> None:
    assert head_of({"architectures": [name]}) == head


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a small Llama of a class, of which nothing is tied, with more tensors or without one."""

    def make(cls: str, more: Mapping[str, tuple[int, ...]] = {}, without: str | None = None) -> Path:
        folder = write_checkpoint(tmp_path_factory.mktemp("model") / "model", config=LLAMA | {"architectures": [cls]})
        tensors = [tensor for tensor in llama_tensors() if tensor[0] != without]
        write_file(folder / "model.safetensors", [*tensors, *((name, "BF16", shape) for name, shape in more.items())])
        return folder

    return make


def test_a_class_that_a_program_does_not_have_is_named(llama: Callable[..., Path], tmp_path: Path) -> None:
    spans = llama("LlamaForQuestionAnswering", {"qa_outputs.weight": (2, 20)}, without="lm_head.weight")
    with pytest.raises(PlanError, match=r"'LlamaForQuestionAnswering' has no place in .* 'vllm': .* has no class"):
        reshard.split(spans, tmp_path / "out", tp=1, format="vllm")
    base = llama("LlamaModel", without="lm_head.weight")
    with pytest.raises(
        PlanError, match=r"'LlamaModel' has no place in the format 'sglang': .* a head for tokens alone"
    ):
        reshard.split(base, tmp_path / "out", tp=1, format="sglang")


@pytest.mark.parametrize("format", ["vllm", "sglang"])
def test_a_value_head_is_refused_by_name(format: str, llama: Callable[..., Path], tmp_path: Path) -> None:
    model = llama("LlamaForCausalLM", {"v_head.summary.weight": (1, 20), "v_head.summary.bias": (1,)})
    with pytest.raises(PlanError, match=r"tensor 'v_head\.summary\.\w+' has no place in the format"):
        reshard.split(model, tmp_path / "out", tp=1, format=format)


def test_a_missing_head_is_told_from_one_of_another_class(llama: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is missing \(the class 'LlamaForCausalLM' has it"):
        reshard.plan(llama("LlamaForCausalLM", without="lm_head.weight"))
    reshard.plan(llama("LlamaForSequenceClassification", without="lm_head.weight"))


def test_what_vllm_lacks_is_by_its_registry() -> None:
    registry = json.loads(engine_names.REGISTRY.read_text())["classes"]
    assert format_of("vllm").types.lacking == {*engine_names.lacking(engine_names.known_classes(), registry)}


CLASSES = [
    "Qwen2Model", "Qwen2ForSequenceClassification", "Qwen2ForTokenClassification",
    "LlamaModel", "LlamaForSequenceClassification", "Qwen3Model", "GPT2Model", "GPT2ForSequenceClassification",
]  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", one_of_each(CLASSES, lambda name: name[:4] == "Qwen"))
def test_vllm_gets_the_embedding_of_a_class_without_a_head(name: str, tied: bool, tmp_path: Path) -> None:
    import transformers

    cls = getattr(transformers, name)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = cls.config_class(**sizes, num_key_value_heads=2, vocab_size=96, pad_token_id=0, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = cls(config)
    model.save_pretrained(tmp_path / "model")
    reshard.split(tmp_path / "model", tmp_path / "out", tp=1, format="vllm")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    stored = load_file(file)
    assert not any("lm_head" in each for each in stored)
    embedding = next(tensor for each, tensor in stored.items() if each.endswith(("embed_tokens.weight", "wte.weight")))
    assert torch.equal(embedding[:96], model.get_input_embeddings().weight)  # vLLM pads it to 128 rows
    reshard.merge(tmp_path / "out", tmp_path / "merged")
    assert (
        load_file(tmp_path / "merged" / "model.safetensors").keys()
        == load_file(tmp_path / "model" / "model.safetensors").keys()
    )
