"""``reshard plan --draft``: what is inferred for a model whose rules nobody has written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from formats.errors import PlanError
from formats.mesh import Mesh
from reshard.mesh.plan import make_plan
from reshard.model import draft as drafting
from reshard.model.draft import Draft, draft, draft_of
from reshard.model.model import FullTensor
from reshard.source.access import Access, open_any
from reshard.store.selection import Weights
from tests.support import LLAMA, llama_tensors, write_checkpoint
from tests.test_cli import ok, refused, run
from tests.zoo import save

SAME = (
    "llama", "llama-biases", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma2", "olmo2", "cohere", "phi3", "gpt_neox",
    "bloom", "gpt2", "starcoder2", "glm4_moe", "bert", "mpt",
)  # fmt: skip
OTHERS = ("deepseek_v3", "qwen3_next", "mamba", "gpt_oss", "zamba2", "nemotron_h", "gemma4", "granitemoeshared", "opt")


def _layouts(made: Draft, folder: Path, degree: int) -> tuple[dict, dict]:
    built_in = open_any(folder, Access(), Weights.HEADERS).model
    mesh = Mesh((("tp", degree),))
    found = (make_plan(model, mesh).entries for model in (made.model, built_in))
    first, second = ({name: (e.layout.boxes, e.layout.padded) for name, e in each.items()} for each in found)
    return first, second


@pytest.mark.parametrize("name", SAME)
def test_a_draft_lays_tensors_out_as_the_rules_do(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / name)
    for degree in (2, 4):
        found, expected = _layouts(draft_of(folder), folder, degree)
        assert found == expected


@pytest.mark.parametrize("name", ("llama", "mixtral", "bloom", "gpt2"))
def test_names_and_numbers_are_enough(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(name, tmp_path / name)
    monkeypatch.setattr(drafting, "find_spec", lambda _: None)
    made = draft_of(folder)
    assert made.text.startswith("# DRAFT, inferred from names and shapes")
    found, expected = _layouts(made, folder, 4)
    assert found == expected


@pytest.mark.parametrize("name", OTHERS)
def test_a_draft_covers_every_tensor_and_says_what_is_not_clear(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / name)
    made = draft_of(folder)  # binds
    (tmp_path / "draft.toml").write_text(made.text)
    source = open_any(folder, Access(plan_file=tmp_path / "draft.toml"), Weights.HEADERS)
    assert set(source.plan.entries) == set(source.names)
    assert made.checks > 0


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
    assert '"model.layers.{layer}.self_attn.k_proj.weight" = "30 20"  # CHECK: by its name' in made.text
    plan = make_plan(made.model, Mesh((("tp", 2),)))
    entries = {name: entry.layout.is_replicated for name, entry in plan.entries.items()}
    assert entries["model.layers.0.self_attn.q_proj.weight"] and entries["model.layers.0.self_attn.o_proj.weight"]
    assert not entries["model.layers.0.mlp.up_proj.weight"]


def test_a_block_whose_output_nothing_takes_is_whole() -> None:
    def rename(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return name.replace("down_proj", "mystery"), (24, 24) if "down_proj" in name else shape

    made = draft(LLAMA | {"model_type": "nobody_knows"}, _tensors(rename))
    assert "# CHECK: no weight takes what this one has of 'ff'" in made.text
    plan = make_plan(made.model, Mesh((("tp", 2),)))
    assert plan.entries["model.layers.1.mlp.up_proj.weight"].layout.is_replicated


def test_shapes_that_differ_from_layer_to_layer_have_conditions() -> None:
    def narrow(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return name, (7,) if name == "model.layers.1.input_layernorm.weight" else shape

    made = draft(LLAMA | {"model_type": "nobody_knows"}, _tensors(narrow))
    assert 'when = "layer in [1]", shape = "7"' in made.text


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
