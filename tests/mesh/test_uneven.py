"""Ranks that have unequal parts of an MLP (``--uneven``): whole blocks each, the last ones fewer."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from reshard.api import load, merge, plan, split
from reshard.commands.plan import uneven_lines
from reshard.formats.errors import CheckpointError, MismatchError, PlanError
from reshard.formats.files.safetensors import read_header
from reshard.formats.mesh import Mesh
from reshard.mesh.degrees import refusal, sweep, unevenly, valid_degrees
from reshard.mesh.plan import make_plan, rank_config
from reshard.mesh.totals import bytes_of_ranks, rows_of, totals_of
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.bytes.exact import compare, verify_exact
from tests import zoo
from tests.dequantize import METHODS
from tests.marks import one_of_each, thorough
from tests.source.test_quantized import CASES, PACKINGS, checkpoint, dequantize, parts
from tests.support import (
    LLAMA,
    assert_boxes_make_up_the_tensors,
    change_json,
    change_tensor,
    command,
    contents,
    without_manifest,
    without_sums,
    write_checkpoint,
)  # fmt: skip

FAST = {"fsync": False}
ODD = {**LLAMA, "intermediate_size": 22}  # tp 4: 6, 6, 6, 4; tp 8: 3, and 1 on the last; tp 2: 11 each


def folder(root: Path, rank: int, degree: int) -> Path:
    return root / f"rank-{rank:02d}-of-{degree:02d}"


def config(root: Path, rank: int, degree: int) -> dict:
    return json.loads((folder(root, rank, degree) / "config.json").read_text())


def shapes(root: Path, rank: int, degree: int) -> dict[str, tuple[int, ...]]:
    return {n: t.shape for n, t in read_header(folder(root, rank, degree) / "model.safetensors").tensors.items()}


@pytest.fixture
def mxfp4(tmp_path):
    """gpt-oss in MXFP4, with 15 blocks of 32 in its MLP: 2 for each of eight ranks, and 1 for the last."""
    return checkpoint(tmp_path / "source", METHODS["gpt-oss"], PACKINGS[3], blocks=15)[0]


# ------------------------------------------------------------------------------------------------ what a rank is given


def test_gpt_oss_goes_to_eight_ranks_in_whole_blocks(mxfp4, tmp_path):
    """As vLLM and SGLang deal it: ceil(blocks / ranks) blocks of 32 to each rank, and what is left to the last."""
    split(mxfp4, tmp_path / "out", tp=8, uneven=True, **FAST)
    experts = "model.layers.0.mlp.experts"
    for rank in range(8):
        start = rank * math.ceil(15 / 8) * 32
        own = min(start + math.ceil(15 / 8) * 32, 15 * 32) - start
        assert own == (64 if rank < 7 else 32)
        assert config(tmp_path / "out", rank, 8)["intermediate_size"] == own
        found = shapes(tmp_path / "out", rank, 8)
        assert found[f"{experts}.gate_up_proj_blocks"] == (3, 2 * own, 2, 16)
        assert found[f"{experts}.gate_up_proj_scales"] == (3, 2 * own, 2)
        assert found[f"{experts}.down_proj_blocks"] == (3, 64, own // 32, 16)
        assert found[f"{experts}.down_proj_scales"] == (3, 64, own // 32)


# experts by name are columns and rows, each of its own
@pytest.mark.parametrize(
    "name, packing", one_of_each([case for case in CASES if case.values[1] != PACKINGS[2]], lambda case: case[1])
)
def test_uneven_shards_mean_their_part_of_the_model(name, packing, tmp_path):
    """Of every method: 15 blocks are 8 + 7 and 7 x 2 + 1. Only what cuts no block may be even. The bytes at the most
    ranks of separate projections, and at the fewest of what is packed or of experts.
    """
    method = METHODS[name]
    source, ends, plain = checkpoint(tmp_path / "source", method, packing, blocks=15)
    input_first = packing == PACKINGS[3]
    full = dequantize(source, method, ends, input_first)
    model = open_source(source).model
    degrees = [degree for degree in (2, 4, 8) if refusal(model, unevenly(model, Mesh((("tp", degree),)))) is None]
    assert degrees == ([2, 4, 8] if packing != PACKINGS[1] or method.own_unit is None else degrees) and degrees
    for degree in degrees:
        assert_boxes_make_up_the_tensors(plan(source, tp=degree, uneven=True))
    degree = degrees[-1] if packing == PACKINGS[0] else degrees[0]
    split(source, tmp_path / "out", tp=degree, uneven=True, **FAST)
    shards = open_source(tmp_path / "out")
    uneven = shards.plan.mesh.uneven
    assert uneven or refusal(model, Mesh((("tp", degree),))) is None
    for rank, expected in enumerate(parts(plain, full, degree, uneven)):
        found = dequantize(folder(tmp_path / "out", rank, degree), method, ends, input_first)
        for weight, part in expected.items():
            assert np.array_equal(found[weight], part), f"{weight} of rank {rank} of {degree}"
    assert compare(open_source(source), shards).verdict == "same"
    merge(tmp_path / "out", tmp_path / "merged", **FAST)
    assert contents(tmp_path / "merged") == contents(source)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("gptq", 16),
        ("gptq-3", 32),
        ("awq", 16),
        ("gptq-act-order", 8),
        ("packed-4", 32),
        ("int8", 1),
        ("fp8-block", 32),  # 16 rows, 32 columns
    ],
)
def test_a_unit_is_what_all_tensors_of_the_axis_need(name, unit, tmp_path):
    """Groups of the scales along the input, packed integers along the output, and blocks both ways."""
    source, _, _ = checkpoint(tmp_path / "source", METHODS[name], PACKINGS[0], blocks=15)
    model = open_source(source).model
    assert unevenly(model, Mesh((("tp", 7),))).uneven == (("ff", unit),)


@pytest.mark.parametrize(("dtype", "unit"), [("F4", 2), ("F6_E2M3", 4), ("F8_E4M3", 1)])
def test_a_unit_is_of_whole_bytes(dtype, unit, tmp_path):
    model = open_source(write_checkpoint(tmp_path / "llama")).model
    tensors = [FullTensor(t.name, dtype, None, "here") for t in model.tensors if "down_proj" in t.name]
    packed = bind(model.architecture, LLAMA, tensors)
    assert unevenly(packed, Mesh((("tp", 5),))).uneven == (("ff", unit),)


def test_a_last_unit_that_is_not_full(tmp_path):
    """2,880 values in blocks of 128 are 22.5: 12 of them on one rank, and 10.5 on the other."""
    sizes = {**LLAMA, "hidden_size": 256, "intermediate_size": 2880, "head_dim": 128, "num_hidden_layers": 1}
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    named = {"gate_proj": (2880, 256), "up_proj": (2880, 256), "down_proj": (256, 2880)}
    layer = "model.layers.0.mlp."
    tensors = [FullTensor(f"{layer}{name}.weight", "F8_E4M3", shape, "here") for name, shape in named.items()]
    scales = {name: (math.ceil(a / 128), math.ceil(b / 128)) for name, (a, b) in named.items()}
    tensors += [FullTensor(f"{layer}{name}.weight_scale_inv", "F32", shape, "here") for name, shape in scales.items()]
    model = bind(open_source(write_checkpoint(tmp_path / "llama")).model.architecture, sizes | settings, tensors)
    found = make_plan(model, unevenly(model, Mesh((("tp", 2),))))
    down, scale = (found.layouts[f"{layer}down_proj.{end}"] for end in ("weight", "weight_scale_inv"))
    assert [box.shape for box in down.boxes.values()] == [(256, 1536), (256, 1344)]
    assert [box.shape for box in scale.boxes.values()] == [(2, 12), (2, 11)]


# ------------------------------------------------------------------------------------------------- every route is one

ROUTES = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4, "uneven": True},
    "tp8": {"tp": 8, "uneven": True},
    "ep3-tp4": {"ep": 3, "tp": 4, "uneven": True},
    "ep3": {"ep": 3},
}


@pytest.mark.parametrize(
    ("method", "packing"), [("gpt-oss", PACKINGS[3]), ("packed-4", PACKINGS[2])], ids=["interleaved", "by-name"]
)
@thorough
def test_from_any_mesh_to_any_mesh(method, packing, tmp_path):
    """Even and uneven ones; experts interleaved, and by name."""
    source, _, _ = checkpoint(tmp_path / "source", METHODS[method], packing, blocks=22)
    for name, arguments in ROUTES.items():
        split(source, tmp_path / name, **arguments, **FAST)
    for before in ("tp4", "tp8", "ep3-tp4", "ep3"):
        for after in ROUTES.keys() - {before}:
            again = tmp_path / f"{before}-to-{after}"
            split(tmp_path / before, again, **ROUTES[after], **FAST)
            assert without_manifest(again) == without_manifest(tmp_path / after), (before, after)
        for rank in (0, 7):
            loaded = load(tmp_path / before, tp=8, rank=rank, uneven=True)
            found = {n: tuple(tensor.shape) for n, tensor in loaded.items()}
            assert found == shapes(tmp_path / "tp8", rank, 8)


def test_experts_over_the_same_ranks_stay_whole(tmp_path):
    """Only what is not an expert's is dealt unevenly, in units of its own."""
    source = zoo.save("deepseek_v3", tmp_path / "source", experts=8)
    settings = json.loads((source / "config.json").read_text()) | {"moe_intermediate_size": 27}
    model = bind_without_data(settings, open_source(source))
    assert dict(unevenly(model, Mesh((("tp", 8),))).uneven) == {"moe_ff": 1, "shared_ff": 1}
    mesh = unevenly(model, Mesh((("tp", 8), ("ep", 8)), same_ranks=True))
    assert mesh.uneven == (("shared_ff", 1),)
    found, layer = make_plan(model, mesh), "model.layers.1.mlp"
    assert found.layouts[f"{layer}.experts.7.up_proj.weight"].boxes[7].shape == (27, 80)
    shared = found.layouts[f"{layer}.shared_experts.up_proj.weight"]
    assert [box.shape[0] for box in shared.boxes.values()] == [7, 7, 7, 7, 7, 7, 7, 5]
    assert rank_config(found, 7)["moe_intermediate_size"] == 27


