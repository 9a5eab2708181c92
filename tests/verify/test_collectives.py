"""The conjugate collectives: their values, and their gradients against one process that holds everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.mesh import mesh_of
from reshard.profile.processes import run_processes
from reshard.verify.forward.launch import run_ranks
from reshard.verify.rank.collectives import (
    Groups,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    scatter_to_group,
)
from reshard.verify.rank.group import RankError, world
from tests.marks import examples, of_ranks, thorough

pytestmark = [thorough, of_ranks]


DEGREES = [1, 2, 3, 4]


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]  # of one rank's slice
    dim: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    return Case(shape, draw(st.integers(-len(shape), len(shape) - 1)), draw(st.integers(0, 999)))


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def copy_and_reduce(batch: list[Case]) -> None:
    """sum over ranks of f(x, w_rank), f bilinear, is what one process computes, and so are its gradients."""
    rank, ranks = world().rank, world().size
    for case in batch:
        x = randn(*case.shape, seed=case.seed).requires_grad_()
        weights = randn(ranks, *case.shape, seed=case.seed + 1).requires_grad_()
        upstream = randn(*case.shape, seed=case.seed + 2)
        whole = sum((torch.sin(x * w) for w in weights), torch.zeros(()))
        dx, dw = gradients((whole * upstream).sum(), x, weights)

        own = weights.detach()[rank].clone().requires_grad_()
        y = reduce_from_group(torch.sin(copy_to_group(x, world()) * own), world())
        close(y, whole)
        dx_here, dw_here = gradients((y * upstream).sum(), x, own)
        close(dx_here, dx)
        close(dw_here, dw[rank])


def gather_and_scatter(batch: list[Case]) -> None:
    rank, ranks = world().rank, world().size
    for case in batch:
        shape = list(case.shape)
        shape[case.dim] *= ranks
        whole = randn(*shape, seed=case.seed).requires_grad_()
        upstream = randn(*shape, seed=case.seed + 1)
        (expected,) = gradients((torch.sin(whole) * upstream).sum(), whole)

        own = whole.detach().chunk(ranks, case.dim)[rank].clone().requires_grad_()
        gathered = gather_from_group(own, world(), case.dim)
        close(gathered, whole)
        close(gradients((torch.sin(gathered) * upstream).sum(), own)[0], expected.chunk(ranks, case.dim)[rank])

        part = scatter_to_group(whole, world(), case.dim)
        close(part, own)
        own_upstream = upstream.chunk(ranks, case.dim)[rank]
        close(gradients((torch.sin(part) * own_upstream).sum(), whole)[0], expected)

        back = gather_from_group(scatter_to_group(whole, world(), case.dim), world(), case.dim)
        close(back, whole)
        close(gradients((torch.sin(back) * upstream).sum(), whole)[0], expected)


def conjugates(batch: list[Case]) -> None:
    copy_and_reduce(batch)
    gather_and_scatter(batch)


@pytest.mark.parametrize("degree", DEGREES)
@examples(2)
@given(batch=st.lists(cases(), min_size=12, max_size=12))
def test_values_and_gradients(degree, batch):
    run_ranks(conjugates, degree, batch)


def inputs_are_left_alone() -> None:
    x = torch.ones(3, 4, dtype=torch.bfloat16) * (world().rank + 1)
    before = x.clone()
    reduced = reduce_from_group(x, world())
    gathered = gather_from_group(x.t(), world(), 0)  # not contiguous
    assert torch.equal(x, before)
    assert reduced.dtype == gathered.dtype == torch.bfloat16
    assert torch.equal(reduced, torch.full((3, 4), 3.0, dtype=torch.bfloat16))
    assert torch.equal(gathered, torch.cat([torch.ones(4, 3), torch.full((4, 3), 2.0)]).bfloat16())


def test_inputs_are_left_alone():
    run_ranks(inputs_are_left_alone, 2)


def rounding() -> None:
    parts = randn(world().size, 1000, seed=1).bfloat16()
    once = parts.double().sum(0).bfloat16()
    x = parts[world().rank].requires_grad_()
    assert torch.equal(reduce_from_group(x, world()), once)
    assert torch.equal(gradients((copy_to_group(x, world()) * x.detach()).sum(), x)[0], once)


def test_a_16_bit_sum_is_rounded_once():
    run_ranks(rounding, 4)


def uneven() -> None:
    scatter_to_group(torch.ones(2, 3), world(), 1)


def test_unequal_slices_are_refused():
    with pytest.raises(RankError, match=r"dimension 1 of shape \[2, 3\] has no 2 equal slices"):
        run_ranks(uneven, 2)


def on_a_mesh() -> None:
    groups = Groups(mesh_of(tp=2, ep=2))
    outer, inner = groups.along({"ep"}), groups.along({"tp"})
    x = torch.tensor([10.0 * outer.rank + inner.rank])
    assert reduce_from_group(x, inner).item() == 20 * outer.rank + 1
    assert reduce_from_group(x, outer).item() == 10 + 2 * inner.rank
    assert gather_from_group(x, inner).tolist() == [10 * outer.rank, 10 * outer.rank + 1]
    assert scatter_to_group(torch.arange(2.0), outer).item() == outer.rank


def test_groups_of_a_mesh():
    run_ranks(on_a_mesh, 4)


def messages() -> tuple[Any, ...]:
    """What each way of a group brings; of tensors, what is done to it afterwards is no other rank's."""
    rank = world().rank
    total = world().all_reduce(torch.tensor([1.0, rank]))
    total += rank
    gathered = [part.item() for part in world().all_gather(torch.tensor(rank))]
    collected = world().collect(rank * rank)
    return ((total - rank).tolist(), gathered, world().gather(str(rank)),
            collected if rank == 0 else None,             world().share(lambda: "all"))  # fmt: skip


def everything() -> tuple[Any, ...]:
    conjugates([Case((2, 3), 1, 1), Case((2, 1, 2), 0, 2)])
    rounding()
    if world().size == 4:
        on_a_mesh()
    return messages()


@pytest.mark.parametrize("degree", [2, 4])
def test_threads_and_processes_are_alike(degree: int) -> None:
    """As torchrun's ranks are processes, and profile's."""
    by_threads = run_ranks(everything, degree)
    assert by_threads == run_processes(everything, degree)
    squares = [rank**2 for rank in range(degree)]
    assert by_threads[0][1:] == ([*range(degree)], [*map(str, range(degree))], squares, "all")
