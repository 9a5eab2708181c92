"""The control connection of all processes of a push: they agree, and each learns within seconds that another failed.

Rank 0 listens, and each process, rank 0's own too, has one connection to it. Rank 0 repeats to all what each said, and
watches: a connection that ends, or a rank that is missing when the time is over, breaks the fence for good. Then each
call on each rank raises the same LiveError, and all make a new fence.

Who comes says a fixed number of bytes first: reshard, a digest of what all must know, and its rank. Then a message is
two big-endian numbers (32 and 64 bits: the sizes of what follows), a JSON object, and what a rank said, as JSON, which
rank 0 passes on as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from reshard.formats.documents import json_bytes
from reshard.formats.errors import LiveError, listed
from reshard.version import __version__

HINT = "call it again on all processes: they meet anew. timeout= and patience= are the seconds that they wait"
GRACE = 0.5
"""Seconds in which a healthy process answers a question on the control connection."""

_MAGIC = b"reshard\n"
_HELLO = struct.Struct(">32sII")
_SIZES = struct.Struct(">IQ")
_PART = 1 << 20
_PAUSE = 0.05


class Fence:
    """This process's end of the control connection. Its methods may be called in any thread.

    ``store`` is ``tcp://HOST:PORT``, where rank 0 listens, or ``tcp://SECRET@HOST:PORT``. ``names[r]`` is what errors
    call rank r. ``timeout`` is how many seconds a rank may let the others wait, ``join`` (by default as many) how many
    it may take until all have come. Raises LiveError that says who has not.
    """

    def __init__(
        self, store: str, rank: int, names: Sequence[str], *, timeout: float = 10.0, join: float | None = None
    ) -> None:
        self.rank, self.names, self.timeout = rank, tuple(names), timeout
        self.world = len(self.names)
        self.waits_for: int | None = None
        """The rank that this process waits for: tells the others who is the cause and who is only waiting, too."""
        self.alarm, self._bell = socket.socketpair()
        """``alarm`` becomes readable when the fence breaks: for those who wait for something else."""
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._answers: list[list[Any]] = []
        self._cause = ""
        self._closed = False
        self._coordinator: _Coordinator | None = None
        self.host, port, secret = _endpoint(store)
        self._join((self.host, port), _token(self.names, secret), timeout if join is None else join)
        self.address: str = self._socket.getsockname()[0]
        """The address of this machine on the network on which rank 0 is reached."""
        threading.Thread(target=self._listen, name="reshard fence", daemon=True).start()

    def gather(self, what: str, document: object, patience: float | None = None) -> list[Any]:
        """Return what each rank said under this name, in the order of ranks, as JSON. All ranks gather the same things
        in one order.

        Raises LiveError on all ranks if one failed, died or does not come within ``patience`` seconds, by default the
        timeout.
        """
        self.check()
        seconds = self.timeout if patience is None else patience
        self._send(_message("say", json_bytes(document, indent=None), what=what, seconds=seconds))
        # rank 0 decides, a little later if this rank came first
        self._wait(lambda: bool(self._answers), seconds + 2 * GRACE)
        if not self._answers:
            self._break(f"{self.names[0]} does not answer: it was to gather {what!r}")
            self.check()
        return self._answers.pop()

    def fail(self, cause: str, peer: int | None = None) -> LiveError:
        """Tell all ranks that this one cannot go on; returns the error to raise, which may be an earlier one's.

        If that is as nothing comes from ``peer``, who is named is found out first: a rank that does not answer, or the
        one for which ``peer`` itself waits.
        """
        cause = f"{self.names[self.rank]}: {cause}"
        if not self._cause:
            self._send(_message("fail", peer=peer, cause=cause))
            self._wait(lambda: False, 2 * GRACE)
            self._break(f"{self.names[0]} does not answer ({cause})")
        return LiveError(self._cause or cause, HINT)

    def check(self) -> None:
        """Raise LiveError if a failure or a death is known."""
        if self._cause:
            raise LiveError(self._cause, HINT)

    def close(self) -> None:
        """Leave, which ends the fence for the others, too."""
        with self._changed:
            self._closed = True
        if self._coordinator is not None:
            self._coordinator.stop()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._bell.close()
        self.alarm.close()

    # ------------------------------------------------------------------------------------------------------ private

    def _join(self, place: tuple[str, int], token: bytes, patience: float) -> None:
        """Connect, and wait until all have: with retries, as others may still be leaving an earlier fence."""
        end, why = time.monotonic() + patience, ""
        while True:
            try:
                if self.rank == 0 and self._coordinator is None:
                    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
                    listener = socket.create_server(place, family=family, backlog=self.world)
                    self._coordinator = _Coordinator(listener, self.names, token, self.timeout, patience)
                cause = self._hello(place, token, max(_PAUSE, end - time.monotonic()))
                break
            except (OSError, EOFError, ValueError) as error:
                why = str(error) if not why or isinstance(error, ValueError) else why  # a refusal says most
            if time.monotonic() > end:
                where = f"{self.names[0]} at tcp://{place[0]}:{place[1]}"
                cause = f"{self.names[self.rank]} could not join {where} within {patience:g} s: {why}"
                break
            time.sleep(_PAUSE)
        if cause:
            if self._coordinator is not None:
                self._coordinator.stop()
            raise LiveError(cause, HINT)

    def _hello(self, place: tuple[str, int], token: bytes, seconds: float) -> str:
        """Connect and wait for the others: why that failed for all, else nothing. Raises if it may be tried again."""
        self._socket = socket.create_connection(place, timeout=seconds)
        try:
            self._socket.sendall(_MAGIC + _HELLO.pack(token, self.rank, self.world))
            self._socket.settimeout(seconds + 2 * GRACE)
            self._file: BinaryIO = self._socket.makefile("rb")
            head, _ = _read(self._file)
            if head["do"] == "refused":
                raise ValueError(head["cause"])
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise
        return str(head.get("cause", ""))

    def _listen(self) -> None:
        try:
            while True:
                head, content = _read(self._file)
                match head["do"]:
                    case "all":
                        with self._changed:
                            self._answers.append(json.loads(content))
                            self._changed.notify_all()
                    case "ask":
                        self._send(_message("here", waits=self.waits_for))
                    case "broken":
                        self._break(head["cause"])
        except (OSError, EOFError, ValueError):
            self._break(f"{self.names[0]} died, or has left")
        finally:
            self._file.close()

    def _send(self, message: bytes) -> None:
        with self._sending, contextlib.suppress(OSError):  # of which the listening thread has the cause
            self._socket.sendall(message)

    def _wait(self, has_ended: Callable[[], bool], seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: has_ended() or bool(self._cause), seconds)

    def _break(self, cause: str) -> None:
        with self._changed:
            if not self._cause and not self._closed:
                self._cause = cause
                self._bell.close()
            self._changed.notify_all()


class _Coordinator(threading.Thread):
    """Rank 0's server of the fence, to which all connections lead."""

    def __init__(
        self, listener: socket.socket, names: tuple[str, ...], token: bytes, timeout: float, patience: float
    ) -> None:
        super().__init__(name="reshard coordinator", daemon=True)
        self._listener, self._names, self._token = listener, names, token
        self._timeout, self._patience = timeout, patience
        self._all = range(len(names))
        self._mail: dict[int, asyncio.Queue[bytes | None]] = {}
        self._posts = set[asyncio.Task[None]]()
        self._refused = ""
        self._complete = self._broken = False
        self._what = ""
        self._contents: dict[int, bytes] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._blame: tuple[int, int, str] | None = None
        self._waits: dict[int, int | None] = {}
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self.start()

    def stop(self) -> None:
        """Rank 0 leaves: nobody listens any more."""
        with contextlib.suppress(RuntimeError):  # of a loop that has ended already
            self._loop.call_soon_threadsafe(self._end.set)
        self.join(4 * GRACE)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, sock=self._listener)
        self._loop.call_later(self._patience, self._end_of_patience)
        await self._end.wait()
        server.close()
        self._tell(None)
        if self._posts:
            await asyncio.wait(self._posts, timeout=GRACE)

    async def _post(self, writer: asyncio.StreamWriter, mail: asyncio.Queue[bytes | None]) -> None:
        """Send one rank its messages; a large one in parts, because each rank's buffer would have a copy of it."""
        with contextlib.suppress(OSError):  # of which the one who reads from it will hear
            while (message := await mail.get()) is not None:
                for start in range(0, len(message), _PART):
                    writer.write(message[start : start + _PART])
                    await writer.drain()
        writer.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        with contextlib.suppress(OSError, EOFError, ValueError):
            rank = await asyncio.wait_for(self._hello(reader, writer), self._timeout)
            while rank is not None:
                sizes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
                head, content = [await reader.readexactly(size) for size in sizes]
                self._take(rank, json.loads(head), content)
        writer.close()
        if rank is not None and self._complete:
            self._fail(f"{self._names[rank]} died, or has left")
        elif rank is not None:
            del self._mail[rank]

    async def _hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """The rank of who has come; None, after an answer, for one who may not join. Raises for a stranger."""
        if await reader.readexactly(len(_MAGIC)) != _MAGIC:
            raise ValueError("not one of us")
        token, rank, world = _HELLO.unpack(await reader.readexactly(_HELLO.size))
        cause = "another process has its place" if rank in self._mail else ""
        if world != len(self._names):
            cause = f"it counts {world} processes, trainers and receivers, and {self._names[0]} {len(self._names)}"
        elif not hmac.compare_digest(token, self._token):
            cause = "another secret, other processes, or another version of reshard"
        if cause:
            self._refused = f" ({self._named([r for r in self._all if r == rank])} was refused: {cause})"
            writer.write(_message("refused", cause=f"it was refused: {cause}"))
            return None
        self._mail[rank] = asyncio.Queue()
        self._posts.add(asyncio.create_task(self._post(writer, self._mail[rank])))
        if len(self._mail) == len(self._names):
            self._complete = True
            self._tell(_message("joined"))
        return int(rank)

    def _take(self, rank: int, head: dict[str, Any], content: bytes) -> None:
        match head["do"]:
            case "say":
                self._say(rank, head["what"], head["seconds"], content)
            case "fail" if head["peer"] is None:
                self._fail(head["cause"])
            case "fail" if self._blame is None:
                self._blame = rank, head["peer"], head["cause"]
                self._tell(_message("ask"))
                self._loop.call_later(GRACE, self._judge)
            case "here":
                self._waits[rank] = head["waits"]
                if len(self._waits) == len(self._names):
                    self._judge()

    def _say(self, rank: int, what: str, seconds: float, content: bytes) -> None:
        if not self._contents:
            self._what = what
            self._deadline = self._loop.call_later(seconds, self._end_of_gather, seconds)
        if what != self._what:
            self._fail(f"{self._names[rank]} came to {what!r} when others had come to {self._what!r}")
        self._contents[rank] = content
        if len(self._contents) == len(self._names) and self._deadline is not None and not self._broken:
            self._deadline.cancel()
            content = b"[%s]" % b",".join(self._contents[r] for r in self._all)
            self._contents.clear()
            self._tell(_message("all", content))

    def _judge(self) -> None:
        """Return the rank that caused the fault that another saw: one that does not answer, or else the last in a chain
        of waits.
        """
        assert self._blame is not None
        accuser, at, cause = self._blame
        silent = self._all - self._waits.keys()
        if silent:
            self._fail(f"{self._named(silent)} does not answer ({cause})")
            return
        chain = [accuser, at]
        while (awaited := self._waits[at]) is not None and awaited not in chain:
            chain.append(at := awaited)
        self._fail(f"{self._names[at]} keeps the others waiting ({cause})" if len(chain) > 2 else cause)

    def _end_of_gather(self, seconds: float) -> None:
        missing = self._named(self._all - self._contents.keys())
        self._fail(f"{missing} did not come to {self._what!r} within {seconds:g} s")

    def _end_of_patience(self) -> None:
        if not self._complete:
            missing = self._named(self._all - self._mail.keys())
            self._fail(f"{missing} did not join within {self._patience:g} s{self._refused}")

    def _fail(self, cause: str) -> None:
        if not self._broken:
            self._broken = True
            self._tell(_message("broken", cause=cause))
            self._end.set()

    def _tell(self, message: bytes | None) -> None:
        """Never waits for a peer that does not read. Rank 0 is the last: its process may end when it knows."""
        for rank in sorted(self._mail, reverse=True):
            self._mail[rank].put_nowait(message)

    def _named(self, ranks: Iterable[int]) -> str:
        return listed([self._names[r] for r in sorted(ranks)], most=4)


