"""Laws of what training programs leave: any model, cut by torch itself or by DeepSpeed's rule, is the model again."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError, ReshardError
from reshard.formats.files.chunks import flat_chunks
from reshard.formats.files.safetensors import TensorInfo
from tests import store
from tests.marks import one_of_each
from tests.oracles.torchfile import load_dcp
from tests.support import bytes_of, command, weights_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

MODELS = ("llama-tied", "phi3", "mixtral", "bamba")
State = dict[str, torch.Tensor]


class Weights(nn.Module):
    """A module whose parameters have the names of a checkpoint's tensors."""

    def __init__(self, tensors: State) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            inner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in inner._modules:
                    inner.add_module(part, nn.Module())
                inner = inner._modules[part]  # type: ignore[assignment]
            inner.register_parameter(last, nn.Parameter(tensor.clone()))


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[None]:
    """This process as a rank of a group that does not exist."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        distributed.destroy_process_group()
        _clear_sharding_prop_cache()  # it keeps the mesh of this rank


def save_fsdp(
    folder: Path, tensors: State, sizes: tuple[int, ...], names: tuple[str, ...], optimizer: bool = False
) -> None:
    """What verl saves: the state dict of each rank; ``tp`` is a dimension of the mesh that cuts each tensor, too."""
    folder.mkdir(parents=True)
    world = math.prod(sizes)
    for rank in range(world):
        with rank_of(rank, world):
            mesh, model = init_device_mesh("cpu", sizes, mesh_dim_names=names), Weights(tensors)
            if "tp" in names:
                _cut(model, mesh["tp"])
            fully_shard(model, mesh=mesh[tuple(name for name in names if name != "tp")])
            torch.save(model.state_dict(), folder / f"model_world_size_{world}_rank_{rank}.pt")
            if optimizer:
                adam = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, foreach=False)
                for parameter in model.parameters():
                    parameter.grad = parameter.detach().clone()
                adam.step()
                torch.save(adam.state_dict(), folder / f"optim_world_size_{world}_rank_{rank}.pt")


def _cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism: matrices by rows or by columns in turn, vectors on all ranks."""
    for number, module in enumerate(model.modules()):
        for name, parameter in [*module.named_parameters(recurse=False)]:
            dim = number % parameter.dim()
            placement = Shard(dim) if parameter.dim() > 1 and parameter.shape[dim] > 1 else Replicate()
            cut = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(cut))


def check(folder: Path, original: Path, out: Path) -> None:
    """A trainer's folder is merged to the original's tensors, and converted as they are."""
    merge(folder, out / "merged", config=original)
    merged, expected = bytes_of(out / "merged"), bytes_of(original)
    if "lm_head.weight" not in expected:  # DeepSpeed names a tied tensor twice
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
        merged.setdefault("lm_head.weight", expected["lm_head.weight"])
    assert merged == expected
    name = None if "bamba" in original.name else "vllm"  # not compared with vLLM
    split(folder, out / "split", tp=2, format=name, config=original)
    split(out / "merged", out / "direct", tp=2, format=name)
    for file in (out / "direct").rglob("*.safetensors"):
        assert bytes_of((out / "split" / file.relative_to(out / "direct")).parent) == bytes_of(file.parent)


# -- FSDP ------------------------------------------------------------------------------------------------------------

MESHES = (((3,), ("fsdp",)), ((2, 2), ("ddp", "fsdp")), ((3, 2), ("dp", "tp")), ((2,), ("fsdp",)), ((5,), ("fsdp",)),
          ((2, 3), ("dp", "tp")), ((2, 2, 2), ("ddp", "fsdp", "tp")))  # fmt: skip


@pytest.mark.parametrize("model", one_of_each(MODELS))
@pytest.mark.parametrize(("sizes", "names"), one_of_each(MESHES))
def test_what_fsdp_leaves(sizes: tuple[int, ...], names: tuple[str, ...], model: str, tmp_path: Path) -> None:
    original = store.checkpoint(model)
    save_fsdp(tmp_path / "actor", weights_of(original), sizes, names)
    check(tmp_path / "actor", original, tmp_path)


