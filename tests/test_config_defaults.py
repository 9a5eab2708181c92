"""``formats/config_defaults.json`` against transformers' configuration classes; run as a module, it writes the file.

python -m tests.test_config_defaults
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from formats.notation.architecture import CONFIG_DEFAULTS
from formats.notation.architecture_files import built_in_architectures, find_architecture, load_architecture
from reshard.planning.sizes import AxisSizes


def defaults_of_transformers() -> dict[str, dict[str, Any]]:
    """For each type that may stand in a section: what its class says of the settings that our files ask for."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    decoders = {config.model_type for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING) for config in mapping}
    decoders &= {*built_in_architectures()} | {kind for kind in CONFIG_MAPPING if kind.endswith("_text")}
    architectures = [load_architecture(path) for path in {*built_in_architectures().values()}]
    asked = {
        name.split(".")[0]
        for architecture in architectures
        if architecture.sections
        for expression in (
            *architecture.sizes.values(),
            *architecture.config.values(),
            *(rule.when for rules in architecture.tensors.values() for rule in rules if rule.when is not None),
        )
        for name in expression.names
    }
    found = {}
    for model_type in sorted(decoders):
        cls = CONFIG_MAPPING[model_type]
        two_names = {*cls.attribute_map.keys(), *cls.attribute_map.values()}  # the file may say it by the other
        wanted = (f for f in dataclasses.fields(cls) if f.name in asked - two_names)
        values = {f.name: f.default for f in wanted if _is_plain(f.default)}
        values.pop("model_type", None)
        if values:
            found[model_type] = values
    return found


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def _text(defaults: dict[str, dict[str, Any]]) -> str:
    lines = (f"  {json.dumps(name)}: {json.dumps(values, sort_keys=True)}" for name, values in defaults.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def test_the_file_says_what_transformers_says():
    assert CONFIG_DEFAULTS.read_text() == _text(defaults_of_transformers()), "run python -m tests.test_config_defaults"


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


if __name__ == "__main__":
    CONFIG_DEFAULTS.write_text(_text(defaults_of_transformers()))
