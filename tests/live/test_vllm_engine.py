"""vLLM's worker as a receiver, without vLLM: stand-ins for the few things of it that the engine touches.

``tests.engines.live_vllm`` (``make engines``) runs the same in a real vLLM.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from reshard.formats.errors import LiveError
from reshard.live import process, vllm, vllm_reload
from reshard.live.process import Meeting, Push
from tests.live import layerwise


class Receiver:
    """A rank's end of pushes that a test sends: tensors, or an error."""

    def __init__(self) -> None:
        self.pushes: dict[int, Mapping[str, torch.Tensor] | Exception] = {}
        self.said: list[tuple[int, str | None]] = []

    def check(self) -> None:
        """The plan: there is none."""

    def receive(self, version: int) -> Mapping[str, torch.Tensor]:
        found = self.pushes[version]
        if isinstance(found, Exception):
            raise found
        return found

    def commit(self, version: int, error: str | None) -> None:
        self.said.append((version, error))


class Head(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = layerwise.Packed(4, 3)
        self.embed = layerwise.Packed(8, 3)
        self.head = layerwise.Packed(8, 3)
        self.head.weight = self.embed.weight

    def compute_logits(self) -> torch.Tensor:
        return self.a.packed.sum()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Rank 1 of 2, whose other rank says what ``engine.other`` is."""
    group = SimpleNamespace(rank_in_group=1, world_size=2, cpu_group="the group")
    warnings: list[tuple[str, ...]] = []
    fakes: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.5", "__path__": []},
        "vllm.config": {"set_current_vllm_config": None},
        "vllm.distributed": {"get_world_group": lambda: group, "__path__": []},
        "vllm.distributed.weight_transfer": {"__path__": []},
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": Base},
        "vllm.logger": {
            "init_logger": lambda _: SimpleNamespace(error=lambda *_: None, warning_once=lambda *w: warnings.append(w))
        },
        vllm_reload.LAYERWISE: vars(layerwise),
    }  # fmt: skip
    for name, values in fakes.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "reshard.live.vllm_engine", raising=False)
    vllm_reload.layerwise.cache_clear()
    from reshard.live.vllm_engine import Engine

    made: Any = Engine()
    made.warnings = warnings
    made.other, receiver = None, Receiver()

    def gather(said: list[str | None], own: str | None, group: object) -> None:
        assert group == "the group", "never the default group"
        said[:] = [made.other, own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)

    monkeypatch.setattr(process, "pull", lambda **_: receiver)
    made.init_transfer_engine(made.parse_init_info({"store": "tcp://here:1", "trainers": 2}))
    yield made
    vllm_reload.layerwise.cache_clear()
    sys.modules.pop("reshard.live.vllm_engine")


class Base:
    def __init__(self) -> None:
        self.device, self.model, self.model_config = torch.device("cpu"), Head(), SimpleNamespace(dtype=torch.float32)
        layerwise.load(self.model)


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((4, 3), value), "head.weight": torch.full((8, 3), value)}


def push(engine: Any, version: int, given: Mapping[str, torch.Tensor] | Exception) -> str | None:
    """What the rank told all others of a push."""
    engine.receiver.pushes[version] = given
    engine.start_weight_update()
    engine.update_weights({"version": version})
    engine.finish_weight_update()
    number, said = engine.receiver.said[-1]
    assert number == version
    return said


def values(engine: Any) -> list[float]:
    """What the kernels compute with: packed copies of the parameters."""
    model = engine.model
    return [of.packed.mean().item() for of in (model.a, model.embed, model.head)]


def test_a_push_reaches_the_packed_weights_of_each_alias(engine: Any) -> None:
    assert push(engine, 1, weights(1.0)) is None
    assert values(engine) == [1.0, 1.0, 1.0]
    assert engine.model.head.weight is engine.model.embed.weight
    assert push(engine, 2, weights(2.0)) is None
    assert values(engine) == [2.0, 2.0, 2.0]


def test_what_fails_before_the_end_leaves_the_old_weights(engine: Any) -> None:
    assert push(engine, 1, weights(1.0)) is None
    assert push(engine, 2, LiveError("rank 3 has ended")) == "vLLM's rank 1: rank 3 has ended"
    assert values(engine) == [1.0, 1.0, 1.0]
    assert engine.model.compute_logits() == 12.0, "it serves on"


def test_another_rank_s_failure_is_this_one_s(engine: Any) -> None:
    assert push(engine, 1, weights(1.0)) is None
    engine.other = "vLLM's rank 0: no memory"
    assert push(engine, 2, weights(2.0)) == "vLLM's rank 0: no memory"
    assert values(engine) == [1.0, 1.0, 1.0]


def test_half_new_weights_answer_nothing_until_a_push_heals_them(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(vllm_reload, "_renew", lambda *_: 1 / 0)
        assert push(engine, 1, weights(1.0)) == "vLLM's rank 1: ZeroDivisionError: division by zero"
    with pytest.raises(LiveError, match="half new, because a push failed: vLLM's rank 1: ZeroDivisionError"):
        engine.model.compute_logits()
    assert push(engine, 2, weights(2.0)) is None
    assert engine.model.compute_logits() == 24.0


def test_nothing_is_raised_on_one_rank_alone(engine: Any) -> None:
    engine.update_weights({"version": 1, "more": 2})
    assert engine.problem == "vLLM's rank 1: vLLM was told {'version': 1, 'more': 2}, and not a version"
    engine.finish_weight_update()
    engine.init_transfer_engine(engine.parse_init_info({"stroe": "tcp://here:1"}))
    assert engine.problem == "vLLM's rank 1: {'stroe': 'tcp://here:1'} is not a ticket of a trainer"
    engine.shutdown()
    engine.update_weights({"version": 1})
    assert "'stroe'" in engine.problem, "the first error is told again"


@pytest.mark.parametrize("other", [{"trainers": None}, {"receivers": 2}, {"world": 2}], ids=str)
def test_only_the_ticket_of_a_trainer_is_taken_for_one(engine: Any, monkeypatch: Any, other: dict[str, Any]) -> None:
    ticket = Push.ticket.fget(SimpleNamespace(meeting=Meeting(store="tcp://here:1", trainers=2, receivers=2)))  # type: ignore[attr-defined]
    engine.init_transfer_engine(ticket)
    assert engine.problem is None
    engine.init_transfer_engine({name: value for name, value in (ticket | other).items() if value is not None})
    assert engine.problem.endswith("is not a ticket of a trainer"), engine.problem
    monkeypatch.setattr(process, "pull", lambda **_: len(5))
    engine.init_transfer_engine(ticket)
    assert "TypeError" in engine.problem, "an error of ours is none of the ticket"


@pytest.mark.parametrize("name", vllm_reload.SYMBOLS)
@pytest.mark.parametrize("other", [None, lambda: None], ids=["gone", "other arguments"])
def test_a_private_function_that_is_another_is_named(
    engine: Any, monkeypatch: pytest.MonkeyPatch, name: str, other: Any
) -> None:
    module = sys.modules[vllm_reload.LAYERWISE]
    monkeypatch.delattr(module, name) if other is None else monkeypatch.setattr(module, name, other)
    vllm_reload.layerwise.cache_clear()
    with pytest.raises(LiveError, match=r"do not work with vLLM 0\.32\.5: ") as caught:
        type(engine)()
    assert caught.value.hint == "install vLLM 0.32"
    assert other or name in str(caught.value)


def nothing(layer: torch.nn.Module, info: Any) -> None:
    """In place of what copies the new weights: a function of this name that does something else."""
    layerwise._place_kernel_tensors(layer, info)


def replaced(layer: torch.nn.Module, info: Any) -> None:
    """The new weights are in a new parameter: captured graphs have the old one."""


@pytest.mark.parametrize("other", [nothing, replaced])
def test_a_version_that_reloads_otherwise_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch, other: Any) -> None:
    monkeypatch.setattr(sys.modules[vllm_reload.LAYERWISE], "_layerwise_process", other)
    with pytest.raises(LiveError, match="a layer that was reloaded has not the new weights"):
        type(engine)()


@pytest.mark.parametrize(
    ("version", "rank", "warnings"), [("0.32.5", 0, 0), ("0.33.0", 0, 1), ("0.33.0", 1, 0), ("0.3.2", 0, 1)]
)
def test_a_version_that_was_not_tried_warns_once(
    engine: Any, monkeypatch: pytest.MonkeyPatch, version: str, rank: int, warnings: int
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    sys.modules["vllm.distributed"].get_world_group().rank_in_group = rank
    engine.warnings.clear()
    again = type(engine)()
    again.init_transfer_engine(again.parse_init_info({"stroe": "tcp://here:1"}))
    assert engine.warnings == [], "the problem is told, and nothing else"
    again.init_transfer_engine(again.parse_init_info({"store": "tcp://here:1", "trainers": 2}))
    assert [words % tuple(rest) for words, *rest in engine.warnings] == [
        f"reshard: vLLM {version} was not tried, 0.32 was. It reloads layers, and loads this model, as expected."
    ] * warnings


def test_only_one_module_uses_what_is_private() -> None:
    for path in Path(vllm_reload.__file__).parent.glob("*.py"):
        assert path.name == "vllm_reload.py" or "model_loader.reload" not in path.read_text(encoding="utf-8")


@pytest.fixture
def server() -> Iterator[SimpleNamespace]:
    """An HTTP server that notes what it is asked, and answers 500 to ``refused``."""
    noted = SimpleNamespace(asked=[], refused="", url="")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            noted.asked.append((self.path, body))
            self.send_response(500 if noted.refused and noted.refused in self.path else 200)
            self.end_headers()
            self.wfile.write(b'{"error": "no room"}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        noted.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield noted
        listening.shutdown()
        thread.join()


def test_an_update_over_http(server: SimpleNamespace) -> None:
    assert vllm.update(lambda version, delta: f"sent {version}", vllm.Server(server.url), 7) == "sent 7"  # type: ignore[arg-type]
    assert server.asked == [
        ("/pause?mode=wait&clear_cache=true", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"version": 7}}),
        ("/finish_weight_update", {}),
        ("/update_weight_version", {"new_version": "7"}),
        ("/resume", {}),
    ]


def test_why_an_engine_does_not_come_is_said(server: SimpleNamespace) -> None:
    """The trainer only sees that nobody comes."""

    def wait(*_: object, **__: object) -> NoReturn:
        raise LiveError("receiver 0 did not join within 120 s")

    push: Any = SimpleNamespace(ticket={}, check=wait)
    for url in (server.url, server.url.removeprefix("http://"), "http://a b"):
        server.refused = "init"
        with pytest.raises(LiveError, match=rf"{url} .* init_weight_transfer_engine"):
            vllm.join(push, vllm.Server(url))
    server.refused = "start"
    with pytest.raises(LiveError, match="answered 500 to start_weight_update"):
        vllm.update(wait, vllm.Server(server.url), 8)  # type: ignore[arg-type]


def test_a_failed_push_leaves_the_server_paused(server: SimpleNamespace) -> None:
    def fail(_: int, delta: bool) -> NoReturn:
        raise LiveError("rank 2 has ended")

    with pytest.raises(LiveError, match="rank 2 has ended"):
        vllm.update(fail, vllm.Server(server.url), 7)  # type: ignore[arg-type]
    assert [path for path, _ in server.asked][-1] == "/finish_weight_update"
    server.refused = "start"
    with pytest.raises(LiveError, match=r'answered 500 to start_weight_update: \{"error": "no room"\}'):
        vllm.update(lambda _, delta: None, vllm.Server(server.url), 8)  # type: ignore[arg-type,return-value]
