"""The second witness: what a loader like vLLM's says agrees with our rules, and with none of their mutants."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from reshard.formats.errors import LiveError
from reshard.formats.notation.format import Format
from reshard.formats.notation.format_file import PROGRAMS, format_of, read_format
from reshard.live import vllm_check
from reshard.live.routing import View
from reshard.live.witness import Copied, by_rules, compare, joined, probed, ranges, recorded, unlike
from reshard.mesh.plan import Degrees
from reshard.placement.arrangement import Arrangement, on_mesh
from reshard.placement.program_plan import plan_for
from reshard.source.opening import open_source
from reshard.verify.loader.program import ProgramRank, Request
from tests import store, zoo
from tests.live.loaders import Model
from tests.marks import one_of_each
from tests.programs.oracles import ORACLES, module
from tests.programs.oracles import checkpoint as oracle_checkpoint

CASES = [("llama-biases", 2), ("llama", 1), ("llama", 4), ("llama-mqa", 2), ("qwen2-tied", 2), ("mixtral", 2)]


def arranged(model: str | Path, tp: int, format: Format | None = None) -> Arrangement:
    """Our rules for vLLM's ranks, of a model of the zoo or another checkpoint."""
    folder = store.checkpoint(model) if isinstance(model, str) else model
    format = format or format_of("vllm")
    return on_mesh(plan_for(open_source(folder).model, format, Degrees(tp=tp)), format)


def asked(arrangement: Arrangement, rank: int, tp: int) -> tuple[Model, dict[str, Sequence[Copied]]]:
    """A rank's model, and what its loaders put into it."""
    bound = arrangement.plan.model
    tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in bound.tensors}
    model = Model(bound.config, tensors, rank, tp)
    loaded = recorded(model, model.load_weights, tensors)
    assert unlike(loaded, probed(model, model.load_weights, tensors)) == []
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters()), "the probe put nothing back"
    return model, loaded


def differences(arrangement: Arrangement, tp: int) -> list[str]:
    return [line for rank in range(tp) for line in compare(arrangement, rank, *asked(arrangement, rank, tp))]


@pytest.mark.parametrize(("name", "tp"), one_of_each(CASES, kind=lambda case: case[0] == "mixtral"))
def test_rules_recorder_and_probe_agree(name: str, tp: int) -> None:
    assert differences(arranged(name, tp), tp) == []


