"""Pushes that fail: every other rank says within seconds whose fault it is, and the next push heals.

Two trainers under FSDP2 and two receivers are processes. Version v of a weight is v times the checkpoint's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.commands.load import LoadRequest, load, load_rank
from reshard.formats.errors import LiveError
from reshard.live.fence import Fence
from reshard.live.meshes import arranged, target_of
from reshard.live.process import Pull, Push, pull, push
from reshard.live.wire import Message
from reshard.source.opening import open_source
from reshard.tiny_model import CONFIG, write_model
from tests.live.processes import free_port
from tests.live.ranks import JOIN, LATE, NAMES, TIMEOUT, Plot, Ranks, Told, stop_with_parent
from tests.live.trainers import Weights
from tests.marks import of_ranks, one_of_each, thorough

SMALL = {
    **CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 131,
}  # fmt: skip
START = 30.0
"""Seconds that a rank may take to come, if it is known that it comes."""
TARGET = "vllm:tp2"
A_WEIGHT = "model.layers.1.mlp.up_proj.weight"


@dataclass(frozen=True)
class Fault(Plot):
    """A plot of pushes of a checkpoint.

    ``way`` is what receivers are: ``rules``, or a torch module that is written to at the end (``keep``) or at once
    (``straight``). ``wrong`` is what ``rank`` does otherwise than the others; rank -1: all trainers.
    """

    folder: Path = Path()
    way: str = "rules"
    wrong: str = ""
    versions: tuple[int, ...] = (1, 2)


# --------------------------------------------------------------------------------------------------- in the processes


class Model(Weights):
    """Weights that compute something."""

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.float().sum() for weight in self.parameters()]).sum()


class Stops:
    """What a push and a receiver do where this process is to stop."""

    version, swapped = 0, False
    stop: Callable[[str], None]

    def _messages(self, *given: Any) -> list[Message]:
        messages: list[Message] = super()._messages(*given)  # type: ignore[misc]
        assert messages[-1].step > 3, "no step in the middle"
        return [self._stopping(message) if message.step == 2 else message for message in messages]

    def _stopping(self, message: Message) -> Message:
        def work(room: torch.Tensor) -> None:
            self.stop("exchange")
            message.work(room)

        return message._replace(work=work)

    def _gather(
        self, fence: Fence, what: str, own: Callable[[], dict[str, Any]], patience: float | None = None
    ) -> list[dict[str, Any]]:
        def planned() -> dict[str, Any]:
            answer = own()
            self.stop("check")
            return answer

        work = planned if what == "plan" else own
        said: list[dict[str, Any]] = super()._gather(fence, what, work, patience)  # type: ignore[misc]
        if self.swapped and what == "description":  # what the trainers hold
            said[0]["held"], said[1]["held"] = said[1]["held"], said[0]["held"]
        return said

    def _agree(self, fence: Fence, what: str, problem: str = "") -> None:
        if what == "committed":
            self.stop("received")
        super()._agree(fence, what, problem)  # type: ignore[misc]


class StoppingPush(Stops, Push):
    """A trainer that may stop."""


class StoppingPull(Stops, Pull):
    """A receiver that may stop."""


def be(rank: int, store: str, plot: Fault, pipe: Connection) -> None:
    """A process: pushes until one fails, reports, and does so again when it is told to."""
    stop_with_parent(os.getppid())  # the fork server, which ends with the tests
    torch.set_num_threads(1)
    one = (Trainer if rank < 2 else Receiver)(rank, store, plot)
    plot.join(rank, pipe)

    def stop(moment: str) -> None:
        if one.version == plot.versions[-1] or moment == "check":
            plot.at(rank, moment, pipe)

    one.process.stop, one.process.swapped = stop, plot.wrong == "swapped" and plot.rank == rank
    while True:
        error = None
        try:
            one.process.check()
            for version in plot.versions:
                wrong = plot.wrong == "version" and plot.rank == rank
                one.push(version + wrong)
                plot.at(rank, "after", pipe)
                plot.at(rank, "later", pipe)
                time.sleep(1.0 if plot.moment == "later" else 0.0)
        except LiveError as problem:
            error = problem.message
        except Exception as problem:
            error = f"a bug: {problem!r}"
        pipe.send((error, time.time(), one.state()))
        one.process.meeting = replace(one.process.meeting, join=START, timeout=START)  # nothing fails any more
        try:
            plot = pipe.recv() or replace(plot, rank=-2, versions=(3,))
        except EOFError:
            return


class Trainer:
    """A rank of the trainer."""

    def __init__(self, rank: int, store: str, plot: Fault) -> None:
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.testing._internal.distributed.fake_pg import FakeStore

        self.version = 0
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        tensors = load(LoadRequest(plot.folder))
        if plot.rank in (rank, -1):
            tensors = changed(tensors, plot.wrong)
        self._model = Weights(tensors)
        fully_shard(self._model, mesh=init_device_mesh("cpu", (2,)))
        self._original = [weight.to_local().clone() for weight in self._model.parameters()]  # type: ignore[attr-defined]
        self.process = push(
            self._model, config=plot.folder, to=TARGET, receivers=2, rank=rank, world=2, **options(rank, store, plot)
        )
        self.process.__class__ = StoppingPush

    @torch.no_grad()
    def push(self, version: int) -> None:
        self.version = version
        for weight, original in zip(self._model.parameters(), self._original, strict=True):
            weight.to_local().copy_(original * version)  # type: ignore[attr-defined]
        self.process(version)

    def state(self) -> None:
        """Nobody asks for it."""


class Receiver:
    """A rank of the receiver."""

    def __init__(self, rank: int, store: str, plot: Fault) -> None:
        self.version = 0
        self._found: Mapping[str, torch.Tensor] = {}
        self._model = None
        if plot.way == "rules":
            source = open_source(plot.folder)
            arrangement = arranged(source.model, target_of(TARGET))
            self._wanted = load_rank(source, arrangement, rank - 2)
            for stored in arrangement.stored:
                if stored.constant is not None:
                    del self._wanted[stored.name_on(rank - 2)]
        else:
            self._wanted = load(LoadRequest(plot.folder))
            self._model = Model({name: torch.zeros_like(tensor) for name, tensor in self._wanted.items()})
            self._found = dict(self._model.named_parameters())
        given = options(rank, store, plot)
        self.process = pull(self._model, keep=plot.way == "keep", rank=rank - 2, world=2, trainers=2, **given)
        self.process.__class__ = StoppingPull

    @torch.no_grad()
    def push(self, version: int) -> None:
        self.version = version
        found = self.process.receive(version)
        self.process.commit(version)
        self._found = found or self._found

    @torch.no_grad()
    def state(self) -> tuple[int | None, bool]:
        """The version that this rank has, if it has one, and whether it computes."""
        computes = True
        try:
            _ = self._model and self._model()
        except LiveError:
            computes = False
        for version in range(4):
            wanted = {name: tensor * version for name, tensor in self._wanted.items()}
            if self._found.keys() == wanted.keys() and all(
                torch.equal(self._found[name], wanted[name]) for name in wanted
            ):
                return version, computes
        return None, computes


def options(rank: int, store: str, plot: Fault) -> dict[str, Any]:
    bucket = 1 << (15 if plot.wrong == "bucket" and plot.rank == rank else 14)
    join = JOIN if plot.is_about_joining else START
    timeout = TIMEOUT if plot.rank != -2 else START
    return {"store": store, "timeout": timeout, "join": join, "bucket": bucket, "shared": plot.shared}


def changed(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    """A trainer's tensors, of which one is not as it should be."""
    tensor = tensors.pop(A_WEIGHT)
    match how:
        case "name":
            return {**tensors, A_WEIGHT.replace("up", "pu"): tensor}
        case "dtype":
            tensor = tensor.float()
        case "shape":
            tensor = torch.cat([tensor, tensor[:2]])
        case "missing":
            return tensors
    return {**tensors, A_WEIGHT: tensor}


