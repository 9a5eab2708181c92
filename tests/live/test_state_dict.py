"""Live modules as a source: what is written of them is what is written of the checkpoint that they were loaded from."""

from __future__ import annotations

from itertools import product
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import reshard
from reshard.formats.errors import MismatchError, PlanError, ReshardError
from reshard.formats.torch_internals import bytes_in
from reshard.live.state_dict import _bytes_of
from tests import store
from tests.live.processes import run
from tests.marks import of_ranks, one_of_each

MODELS = ("llama", "mixtral", "gpt2", "gpt_oss", "mamba2")


def module(name: str) -> Any:
    return loaded(store.checkpoint(name))


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def weights(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


@pytest.mark.parametrize(
    ("form", "name"),
    one_of_each(product([{"tp": 2}, {"format": "dcp"}], MODELS), lambda case: (*case[0], case[1] == "gpt_oss")),
)
def test_of_a_module_the_same_is_written_as_of_its_checkpoint(name: str, form: dict[str, Any], tmp_path: Path) -> None:
    """Tied weights and experts too. Headers name the source, so tensors are compared where there is one."""
    reshard.split(reshard.state_dict(module(name)), tmp_path / "live", **form)
    reshard.split(store.checkpoint(name), tmp_path / "stored", **form)
    for folder in ("live", "stored"):
        reshard.merge(tmp_path / folder, tmp_path / f"{folder}-merged", max_shard_size=1 << 40)
    live, stored = (load_file(tmp_path / f"{folder}-merged/model.safetensors") for folder in ("live", "stored"))
    assert live.keys() == stored.keys() and all(torch.equal(live[name], stored[name]) for name in stored)


def test_what_reads_a_source_reads_it(tmp_path: Path) -> None:
    source, model = reshard.state_dict(module("mixtral")), store.checkpoint("mixtral")
    assert reshard.inspect(source).complete
    assert reshard.diff(source, model).same
    part, expected = reshard.load(source, tp=2, rank=1), reshard.load(model, tp=2, rank=1)
    assert part.keys() == expected.keys() and all(torch.equal(part[name], expected[name]) for name in expected)
    assert dict(reshard.tensors(source)).keys() == dict(reshard.tensors(model)).keys()
    reshard.split(source, tmp_path / "out", tp=2)
    answer = reshard.verify(source, tmp_path / "out", exact_only=True)
    assert answer.verdict == "same", answer


def test_tensors_by_name_need_a_config(tmp_path: Path) -> None:
    tensors = module("llama").state_dict()
    transposed = {name: tensor.T.contiguous().T if tensor.dim() > 1 else tensor for name, tensor in tensors.items()}
    source = reshard.state_dict(transposed)
    with pytest.raises(ReshardError, match="config"):
        reshard.split(source, tmp_path / "out", tp=2)
    reshard.split(source, tmp_path / "out", tp=2, config=store.checkpoint("llama"))
    assert reshard.verify(store.checkpoint("llama"), tmp_path / "out", exact_only=True).verdict == "same"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_bytes_of_a_tensor_in_another_order(shape: list[int], random: Random) -> None:
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.arange(prod(shape), dtype=torch.int16).reshape(shape).permute(order)
    begin, end = sorted(random.sample(range(tensor.nbytes + 1), 2))
    assert bytes(_bytes_of(tensor, begin, end)) == tensor.contiguous().numpy().tobytes()[begin:end]


@pytest.mark.parametrize(("shape", "strides"), [((1,), (7,)), ((1, 1), (9, 7)), ((1, 3), (9, 1)), ((0, 2), (5, 3))])
def test_a_stride_that_is_never_taken_may_be_any_number(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    tensor = torch.arange(24, dtype=torch.int16).as_strided(shape, strides)
    assert tensor.is_contiguous()
    assert bytes(bytes_in(tensor).numpy()) == bytes(_bytes_of(tensor, 0, tensor.nbytes)) == tensor.numpy().tobytes()


def test_a_large_tensor_in_another_order_is_not_copied_for_each_range(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, copied, contiguous = torch.zeros(64, 4096, dtype=torch.int8).T, list[int](), torch.Tensor.contiguous

    def counted(self: torch.Tensor) -> torch.Tensor:
        copied.append(self.nbytes)
        return contiguous(self)

    monkeypatch.setattr(torch.Tensor, "contiguous", counted)
    for begin in range(0, tensor.nbytes, 1000):
        _bytes_of(tensor, begin, begin + 1000)
    assert sum(copied) < 2 * tensor.nbytes


def test_what_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    model = store.checkpoint("llama")
    with pytest.raises(PlanError, match="int is neither a module nor tensors by name"):
        reshard.state_dict(5)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="meta device"):
        reshard.state_dict(module("llama").to("meta"))
    with pytest.raises(PlanError, match="'step' is not a tensor: it is of type int"):
        reshard.state_dict({"step": 3})  # type: ignore[dict-item]
    with pytest.raises(PlanError, match=r"x: a tensor in torch.sparse_coo is not a plain tensor"):
        reshard.state_dict({"x": torch.ones(2).to_sparse()})
    for signs in (torch._neg_view(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()):
        with pytest.raises(PlanError, match="x: shows memory with other signs than are there"):
            reshard.state_dict({"x": signs})
    with pytest.raises(PlanError, match="x: a nested tensor is not a plain tensor"):
        reshard.state_dict({"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)})
    with pytest.raises(PlanError, match="'3' is not a name: it is of type int"):
        reshard.state_dict({3: torch.ones(2)})  # type: ignore[dict-item]
    tensors = module("llama").state_dict()
    left = tensors.popitem()[0]
    with pytest.raises(ReshardError, match=left):
        reshard.split(reshard.state_dict(tensors), tmp_path / "out", tp=2, config=model)
    assert not list(tmp_path.iterdir())


def test_a_step_while_it_is_written_is_noticed(tmp_path: Path) -> None:
    live = module("llama")
    source = reshard.state_dict(live)
    stream = reshard.tensors(source)
    next(stream)
    with torch.no_grad():
        live.model.norm.weight += 1
    with pytest.raises(MismatchError, match="changed while they were read"):
        list(stream)
    with pytest.raises(MismatchError, match="changed while they were read"):
        reshard.split(source, tmp_path / "out", tp=2)
    assert not list(tmp_path.iterdir())


def sharded(rank: int, world: int, folder: Path, out: Path) -> str | None:
    """A trainer of FSDP2, as docs/how-to/embed.md has it: a rank's part is refused, what is gathered is not."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = loaded(folder)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    with pytest.raises(PlanError, match="this rank has") as error:
        reshard.state_dict(model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        reshard.merge(reshard.state_dict(whole), out, config=folder)
    return error.value.hint


@of_ranks
def test_of_a_sharded_module_what_is_gathered(tmp_path: Path) -> None:
    hints = run(sharded, 2, store.checkpoint("mixtral"), tmp_path / "out")
    assert all(hint is not None and "full_state_dict=True" in hint for hint in hints)
    assert reshard.diff(tmp_path / "out", store.checkpoint("mixtral")).same
