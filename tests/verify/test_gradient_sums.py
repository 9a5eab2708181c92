"""How often gradients are summed over the ranks: once for all that use a value, and no more often in a later step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reshard.verify.rank import gradients
from reshard.verify.rank.gradients import sum_where_ranks_part

TP = frozenset({"tp"})


class OneGroup:
    """Stands for the groups of two ranks that have the same numbers: a sum is twice its own."""

    def along(self, dimensions: frozenset[str]) -> None:
        assert dimensions == TP


def sums_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the gradients that are summed, as it happens."""
    seen: list[tuple[int, ...]] = []

    def reduce(x: Tensor, _: object) -> Tensor:
        seen.append(tuple(x.shape))
        return 2 * x

    monkeypatch.setattr(gradients, "reduce_from_group", reduce)
    return seen


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


def test_one_sum_for_queries_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a linear layer of which a rank has some of the outputs; before them stands what is whole."""
    seen, whole = sums_of(monkeypatch), leaf(2, 3, 4)
    parts = [leaf(5, 4) for _ in range(3)]
    x = torch.tanh(whole)
    found = torch.cat([torch.nn.functional.linear(x, part) for part in parts], -1)
    (alone,) = torch.autograd.grad(found.square().sum(), whole, retain_graph=True)
    sum_where_ranks_part([found], [(part, TP) for part in parts], OneGroup())  # type: ignore[arg-type]
    found.square().sum().backward()
    assert seen == [(2, 3, 4)]
    torch.testing.assert_close(whole.grad, 2 * alone)


def test_what_is_also_used_whole_is_summed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual beside a linear layer: what comes back through it is whole already."""
    seen, whole, part = sums_of(monkeypatch), leaf(3, 4), leaf(4, 4)
    x = torch.tanh(whole)
    found, residual = x @ part, 3 * x
    sum_where_ranks_part([found, residual], [(part, TP)], OneGroup())  # type: ignore[arg-type]
    torch.autograd.backward([found, residual], [torch.ones(3, 4), torch.ones(3, 4)])
    assert seen == [(3, 4)]
    expected = (2 * torch.ones(3, 4) @ part.detach().T + 3) * (1 - torch.tanh(whole.detach()).square())
    torch.testing.assert_close(whole.grad, expected)


def test_what_a_root_is_given_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that goes on to another stage, which sends back its gradient, and is used here too."""
    seen, whole, part = sums_of(monkeypatch), leaf(3, 4), leaf(4, 4)
    state = 2 * whole
    found = state @ part
    sum_where_ranks_part([found, state], [(part, TP)], OneGroup())  # type: ignore[arg-type]
    torch.autograd.backward([found, state], [torch.ones(3, 4), torch.ones(3, 4)])
    assert seen == [(3, 4)]
    torch.testing.assert_close(whole.grad, 2 * (2 * torch.ones(3, 4) @ part.detach().T + 1))


def test_a_step_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's weight that each rank applies to its own heads: its node in the graph is the same in all steps."""
    seen, weight, part = sums_of(monkeypatch), leaf(4), leaf(3, 4)
    kept = (weight * part).grad_fn
    for step in range(1, 4):
        found = weight * part
        sum_where_ranks_part([found], [(part, TP)], OneGroup())  # type: ignore[arg-type]
        found.sum().backward()
        assert seen == [(4,)] * step
    assert kept is not None
    torch.testing.assert_close(weight.grad, 6 * part.detach().sum(0))