# ------------------------------------------------------------------------------------------------------- in the tests

pytestmark = of_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("faults") / "model", SMALL)


@pytest.fixture
def start(folder: Path) -> Callable[[Fault], Ranks]:
    store = f"tcp://127.0.0.1:{free_port()}"
    return lambda plot: Ranks(store, replace(plot, folder=folder), be)


def check(told: Mapping[int, Told], name: str, *causes: str, since: float, within: float = TIMEOUT + LATE) -> None:
    """All name this rank and one of these causes, in time."""
    for each in told.values():
        assert each.error is not None and name in each.error, told
        assert any(cause in each.error for cause in causes), told
        assert each.when - since < within, told


def check_again(ranks: Ranks, *without: int) -> None:
    """The next push of all of them comes to its end, and the bytes are exact."""
    ranks.again(*{0, 1, 2, 3} - {*without})
    told = ranks.told()
    assert [each.error for each in told.values()] == [None] * 4
    assert [told[rank].state for rank in (2, 3)] == [(3, True)] * 2


HELD = {
    ("keep", "exchange"): (1, True), ("straight", "exchange"): (None, False), ("keep", "received"): (2, False),
    ("straight", "received"): (2, False), ("keep", "after"): (1, True), ("straight", "after"): (1, True),
    ("keep", "later"): (1, True), ("straight", "later"): (1, True),
}  # fmt: skip
"""What receivers have when a push has failed at a moment: the version, and whether they compute."""


def is_as_left(state: Any, way: str, moment: str) -> bool:
    """Whether this is what a receiver has. What writes straight into the model may not have begun to."""
    held = HELD.get((way, moment), (0, True))
    return way == "rules" or state == held or (held == (None, False) and state == (1, False))


