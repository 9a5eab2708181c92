"""Repeats a request that failed on the way, with growing pauses.

``obstore`` tries again by itself too, but does not say how often it tried. So its own retries are used only for the
parts of a large object that is written or copied as a whole; all other requests use this module.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from formats.errors import CheckpointError
from reshard.store.threads import interruptible

T = TypeVar("T")


PATIENCE = "RESHARD_RETRY_SECONDS"
"""The environment's variable with the seconds after which a request that failed is not tried again."""

_PATIENCE = "180"
_LONGEST_PATIENCE = 1_000_000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 20.0


def patience() -> float:
    """The seconds after which a request that failed is not tried again. Raises CheckpointError."""
    with suppress(ValueError):
        seconds = float(os.environ.get(PATIENCE, _PATIENCE))
        if 0 <= seconds <= _LONGEST_PATIENCE:
            return seconds
    raise CheckpointError(
        f"{PATIENCE} is {os.environ[PATIENCE]!r}, which is no number of seconds", f"give 0 to {_LONGEST_PATIENCE}"
    )


_lock, _again = threading.Lock(), 0


def tried_again() -> int:
    """The number of requests of this process that were made because an earlier one had failed."""
    return _again


def patiently(request: Callable[[], T], seconds: float | None = None) -> T:
    """The result of a request; after a failure on the way (lost connections, 408, 429, 5xx) it is made again.

    After ``seconds`` (by default ``patience()``) the request's last error is raised.
    """
    global _again
    give_up, pause = time.monotonic() + (patience() if seconds is None else seconds), _FIRST_PAUSE
    while True:
        try:
            return interruptible(request)
        except Exception as error:
            status = status_of(error)
            may_pass = is_broken_connection(error)
            if status is not None:
                may_pass = status in {"408", "429"} or status.startswith("5")
            if not may_pass or time.monotonic() >= give_up:
                raise
        wait = random.uniform(0.5, 1.0) * pause  # so that many processes do not come back at the same time
        time.sleep(max(0.0, min(wait, give_up - time.monotonic())))
        pause = min(2 * pause, _LONGEST_PAUSE)
        with _lock:
            _again += 1


# --- what only the texts of obstore's errors say -------------------------------------------------------------------
# If a new release changes these texts, only this file breaks; tests/formats/test_internals.py has one of each.


def status_of(error: Exception) -> str | None:
    """The HTTP status of the answer to the last try."""
    match = re.search(r"status code: (\d+)", str(error))
    return match[1] if match else None


def is_broken_connection(error: Exception) -> bool:
    """Whether the connection failed, or broke off in the middle of an answer."""
    return "HTTP error:" in str(error)


def sends_no_parts(error: Exception) -> bool:
    """Whether the server answered a request for a range with the whole file."""
    from obstore.exceptions import NotSupportedError

    return isinstance(error, NotSupportedError) or "non-partial response" in str(error)
