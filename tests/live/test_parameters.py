"""What ranks hold of real models: FSDP2, tensor parallel, replicas, experts, and what transformers makes of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from reshard.formats.errors import LiveError, PlanError
from reshard.formats.notation.axes import Run
from reshard.live.parameters import check_unchanged, slices_of
from reshard.live.sides import HeldSlice
from tests import zoo
from tests.live.processes import run
from tests.marks import of_ranks, one_of_each, thorough

Fulls = Mapping[str, torch.Tensor]


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)
        self.experts = nn.Parameter(torch.empty(4, 6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)) + self.experts.sum()


def numbered(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give each element its own number; copies of the whole tensors."""
    for tensor in model.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@contextmanager
def no_communication() -> Iterator[None]:
    """Whatever gathers raises, and no collective is counted."""
    forbidden = patch.object(DTensor, "full_tensor"), patch.object(DTensor, "redistribute")
    with CommDebugMode() as counted, forbidden[0] as full, forbidden[1] as redistribute:
        full.side_effect = redistribute.side_effect = AssertionError("gathers")
        yield
    assert counted.get_total_counts() == 0


def examine(model: nn.Module, fulls: Fulls) -> list[HeldSlice]:
    """What is held, after a look at every element and at where it lies."""
    with no_communication():
        found = slices_of(model)
    live = {
        each.to_local().untyped_storage().data_ptr() if isinstance(each, DTensor) else each.untyped_storage().data_ptr()
        for each in [*model.parameters(), *model.buffers()]
    }
    assert {own.name for own, _ in found} == {*fulls}
    for own, tensor in found:
        full = fulls[own.name]
        assert own.shape == full.shape
        for dim, runs in enumerate(own.runs):
            full = torch.cat([full[(slice(None),) * dim + (slice(each.offset, each.end),)] for each in runs] or [
                full[(slice(None),) * dim + (slice(0, 0),)]
            ], dim)  # fmt: skip
        assert own.local == tensor.shape
        assert torch.equal(tensor, full.to(tensor.dtype)), own.name
        assert tensor.untyped_storage().data_ptr() in live
    return [own for own, _ in found]


class Way(NamedTuple):
    """A mesh, its names, the width of the MLP, and over which of the mesh's dimensions what is sharded."""

    mesh: tuple[int, ...]
    names: tuple[str, ...]
    hidden: int = 6
    inner: int = 8
    expert_dim: int | None = None
    """The dimension of the experts' tensor that FSDP shards, where a dimension of the mesh shards the experts."""


WAYS = {
    "fsdp 2 x tp 2, uneven": Way((2, 2), ("fsdp", "tp"), 5, 7),
    "fsdp 2": Way((2,), ("fsdp",)),
    "fsdp 3, uneven": Way((3,), ("fsdp",), 5, 7),
    "fsdp 4, empty": Way((4,), ("fsdp",), 3, 2),
    "fsdp 2 x tp 2": Way((2, 2), ("fsdp", "tp")),
    "fsdp 3 x tp 2, 7": Way((3, 2), ("fsdp", "tp"), 6, 7),
    "fsdp 3 x tp 2, 13": Way((3, 2), ("fsdp", "tp"), 5, 13),
    "hsdp 2 x 2": Way((2, 2), ("replica", "fsdp"), 5, 7),
    "hsdp 2 x 1 x tp 2": Way((2, 1, 2), ("replica", "fsdp", "tp")),
    "ep 2 x fsdp 2, dimension 0": Way((2, 2), ("fsdp", "ep"), expert_dim=0),
    "ep 2 x fsdp 2, dimension 1": Way((2, 2), ("fsdp", "ep"), expert_dim=1),
}


def made(way: Way) -> tuple[nn.Module, Fulls]:
    """The sharded model, and its whole tensors."""
    mesh = init_device_mesh("cpu", way.mesh, mesh_dim_names=way.names)
    model = Mlp(way.hidden, way.inner)
    fulls = numbered(model)
    if "tp" in way.names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "ep" in way.names:
        model.experts = nn.Parameter(distribute_tensor(model.experts.data, mesh["ep"], [Shard(0)]))
    data = tuple(name for name in way.names if name in ("replica", "fsdp"))
    experts, dim = model.experts, way.expert_dim or 0
    fully_shard(
        model, mesh=mesh[data], shard_placement_fn=lambda parameter: Shard(dim if parameter is experts else 0)
    )  # fmt: skip
    return model, fulls


def of_way(rank: int, world: int, way: Way) -> list[HeldSlice]:
    return examine(*made(way))


def covers(ranks: list[list[HeldSlice]]) -> None:
    """All that the ranks hold together is each tensor."""
    elements: dict[str, set[tuple[int, ...]]] = {}
    shapes = {own.name: own.shape for own in ranks[0]}
    for own in itertools.chain(*ranks):
        indices = [[index for each in dim for index in range(each.offset, each.end)] for dim in own.runs]
        elements.setdefault(own.name, set()).update(itertools.product(*indices))
    for name, shape in shapes.items():
        assert elements[name] == set(itertools.product(*map(range, shape))), name


@pytest.mark.parametrize("name", one_of_each([*WAYS]))
@of_ranks
def test_each_rank_holds_what_it_says(name: str) -> None:
    way = WAYS[name]
    covers(run(of_way, torch.Size(way.mesh).numel(), way))


