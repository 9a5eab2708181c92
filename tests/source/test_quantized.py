"""Quantized checkpoints: what a rank's tensors mean by themselves is the rank's part of what the whole model's mean."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reshard.api import load, merge, split
from reshard.formats.errors import CheckpointError, MismatchError, PlanError
from reshard.formats.files.safetensors import build_header, read_header
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture_files import find_architecture
from reshard.mesh.degrees import valid_degrees
from reshard.mesh.plan import make_plan
from reshard.mesh.totals import all_reduces
from reshard.model.binding import bind
from reshard.model.model import FullTensor
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import compare
from tests.dequantize import METHODS, NUMPY, Method, Stored, pack, unpack, values
from tests.marks import one_of_each, thorough
from tests.support import contents, without_manifest

FAST = {"fsync": False}
Weights = dict[str, tuple[int, ...]]


def model(packing: str, unit: int, blocks: int = 12) -> tuple[dict, Weights, Weights]:
    """A config, and the shapes of the weights that are quantized and of the others, output before input.

    Eight query heads of one block each on four KV heads; twelve blocks in the MLP, if not so many: 3 for each of four
    ranks, 1.5 for each of eight.
    """
    hidden, ff, heads, kv = 2 * unit, blocks * unit, 8 * unit, 4 * unit
    config = {
        "hidden_size": hidden, "intermediate_size": ff, "num_hidden_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": unit, "vocab_size": 37, "tie_word_embeddings": False,
    }  # fmt: skip
    plain = {"model.embed_tokens": (37, hidden), "model.norm": (hidden,), "lm_head": (37, hidden)}
    plain |= {f"model.layers.0.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    attention = {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads)}
    if packing == "column and row":
        config["model_type"] = "llama"
        mlp = {"mlp.gate_proj": (ff, hidden), "mlp.up_proj": (ff, hidden), "mlp.down_proj": (hidden, ff)}
    elif packing == "packed":
        config["model_type"] = "phi3"
        attention = {"qkv_proj": (heads + 2 * kv, hidden), "o_proj": (hidden, heads)}
        mlp = {"mlp.gate_up_proj": (2 * ff, hidden), "mlp.down_proj": (hidden, ff)}
    elif packing == "experts by name":
        config |= {"model_type": "qwen3_moe", "num_experts": 3, "moe_intermediate_size": ff}
        shapes = {"gate_proj": (ff, hidden), "up_proj": (ff, hidden), "down_proj": (hidden, ff)}
        mlp = {f"mlp.experts.{expert}.{name}": shape for expert in range(3) for name, shape in shapes.items()}
        plain |= {"model.layers.0.mlp.gate": (3, hidden)}
        plain |= {f"model.layers.0.self_attn.{name}_norm": (unit,) for name in "qk"}
    else:
        config |= {"model_type": "gpt_oss", "num_local_experts": 3}
        plain |= {f"model.layers.0.self_attn.{name}": shape for name, shape in attention.items()}
        fused = {"gate_up_proj": (3, 2 * ff, hidden), "down_proj": (3, hidden, ff)}
        named = {f"model.layers.0.mlp.experts.{name}": shape for name, shape in fused.items()}
        biases = {f"model.layers.0.self_attn.{name}.bias": shape[:1] for name, shape in attention.items()}
        biases |= {f"{name}_bias": (3, shape[1]) for name, shape in named.items()}
        biases |= {"model.layers.0.self_attn.sinks": (8,), "model.layers.0.mlp.router.bias": (3,)}
        plain["model.layers.0.mlp.router"] = (3, hidden)
        return config, named, {f"{name}.weight": shape for name, shape in plain.items()} | biases
    quantized = {f"model.layers.0.self_attn.{name}.weight": shape for name, shape in attention.items()}
    quantized |= {f"model.layers.0.{name}.weight": shape for name, shape in mlp.items()}
    return config, quantized, {f"{name}.weight": shape for name, shape in plain.items()}


def names_of(weight: str, suffixes: dict | list) -> dict[str, str]:
    """The names of a weight's tensors by the end that the method gives them."""
    return {suffix: weight.removesuffix(".weight") + suffix for suffix in suffixes}


