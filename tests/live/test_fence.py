"""The control connection: all ranks hear the same, and the same error names who failed (ranks are threads here)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from reshard.formats.errors import LiveError
from reshard.live import fence as fence_module
from reshard.live.fence import Fence
from tests.live.processes import free_port

NAMES = ("trainer 0", "trainer 1", "receiver 0")
TIMEOUT, PATIENCE = 2.0, 30.0
REFUSED = "another secret, other processes, or another version of reshard"


@pytest.fixture
def store() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def play(
    store: str, part: Callable[[Fence], object], ranks: dict[int, str] | None = None, timeout: float = PATIENCE
) -> list[object]:
    """What ``part`` returns on each rank, or its error's message; ``ranks`` gives some their own store, or none."""

    def rank(number: int) -> object:
        place = (ranks or {}).get(number, store)
        if not place:
            return None
        try:
            fence = Fence(place, number, NAMES, timeout=timeout)
        except LiveError as error:
            return error.message
        try:
            return part(fence)
        except LiveError as error:
            return error.message
        finally:
            fence.close()

    with ThreadPoolExecutor(len(NAMES)) as pool:
        return list(pool.map(rank, range(len(NAMES))))


def test_all_hear_what_each_said(store: str) -> None:
    def part(fence: Fence) -> list[object]:
        return [fence.gather("a", [fence.rank] * fence.rank), fence.gather("b", "x" * 5_000_000 * fence.rank)]

    expected = [[[], [1], [2, 2]], ["", "x" * 5_000_000, "x" * 10_000_000]]
    assert play(store, part) == [expected] * 3
    assert play(store, part) == [expected] * 3  # the port is free again


def test_late(store: str) -> None:
    def part(fence: Fence) -> None:
        time.sleep(1.5 * TIMEOUT * (fence.rank == 1))
        fence.gather("plan", "")

    assert play(store, part, timeout=TIMEOUT) == ["trainer 1 did not come to 'plan' within 2 s"] * 3


def test_late_by_as_much_as_is_allowed(store: str) -> None:
    def part(fence: Fence) -> None:
        time.sleep(1.5 * TIMEOUT * (fence.rank == 1))
        fence.gather("begin", "", PATIENCE)

    assert play(store, part, timeout=TIMEOUT) == [None] * 3


def test_different_things(store: str) -> None:
    def part(fence: Fence) -> None:
        time.sleep(0.1 * fence.rank)
        fence.gather("plan" if fence.rank < 2 else "commit", "")

    assert play(store, part) == ["receiver 0 came to 'commit' when others had come to 'plan'"] * 3


def test_failure_reaches_all(store: str) -> None:
    def part(fence: Fence) -> None:
        assert not is_ringing(fence)
        if fence.rank == 2:
            time.sleep(0.1)
            raise fence.fail("no memory")
        if fence.rank == 1:
            fence.gather("plan", "")
        time.sleep(0.5)
        assert is_ringing(fence)
        with pytest.raises(LiveError):
            fence.gather("plan", "")
        raise fence.fail("a later one")

    assert play(store, part) == ["receiver 0: no memory"] * 3


def test_anew_while_the_broken_one_is_not_closed(store: str) -> None:
    def part(fence: Fence) -> list[object]:
        with pytest.raises(LiveError):
            fence.gather(str(fence.rank), "")
        new = Fence(store, fence.rank, NAMES, timeout=PATIENCE)
        try:
            return new.gather("plan", "new")
        finally:
            new.close()

    assert play(store, part) == [["new"] * 3] * 3


def is_ringing(fence: Fence) -> bool:
    fence.alarm.settimeout(0)
    try:
        return fence.alarm.recv(1) == b""
    except BlockingIOError:
        return False


def test_one_who_leaves(store: str) -> None:
    """What all have said comes to all; who then wants to go on, hears of it."""

    def part(fence: Fence) -> None:
        assert fence.gather("plan", "") == [""] * 3
        if fence.rank < 2:
            time.sleep(0.2)
            fence.gather("end", "")

    assert play(store, part) == ["receiver 0 died, or has left"] * 2 + [None]


def test_rank_0_leaves(store: str) -> None:
    def part(fence: Fence) -> None:
        assert fence.gather("plan", "") == [""] * 3
        if fence.rank:
            time.sleep(0.2)
            fence.gather("end", "")

    assert play(store, part) == [None] + ["trainer 0 died, or has left"] * 2


def test_connection_lost(store: str) -> None:
    def part(fence: Fence) -> None:
        if fence.rank == 1:
            fence._socket.shutdown(socket.SHUT_RDWR)
        else:
            fence.gather("plan", "")

    cause = "trainer 1 died, or has left"
    assert play(store, part) == [cause, None, cause]


