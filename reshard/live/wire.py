"""The bytes of a push, between the processes that a fence joins.

Two processes of one machine share the sender's memory (a memfd of which the descriptor is passed over a Unix socket):
the sender fills a part of it and says so, the receiver reads it there and says so. All others use torch.distributed
point to point, in a group of its own: gloo, on GPUs NCCL (written, and not run).

All ranks go through the messages in one order, that of (step, distance from sender to receiver): the first that has not
arrived is the next of its sender and of its receiver, so that no sizes and no memory can make ranks wait in a circle.
In steady state each receiver hears one sender at a time.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed

from formats.documents import json_bytes
from formats.errors import PlanError, ReshardError
from formats.torch_internals import PrefixStore, is_timeout
from reshard.live.fence import Fence
from reshard.live.message import Message, Step

HEAD = 64
"""Bytes before a message: version, step, size and checksum as 64-bit words, and room up to a line of the cache."""
MOST = 64
"""Messages that are on their way from one rank at a time: fewer than a socket has room for what is said about them."""

_SAID = struct.Struct("<Bq")
_SENT, _TAKEN = range(2)


class Stats(NamedTuple):
    """What one rank sent and received in an exchange: bytes for each peer, without heads; messages; seconds."""

    sent: dict[int, int]
    received: dict[int, int]
    messages: int
    seconds: float


class _Task(NamedTuple):
    step: int
    message: Message
    is_sent: bool


class Wire:
    """The connections of this process to the others, for as long as the fence holds.

    ``device`` is where the tensors are that messages are filled from, of the same kind on all ranks. ``bucket`` is how
    many bytes a message may have; this rank takes memory for two of them to send, and for two to receive from other
    machines. Without ``shared`` no memory is shared. Raises LiveError.
    """

    def __init__(
        self, fence: Fence, rank: int, device: str = "cpu", bucket: int = 64 << 20, *, shared: bool = True
    ) -> None:
        self._fence, self._rank, self._device, self._bucket = fence, rank, torch.device(device), bucket
        self._limit = timedelta(seconds=fence.timeout)
        self._links: dict[int, _Shared] = {}
        self._group: distributed.ProcessGroupGloo | distributed.ProcessGroupNCCL | None = None
        size = 2 * (bucket + 2 * HEAD)
        shared = shared and self._device.type == "cpu" and hasattr(os, "memfd_create")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if shared else None
        try:
            self._connect(listener, size)
        except Exception as error:
            self.close()
            raise fence.fail(f"it could not connect to the others: {error}", rank) from error
        finally:
            if listener is not None:
                listener.close()

    def exchange(self, steps: Sequence[Step], version: int) -> Stats:
        """Send and receive all messages of this rank; their ``work`` is called in this thread, one after another.

        All ranks call it with the same version, and with the same steps: where a rank has nothing to do in one, its
        step is empty. The tensor that ``work`` is given is memory for this call only. Raises LiveError, on all ranks,
        after which the wire and its fence are of no use.
        """
        start = time.monotonic()
        tasks = self._in_order(steps)
        try:
            self._compare(tasks, len(steps), version)
            self._run(tasks, version)
        except BaseException as error:
            self.close()
            cause = error.message if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
            failure = self._fence.fail(cause)  # the first one's, which may be another rank's
            if isinstance(error, Exception):
                raise failure from error
            raise
        sent, received = dict[int, int](), dict[int, int]()
        for _, message, is_sent in tasks:
            count = sent if is_sent else received
            count[message.peer] = count.get(message.peer, 0) + message.nbytes
        return Stats(sent, received, len(tasks), time.monotonic() - start)

    def close(self) -> None:
        """Let go of the connections and the memory."""
        for link in self._links.values():
            link.socket.close()
        self._links.clear()
        if self._group is not None:
            self._group.abort()
            self._group = None

    # --------------------------------------------------------------------------------------------------- connecting

    def _connect(self, listener: socket.socket | None, size: int) -> None:
        address = f"reshard-{secrets.token_hex(8)}"
        if listener is not None:
            listener.bind("\0" + address)
            listener.listen(self._fence.world)
        here = {
            "machine": _machine() if listener is not None else "",
            "address": address,
            "device": self._device.type,
            "bucket": self._bucket,
        }
        said = [json.loads(each) for each in self._fence.gather("wire", json_bytes(here, indent=None))]
        for other, name in zip(said, self._fence.names, strict=True):
            for key in ("device", "bucket"):
                if other[key] != here[key]:
                    raise ValueError(f"its {key} is {here[key]}, that of {name} {other[key]}")
        descriptor = _memory(size) if listener is not None else None
        self._out = _Ring(_mapped(descriptor, size) if descriptor is not None else self._empty(size))
        if listener is not None and descriptor is not None:
            near = {r: each["address"] for r, each in enumerate(said) if each["machine"] == here["machine"]}
            self._share(listener, near, descriptor, size)
            os.close(descriptor)
        if len({each["machine"] for each in said}) > 1 or (listener is None and self._fence.world > 1):
            self._in = _Ring(self._empty(size))
            self._group = self._make_group()

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _share(self, listener: socket.socket, near: dict[int, str], descriptor: int, size: int) -> None:
        """Connect to the processes of this machine, each of which gives its memory to the others."""
        seconds = self._fence.timeout
        below = [r for r in near if r < self._rank]
        above = {r for r in near if r > self._rank}
        made = dict[int, socket.socket]()
        for peer in below:
            made[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            made[peer].settimeout(seconds)
            with self._waiting(peer, "shares no memory"):
                made[peer].connect("\0" + near[peer])
                socket.send_fds(made[peer], [str(self._rank).encode()], [descriptor])
        listener.settimeout(seconds)
        while above:
            with self._waiting(min(above), "shares no memory"):
                connection, _ = listener.accept()
                connection.settimeout(seconds)
                if (
                    struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
                    != os.getuid()
                ):
                    connection.close()
                    continue
                word, (theirs,), _, _ = socket.recv_fds(connection, 16, 1)
                socket.send_fds(connection, [word], [descriptor])
                above.remove(peer := int(word))
                self._links[peer] = _Shared(connection, _mapped(theirs, size), self._fence)
                os.close(theirs)
        for peer in below:
            with self._waiting(peer, "shares no memory"):
                _, (theirs,), _, _ = socket.recv_fds(made[peer], 16, 1)
                self._links[peer] = _Shared(made[peer], _mapped(theirs, size), self._fence)
                os.close(theirs)

    def _make_group(self) -> distributed.ProcessGroupGloo | distributed.ProcessGroupNCCL:
        """A group that no other part of the program knows, on a store of its own."""
        fence = self._fence
        listener = socket.create_server((fence.address, 0)) if self._rank == 0 else None
        port = int(fence.gather("store", str(listener.getsockname()[1]).encode() if listener else b"")[0])
        descriptor = None if listener is None else listener.detach()
        store = distributed.TCPStore(  # type: ignore[attr-defined]
            fence.host, port, fence.world, self._rank == 0, self._limit, False, master_listen_fd=descriptor
        )
        prefix = PrefixStore("reshard", store)
        if self._device.type == "cuda":
            nccl = distributed.ProcessGroupNCCL.Options()
            nccl._timeout = self._limit
            return distributed.ProcessGroupNCCL(prefix, self._rank, fence.world, nccl)
        gloo = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = self._limit
        gloo._devices = [distributed.ProcessGroupGloo.create_device(hostname=fence.address)]
        return distributed.ProcessGroupGloo(prefix, self._rank, fence.world, gloo)

    # --------------------------------------------------------------------------------------------------- exchanging

    def _in_order(self, steps: Sequence[Step]) -> list[_Task]:
        tasks = [
            _Task(number, message, is_sent)
            for number, step in enumerate(steps)
            for is_sent, messages in ((True, step.sends), (False, step.receives))
            for message in messages
        ]
        world = self._fence.world
        tasks.sort(key=lambda t: (t.step, (1 if t.is_sent else -1) * (t.message.peer - self._rank) % world))
        for _, message, _ in tasks:
            if message.nbytes > self._bucket:
                raise PlanError(f"a message has {message.nbytes:,} bytes, and a bucket {self._bucket:,}")
        return tasks

    def _compare(self, tasks: list[_Task], steps: int, version: int) -> None:
        """Two ranks that expect different sizes must not begin: gloo would end the receiver's process."""
        sizes = {"from": dict[str, int](), "to": dict[str, int]()}
        for step, message, is_sent in tasks:
            with_peer, peer = sizes["to" if is_sent else "from"], str(message.peer)
            with_peer[peer] = zlib.crc32(b"%d %d " % (step, message.nbytes), with_peer.get(peer, 0))
        mine = {"version": version, "steps": steps, **sizes}
        said = [json.loads(each) for each in self._fence.gather("exchange", json_bytes(mine, indent=None))]
        for number, theirs in enumerate(said):
            name = self._fence.names[number]
            for key in ("version", "steps"):
                if theirs[key] != mine[key]:
                    raise self._fence.fail(f"it exchanges {key} {mine[key]}, and {name} {theirs[key]}")
            for key, other in (("to", "from"), ("from", "to")):
                if theirs[other].get(str(self._rank)) != sizes[key].get(str(number)):
                    raise self._fence.fail(f"its messages {key} {name} are not those that {name} expects")

    def _run(self, tasks: list[_Task], version: int) -> None:
        self._sent = deque[tuple[int, int, Callable[[], object]]]()
        self._posted = deque[tuple[torch.Tensor, Callable[[], object]]]()
        self._to_post = deque(t.message for t in tasks if not t.is_sent and t.message.peer not in self._links)
        for task in tasks:
            self._fence.check()
            self._post()
            if task.is_sent:
                self._send(task.message, task.step, version)
            else:
                self._receive(task.message, task.step, version)
        while self._sent:
            self._settle()

    def _send(self, message: Message, step: int, version: int) -> None:
        size = _padded(message.nbytes)
        while len(self._sent) == MOST or (start := self._out.take(size)) is None:
            self._settle()
        part = self._out.memory[start : start + size]
        message.work(part[HEAD : HEAD + message.nbytes])
        words = part.view(torch.int64)
        words[:3] = torch.tensor([version, step, message.nbytes], device=self._device)
        words[3] = _checksum(part)
        with self._waiting(message.peer, f"takes nothing in step {step}"):
            if message.peer in self._links:
                done = self._links[message.peer].send(start)
            else:
                done = self._point_to_point("send", part, message.peer)
        self._sent.append((message.peer, step, done))

    def _settle(self) -> None:
        """Wait until the oldest message has left, and use its memory again."""
        peer, step, done = self._sent.popleft()
        with self._waiting(peer, f"takes nothing in step {step}"):
            done()
        self._out.free()

    def _post(self) -> None:
        """Let messages from other machines come in while there is memory for them."""
        while self._to_post and (start := self._in.take(_padded(self._to_post[0].nbytes))) is not None:
            message = self._to_post.popleft()
            part = self._in.memory[start : start + _padded(message.nbytes)]
            with self._waiting(message.peer, "sends nothing"):
                self._posted.append((part, self._point_to_point("recv", part, message.peer)))

    def _receive(self, message: Message, step: int, version: int) -> None:
        link = self._links.get(message.peer)
        with self._waiting(message.peer, f"sends nothing in step {step}"):
            if link is not None:
                part = link.receive(_padded(message.nbytes))
            else:
                part, done = self._posted.popleft()
                done()
        found = part.view(torch.int64)[:4].tolist()
        for what, value, expected in zip(
            ("version", "step", "size", "checksum"),
            found,
            (version, step, message.nbytes, int(_checksum(part))),
            strict=True,
        ):
            if value != expected:
                name = self._fence.names[message.peer]
                raise self._fence.fail(f"step {step} of {name} came with {what} {value}, and not {expected}")
        message.work(part[HEAD : HEAD + message.nbytes])
        if link is not None:
            link.say(_TAKEN)
        else:
            self._in.free()
            self._post()

    def _point_to_point(self, way: str, part: torch.Tensor, peer: int) -> Callable[[], object]:
        work = getattr(self._group, way)([part], peer, 0)
        return lambda: work.wait(self._limit)

    @contextmanager
    def _waiting(self, peer: int, what: str) -> Iterator[None]:
        """While this rank waits for another: who fails there is to blame, unless the fence knows better."""
        self._fence.waits_for = peer
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            self._fence.check()
            late = isinstance(error, TimeoutError) or is_timeout(error)
            why = f"for {self._fence.timeout:g} s" if late else "any more: the connection to it was lost"
            raise self._fence.fail(f"{self._fence.names[peer]} {what} {why}", peer) from error
        finally:
            self._fence.waits_for = None