def write(folder: Path, config: dict, tensors: dict[str, Stored]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header = build_header([(name, t.dtype, t.array.shape) for name, t in tensors.items()], {"format": "pt"})
    (folder / "model.safetensors").write_bytes(header + b"".join(t.array.tobytes() for t in tensors.values()))
    return folder


def read(folder: Path) -> dict[str, Stored]:
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        for info in read_header(file).tensors.values():
            raw = np.frombuffer(data, NUMPY[info.dtype], offset=info.offset, count=int(np.prod(info.shape)))
            found[info.name] = Stored(info.dtype, raw.reshape(info.shape))
    return found


def checkpoint(
    folder: Path, method: Method, packing: str, seed: int = 0, blocks: int = 12
) -> tuple[Path, dict[str, list[str]], dict]:
    """A quantized checkpoint, the ends of the names of each weight's tensors, and the same model's config without
    quantization."""
    rng = np.random.default_rng(seed)
    config, quantized, plain = model(packing, method.unit, blocks)
    plain |= {name: quantized.pop(name) for name in list(quantized) if name.endswith(method.plain or ("?",))}
    tensors = {name: Stored("BF16", rng.integers(0, 2**16, shape, np.uint16)) for name, shape in plain.items()}
    ends: dict[str, list[str]] = {}
    for weight, shape in quantized.items():
        found = method.encode(rng, shape)
        ends[weight] = list(found)
        named = names_of(weight, found)
        tensors |= {named[suffix]: tensor for suffix, tensor in found.items()}
    settings = {"quantization_config": method.settings} if method.settings else {}
    return write(folder, config | settings, tensors), ends, config


def dequantize(folder: Path, method: Method, ends: dict[str, list[str]], input_first: bool) -> dict[str, np.ndarray]:
    """Every quantized weight, from the tensors of one folder alone, with its dimensions as the model has them."""
    held = read(folder)
    found = {}
    for weight, suffixes in ends.items():
        named = names_of(weight, suffixes)
        whole = method.decode({suffix: held[name] for suffix, name in named.items()})
        found[weight] = whole.swapaxes(-1, -2) if input_first else whole
    return found


def parts(
    config: dict, full: dict[str, np.ndarray], degree: int, uneven: tuple[tuple[str, int], ...] = ()
) -> list[dict[str, np.ndarray]]:
    """What each rank holds of weights that are not quantized, by the rules of the weights themselves."""
    architecture = find_architecture(config, Path())
    tensors = [FullTensor(name, "F32", whole.shape, "here") for name, whole in full.items()]
    plan = make_plan(bind(architecture, config, tensors), Mesh((("tp", degree),), uneven=uneven))
    cut = []
    for rank in range(degree):
        runs = {name: plan.layouts[name].boxes[rank].dims for name in full}
        index = {n: [np.r_[tuple(slice(r.offset, r.end) for r in dim)] for dim in dims] for n, dims in runs.items()}
        cut.append({name: whole[np.ix_(*index[name])] for name, whole in full.items()})
    return cut


PACKINGS = ("column and row", "packed", "experts by name", "fused and interleaved")
# one of each way in which packed integers and scales lie: along inputs or outputs, by groups, channels, blocks, rows
WITH_EVERY_PACKING = {
    "gptq", "gptq-3", "gptq-act-order", "gptq-bias", "awq", "packed-4-zeros", "packed-8-channel-zeros", "int8-zeros",
    "float8-block", "fp8-tensor", "compressed-nvfp4", "bitsandbytes-nf4",
}  # fmt: skip
CASES = [
    pytest.param(name, packing, id=f"{name}-{packing}")
    for name, method in METHODS.items()
    for packing in PACKINGS
    if packing == PACKINGS[3 if method.fused else 0]
    or (packing != PACKINGS[3] and not method.fused and name in WITH_EVERY_PACKING)
]


@pytest.mark.parametrize("name, packing", one_of_each(CASES, lambda case: case[1]))
def test_shards_mean_their_part_of_the_model(name, packing, tmp_path):
    method = METHODS[name]
    source, ends, plain = checkpoint(tmp_path / "source", method, packing)
    input_first = packing == PACKINGS[3]
    full = dequantize(source, method, ends, input_first)
    assert all(np.isfinite(whole).all() and whole.std() > 0 for whole in full.values())
    most = 4 if method.block else 8  # of 8 ranks, two have each KV head
    for degree in (2, most):
        split(source, tmp_path / f"tp{degree}", tp=degree, **FAST)
        for rank, expected in enumerate(parts(plain, full, degree)):
            found = dequantize(tmp_path / f"tp{degree}/rank-{rank:02d}-of-{degree:02d}", method, ends, input_first)
            for weight, part in expected.items():
                assert np.array_equal(found[weight], part), f"{weight} of rank {rank} of {degree}"
    split(tmp_path / f"tp{most}", tmp_path / "again", tp=2, **FAST)
    assert without_manifest(tmp_path / "again") == without_manifest(tmp_path / "tp2")
    merge(tmp_path / "again", tmp_path / "merged", **FAST)
    assert contents(tmp_path / "merged") == contents(source)


@pytest.mark.parametrize("name, packing", one_of_each(CASES, lambda case: case[0].partition("-")[0]))
def test_a_degree_that_cuts_a_block_is_refused(name, packing, tmp_path):
    method = METHODS[name]
    source, _, _ = checkpoint(tmp_path / "source", method, packing)
    bound = open_source(source).model
    if method.block is None:
        assert valid_degrees(bound) == [1, 2, 4, 8]
        message = r"tp=16 is not possible: 8 attention heads do not divide by 16"
    else:
        assert valid_degrees(bound) == [1, 2, 4]
        cut = r"(rows \d+ to \d+ of '.*' cut a block of \d+|.* (is|are) \S+ blocks of \d+, which do not divide by \d)"
        message = rf"tp=8 is not possible: tensor 'model\.layers\.0\.\S+': {cut}"
    with pytest.raises(PlanError, match=message):
        split(source, tmp_path / "out", tp=16 if method.block is None else 8, **FAST)
    assert not list(tmp_path.glob("out*"))


def test_act_order_keeps_every_group_on_every_rank(tmp_path):
    """A rank's rows use groups from everywhere, so a row-parallel weight cannot do with the scales of its own rows."""
    method = METHODS["gptq-act-order"]
    source, _, _ = checkpoint(tmp_path / "source", method, PACKINGS[0])
    split(source, tmp_path / "out", tp=4, **FAST)
    whole, rank = read(source), read(tmp_path / "out/rank-01-of-04")
    name = "model.layers.0.mlp.down_proj"
    assert np.array_equal(rank[f"{name}.scales"].array, whole[f"{name}.scales"].array)
    assert len(set(rank[f"{name}.g_idx"].array)) > 3, "its 24 rows are of more than their own 3 groups"
    assert rank[f"{name}.qweight"].array.shape[0] * 4 == whole[f"{name}.qweight"].array.shape[0]


def test_group_numbers_of_a_rank_are_the_whole_models(tmp_path):
    source, _, _ = checkpoint(tmp_path / "source", METHODS["gptq"], PACKINGS[0])
    split(source, tmp_path / "out", tp=4, **FAST)
    rank = read(tmp_path / "out/rank-01-of-04")
    assert rank["model.layers.0.mlp.down_proj.g_idx"].array.min() == 3
    assert rank["model.layers.0.mlp.down_proj.scales"].array.shape[0] == 3


def _changed(tmp_path: Path, name: str, settings: dict, change=lambda tensors: tensors, **config) -> Path:
    source, _, _ = checkpoint(tmp_path / "first", METHODS[name], PACKINGS[0])
    whole = json.loads((source / "config.json").read_text())
    whole.pop("quantization_config", None)
    return write(tmp_path / "source", whole | settings | config, change(read(source)))


@pytest.mark.parametrize(
    "settings",
    [
        {"compression_config": METHODS["packed-4"].settings},
        {"text_config": {"quantization_config": METHODS["packed-4"].settings}},
        {"quantization_config": {"quantization_config": METHODS["packed-4"].settings}},
    ],
)
def test_settings_in_other_places(settings, tmp_path):
    source = _changed(tmp_path, "packed-4", settings)
    assert valid_degrees(open_source(source).model) == [1, 2, 4]


MODELOPT_FILES = {
    # as ModelOpt 0.2x writes it: nothing of this stands in config.json
    "modelopt-nvfp4": {
        "producer": {"name": "modelopt", "version": "0.23.0"},
        "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                         "exclude_modules": ["lm_head"]},
    },
    "modelopt-int4-awq": {"quantization": {"quant_algo": "W4A8_AWQ", "group_size": 16}},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELOPT_FILES)
def test_settings_in_a_file_of_modelopts_own(name, tmp_path):
    method = METHODS[name]
    source, ends, plain = checkpoint(tmp_path / "source", method, PACKINGS[0])
    (source / "config.json").write_text(json.dumps(plain))
    (source / "hf_quant_config.json").write_text(json.dumps(MODELOPT_FILES[name]))
    full = dequantize(source, method, ends, False)
    split(source, tmp_path / "tp4", tp=4, **FAST)
    for rank, expected in enumerate(parts(plain, full, 4)):
        folder = tmp_path / f"tp4/rank-{rank:02d}-of-04"
        found = dequantize(folder, method, ends, False)
        assert all(np.array_equal(found[weight], part) for weight, part in expected.items())
        settings = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert settings == {"quant_method": "modelopt", **MODELOPT_FILES[name]}
    assert json.loads((tmp_path / "tp4/config.json").read_text()) == plain
    assert compare(open_source(source), open_source(tmp_path / "tp4")).verdict == "same"
    split(tmp_path / "tp4", tmp_path / "tp2", tp=2, **FAST)
    merge(tmp_path / "tp2", tmp_path / "merged", **FAST)
    assert contents(tmp_path / "merged") == contents(source)


def test_settings_in_the_config_come_before_modelopts_file(tmp_path):
    source, _, _ = checkpoint(tmp_path / "source", METHODS["modelopt-nvfp4"], PACKINGS[0])
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    split(source, tmp_path / "tp4", tp=4, **FAST)
    (source / "hf_quant_config.json").write_text("{")
    split(source, tmp_path / "again", tp=4, **FAST)
    (source / "config.json").write_text(json.dumps(model(PACKINGS[0], 16)[0]))
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: not valid JSON"):
        split(source, tmp_path / "broken", tp=4, **FAST)
    (source / "hf_quant_config.json").write_text('{"quantization": null}')
    with pytest.raises(PlanError, match="has shape"):
        split(source, tmp_path / "broken", tp=4, **FAST)


def test_modules_that_are_not_quantized(tmp_path):
    """A mixed checkpoint: the attention as it was, the MLP quantized, a scale for the KV cache beside them."""

    def change(tensors: dict[str, Stored]) -> dict[str, Stored]:
        kept = {name: t for name, t in tensors.items() if "self_attn" not in name}
        _, shapes, _ = model(PACKINGS[0], 16)
        for name, shape in shapes.items():
            if "self_attn" in name:
                kept[name] = Stored("BF16", np.arange(np.prod(shape), dtype=np.uint16).reshape(shape))
        scale = Stored("F32", np.ones(1, np.float32))
        return kept | {"model.layers.0.self_attn.k_scale": scale, "model.layers.0.self_attn.v_proj.v_scale": scale}

    settings = METHODS["packed-4-zeros"].settings
    source = _changed(tmp_path, "packed-4-zeros", {"quantization_config": settings}, change)
    split(source, tmp_path / "out", tp=4, **FAST)
    rank = read(tmp_path / "out/rank-03-of-04")
    assert rank["model.layers.0.self_attn.o_proj.weight"].array[0, 0] == 96
    assert rank["model.layers.0.self_attn.k_scale"].array.tolist() == [1.0]
    merge(tmp_path / "out", tmp_path / "merged", **FAST)
    assert contents(tmp_path / "merged") == contents(source)


def test_groups_of_modules_with_schemes_of_their_own(tmp_path):
    """compressed-tensors' mixed precision: 8 bits for down_proj, by an expression, and 4 for the other linear
    layers."""
    four, eight = METHODS["packed-4-zeros"], METHODS["packed-8-channel-zeros"]
    config, quantized, plain = model(PACKINGS[0], 16)
    rng = np.random.default_rng(0)
    tensors = {name: Stored("BF16", rng.integers(0, 2**16, shape, np.uint16)) for name, shape in plain.items()}
    ends: dict[str, list[str]] = {}
    for weight, shape in quantized.items():
        found = (eight if "down" in weight else four).encode(rng, shape)
        ends[weight] = list(found)
        tensors |= {names_of(weight, found)[suffix]: tensor for suffix, tensor in found.items()}
    (one,), (other,) = (m.settings["config_groups"].values() for m in (four, eight))
    groups = {"group_0": one, "group_1": other | {"targets": ["re:.*down_proj"]}}
    config["quantization_config"] = four.settings | {"config_groups": groups}
    source = write(tmp_path / "source", config, tensors)
    split(source, tmp_path / "out", tp=4, **FAST)
    for weight in quantized:
        method = eight if "down" in weight else four
        full = dequantize(source, method, {weight: ends[weight]}, False)
        for rank, part in enumerate(parts(config, full, 4)):
            found = dequantize(tmp_path / f"out/rank-{rank:02d}-of-04", method, {weight: ends[weight]}, False)
            assert np.array_equal(found[weight], part[weight])


REFUSED = {
    "5 bits": ({"quant_method": "gptq", "bits": 5}, "qweight", "I32", "values of 5 bits run across"),
    "marlin": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "B", "I32", "GPTQ in the 'marlin' format"),
    "gemv": ({"quant_method": "awq", "version": "gemv"}, "qweight", "I32", "AWQ version 'gemv'"),
    "sparse": ({"quant_method": "compressed-tensors", "format": "sparse-24-bitmask",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {}}}}, "bitmask", "U8", "keeps sparse"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_methods_that_cannot_be_split(kind, tmp_path):
    """Only such a tensor is refused: the same checkpoint without it has plain weights, and these can be split."""
    settings, ending, dtype, message = REFUSED[kind]
    config, quantized, plain = model(PACKINGS[0], 16)
    config["quantization_config"] = settings
    tensors = {name: Stored("BF16", np.zeros(shape, np.uint16)) for name, shape in (quantized | plain).items()}
    split(write(tmp_path / "plain", config, tensors), tmp_path / "tp4", tp=4, **FAST)
    bad = f"model.layers.0.mlp.down_proj.{ending}"
    tensors[bad] = Stored(dtype, np.zeros((8, 8), NUMPY[dtype]))
    with pytest.raises(PlanError, match=re.escape(f"tensor '{bad}' cannot be split: ") + ".*" + message):
        split(write(tmp_path / "source", config, tensors), tmp_path / "out", tp=4, **FAST)