def test_a_lost_manifest(mxfp4, tmp_path):
    """The headers say how it was dealt."""
    split(mxfp4, tmp_path / "out", tp=8, uneven=True, **FAST)
    (tmp_path / "out/reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "merged", **FAST)
    assert compare(open_source(mxfp4), open_source(tmp_path / "merged")).verdict == "same"
    assert contents(tmp_path / "merged")["config.json"] == contents(mxfp4)["config.json"]
    assert verify_exact(open_source(mxfp4), tmp_path / "out").verdict == "same"


def test_rank_by_rank(mxfp4, tmp_path):
    split(mxfp4, tmp_path / "whole", tp=8, uneven=True, **FAST)
    for rank in (7, *range(7)):
        split(mxfp4, tmp_path / "out", tp=8, uneven=True, ranks=[rank], **FAST)
    assert without_sums(tmp_path / "out") == without_sums(tmp_path / "whole")


def test_where_equal_parts_are_possible_they_are_taken(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    for degree in (2, 4, 8):
        split(source, tmp_path / f"even{degree}", tp=degree, **FAST)
        split(source, tmp_path / f"uneven{degree}", tp=degree, uneven=True, **FAST)
        assert contents(tmp_path / f"uneven{degree}") == contents(tmp_path / f"even{degree}")


# ------------------------------------------------------------------------------------------------------------ refusals


def hint_of(call) -> tuple[str, str]:
    with pytest.raises(PlanError) as error:
        call()
    assert "\n" not in error.value.message and "\n" not in str(error.value.hint)
    return error.value.message, str(error.value.hint)


def test_without_the_option_it_is_refused_and_the_hint_names_what_works(mxfp4, tmp_path):
    message, hint = hint_of(lambda: split(mxfp4, tmp_path / "out", tp=4))
    assert message.endswith("an intermediate size of 480 is 15 blocks of 32, which do not divide by 4")
    assert hint == "valid degrees: 1, or uneven=True"  # three experts do not go to four ranks
    _, hint = hint_of(lambda: plan(write_checkpoint(tmp_path / "odd", config=ODD), tp=4))
    assert hint == "valid degrees: 1, 2, or uneven=True"
    _, hint = hint_of(lambda: plan(tmp_path / "odd", tp=3))
    assert hint == "valid degrees: 1, 2"


def test_the_same_ranks_are_named_where_they_work(tmp_path):
    source = checkpoint(tmp_path / "source", METHODS["packed-4"], PACKINGS[2], blocks=15)[0]
    _, hint = hint_of(lambda: plan(source, tp=2))
    assert hint == "valid degrees: 1, or uneven=True"  # three experts do not go to two ranks
    fused = zoo.save("gpt_oss", tmp_path / "fused", experts=8)
    assert plan(fused, tp=8).mesh == Mesh((("tp", 8),))
    settings = json.loads((fused / "config.json").read_text())
    odd = bind_without_data(settings | {"intermediate_size": 46}, open_source(fused))
    with pytest.raises(PlanError) as error:
        make_plan(odd, Mesh((("tp", 8),)))
    assert error.value.hint == "valid degrees: 1, 2, or uneven=True, or tp=8 ep=8 same_ranks=True"
    whole = make_plan(odd, Mesh((("tp", 8), ("ep", 8)), same_ranks=True))
    assert whole.layouts["model.layers.0.mlp.experts.down_proj"].boxes[0].shape == (1, 46, 80)


def bind_without_data(settings: dict, source: Source) -> Model:
    """The tensors of a source, in the shapes that other settings give."""
    tensors = [FullTensor(t.name, t.dtype, None, "here") for t in source.model.tensors]
    return bind(source.model.architecture, settings, tensors)


def test_a_rank_that_would_have_none_is_refused(mxfp4, tmp_path):
    """Of 9 blocks eight ranks would have 2 each, and the last three none."""
    source = checkpoint(tmp_path / "nine", METHODS["gpt-oss"], PACKINGS[3], blocks=9)[0]
    message, hint = hint_of(lambda: split(source, tmp_path / "out", tp=8, uneven=True))
    assert message == "tp=8 is not possible: an intermediate size of 288 in units of 32 is enough for 5 of 8 ranks"
    assert hint == "valid degrees: 1, 2"  # on four ranks 3 + 3 + 3 + 0
    assert sweep(open_source(source).model, uneven=True).valid == (1, 2)
    assert valid_degrees(open_source(source).model) == [1]


def test_heads_are_not_dealt_unevenly(tmp_path):
    source = write_checkpoint(tmp_path / "source", config=ODD)
    message, _ = hint_of(lambda: split(source, tmp_path / "out", tp=3, uneven=True))
    assert message == "tp=3 is not possible: 8 attention heads do not divide by 3"
    deepseek = zoo.save("deepseek_v3", tmp_path / "deepseek")
    assert open_source(deepseek).model.channels == {"ff", "moe_ff", "shared_ff"}


@pytest.mark.parametrize("units", [{"ff": 128}, {"ff": 40}, {}, {"kv": 1}, {"vocab": 1}, {"other": 1}])
def test_headers_that_say_something_else(units, mxfp4, tmp_path):
    """Units that leave a rank without any, or cut a block; and axes that are never dealt in units."""
    split(mxfp4, tmp_path / "out", tp=8, uneven=True, **FAST)
    (tmp_path / "out/reshard.json").unlink()
    for path in (tmp_path / "out").rglob("*.safetensors"):
        data = path.read_bytes()
        said = json.dumps({"ff": 32}, separators=(",", ":")).replace('"', '\\"').encode()
        assert data.count(said) == 1
        new = json.dumps(units, separators=(",", ":")).replace('"', '\\"').encode()
        length = int.from_bytes(data[:8], "little") + len(new) - len(said)
        path.write_bytes(length.to_bytes(8, "little") + data[8:].replace(said, new, 1))
    with pytest.raises((CheckpointError, MismatchError, PlanError)) as error:
        merge(tmp_path / "out", tmp_path / "merged", **FAST)
    assert "\n" not in error.value.message
    assert not (tmp_path / "merged").exists()


# ------------------------------------------------------------------------------------------------------ what is shown


def test_the_plan_shows_the_largest_rank(mxfp4):
    found = plan(mxfp4, tp=8, uneven=True)
    of_ranks, totals = bytes_of_ranks(found), totals_of(found, rows_of(found))
    assert totals.bytes_per_rank == max(of_ranks) == of_ranks[0] and totals.bytes_least == min(of_ranks) == of_ranks[7]
    assert of_ranks[0] == of_ranks[6] > of_ranks[7]
    even = plan(mxfp4, tp=1, uneven=True)
    assert bytes_of_ranks(even) == [totals_of(even, rows_of(even)).bytes_least]
    uneven = {row.name.rpartition(".")[2] for row in rows_of(found) if row.is_uneven}
    packed = {"gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"}
    assert uneven == packed | {"gate_up_proj_bias"}
    assert found.mesh.to_document() == {"tp": 8, "uneven": {"ff": 32}}
    assert uneven_lines(found) == ["ff 480 = 7 x 64 + 32"]


def test_bytes_of_the_smallest_rank_are_compared(mxfp4, tmp_path):
    split(mxfp4, tmp_path / "out", tp=8, uneven=True, **FAST)
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    change_tensor(folder(tmp_path / "out", 7, 8) / "model.safetensors", name, at=16 * 64 + 3)
    found = compare(open_source(mxfp4), open_source(tmp_path / "out"))
    assert found.first is not None and (found.first.tensor, found.first.rank) == (name, 7)
    assert found.first.index == (1, 0, 14, 3)
    change_json(folder(tmp_path / "out", 7, 8) / "config.json", intermediate_size=64)
    (tmp_path / "out/reshard.json").unlink()  # it knows the size of the file
    (wrong,) = compare(open_source(mxfp4), open_source(tmp_path / "out")).configs
    assert str(wrong) == "rank-07-of-08/config.json: 'intermediate_size' is 64, expected 32"


# ---------------------------------------------------------------------------------------------------------- the command


def reshard(*arguments: object, code: int = 0) -> tuple[str, str]:
    run = command(*map(str, arguments))
    assert run.returncode == code, run.stderr
    return run.stdout, run.stderr


def test_the_command_says_how_it_was_dealt(mxfp4, tmp_path):
    _, error = reshard("split", mxfp4, tmp_path / "out", "--tp", 8, code=2)
    assert error.splitlines()[-2:] == [
        "Error: --tp 8 is not possible: tensor 'model.layers.0.mlp.experts.down_proj_scales': "
        "an intermediate size of 480 is 15 blocks of 32, which do not divide by 8",
        "Hint: valid degrees: 1, or --uneven",
    ]
    text, _ = reshard("split", mxfp4, tmp_path / "out", "--tp", 8, "--uneven")
    assert "Uneven parts of ff, in units of 32: the last ranks have less." in text
    text, _ = reshard("inspect", tmp_path / "out")
    assert re.search(r"^  mesh +tp 8 with ff in units of 32$", text, re.MULTILINE)
    found = json.loads(reshard("inspect", tmp_path / "out", "--json")[0])
    assert found["mesh"] == {"tp": 8, "uneven": {"ff": 32}}
    text, _ = reshard("verify", mxfp4, tmp_path / "out", "--exact-only")
    assert "tp 8 with ff in units of 32" in text


def test_the_command_lists_what_is_possible_unevenly(mxfp4):
    text, _ = reshard("plan", mxfp4)
    assert re.search(
        r"^ +8  no +tensor .* 15 blocks of 32, which do not divide by 8; possible with --uneven$", text, re.MULTILINE
    )
    assert "Valid degrees: 1." in text
    text, _ = reshard("plan", mxfp4, "--uneven")
    assert re.search(r"^ +8  yes +\S+ kB per rank at most, .*, uneven: ff 480 = 7 x 64 \+ 32", text, re.MULTILINE)
    assert "Valid degrees: 1, 2, 4, 8." in text
    by_degree = {entry["tp"]: entry for entry in json.loads(reshard("plan", mxfp4, "--json")[0])["degrees"]}
    assert (by_degree[8]["valid"], by_degree[8]["possible_with"]) == (False, ["--uneven"])
    assert by_degree[3]["possible_with"] == by_degree[1]["possible_with"] == []
    text, _ = reshard("plan", mxfp4, "--tp", 8, "--uneven")
    assert "uneven: this is the first rank's part; the last ranks have less" in text
    assert re.search(r"^bytes per rank .* on the largest of 8 ranks, .*; .* on the smallest$", text, re.MULTILINE)
    assert re.search(r"^uneven +ff 480 = 7 x 64 \+ 32$", text, re.MULTILINE)


def test_the_valid_degrees_of_a_format_that_deals_the_vocabulary_unevenly(tmp_path: Path) -> None:
    """Nothing is padded there, and a vocabulary that does not divide makes no degree impossible."""
    source = write_checkpoint(tmp_path / "source", config=LLAMA | {"vocab_size": 51})
    message, hint = hint_of(lambda: split(source, tmp_path / "out", tp=64, format="dcp"))
    assert "do not divide by 64" in message and hint.startswith("valid degrees: 1, 2")
    assert split(source, tmp_path / "out", tp=2, format="dcp").complete
