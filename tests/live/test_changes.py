"""Pushes of what changed: receivers have what a whole push brings, and fewer bytes go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.formats.errors import LiveError
from reshard.live import pull, push, routes
from reshard.live.process import Pull, Push
from reshard.live.views import Parcel
from reshard.live.wire import Stats
from reshard.source.opening import open_source
from tests import zoo
from tests.live.processes import free_port
from tests.support import LLAMA, write_checkpoint

DOWN = "model.layers.1.mlp.down_proj.weight"


@dataclass
class Two:
    """A trainer and an engine of two ranks, in threads; ``weights`` is what the trainer has."""

    folder: Path
    weights: dict[str, torch.Tensor]
    options: dict[str, Any]
    dtype: str | None = None
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        store = f"tcp://127.0.0.1:{self.port}"
        self.give: Push = push(
            self.weights.items(), config=LLAMA, to="vllm:tp2", store=store, rank=0, world=1, dtype=self.dtype,
            **self.options,
        )  # fmt: skip
        self.takes: list[Pull] = [
            pull(store=store, rank=rank, world=2, trainers=1, **self.options) for rank in range(2)
        ]
        self.held: list[dict[str, torch.Tensor]] = [{}, {}]

    def push(self, version: int, *, delta: bool = True, late: float = 0) -> int:
        """The bytes that were sent; receivers come ``late`` seconds late. Raises LiveError if it failed."""

        def receive(rank: int) -> None:
            time.sleep(late)
            self.held[rank] = self.takes[rank].receive(version)
            self.takes[rank].commit(version)

        with ThreadPoolExecutor(3) as pool:
            given = pool.submit(self.give, version, delta=delta)
            errors = [each.exception() for each in [*(pool.submit(receive, rank) for rank in range(2)), given]]
        assert len({str(error) for error in errors}) == 1
        if errors[0] is not None:
            raise errors[0]
        stats: Stats = given.result()
        return sum(stats.sent.values())

    def wanted(self) -> list[dict[str, torch.Tensor]]:
        """What the ranks are to hold: computed of the weights as they are, by a push that sends all."""
        whole = Two(self.folder, self.weights, self.options, self.dtype)
        whole.push(1, delta=False)
        whole.close()
        return whole.held

    def check(self) -> None:
        """Compare what the ranks hold."""
        for own, other in zip(self.held, self.wanted(), strict=True):
            assert own.keys() == other.keys()
            assert all(torch.equal(own[name], other[name]) for name in own)

    def close(self) -> None:
        """Leave."""
        for each in [self.give, *self.takes]:
            each.close()


@pytest.fixture(params=[{}, {"shared": False}, {"bucket": 1 << 12}], ids=["shared", "gloo", "many steps"])
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Two]:
    yield from made(tmp_path, request.param)


def made(tmp_path: Path, options: dict[str, Any], dtype: str | None = None) -> Iterator[Two]:
    folder = write_checkpoint(tmp_path / "model")
    source = open_source(folder)
    generator = torch.Generator().manual_seed(7)
    weights = {
        tensor.name: torch.randn(tensor.shape, generator=generator).to(torch.float32 if dtype else torch.bfloat16)
        for tensor in source.model.tensors
    }
    rows, columns = weights[DOWN].shape  # a part of another tensor: its copy has other strides
    weights[DOWN] = torch.randn(rows, columns + 3, generator=generator).to(weights[DOWN].dtype)[:, :columns]
    found = Two(folder, weights, {"timeout": 20.0, **options}, dtype)
    yield found
    found.close()


def test_what_changed(two: Two) -> None:
    total = two.push(1)
    assert two.push(2) == 0
    two.check()
    before = two.weights[DOWN].clone()
    two.weights[DOWN][:, ::50] += 1
    sent = two.push(3)
    two.check()
    assert 0 < sent < total / 20
    two.weights[DOWN].copy_(before)  # it is compared with the last push, not with the first
    assert two.push(4) == sent
    two.check()
    for weight in two.weights.values():
        weight += 1
    assert two.push(5) == total  # more than half: all is sent
    two.check()


def test_between_whole_pushes(two: Two) -> None:
    """One that sends all keeps no copy: the next has nothing to compare with."""
    total = two.push(1)
    two.weights[DOWN][0, 3] = 5
    assert two.push(2, delta=False) == total
    assert two.push(3) == total and two.push(4) == 0
    two.check()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Two]:
    yield from made(tmp_path, {})


def test_what_is_rounded(tmp_path: Path) -> None:
    """A change of the trainer's F32 that the receivers' BF16 does not show is none."""
    for one in made(tmp_path, {}, "BF16"):
        one.push(1)
        for weight in one.weights.values():
            weight *= 1 + 1e-6
        few = one.push(2)
        one.check()
        one.weights[DOWN] += 1
        assert few < 1000 < one.push(3)
        one.check()


def test_a_receiver_that_came_anew(one: Two) -> None:
    """It lacks the base: all is sent to all."""
    total = one.push(1)
    one.close()
    assert one.push(2) == 0  # the same ones meet again
    one.close()
    one.takes[1] = pull(store=one.give.meeting.store, rank=1, world=2, trainers=1, **one.options)
    assert one.push(3) == total and one.push(4) == 0
    one.check()


def test_a_base_that_was_changed(one: Two) -> None:
    """What a receiver has is not what it received: seen, and the next push sends all."""
    total = one.push(1)
    one.held[1]["model.norm.weight"][0] += 1
    one.weights["model.norm.weight"][-1] += 1
    with pytest.raises(LiveError, match="receiver 1: its weights are not those of the push before"):
        one.push(2)
    assert one.push(3) == total
    one.check()


def test_what_is_converted_on_arrival_is_sent_whole(tmp_path: Path) -> None:
    """Of Mamba's A_log vLLM keeps -exp(A_log), in F32: what is there cannot be compared with what is sent."""
    plan = routes(zoo.save("mamba", tmp_path), source="fsdp2:2", target="vllm:tp2")
    parts = [part for rank in range(2) for of in plan.parts(rank) for part in of]
    words = {part.move.atom.tensor: Parcel(0, 0, [part], plan, {}, sends=True).word for part in parts}
    assert {name.rpartition(".")[2] for name, word in words.items() if word is None} == {"A_log"}
    assert Parcel(0, 0, parts, plan, {}, sends=True).word is None
    assert {*words.values()} == {None, torch.int32}


def test_receivers_that_come_late(tmp_path: Path) -> None:
    """As after the requests of an engine: longer than any wait within a push."""
    for one in made(tmp_path, {"timeout": 3.0, "patience": 30.0}):
        one.push(1)
        one.push(2, late=4.0)
        one.check()
