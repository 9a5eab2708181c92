"""The yardstick: the original's own rounding, taken from runs in two precisions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import split
from reshard.verify.api import verify
from reshard.verify.forward.noise import LIMIT, Distance, measure, noise_of, yardstick
from reshard.verify.rank.trace import Places, run
from tests import store, zoo
from tests.marks import one_of_each


class _Casts(torch.nn.Module):
    """What models do in the middle of their 16 bits."""

    dtype = torch.float64

    def forward(self, input_ids: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        x = input_ids.to(torch.float64) / 3
        one = torch.ones((), dtype=torch.float32)
        parts = [x.to(torch.float32), x.float(), x.type(torch.float32), x.softmax(-1, dtype=torch.float32) * one / 3]
        parts.append(torch.nn.functional.linear(x.float(), torch.eye(7, dtype=torch.float32)))
        return {"logits": torch.stack(parts)}


def test_the_exact_run_is_exact_throughout() -> None:
    ids = torch.arange(1, 8).reshape(1, 7)
    found = run(_Casts(), {"input_ids": ids}, Places({}, {})).states["logits"]
    x = ids.double() / 3
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.stack([x, x, x, x.softmax(-1) / 3, x]), rtol=1e-15, atol=0)


class _Positions(torch.nn.Module):
    """Takes the largest score of each token, and the largest position."""

    dtype = torch.float32

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: object) -> dict[str, torch.Tensor]:
        attention_mask.cumsum(-1).max(-1, keepdim=True)
        return {"logits": (input_ids / 3).max(-1)[0]}


def test_the_largest_of_integers_is_no_choice() -> None:
    ids = torch.arange(1, 8).reshape(1, 7)
    found = run(_Positions(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, Places({}, {}))
    assert (found.choices, [x.item() for x in found.chosen]) == (1, [6])


def test_noise_is_the_yardstick() -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(64, 80, generator=generator, dtype=torch.float64)
    own, other = (exact + 1e-6 * torch.randn(64, 80, generator=generator) for _ in range(2))
    known = yardstick(exact, [noise_of(own, exact)], torch.float32)
    assert measure(other, known).ratio < 1.2
    assert measure(exact + 10 * (other - exact), known).ratio == pytest.approx(10, rel=0.1)
    assert measure(exact, known).ratio == 0


@pytest.mark.parametrize(("ratio", "is_same"), [(0.0, True), (LIMIT, True), (1.01 * LIMIT, False), (math.nan, False)])
def test_what_is_no_number_is_not_the_same(ratio: float, is_same: bool) -> None:
    assert Distance(1.0, 1.0, ratio, "all").is_same == is_same


@pytest.mark.parametrize(("at", "worst"), [((5, slice(None)), "token 5"), ((slice(None), 7), "channel 7")])
def test_a_fault_of_one_token_or_channel_stands_out(at: tuple[int | slice, int | slice], worst: str) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(64, 80, generator=generator, dtype=torch.float64)
    own, wrong = (exact + 1e-6 * torch.randn(64, 80, generator=generator) for _ in range(2))
    wrong[at] += 1e-5
    found = measure(wrong, yardstick(exact, [noise_of(own, exact)], torch.float32))
    assert found.ratio > LIMIT and found.worst == worst


def test_what_is_exact_must_be_exact_and_masks_must_agree() -> None:
    exact = torch.randn(4, 6, dtype=torch.float64)
    exact[0, 1:3] = torch.finfo(torch.float64).min
    own = exact.clone()
    own[0, 1:3] = torch.finfo(torch.float32).min
    known = yardstick(exact, [noise_of(own.float().double(), exact)], torch.float32)
    assert measure(own.float(), known).ratio <= 1  # of the very run that the noise was measured on
    unmasked = own.float()
    unmasked[0, 1] = 0.0
    assert measure(unmasked, known).ratio == float("inf")
    wrong = own.float()
    wrong[3, 5] = float("nan")
    assert not measure(wrong, known).is_same


def _cancelling(name: str, folder: Path) -> None:
    """A model whose MLP adds a large number in one half of its width, and takes away nearly the same in the other."""
    sizes = {"hidden_size": 128, "intermediate_size": 1024}
    path = zoo.save(name, folder, torch.bfloat16, settings=sizes) / "model.safetensors"
    generator, tensors = torch.Generator().manual_seed(0), load_file(path)
    for key, weight in tensors.items():
        if key.endswith(("gate_proj.weight", "up_proj.weight")):
            row, small = (torch.randn(n, weight.shape[1], generator=generator) for n in (1, len(weight)))
            tensors[key] = ((row + 0.02 * small) / weight.shape[1] ** 0.5).bfloat16()
        elif key.endswith("down_proj.weight"):
            half = weight.shape[1] // 2
            small = torch.randn(weight.shape, generator=generator)
            tensors[key] = (torch.tensor([0.5] * half + [-0.5] * half) + 0.02 * small).bfloat16()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(("name", "tp"), one_of_each([("llama", 2), ("llama", 4), ("llama-biases", 2)]))
def test_parts_that_are_larger_than_their_sum_are_rounded(name: str, tp: int, tmp_path: Path) -> None:
    """Each rank rounds its part, which is hundreds of times the sum."""
    original = store.made(f"cancelling-{name}", lambda folder: _cancelling(name, folder))
    split(original, tmp_path / "out", tp=tp)
    found = verify(original, tmp_path / "out")
    assert found.verdict == "same" and max(row.ratio for row in found.forward.layers) < 2.5
