"""The bytes of a push arrive, or all ranks say within seconds whose fault it is, and then can begin anew."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from reshard.formats.errors import LiveError, PlanError
from reshard.live import wire as wire_module
from reshard.live.fence import Fence
from reshard.live.wire import Message, Stats, Wire
from tests.live.processes import free_port
from tests.live.ranks import JOIN, LATE, NAMES, TIMEOUT, Plot, Ranks
from tests.marks import of_ranks, one_of_each, thorough

BUCKET = 1 << 14


@pytest.fixture
def store() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


# ------------------------------------------------------------------------------------------- ranks that are threads


def content(step: int, source: int, target: int, number: int, nbytes: int) -> torch.Tensor:
    start = 7 * step + 31 * source + 17 * target + number
    return (torch.arange(start, start + nbytes) % 251).to(torch.uint8)


def all_to_all(rank: int, world: int, seed: int, wrong: list[object]) -> list[Message]:
    """Each rank sends each other none to three messages in each step, of any size, listed in any order."""
    dice = random.Random(seed)
    found = []
    for step in range(8):
        for source in range(world):
            for target in range(world):
                for number in range(dice.randint(0, 3) if source != target else 0):
                    what = step, source, target, number, dice.choice([0, 1, 7, 8, 1000, BUCKET - 5, BUCKET])
                    if rank == source:
                        found.append(Message(step, target, what[-1], partial(fill, what), True))
                    elif rank == target:
                        found.append(Message(step, source, what[-1], partial(compare, what, wrong), False))
    return found


def fill(what: tuple[int, int, int, int, int], part: torch.Tensor) -> None:
    part.copy_(content(*what))


def compare(what: tuple[int, int, int, int, int], wrong: list[object], part: torch.Tensor) -> None:
    if not torch.equal(part, content(*what)):
        wrong.append(what)


@pytest.mark.parametrize("shared", [True, False])
def test_all_to_all(store: str, shared: bool) -> None:
    """In both directions at once, more than there is memory for; the memory is used again by a second push."""
    names = [f"rank {r}" for r in range(4)]
    wrong: list[object] = []

    def rank(number: int) -> list[Stats]:
        fence = Fence(store, number, names)
        wire = Wire(fence, number, bucket=BUCKET, shared=shared)
        found = [wire.exchange(all_to_all(number, 4, version, wrong), version) for version in (1, 2)]
        fence.gather("end", "")
        wire.close()
        fence.close()
        return found

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(rank, range(4)))
    assert not wrong
    for number, pushes in enumerate(found):
        for version, stats in enumerate(pushes, 1):
            messages = all_to_all(number, 4, version, wrong)
            assert sum(stats.sent.values()) == sum(each.nbytes for each in messages if each.is_sent)
            assert stats.messages == len(messages)
            for peer, nbytes in stats.received.items():
                assert nbytes == found[peer][version - 1].sent[number]


def message(peer: int, nbytes: int = 8) -> Message:
    return Message(0, peer, nbytes, lambda part: None, peer > 0)


@pytest.mark.parametrize("sent, version, cause", [(8, 3, "version 3, and not 4"), (16, 4, "size 16, and not 8")])
def test_other_message(store: str, sent: int, version: int, cause: str) -> None:
    """All hear of a message that is not the one that its receiver expects."""

    def rank(number: int) -> str:
        fence = Fence(store, number, ["rank 0", "rank 1"], timeout=TIMEOUT)
        wire = Wire(fence, number, bucket=64)
        given, at = (message(0), 4) if number else (message(1, sent), version)
        with pytest.raises(LiveError) as error:
            wire.exchange([given], at)
            fence.gather("end", "")
        with pytest.raises(LiveError, match=cause):
            fence.gather("again", "")
        fence.close()
        return error.value.message

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(rank, range(2))] == [f"rank 1: step 0 of rank 0 came with {cause}"] * 2


def test_too_large(store: str) -> None:
    fence = Fence(store, 0, ["rank 0"])
    with pytest.raises(PlanError, match="a message has 65 bytes, and a bucket 64"):
        Wire(fence, 0, bucket=64).exchange([message(0, 65)], 1)
    fence.close()


def test_devices_differ(store: str) -> None:
    def rank(number: int) -> str:
        fence = Fence(store, number, ["rank 0", "rank 1"])
        with pytest.raises(LiveError) as error:
            Wire(fence, number, "meta" if number else "cpu", bucket=64)
        fence.close()
        return error.value.message

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rank, range(2)))
    assert found[0] == found[1]
    assert "its tensors are on cpu, those of rank 1 on meta" in found[0] or "its tensors are on meta" in found[0]


@pytest.mark.parametrize("sizes", [[1], [3, 5], [5, 3], [10], [2, 2, 2, 9]])
def test_ring(sizes: list[int]) -> None:
    """Messages lie apart from each other; what fits in half of the memory finds room sooner or later."""
    ring, held = wire_module._Ring(torch.zeros(20)), list[range]()
    for number in range(200):
        size = sizes[number % len(sizes)]
        while (start := ring.take(size)) is None:
            assert held
            held.pop(0)
            ring.free()
        assert 0 <= start <= 20 - size
        assert not any(set(other) & set(range(start, start + size)) for other in held)
        held.append(range(start, start + size))


# ------------------------------------------------------------------------------------------ ranks that are processes


def check(ranks: Ranks, victim: int, when: float, *words: str, within: float = TIMEOUT + LATE) -> None:
    """All others name the victim and the cause, in time, and in the same words unless rank 0 cannot tell them."""
    told = ranks.told(victim)
    errors = {str(each.error) for each in told.values()}
    assert len(errors) == 1 or (victim == 0 and words == ("does not answer",)), errors
    for error in errors:
        assert error.startswith(NAMES[victim]) and all(word in error for word in words), error
    assert max(each.when for each in told.values()) - when < within


def check_again(ranks: Ranks) -> None:
    assert [each.error for each in ranks.told().values()] == [None] * 4


MOMENTS = [
    (3, "message", True), (3, "message", False), (0, "message", True), (1, "message", False), (1, "gather", True),
    (0, "gather", True), (1, "exchange", False), (0, "exchange", True), (3, "exchange", True), (0, "end", False),
    (1, "end", True), (3, "end", True),
]  # fmt: skip


@of_ranks
@pytest.mark.parametrize("victim, moment, shared", one_of_each(MOMENTS))
def test_killed(store: str, victim: int, moment: str, shared: bool) -> None:
    """All others learn who died; then they, and a new process in its place, do the whole push."""
    with Ranks(store, Plot(victim, moment, shared=shared)) as ranks:
        ranks.hear(victim)
        time.sleep(0.3)  # others go on until they wait for it: in the middle of a message
        ranks.send_signal(victim, signal.SIGKILL)
        check(ranks, victim, time.time(), "died, or ")
        ranks.start(victim, Plot(shared=shared))
        ranks.again(*{0, 1, 2, 3} - {victim})
        check_again(ranks)


@of_ranks
@thorough
@pytest.mark.parametrize("victim", [0, 3])
def test_killed_before_it_joined(store: str, victim: int) -> None:
    with Ranks(store, Plot(victim, "join")) as ranks:
        when = ranks.hear(victim)[1]
        ranks.send_signal(victim, signal.SIGKILL)
        for rank, told in ranks.told(victim).items():
            late = (
                f"{NAMES[rank]} could not join trainer 0 at "
                if victim == 0
                else f"receiver 1 did not join within {JOIN:g} s"
            )
            assert told.error is not None and told.error.startswith(late)
            assert told.when - when < JOIN + LATE
        ranks.start(victim, Plot())
        ranks.again(*{0, 1, 2, 3} - {victim})
        check_again(ranks)


@of_ranks
@thorough
@pytest.mark.parametrize(
    "victim, moment, shared, cause",
    [
        (0, "message", True, "does not answer"), (1, "message", False, "does not answer"),
        (3, "message", True, "does not answer"), (3, "message", False, "does not answer"),
        (1, "exchange", True, "does not answer"), (0, "end", True, "does not answer"),
    ],
)  # fmt: skip
def test_stopped(store: str, victim: int, moment: str, shared: bool, cause: str) -> None:
    """A process that does not go on, but is not dead: when it wakes up it hears of it, and all begin anew."""
    with Ranks(store, Plot(victim, moment, shared=shared)) as ranks:
        when = ranks.hear(victim)[1]
        check(ranks, victim, when, cause)
        ranks.send_signal(victim, signal.SIGCONT)
        assert ranks.hear(victim)[0] is not None
        ranks.again()
        check_again(ranks)


def sleep() -> None:
    time.sleep(TIMEOUT + 1)


def raise_error() -> None:
    raise MemoryError("no room for it")


def tear() -> None:
    """From now on, flip a bit of each message after its sum was taken."""
    checksum = wire_module._checksum

    def torn(part: torch.Tensor) -> torch.Tensor:
        found = checksum(part)
        part[wire_module.HEAD] ^= 1
        return found

    wire_module._checksum = torn


TRICKS = [
    (2, "message", sleep, True, "receiver 0", " nothing in step 1 "),
    (1, "message", sleep, False, "trainer 1", " nothing in step 1 "),
    (3, "message", raise_error, True, "receiver 1: MemoryError: no room for it", ""),
    (0, "message", raise_error, False, "trainer 0: MemoryError: no room for it", ""),
    (1, "message", tear, True, "step 1 of trainer 1 came with checksum ", ", and not "),
    (1, "message", tear, False, "step 1 of trainer 1 came with checksum ", ", and not "),
]


@of_ranks
@thorough
@pytest.mark.parametrize("victim, moment, trick, shared, name, cause", TRICKS)
def test_faults(
    store: str, victim: int, moment: str, trick: Callable[[], None], shared: bool, name: str, cause: str
) -> None:
    """A rank that is slow, that cannot go on, whose bytes change on their way."""
    with Ranks(store, Plot(victim, moment, trick, shared)) as ranks:
        told = ranks.told()
        assert len({each.error for each in told.values()}) == 1, told
        error = told[0].error
        assert error is not None and name in error and cause in error
        if trick is not tear:  # which goes on
            ranks.again()
            check_again(ranks)