# ----------------------------------------------------------------------------------------- what states a weight's shape

DOWN = "model.layers.0.mlp.down_proj"
STATES = {"bitsandbytes-nf4": f"{DOWN}.weight.quant_state.bitsandbytes__nf4", "packed-4": f"{DOWN}.weight_shape"}


def stated(tensor: Stored) -> list[int]:
    return json.loads(tensor.array.tobytes())["shape"] if tensor.dtype == "U8" else tensor.array.tolist()


def as_bytes(folder: Path) -> dict[str, bytes]:
    return {name: tensor.array.tobytes() for name, tensor in read(folder).items()}


@pytest.mark.parametrize("name", STATES)
@thorough
def test_every_route_to_a_rank_states_its_own_shape(name, tmp_path):
    source, _, _ = checkpoint(tmp_path / "source", METHODS[name], PACKINGS[0])
    rows, columns = stated(read(source)[STATES[name]])
    for degree in (2, 4):
        split(source, tmp_path / f"tp{degree}", tp=degree, **FAST)
    for rank in range(4):
        split(tmp_path / "tp2", tmp_path / "one by one", tp=4, ranks=[rank], **FAST)
        expected = as_bytes(tmp_path / f"tp4/rank-{rank:02d}-of-04")
        assert stated(read(tmp_path / f"tp4/rank-{rank:02d}-of-04")[STATES[name]]) == [rows, columns // 4]
        assert as_bytes(tmp_path / f"one by one/rank-{rank:02d}-of-04") == expected
        for origin in (source, tmp_path / "tp2"):
            loaded = {key: tensor.view(-1).numpy(force=True) for key, tensor in _loaded(origin, 4, rank).items()}
            assert {key: array.tobytes() for key, array in loaded.items()} == expected
    assert compare(open_source(source), open_source(tmp_path / "tp4")).verdict == "same"
    (tmp_path / "tp4/reshard.json").unlink()
    assert compare(open_source(source), open_source(tmp_path / "tp4")).verdict == "same"
    merge(tmp_path / "tp4", tmp_path / "merged", **FAST)
    assert as_bytes(tmp_path / "merged") == as_bytes(source)
    assert compare(open_source(source), open_source(tmp_path / "merged")).verdict == "same"


def _loaded(source: Path, degree: int, rank: int) -> dict:
    import torch

    return {key: tensor.view(torch.uint8) for key, tensor in load(source, tp=degree, rank=rank).items()}


@pytest.mark.parametrize("name", [*STATES, "bitsandbytes-nf4-double"])
@thorough
def test_experts_of_each_rank_state_their_own_shapes(name, tmp_path):
    """Experts are whole over ep, and so are their blocks, whatever their size."""
    method = METHODS[name]
    source, ends, plain = checkpoint(tmp_path / "source", method, PACKINGS[2])
    full = dequantize(source, method, ends, False)
    split(source, tmp_path / "ep3", ep=3, **FAST)
    split(source, tmp_path / "both", tp=2, ep=3, **FAST)
    split(tmp_path / "ep3", tmp_path / "again", tp=2, ep=3, **FAST)
    assert without_manifest(tmp_path / "again") == without_manifest(tmp_path / "both")
    halves = parts(plain, full, 2)
    for rank in range(6):
        folder = tmp_path / "both" / Mesh((("ep", 3), ("tp", 2))).folder(rank)
        held = {weight: end for weight, end in ends.items() if names_of(weight, end)[end[0]] in read(folder)}
        assert 0 < len(held) < len(ends)
        found = dequantize(folder, method, held, False)
        assert all(np.array_equal(found[weight], halves[rank % 2][weight]) for weight in held)
    assert compare(open_source(source), open_source(tmp_path / "both")).verdict == "same"
    merge(tmp_path / "both", tmp_path / "merged", **FAST)
    assert contents(tmp_path / "merged") == contents(source)


def rewrite(folder: Path, name: str, old: bytes, new: bytes) -> None:
    """Put other bytes into a tensor, as many."""
    (file,) = folder.glob("*.safetensors")
    info = read_header(file).tensors[name]
    data = bytearray(file.read_bytes())
    place = data.index(old, info.offset, info.offset + info.nbytes)
    data[place : place + len(old)] = new.ljust(len(old))
    file.write_bytes(bytes(data))


WRONG = {
    "another shape": (b"[128, 192]", b"[128, 384]", "states the shape [128, 384] for a weight of shape [128, 192]"),
    "the whole model's": (b"[128, 192]", b"[128, 768]", "states the shape [128, 768] for a weight of shape [128, 192]"),
    "no JSON": (b"}", b"]", "states the shape None"),
    "other settings": (b"bfloat16", b"bfloat17", "should be the same in"),
    "spaces within": (b"[128, 192]", b"[128,192 ]", "should be the same in"),
    "spaces elsewhere": (b'": "nf4"', b'" :"nf4"', "should be the same in"),
    "other spaces": (b"[128, 192]", b"[128,192] ", "should be the same in"),
}


@pytest.mark.parametrize("kind", one_of_each(WRONG, lambda kind: WRONG[kind][2][:16]))
def test_a_rank_that_states_something_else(kind, tmp_path):
    old, new, message = WRONG[kind]
    name = STATES["bitsandbytes-nf4"]
    source, _, _ = checkpoint(tmp_path / "source", METHODS["bitsandbytes-nf4"], PACKINGS[0])
    split(source, tmp_path / "tp4", tp=4, **FAST)
    rewrite(tmp_path / "tp4/rank-01-of-04", name, old, new)
    report = compare(open_source(source), open_source(tmp_path / "tp4"))
    assert report.verdict == "different"
    assert [(damage.tensor, damage.rank) for damage in report.damages] == [(name, 1)]
    assert report.first is not None and report.first.file == str(tmp_path / "tp4/rank-01-of-04/model.safetensors")
    for route in (merge, lambda *paths, **more: split(*paths, tp=2, **more)):
        with pytest.raises(MismatchError, match=re.escape(name) + ".*" + re.escape(message)):
            route(tmp_path / "tp4", tmp_path / "out", fsync=False, checksum=False)
        assert not (tmp_path / "out").exists()


def test_integers_that_are_another_shape(tmp_path):
    source, _, _ = checkpoint(tmp_path / "source", METHODS["packed-4"], PACKINGS[0])
    split(source, tmp_path / "tp4", tp=4, **FAST)
    full, own = (stated(read(path)[STATES["packed-4"]]) for path in (source, tmp_path / "tp4/rank-01-of-04"))
    as_stored = [np.array(shape, np.int64).tobytes() for shape in (own, full)]
    rewrite(tmp_path / "tp4/rank-01-of-04", STATES["packed-4"], *as_stored)
    assert compare(open_source(source), open_source(tmp_path / "tp4")).verdict == "different"
    with pytest.raises(MismatchError, match=re.escape(f"states the shape {full} for a weight of shape {own}")):
        merge(tmp_path / "tp4", tmp_path / "out", fsync=False, checksum=False)
    rewrite(source, STATES["packed-4"], as_stored[1], as_stored[0])
    with pytest.raises(MismatchError, match=re.escape(f"{DOWN}.weight_shape' states the shape {own}")):
        split(source, tmp_path / "out", tp=4, **FAST)


def test_a_statement_that_could_not_be_put_back_is_refused_at_the_split(tmp_path):
    name = STATES["bitsandbytes-nf4"]
    source, _, _ = checkpoint(tmp_path / "source", METHODS["bitsandbytes-nf4"], PACKINGS[0])
    rewrite(source, name, b"[128, 768]", b"[128,768] ")
    with pytest.raises(MismatchError, match=re.escape(f"tensor '{name}' states the shape [128, 768] in a form that")):
        split(source, tmp_path / "out", tp=4, **FAST)
    assert not (tmp_path / "out").exists()
    with pytest.raises(MismatchError, match="in a form that cannot be put back"):
        load(source, tp=4, rank=1)
    split(source, tmp_path / "tp1", tp=1, **FAST)
    merge(tmp_path / "tp1", tmp_path / "merged", **FAST)
    assert contents(tmp_path / "merged") == contents(source), "what stays as it is needs no other form"


def test_double_quantization_of_a_row_parallel_weight_is_refused_with_what_to_do(tmp_path):
    method = replace(METHODS["bitsandbytes-nf4-double"], plain=())
    source, _, _ = checkpoint(tmp_path / "source", method, PACKINGS[0])
    assert valid_degrees(open_source(source).model) == [1]
    message = (
        "tp=2 is not possible: tensor 'model.layers.0.mlp.down_proj.weight.nested_absmax': "
        "rows 0 to 768 of '(hidden ff)' cut a block of 16384"
    )
    with pytest.raises(PlanError, match=re.escape(message)) as error:
        split(source, tmp_path / "out", tp=2, **FAST)
    assert error.value.hint.startswith("valid degrees: 1; 256 blocks of 64 share a scale of this double quantization")
    assert "bnb_4bit_use_double_quant" in error.value.hint and "unquantized checkpoint" in error.value.hint


def test_blocks_of_another_size_are_refused(tmp_path):
    def change(tensors: dict[str, Stored]) -> dict[str, Stored]:
        return tensors | {f"{DOWN}.weight.absmax": Stored("F32", np.ones(768, np.float32))}

    settings = {"quantization_config": METHODS["bitsandbytes-nf4"].settings}
    source = _changed(tmp_path, "bitsandbytes-nf4", settings, change)
    with pytest.raises(
        PlanError, match=r"absmax' has shape \[768\], but the rule '\(hidden ff\)/64' gives \[1536\]"
    ) as error:
        split(source, tmp_path / "out", tp=2, **FAST)
    assert "their scale blocks have another size" in error.value.hint


def test_a_weight_whose_last_block_is_not_full(tmp_path):
    """Values in one row: blocks reach from one row into the next, and the last of the only KV head's is shorter."""
    method, rng = METHODS["bitsandbytes-nf4"], np.random.default_rng(0)
    config = model(PACKINGS[0], 10)[0] | {"hidden_size": 20, "intermediate_size": 128, "num_key_value_heads": 1}
    config |= {"num_attention_heads": 64, "quantization_config": method.settings}
    attention = {"q_proj": (640, 20), "k_proj": (10, 20), "v_proj": (10, 20), "o_proj": (20, 640)}
    shapes = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"mlp.gate_proj": (128, 20), "mlp.up_proj": (128, 20), "mlp.down_proj": (20, 128)}
    plain = {"model.embed_tokens": (37, 20), "model.norm": (20,), "lm_head": (37, 20)}
    plain |= {f"model.layers.0.{norm}": (20,) for norm in ("input_layernorm", "post_attention_layernorm")}
    tensors = {f"{n}.weight": Stored("BF16", rng.integers(0, 2**16, shape, np.uint16)) for n, shape in plain.items()}
    ends = {}
    for name, shape in shapes.items():
        found, weight = method.encode(rng, shape), f"model.layers.0.{name}.weight"
        ends[weight] = list(found)
        tensors |= {names_of(weight, found)[suffix]: tensor for suffix, tensor in found.items()}
    source = write(tmp_path / "source", config, tensors)
    full = dequantize(source, method, ends, False)
    assert valid_degrees(open_source(source).model) == [1, 2]
    split(source, tmp_path / "tp2", tp=2, **FAST)
    for rank, expected in enumerate(parts(config, full, 2)):
        found = dequantize(tmp_path / f"tp2/rank-{rank:02d}-of-02", method, ends, False)
        assert all(np.array_equal(found[weight], part) for weight, part in expected.items())
        assert len(found) == 7 and found["model.layers.0.self_attn.k_proj.weight"].shape == (10, 20)
    assert compare(open_source(source), open_source(tmp_path / "tp2")).verdict == "same"


