"""The ranks that another launcher started (such as torchrun): how they agree, and end with one exit code."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from formats.errors import ReshardError, SettingError
from formats.torch_internals import PrefixStore

_POLL = 0.1  # seconds between two looks at what other ranks have said
_SETTLE = 1.0  # seconds that an error of rank 0 leaves to the cause of it to be reported first
_PATIENCE = 5.0  # seconds for all ranks to end


class Crew:
    """The ranks that a launcher started, before and after their collectives: the first of them speaks for all.

    The others wait, without a limit, while the first rank works alone. An error or an answer that ends the run on
    another rank reaches the first rank even during a collective: then it calls ``give_up`` with it and ends with the
    exit code that this returns. All ranks end with the code of the first, and not before it has reported, because the
    launcher ends all of them at the first failure.
    """

    def __init__(self, give_up: Callable[[Any], int]) -> None:
        store, self.rank, self.size = next(rendezvous("env://", timeout=timedelta(minutes=10)))
        self._store = PrefixStore("crew", store)
        self._give_up = give_up
        self._speaks = threading.Lock()
        self._over = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that reports."""
        return bool(self.rank == 0)

    def agree(self, answer: bool) -> bool:
        """The first rank's value, on all ranks."""
        if self.is_first:
            self._store.set("answer", json.dumps(answer))
        while not self._store.check(["answer"]):
            time.sleep(_POLL)
        return bool(json.loads(self._store.get("answer")))

    def leave(self, end: Any) -> NoReturn:
        """Not for rank 0: reports what ended the run, if no other rank has, and ends when rank 0 does.

        ``end`` is a ReshardError, or something else that can be pickled; None if all ranks know what ended the run.
        """
        if end is not None and self._store.add("ends", 1) == 1:
            is_plain = isinstance(end, SettingError) or not isinstance(end, ReshardError)
            plain = end if is_plain else ReshardError(end.message, end.hint)
            self._store.set("end", pickle.dumps(plain).hex())
        while True:
            time.sleep(60)

    def first_end(self, end: Any) -> Any:
        """Rank 0 only: returns what ended the run. What another rank reported is preferred, because it may be the
        cause.
        """
        self._speaks.acquire()
        deadline = time.monotonic() + (_SETTLE if isinstance(end, ReshardError) else 0)
        while (found := self._end()) is None and time.monotonic() < deadline:
            time.sleep(_POLL)
        return end if found is None else found

    def end(self, code: int) -> None:
        """Rank 0 only: tells the other ranks to end with this exit code, and waits until they have ended."""
        self._store.set("code", str(code))
        deadline = time.monotonic() + _PATIENCE
        while self._store.add("gone", 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(_POLL / 10)
        self._over.set()
        if threading.current_thread() is not self._listener:
            self._listener.join()  # a thread that asks the store while the interpreter ends aborts the process

    def _end(self) -> Any:
        # Written by a rank of this run, as the results of all ranks are.
        return pickle.loads(bytes.fromhex(self._store.get("end").decode())) if self._store.check(["end"]) else None

    def _listen(self) -> None:
        try:
            while not self._over.wait(_POLL):
                if not self.is_first and self._store.check(["code"]):
                    code = int(self._store.get("code"))
                    self._store.add("gone", 1)
                    break
                if self.is_first and (end := self._end()) is not None and self._speaks.acquire(blocking=False):
                    try:
                        code = self._give_up(end)
                    except Exception:
                        traceback.print_exc()
                        code = 2
                    self.end(code)  # the others wait for it, whatever happened
                    break
            else:
                return
        except dist.DistError:  # the first rank has gone without a word
            code = 2
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)
