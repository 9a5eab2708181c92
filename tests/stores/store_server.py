"""A bucket of one's own on 127.0.0.1: as much of S3's HTTP API as clients need, over a folder; and a plain web server.

Google's XML API is nearly the same, so it is a bucket of Google's too (``google``).

    with StoreServer(folder) as store:
        command("split", "s3://bucket/llama", "out", "--tp", "2", **store.environment)

``folder/key`` is the object ``s3://bucket/key``; ``{url}/bucket/key`` is the same object for HTTP. Signatures are not
checked. ``faults`` are answers to the next requests for objects with weights, in place of the right ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None


class StoreServer:
    """The server; knobs may be turned while it runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[Request] = []
        self.faults: deque[Callable[[Any], bool]] = deque()
        """What is done with the next requests for weights; True: the answer is complete."""
        self.always: Callable[[Any], bool] | None = None
        self.denied = False
        self.busy_until = 0.0
        """By ``time.time()``; until then every request is answered with 503."""
        self.refused = 0
        """The requests that were answered so."""
        self.before_put: Callable[[str], None] | None = None
        """Called with the key of each object that is put as a whole, before that is done."""
        self.requester_pays = False
        self.authorization: str | None = None
        """The header without which a request is answered with 401."""
        self.lists_bare_etags = False
        """As Azure does: its lists have etags without quotes, its answers have them with."""
        self.parts: dict[str, dict[int, bytes]] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        """The headers with metadata of the objects that were put as a whole, by key."""
        self.numbers = itertools.count()
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client may hang up

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def google(self, file: Path) -> dict[str, str]:
        """The environment for ``gs://bucket``; its account is written to a file."""
        names = ("client_email", "private_key", "private_key_id")
        account = {"gcs_base_url": self.url, "disable_oauth": True} | dict.fromkeys(names, "")
        file.write_text(json.dumps(account))
        return {"GOOGLE_SERVICE_ACCOUNT": str(file), "NO_PROXY": "127.0.0.1"}

    def __enter__(self) -> StoreServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def clear(self, place: str) -> None:
        """Remove what is at a place, while others may still write there."""
        while (self.root / place).exists():
            shutil.rmtree(self.root / place, ignore_errors=True)

    def fetched(self, ending: str = ".safetensors") -> int:
        """The bytes of weights that were asked for since the last call."""
        ranges = [r.range for r in self.requests if r.method == "GET" and r.path.endswith(ending)]
        self.requests.clear()
        found = (re.fullmatch(r"bytes=(\d+)-(\d+)", text or "") for text in ranges)
        return sum(int(each[2]) + 1 - int(each[1]) for each in found if each)