WAYS = ("keep", "straight", "rules")
KILLS = [
    (victim, moment, WAYS[(number + place) % 3])
    for number, moment in enumerate(("exchange", "received", "after", "later", "check", "join"))
    for place, victim in enumerate((0, 1, 2 + number % 2))
]
"""All pairs of a moment, a victim (one of the receivers, which are alike) and a way."""


@pytest.mark.parametrize("victim, moment, way", one_of_each(KILLS))
def test_killed(start: Callable[[Fault], Ranks], victim: int, moment: str, way: str) -> None:
    """The survivors name the dead, have the old weights or refuse, and push to, or from, its successor."""
    plot = Fault(victim, moment, way=way, shared=victim % 2 == 0)
    with start(plot) as ranks:
        ranks.hear(victim)
        time.sleep(0.3)  # others go on until they wait for it
        ranks.send_signal(victim, signal.SIGKILL)
        since, name = time.time(), NAMES[victim]
        told = ranks.told(victim)
        if moment == "join":
            check(
                told,
                name,
                f"did not join within {JOIN:g} s",
                f"could not join {name} at",
                since=since,
                within=JOIN + LATE,
            )
        else:
            check(told, name, "died, or ", since=since)
        for receiver in {2, 3} - {victim}:
            assert is_as_left(told[receiver].state, way, moment), told[receiver]
        ranks.start(victim, replace(plot, rank=-2, versions=(3,), folder=ranks.plot.folder))
        check_again(ranks, victim)


@thorough
@pytest.mark.parametrize(
    "victim, moment, way, causes",
    [
        (2, "exchange", "keep", ["does not answer"]), (3, "exchange", "straight", ["does not answer"]),
        (3, "received", "keep", [f"did not come to 'committed' within {TIMEOUT:g} s"]),
        (2, "after", "keep", [f"did not come to 'begin' within {TIMEOUT:g} s"]),
        (2, "check", "rules", [f"did not come to 'plan' within {TIMEOUT:g} s"]),
        (1, "exchange", "rules", ["does not answer"]),
    ],
)  # fmt: skip
def test_stopped(start: Callable[[Fault], Ranks], victim: int, moment: str, way: str, causes: list[str]) -> None:
    """A slow peer, which hears of it when it goes on."""
    with start(Fault(victim, moment, way=way)) as ranks:
        since = ranks.hear(victim)[1]
        told = ranks.told(victim)
        check(told, NAMES[victim], *causes, since=since)
        for receiver in {2, 3} - {victim}:
            assert is_as_left(told[receiver].state, way, moment)
        ranks.send_signal(victim, signal.SIGCONT)
        assert ranks.hear(victim)[0] is not None
        check_again(ranks)


WRONG = [
    (3, "bucket", "receiver 1 has bucket=32768, and trainer 0 16384"),
    (2, "swapped", "receiver 0 has made another plan than trainer 0"),
    (3, "version", "receiver 1 is to have version 2, and trainer 0 1"),
    (1, "dtype", f"tensor '{A_WEIGHT}' is F32 [96, 64] on rank 1, and BF16 [96, 64] on a rank before it"),
    (1, "shape", f"tensor '{A_WEIGHT}' is BF16 [98, 64] on rank 1, and BF16 [96, 64] on a rank before it"),
    (1, "name", f"tensor '{A_WEIGHT.replace('up', 'pu')}' is none that the format 'dcp' has for 'llama' "
     "(held by trainer 1)"),
    (-1, "missing", f"tensor '{A_WEIGHT}' is missing, by the rules 'llama'"),
]  # fmt: skip


@thorough
@pytest.mark.parametrize("victim, wrong, cause", WRONG)
def test_wrong(start: Callable[[Fault], Ranks], victim: int, wrong: str, cause: str) -> None:
    """What a rank has, or does, otherwise is refused before any byte moves, on all ranks."""
    plot = Fault(victim, wrong=wrong, way="straight")
    with start(plot) as ranks:
        told = ranks.told()
        assert len({each.error for each in told.values()}) == 1
        check(told, "", cause, since=min(each.when for each in told.values()))
        assert [told[rank].state for rank in (2, 3)] == [(0, True)] * 2
        again = {victim} if victim >= 0 else {0, 1}
        for rank in again:
            ranks.send_signal(rank, signal.SIGKILL)
            ranks.start(rank, replace(plot, rank=-2, wrong="", versions=(3,), folder=ranks.plot.folder))
        check_again(ranks, *again)


@thorough
def test_replayed(start: Callable[[Fault], Ranks]) -> None:
    with start(Fault(-2, versions=(1, 2, 1), way="straight")) as ranks:
        told = ranks.told()
        check(told, "trainer 0 has version 2 already: push a later one", "", since=time.time())
        assert [told[rank].state for rank in (2, 3)] == [(2, True)] * 2
        check_again(ranks)
