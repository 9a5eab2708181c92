"""Published checkpoints at their real sizes: every name has a rule, every shape fits, and the degrees are right."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import tomli_w

from reshard.formats.errors import PlanError
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture_files import find_architecture
from reshard.mesh.degrees import valid_degrees
from reshard.mesh.plan import make_plan
from reshard.model.binding import bind
from reshard.model.model import FullTensor
from reshard.source.opening import open_source
from tests import remote
from tests.published import PUBLISHED, full_tensors
from tests.support import changed_json, changed_tensors
from tests.test_cli import ok, run


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_planned(name: str):
    published = PUBLISHED[name]
    model = bind(find_architecture(published.config, Path()), published.config, full_tensors(published))
    assert tuple(valid_degrees(model, limit=64)) == published.tp
    assert tuple(valid_degrees(model, "ep", limit=64)) == published.ep
    plan = make_plan(model, Mesh((("tp", published.tp[-1]),)))
    for tensor, shape in (published.held or {}).items():
        assert plan.layouts[tensor].boxes[1].shape == shape, tensor


QKV = "model.layers.{}.self_attn.qkv_proj.weight"


def mimo(*tensors: FullTensor):
    config = PUBLISHED["MiMo-V2.5"].config
    return bind(find_architecture(config, Path()), config, tensors)


def weight(layer: int, rows: int) -> FullTensor:
    return FullTensor(QKV.format(layer), "F8_E4M3", (rows, 4096), "here")


def scales(layer: int, rows: int) -> FullTensor:
    return FullTensor(QKV.format(layer) + "_scale_inv", "F32", (rows, 32), "here")


CHUNKS = "(chunk [q: per sgroup head + k: per head + v: per vdim]) hidden"
SECTIONS = "(q: chunk per sgroup head + k: chunk per head + v: chunk per vdim) hidden"


@pytest.mark.parametrize("rows, expected", [(108, CHUNKS), (106, SECTIONS)])
def test_scales_of_one_layer_tell_how_all_are_packed(rows: int, expected: str):
    """Layer 1 has the same shapes either way, layer 0 has not."""
    found = mimo(weight(1, 14848), scales(1, 116), weight(0, 13568), scales(0, rows))
    assert str(found.tensors[0].kind.rule) == expected


@pytest.mark.parametrize("tensors", [[weight(0, 13568)], [weight(1, 14848), scales(1, 116)]])
def test_what_scales_cannot_tell_is_asked(tensors: list[FullTensor]):
    with pytest.raises(PlanError, match=r"qkv_proj.weight' has shape .*, which may be either of '\((kv|chunk) \[q: "):
        mimo(*tensors)


def test_scales_that_contradict_each_other_are_refused():
    with pytest.raises(PlanError, match="which may be either of"):
        mimo(weight(0, 13568), scales(0, 108), weight(5, 13568), scales(5, 106), weight(1, 14848))


def test_blocks_that_begin_anew():
    published = PUBLISHED["MiMo-V2.5"]
    model = bind(find_architecture(published.config, Path()), published.config, full_tensors(published))
    with pytest.raises(PlanError, match="cut a block of 128") as refused:
        make_plan(model, Mesh((("tp", 8),)))
    assert "valid degrees: 1, 2, 4" in str(refused.value.hint) and "dequantize" not in str(refused.value.hint)


@pytest.fixture
def unquantized(tmp_path: Path) -> Path:
    """A MiMo without scales, so that nothing tells how q, k and v lie."""
    folder = remote.save("mimo_v2", tmp_path / "source")
    with changed_json(folder / "config.json") as config:
        del config["quantization_config"]
    with changed_tensors(folder / "model.safetensors") as tensors:
        for name in [name for name in tensors if "scale" in name]:
            del tensors[name]
    return folder


@pytest.mark.parametrize("chosen, rows", [(0, [(92, 92)]), (1, [(48, 48), (120, 24), (164, 20)])])
def test_the_answer_is_a_line_of_a_plan_file(chosen: int, rows: list[tuple[int, int]], unquantized: Path):
    """The command that the hint names saves the rules although they do not fit yet."""
    mine = unquantized.parent / "mine.toml"
    asked = run("plan", unquantized, "--save", mine)
    assert asked.returncode == 2
    assert "which may be either of" in asked.stderr and f"Hint: edit {mine}, pass it with --plan {mine}" in asked.stderr
    document = tomllib.loads(mine.read_text())
    for rules in document["tensors"].values():
        for rule in rules if isinstance(rules, list) else [rules]:
            if isinstance(rule, dict) and isinstance(rule["shape"], list):
                rule["shape"] = rule["shape"][chosen]
    mine.write_text(tomli_w.dumps(document))
    assert "degrees" in ok("plan", unquantized, "--plan", mine)
    ok("split", unquantized, unquantized.parent / "tp2", "--tp", "2", "--plan", mine)
    held = open_source(unquantized.parent / "tp2").plan.layouts[QKV.format(0)].boxes[1]
    assert [(run.offset, run.length) for run in held.dims[0]] == rows


def test_a_plan_is_saved_where_a_tensor_has_no_rule(tmp_path: Path):
    folder, mine = remote.save("llama_bidirec", tmp_path / "source"), tmp_path / "mine.toml"
    with changed_tensors(folder / "model.safetensors") as tensors:
        norm = next(tensor for name, tensor in tensors.items() if name.endswith("norm.weight"))
        tensors["model.extra.weight"] = norm.clone()
    asked = run("plan", folder, "--save", mine)
    assert asked.returncode == 2 and "'model.extra.weight'" in asked.stderr and "has no rule" in asked.stderr
    mine.write_text(mine.read_text().replace("[tensors]\n", '[tensors]\n"model.extra.weight" = "hidden"\n'))
    ok("plan", folder, "--plan", mine)
