"""The bytes of a push, between the processes that a fence joins.

Two processes of one machine share the sender's memory (a memfd of which the descriptor is passed over a Unix socket; on
one GPU, which NCCL refuses to send between, a handle of CUDA's): the sender fills a part of it and says where, the
receiver reads it there and says so. All others use torch.distributed point to point, in a group of its own: gloo, or
between GPUs NCCL (written, and not run).

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
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import distributed

from reshard.formats.documents import json_bytes
from reshard.formats.errors import PlanError, ReshardError
from reshard.formats.torch_internals import PrefixStore, is_timeout, share_memory, shared_memory
from reshard.live.fence import Fence


class Message(NamedTuple):
    """Bytes for another rank, or from it."""

    step: int
    """The number of the bucket that it is in."""
    peer: int
    """The other's number among all processes: those of the trainer first, then those of the receiver."""
    nbytes: int
    work: Callable[[torch.Tensor], None]
    """Called with a one-dimensional tensor of ``nbytes`` bytes (``torch.uint8``): to fill it, or with what came."""
    is_sent: bool


HEAD = 64
"""Bytes before a message: the words of ``_WORDS``, of 64 bits, and room up to a line of the cache."""
MOST = 64
"""The most messages on their way from one rank: a socket must have room for their heads."""
_WORDS = ("version", "step", "size", "checksum")