MUTANTS = {
    "gate and up exchanged": (
        "llama", '"**.gate_up_proj.*" = ["**.gate_proj.*", "**.up_proj.*"]',
        '"**.gate_up_proj.*" = ["**.up_proj.*", "**.gate_proj.*"]',
    ),
    "k before q": (
        "llama", '"**.qkv_proj.*" = ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"]',
        '"**.qkv_proj.*" = ["**.k_proj.*", "**.q_proj.*", "**.v_proj.*"]',
    ),
    "halves of heads as pairs": (
        "llama", '"**.qkv_proj.*" = ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"]',
        '"**.qkv_proj.*" = { from = ["**.q_proj.*", "**.k_proj.*", "**.v_proj.*"], halves = ["head", "head", ""] }',
    ),
    "a missing bias": (
        "llama-biases", "[dropped]  #", '[dropped]\n"**.gate_proj.bias" = {}\n"**.up_proj.bias" = {}  #',
    ),
    "w1 and w3 exchanged": (
        "mixtral", '{ from = ["**.experts.{expert}.w1.*", "**.experts.{expert}.w3.*"], output_first = true }',
        '{ from = ["**.experts.{expert}.w3.*", "**.experts.{expert}.w1.*"], output_first = true }',
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_of_the_rules_is_caught(tmp_path: Path, mutant: str) -> None:
    name, old, new = MUTANTS[mutant]
    text = (PROGRAMS / "vllm.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "vllm.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    found = differences(arranged(name, 2, read_format(tmp_path / "vllm.toml")), 2)
    assert found, mutant
    assert all(line.startswith(("rank 0: 'model.layers.", "rank 1: 'model.layers.")) for line in found)


def test_an_expert_off_by_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Arrangement._part

    def name_of(*given: object) -> tuple[str, int, object]:
        name, place, at = right(*given)  # type: ignore[arg-type]
        return name, (place + 1) % 6 if "experts" in name else place, at

    monkeypatch.setattr(Arrangement, "_part", name_of)
    found = differences(arranged("mixtral", 2), 2)
    assert len(found) == 2 * 2 * 3, "w13 and w2 of three layers on two ranks"
    assert "experts.5.w1.weight'[0:" in found[0] and "experts.0.w1.weight'[0:" in found[0]


def test_a_transposed_square_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.made("llama-square", lambda path: zoo.save("llama", path, settings={"head_dim": 10}))
    arrangement = arranged(folder, 1)
    model, loaded = asked(arrangement, 0, 1)
    name = "model.layers.0.self_attn.o_proj.weight"
    rows, columns = model.get_parameter(name).shape
    number = next(i for i, tensor in enumerate(arrangement.plan.model.tensors) if tensor.name == name)
    turned = Copied(View(0, (rows, columns), (columns, 1)), number, View(0, (rows, columns), (1, rows)))
    (found,) = compare(arrangement, 0, model, loaded | {name: [turned]})
    assert found == (
        f"rank 0: '{name}'[0:1, 1:2] is '{name}'[0:1, 1:2] by our rules, and '{name}'[1:2, 0:1] by the engine's "
        f"loader ({rows * columns - rows:,} of {rows * columns:,} elements differ)"
    )


def test_a_tensor_of_one_side_is_named() -> None:
    arrangement = arranged("llama", 2)
    model, loaded = asked(arrangement, 0, 2)
    model.add("model.layers.0.mlp.extra", torch.nn.Parameter(torch.zeros(3)))
    del model.model.layers._modules["1"].mlp.down_proj.weight
    found = compare(arrangement, 0, model, loaded | {"model.layers.0.mlp.extra": ()})
    assert found == [
        "rank 0: 'model.layers.1.mlp.down_proj.weight' is in our rules, and not in the engine's model",
        "rank 0: 'model.layers.0.mlp.extra' is in the engine's model, and our rules say nothing of it",
    ]


def test_shape_and_dtype_are_compared() -> None:
    arrangement = arranged("llama", 2)
    model, loaded = asked(arrangement, 0, 2)
    model.get_parameter("model.norm.weight").data = torch.zeros(2, 2)
    model.get_parameter("model.layers.0.input_layernorm.weight").data = torch.zeros(80, dtype=torch.bfloat16)
    found = compare(arrangement, 0, model, loaded)
    assert len(found) == 2
    assert "is F32 by our rules, and torch.bfloat16 in the engine: push(dtype=) rounds F32" in found[0]
    assert "by our rules, and [2, 2] in the engine" in found[1]


@pytest.mark.parametrize("lacks", ["vllm", "reshard", "vllm.config"])
def test_a_python_without_vllm_names_the_option(lacks: str) -> None:
    with pytest.raises(LiveError, match=f"ended early: ModuleNotFoundError: No module named '{lacks}'") as caught:
        vllm_check._answer(f"Traceback\nModuleNotFoundError: No module named '{lacks}'\n")
    assert caught.value.hint == "give the Python of an environment that has vLLM and reshard with engine_python"


@pytest.mark.parametrize("of", ["its own", "the other's", "nobody's"])
def test_each_rank_is_asked_in_one_process(
    of: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has its own part of the model, or that of the other rank; or the engine refuses the model."""
    folder = store.checkpoint("llama")
    bound = open_source(folder).model
    tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in bound.tensors}

    def ranks(request: Request) -> Iterator[ProgramRank]:
        for rank in range(request.tp):
            assert of != "nobody's"
            model = Model(bound.config, tensors, rank if of == "its own" else 1 - rank, request.tp)
            yield ProgramRank(f"rank {rank}", model.state_dict, {}, lambda: None, model=model)

    fake = SimpleNamespace(prepare=lambda _: "vLLM 9", ranks=ranks)
    monkeypatch.setitem(sys.modules, "reshard.verify.loader.in_vllm", fake)
    monkeypatch.setattr(sys, "argv", ["", str(folder), str(folder), "vllm:tp2"])
    vllm_check.main()
    said = capsys.readouterr().out
    if of == "nobody's":
        with pytest.raises(LiveError, match="vLLM 9 stopped while it built its model on this machine: AssertionError"):
            vllm_check._answer(said)
        return
    lines = vllm_check._answer(said)
    assert {line[:7] for line in lines} == (set() if of == "its own" else {"rank 0:", "rank 1:"})


def test_what_is_not_followed_is_an_error() -> None:
    def loaded(load: Callable[[torch.Tensor], object]) -> None:
        recorded(torch.nn.Module(), lambda weights: [load(tensor) for _, tensor in weights], {"w": ("F32", (4, 6))})

    with pytest.raises(LiveError, match=r"the loader does 'aten\.mul\.Tensor' with tensor 'w', which is not followed"):
        loaded(lambda tensor: torch.zeros(4, 6).copy_(tensor * 2))
    with pytest.raises(LiveError, match=r"'aten\._unsafe_view\.default' with tensor 'w'"):
        loaded(lambda tensor: tensor.t().reshape(-1))
    with pytest.raises(LiveError, match=r"'aten\.zero_\.default' with tensor 'w'"):
        loaded(lambda tensor: tensor[1:].zero_())
    with pytest.raises(LiveError, match=r"'aten\.cat\.default' with tensor 'w'"):
        loaded(lambda tensor: torch.cat([torch.zeros(1, 6), tensor]))
    with pytest.raises(LiveError, match=r"'aten\.copy_\.default' with tensor 'w'"):
        loaded(lambda tensor: tensor.copy_(torch.zeros(4, 6)))
    with pytest.raises(LiveError, match="element 2 of a parameter is loaded twice"):
        joined(np.array([[0, 3, 0, 0], [2, 1, 1, 0]]))


CHANGES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "add_": lambda room: room.data.add_(1),
    "neg_": lambda room: room.data.neg_(),
    "zero_ of some": lambda room: room.data[:1].zero_(),
    "fill_ of a column": lambda room: room.data[:, 2].fill_(0),
    "flip": lambda room: room.data.copy_(room.data.flip(0)),
    "out": lambda room: torch.neg(room.data, out=room.data),
    "by a temporary": lambda room: room.data.copy_(room.data.clone() * 2),
    "index": lambda room: room.data.__setitem__([1, 0], room.data[[0, 1]]),
    "bits": lambda room: room.data.view(torch.int16).bitwise_xor_(1),
    "foreach": lambda room: torch._foreach_mul_([room.data], 2.0),
    "numpy": lambda room: room.data.numpy().__imul__(2),
    "asarray": lambda room: np.asarray(room.data).__imul__(2),
    "other data": lambda room: setattr(room, "data", room.data.flip(0)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_was_loaded_is_not_overlooked(change: str) -> None:
    model = torch.nn.Module()
    model.room = torch.nn.Parameter(torch.zeros(4, 6))

    def load(weights: Iterable[tuple[str, torch.Tensor]], change: Callable[..., object] = lambda _: None) -> None:
        for _, tensor in weights:
            model.room.data[:2].copy_(tensor)
        change(model.room)

    tensors = {"w": ("F32", (2, 6))}
    expected = ranges(recorded(model, load, tensors)["room"])
    recorded(model, partial(load, change=lambda room: room.data[2:].fill_(0)), tensors)  # padding
    try:
        found = ranges(recorded(model, partial(load, change=CHANGES[change]), tensors)["room"])
    except LiveError as error:
        assert "followed" in str(error)
    else:
        assert not np.array_equal(found, expected)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "narrow": lambda tensor: tensor.narrow(1, 2, 3),
    "transpose": lambda tensor: tensor.transpose(0, 2),
    "index": lambda tensor: tensor[1, ..., ::2],
    "chunk": lambda tensor: tensor.chunk(2, dim=0)[1].unsqueeze(0).expand(3, -1, -1, -1),
    "unbind": lambda tensor: tensor.unbind(2)[4].t(),
    "element by element": lambda tensor: (
        -torch.exp(tensor.to(torch.float64)[1].float()) if tensor.is_meta else tensor[1]
    ),
    "permute": lambda tensor: tensor.permute(2, 0, 1)[2:, :, 1:],
    "copy": lambda tensor: tensor[1:].transpose(0, 2).contiguous()[2:],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_recorded_view_is_the_view(view: str) -> None:
    """Against torch itself: elements that hold their own numbers."""
    shape = (4, 5, 6)
    expected = VIEWS[view](torch.arange(math.prod(shape)).view(shape))
    model = torch.nn.Module()
    model.room = torch.nn.Parameter(torch.zeros(expected.shape))

    def load(weights: object) -> None:
        for _, tensor in weights:  # type: ignore[attr-defined]
            model.room.data.copy_(VIEWS[view](tensor))

    copies = recorded(model, load, {"w": ("F32", shape)})
    found = [start + i for _, length, _, start in ranges(copies["room"]) for i in range(length)]
    assert found == expected.flatten().tolist()
    assert unlike(copies, probed(model, load, {"w": ("F32", shape)})) == []


def test_of_a_tensor_that_is_set_to_zero_nothing_is_loaded() -> None:
    """As vLLM's loader of gpt-oss does it with a bias, on all ranks but the first."""
    model = torch.nn.Module()
    model.bias, model.weight = (torch.nn.Parameter(torch.empty(2, 3)) for _ in range(2))

    def load(weights: object) -> None:
        for name, tensor in weights:  # type: ignore[attr-defined]
            model.get_parameter(name).data.copy_(tensor.zero_() if name == "bias" else tensor)

    tensors = {"bias": ("F32", (2, 3)), "weight": ("F32", (2, 3))}
    copies = recorded(model, load, tensors)
    assert len(ranges(copies["bias"])) == 0 and ranges(copies["weight"]).tolist() == [[0, 6, 1, 0]]
    assert unlike(copies, probed(model, load, tensors)) == []


def test_rules_cover_each_element_once() -> None:
    """The vocabulary's padding is the only part without a source."""
    for stored, rows in by_rules(arranged("qwen2-tied", 2), 1):
        shape = stored.geometry.shape(1)
        assert shape is not None
        padding = 27 * shape[1] if stored.name == "lm_head.weight" else 0
        assert int(rows[:, 1].sum()) == math.prod(shape) - padding, stored.name


RECORDED = [
    (path.stem, mesh)
    for path in sorted((ORACLES / "vllm" / "models").glob("*.json"))
    for mesh in json.loads(path.read_text()).get("meshes", {})
    if mesh.startswith("tp") and "-" not in mesh
]


@pytest.mark.parametrize(("model", "mesh"), one_of_each(RECORDED, kind=lambda case: case[0] in ("bloom", "mixtral")))
def test_the_ranges_of_our_rules_are_what_vllm_holds(model: str, mesh: str) -> None:
    """Against the fixtures: the number of the checkpoint's element at each place of each tensor of each rank."""
    arrangement, tp = arranged(oracle_checkpoint("vllm", model), int(mesh[2:])), int(mesh[2:])
    fixture = module("vllm", "check")
    first = fixture.first_ids(fixture.read_model(model)["tensors"])
    starts = np.array([first[tensor.name] for tensor in arrangement.plan.model.tensors])
    files = fixture.read_mesh(model, mesh)
    for rank in range(tp):
        held = {name: shard for file, shards in files.items() for name, shard in shards.items() if f"-{rank}-" in file}
        named = {stored.name: rows for stored, rows in by_rules(arrangement, rank)}
        assert named.keys() == {name for name, shard in held.items() if shard.ids is not None}
        for name, rows in named.items():
            found = np.zeros(held[name].ids.size, np.int64)
            for at, length, number, start in rows:
                found[at : at + length] = starts[number] + start + np.arange(length)
            expected = held[name].ids.ravel()
            assert np.array_equal(found[expected != fixture.ANY], expected[expected != fixture.ANY]), name
