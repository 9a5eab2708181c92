"""vLLM as the receiver of pushes: registers the engine in vLLM's processes, and has the trainer call it.

What runs inside vLLM's workers is ``reshard.live.vllm_engine``; this module imports nothing of vLLM.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Any

from reshard.formats.errors import LiveError

if TYPE_CHECKING:
    from reshard.live.process import Push
    from reshard.live.routing import Routes
    from reshard.live.wire import Stats

NAME = "reshard"
"""The backend's name, as in ``--weight-transfer-config '{"backend": "reshard"}'``."""


def register() -> None:
    """Make the backend known: the entry point ``vllm.general_plugins``, called in each process, perhaps twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if NAME not in WeightTransferEngineFactory._registry:  # vLLM refuses a name that is there
        WeightTransferEngineFactory.register_engine(NAME, "reshard.live.vllm_engine", "Engine")


def join(push: Push, engine: Server | Offline | None) -> Routes:
    """Have an engine meet the trainer: ``push.check()`` on all ranks of the trainer. ``engine`` is None but on rank 0.

    Raises LiveError on all ranks.
    """
    if engine is None:
        return push.check()
    with ThreadPoolExecutor(1) as thread:
        met = thread.submit(engine.init, push.ticket)
        try:
            return push.check()
        finally:
            met.result()  # if it has failed, that is why nobody came to the check


def update(push: Push, engine: Server | Offline | None, version: int, *, delta: bool = False) -> Stats:
    """A push, on all ranks of the trainer, which an engine receives. ``engine`` is None but on rank 0.

    ``delta`` is as for the push.
    Returns when all of the engine's ranks compute with the new weights, else raises LiveError. Then the engine stays
    paused: push again, or ``resume()`` it with the old weights, if no rank had begun to change its own.
    """
    if engine is None:
        return push(version, delta=delta)
    engine.pause()
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(engine.receive, version)
        try:
            stats = push(version, delta=delta)
        finally:
            received.result()
    engine.resume(version)
    return stats


@dataclass(frozen=True)
class Server:
    """``vllm serve`` at a URL, with ``VLLM_SERVER_DEV_MODE=1``; ``timeout`` in seconds, for each call.

    ``init``, ``pause``, ``receive`` and ``resume`` raise LiveError.
    """

    url: str
    timeout: float = 600.0

    def init(self, ticket: Mapping[str, Any]) -> None:
        """Have all ranks meet the trainer that a ticket names."""
        self._post("init_weight_transfer_engine", init_info=dict(ticket))

    def pause(self) -> None:
        """Accept no further requests, and drop everything that was computed with the old weights."""
        self._post("pause?mode=wait&clear_cache=true")  # mode=keep would keep the cache

    def receive(self, version: int) -> None:
        """Receive a push and compute with it; returns when that is done, or has failed."""
        self._post("start_weight_update")
        self._post("update_weights", update_info={"version": version})
        self._post("finish_weight_update")

    def resume(self, version: int | None = None) -> None:
        """Go on, with the weights of this version."""
        if version is not None:
            self._post("update_weight_version", new_version=str(version))
        self._post("resume")

    def _post(self, route: str, **body: object) -> None:
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(f"{self.url.rstrip('/')}/{route}", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=self.timeout):
                pass
        except urllib.error.HTTPError as error:
            answer = error.read(500).decode("utf-8", "replace")
            hint = "start it with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else None
            raise LiveError(f"{self.url} answered {error.code} to {route}: {answer}", hint) from None
        except (OSError, ValueError, HTTPException) as error:
            raise LiveError(f"{self.url} did not answer to {route}: {error}") from None


@dataclass(frozen=True)
class Offline:
    """An ``LLM`` object of vLLM in this process. Its methods are those of ``Server``."""

    llm: Any

    def init(self, ticket: Mapping[str, Any]) -> None:  # noqa: D102
        self.llm.init_weight_transfer_engine({"init_info": dict(ticket)})

    def pause(self) -> None:  # noqa: D102
        self.llm.sleep(level=0)
        self.llm.reset_prefix_cache()

    def receive(self, version: int) -> None:  # noqa: D102
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": version}})
        self.llm.finish_weight_update()

    def resume(self, version: int | None = None) -> None:  # noqa: D102
        if version is not None:
            self.llm.update_weight_version(str(version))
        self.llm.wake_up(tags=["scheduling"])
