"""A headless Chromium for tests, spoken to through pipes (Chrome DevTools Protocol): no driver, no port, no package."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--no-default-browser-check", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
# The browser reads from descriptor 3 and writes to 4.
_START = "import os, sys; [os.dup2(int(sys.argv[i]), i + 2) for i in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"

WIDTHS_OF_SECTIONS = """
    [...new Set([...document.querySelectorAll('main > *')]
        .map(e => e.getBoundingClientRect().width).filter(Boolean).map(Math.round))]"""
"""How wide the sections of a page are: all alike."""

TABLES_CUT = """
    [...document.querySelectorAll('table')].filter(t => {
        const box = t.closest('.scroll'), style = box && getComputedStyle(box);
        return !box || box.tabIndex < 0 || style.overflowX != 'auto' || !style.backgroundAttachment.includes('local');
    }).length"""
"""How many tables are in no box that scrolls, or in one that shows no shadow where more of it is."""

TEXTS_OUTSIDE = """
    [...document.querySelectorAll('svg')].flatMap(svg => {
        const box = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => {
            const r = text.getBoundingClientRect();
            return r.width && (r.left < box.left || r.right > box.right || r.top < box.top || r.bottom > box.bottom);
        }).map(text => text.textContent);
    })"""
"""The texts of the pictures in a page that do not lie in their view box, where they would be cut off."""

Message = dict[str, Any]


def find() -> str | None:
    """The browser of this machine, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _high(descriptor: int) -> int:
    """The same, with a number that is not in the way of 3 and 4."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return high


class Browser:
    """One tab of a browser. ``events`` are what it has told since the last page was opened."""

    def __init__(self, program: str, profile: Path, timeout: float = 120.0) -> None:
        self.events: list[Message] = []
        self._timeout, self._number, self._rest = timeout, 0, b""
        self._session: str | None = None
        theirs_in, ours_out, ours_in, theirs_out = map(_high, (*os.pipe(), *os.pipe()))
        command = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), program, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # the browser ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> Message:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: Message = answer["result"]
                return result

    def wait_for(self, method: str) -> Message:
        """Wait for an event, and return what it says."""
        while True:
            found = next((e for e in self.events if e["method"] == method), None)
            if found is not None:
                return found
            self._read()

    def open(self, page: Path, *, width: int = 1000, scheme: str = "light", media: str = "screen") -> None:
        """Show a file, as on a screen of this width (with touch, where that is a phone's) and in this colour scheme."""
        screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def _read(self) -> Message:
        deadline = time.monotonic() + self._timeout
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise EOFError(f"the browser has ended with {self._process.wait()}")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: Message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message
