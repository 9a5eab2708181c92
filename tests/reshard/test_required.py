"""What transformers' class always makes of a model type is missed if it is gone from all layers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reshard.cli.commands import main
from reshard.formats.errors import CheckpointError
from reshard.formats.notation.architecture_files import _built_in, built_in_file, find_architecture
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model
from reshard.source.completeness import REQUIRED, KnownLines, known_lines, missing
from reshard.source.opening import open_source
from tests import zoo
from tests.support import LLAMA, Tensor, llama_tensors, write_file
from tools.required import as_read, saved, table_of, written

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the zoo without its numbers."""

    config: Config
    tensors: tuple[FullTensor, ...]


@cache
def of_zoo(name: str) -> Saved:
    import torch

    with torch.device("meta"):
        model = zoo.ZOO[name].build()
    (found,) = written(model)
    return Saved({**found.config, "architectures": [type(model).__name__]}, found.tensors)


def read(config: Config, tensors: tuple[FullTensor, ...] | list[FullTensor]) -> Model:
    return bind(find_architecture(config, Path()), config, tensors)


def without(model: Model, template: str) -> Model:
    kept = [tensor for tensor in model.tensors if tensor.template != template]
    return replace(model, tensors=tuple(kept), kinds=tuple(kind for kind in model.kinds if kind.template != template))


# of each model, what may be gone from all layers unseen: a tower, and biases that come with a setting
UNSEEN = {
    **dict.fromkeys(("llama", "qwen3", "olmo2", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "bloom", "bert"), "-"),
    "qwen3_next": r".*self_attn\.[qkvo]_proj\.bias", "mamba2": r".*(conv1d|_proj)\.bias", "bart": "final_logits_bias",
    "gemma3": "vision_tower", "whisper": "-", "t5": "-",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_a_line_that_is_gone_from_all_layers_is_missed(name: str):
    source = of_zoo(name)
    model = read(source.config, source.tensors)
    assert list(missing(model)) == []
    unseen = [
        line for line in model.used_templates if not line.endswith("*") and not list(missing(without(model, line)))
    ]
    assert [line for line in unseen if not re.fullmatch(f"({UNSEEN[name]}).*", line)] == []


# ------------------------------------------------------------------------------------------------------ in one's hand


def checkpoint(folder: Path, config: Config, tensors: list[Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)
    return folder


def llama(pattern: str) -> list[Tensor]:
    return [tensor for tensor in llama_tensors() if not re.search(pattern, tensor[0])]


@pytest.mark.parametrize(
    ("gone", "first", "more"),
    [
        ("input_layernorm", "model.layers.0.input_layernorm.weight", 2),
        ("self_attn", "model.layers.0.self_attn.k_proj.weight", 11),
        ("mlp", "model.layers.0.mlp.down_proj.weight", 8),
    ],
)
def test_the_error_names_the_first_and_says_how_many_more(gone: str, first: str, more: int, tmp_path: Path, capsys):
    source = checkpoint(tmp_path / "model", LLAMA, llama(gone))
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(source), "--tp", "2"])
    assert stop.value.code == 2
    assert f"tensor '{first}' is missing, and {more} more, by the rules 'llama'" in capsys.readouterr().err


def qwen3() -> tuple[Config, list[Tensor]]:
    norms = [(f"model.layers.{i}.self_attn.{n}_norm.weight", "BF16", (6,)) for i in range(3) for n in "qk"]
    return LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, [*llama_tensors(), *norms]


def test_a_norm_that_one_type_of_a_file_has_and_another_has_not(tmp_path: Path):
    config, tensors = qwen3()
    open_source(checkpoint(tmp_path / "whole", config, tensors))
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.q_norm.weight' is missing, and 2 more"):
        open_source(checkpoint(tmp_path / "part", config, [t for t in tensors if "q_norm" not in t[0]]))


# -------------------------------------------------------------------------------------------- what is not asked for


def packed(tensors: list[Tensor]) -> list[Tensor]:
    """compressed-tensors: 4 bits, eight to an integer, a scale for each row."""
    found: list[Tensor] = []
    for name, dtype, shape in tensors:
        base = name.removesuffix(".weight")
        if "_proj" in name:
            found += [
                (f"{base}.weight_packed", "I32", (shape[0], shape[1] // 8)),
                (f"{base}.weight_scale", "BF16", (shape[0], 1)),
                (f"{base}.weight_shape", "I64", (2,)),
            ]
        else:
            found.append((name, dtype, shape))
    return found


PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
    },
}  # fmt: skip


