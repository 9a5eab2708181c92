"""The shapes of what belongs to a quantized weight, against those of published checkpoints."""

from __future__ import annotations

import itertools

import pytest

from reshard.formats.errors import PlanError
from reshard.formats.notation.axes import parse
from reshard.formats.quantization.companions import Scheme, shape_of, stated_shape
from reshard.formats.quantization.methods import block_size, quantization_settings, scheme_of

SIZES = {"out": 4096, "in": 2048, "e": 8, "groups_in": 16}


def shape(name: str, settings: dict, dtype: str, found: tuple[int, ...], weight: str = "out in") -> str:
    belonging = scheme_of({"quantization_config": settings}).companion(name, dtype)
    assert belonging is not None
    rule = shape_of(belonging.patterns, parse(weight), found)
    assert rule is not None, belonging
    assert rule.sizes(SIZES) == found
    return f"{belonging.weight}: {rule}"


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def packed(strategy: str, layout: str = "pack-quantized", **weights) -> dict:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": strategy, **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


NV = packed("tensor_group", "nvfp4-pack-quantized", type="float", group_size=16)


@pytest.mark.parametrize(
    "name, settings, dtype, found, expected",
    [
        ("p.qweight", GPTQ, "I32", (256, 4096), "p.weight: in/8 -> out"),
        ("p.qzeros", GPTQ, "I32", (16, 512), "p.weight: in/128 -> out/8"),
        ("p.scales", GPTQ, "F16", (16, 4096), "p.weight: in/128 -> out"),
        ("p.g_idx", GPTQ, "I32", (2048,), "p.weight: in"),
        ("p.scales", GPTQ | {"desc_act": True}, "F16", (16, 4096), "p.weight: groups_in -> out"),
        ("p.scales", GPTQ | {"group_size": -1, "desc_act": True}, "F16", (1, 4096), "p.weight: 1 -> out"),
        ("p.scales", GPTQ | {"dynamic": {"-:x": {}, "+:p": {"group_size": 64}}}, "F16", (32, 4096),
         "p.weight: in/64 -> out"),
        ("p.qweight", GPTQ | {"bits": 3}, "I32", (192, 4096), "p.weight: in*3/32 -> out"),
        ("p.qzeros", GPTQ | {"bits": 3}, "I32", (16, 384), "p.weight: in/128 -> out*3/32"),
        ("p.qweight", {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "I32", (2048, 512),
         "p.weight: in -> out/8"),
        ("p.bias", GPTQ, "F16", (4096,), "p.weight: out"),
        ("p.weight_scale_inv", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "U8", (4096, 64),
         "p.weight: out in/32"),
        ("p.scale", FP8, "F8_E8M0", (32, 16), "p.weight: out/128 in/128"),
        ("p.weight", FP8, "I8", (4096, 1024), "p.weight: out in/2"),
        ("p.weight", FP8 | {"store_dtype": "mxfp4"}, "U8", (4096, 1024), "p.weight: out in/2"),
        ("p.qweight", AWQ, "I32", (2048, 512), "p.weight: in -> out/8"),
        ("p.qzeros", AWQ, "I32", (16, 512), "p.weight: in/128 -> out/8"),
        # Kimi K2 Thinking: 4 bits in groups of 32
        ("p.weight_packed", packed("group", group_size=32), "I32", (4096, 256), "p.weight: out in/8"),
        ("p.weight_scale", packed("group", group_size=32), "BF16", (4096, 64), "p.weight: out in/32"),
        ("p.weight_shape", packed("group", group_size=32), "I32", (2,), "p.weight: 2"),
        ("p.weight_zero_point", packed("group", group_size=128), "I32", (512, 16), "p.weight: out/8 in/128"),
        ("p.weight_zero_point", packed("channel", "int-quantized", num_bits=8), "I8", (4096, 1), "p.weight: out 1"),
        ("p.weight_scale", packed("group", group_size=128, actorder="group"), "F16", (4096, 16),
         "p.weight: out groups_in"),
        ("p.weight_scale", packed("tensor", "float-quantized", type="float", num_bits=8), "F32", (1,), "p.weight: 1"),
        ("p.weight_scale", packed("block", "float-quantized", type="float", num_bits=8, block_structure=[128, 128]),
         "F32", (32, 16), "p.weight: out/128 in/128"),
        ("p.weight_packed", NV, "U8", (4096, 1024),
         "p.weight: out in/2"),
        ("p.weight_scale", NV, "F8_E4M3", (4096, 128),
         "p.weight: out in/16"),
        ("p.weight_global_scale", NV, "F32", (1,), "p.weight: 1"),
        ("p.input_global_scale", NV, "F32", (1,), "p.weight: 1"),
        ("l.self_attn.k_scale", packed("channel"), "BF16", (1,), "l.self_attn: 1"),
        # DeepSeek V3, Qwen 3, MiniMax M2
        ("p.weight_scale_inv", FP8, "F32", (32, 16), "p.weight: out/128 in/128"),
        ("p.weight_scale_inv", {"quant_method": "fp8"}, "F32", (), "p.weight: "),
        ("p.weight_scale", {"quant_method": "fbgemm_fp8"}, "F32", (4096, 1), "p.weight: out 1"),
        ("p.weight", NVFP4, "U8", (4096, 1024), "p.weight: out in/2"),
        ("p.weight_scale", NVFP4, "F8_E4M3", (4096, 128), "p.weight: out in/16"),
        ("p.weight_scale_2", NVFP4, "F32", (), "p.weight: "),
        ("p.input_scale", NVFP4, "F32", (), "p.weight: "),
        ("p.k_scale", NVFP4, "F32", (), "p: "),
        ("p.weight_scale", {"quant_library": "modelopt", "quant_algo": "FP8"}, "F32", (), "p.weight: "),
        ("p.weight_scale", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PB_WO"}}, "F32",
         (32, 1, 16, 1), "p.weight: out/128 1 in/128 1"),
        ("p.weight_scale", {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
                            "quantized_layers": {"p": {"quant_algo": "W4A8_AWQ", "group_size": 128}}}, "F32",
         (4096, 16),
         "p.weight: out in/128"),
        # unsloth's "-bnb-4bit" checkpoints
        ("p.weight", BNB, "U8", (4194304, 1), "p.weight: (out in)/2 1"),
        ("p.weight.absmax", BNB, "F32", (131072,), "p.weight: (out in)/64"),
        ("p.weight.absmax", BNB, "U8", (131072,), "p.weight: (out in)/64"),
        ("p.weight.nested_absmax", BNB, "F32", (512,), "p.weight: (out in)/16384"),
        ("p.weight.quant_map", BNB, "F32", (16,), "p.weight: 16"),
        ("p.weight.nested_quant_map", BNB, "F32", (256,), "p.weight: 256"),
        ("p.weight.quant_state.bitsandbytes__nf4", BNB, "U8", (141,), "p.weight: 141"),
        ("p.SCB", {"quant_method": "bitsandbytes"}, "F32", (4096,), "p.weight: out"),
        # what is not said: the size of blocks, of groups
        ("p.weight_scale_inv", {"quant_method": "fp8"}, "F32", (32, 16), "p.weight: out/128 in/128"),
        ("p.weight_scale", FP8, "F32", (32, 16), "p.weight: out/128 in/128"),
        ("p.weight_scale", {"quant_method": "fp8"}, "F32", (4096,), "p.weight: out"),
        ("p.weight_scale", packed("block", "float-quantized", type="float", num_bits=8), "F32", (32, 16),
         "p.weight: out/128 in/128"),
        ("p.weight_scale", packed("", group_size=128), "BF16", (4096, 16), "p.weight: out in/128"),
        ("p.weight_scale", packed("", group_size=-1), "BF16", (4096, 1), "p.weight: out 1"),
        ("p.weight_scale", {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "F32", (4096, 16),
         "p.weight: out in/128"),
        ("p.weight_scale", {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "U8", (4096, 64),
         "p.weight: out in/32"),
        ("p.weight_scale", {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "F8_E4M3", (4096, 64),
         "p.weight: out in/32"),
        ("p.weight_scale", {"quant_method": "quark"}, "U8", (4096, 64), "p.weight: out in/32"),
        ("p.weight_scale", {"quant_method": "quark"}, "F32", (4096,), "p.weight: out"),
        ("p.weight_scale", {"quant_method": "quark",
                            "global_quant_config": {"weight": {"qscheme": "per_group", "group_size": 64}}}, "F32",
         (4096, 32), "p.weight: out in/64"),
        ("p.scales", {"quant_method": "gptq", "bits": 4}, "F16", (16, 4096), "p.weight: in/128 -> out"),
        ("p.scales", {"quant_method": "awq", "q_group_size": 64, "w_bit": 4}, "F16", (32, 4096),
         "p.weight: in/64 -> out"),
    ],
)  # fmt: skip
def test_a_module(name, settings, dtype, found, expected):
    assert shape(name, settings, dtype, found) == expected


@pytest.mark.parametrize(
    "name, settings, dtype, found, weight, expected",
    [
        ("gate_up_proj_blocks", {"quant_method": "mxfp4"}, "U8", (8, 4096, 64, 16), "e in -> out", "e out in/32 16"),
        ("gate_up_proj_blocks", {"quant_method": "mxfp4"}, "F4", (8, 4096, 64, 32), "e in -> out", "e out in/32 32"),
        ("gate_up_proj_scales", {"quant_method": "mxfp4"}, "U8", (8, 4096, 64), "e in -> out", "e out in/32"),
        ("gate_up_proj_scale_inv", FP8, "F32", (8, 32, 16), "e out in", "e out/128 in/128"),
        ("gate_up_proj_scale_inv", FP8, "F32", (8, 16, 32), "e in -> out", "e in/128 -> out/128"),
        ("gate_up_proj_scale", {"quant_method": "fbgemm_fp8"}, "F32", (8, 1, 4096), "e in -> out", "e 1 out"),
        ("gate_up_proj_scale", {"quant_method": "fbgemm_fp8"}, "F32", (8, 4096, 1), "e in -> out", "e out 1"),
        ("gate_up_proj", NVFP4, "U8", (8, 1024, 4096), "e in -> out", "e in/2 -> out"),
        ("gate_up_proj_weight_scale", NVFP4, "F8_E4M3", (8, 128, 4096), "e in -> out", "e in/16 -> out"),
        ("gate_up_proj_input_scale", NVFP4, "F32", (), "e in -> out", ""),
    ],
)
def test_fused_experts(name, settings, dtype, found, weight, expected):
    assert shape(f"experts.{name}", settings, dtype, found, weight) == f"experts.gate_up_proj: {expected}"


@pytest.mark.parametrize(
    "word, found, expected",
    [
        ("k_scale", (4, 1, 1), "kv 1 1"),
        ("v_zero_point", (4, 1, 1), "kv 1 1"),
        ("q_scale", (8, 1, 1), "(kv group) 1 1"),
        ("prob_scale", (8, 1, 1), "(kv group) 1 1"),
        ("kv_scale", (), ""),
        ("prob_output_scale", (1,), "1"),
    ],
)
def test_an_attention(word, found, expected):
    """A scale for each head, as compressed-tensors has it, or one for all: in terms of the output projection."""
    belonging = scheme_of({"quantization_config": packed("channel")}).companion(f"l.attn.{word}", "BF16")
    assert belonging is not None and belonging.of_attention and belonging.weight == "l.attn"
    for weight in ("hidden (kv group head)", "(kv group head) -> hidden"):
        rule = shape_of(belonging.patterns, parse(weight), found)
        assert str(rule) == expected
        assert rule.sizes({"kv": 4, "group": 2, "head": 6, "hidden": 20}) == found


def test_one_scale_of_fused_experts_is_that_of_one_expert():
    """A rank with a single expert has what looks like one scale for the tensor, and it is not."""
    belonging = scheme_of({"quantization_config": FP8}).companion("experts.gate_up_proj_input_scale")
    assert belonging is not None
    assert str(shape_of(belonging.patterns, parse("e out in"), (1,))) == "e"
    assert str(shape_of(belonging.patterns, parse("out in"), (1,))) == "1"


@pytest.mark.parametrize("name", ["p.weight", "p.bias", "norm.weight", "experts.gate_up_proj", "p.qweight", "x"])
def test_what_belongs_to_nothing(name):
    assert scheme_of({}).companion(name, "BF16") is None
    assert scheme_of({"quantization_config": {"quant_method": "unknown"}}).companion(name, "U8") is None
    assert scheme_of({"quantization_config": FP8}).companion(name, "U8") is None


@pytest.mark.parametrize("settings", [None, "fp8", [], {}])
def test_settings_that_are_none(settings):
    assert scheme_of({"quantization_config": settings}).companion("p.qweight", "I32") is None
    in_text = {"quantization_config": settings, "text_config": {"quantization_config": GPTQ}}
    assert scheme_of(in_text).companion("p.qweight", "I32") is not None


def test_what_belongs_to_a_vector_has_no_dimension_of_it():
    """A norm may have a scale for the whole tensor; there is no output and no input in it."""
    assert str(shape_of(("", "out"), parse("hidden"), ())) == ""
    assert shape_of(("out", "in"), parse("hidden"), (20,)) is None


def test_a_refusal_says_why_and_what_to_do():
    settings = {"quantization_config": GPTQ | {"bits": 5}}
    assert scheme_of(settings).companion("p.weight", "BF16") is None
    with pytest.raises(PlanError, match=r"tensor 'p\.qweight' cannot be split: values of 5 bits run across") as error:
        scheme_of(settings).companion("p.qweight", "I32")
    assert error.value.hint == "take a checkpoint of 2, 4 or 8 bits, or split the unquantized one"


@pytest.mark.parametrize("method, layout", [("awq", {}), ("compressed-tensors", packed("group", num_bits=3))])
def test_3_bits_are_known_of_gptq_alone(method, layout):
    settings = {"quantization_config": {"quant_method": method, "bits": 3, **layout}}
    name = "p.weight_packed" if layout else "p.qweight"
    with pytest.raises(PlanError, match="values of 3 bits run across"):
        scheme_of(settings).companion(name, "I32")


@pytest.mark.parametrize(
    "name, states",
    [
        ("p.weight_shape", True),
        ("p.weight.quant_state.bitsandbytes__fp4", True),
        ("p.weight_packed", False),
        ("p.weight.absmax", False),
    ],
)
def test_what_states_the_shape_of_its_weight(name, states):
    settings = BNB if ".weight." in name else packed("group", group_size=32)
    belonging = scheme_of({"quantization_config": settings}).companion(name, "U8")
    assert belonging is not None and (belonging.weight, belonging.states_shape) == ("p.weight", states)


def test_a_shape_is_stated_output_before_input():
    assert str(stated_shape(parse("out in"))) == "out in"
    assert str(stated_shape(parse("in -> out"))) == "out in"


@pytest.mark.parametrize(
    "name, settings, dtypes, expected",
    [
        ("p.scale", FP8, {"p.weight": "I8"}, "stored lead out in/32"),
        ("p.scale", FP8, {"p.weight": "F8_E4M3"}, "stored lead out/128 in/128"),
        ("p.weight_scale", FP8 | {"store_dtype": "mxfp4"}, {"p.weight": "U8"}, "stored lead out in/32"),
        ("p.bias", GPTQ, {"p.qweight": "I32"}, "lead out"),
        ("p.bias", GPTQ, {"p.weight": "BF16"}, None),
    ],
)
def test_the_dtype_of_a_weight_says_how_it_is_quantized(name: str, settings: dict, dtypes: dict, expected: str | None):
    found = scheme_of({"quantization_config": settings}).companion(name, "F8_E8M0", dtypes)
    assert (found and found.patterns[0]) == expected


@pytest.mark.parametrize(
    "method, key", [("fp8", "quantized_layers"), ("modelopt", "quantized_layers"), ("auto-round", "extra_config")]
)
def test_settings_of_modules_hold_within_them_whatever_stands_before(method: str, key: str):
    inner = {"quant_algo": "W4A8_AWQ", "bits": 8, "group_size": 64}
    named = {"layers.1.experts": inner, "layers.1.experts.3.w2": inner | {"quant_algo": "NVFP4", "bits": 2}}
    config = {"quantization_config": {"quant_method": method, "bits": 4, key: named}}

    def patterns(module: str) -> tuple[str, ...] | None:
        found = scheme_of(config).companion(f"{module}.{'qweight' if method == 'auto-round' else 'weight'}", "U8")
        return found and found.patterns

    general, within, deeper = {
        "fp8": (None, "lead out/2 in", "stored lead out in/2"),
        "modelopt": ("stored lead out in/2", "lead out/2 in", "stored lead out in/2"),
        "auto-round": ("in/8 -> out", "in/4 -> out", "in/16 -> out"),
    }[method]
    for module in ("layers.1.experts", "layers.1.experts.0.w1", "model.layers.1.experts.0.w1", "layers.1.experts.3.w1"):
        assert patterns(module) == (within,), module
    assert patterns("model.layers.1.experts.3.w2") == (deeper,)
    for module in ("layers.1", "layers.11.experts.0.w1", "layers.1.shared_experts.w1", "layers.1.experts_norm"):
        assert patterns(module) == (general and (general,)), module


def test_settings_of_thousands_of_modules_are_found_by_name():
    """MiniMax-M3-NVFP4 names 22,484 modules: to try each on each of 90,000 tensors would take hours."""
    layers = {f"m.layers.{i}.experts.{e}.w1": {"quant_algo": "NVFP4"} for i in range(60) for e in range(128)}
    config = {"quantization_config": {"quant_method": "modelopt", "quantized_layers": layers}}
    scheme = scheme_of(config)
    assert not scheme.named and len({id(table) for table in scheme.within.values()}) == 1
    assert all(scheme.companion(f"{layer}.weight", "U8") for layer in layers)


FOUND = {"quant_method": "fp8", "weight_block_size": [4, 8]}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": FOUND},
        {"compression_config": FOUND},
        {"text_config": {"quantization_config": FOUND}},
        {"vision_config": {"depth": 2}, "llm_config": {"compression_config": FOUND}},
        {"thinker_config": {"text_config": {"quantization_config": FOUND}}},
        {"quantization_config": {"quant_method": "fp8", "quantization_config": {"weight_block_size": [4, 8]}}},
        {"quantization_config": FOUND, "text_config": {"quantization_config": {"weight_block_size": [1, 1]}}},
        {"quantization_config": {}, "text_config": {"quantization_config": FOUND}},
    ],
)
def test_every_reader_finds_the_settings_in_the_same_place(config):
    settings = quantization_settings(config)
    assert (settings["quant_method"], settings["weight_block_size"]) == ("fp8", [4, 8])
    assert block_size(config) == (4, 8)
    assert "in/8" in scheme_of(config).companion("p.weight_scale_inv").patterns[0]


def test_no_settings():
    for config in (
        {},
        {"quantization_config": None},
        {"quantization_config": {}},
        {"text_config": "quantization_config"},
    ):
        assert quantization_settings(config) == {} and block_size(config) is None


ODD = ([], [1], {}, {"a": 1}, 0, -5, 7, 2.5, True, "x", "{0}", "{size}", "", None)


@pytest.mark.parametrize("method", [GPTQ, AWQ, FP8, NVFP4, packed("group", group_size=32), {"quant_method": "quark"}])
def test_settings_of_any_kind_are_read_or_refused_in_one_line(method: dict):
    """``actorder``, a list, was an internal error."""
    keys = ["bits", "group_size", "desc_act", "checkpoint_format", "version", "format", "quant_algo", "strategy",
            "actorder", "type", "num_bits", "weight_block_size", "block_structure", "store_dtype", "dynamic",
            "quantized_layers", "config_groups", "weight", "qscheme", "is_marlin_format"]  # fmt: skip
    refusals = set()
    for key, value in itertools.product(keys, ODD):
        settings = {**method, key: value}
        if "config_groups" in method:
            group = method["config_groups"]["group_0"]
            settings |= {"config_groups": {"0": {**group, key: value, "weights": {**group["weights"], key: value}}}}
        if method["quant_method"] == "quark":
            settings["global_quant_config"] = {"weight": {key: value}}
        try:
            assert isinstance(scheme_of({"quantization_config": settings}), Scheme)
        except PlanError as error:
            refusals.add(error.message)
    assert refusals
    assert all(text.startswith("config.json, quantized by ") for text in refusals)
