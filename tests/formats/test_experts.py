"""Lines for experts one by one, against what quantizers write of fused experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.formats.notation.architecture_files import BUILT_IN, find_architecture, load_architecture
from reshard.formats.notation.axes import parse
from reshard.formats.notation.components import linear, unfused


@pytest.mark.parametrize(
    "template, shape, expected",
    [
        ("e.experts.gate_up_proj", "expert (gate: ff + up: ff) hidden",
         {"e.experts.{expert}.gate_proj.weight": "ff hidden", "e.experts.{expert}.up_proj.weight": "ff hidden"}),
        ("e.experts.gate_up_proj", "expert hidden -> (gate: ff + up: wide)",
         {"e.experts.{expert}.gate_proj.weight": "ff hidden", "e.experts.{expert}.up_proj.weight": "wide hidden"}),
        ("e.experts.gate_up_proj", "expert hidden -> (ff (gate: 1 + up: 1))",
         {"e.experts.{expert}.gate_proj.weight": "ff hidden", "e.experts.{expert}.up_proj.weight": "ff hidden"}),
        ("e.experts.gate_up_proj_bias", "expert (gate: ff + up: ff)",
         {"e.experts.{expert}.gate_proj.bias": "ff", "e.experts.{expert}.up_proj.bias": "ff"}),
        ("e.experts.down_proj", "expert hidden ff", {"e.experts.{expert}.down_proj.weight": "hidden ff"}),
        ("e.experts.down_proj", "expert ff -> hidden", {"e.experts.{expert}.down_proj.weight": "hidden ff"}),
        ("e.experts.down_proj_bias", "expert hidden", {"e.experts.{expert}.down_proj.bias": "hidden"}),
        ("e.shared_experts.up_proj", "shared ff hidden", {"e.shared_experts.{shared}.up_proj.weight": "ff hidden"}),
        # what no quantizer names apart, or what is no expert's
        ("e.experts.gate_up_proj", "expert (ff 2) hidden",
         {"e.experts.{expert}.gate_up_proj.weight": "(ff 2) hidden"}),
        ("e.experts.gate_up_proj", "expert (up: ff + gate: ff) hidden", {}),
        ("e.experts.gate_up_proj", "(gate: ff + up: ff) hidden", {}),
        ("e.experts.gate_up_proj", "...", {}),
        ("e.mlp.down_proj", "expert hidden ff", {}),
        ("e.experts.w2_weight", "expert hidden ff", {}),
    ],
)  # fmt: skip
def test_lines_of_single_experts(template: str, shape: str, expected: dict[str, str]):
    assert {name: str(linear(own)) for name, own in unfused(template, parse(shape)).items()} == expected


def test_every_built_in_architecture_with_fused_experts_has_them_by_name():
    files = sorted(BUILT_IN.glob("*.toml"))
    fused = [
        path for path in files if any(name.endswith("experts.gate_up_proj") for name in load_architecture(path).tensors)
    ]
    assert len(fused) > 15
    for path in fused:
        own = load_architecture(path)
        architecture = find_architecture({"model_type": own.model_types[0]}, Path())
        for template in (name for name in own.tensors if name.endswith(".experts.gate_up_proj")):
            place = template.removesuffix("gate_up_proj")
            for name in ("gate_proj", "up_proj", "down_proj"):
                found = architecture.tensors[f"{place}{{expert}}.{name}.weight"]
                assert found[0].shapes[0].output_dim == 0, f"{path.stem}: {name} is output before input"


def test_a_line_of_an_architectures_own_goes_first():
    own = load_architecture(BUILT_IN / "deepseek_v3.toml")
    built_in = find_architecture({"model_type": "deepseek_v3"}, Path())
    names = [name for name in own.tensors if ".experts.{expert}." in name]
    assert names and all(built_in.tensors[name] == own.tensors[name] for name in names)
