"""verify --loader of a program that loads no Hugging Face checkpoint: the layout that it asks for, against files."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import split
from reshard.formats.errors import CheckpointError
from reshard.verify.api import verify
from reshard.verify.loader.ask import LoaderReport, ask
from reshard.verify.loader.program import Box, Layout, ProgramLayout
from reshard.verify.loader.watch import NotFollowedError
from reshard.verify.loader.witness import judge_layout, tiles
from tests import store
from tests.marks import examples, thorough
from tests.support import changed_json, command, python_with
from tests.verify.layout_faults import FAULTS

# ---------------------------------------------------------------------------------------------------------- the boxes


@st.composite
def cut(draw: st.DrawFn) -> tuple[list[Box], tuple[int, ...]]:
    """A shape, and the boxes that it was cut into, each again along any axis."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    boxes: list[Box] = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 6))):
        at, axis = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        begin, end = boxes[at][axis]
        if end - begin > 1:
            edge, box = draw(st.integers(begin + 1, end - 1)), boxes.pop(at)
            boxes += [(*box[:axis], part, *box[axis + 1 :]) for part in ((begin, edge), (edge, end))]
    return draw(st.permutations(boxes)), shape


@examples(100)
@given(cut(), st.data())
def test_boxes_tile_if_each_element_is_in_one(made: tuple[list[Box], tuple[int, ...]], data: st.DataObject) -> None:
    boxes, shape = made
    assert tiles(boxes, shape)
    at, axis = data.draw(st.integers(0, len(boxes) - 1)), data.draw(st.integers(0, len(shape) - 1))
    begin, end = boxes[at][axis]
    moved = begin + data.draw(st.integers(-1, 1)), end + data.draw(st.integers(-1, 1))
    boxes[at] = (*boxes[at][:axis], moved, *boxes[at][axis + 1 :])
    elements = [index for box in boxes for index in itertools.product(*(range(*of) for of in box))]
    assert tiles(boxes, shape) == (sorted(elements) == [*itertools.product(*map(range, shape))])


WHOLE: set[Box] = {((0, 2), (0, 6)), ((2, 4), (0, 6))}
ASKED = {"a": Layout("bfloat16", (4, 6), WHOLE), "table": Layout("bfloat16", (4, 6), WHOLE, rows=3),
         "a._extra_state": Layout(boxes={()})}  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({}, []),
        ({"a": None}, ["'a': the shards lack it"]),
        ({"b": Layout("bfloat16", (4,))}, ["'b': only the shards have it"]),
        ({"a": Layout("bfloat16", (6, 4))}, ["'a': bfloat16 [6, 4], the engine has bfloat16 [4, 6]"]),
        ({"a": Layout("float32", (4, 6), WHOLE)}, ["'a': float32 [4, 6], the engine has bfloat16 [4, 6]"]),
        ({"a": Layout("bfloat16", (4, 6), {((0, 2), (0, 6))})}, ["'a': its chunks do not hold each element once"]),
        ({"a": Layout(boxes={()})}, ["'a': an object, the engine has bfloat16 [4, 6]"]),
        ({"a._extra_state": None}, ["'a._extra_state': the shards lack it"]),
        ({"b._extra_state": Layout(boxes={()})}, []),
        ({"table": Layout("bfloat16", (3, 6), {((0, 3), (0, 6))})}, []),
        ({"table": Layout("bfloat16", (2, 6), {((0, 2), (0, 6))})},
         ["'table': bfloat16 [2, 6], the engine has bfloat16 [4, 6]"]),
    ],
    ids=["same", "lacking", "extra", "shape", "dtype", "chunks", "kind", "object", "further-object", "padding", "rows"],
)  # fmt: skip
def test_each_difference_of_a_layout_is_a_line(stored: dict[str, Layout | None], said: list[str]) -> None:
    found = {name: each for name, each in {**ASKED, **stored}.items() if each is not None}
    assert judge_layout(ProgramLayout(2, ASKED, found)) == said


def test_ranks_that_do_not_ask_for_everything_say_nothing() -> None:
    asked = {"a": Layout("bfloat16", (4, 6), {((0, 2), (0, 6))})}
    with pytest.raises(NotFollowedError, match="do not ask for each element of 'a' once"):
        judge_layout(ProgramLayout(1, asked, asked))


# ------------------------------------------------------------------------------------- a program of Megatron's name