def test_a_packed_weight_stands_for_the_weight(tmp_path: Path):
    config = LLAMA | {"hidden_size": 16, "num_attention_heads": 4, "head_dim": 8, "quantization_config": PACKED}
    tensors = packed(llama_tensors(config))
    open_source(checkpoint(tmp_path / "whole", config, tensors))
    part = [tensor for tensor in tensors if ".self_attn.v_proj" not in tensor[0]]
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.v_proj.weight' is missing, and 2 more"):
        open_source(checkpoint(tmp_path / "part", config, part))


def of_gemma3(keep: Callable[[str], bool]) -> list[FullTensor]:
    return [tensor for tensor in of_zoo("gemma3").tensors if keep(tensor.name)]


def test_a_text_only_copy_lacks_all_of_the_tower():
    text = of_gemma3(lambda name: "vision_tower" not in name and "projector" not in name)
    assert len(text) < len(of_zoo("gemma3").tensors)
    assert list(missing(read(of_zoo("gemma3").config, text))) == []
    part = of_gemma3(lambda name: "mm_soft_emb_norm" not in name)
    assert list(missing(read(of_zoo("gemma3").config, part))) == ["multi_modal_projector.mm_soft_emb_norm.weight"]


MOE = KnownLines(
    {
        "layers.{layer}": ("layers.{layer}.norm.weight", "layers.{layer}.mlp.gate.weight"),
        "layers.{layer}.mlp.experts": ("layers.{layer}.mlp.experts.down_proj",),
    },
    frozenset({
        "layers.{layer}.norm.weight", "layers.{layer}.mlp.gate.weight", "layers.{layer}.mlp.experts.down_proj",
        "layers.{layer}.mlp.gate_proj.weight",
    }),
)  # fmt: skip


@pytest.mark.parametrize(
    ("there", "lacking"),
    [
        ({"norm.weight", "mlp.gate.weight", "mlp.experts.down_proj"}, []),
        ({"norm.weight", "mlp.experts.down_proj"}, ["mlp.gate.weight"]),
        ({"norm.weight", "mlp.gate_proj.weight"}, ["mlp.gate.weight"]),
        # experts by name: the module `experts` is spelled in another way, and the rest of the layer is not
        ({"norm.weight", "mlp.experts.{expert}.down_proj.weight"}, ["mlp.gate.weight"]),
        ({"mlp.gate.weight", "mlp.experts.{expert}.down_proj.weight"}, ["norm.weight"]),
        # a router of another name: the module `mlp`
        ({"norm.weight", "mlp.router.weight"}, []),
        ({"mlp.router.weight"}, ["norm.weight"]),
        # another name for a module of the layer: all of the layer
        ({"ffn.gate.weight"}, []),
        # a bias that a quantizer wrote for each matrix is no other spelling
        ({"norm.weight", "mlp.gate.bias"}, ["mlp.gate.weight"]),
    ],
)
def test_what_is_spelled_in_another_way_is_not_judged(there: set[str], lacking: list[str]):
    stack = "layers.{layer}"
    found = MOE.lacking(stack, {f"{stack}.{name}" for name in there})
    assert sorted(found) == [f"{stack}.{name}" for name in lacking]


# ------------------------------------------------------------------------------------------------------- the file


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2"])
def test_the_file_says_what_transformers_says(model_type: str):
    known = known_lines(model_type)
    table = table_of(list(as_read(saved(model_type))))
    assert known is not None
    assert {module: list(lines) for module, lines in known.always.items()} == table["always"], "run make docs"
    assert known.all == {*table["also"], *(line for lines in table["always"].values() for line in lines)}


def test_each_line_of_the_file_is_a_line_of_the_rules():
    for kind in json.loads(REQUIRED.read_text())["types"]:
        known, file = known_lines(kind), built_in_file({"model_type": kind}) or built_in_file({"architectures": [kind]})
        assert known is not None and file is not None
        assert not known.all - _built_in(file).tensors.keys(), kind
    assert known_lines("none-such") is None
