"""The parallel layers, forward and backward, against one process with the whole weights, in float64 to 1e-12."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from reshard.formats.mesh import mesh_of
from reshard.verify.forward.launch import run_ranks
from reshard.verify.rank.collectives import Groups
from reshard.verify.rank.group import Group, RankError, world
from reshard.verify.rank.layers import (
    column_parallel,
    gather_logits,
    parallel_norm,
    row_parallel,
    sum_at_use,
    vocab_parallel,
    without_padding,
)
from tests.marks import examples, thorough

pytestmark = thorough

DEGREES = [2, 3, 4]


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module, seed: int) -> nn.Module:
    """Give a module random float64 weights, norms and biases included."""
    module.double()
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(randn(*p.shape, seed=1000 * seed + i))
    return module


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def own(whole: Tensor, dim: int, group: Group | None = None) -> Tensor:
    group = group or world()
    return whole.chunk(group.size, dim)[group.rank]


def load(parallel: nn.Module, **weights: Tensor) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            p = parallel.get_parameter(name)
            assert p.shape == weight.shape
            p.copy_(weight)


def backward(y: Tensor, seed: int) -> None:
    (y * randn(*y.shape, seed=seed)).sum().backward()


# MLP: column, then row


@dataclass(frozen=True)
class MLPCase:
    batch: tuple[int, ...]
    hidden: int
    ff_local: int
    bias: bool
    gather: bool  # gather between the layers, and scatter again
    seed: int


mlp_cases = st.builds(
    MLPCase,
    st.lists(st.integers(0, 3), max_size=2).map(tuple),
    st.integers(1, 7),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)


class MLP(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def whole_mlp(hidden: int, ff: int, bias: bool, seed: int) -> nn.Module:
    return filled(MLP(nn.Linear(hidden, ff, bias), nn.Linear(ff, hidden, bias)), seed)


def parallel_mlp(whole: nn.Module, group: Group, gather: bool = False) -> nn.Module:
    up, down, n = whole.up, whole.down, group.size
    bias = up.bias is not None
    first = nn.Linear(up.in_features, up.out_features // n, bias).double()
    first = gather_logits(first, group, torch.arange(up.out_features)) if gather else column_parallel(first, group)
    if gather:
        second = nn.Linear(down.in_features, down.out_features // n, bias).double()
        second = gather_logits(second, group, torch.arange(down.out_features))
        load(second, **{name: own(p, 0, group) for name, p in down.named_parameters()})
    else:
        second = row_parallel(nn.Linear(down.in_features // n, down.out_features, bias).double(), group)
        load(second, weight=own(down.weight, 1, group), **({"bias": down.bias} if bias else {}))
    load(first, **{name: own(p, 0, group) for name, p in up.named_parameters()})
    return MLP(first, second)


def compare_mlps(whole: nn.Module, mlp: nn.Module, of: Callable[[nn.Parameter], Tensor | None], group=None) -> None:
    is_row = mlp.down.in_features != whole.down.in_features
    for name, p in whole.named_parameters():
        dim = {"down.weight": 1, "down.bias": None}.get(name, 0) if is_row else 0
        close(of(mlp.get_parameter(name)), of(p) if dim is None else own(of(p), dim, group))


def mlps(batch: list[MLPCase]) -> None:
    for case in batch:
        n = world().size
        hidden = case.hidden * n if case.gather else case.hidden
        whole = whole_mlp(hidden, case.ff_local * n, case.bias, case.seed)
        mlp = parallel_mlp(whole, world(), case.gather)
        x = randn(*case.batch, hidden, seed=case.seed).requires_grad_()
        x_here = x.detach().clone().requires_grad_()
        y, y_here = whole(x), mlp(x_here)
        close(y_here, y)
        backward(y, case.seed)
        backward(y_here, case.seed)
        close(x_here.grad, x.grad)
        compare_mlps(whole, mlp, lambda p: p.grad)


# Attention with grouped query heads, and more ranks than KV heads


@dataclass(frozen=True)
class AttentionCase:
    """kv is dealt as far as it divides; group takes the rest, and then a KV head is on several ranks."""

    kv: int
    group: int
    head: int
    seed: int
    bias: bool


class Attention(nn.Module):
    def __init__(self, q: nn.Module, k: nn.Module, v: nn.Module, o: nn.Module, kv: int, group: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.kv, self.group = q, k, v, o, kv, group

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.kv * self.group, -1)).transpose(1, 2)
        k, v = (
            m(x).unflatten(-1, (self.kv, -1)).transpose(1, 2).repeat_interleave(self.group, 1) for m in (self.k, self.v)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def attentions(batch: list[AttentionCase], hidden: int = 6) -> None:
    rank, n = world().rank, world().size
    for case in batch:
        kv_ranks = math.gcd(case.kv, n)
        replicas = n // kv_ranks
        kv, group = case.kv // kv_ranks, case.group // replicas
        queries, keys = case.kv * case.group * case.head, case.kv * case.head
        linears = [nn.Linear(hidden, size, case.bias) for size in (queries, keys, keys)]
        whole = filled(Attention(*linears, nn.Linear(queries, hidden, case.bias), case.kv, case.group), case.seed)

        def of_q(w: Tensor, case=case, kv_ranks=kv_ranks, replicas=replicas) -> Tensor:
            grid = w.unflatten(0, (case.kv, case.group, case.head)).chunk(kv_ranks, 0)[rank // replicas]
            return grid.chunk(replicas, 1)[rank % replicas].flatten(0, 2)

        def of_kv(w: Tensor, kv_ranks=kv_ranks, replicas=replicas) -> Tensor:
            return w.chunk(kv_ranks, 0)[rank // replicas]

        own_q, own_kv = kv * group * case.head, kv * case.head
        here = Attention(
            *(column_parallel(nn.Linear(hidden, size, case.bias), world()) for size in (own_q, own_kv, own_kv)),
            row_parallel(nn.Linear(own_q, hidden, case.bias), world()),
            kv,
            group,
        ).double()
        for name, part in {"q": of_q, "k": of_kv, "v": of_kv}.items():
            load(here.get_submodule(name), **{k: part(p) for k, p in whole.get_submodule(name).named_parameters()})
        load(here.o, weight=of_q(whole.o.weight.t()).t(), **({"bias": whole.o.bias} if case.bias else {}))

        x = randn(2, 5, hidden, seed=case.seed).requires_grad_()
        x_here = x.detach().clone().requires_grad_()
        y, y_here = whole(x), here(x_here)
        close(y_here, y)
        backward(y, case.seed)
        backward(y_here, case.seed)
        close(x_here.grad, x.grad)
        for name, p in whole.named_parameters():
            grad = here.get_parameter(name).grad
            if name == "o.bias":
                close(grad, p.grad)
            elif name == "o.weight":
                close(grad, of_q(p.grad.t()).t())
            elif name.startswith("q"):
                close(grad, of_q(p.grad))
            else:  # each replica has what came through its own query heads: their sum is the gradient
                parts = world().all_gather(grad)
                close(sum(parts[r] for r in range(n) if r // replicas == rank // replicas), of_kv(p.grad))


@st.composite
def attention_cases(draw: st.DrawFn, degree: int) -> AttentionCase:
    kv = draw(st.integers(1, 4))
    group = draw(st.integers(1, 2)) * (degree // math.gcd(kv, degree))
    return AttentionCase(kv, group, draw(st.integers(1, 4)), draw(st.integers(0, 99)), draw(st.booleans()))


SHARED = {
    3: AttentionCase(kv=1, group=3, head=2, seed=1, bias=False),
    4: AttentionCase(kv=2, group=4, head=3, seed=1, bias=True),
}
"""By the degree: one KV head on all ranks, and two of which two ranks have each."""


# Vocabulary


@dataclass(frozen=True)
class VocabCase:
    rows_local: int
    padding: int  # rows at the end that are no token's
    dim: int
    ids: tuple[int, ...]
    seed: int


vocab_cases = st.builds(
    VocabCase,
    st.integers(2, 5),
    st.integers(0, 1),
    st.integers(1, 4),
    st.lists(st.integers(0, 999), max_size=8).map(tuple),
    st.integers(0, 99),
)


def vocabularies(batch: list[VocabCase]) -> None:
    """Embed, and multiply by an output layer that is tied to the embedding."""
    rank, n = world().rank, world().size
    for case in batch:
        size = case.rows_local * n
        true_size = size - case.padding
        ids = torch.tensor([i % true_size for i in case.ids], dtype=torch.long)
        table = randn(size, case.dim, seed=case.seed)
        table[true_size:] = 0
        whole = table[:true_size].clone().requires_grad_()
        logits = F.linear(torch.tanh(F.embedding(ids, whole)), whole)
        backward(logits, case.seed)

        embedding = nn.Embedding(case.rows_local, case.dim, dtype=torch.float64)
        vocab_parallel(embedding, rank * case.rows_local, world())
        load(embedding, weight=own(table, 0))
        close(embedding(ids), F.embedding(ids, whole))
        head = nn.Linear(case.dim, case.rows_local, bias=False, dtype=torch.float64)
        head.weight = embedding.weight
        here = gather_logits(head, world(), torch.arange(true_size))(torch.tanh(embedding(ids)))
        close(here, logits)
        backward(here, case.seed)
        padded = torch.cat([whole.grad, torch.zeros(case.padding, case.dim, dtype=torch.float64)])
        close(embedding.weight.grad, own(padded, 0))


class _Head(nn.Module):
    """A layer for the vocabulary, with the bias outside of it."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.decoder = nn.Linear(dim, rows, bias=False, dtype=torch.float64)
        self.bias = nn.Parameter(torch.zeros(rows, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x) + self.bias


def heads(true_size: int, rows: int) -> None:
    degree, rank = world().size, world().rank
    whole, head, x = filled(_Head(true_size, 5), 1), _Head(rows, 5), randn(7, 5, seed=2)
    padding = rows * degree - true_size
    for mine, full in zip(head.parameters(), whole.parameters(), strict=True):
        padded = torch.cat([full.detach(), full.new_zeros(padding, *full.shape[1:])])
        mine.data = padded.chunk(degree)[rank].clone()
    gather_logits(head.decoder, world(), torch.arange(true_size))
    without_padding(head, {"bias": (true_size,)}, world())
    here, expected = head(x), whole(x)
    close(here, expected)
    backward(here, 3)
    backward(expected, 3)
    for mine, full in zip(head.parameters(), whole.parameters(), strict=True):
        close(mine.grad, torch.cat([full.grad, full.grad.new_zeros(padding, *full.shape[1:])]).chunk(degree)[rank])


class _Einsum(nn.Module):
    """Heads that are multiplied by a weight of three dimensions, and what comes behind in the same module."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.zeros(5, heads, 3, dtype=torch.float64))
        self.o = nn.Parameter(torch.zeros(5, heads, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.einsum("bnd,hnd->bh", torch.tanh(torch.einsum("bh,hnd->bnd", x, self.q)), self.o)
        return torch.tanh(out + x)


def einsums(heads: int) -> None:
    degree, rank = world().size, world().rank
    whole, part, x = filled(_Einsum(heads), 1), _Einsum(heads // degree), randn(7, 5, seed=2)
    for mine, full in zip(part.parameters(), whole.parameters(), strict=True):
        mine.data = full.detach().chunk(degree, 1)[rank].clone()
    here, expected = sum_at_use(part, "o", world())(x), whole(x)
    close(here, expected)
    backward(here, 3)
    backward(expected, 3)
    for mine, full in zip(part.parameters(), whole.parameters(), strict=True):
        close(mine.grad, full.grad.chunk(degree, 1)[rank])


def looks_up(ids: list[int], padding_row: int | None) -> tuple[Tensor, Tensor | None]:
    embedding = nn.Embedding(3, 2, padding_idx=None if world().rank else 1)
    vocab_parallel(embedding, 3 * world().rank, world(), padding_row=padding_row)
    y = embedding(torch.tensor(ids))
    y.sum().backward()
    return y, embedding.weight.grad


def test_ids_outside_the_vocabulary_are_refused():
    for ids in ([0, 6], [-1]):
        with pytest.raises(RankError, match="in a vocabulary of 6"):
            run_ranks(looks_up, 2, ids, None)


def test_the_padding_row_takes_no_gradient_on_the_rank_that_has_it():
    (_, first), (_, second) = run_ranks(looks_up, 2, [0, 1, 3, 4, 5], 4)
    assert first.tolist() == [[1, 1], [1, 1], [0, 0]]
    assert second.tolist() == [[1, 1], [0, 0], [1, 1]]


# Norms over a dimension that is split


@dataclass(frozen=True)
class NormCase:
    dim_local: int
    replicas: int  # ranks that have the same slice
    seed: int


class Gemma(nn.RMSNorm):
    """A norm whose weight counts from one, and which takes an argument more."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * (1 + self.weight) * scale


def norms(batch: list[NormCase]) -> None:
    rank, n = world().rank, world().size
    for case in batch:
        replicas = case.replicas if n % case.replicas == 0 else 1
        slices, kind = n // replicas, {"eps": 1e-5, "dtype": torch.float64}
        dim = case.dim_local * slices
        classes = (nn.RMSNorm, nn.LayerNorm, Gemma)
        wholes = [cls(dim, **kind) for cls in classes]
        heres = [parallel_norm(cls(case.dim_local, **kind), world()) for cls in classes]
        for whole, here in zip(wholes, heres, strict=True):
            filled(whole, case.seed)

            def part(t: Tensor, slices=slices, replicas=replicas) -> Tensor:
                return t.chunk(slices, -1)[rank // replicas]

            load(here, **{name: part(p) for name, p in whole.named_parameters()})
            x = randn(2, 3, dim, seed=case.seed).requires_grad_()
            x_here = part(x.detach()).clone().requires_grad_()
            extra = {"scale": 2.0} if isinstance(whole, Gemma) else {}
            y, y_here = whole(x, **extra), here(x_here, **extra)
            close(y_here, part(y))
            # Each replica's part of the gradient, as that of its own query heads.
            upstream = [randn(*y.shape, seed=case.seed + i) for i in range(replicas)]
            (y * sum(upstream)).sum().backward()
            (y_here * part(upstream[rank % replicas])).sum().backward()
            tensors = [(x_here, x), *((here.get_parameter(name), p) for name, p in whole.named_parameters())]
            for tensor_here, tensor in tensors:
                parts = world().all_gather(tensor_here.grad)
                total = sum(parts[r] for r in range(n) if r // replicas == rank // replicas)
                close(total, part(tensor.grad))


norm_cases = st.builds(NormCase, st.integers(1, 5), st.integers(1, 2), st.integers(0, 99))


# Loaded modules of other kinds


class Conv1D(nn.Module):
    """transformers' linear layer with a transposed weight, which needs its bias."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(into, out)), nn.Parameter(torch.empty(out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Experts(nn.Module):
    """Two experts with biases inside the weighting, called with arguments by name, returning a tuple."""

    def __init__(self, hidden: int, ff: int) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.empty(2, hidden, ff)), nn.Parameter(torch.empty(2, 1, ff))
        self.down, self.down_bias = nn.Parameter(torch.empty(2, ff, hidden)), nn.Parameter(torch.empty(2, 1, hidden))

    def forward(self, x: Tensor, weights: Tensor, names: list[str]) -> tuple[Tensor, list[str]]:
        y = F.silu(x @ self.up + self.up_bias) @ self.down + self.down_bias
        return (y * weights.t().unsqueeze(-1)).sum(0), names


def conv1ds() -> None:
    n, hidden, ff = world().size, 4, 6
    whole = filled(MLP(Conv1D(ff, hidden), Conv1D(hidden, ff)), 1)
    mlp = MLP(
        column_parallel(Conv1D(ff // n, hidden), world()), row_parallel(Conv1D(hidden, ff // n), world())
    ).double()
    parts = {"up.weight": 1, "up.bias": 0, "down.weight": 0, "down.bias": None}
    load(mlp, **{k: p if parts[k] is None else own(p, parts[k]) for k, p in whole.named_parameters()})
    calls = []
    mlp.down.register_forward_hook(lambda *_: calls.append(1))
    assert list(mlp.state_dict()) == list(whole.state_dict())
    x = randn(2, 3, hidden, seed=1).requires_grad_()
    x_here = x.detach().clone().requires_grad_()
    y, y_here = whole(x), mlp(x_here)
    close(y_here, y)
    backward(y, 1)
    backward(y_here, 1)
    close(x_here.grad, x.grad)
    for k, p in whole.named_parameters():
        close(mlp.get_parameter(k).grad, p.grad if parts[k] is None else own(p.grad, parts[k]))
    assert calls == [1]


def experts() -> None:
    n, hidden, ff = world().size, 4, 6
    whole, here = filled(Experts(hidden, ff), 1), Experts(hidden, ff // n).double()
    parts = {"up": 2, "up_bias": 2, "down": 1, "down_bias": None}
    load(here, **{k: p if parts[k] is None else own(p, parts[k]) for k, p in whole.named_parameters()})
    row_parallel(column_parallel(here, world()), world(), elsewhere=["down_bias"] if world().rank else [])
    inputs = [randn(3, hidden, seed=1).requires_grad_(), randn(3, 2, seed=2).requires_grad_()]
    inputs_here = [t.detach().clone().requires_grad_() for t in inputs]
    y, _ = whole(*inputs, names=["a"])
    y_here, names = here(inputs_here[0], weights=inputs_here[1], names=["a"])
    assert names == ["a"]
    close(y_here, y)
    backward(y, 1)
    backward(y_here, 1)
    for t_here, t in zip(inputs_here, inputs, strict=True):
        close(t_here.grad, t.grad)
    for k, p in whole.named_parameters():
        if parts[k] is None and world().rank:
            assert here.get_parameter(k).grad is None, "it counts on the first rank"
        else:
            close(here.get_parameter(k).grad, p.grad if parts[k] is None else own(p.grad, parts[k]))


def transformers_modules() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.pytorch_utils import Conv1D as TrueConv1D

    n, rank = world().size, world().rank
    whole = filled(Gemma3TextScaledWordEmbedding(6, 4, 0, embed_scale=3.0), 1)
    here = Gemma3TextScaledWordEmbedding(6 // n, 4, 0, embed_scale=3.0).double()
    load(here, weight=own(whole.weight, 0))
    vocab_parallel(here, rank * 6 // n, world(), padding_row=0)
    ids = torch.tensor([[0, 5, 3], [2, 1, 4]])
    y, y_here = whole(ids), here(ids)
    close(y_here, y)
    backward(y, 1)
    backward(y_here, 1)
    close(here.weight.grad, own(whole.weight.grad, 0))

    norm, norm_here = filled(Olmo2RMSNorm(6), 1), Olmo2RMSNorm(6 // n).double()
    load(norm_here, weight=own(norm.weight, 0))
    x = randn(5, 6, seed=1)
    assert torch.equal(parallel_norm(norm_here, world())(own(x, -1)), own(norm(x), -1)), "to the last bit"

    layer, layer_here = filled(nn.LayerNorm(6), 1), nn.LayerNorm(6 // n).double()
    load(layer_here, weight=own(layer.weight, 0), bias=own(layer.bias, 0))
    layer_here.normalized_shape = (6,)  # made to the original's config.json, cut afterwards
    assert torch.equal(parallel_norm(layer_here, world())(own(x, -1)), own(layer(x), -1)), "to the last bit"

    conv, conv_here = filled(TrueConv1D(3, 6), 1), TrueConv1D(3, 6 // n).double()
    load(conv_here, weight=own(conv.weight, 0), bias=conv.bias)
    close(row_parallel(conv_here, world())(own(x, -1)), conv(x))


# Data x tensor parallel, and training


def mesh_of_data_and_tensor() -> None:
    groups = Groups(mesh_of(tp=2, ep=2))
    data, tensor = groups.along({"ep"}), groups.along({"tp"})
    whole = whole_mlp(4, 6, True, 1)
    mlp = parallel_mlp(whole, tensor)
    x = randn(6, 4, seed=2)
    y = whole(x)
    y.square().mean().backward()
    y_here = mlp(own(x, 0, data))
    close(y_here, own(y, 0, data))
    y_here.square().mean().backward()
    for p in mlp.parameters():
        p.grad = data.all_reduce(p.grad)
        p.grad /= 2
    compare_mlps(whole, mlp, lambda p: p.grad, tensor)


def training() -> tuple[float, float]:
    wholes = nn.Sequential(*(whole_mlp(5, 12, True, seed) for seed in range(3)))
    heres = nn.Sequential(*(parallel_mlp(mlp, world()) for mlp in wholes))
    losses = []
    for model in (wholes, heres):
        with torch.no_grad():
            for p in model.parameters():
                p *= 0.5
        for step in range(20):
            model.zero_grad()
            loss = (model(randn(7, 5, seed=step)) - randn(7, 5, seed=100 + step)).square().mean()
            loss.backward()
            with torch.no_grad():  # plain SGD; torch.optim takes longer to import than this test to run
                for p in model.parameters():
                    p -= 0.1 * p.grad
            losses.append(loss.item())
    for whole, here, seed in zip(wholes, heres, range(3), strict=True):
        compare_mlps(whole, here, lambda p: p.detach())
        start = 0.5 * whole_mlp(5, 12, True, seed).down.weight.detach()
        assert (whole.down.weight - start).abs().max() > 1e-2, "training went somewhere"
    return losses[19], losses[39]


# All of them, in few launches


Work = tuple[Callable[..., Any], tuple[Any, ...]]


def each(works: Sequence[Work]) -> list[Any]:
    return [work(*arguments) for work, arguments in works]


@pytest.mark.parametrize("degree", DEGREES)
@examples(2)
@given(data=st.data())
def test_examples_of_each_layer(degree: int, data: st.DataObject):
    def some(cases: st.SearchStrategy, count: int) -> list[Any]:
        return data.draw(st.lists(cases, min_size=count, max_size=count))

    works: list[Work] = [
        (mlps, (some(mlp_cases, 8),)),
        (attentions, (some(attention_cases(degree), 6),)),
        (vocabularies, (some(vocab_cases, 8),)),
        (norms, (some(norm_cases, 3),)),  # of four norms each
    ]
    run_ranks(each, degree, works)


@pytest.mark.parametrize("degree", DEGREES)
def test_modules_as_they_are_loaded(degree: int):
    """And training: twenty steps end in the same weights. On four ranks, two of them data parallel."""
    works: list[Work] = [(heads, (11, -(-11 // degree))), (einsums, (12,))]
    works += [(attentions, ([SHARED[degree]],))] if degree in SHARED else []
    works += [(conv1ds, ()), (experts, ())] if degree in DEGREES[:2] else [(mesh_of_data_and_tensor, ())]
    works += [(transformers_modules, ())] if degree == 2 else []
    for *_, (whole, here) in run_ranks(each, degree, [*works, (training, ())]):
        assert math.isclose(whole, here, rel_tol=1e-12)
