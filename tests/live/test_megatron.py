"""Parts of parameters as Megatron-Core describes them; its own models are in ``tests/engines/live_megatron.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from reshard.formats.errors import PlanError
from reshard.formats.notation.axes import Run
from reshard.live.parameters import slices_of_megatron
from reshard.live.sides import HeldSlice


@dataclass
class Part:
    """What ``ShardedTensor`` has."""

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0


@dataclass
class Object:
    """What ``ShardedObject`` has."""

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]


@dataclass
class Factory:
    """What ``ShardedTensorFactory`` has."""

    key: str
    data: torch.Tensor
    build_fn: Callable[[str, torch.Tensor], object]

    def build(self) -> object:
        return self.build_fn(self.key, self.data)


class Model(nn.Module):
    """A model with one parameter, that says something of it."""

    def __init__(self, shape: tuple[int, ...], says: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(60.0)[: torch.Size(shape).numel()].view(shape))
        self.says = says

    def sharded_state_dict(self, *, metadata: dict[str, object]) -> object:
        return {"weight": self.says(self.weight), "_extra_state": Object("extra", None, (1,), (0,))}


def gated(key: str, data: torch.Tensor) -> object:
    """Gate and up, one after the other, as views."""
    gate, up = data.chunk(2)
    return [Part(key, gate, (2, 12, 3), (1, 3, 0), 1), Part(key, up, (2, 12, 3), (1, 9, 0), 1)]


def grouped(key: str, data: torch.Tensor) -> object:
    """Two experts side by side, copied, as the legacy grouped experts are."""
    experts = data.view(2, 3, 4).transpose(-1, -2).contiguous()
    return {"deeper": [Part(key, experts, (6, 4, 3), (2, 0, 0))]}


def in_order(*order: int) -> Callable[[str, torch.Tensor], object]:
    return lambda key, data: Part(key, data[list(order)], (4,), (0,))


def test_layers_are_a_dimension() -> None:
    model = Model((2, 3), lambda weight: Part("layers.w", weight, (5, 4, 3), (4, 2, 0), 1))
    ((own, tensor),) = slices_of_megatron(model)
    assert own == HeldSlice("layers.w", "F32", (5, 4, 3), ((Run(4, 1),), (Run(2, 2),), (Run(0, 3),)))
    assert tensor.shape == own.local == (1, 2, 3)
    tensor.fill_(7)
    assert model.weight.eq(7).all()


def test_gate_and_up_are_two_parts() -> None:
    model, given = Model((6, 3), lambda weight: Factory("fc1", weight, seen)), []

    def seen(key: str, data: torch.Tensor) -> object:
        given.append(data)
        return gated(key, data)

    parts = slices_of_megatron(model)
    assert len(given) == 1 and given[0] is model.weight  # no indices, of 8 bytes each, where there are views
    assert [own.runs[1] for own, _ in parts] == [(Run(3, 3),), (Run(9, 3),)]
    assert [int(tensor[0, 0, 0]) for _, tensor in parts] == [0, 9]
    assert {tensor.untyped_storage().data_ptr() for _, tensor in parts} == {model.weight.untyped_storage().data_ptr()}


def test_what_would_be_copied_is_found_by_indices() -> None:
    model = Model((6, 4), lambda weight: Factory("experts", weight, grouped))
    model.weight.data = torch.arange(100.0)[13:37].view(6, 4)  # in a buffer of all parameters, as DDP has them
    ((own, tensor),) = slices_of_megatron(model)
    assert own.runs == ((Run(2, 2),), (Run(0, 4),), (Run(0, 3),))
    assert tensor.equal(model.weight.view(2, 3, 4).transpose(-1, -2))
    tensor.fill_(7)
    assert model.weight.eq(7).all()


def test_what_is_no_view_is_refused() -> None:
    for order in ((3, 2, 1, 0), (0, 1, 3, 2)):
        with pytest.raises(PlanError, match=r"^w: what Megatron-Core would store is not a view"):
            slices_of_megatron(Model((4,), lambda weight, order=order: Factory("w", weight, in_order(*order))))
    with pytest.raises(PlanError, match=r"^w: Megatron-Core would store a copy"):
        slices_of_megatron(Model((4,), lambda weight: Part("w", weight.clone(), (4,), (0,))))
    with pytest.raises(PlanError, match=r"a Linear is not a model of Megatron-Core"):
        slices_of_megatron(nn.Linear(2, 2))


def test_chunks_and_wrappers() -> None:
    chunks = [Model((4,), lambda weight, at=at: Part("w", weight, (2, 4), (at, 0), 1)) for at in range(2)]
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module.module = chunks[1]
    assert [own.runs[0] for own, _ in slices_of_megatron([chunks[0], wrapped])] == [(Run(0, 1),), (Run(1, 1),)]
