"""Writes ``formats/config_defaults.json`` from transformers' configuration classes.

python -m tools.config_defaults
"""

from __future__ import annotations

import dataclasses
from typing import Any

from reshard.formats.notation.architecture_files import built_in_architectures, load_architecture
from reshard.formats.notation.tables import CONFIG_DEFAULTS
from tools.tables import text_of


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
        wanted = [f for f in dataclasses.fields(cls) if f.name in asked - two_names]
        values = {f.name: f.default for f in wanted if _is_plain(f.default)}
        values |= {"tie_word_embeddings": True} if getattr(cls, "tie_word_embeddings", None) is True else {}
        if not cls.sub_configs and _is_tied_always(cls):
            values["shares_tables"] = True
        values.pop("model_type", None)
        if values:
            found[model_type] = values
    return found


def _is_tied_always(cls: Any) -> bool:
    """Whether a class takes its tables as tied even if it is told that they are not."""
    try:
        return cls(tie_word_embeddings=False).tie_word_embeddings is True
    except Exception:  # it demands other settings
        return False


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def table() -> str:
    """The file's text: a line for each model type."""
    import transformers

    return text_of({"types": defaults_of_transformers()}, {"transformers": transformers.__version__})


if __name__ == "__main__":
    CONFIG_DEFAULTS.write_text(table(), encoding="utf-8")