MEGATRON = {
    "__init__": "__version__ = '9.0'",
    "parallel_state": """
import torch.distributed as dist
def initialize_model_parallel(tp, pp, **of):
    assert dist.get_world_size() == tp == of["expert_tensor_parallel_size"] == 2 and pp == 1
get_data_parallel_group = destroy_model_parallel = lambda **_: None
is_pipeline_first_stage = is_pipeline_last_stage = lambda: True
""",
    "dist_checkpointing/__init__": "load_content_metadata = lambda folder: {'singleton_local_shards': False}",
    "dist_checkpointing/dict_utils": "nested_values = dict.values",
    "dist_checkpointing/mapping": "apply_factories = lambda state: None",
    "models/gpt/gpt_layer_specs": "get_gpt_decoder_block_spec = lambda *_: None",
    "transformer/transformer_config": """
from types import SimpleNamespace
TransformerConfig = lambda **of: SimpleNamespace(**{"mtp_num_layers": None} | of)
""",
    "transformer/module": "Float16Module = None",
    "models/gpt/__init__": """
import torch.distributed as dist
from types import SimpleNamespace as Part
from transformer_engine.pytorch import LayerNormLinear, Linear, RMSNorm  # which are not installed
class GPTModel:
    def __init__(self, config, layers, rows, **_):
        wide, ffn, head = config.hidden_size, config.ffn_hidden_size, config.kv_channels
        q, kv = head * config.num_attention_heads, head * config.num_query_groups
        self.config, modules = config, {
            "embedding.word_embeddings": (Linear, wide, rows, "column"),
            "output_layer": (Linear, wide, rows, "column"),
            "decoder.final_layernorm": (RMSNorm, wide, None, None),
            "decoder.layers.self_attention.linear_qkv": (LayerNormLinear, wide, q + 2 * kv, "column"),
            "decoder.layers.self_attention.linear_proj": (Linear, q, wide, "row"),
            "decoder.layers.mlp.linear_fc1": (LayerNormLinear, wide, 2 * ffn, "column"),
            "decoder.layers.mlp.linear_fc2": (Linear, ffn, wide, "row"),
        }
        settings = {"tp_size": 2, "bias": False, "params_dtype": config.params_dtype}
        self.modules = {
            name: (mode, kind(*filter(None, sizes), parallel_mode=mode, **settings))
            for name, (kind, *sizes, mode) in modules.items()
        }
    def sharded_state_dict(self, metadata):
        assert metadata == {"singleton_local_shards": False, "dp_cp_group": None}
        return {str(number): part for number, part in enumerate(self.parts())}
    def parts(self):
        config, rank = self.config, dist.get_rank()
        for name, (mode, module) in self.modules.items():
            layers = config.num_layers if ".layers." in name else 0
            for layer in range(layers or 1):
                for key, x in module.named_parameters():
                    assert x.device.type == "meta"
                    axis = {"column": 0, "row": 1}.get(mode) if key == "weight" else None
                    whole = [size * (1 + (at == axis)) for at, size in enumerate(x.shape)]
                    offset = [size * rank * (at == axis) for at, size in enumerate(x.shape)]
                    yield Part(
                        key=f"{name}.{key}", dtype=x.dtype, local_shape=[*x.shape],
                        global_shape=[layers] * bool(layers) + whole, global_offset=[layer] * bool(layers) + offset,
                        prepend_axis_num=int(bool(layers)), allow_shape_mismatch=not layers and axis == 0)
                if layers or mode is None:
                    yield Part(unique_key=f"{name}._extra_state/shard_{layer}_{layers or 1}")
""",
}
"""A program of the name of Megatron-Core, which holds Llama as Megatron-Core does."""


def _megatron(folder: Path, changed: str = "") -> Path:
    for name, text in MEGATRON.items():
        file = folder / f"megatron/core/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + (changed if name == "models/gpt/__init__" else ""))
    return python_with(folder / "python", folder)


def _asked(python: Path, original: Path, out: Path) -> LoaderReport:
    return ask(str(python), "megatron", original, out, {"tp": 2, "etp": 2}, "float32", "transformer_engine")


def test_the_verdict_says_what_a_layout_shows(tmp_path: Path) -> None:
    original, out = store.checkpoint("llama"), tmp_path / "out"
    split(original, out, tp=2, format="megatron")
    done = command("verify", original, out, "--exact-only", "--loader", _megatron(tmp_path))
    assert done.returncode == 0, done.stdout
    name = "Megatron-Core 9.0 with stand-ins for Transformer Engine"
    assert f"The sharded_state_dict of {name} asks for all 9 tensors on 2 ranks and no others, by name" in done.stdout
    assert "Of values, and of rows inside a tensor, it says nothing." in done.stdout
    assert f"'megatron' with names and shapes as in the sharded_state_dict of {name}, the rest by resh" in done.stdout
    assert "puts the same bytes" not in done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_layout_is_found(fault: str, tmp_path: Path) -> None:
    original, out = Path(shutil.copytree(store.checkpoint("llama"), tmp_path / "original")), tmp_path / "out"
    split(original, out, tp=2, format="megatron")
    python, (inject, said) = _megatron(tmp_path), FAULTS[fault]
    assert _asked(python, original, out).is_same
    inject(original, out)
    found = _asked(python, original, out)
    assert not found.is_same and said in "\n".join(found.differences)
    assert "differs from the shards in " in found.verdict


@thorough
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("GPTModel.__init__ = lambda *_, **__: dist.what_was_moved", "AttributeError: module 'torch.distributed' has "),
        ("def refuse(*_, **__): assert False, 'no such model'\nGPTModel.__init__ = refuse", "no such model"),
        ("GPTModel.parts = lambda self, of=GPTModel.parts: (x for x in of(self) if dist.get_rank())", "not ask for"),
    ],
    ids=["moved", "refuses", "half"],
)  # fmt: skip
def test_a_layout_that_is_not_known_proves_nothing(changed: str, said: str, tmp_path: Path) -> None:
    original, out = store.checkpoint("llama"), tmp_path / "out"
    split(original, out, tp=2, format="megatron")
    python = _megatron(tmp_path, changed)
    with pytest.raises(CheckpointError, match="Megatron-Core 9") as raised:
        verify(original, out, exact_only=True, loader=str(python))
    assert said in str(raised.value)


def test_a_type_whose_settings_are_not_known_is_unchecked(tmp_path: Path) -> None:
    original, out = Path(shutil.copytree(store.checkpoint("llama"), tmp_path / "original")), tmp_path / "out"
    split(original, out, tp=2, format="megatron")
    with changed_json(original / "config.json") as config:
        config["model_type"] = "gpt_oss"
    found = _asked(_megatron(tmp_path), original, out)
    assert found.unchecked is not None and "settings of the type 'gpt_oss' are not known" in found.unchecked
    assert not found.verdict