STRIDED: Mapping[str, Any] = {
    "strided and replicated": ((8, 2), [_StridedShard(0, split_factor=2), Replicate()]),
    "strided last": ((8, 2), [Shard(0), _StridedShard(0, split_factor=2)]),
    "strided, of two and of four": ((16, 2), [_StridedShard(0, split_factor=4), Shard(0)]),
    "strided columns": ((3, 8), [Replicate(), _StridedShard(1, split_factor=2)]),
}


def of_strided(rank: int, world: int, shape: tuple[int, ...], placements: list[Any]) -> list[HeldSlice]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = nn.Module()
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    model.weight = nn.Parameter(distribute_tensor(full, mesh, placements))
    return examine(model, {"weight": full})


@thorough
@pytest.mark.parametrize("name", STRIDED)
@of_ranks
def test_parts_with_holes(name: str) -> None:
    covers(run(of_strided, 4, *STRIDED[name]))


def of_transformers(
    rank: int, world: int, folder: str, options: Mapping[str, Any]
) -> tuple[list[HeldSlice], list[str]]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if "tp_plan" not in options:
        options = {"distributed_config": DistributedConfig(**options)}
    fulls = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    found = examine(model, {name: tensor.detach() for name, tensor in fulls.items()})
    return found, [own.name for own in found if any(len(runs) > 1 for runs in own.runs)]


TP, TP_FSDP, HSDP = {"tp_plan": "auto"}, {"tp_size": 2, "fsdp_size": 2}, {"fsdp_size": 2, "dp_replicate_size": 2}


@thorough
@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3_moe", TP), ("qwen3_moe", TP_FSDP), ("qwen3_moe", HSDP), ("mixtral", TP), ("llama", TP_FSDP)],
    ids=str,
)
@of_ranks
def test_transformers_own_sharding(kind: str, options: Mapping[str, Any], tmp_path: Path) -> None:
    zoo.save(kind, tmp_path)
    ranks = run(of_transformers, 2 if options is TP else 4, str(tmp_path), options)
    covers([found for found, _ in ranks])
    has_holes = any(name.endswith("experts.gate_up_proj") for name in ranks[0][1])
    assert has_holes == (kind != "llama" and options is not HSDP)


def after_a_forward(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = nn.Sequential(Mlp(6, 8), nn.Linear(6, 5, bias=False))
    fulls = numbered(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    first = examine(model, fulls)
    assert {own.dtype for own in first} == {"F32"}  # the master's, not the one that computes
    with torch.no_grad():
        model(torch.ones(2, 6))
    assert not isinstance(model[1].weight, DTensor)  # which is why held() reshards
    second = examine(model, fulls)
    check_unchanged(first, second)
    model(torch.ones(2, 6)).sum().backward()
    check_unchanged(first, examine(model, fulls))


@thorough
@of_ranks
def test_after_a_forward_without_a_backward() -> None:
    run(after_a_forward, 2)


def refused(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(PlanError, match=r"^w: the placement Partial\(sum\)"):
        slices_of([("w", DTensor.from_local(torch.ones(2), mesh, [Partial()]))])
    with pytest.raises(PlanError, match=r"^w: no reading of \[Shard\(0\)\] on a mesh 2"):
        slices_of(
            [("w", DTensor.from_local(torch.ones(rank + 1), mesh, [Shard(0)], shape=torch.Size([3]), stride=(1,)))]
        )


@thorough
@of_ranks
def test_what_is_no_part_is_refused() -> None:
    run(refused, 2)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("e_score_correction_bias", torch.zeros(3))
        self.register_buffer("inv_freq", torch.zeros(5), persistent=False)
        self.register_state_dict_post_hook(gathers)


def gathers(*_: object) -> None:
    """As torchtitan's fused q, k and v do in ``state_dict()``."""
    raise AssertionError("gathers")


def test_names_are_those_of_a_checkpoint() -> None:
    model = Router()
    found = slices_of(model)
    assert [own.name for own, _ in found] == ["embed.weight", "e_score_correction_bias"]
    assert found[0][1].data_ptr() == model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert found[0][0].runs == ((Run(0, 4),), (Run(0, 2),))
    compiled: Callable[..., Any] = partial(torch.compile, backend="eager")
    assert [own for own, _ in slices_of(compiled(model))] == [own for own, _ in found]
    with torch.no_grad():
        found[0][1].fill_(3)
    assert model.head.weight.eq(3).all()


def test_what_has_no_bytes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^weight is on the meta device"):
        slices_of(nn.Linear(2, 2, device="meta"))
    with pytest.raises(PlanError, match=r"^w is of torch.complex128"):
        slices_of([("w", torch.ones(1, dtype=torch.complex128))])


def test_a_model_that_is_sharded_otherwise_than_planned() -> None:
    part = HeldSlice("w", "F32", (4, 2), ((Run(0, 1), Run(2, 1)), (Run(0, 2),)))
    check_unchanged([part], [part])
    for other, said in (
        (part._replace(runs=((Run(0, 2),), (Run(0, 2),))), r"w \(F32 \[0:2, 0:2\] of \[4, 2\]\)"),
        (part._replace(dtype="BF16"), r"w \(BF16 "),
        (part._replace(name="v"), r"v \(F32"),
    ):
        with pytest.raises(LiveError, match=rf"has {said}.* where the plan has w \(F32 \[0:1\+2:3, 0:2\]"):
            check_unchanged([part], [other])
    with pytest.raises(LiveError, match=r"has no tensor where the plan has w"):
        check_unchanged([part, part], [part])
