"""What ``check`` refuses before any byte moves, with the same words on both sides; what it looks through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reshard.formats.errors import LiveError, PlanError
from reshard.live import pull, push
from tests import zoo
from tests.live.processes import free_port

GATE = "model.layers.0.mlp.gate_proj"


class Models:
    """A trainer's model in float32, and a receiver's in bfloat16."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.receiver = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        for tensor in self.receiver.parameters():
            tensor.data.zero_()


@pytest.fixture
def models(tmp_path: Path) -> Iterator[Models]:
    yield Models(zoo.save("llama", tmp_path / "model"))


def ends(
    model: Any, receiver: nn.Module, *, push_options: Mapping[str, Any], pull_options: Mapping[str, Any],
    versions: tuple[object, object] = (1, 1), config: object = None,
) -> list[BaseException | None]:  # fmt: skip
    """The errors of the trainer and of the receiver: of the check, else of a push."""
    both: dict[str, Any] = {"store": f"tcp://127.0.0.1:{free_port()}", "rank": 0, "world": 1, "timeout": 20.0}
    give: Any = push(model, to="fsdp2:1", config=config, **both, **push_options)  # type: ignore[arg-type]
    take: Any = pull(receiver, trainers=1, **both, **pull_options)
    sides = list(zip((give, take), versions, strict=True))

    def run(calls: list[Callable[[], object]]) -> list[BaseException | None]:
        with ThreadPoolExecutor(2) as pool:
            return [each.exception() for each in [pool.submit(call) for call in calls]]

    errors = run([give.check, take.check])
    if errors == [None, None]:
        errors = run([lambda side=side, version=version: side(version) for side, version in sides])  # type: ignore[misc]
    give.close()
    take.close()
    return errors


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["gate_proj"]))


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], dict[str, Any], tuple[object, object], str, str]] = {
    "a wider dtype": (
        lambda model: model, {"dtype": None}, {}, (1, 1),
        "tensor 'model.embed_tokens.weight' is F32 in the trainer, and BF16 in a receiver",
        "push(dtype='BF16') rounds it",
    ),
    "no dtype": (
        lambda model: model, {"dtype": "int4"}, {}, (1, 1), "trainer 0: dtype='int4' should be BF16, F16 or F32", "",
    ),
    "a dtype that is not rounded to": (
        lambda model: model, {"dtype": torch.float8_e4m3fn}, {}, (1, 1),
        "trainer 0: dtype=torch.float8_e4m3fn should be BF16, F16 or F32", "",
    ),
    "another dtype": (
        lambda model: model, {"dtype": "float16"}, {}, (1, 1),
        "tensor 'model.embed_tokens.weight' is F16, and would be stored as BF16: no bits may be lost", "",
    ),
    "an empty bucket": (
        lambda model: model, {"bucket": 0}, {"bucket": 0}, (1, 1),
        "bucket=0 should be a number of bytes, at least 4,096", "",
    ),
    "a receiver's bucket": (
        lambda model: model, {}, {"bucket": 1 << 20}, (1, 1),
        "receiver 0 has bucket=1048576, and trainer 0 67108864", "give all the same",
    ),
    "a word as version": (
        lambda model: model, {}, {}, ("3", 3),
        "trainer 0: version='3' should be a whole number from 0 to 2**63 - 1", "",
    ),
    "too large a version": (
        lambda model: model, {}, {}, (1, 2**63),
        f"receiver 0: version={2**63} should be a whole number from 0 to 2**63 - 1", "",
    ),
    "a state_dict()": (
        lambda model: model.state_dict(), {}, {}, (1, 1), "trainer 0: 'model.embed_tokens.weight' is not a parameter",
        "give the model itself: a state_dict() may be a copy",
    ),
    "an adapter": (
        adapted, {}, {}, (1, 1),
        f"trainer 0: 'base_model.model.{GATE}.base_layer.weight' belongs to an adapter that is not merged",
        "push what merge_and_unload() gives",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(models: Models, case: str) -> None:
    change, given, taken, versions, why, hint = REFUSED[case]
    errors = ends(
        change(models.trainer), models.receiver, push_options={"dtype": "BF16", **given}, pull_options=taken,
        versions=versions, config=models.trainer.config.to_dict(),
    )  # fmt: skip
    assert [type(error) for error in errors] == [LiveError] * 2
    assert [str(error) for error in errors] == [why] * 2
    assert [getattr(error, "hint", None) or "" for error in errors] == [hint] * 2
    assert not any(tensor.any() for tensor in models.receiver.parameters()), "a byte has moved"


def test_an_error_that_is_none_of_ours_is_heard_at_once(models: Models) -> None:
    """As of an engine whose functions are others than they were."""
    errors = ends(
        models.trainer, models.receiver, push_options={"dtype": "BF16"}, pull_options={"witness": lambda *_: [1 // 0]}
    )  # fmt: skip
    assert [type(error) for error in errors] == [LiveError, ZeroDivisionError]
    assert str(errors[0]) == "receiver 0 died, or has left"


class Wrapper(nn.Module):
    """As DistributedDataParallel: the model is its ``module``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


TAKEN: dict[str, tuple[Callable[[Any], Any], object]] = {
    "BF16": (lambda model: model, "BF16"),
    "DDP, torch's word": (Wrapper, "bfloat16"),
    "compiled, torch's object": (compiled, torch.bfloat16),
    "DDP of compiled": (lambda model: Wrapper(compiled(model)), "BF16"),
    "compiled DDP": (lambda model: compiled(Wrapper(model)), "BF16"),
    "parameters": (lambda model: dict(model.named_parameters()), "BF16"),
    "merged": (lambda model: adapted(model).merge_and_unload(), "BF16"),
}


@pytest.mark.parametrize("case", TAKEN)
def test_taken(models: Models, case: str) -> None:
    change, dtype = TAKEN[case]
    wanted = {name: tensor.to(torch.bfloat16) for name, tensor in models.trainer.named_parameters()}
    config = models.trainer.config.to_dict() if case == "parameters" else None
    errors = ends(
        change(models.trainer), models.receiver, push_options={"dtype": dtype}, pull_options={}, config=config
    )  # fmt: skip
    assert errors == [None, None]
    found = dict(models.receiver.named_parameters())
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2}, "rank=2 is not one of the 2 trainers, which count from 0"),
        ({"rank": -1}, "rank=-1 is not one of the 2 trainers, which count from 0"),
        ({"rank": "0"}, "rank='0' is not one of the 2 trainers, which count from 0"),
        ({"world": 0}, "trainers=0 should be a number of ranks, at least 1"),
        ({"receivers": -1}, "receivers=-1 should be a number of ranks, at least 1"),
        ({"timeout": "10"}, "timeout='10' should be a number of seconds above 0, at most 1,000,000"),
        ({"join": 0}, "join=0 should be a number of seconds above 0, at most 1,000,000"),
        ({"patience": float("nan")}, "patience=nan should be a number of seconds above 0, at most 1,000,000"),
    ],
)
def test_ranks_and_seconds_that_are_none(options: dict[str, Any], message: str) -> None:
    both: dict[str, Any] = {"store": "tcp://127.0.0.1:1", "rank": 0, "world": 2}
    with pytest.raises(PlanError) as refused:
        push(nn.Linear(1, 1), to="vllm:1", config={}, **{**both, **options})
    assert refused.value.message == message
    with pytest.raises(PlanError, match="rank=1 is not one of the 1 receivers, which count from 0"):
        pull(store="tcp://127.0.0.1:1", rank=1, world=1, trainers=1)