class _Ring:
    """Memory for messages, each in one piece, that is free again in the order in which it was taken."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._held = deque[tuple[int, int]]()

    def take(self, size: int) -> int | None:
        """Where ``size`` bytes begin; None if they are not free."""
        first, last = (self._held[0][0], self._held[-1][1]) if self._held else (0, 0)
        wrapped = bool(self._held) and self._held[-1][0] < first
        if last + size <= (first if wrapped else self.memory.numel()):
            start = last
        elif not wrapped and size <= first:
            start = 0
        else:
            return None
        self._held.append((start, start + size))
        return start

    def free(self) -> None:
        """Let go of the oldest."""
        self._held.popleft()


class _Shared:
    """A process of this machine: what each says about the memory of both."""

    def __init__(self, connection: socket.socket, memory: torch.Tensor, fence: Fence) -> None:
        self.socket, self._memory, self._fence = connection, memory, fence
        self._said: tuple[deque[int], deque[int]] = deque(), deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(fence.alarm, select.POLLIN)

    def say(self, what: int, start: int = 0) -> None:
        self.socket.send(_SAID.pack(what, start))

    def send(self, start: int) -> Callable[[], object]:
        """Say that a message begins there in this rank's memory; what is returned waits until the peer has taken it."""
        self.say(_SENT, start)
        return lambda: self._hear(_TAKEN)

    def receive(self, size: int) -> torch.Tensor:
        """The next message, in the memory of the peer."""
        start = self._hear(_SENT)
        return self._memory[start : start + size]

    def _hear(self, what: int) -> int:
        end = time.monotonic() + self._fence.timeout
        while not self._said[what]:
            if not self._poll.poll(max(0, end - time.monotonic()) * 1000):
                raise TimeoutError
            self._fence.check()
            word = self.socket.recv(_SAID.size)
            if not word:
                raise ConnectionError
            kind, start = _SAID.unpack(word)
            self._said[kind].append(start)
        return self._said[what].popleft()


def _checksum(part: torch.Tensor) -> torch.Tensor:
    """The sum of a message's 64-bit words, modulo 2^64: sees what is torn, stale or flipped, not what is exchanged."""
    return part[HEAD:].view(torch.int64).sum()


def _padded(nbytes: int) -> int:
    return HEAD + (nbytes + HEAD - 1) // HEAD * HEAD


def _memory(size: int) -> int:
    """The descriptor of memory without a name, which is gone with the last process that has it."""
    descriptor = os.memfd_create("reshard")
    os.ftruncate(descriptor, size)
    return descriptor


def _mapped(descriptor: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _machine() -> str:
    """What processes have in common that can share memory: machine, network namespace (of the socket), user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino} {os.getuid()}"
