"""A Hugging Face Hub of one's own: as much of its HTTP API as ``huggingface_hub`` needs to download, on 127.0.0.1.

    with HubServer(folder_of_repositories) as hub:
        subprocess.run(..., env=hub.environment(home=tmp_path))

``root/org/name`` is the repository ``org/name`` as of ``main``. As on the real Hub, weights are handed out by another
host (another port here), to which ``resolve`` redirects, and that host sends no commit and wants no token.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".gguf", ".pth")  # kept by the other host, as LFS and Xet files are


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str | None
    token: str | None
    host: str
    """``hub`` or ``cdn``."""


class HubServer:
    """The server; knobs may be turned while it runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[Request] = []
        self.require_token: str | None = None  # what Authorization must carry, for everything
        self.gated = False  # the repository is public, its files are not
        self.unknown: set[str] = set()  # repositories that are denied although their folders exist
        self.revisions: dict[str, Path] = {}  # other revisions of the repositories: their root
        self.drop_after_bytes: int | None = None  # close the connection after so many bytes of a large file …
        self.drops = 1  # … so many times …
        self.drop_by_reset = False  # … with a TCP reset instead of an orderly close …
        self.down_after_drop = False  # … and answer nothing any more from then on
        self.down = False
        self.expires_after: int | None = None  # an address of the other host is good for so many requests
        self.expired = 0  # requests that came too late
        self.busy = 0  # once an address has expired, the Hub answers so often that it is busy
        self.ignore_range = False
        self.failure: int | None = None  # a status to answer everything with, such as 503
        self.failures = deque[int | None]()  # those of the next requests; None: as it should be
        self._uses: list[int] = []  # of each signature
        self._hub, self._cdn = self._listen("hub"), self._listen("cdn")

    def _listen(self, host: str) -> ThreadingHTTPServer:
        handler = type("Handler", (_Handler,), {"hub": self, "host": host})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        return server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._hub.server_port}"

    @property
    def cdn_url(self) -> str:
        return f"http://127.0.0.1:{self._cdn.server_port}"

    def __enter__(self) -> HubServer:
        for server in (self._hub, self._cdn):
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self._hub, self._cdn):
            server.shutdown()
            server.server_close()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a process whose Hub is this server, and whose cache and token are under ``home``."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        ours = {name: value for name, value in ours.items() if not name.lower().endswith("_proxy")}
        return ours | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **more,
        }

    def downloads(self) -> list[str]:
        """The names of the files that were sent, in the order of the requests; redirects are not counted."""
        sent = [r.path for r in self.requests if r.method == "GET" and not r.path.startswith("/api/")]
        on_cdn = {r.path for r in self.requests if r.host == "cdn"}
        return [p.rpartition("/")[2] for p in sent if p.startswith("/cdn/") or "/cdn" + p not in on_cdn]

    # What the handlers ask.

    def folder(self, repo: str, revision: str) -> Path | None:
        """The files of a repository at a branch or commit."""
        for name, root in {"main": self.root, **self.revisions}.items():
            if revision in (name, self.commit(repo, name)):
                return root / repo
        return None

    def commit(self, repo: str, revision: str) -> str:
        return hashlib.sha1(f"{repo} {revision}".encode()).hexdigest()

    def sign(self) -> int:
        """A new signature."""
        self._uses.append(0)
        return len(self._uses) - 1

    def use(self, query: str) -> bool:
        """Use a signature; False if it has expired."""
        number = int(query.removeprefix("signature="))
        self._uses[number] += 1
        late = self._uses[number] > (self.expires_after or 0)
        self.expired += late
        return not late

    def revision_of(self, repo: str, revision: str) -> str:
        """The commit that a branch or commit stands for."""
        known = ["main", *self.revisions]
        return self.commit(repo, revision) if revision in known else revision


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    host: str

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        path = unquote(url.path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        hub.requests.append(Request(self.command, path, self.headers.get("Range"), token, self.host))
        if hub.down:
            self.close_connection = True
        elif (failure := hub.failures.popleft() if hub.failures else hub.failure) is not None:
            self.refuse(failure, None, "Failed")
        elif self.host == "cdn" and hub.expires_after is not None and not hub.use(url.query):
            self.refuse(403, None, "Request has expired")
        elif self.host == "cdn":
            _, _, org, name, _, commit, file = path.split("/", 6)
            self.send_file(hub.folder(f"{org}/{name}", commit), file, {})
        elif path.startswith("/api/models/"):
            self.api(url.path.removeprefix("/api/models/"), parse_qs(url.query), token)
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(*found.groups(), token)
        else:
            self.refuse(404, "RepoNotFound", "Repository not found")

    def api(self, rest: str, query: dict[str, list[str]], token: str | None) -> None:
        """``{repo}``, ``{repo}/revision/{revision}`` and ``{repo}/tree/{revision}``."""
        parts = [unquote(part) for part in rest.split("/")]
        repo, kind, revision = "/".join(parts[:2]), *(parts[2:4] or ["revision", "main"])
        folder = self.repository(repo, revision, token)
        if folder is None:
            return
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        names = [(p.relative_to(folder).as_posix(), p.stat().st_size) for p in files]
        if kind == "tree":
            self.send_json(
                [
                    {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                    | ({"lfs": {"oid": "0" * 64, "size": size, "pointerSize": 134}} if name.endswith(LARGE) else {})
                    for name, size in names
                ]
            )
        else:
            blobs = "blobs" in query
            siblings = [{"rfilename": name} | (self.blob(folder / name, size) if blobs else {}) for name, size in names]
            commit = self.hub.revision_of(repo, revision)
            self.send_json({"_id": "0", "id": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings})

    def blob(self, path: Path, size: int) -> dict[str, object]:
        """What the API says of a file with ``?blobs=true``."""
        found: dict[str, object] = {"size": size, "blobId": "0" * 40}
        if path.name.endswith(LARGE):
            found["lfs"] = {"sha256": self.etag(path).strip('"'), "size": size, "pointerSize": 134}
        return found

    def resolve(self, repo: str, revision: str, file: str, token: str | None) -> None:
        if self.hub.expired and self.hub.busy:
            self.hub.busy -= 1
            self.refuse(503, None, "Busy")
            return
        folder = self.repository(repo, revision, token)
        if folder is None:
            return
        commit = {"X-Repo-Commit": self.hub.revision_of(repo, revision)}
        if self.hub.gated and token is None:
            self.refuse(401, "GatedRepo", f"Access to model {repo} is restricted.")
        elif not (folder / file).is_file():
            self.refuse(404, "EntryNotFound", "Entry not found", commit)
        elif file.endswith(LARGE):
            size = (folder / file).stat().st_size
            location = self.hub.cdn_url + quote(f"/cdn/{repo}/resolve/{commit['X-Repo-Commit']}/{file}")
            if self.hub.expires_after is not None:
                location += f"?signature={self.hub.sign()}"
            linked = {"X-Linked-Size": str(size), "X-Linked-ETag": self.etag(folder / file), "Location": location}
            self.reply(302, commit | linked, b"")
        else:
            self.send_file(folder, file, commit)

    def repository(self, repo: str, revision: str, token: str | None) -> Path | None:
        """The folder of a repository, or the Hub's refusal, already sent."""
        hub = self.hub
        if hub.require_token is not None and token is not None and token != hub.require_token:
            return self.refuse(401, None, "Invalid credentials in Authorization header")
        if hub.require_token is not None and token is None:
            return self.refuse(401, "RepoNotFound", "Repository not found")  # the real Hub does not say that it exists
        if repo in hub.unknown or not (hub.root / repo).is_dir():
            return self.refuse(404, "RepoNotFound", "Repository not found")
        folder = hub.folder(repo, revision)
        if folder is None or not folder.is_dir():
            return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return folder

    @staticmethod
    def etag(path: Path) -> str:
        return f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"'

    def send_file(self, folder: Path | None, file: str, headers: dict[str, str]) -> None:
        assert folder is not None
        hub, path = self.hub, folder / file
        data, status = path.read_bytes(), 200
        headers = headers | {"ETag": self.etag(path), "Accept-Ranges": "bytes"}
        if not hub.ignore_range and (found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")):
            start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        limit = hub.drop_after_bytes
        if file.endswith(LARGE) and self.command == "GET" and limit is not None and hub.drops and len(data) > limit:
            hub.drops -= 1
            self.reply(status, headers, data, sent=limit)
            hub.down = hub.down_after_drop
        else:
            self.reply(status, headers, data)

    def send_json(self, value: object) -> None:
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def refuse(self, status: int, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        coded = {"X-Error-Code": code} if code else {}
        body = json.dumps({"error": message}).encode()
        self.reply(status, {**(headers or {}), **coded, "X-Error-Message": message}, body)

    def reply(self, status: int, headers: dict[str, str], body: bytes, sent: int | None = None) -> None:
        """Send an answer; where ``sent`` is given, only so many bytes of its body, and then hang up."""
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])
        if sent is not None:
            self.wfile.flush()
            self.close_connection = True
            if self.hub.drop_by_reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()


@contextmanager
def hub_with(root: Path, name: str, folder: Path) -> Iterator[HubServer]:
    """A Hub in a new folder, whose one repository, ``org/name``, is this folder."""
    (root / "hub" / "org").mkdir(parents=True)
    (root / "hub" / "org" / name).symlink_to(folder)
    with HubServer(root / "hub") as hub:
        yield hub
