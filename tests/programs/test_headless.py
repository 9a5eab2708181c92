"""A class of transformers that has no head for tokens: no program's format gets one that is made of the embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto as auto

import reshard
from reshard.formats.notation.architecture import is_headless
from tests.marks import one_of_each

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


def test_the_name_of_a_class_says_whether_it_has_a_head() -> None:
    heads, others = classes(_WITH), classes(_WITHOUT)
    assert len(heads) > 300 and len(others) > 300
    assert {name for name in heads if is_headless({"architectures": [name]})} <= {
        "SpeechEncoderDecoderModel", "VisionEncoderDecoderModel",
    }  # fmt: skip
    assert not {name for name in others - heads if not is_headless({"architectures": [name]})}
    assert not is_headless({}) and not is_headless({"architectures": []}) and not is_headless({"architectures": "x"})


CLASSES = [
    "Qwen2Model", "Qwen2ForSequenceClassification", "Qwen2ForTokenClassification", "Qwen2ForQuestionAnswering",
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