class Stats(NamedTuple):
    """The traffic of one rank in an exchange: bytes for each peer, without heads; messages; seconds."""

    sent: dict[int, int]
    received: dict[int, int]
    messages: int
    seconds: float


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
        self._out_links: dict[int, socket.socket] = {}
        self._in_links: dict[int, tuple[socket.socket, torch.Tensor]] = {}
        self._group: distributed.ProcessGroupGloo | distributed.ProcessGroupNCCL | None = None
        size = 2 * (bucket + 2 * HEAD)
        shared = shared and self._device.type in {"cpu", "cuda"} and hasattr(os, "memfd_create")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if shared else None
        try:
            self._connect(listener, size)
        except Exception as error:
            self.close()
            raise fence.fail(f"it could not connect to the others: {error}", rank) from error
        finally:
            if listener is not None:
                listener.close()

    def exchange(self, messages: Iterable[Message], version: int) -> Stats:
        """Send and receive all messages of this rank; their ``work`` is called in this thread, one after another.

        All ranks call it with the same version, and with messages that fit (gloo would end a process that is sent more
        than it expects). Those of one step between two ranks go in the order in which both have them. The tensor that
        ``work`` is given is memory for this call only. Raises LiveError, on all ranks, after which the wire and its
        fence are of no use.
        """
        start, world = time.monotonic(), self._fence.world

        def place(message: Message) -> tuple[int, int, bool]:
            distance = message.peer - self._rank if message.is_sent else self._rank - message.peer
            return message.step, distance % world, not message.is_sent

        ordered = sorted(messages, key=place)
        for message in ordered:
            if message.nbytes > self._bucket:
                raise PlanError(f"a message has {message.nbytes:,} bytes, and a bucket {self._bucket:,}")
        try:
            self._run(ordered, version)
        except BaseException as error:
            cause = error.message if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
            failure = self._fence.fail(cause)  # the first one's, which may be another rank's
            self.close()  # only now: who finds the connection lost would be heard before the cause
            if isinstance(error, Exception):
                raise failure from error
            raise
        sent, received = Counter[int](), Counter[int]()
        for message in ordered:
            (sent if message.is_sent else received)[message.peer] += message.nbytes
        return Stats(sent, received, len(ordered), time.monotonic() - start)

    def close(self) -> None:
        """Let go of the connections and the memory."""
        for connection in [*self._out_links.values(), *(connection for connection, _ in self._in_links.values())]:
            connection.close()
        if self._group is not None:
            self._group.abort()
            self._group = None

    # --------------------------------------------------------------------------------------------------- connecting

    def _connect(self, listener: socket.socket | None, size: int) -> None:
        fence, address = self._fence, f"reshard-{secrets.token_hex(8)}"
        own_address = [self._device.type, _machine(self._device) if listener is not None else "", address]
        if listener is not None:
            listener.bind("\0" + address)
            listener.listen(fence.world)
        ends = fence.gather("wire", own_address)
        for name, (device, *_) in zip(fence.names, ends, strict=True):
            if device != own_address[0]:
                raise ValueError(f"its tensors are on {own_address[0]}, those of {name} on {device}")
        near = {r: peer for r, (_, machine, peer) in enumerate(ends) if machine == own_address[1] and r != self._rank}
        if listener is not None:
            self._out = _Ring(self._share(listener, near, size))
        else:
            self._out, near = _Ring(self._empty(size)), {}
        if len(near) + 1 < fence.world:
            self._in = _Ring(self._empty(size))
            self._group = self._make_group()

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _share(self, listener: socket.socket, near: dict[int, str], size: int) -> torch.Tensor:
        """Give this rank's memory, which is returned, to the processes that can open it, and take theirs."""
        files: list[int] = []
        if self._device.type == "cpu":
            files = [os.memfd_create("reshard")]  # without a name: gone with the last process that has it
            os.truncate(files[0], size)
        memory = _mapped(files[0]) if files else self._empty(size)
        for peer, address in near.items():
            self._out_links[peer] = connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with self._waiting(peer, "shares no memory"):
                connection.settimeout(self._fence.timeout)
                connection.connect("\0" + address)
                handle = None if files else share_memory(memory)
                socket.send_fds(connection, [json_bytes([self._rank, handle], indent=None)], files)
        for file in files:
            os.close(file)
        listener.settimeout(self._fence.timeout)
        while missing := near.keys() - self._in_links.keys():
            with self._waiting(min(missing), "shares no memory"):
                connection, _ = listener.accept()
                connection.settimeout(self._fence.timeout)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if int.from_bytes(credentials[4:8], sys.byteorder) != os.getuid():  # of another user
                    connection.close()
                    continue
                word, files, _, _ = socket.recv_fds(connection, 4096, 1)
                peer, handle = json.loads(word)
                self._in_links[peer] = connection, shared_memory(handle, self._device) if handle else _mapped(files[0])
                for file in files:
                    os.close(file)
        return memory

    def _make_group(self) -> distributed.ProcessGroupGloo | distributed.ProcessGroupNCCL:
        """A group that no other part of the program knows, on a store of its own."""
        fence = self._fence
        listener = socket.create_server((fence.address, 0)) if self._rank == 0 else None
        port = fence.gather("store", listener.getsockname()[1] if listener else None)[0]
        descriptor = None if listener is None else listener.detach()
        store = distributed.TCPStore(  # type: ignore[attr-defined]  # libuv's takes no descriptor in torch 2.7
            fence.host, port, fence.world, self._rank == 0, self._limit, False, False, descriptor, use_libuv=False
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

    def _run(self, messages: Sequence[Message], version: int) -> None:
        self._sent = deque[tuple[int, int, Callable[[], object]]]()
        self._posted = deque[tuple[torch.Tensor, Callable[[], object]]]()
        self._to_post = deque(m for m in messages if not m.is_sent and m.peer not in self._in_links)
        for message in messages:
            self._fence.check()
            self._post()
            (self._send if message.is_sent else self._receive)(message, version)
        while self._sent:
            self._settle()

    def _send(self, message: Message, version: int) -> None:
        size = _padded(message.nbytes)
        while len(self._sent) == MOST or (start := self._out.take(size)) is None:
            self._settle()
        part = self._out.memory[start : start + size]
        message.work(part[HEAD : HEAD + message.nbytes])
        words = part.view(torch.int64)
        words[:3] = torch.tensor([version, message.step, message.nbytes], device=self._device)
        words[3] = _checksum(part)
        with self._waiting(message.peer, f"takes nothing in step {message.step}"):
            if link := self._out_links.get(message.peer):
                self._wait_for_device()
                link.send(start.to_bytes(8))
                wait: Callable[[], object] = partial(self._hear, link)
            else:
                wait = self._point_to_point("send", part, message.peer)
        self._sent.append((message.peer, message.step, wait))

    def _settle(self) -> None:
        """Wait until the oldest message has left, and use its memory again."""
        peer, step, wait = self._sent.popleft()
        with self._waiting(peer, f"takes nothing in step {step}"):
            wait()
        self._out.free()

    def _post(self) -> None:
        """Let messages from other machines come in while there is memory for them."""
        while self._to_post and (start := self._in.take(_padded(self._to_post[0].nbytes))) is not None:
            message = self._to_post.popleft()
            part = self._in.memory[start : start + _padded(message.nbytes)]
            with self._waiting(message.peer, "sends nothing"):
                self._posted.append((part, self._point_to_point("recv", part, message.peer)))

    def _receive(self, message: Message, version: int) -> None:
        link, memory = self._in_links.get(message.peer, (None, None))
        with self._waiting(message.peer, f"sends nothing in step {message.step}"):
            if link is not None and memory is not None:
                start = self._hear(link)
                part = memory[start : start + _padded(message.nbytes)]
            else:
                part, wait = self._posted.popleft()
                wait()
        expected = version, message.step, message.nbytes, int(_checksum(part))
        for what, one, other in zip(_WORDS, part.view(torch.int64)[:4].tolist(), expected, strict=True):
            if one != other:
                raise self._fence.fail(
                    f"step {message.step} of {self._fence.names[message.peer]} came with {what} {one}, and not {other}"
                )
        message.work(part[HEAD : HEAD + message.nbytes])
        if link is not None:
            self._wait_for_device()
            link.send(bytes(8))
        else:
            self._in.free()
            self._post()

    def _wait_for_device(self) -> None:
        """Wait until the device has done what it was asked: another process looks at the memory next."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).current_stream(self._device).synchronize()

    def _point_to_point(self, way: str, part: torch.Tensor, peer: int) -> Callable[[], object]:
        return partial(getattr(self._group, way)([part], peer, 0).wait, self._limit)

    def _hear(self, link: socket.socket) -> int:
        """The next word of a process of this machine: where a message begins in its memory, or that it has taken one.

        Raises LiveError, OSError.
        """
        poll = select.poll()
        for readable in (link, self._fence.alarm):
            poll.register(readable, select.POLLIN)
        if not poll.poll(self._fence.timeout * 1000):
            raise TimeoutError
        self._fence.check()
        word = link.recv(8)
        if not word:
            raise ConnectionError
        return int.from_bytes(word)

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
    """A ring of memory for messages, each contiguous, which are freed in the order in which they were taken."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._used = deque[tuple[int, int]]()

    def take(self, size: int) -> int | None:
        """Take ``size`` bytes and return the place where they begin; None if they are not free."""
        first, last = (self._used[0][0], self._used[-1][1]) if self._used else (0, 0)
        wrapped = bool(self._used) and self._used[-1][0] < first
        if last + size <= (first if wrapped else self.memory.numel()):
            start = last
        elif not wrapped and size <= first:
            start = 0
        else:
            return None
        self._used.append((start, start + size))
        return start

    def free(self) -> None:
        """Let go of the oldest."""
        self._used.popleft()


def _checksum(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of a message's 64-bit words, modulo 2^64. It sees torn, stale or flipped words, not exchanged
    ones.
    """
    return part[HEAD:].view(torch.int64).sum()


def _padded(nbytes: int) -> int:
    return HEAD + (nbytes + HEAD - 1) // HEAD * HEAD


def _mapped(file: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)


def _machine(device: torch.device) -> str:
    """Return an equal text for processes that can share memory: machine, network namespace (of the socket),
    user, GPU.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    gpu = ""
    if device.type == "cuda":
        gpu = getattr(torch.cuda.get_device_properties(device), "uuid", secrets.token_hex(8))
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino} {os.getuid()} {gpu}"