@pytest.mark.parametrize("name", ["gptq", "gptq-3", "awq", "packed-4", "fp8-block", "bitsandbytes-nf4"])
def test_all_reduces_are_those_of_the_weights(name, tmp_path):
    """One for each row-parallel weight of each layer, whatever a weight is stored as, and one for the embedding."""

    def change(tensors: dict[str, Stored]) -> dict[str, Stored]:
        return tensors | {name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors.items()}

    settings = {"quantization_config": METHODS[name].settings}
    source = open_source(_changed(tmp_path, name, settings, change, num_hidden_layers=2, dtype="bfloat16"))
    hidden = 2 * METHODS[name].unit
    for volume in all_reduces(make_plan(source.model, Mesh((("tp", 2),)))):
        assert (volume.count, volume.nbytes) == (5, 5 * hidden * 2)


def test_three_bits_are_read_as_their_library_reads_them():
    """AutoGPTQ's ``forward`` (nn_modules/qlinear/qlinear_cuda_old.py) takes 32 values out of three integers so."""
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, (6, 5)).astype(np.int32)
    shifts = [list(range(0, 31, 3)), [0, *range(1, 29, 3), 31], [0, *range(2, 30, 3)]]
    words = packed.view(np.uint32).astype(np.int64).reshape(2, 3, 5)
    (first, second, third) = ([words[:, i] >> by for by in shifts[i]] for i in range(3))
    first[10] = first[10] & 3 | second[0] << 2 & 4
    second[11] = second[11] & 1 | third[0] << 1 & 6
    theirs = np.stack([*first[:11], *second[1:12], *third[1:11]], 1).reshape(64, 5) & 7
    assert np.array_equal(unpack(packed, 3, 0), theirs)
    assert np.array_equal(pack(theirs, 3, 0), packed)


def test_decoders_agree_with_torch():
    """The tables of small floats, against another implementation of them."""
    import torch

    codes = np.arange(256, dtype=np.uint8)
    for name, dtype in {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}.items():
        theirs = torch.from_numpy(codes.copy()).view(dtype).float().numpy()
        ours = values(Stored(name, codes))
        kept = np.isfinite(theirs)
        kept[0] = name == "F8_E4M3"  # 2 ** -127 is below float32's normal numbers
        assert np.array_equal(ours[kept], theirs[kept])