def test_blame_goes_to_the_end_of_the_chain(store: str) -> None:
    """Receiver 0 waits for trainer 1, which waits for trainer 0, which waits for nobody."""

    def part(fence: Fence) -> None:
        fence.waits_for = {0: None, 1: 0, 2: 1}[fence.rank]
        fence.gather("begin", "")
        if fence.rank == 2:
            raise fence.fail("trainer 1 sends nothing", 1)
        fence.gather("end", "")

    cause = "trainer 0 keeps the others waiting (receiver 0: trainer 1 sends nothing)"
    assert play(store, part) == [cause] * 3


def test_blame_of_the_one_that_works(store: str) -> None:
    def part(fence: Fence) -> None:
        if fence.rank == 2:
            raise fence.fail("trainer 1 sends nothing", 1)
        fence.gather("end", "")

    assert play(store, part) == ["receiver 0: trainer 1 sends nothing"] * 3


def test_missing(store: str) -> None:
    cause = "trainer 1 did not join within 2 s"
    assert play(store, lambda fence: fence.check(), {1: ""}, TIMEOUT) == [cause, None, cause]


def test_one_who_came_and_died(store: str) -> None:
    def part(fence: Fence) -> None:
        fence.check()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(play, store, part, {1: "", 2: ""}, TIMEOUT)
        time.sleep(0.3)
        hello = fence_module._HELLO.pack(fence_module._token(NAMES, ""), 1, len(NAMES))
        with socket.create_connection(("127.0.0.1", int(store.rpartition(":")[2]))) as connection:
            connection.sendall(b"reshard\n" + hello[:30])
            time.sleep(0.1)
            connection.sendall(hello[30:])
        cause = "trainer 1, receiver 0 did not join within 2 s"
        assert running.result() == [cause, None, None]


def test_nobody_listens(store: str) -> None:
    found = play(store, lambda fence: fence.check(), {0: ""}, TIMEOUT)
    for name, error in zip(NAMES[1:], found[1:], strict=True):
        assert f"{name} could not join trainer 0 at tcp://127.0.0.1:" in str(error)
        assert "within 2 s: [Errno 111] Connection refused" in str(error)


def test_secret(store: str) -> None:
    secret, wrong = (store.replace("//", f"//{word}@") for word in ("s3cret", "gu3ss"))
    assert play(secret, lambda fence: fence.gather("a", "")) == [[""] * 3] * 3
    found = play(secret, lambda fence: fence.check(), {2: wrong}, TIMEOUT)
    assert found[:2] == [f"receiver 0 did not join within 2 s (receiver 0 was refused: {REFUSED})"] * 2
    assert str(found[2]).endswith(f"within 2 s: it was refused: {REFUSED}") or found[2] == found[0]
    assert "cret" not in str(found).replace("another secret", "") and "gu3ss" not in str(found)


def test_who_may_not_join(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(rank: int, names: tuple[str, ...]) -> str:
        with pytest.raises(LiveError) as error:
            Fence(store, rank, names, timeout=TIMEOUT, join=0.2)
        return error.value.message

    def part(fence: Fence) -> None:
        if fence.rank == 1:
            for rank in (1, 3):
                why = "it was refused: it counts 4 processes, trainers and receivers, and trainer 0 3"
                assert why in refused(rank, (*NAMES, "receiver 1"))
            assert REFUSED in refused(1, (NAMES[0], "receiver 0", "receiver 1"))
            assert "another process has its place" in refused(1, NAMES)
            monkeypatch.setattr(fence_module, "__version__", "0.0.7")
            assert REFUSED in refused(1, NAMES)
        fence.gather("after", "")

    assert play(store, part) == [None] * 3


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n", b"", b"reshard\n" + bytes(40), b"reshard\n" + bytes(32) + b"\xff" * 8 + b"x" * 9999,
    ],
)  # fmt: skip
def test_strangers(store: str, noise: bytes) -> None:
    port = int(store.rpartition(":")[2])

    def part(fence: Fence) -> list[object]:
        if fence.rank == 1:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(noise)
                if noise:
                    stranger.settimeout(0.5)
                    with suppress(ConnectionError):
                        while stranger.recv(9999):
                            pass
        return fence.gather("plan", "")

    assert play(store, part) == [[""] * 3] * 3


@pytest.mark.parametrize("store", ["10.0.0.1:80", "tcp://host", "http://h:1", "tcp://:80", "tcp://h:99999999", "", 7])
def test_no_store(store: object) -> None:
    with pytest.raises(LiveError, match="should be tcp://HOST:PORT"):
        Fence(store, 0, NAMES)
