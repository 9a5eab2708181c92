"""``reshard plan --draft``: what is inferred for a model whose rules nobody has written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reshard.formats.errors import PlanError
from reshard.formats.mesh import Mesh
from reshard.mesh.plan import make_plan
from reshard.model.draft import draft
from reshard.model.model import FullTensor, Model
from reshard.source.access import Access
from reshard.source.opening import draft_of
from reshard.store.selection import Weights
from reshard.transforms.opening import open_any
from tests import zoo
from tests.marks import one_of_each
from tests.support import LLAMA, change_json, llama_tensors, write_checkpoint
from tests.test_cli import ok, refused, run
from tests.zoo import save

NAMES = (
    "llama", "llama-biases", "qwen3", "mixtral", "qwen3_moe", "gemma2", "olmo2", "cohere", "phi3", "gpt_neox", "bloom",
    "gpt2", "starcoder2", "glm4_moe", "bert", "mpt", "deepseek_v3", "qwen3_next", "gpt_oss", "zamba2", "nemotron_h",
    "gemma4", "granitemoeshared", "opt",
)  # fmt: skip


def _renamed(name: str, folder: Path) -> tuple[Path, Model]:
    """A checkpoint of a type that nobody knows, and its model by its own rules."""
    save(name, folder)
    built_in = open_any(folder, Access(), Weights.HEADERS).model
    change_json(folder / "config.json", model_type="nobody_knows")
    return folder, built_in


def _layouts(model: Model, degree: int) -> dict:
    layouts = make_plan(model, Mesh((("tp", degree),))).layouts
    return {name: (layout.boxes, layout.padded) for name, layout in layouts.items()}


@pytest.mark.parametrize("name", one_of_each(NAMES, lambda name: name if name in zoo.KINDS else None))
def test_a_draft_lays_tensors_out_as_the_rules_do(name: str, tmp_path: Path) -> None:
    """Of a type with another name, in the names and sizes of one that is known."""
    folder, built_in = _renamed(name, tmp_path / name)
    made = draft_of(folder)
    for degree in (2, 4):
        assert _layouts(made.model, degree) == _layouts(built_in, degree)
    (tmp_path / "draft.toml").write_text(made.text)
    source = open_any(folder, Access(plan_file=tmp_path / "draft.toml"), Weights.HEADERS)
    assert set(source.plan.layouts) == set(source.names)
    assert made.checks == made.text.count("  # CHECK: ") == {"olmo2": 2, "cohere": 2}.get(name, 0)


def test_where_other_models_have_another_shape_it_is_taken(tmp_path: Path) -> None:
    made = draft_of(_renamed("olmo2", tmp_path / "olmo2")[0])
    line = '"model.layers.{layer}.self_attn.q_norm.weight" = "(kv group head)"'
    assert f"{line}  # CHECK: in 'llama' it is so in other models only" in made.text


def test_what_a_type_decides_is_whole(tmp_path: Path) -> None:
    """The widths of Mamba's come from its type: what its mixer has cannot be read, so none of it is split."""
    made = draft_of(_renamed("mamba", tmp_path / "mamba")[0])
    boxes = make_plan(made.model, Mesh((("tp", 2),))).layouts
    assert made.checks and all(boxes[name].is_replicated for name in boxes if "mixer" in name)


def test_the_command_writes_a_file_that_takes_effect_with_plan_alone(tmp_path: Path) -> None:
    config = LLAMA | {"model_type": "nobody_knows"}
    folder = write_checkpoint(tmp_path / "model", config=config)
    message = refused("plan", folder, "--tp", "2")
    assert "unknown model_type 'nobody_knows'" in message and "--draft FILE" in message
    file = tmp_path / "mine.toml"
    done = run("plan", folder, "--draft", file)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    assert "degrees 1, 2, 4, 8" in done.stderr
    first, *_ = file.read_text().splitlines()
    assert first.startswith("# DRAFT") and "checked" in first and "--plan" in first
    refused("plan", folder, "--tp", "2")  # a draft that lies about changes nothing
    ok("split", folder, tmp_path / "out", "--tp", "2", "--plan", file)
    ok("merge", tmp_path / "out", tmp_path / "merged")
    whole = (tmp_path / "merged" / "model.safetensors").read_bytes()
    assert whole == (folder / "model.safetensors").read_bytes()
    assert "exists" in refused("plan", folder, "--draft", file)
    assert "--draft goes without --tp" in run("plan", folder, "--draft", tmp_path / "new.toml", "--tp", "2").stderr


