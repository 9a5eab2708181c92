"""A split that reads a checkpoint where it is, against downloading it first: seconds, and bytes on the disk.

    python -m benchmarks.ranges [--gigabytes 1] [--rounds 3] [--megabytes 40] [--milliseconds 20] [--folder DIR]

A web server on loopback sends each connection at most so many megabytes a second, and begins each answer so many
milliseconds late, as a bucket does. Three ways, alternately: 16 parallel requests of 8 MiB that read all weights and
keep nothing; the same into files, and ``reshard split --tp 4`` of these; ``reshard split --tp 4`` of the URL.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.checkpoints import write_llama
from benchmarks.speed import run

PART = 8 << 20
REQUESTS = 16


class Handler(BaseHTTPRequestHandler):
    """Sends parts of files, slowly."""

    protocol_version = "HTTP/1.1"
    root = Path()
    rate = 0.0
    latency = 0.0

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(self.latency)
        path = self.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        begin, end = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("ETag", f'"{size}"')
        if found:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        with path.open("rb") as file:
            started, sent = time.perf_counter(), 0
            while begin < end:
                count = os.sendfile(self.connection.fileno(), file.fileno(), begin, min(1 << 18, end - begin))
                begin, sent = begin + count, sent + count
                self.pace(count, sent / self.rate - (time.perf_counter() - started))

    def pace(self, count: int, early: float) -> None:
        """Wait after ``count`` bytes that went out ``early`` seconds too soon for this connection."""
        time.sleep(max(0.0, early))


def download(url: str, source: Path, to: Path | None) -> None:
    """Read all weights by parallel ranges; into files, if ``to`` is given."""
    from obstore import get_range
    from obstore.store import HTTPStore

    store = HTTPStore.from_url(url, client_options={"allow_http": True})
    jobs = []
    for path in sorted(source.iterdir()):
        size = path.stat().st_size
        if to is not None:
            with (to / path.name).open("wb") as file:
                file.truncate(size)
        jobs += [(path.name, begin, min(begin + PART, size)) for begin in range(0, size, PART)]

    def fetch(job: tuple[str, int, int]) -> None:
        name, begin, end = job
        content = get_range(store, name, start=begin, end=end)
        if to is not None:
            descriptor = os.open(to / name, os.O_WRONLY)
            os.pwrite(descriptor, content, begin)
            os.close(descriptor)

    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(fetch, jobs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=40.0)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "reshard-benchmark")
    parser.add_argument("--serve", action="store_true")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    source = write_llama(folder / f"llama-{arguments.gigabytes:g}gb", arguments.gigabytes)
    if arguments.serve:
        Handler.root, Handler.rate, Handler.latency = source, arguments.megabytes * 1e6, arguments.milliseconds / 1e3
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        print(server.server_port, flush=True)
        server.serve_forever()
    server_process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.ranges", *sys.argv[1:], "--serve"], stdout=subprocess.PIPE, text=True
    )
    assert server_process.stdout is not None
    try:
        measure(f"http://127.0.0.1:{int(server_process.stdout.readline())}", source, folder, arguments.rounds)
    finally:
        server_process.kill()


def measure(url: str, source: Path, folder: Path, rounds: int) -> None:
    copy, out, cache = folder / "downloaded", folder / "out", folder / "cache"
    split = [sys.executable, "-m", "reshard", "split"]
    seconds: dict[str, list[float]] = {"16 parallel requests": [], "download, then split": [], "split of the URL": []}
    disk: dict[str, int] = {}
    for _ in range(rounds):
        for what, found in seconds.items():
            for leftover in (copy, out, cache):
                shutil.rmtree(leftover, ignore_errors=True)
            begin = time.perf_counter()
            if what == "16 parallel requests":
                download(url, source, None)
            elif what == "download, then split":
                copy.mkdir()
                download(url, source, copy)
                run([*split, str(copy), str(out), "--tp", "4"])
            else:
                run([*split, url, str(out), "--tp", "4", "--cache-dir", str(cache)])
            found.append(time.perf_counter() - begin)
            written = [path.stat() for each in (copy, out, cache) for path in each.rglob("*") if path.is_file()]
            disk[what] = sum(stat.st_blocks * 512 for stat in written)
    for what, found in seconds.items():
        print(f"{what:22} {statistics.median(found):6.2f} s   {disk[what] / 1e9:5.2f} GB on the disk")
    raw, first, ours = (statistics.median(found) for found in seconds.values())
    print(
        f"split of the URL takes {ours / first:.2f} of the time of downloading first, {ours / raw:.2f} of the requests'"
    )


if __name__ == "__main__":
    main()
