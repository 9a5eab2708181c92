"""What transformers' class always makes of a model type is missed if it is gone from all layers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from reshard.cli.commands import main
from reshard.formats.errors import CheckpointError
from reshard.formats.notation.architecture_files import (
    _built_in,
    built_in_architectures,
    built_in_file,
    find_architecture,
)
from reshard.model.binding import bind
from reshard.model.model import AxisSizes, FullTensor, Model
from reshard.source.completeness import REQUIRED, KnownLines, Present, check_complete, known_lines, missing
from reshard.source.opening import open_source
from tests import zoo
from tests.marks import one_of_each, thorough
from tests.support import LLAMA, Tensor, command, llama_tensors, ok, write_folder
from tools.required import as_read, built, saved, table_of, written

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


# of each model, what may be gone from all layers unseen: biases that come with a setting, SigLIP's pooling head
UNSEEN = {
    **dict.fromkeys(("llama", "qwen3", "olmo2", "mixtral", "qwen3_moe", "deepseek_v3", "gpt2", "bloom", "bert"), "-"),
    "qwen3_next": r".*self_attn\.[qkvo]_proj\.bias", "mamba2": r".*(conv1d|_proj)\.bias", "bart": "final_logits_bias",
    "gemma3": r"vision_tower\.head", "whisper": "-", "t5": "-",
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
    source = write_folder(tmp_path / "model", LLAMA, llama(gone))
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(source), "--tp", "2"])
    assert stop.value.code == 2
    assert f"tensor '{first}' is missing, and {more} more, by the rules 'llama'" in capsys.readouterr().err


def qwen3() -> tuple[Config, list[Tensor]]:
    norms = [(f"model.layers.{i}.self_attn.{n}_norm.weight", "BF16", (6,)) for i in range(3) for n in "qk"]
    return LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, [*llama_tensors(), *norms]


def test_a_norm_that_one_type_of_a_file_has_and_another_has_not(tmp_path: Path):
    config, tensors = qwen3()
    open_source(write_folder(tmp_path / "whole", config, tensors))
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.q_norm.weight' is missing, and 2 more"):
        open_source(write_folder(tmp_path / "part", config, [t for t in tensors if "q_norm" not in t[0]]))


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
    open_source(write_folder(tmp_path / "whole", config, tensors))
    part = [tensor for tensor in tensors if ".self_attn.v_proj" not in tensor[0]]
    with pytest.raises(CheckpointError, match=r"'model.layers.0.self_attn.v_proj.weight' is missing, and 2 more"):
        open_source(write_folder(tmp_path / "part", config, part))


# ----------------------------------------------------------------------------------------------------- towers

# of models with towers: a pattern of all of them, the module that is named, a projector, and a weight of one block
TOWERS = {
    "qwen2_5_vl": ("visual", "visual", r"visual\.merger", r"visual\.blocks\.1\.attn\.proj\.weight"),
    "gemma3": ("vision_tower|projector", "multi_modal_projector", "projector", r"layers\.1\.mlp\.fc2\.weight"),
    "llava": ("vision_tower|projector", "multi_modal_projector", "projector", r"layers\.0\.mlp\.fc1\.bias"),
    "idefics3": ("vision_model|connector", "model.connector", "connector", r"layers\.1\.self_attn\.k_proj\.weight"),
    "qwen3_vl": ("visual", "visual", r"visual\.merger\.linear", r"visual\.blocks\.0\.norm2\.bias"),
    "qwen2_audio": ("audio_tower|projector", "audio_tower", "projector", r"audio_tower\.layers\.1\.fc2\.weight"),
    "granite_speech": ("encoder|projector", "encoder", "projector", r"encoder\.layers\.1\.ff1\.up_proj\.weight"),
    "mllama": (
        "vision_model|projector",
        "projector",
        "projector",
        r"vision_model\.transformer\.layers\.1\.mlp\.fc1\.bias",
    ),
}


def damaged(name: str, pattern: str) -> list[FullTensor]:
    kept = [tensor for tensor in of_zoo(name).tensors if not re.search(pattern, tensor.name)]
    assert kept and len(kept) < len(of_zoo(name).tensors)
    return kept


@pytest.mark.parametrize("name", one_of_each(TOWERS, lambda name: name.startswith("q")))
def test_a_tower_is_there_as_a_whole(name: str):
    """Its class and its section in config.json demand it: all of it, each of its modules, each line of each block."""
    config, (tower, module, projector, weight) = of_zoo(name).config, TOWERS[name]
    blocks = re.sub(r"(\\\.[01]\\\.).*", r"\1", weight)
    for pattern in (tower, projector, weight, blocks):
        assert any(re.search(pattern, gone) for gone in missing(read(config, damaged(name, pattern)))), pattern
    with pytest.raises(
        CheckpointError,
        match=f"no tensor of '[a-z._]*{module}' is there, which the class '{config['architectures'][0]}'",
    ):
        check_complete(read(config, damaged(name, tower)), Path())


@pytest.mark.parametrize("name", one_of_each(TOWERS, lambda name: name.startswith("q")))
def test_a_language_model_alone_says_so(name: str):
    text = damaged(name, TOWERS[name][0])
    model = read({**of_zoo(name).config, "architectures": ["SomeForCausalLM"]}, text)
    assert list(missing(model)) == [] and any(
        re.search(TOWERS[name][0], tower) for tower in check_complete(model, Path())
    )
    assert not check_complete(read(of_zoo(name).config, of_zoo(name).tensors), Path())


def test_inspect_and_split_say_what_a_language_model_is_without(tmp_path: Path):
    config = of_zoo("qwen2_5_vl").config
    tensors = [(tensor.name, tensor.dtype, tensor.shape or ()) for tensor in damaged("qwen2_5_vl", "visual")]
    source = write_folder(tmp_path / "model", {**config, "architectures": ["Qwen2_5_VLForCausalLM"]}, tensors)
    assert "without     model.visual: it is the language model alone" in str(command("inspect", source).stdout)
    assert "language model alone, without model.visual" in ok("split", source, tmp_path / "out", "--tp", "2").stdout
    whole = write_folder(tmp_path / "whole", config, tensors)
    for arguments in (("inspect", whole), ("split", whole, tmp_path / "vllm", "--tp", "2", "--as", "vllm")):
        done = command(*arguments)
        assert done.returncode and "no tensor of 'model.visual' is there" in done.stdout + done.stderr
    assert not (tmp_path / "vllm").exists()


def test_a_tower_of_another_type_has_lines_of_its_own():
    """LLaVA may have SigLIP's tower in the place of CLIP's: then only its module is asked for."""
    config = of_zoo("llava").config
    other = {**config, "vision_config": {**config["vision_config"], "model_type": "siglip_vision_model"}}
    assert list(missing(read(other, damaged("llava", "class_embedding|pre_layrnorm")))) == []
    assert list(missing(read(config, damaged("llava", "class_embedding"))))
    with pytest.raises(CheckpointError, match="no tensor of 'vision_tower' is there"):
        check_complete(read(other, damaged("llava", "vision_tower")), Path())


@thorough
@pytest.mark.parametrize("model_type", sorted({entry.model_type for entry in zoo.ZOO.values()}))
def test_nothing_is_missing_from_what_transformers_makes(model_type: str):
    """Of each class, with each setting changed; but with no layers at all, or all of one kind."""
    for build in as_read(saved(model_type)):
        if build.saved.cls == "Inkling2Model":  # saved with the names of its modules, which no table reads
            continue
        config = {**build.model.config, "architectures": [build.saved.cls]}
        value = build.saved.changed[1]
        if isinstance(value, bool) or (value != 0 and not isinstance(value, list)):
            assert list(missing(read(config, build.saved.tensors))) == [], build.saved.changed


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


# ------------------------------------------------------------------------------------------------- a bias


# settings with which a module is left out, its bias too
LEFT_OUT = {
    "opt-projected": ({"do_layer_norm_before": False}, "model.decoder.final_layer_norm"),
    "gemma4_text": ({"attention_bias": True}, "model.layers.3.self_attn.v_proj"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_bias_is_optional_with_its_weight(name: str):
    """OPT 350M has projections, and no norm at its end."""
    settings, module = LEFT_OUT[name]
    kind, cls, given = zoo.ZOO[name].build.args
    (found,) = written(built(kind, cls, {**given, **settings}))
    assert not any(tensor.name.startswith(module) for tensor in found.tensors)
    assert list(missing(read(found.config, found.tensors))) == []


def test_no_line_demands_a_bias_without_its_weight():
    """Of all lines, whose weight may be left out: a model of the type that has neither lacks nothing."""
    tried = 0
    for file in sorted({*built_in_architectures().values()}):
        rules = _built_in(file)
        for line in (line for line in rules.tensors if line.endswith(".bias")):
            weights = rules.tensors.get(line.removesuffix("bias") + "weight", ())
            if any(rule.optional is not None and rule.optional.text == "True" for rule in weights):
                model = Model(rules, {}, AxisSizes(rules, {}, {}), (), ())
                assert not Present(model).needed(line, (0,) * line.count("{")), line
                tried += 1
    assert tried > 9


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
        assert all(map(_built_in(file).covers, known.all)), kind
    assert known_lines("none-such") is None