def status(code: int, **headers: str) -> Callable[[Any], bool]:
    """Refuse with a status."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler: handler.reply(code, named, b"<Error/>") or True


def dropped(handler: Any) -> bool:
    """Hang up without an answer, by a reset."""
    handler.hang_up()
    return True


def truncated(handler: Any) -> bool:
    """Send half of the body and hang up."""
    handler.share = 0.5
    return False


def slow(handler: Any) -> bool:
    """Send the body in crumbs."""
    handler.crumbs = 20
    return False


def whole(handler: Any) -> bool:
    """Ignore the range."""
    handler.ignores_range = True
    return False


def shifted(handler: Any) -> bool:
    """Say that another range was sent."""
    handler.shift = 8
    return False


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: StoreServer
    share, crumbs, ignores_range, shift = 1.0, 1, False, 0

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.share, self.crumbs, self.ignores_range, self.shift = 1.0, 1, False, 0
        store, url = self.store, urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query, keep_blank_values=True)
        store.requests.append(Request(self.command, path, self.headers.get("Range")))
        bucket, _, key = path.lstrip("/").partition("/")
        paid = self.headers.get("x-amz-request-payer") == "requester"
        if self.is_refused():
            return None
        if store.authorization not in (None, self.headers.get("Authorization")):
            return self.reply(401, {}, b"")
        if store.denied or (store.requester_pays and not paid):
            return self.reply(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
        if bucket != "bucket":
            return self.reply(404, {}, b"<Error><Code>NoSuchBucket</Code></Error>")
        if "list-type" in query:
            return self.list(query.get("prefix", [""])[0])
        if key.endswith(WEIGHTS):
            fault = store.faults.popleft() if store.faults else store.always
            if fault is not None and fault(self):
                return None
        return self.send_object(store.root / key)

    def is_refused(self) -> bool:
        """Whether the server is busy; then this has answered."""
        left = self.store.busy_until - time.time()
        if left > 0:
            self.store.refused += 1
            self.reply(503, {}, b"<Error/>")
        return left > 0

    def list(self, prefix: str) -> None:
        root = self.store.root
        files = sorted(p for p in root.rglob("*") if p.is_file() and p.relative_to(root).as_posix().startswith(prefix))
        found = "".join(
            f"<Contents><Key>{escape(p.relative_to(root).as_posix())}</Key><Size>{p.stat().st_size}</Size>"
            f"<LastModified>{_listed_time(p)}</LastModified><ETag>{escape(self.listed(p))}</ETag></Contents>"
            for p in files
        )
        self.reply(200, {}, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode())

    def listed(self, path: Path) -> str:
        return etag(path).strip('"') if self.store.lists_bare_etags else etag(path)

    def send_object(self, path: Path) -> None:
        if not path.is_file():
            return self.reply(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        code, headers = 200, {"ETag": etag(path), "Last-Modified": formatdate(path.stat().st_mtime, usegmt=True)}
        headers["x-goog-generation"] = generation_of(path)
        headers |= self.store.metadata.get(path.relative_to(self.store.root).as_posix(), {})
        if self.headers.get("If-Match") not in (None, headers["ETag"]):
            return self.reply(412, {}, b"<Error><Code>PreconditionFailed</Code></Error>")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        size = path.stat().st_size
        start, stop = 0, size
        if found and not self.ignores_range:
            start, stop, code = int(found[1]), min(int(found[2]) + 1, size), 206
            headers["Content-Range"] = f"bytes {start + self.shift}-{stop - 1 + self.shift}/{size}"
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(max(0, stop - start)) if self.command != "HEAD" else bytes(stop - start)
        return self.reply(code, headers, data)

    def do_PUT(self) -> None:
        url = urlsplit(self.path)
        key, query = unquote(url.path).lstrip("/").partition("/")[2], parse_qs(url.query)
        self.store.requests.append(Request("PUT", unquote(url.path), None))
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.is_refused():
            return
        if self.store.faults and key.endswith(WEIGHTS) and self.store.faults.popleft()(self):
            return
        if self.store.before_put is not None:
            self.store.before_put(key)
        if self.store.denied:
            self.reply(403, {}, b"<Error><Code>AccessDenied</Code></Error>")
            return
        is_new = self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0"
        there = self.store.root / key
        match = self.headers.get("If-Match")
        generation = self.headers.get("x-goog-if-generation-match", "0")
        is_other = match is not None and not (there.exists() and etag(there) == match)
        is_other |= generation != "0" and not (there.exists() and generation_of(there) == generation)
        if (is_new and there.exists()) or is_other:
            self.reply(412, {}, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        if "uploadId" in query:
            self.store.parts[query["uploadId"][0]][int(query["partNumber"][0])] = content
        else:
            self.note_metadata(key)
            self.put(key, content)
        self.reply(200, {"ETag": f'"{hashlib.md5(content).hexdigest()}"'}, b"")

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        key, query = unquote(url.path).lstrip("/").partition("/")[2], parse_qs(url.query, keep_blank_values=True)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        if "delete" in query:
            names = re.findall("<Key>(.*?)</Key>", content)
            for name in names:
                (self.store.root / unescape(name)).unlink(missing_ok=True)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            body = f"<DeleteResult>{deleted}</DeleteResult>"
        elif "uploads" in query:
            name = f"upload-{next(self.store.numbers)}"
            self.store.parts[name] = {}
            self.note_metadata(key)
            body = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
        else:
            parts = self.store.parts.pop(query["uploadId"][0])
            self.put(key, b"".join(parts[number] for number in sorted(parts)))
            found = escape(etag(self.store.root / key))
            body = f"<CompleteMultipartUploadResult><ETag>{found}</ETag></CompleteMultipartUploadResult>"
        self.reply(200, {}, body.encode())

    def do_DELETE(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if "uploadId" in query:
            self.store.parts.pop(query["uploadId"][0], None)
        else:
            (self.store.root / unquote(url.path).lstrip("/").partition("/")[2]).unlink(missing_ok=True)
        self.reply(204, {}, b"")

    def note_metadata(self, key: str) -> None:
        meta = {name: of for name, of in self.headers.items() if name.startswith(("x-amz-meta-", "x-goog-meta-"))}
        self.store.metadata[key] = meta

    def put(self, key: str, content: bytes) -> None:
        path = self.store.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        root = self.store.root  # beside the bucket, so that no list has the half of an object
        new = root.with_name(f"{root.name}.new{next(self.store.numbers)}")
        new.write_bytes(content)
        new.rename(path)

    def reply(self, code: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(code)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        body = body[: int(len(body) * self.share)]
        step = -(-len(body) // self.crumbs) or 1
        for begin in range(0, len(body), step):
            self.wfile.write(body[begin : begin + step])
            if self.crumbs > 1:
                self.wfile.flush()
                time.sleep(0.01)
        if self.share < 1:
            self.hang_up()

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RDWR)


def etag(path: Path) -> str:
    found = path.stat()
    return _etag(path, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size)


@lru_cache(maxsize=1000)
def _etag(path: Path, *_: int) -> str:
    return f'"{hashlib.md5(path.read_bytes()).hexdigest()}"'


def _listed_time(path: Path) -> str:
    found = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return f"{found:%Y-%m-%dT%H:%M:%S}.{found.microsecond // 1000:03}Z"


def generation_of(path: Path) -> str:
    return str(path.stat().st_mtime_ns)


def upload(folder: Path, server: StoreServer, name: str) -> str:
    """Put a folder into the bucket; returns its URL."""
    shutil.copytree(folder, server.root / name)
    return f"s3://bucket/{name}"
