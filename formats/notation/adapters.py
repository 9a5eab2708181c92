"""The rules of an adapter (LoRA), which follow from those of the weights that it changes.

Beside a weight ``out in`` PEFT keeps ``lora_A``, ``r in``, and ``lora_B``, ``out r``: what is added to the weight is
their product. So A is cut with a weight that is cut along its input, B with one that is cut along its output, and
either is the same on every rank otherwise. Source: peft/tuners/lora/layer.py, peft/utils/save_and_load.py of PEFT 0.17.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from formats.documents import Unfit, json_object, mapping, whole
from formats.errors import PlanError, brief
from formats.notation.architecture import Architecture, Rule
from formats.notation.architecture_document import architecture_from_document, to_document
from formats.notation.axes import Shape

PREFIX = "base_model.model."
"""What stands before a module's name in an adapter."""
SETTINGS = "peft_config"
"""The entry of a config that has an adapter's own settings, beside those of the model that it changes."""
_RANK = whole(1, 1 << 20)
_LINES: Mapping[str, str] = {
    "lora_A.weight": "{r} {inner}",
    "lora_B.weight": "{outer} {r}",
    "lora_B.bias": "{outer}",
    "lora_magnitude_vector": "{outer}",
    "lora_magnitude_vector.weight": "{outer}",
    "lora_embedding_A": "{r} {outer}",
    "lora_embedding_B": "{inner} {r}",
}


def adapter_architecture(base: Architecture, settings: Any, where: object) -> Architecture:
    """The architecture of an adapter to a model, by its ``adapter_config.json``.

    A module that is saved whole (``modules_to_save``) keeps the model's own line. Raises PlanError for an adapter that
    is no LoRA.
    """
    try:
        found = json_object(settings, SETTINGS)
        kind = found.get("peft_type")
        if kind != "LORA":
            raise PlanError(
                f"{where}: the adapter is {brief(kind)}; only LORA is read", "merge it into its base model first"
            )
        of_modules = mapping(_RANK)(found.get("rank_pattern") or {}, "rank_pattern")
        ranks = sorted({_RANK(found.get("r"), "r"), *of_modules.values()})
    except Unfit as error:
        raise PlanError(f"{where}: adapter_config.json: {error}") from None
    document = to_document(base)
    lines = {PREFIX + name: rule for name, rule in document["tensors"].items()}
    for name, rules in base.tensors.items():
        module, _, leaf = name.rpartition(".")
        for suffix, line in _LINES.items() if leaf == "weight" and "*" not in name else ():
            entries = [entry for rule in rules if (entry := _rule(rule, line, ranks))]
            if entries:
                lines[f"{PREFIX}{module}.{suffix}"] = entries
    stages = {key if key == "layers" else PREFIX + key: value for key, value in document.get("stages", {}).items()}
    prefixes = [PREFIX + prefix for prefix in base.prefixes]
    made = {**document, "prefixes": prefixes, "tensors": lines, "partial": True}
    return architecture_from_document(made | ({"stages": stages} if stages else {}), base.name, str(where))


def _rule(rule: Rule, line: str, ranks: Sequence[int]) -> dict[str, Any]:
    """The rule of what belongs to a weight, in one shape for each shape of the weight and each rank; {} if none."""
    shapes = dict.fromkeys(shape for weight in rule.shapes for shape in _shapes(weight, line, ranks))
    if not shapes:
        return {}
    return {"shape": [*shapes]} | ({"when": rule.when.text} if rule.when else {})


def _shapes(weight: Shape, line: str, ranks: Sequence[int]) -> Iterator[str]:
    if len(weight.dims) == 2 and weight.output_dim is not None:
        outer, inner = weight.dims[weight.output_dim], weight.dims[1 - weight.output_dim]
        yield from (line.format(r=rank, outer=outer, inner=inner) for rank in ranks)
