"""What transformers' configuration classes say where a config.json is silent: is the file up to date, is it used?"""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.tables import CONFIG_DEFAULTS
from reshard.model.model import AxisSizes
from tests.marks import thorough
from tools.config_defaults import table


@thorough
def test_the_file_says_what_transformers_says():
    assert CONFIG_DEFAULTS.read_text() == table(), "run make docs"


# of llava-hf/llava-1.5-7b-hf, llava-hf/llava-v1.6-mistral-7b-hf and google/gemma-3-4b-it, as they were published
PUBLISHED = [
    ("llava", {"model_type": "llama", "vocab_size": 32064}, {"kv": 32, "group": 1, "head": 128, "ff": 11008}),
    (
        "llava_next",
        {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8},
        {"kv": 8, "group": 4, "head": 128, "hidden": 4096},
    ),
    (
        "gemma3",
        {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        {"kv": 4, "group": 2, "head": 256, "vocab": 262208},
    ),
]


@pytest.mark.parametrize(("model_type", "section", "expected"), PUBLISHED)
def test_a_section_is_published_without_what_is_its_types_default(model_type, section, expected):
    config = {"model_type": model_type, "text_config": section}
    sizes = AxisSizes(find_architecture(config, Path()), config, {}).of({})
    assert {axis: sizes[axis] for axis in expected} == expected


def test_what_the_file_says_goes_before_a_default():
    section = {"model_type": "mistral", "num_key_value_heads": None, "num_attention_heads": 12, "hidden_size": 24}
    config = {"model_type": "llava", "text_config": section}
    sizes = AxisSizes(find_architecture(config, Path()), config, {}).of({})
    assert (sizes["kv"], sizes["group"], sizes["head"]) == (12, 1, 2)


@pytest.mark.parametrize("model_type", [None, ["mistral"], "no such type"])
def test_a_section_of_an_unknown_type_has_no_defaults(model_type):
    config = {"model_type": "llava", "text_config": {"model_type": model_type, "hidden_size": 24}}
    assert "kv" not in AxisSizes(find_architecture(config, Path()), config, {}).of({})


def test_a_whole_config_has_no_defaults():
    config = {"model_type": "llama", "hidden_size": 64}
    assert "kv" not in AxisSizes(find_architecture(config, Path()), config, {}).of({})