def _token(names: Sequence[str], secret: str) -> bytes:
    """Return the secret by which processes of one push know each other."""
    return sha256(json_bytes([__version__, names, secret])).digest()


def _message(do: str, content: bytes = b"", **fields: object) -> bytes:
    head = json_bytes({"do": do, **fields}, indent=None)
    return _SIZES.pack(len(head), len(content)) + head + content


def _read(file: BinaryIO) -> tuple[dict[str, Any], bytes]:
    head, content = _SIZES.unpack(_exactly(file, _SIZES.size))
    return json.loads(_exactly(file, head)), _exactly(file, content)


def _exactly(file: BinaryIO, count: int) -> bytes:
    content = file.read(count)
    if len(content) < count:
        raise EOFError("the connection was closed")
    return content


def _endpoint(store: str) -> tuple[str, int, str]:
    """Host, port and secret of ``tcp://SECRET@HOST:PORT``."""
    try:
        url = urlsplit(str(store))
        host, port, secret = url.hostname, url.port, url.netloc.rpartition("@")[0]
    except ValueError:
        host = port = None
    if host is None or not port or url.scheme != "tcp" or url.path:
        raise LiveError("the store of a push should be tcp://HOST:PORT", "for example tcp://10.0.0.1:29600")
    return host, port, secret