def _tensors(change: Callable[[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]) -> list[FullTensor]:
    changed = [(change(name, shape), dtype) for name, dtype, shape in llama_tensors()]
    return [FullTensor(name, dtype, shape, "model.safetensors") for (name, shape), dtype in changed]


def test_a_weight_whose_numbers_do_not_fit_keeps_its_block_whole() -> None:
    def widen_keys(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return name, (30, 20) if "k_proj" in name else shape

    made = draft(LLAMA | {"model_type": "nobody_knows"}, _tensors(widen_keys))
    line = '"model.layers.{layer}.self_attn.k_proj.weight" = "..."'
    assert f"{line}  # CHECK: 30x20, 'llama' has '(kv head) (2 hidden)' or '(kv head) hidden'" in made.text
    plan = make_plan(made.model, Mesh((("tp", 2),)))
    entries = {name: layout.is_replicated for name, layout in plan.layouts.items()}
    assert entries["model.layers.0.self_attn.q_proj.weight"] and entries["model.layers.0.self_attn.o_proj.weight"]
    assert not entries["model.layers.0.mlp.up_proj.weight"]


def test_a_weight_that_is_not_known_keeps_its_block_whole() -> None:
    def rename(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return name.replace("down_proj", "mystery"), shape

    made = draft(LLAMA | {"model_type": "nobody_knows"}, _tensors(rename))
    assert 'mystery.weight" = "..."  # CHECK: 20x24, \'llama\' does not know it' in made.text
    plan = make_plan(made.model, Mesh((("tp", 2),)))
    assert plan.layouts["model.layers.1.mlp.up_proj.weight"].is_replicated


def test_shapes_that_differ_from_layer_to_layer_are_whole() -> None:
    def narrow(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return name, (7,) if name == "model.layers.1.input_layernorm.weight" else shape

    made = draft(LLAMA | {"model_type": "nobody_knows"}, _tensors(narrow))
    assert '"model.layers.{layer}.input_layernorm.weight" = "..."  # CHECK' in made.text


def test_of_a_model_like_no_other_all_is_whole() -> None:
    made = draft(LLAMA, [FullTensor("x", "BF16", (3, 4), "a file")])
    assert 'x = "..."  # CHECK: 3x4' in made.text
    with pytest.raises(PlanError, match="no architecture is near to it"):
        draft(LLAMA, [])


def test_packed_weights_of_a_quantized_checkpoint_are_refused() -> None:
    def pack(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return name.replace("up_proj.weight", "up_proj.qweight"), shape

    config = LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 4}}
    with pytest.raises(PlanError, match="no draft for"):
        draft(config, _tensors(pack))


WORDS = ("norm", "weight", "bias", "scale", "q_proj", "up_proj", "c_fc", "layers", "0", "experts", "sinks", "mlp", "h")
SIZES = (0, 1, 4, 6, 8, 12, 20, 24, 37, 40, 48)


@given(
    st.dictionaries(
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(".".join),
        st.lists(st.sampled_from(SIZES), max_size=3),
        max_size=5,
    ),
    st.sets(st.sampled_from([*LLAMA])),
    st.sampled_from([[], {}, None, 7, "llama", "strange", "\ud800"]),
)
@example({"scale": [6], "weight": [], "bias": [20, 20]}, {"num_attention_heads"}, ["llama"])
@example({"lm_head.weight": [37, 20]}, {"num_attention_heads"}, "\ud800")
def test_whatever_a_checkpoint_has_a_draft_is_made_or_refused(
    shapes: dict[str, list[int]], left_out: set[str], model_type: object
) -> None:
    tensors = [FullTensor(name, "BF16", tuple(shape), "a file") for name, shape in shapes.items()]
    config = {key: value for key, value in LLAMA.items() if key not in left_out} | {"model_type": model_type}
    with suppress(PlanError):
        assert draft(config, tensors).text.encode()