@pytest.mark.parametrize("rank", one_of_each(range(4)))
@pytest.mark.parametrize("what", ["model", "optim"])
def test_copies_that_differ(what: str, rank: int, tmp_path: Path) -> None:
    """A file of another step in place of any rank's: the rank with the same parts contradicts it."""
    original = store.checkpoint("llama-tied")
    save_fsdp(tmp_path / "actor", weights_of(original), (2, 2), ("ddp", "fsdp"), optimizer=True)
    other = {name: tensor * 2 for name, tensor in weights_of(original).items()}
    save_fsdp(tmp_path / "other", other, (2, 2), ("ddp", "fsdp"), optimizer=True)
    name = f"{what}_world_size_4_rank_{rank}.pt"
    (tmp_path / "other" / name).replace(tmp_path / "actor" / name)
    with pytest.raises(
        MismatchError, match=f"should be the same in .*_rank_{rank % 2}.pt.* and .*_rank_{rank % 2 + 2}"
    ):
        if what == "model":
            merge(tmp_path / "actor", tmp_path / "out", config=original)
        else:
            split(tmp_path / "actor", tmp_path / "out", tp=2, format="dcp", config=original)
    assert not (tmp_path / "out").exists()


def test_the_averages_of_fsdp_over_tensor_parallelism(tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    tensors = weights_of(original)
    save_fsdp(tmp_path / "actor", tensors, (2, 2), ("dp", "tp"), optimizer=True)
    split(tmp_path / "actor", tmp_path / "out", tp=2, format="dcp", config=original)
    found = load_dcp(tmp_path / "out").tensors
    for name, weight in tensors.items():
        average = found[f"optimizer.state.{name}.exp_avg"]
        assert (torch.from_numpy(average).float() == torch.zeros_like(weight).lerp(weight, 1 - 0.9)).all(), name


def test_a_mesh_that_contradicts_the_shapes(tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    save_fsdp(tmp_path / "actor", weights_of(original), (2,), ("fsdp",))
    with rank_of(1, 2):
        mesh, file = init_device_mesh("cpu", (2,)), tmp_path / "actor" / "model_world_size_2_rank_1.pt"
        state = torch.load(file, weights_only=False)
        name, whole = next((name, each) for name, each in state.items() if each.shape[0] > 4)
        local = torch.zeros(1, *whole.shape[1:])
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        torch.save(state, file)
    with pytest.raises(MismatchError, match=f"'{name}': no reading of .Shard.0.. on a mesh 2 of a tensor"):
        merge(tmp_path / "actor", tmp_path / "merged", config=original)


def test_a_pickle_that_would_run_is_named_and_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "actor").mkdir()
    torch.save({"a": Attack()}, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    done = command("merge", tmp_path / "actor", tmp_path / "merged", "--config", store.checkpoint("llama-tied"))
    assert done.returncode == 2 and "the pickle asks for" in done.stderr and "no code is run" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"actor"}


def test_files_of_different_steps(tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    save_fsdp(tmp_path / "actor", weights_of(original), (2,), ("fsdp",), optimizer=True)
    file = tmp_path / "actor" / "optim_world_size_2_rank_1.pt"
    with rank_of(1, 2):
        state = torch.load(file, weights_only=False)
        for of in state["state"].values():
            of["step"] += 1
        torch.save(state, file)
    with pytest.raises(MismatchError, match="are of different steps"):
        merge(tmp_path / "actor", tmp_path / "merged", config=original)


# -- DeepSpeed -------------------------------------------------------------------------------------------------------


def save_zero(
    folder: Path, tensors: State, stage: int, world: int, groups: int = 1, frozen: int = 0,
    change: Callable[[int, dict[str, Any]], object] = lambda rank, state: None,
) -> None:  # fmt: skip
    """What DeepSpeed saves, by its rule: the first ``frozen`` tensors have no master, ``groups`` have the others."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    names = [*tensors]
    shared = {"lm_head.weight": "model.embed_tokens.weight"} if "lm_head.weight" not in tensors else {}
    shared = {copy: origin for copy, origin in shared.items() if origin in tensors}
    still, moving = names[:frozen], names[frozen:]
    shapes = [{name: tensors[name].shape for name in moving[group::groups]} for group in range(groups)]

    def parts(flat: torch.Tensor, unit: int) -> list[torch.Tensor]:
        padded = torch.cat([flat, flat.new_zeros(-len(flat) % unit)])
        return [part.clone() for part in padded.chunk(world)] if len(padded) else [padded] * world

    def lists(scale: float) -> list[list[torch.Tensor]]:
        """For each rank, its list of each group."""
        if stage < 3:
            flats = (torch.cat([tensors[name].reshape(-1) for name in group]) * scale for group in shapes)
            return [*map(list, zip(*(parts(flat, 2 * world) for flat in flats), strict=True))]
        cut = [[parts(tensors[name].reshape(-1) * scale, world) for name in group] for group in shapes]
        return [[torch.cat([each[rank] for each in group]) for group in cut] for rank in range(world)]

    masters, first, second = lists(1.0), lists(0.5), lists(0.25)
    if stage < 3:  # the masters are saved without the padding at the end
        for group, of in enumerate(shapes):
            total, at = sum(map(math.prod, of.values())), 0
            for rank in range(world):
                length = len(masters[rank][group])
                masters[rank][group] = masters[rank][group][: max(min(total - at, length), 0)].clone()
                at += length
    for rank in range(world):
        states = {
            number: {"step": torch.tensor(7.0), "exp_avg": first[rank][number], "exp_avg_sq": second[rank][number]}
            for number in range(groups)
        }
        own: dict[str, Any] = {"state": states, "param_groups": [{"lr": 0.1, "params": [0]}]}
        own = (
            {"base_optimizer_state": own, "single_partition_of_fp32_groups": masters[rank]}
            if stage < 3
            else {"optimizer_state_dict": own, "fp32_flat_groups": masters[rank]}
        )
        state = {"optimizer_state_dict": {"zero_stage": stage, "partition_count": world, **own}}
        change(rank, state)
        torch.save(state, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if rank and stage < 3:
            continue
        fragments = {name: tensors[name] for name in still}
        if stage == 3:
            fragments = {name: parts(tensors[name].reshape(-1), world)[rank] for name in still}
        model = {
            "module": {name: tensors[name].new_zeros(0) if stage == 3 else tensors[name] for name in names},
            "param_shapes": shapes, "shared_params": {} if rank else shared, "global_steps": 7, "dp_world_size": world,
            "frozen_param_shapes": {name: tensors[name].shape for name in still} if stage > 1 else None,
            "frozen_param_fragments": fragments if stage > 1 else None, "buffer_names": [], "ds_version": "0.19.8",
        }  # fmt: skip
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        torch.save(model, step / f"{prefix}mp_rank_00_model_states.pt")


@pytest.mark.parametrize("model", one_of_each(MODELS))
@pytest.mark.parametrize("stage", one_of_each([1, 2, 3], lambda stage: stage == 3))
@pytest.mark.parametrize(("world", "groups", "frozen"), one_of_each([(3, 2, 1), (2, 1, 0), (5, 3, 2)]))
def test_what_deepspeed_leaves(stage: int, world: int, groups: int, frozen: int, model: str, tmp_path: Path) -> None:
    original = store.checkpoint(model)
    save_zero(tmp_path / "run", weights_of(original), stage, world, groups, frozen)
    check(tmp_path / "run", original, tmp_path)


@pytest.mark.parametrize("stage", one_of_each([3, 2]))
def test_the_averages_of_deepspeed(stage: int, tmp_path: Path) -> None:
    original = store.checkpoint("mixtral")
    save_zero(tmp_path / "run", weights_of(original), stage, 3, 2, 1)
    split(tmp_path / "run" / "global_step7", tmp_path / "out", tp=2, format="dcp", config=original)
    found = load_dcp(tmp_path / "out").tensors
    for name, weight in [*weights_of(original).items()][1:]:
        assert (torch.from_numpy(found[f"optimizer.state.{name}.exp_avg"]).float() == weight * 0.5).all(), name
        assert (torch.from_numpy(found[f"optimizer.state.{name}.exp_avg_sq"]).float() == weight * 0.25).all(), name
        assert found[f"optimizer.state.{name}.step"] == 7


def _mapped(names: list[str], of: State, gap: int, world: int) -> Callable[[int, dict[str, Any]], None]:
    """What DeepSpeed states of lists of other orders than ``param_shapes``, and with ``gap`` elements between them."""
    flats = {kind: torch.cat([torch.cat([of[name].reshape(-1) * scale, torch.zeros(gap)]) for name in names])
             for kind, scale in (("fp32", 1.0), ("exp_avg", 0.5), ("exp_avg_sq", 0.25))}  # fmt: skip
    length = -(-len(flats["fp32"]) // world)

    def change(rank: int, state: dict[str, Any]) -> None:
        inner, begin, slices = state["optimizer_state_dict"], 0, {}
        for name in names:
            low, high = (min(max(at - rank * length, 0), length) for at in (begin, begin + of[name].numel()))
            begin += of[name].numel() + gap
            slices |= {name: fragment_address(high - low, low)} if low < high else {}
        lists = {kind: flat[rank * length : (rank + 1) * length].clone() for kind, flat in flats.items()}
        inner |= {"param_slice_mappings": [slices], "single_partition_of_fp32_groups": [lists.pop("fp32")],
                  "base_optimizer_state": [{"step": torch.tensor(7.0), **lists}]}  # fmt: skip

    return change


@dataclass
class fragment_address:
    """Pickled as if it were DeepSpeed's."""

    numel: int
    start: int


@pytest.fixture
def deepspeeds_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """What says where a parameter lies in a list is pickled as if it were DeepSpeed's."""
    for name in ("deepspeed", "deepspeed.utils", "deepspeed.utils.tensor_fragment"):
        monkeypatch.setitem(sys.modules, name, module := types.ModuleType(name))
        module.__spec__ = ModuleSpec(name, None)  # libraries look whether there is a DeepSpeed
    monkeypatch.setattr(module, "fragment_address", fragment_address, raising=False)
    monkeypatch.setattr(fragment_address, "__module__", module.__name__)


def save_reordered(folder: Path, original: Path, gap: int) -> State:
    """A ZeRO-2 run of three ranks whose lists have another order than ``param_shapes``; returns its tensors."""
    tensors = weights_of(original)
    names = [name for first in range(3) for name in [*tensors][first::3]]
    save_zero(folder, tensors, 2, 3, change=_mapped(names, tensors, gap, 3))
    return tensors


@pytest.mark.usefixtures("deepspeeds_names")
@pytest.mark.parametrize("gap", one_of_each([3, 0]))
def test_lists_in_another_order(gap: int, tmp_path: Path) -> None:
    """``round_robin_gradients``, ``parameter_alignment`` and ``elastic_checkpoint``; zero_to_fp32 ignores the order."""
    original = store.checkpoint("llama-tied")
    tensors = save_reordered(tmp_path / "run", original, gap)
    check(tmp_path / "run", original, tmp_path)
    split(tmp_path / "run", tmp_path / "out", tp=2, format="dcp", config=original)
    found = load_dcp(tmp_path / "out").tensors
    for name, weight in tensors.items():
        assert (torch.from_numpy(found[f"optimizer.state.{name}.exp_avg"]).float() == weight * 0.5).all(), name


@pytest.mark.usefixtures("deepspeeds_names")
@pytest.mark.parametrize("rank", range(3))
def test_lists_of_which_one_does_not_say_its_order(rank: int, tmp_path: Path) -> None:
    save_reordered(tmp_path / "run", original := store.checkpoint("llama-tied"), 0)
    file = tmp_path / "run" / "global_step7" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    state = torch.load(file, weights_only=False)
    del state["optimizer_state_dict"]["param_slice_mappings"]
    torch.save(state, file)
    with pytest.raises(MismatchError, match=f"{file.name} has no param_slice_mappings, and others have them"):
        merge(tmp_path / "run", tmp_path / "merged", config=original)


@pytest.mark.usefixtures("deepspeeds_names")
@pytest.mark.parametrize("ranks", [(0, 1), (1, 2), (0, 2)])
def test_lists_of_ranks_that_were_exchanged(ranks: tuple[int, int], tmp_path: Path) -> None:
    save_reordered(tmp_path / "run", original := store.checkpoint("llama-tied"), 0)
    one, other = (tmp_path / "run" / "global_step7" / f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in ranks)
    content = one.read_bytes()
    other.replace(one)
    other.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"in the list of rank ., and not from the end of the list before it"):
        merge(tmp_path / "run", tmp_path / "merged", config=original)


def _shorter(rank: int, state: dict[str, Any]) -> None:
    inner = state["optimizer_state_dict"]
    for lists in (inner.get("single_partition_of_fp32_groups"), inner.get("fp32_flat_groups")):
        if lists is not None and rank == 1:
            lists[0] = lists[0][:-9].clone()


def _other_step(rank: int, state: dict[str, Any]) -> None:
    inner = state["optimizer_state_dict"]
    (inner.get("base_optimizer_state") or inner["optimizer_state_dict"])["state"][0]["step"] += rank


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("change", "said"),
    [(_shorter, "rank 1 ha(s|ve) [0-9,]+ elements, (it|they) should"), (_other_step, "of different steps")],
)
def test_a_list_that_does_not_fit(stage: int, change: Callable[..., None], said: str, tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    save_zero(tmp_path / "run", weights_of(original), stage, 3, change=change)
    with pytest.raises((CheckpointError, MismatchError), match=said):
        merge(tmp_path / "run", tmp_path / "merged", config=original)
    assert not (tmp_path / "merged").exists()


def save_parallel(
    folder: Path, tensors: State, stage: int, info: dict[str, Any] | None, last: State | None = None
) -> None:
    """What two tensor parallel ranks save: rows of a matrix, columns of a row-parallel one, whole vectors.

    The second may have those of the ``last`` tensors.
    """
    for rank in range(2):
        tensors = last or tensors if rank else tensors
        dims = {name: 1 if name.endswith(COLUMNS) else 0 for name, of in tensors.items() if of.dim() > 1}
        parts = {
            name: of.chunk(2, dims[name])[rank].contiguous() if name in dims else of for name, of in tensors.items()
        }
        save_zero(one := folder.with_name(f"{folder.name}-{rank}"), parts, stage, 2, frozen=1)
        for file in (one / "global_step7").iterdir():
            state = torch.load(file)
            if "module" in state:
                state["module"]["lm_head.weight"] = state["module"]["model.embed_tokens.weight"]
                state |= {"mp_world_size": 2, "universal_checkpoint_info": info}
                torch.save(state | ({"shared_params": {}} if rank else {}), file)
            file.rename(file.with_name(file.name.replace("mp_rank_00", f"mp_rank_{rank:02d}")))
    one.with_name(f"{folder.name}-0").rename(folder)
    for file in (one / "global_step7").iterdir():
        file.rename(folder / "global_step7" / file.name)


COLUMNS = ("o_proj.weight", "down_proj.weight")
INFO = {"universal_checkpoint_version": 0.4,
        "tp_replicated_parameter_patterns": [r"model.layers.\d+.\w*norm.weight".replace(r"\w*", part) for part in (
            "input_layer", "post_attention_layer")] + [r"^model\.norm\.weight$"],
        "parameter_with_row_parallelism_patterns": [
            rf"^model.layers.\d+.{module}.weight$" for module in ("self_attn.o_proj", "mlp.down_proj")]}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_parallel_ranks(stage: int, tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    save_parallel(tmp_path / "run", weights_of(original), stage, INFO)
    check(tmp_path / "run", original, tmp_path)
    split(tmp_path / "run", tmp_path / "out", tp=2, format="dcp", config=original)
    found = load_dcp(tmp_path / "out").tensors
    for name, weight in [*weights_of(original).items()][1:]:
        assert (torch.from_numpy(found[f"optimizer.state.{name}.exp_avg"]).float() == weight * 0.5).all(), name


@pytest.mark.parametrize("stage", one_of_each([3, 1]))
def test_tensor_parallel_ranks_whose_copies_differ(stage: int, tmp_path: Path) -> None:
    tensors = weights_of(original := store.checkpoint("llama-tied"))
    name = "model.norm.weight"
    save_parallel(tmp_path / "run", tensors, stage, INFO, {**tensors, name: tensors[name] + 1})
    with pytest.raises(MismatchError, match=f"'{name}' should be the same in .*mp_rank_00.* and .*mp_rank_01"):
        merge(tmp_path / "run", tmp_path / "merged", config=original)


def test_ranks_of_zero_3_whose_buffers_differ(tmp_path: Path) -> None:
    """Each rank's file of the model has all of what has no master."""
    original = store.checkpoint("llama-tied")
    save_zero(tmp_path / "run", tensors := weights_of(original), 3, 2, frozen=1)
    name = next(iter(tensors))
    for rank in range(2):
        file = tmp_path / "run" / "global_step7" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        state = torch.load(file)
        state |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
        state["module"][name] = tensors[name] + rank
        torch.save(state, file)
    with pytest.raises(MismatchError, match=f"'{name}' should be the same in .*pp_rank_0.* and .*pp_rank_1"):
        merge(tmp_path / "run", tmp_path / "merged", config=original)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        (None, "2 model parallel ranks, and no file says how its tensors are cut"),
        (
            INFO | {"parameter_to_average_patterns": ["model.layers.0.mlp.up_proj"]},
            "'model.layers.0.mlp.up_proj.weight' is",
        ),
        (
            INFO | {"parameter_to_average_patterns": ["(a*)*b"]},
            "has the expression '\\(a\\*\\)\\*b', which is not read",
        ),
        (INFO | {"parameter_with_row_parallelism_patterns": []}, "make .160, 36., it should be .80, 72."),
    ],
)
def test_tensor_parallel_ranks_that_do_not_say_how(info: dict[str, Any] | None, said: str, tmp_path: Path) -> None:
    original = store.checkpoint("llama-tied")
    save_parallel(tmp_path / "run", weights_of(original), 1, info)
    with pytest.raises(ReshardError, match=said):
        merge(tmp_path / "run", tmp_path / "merged", config=original)
    (tmp_path / "run" / "global_step7" / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="no model of model parallel rank 1" if info else "no file says"):
        merge(tmp_path / "run", tmp_path / "merged", config=original)


# -- ranges ----------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_range_of_a_list_is_few_chunks(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    begin = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - begin))
    info, numbers = TensorInfo("a", "F32", (count,), Path("file"), 100, 4 * count), torch.arange(total).view(shape)
    found, at = list[int](), 100
    for chunk, where in flat_chunks(info, tuple(shape), begin):
        assert (where.shape, where.offset, where.nbytes) == (chunk.shape, at, 4 * math.prod(chunk.shape))
        at += where.nbytes
        box = numbers[tuple(slice(low, high) for low, high in zip(chunk.offset, chunk.end, strict=True))]
        found += box.reshape(-1).tolist()
    assert found == [*range(begin, begin + count)]
    assert len([*flat_chunks(info, tuple(shape), begin)]) <= 2 * len(shape) - 1
