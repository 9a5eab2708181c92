"""Pushes to receivers that hold more than the trainer: a tied table under each of its names, padding, constants."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from formats.errors import LiveError
from reshard.live import pull, push
from tests import zoo
from tests.live.test_fence import free_port


def receiver_of(model: nn.Module) -> nn.Module:
    """The same model after ``to_empty()``, which makes a parameter of each name of a tied one."""
    untied: nn.Module = type(model)(model.config).to(torch.bfloat16).to("meta").to_empty(device="cpu")
    for tensor in untied.parameters():
        tensor.data.fill_(7)
    return untied


def pushed(model: Any, receiver: nn.Module, *, versions: int = 1, delta: bool = False, **options: Any) -> None:
    """Push to a model in this process. Raises LiveError, the same on both sides."""
    store = f"tcp://127.0.0.1:{free_port()}"
    give = push(model, to="fsdp2:1", store=store, rank=0, world=1, timeout=20.0, config=options.pop("config", None))
    take = pull(receiver, store=store, rank=0, world=1, trainers=1, timeout=20.0, **options)
    try:
        for version in range(1, versions + 1):
            with ThreadPoolExecutor(2) as pool:
                ends = [pool.submit(give, version, delta=delta), pool.submit(take, version)]
            errors = [end.exception() for end in ends]
            assert str(errors[0]) == str(errors[1])
            if errors[0] is not None:
                raise errors[0]
            if version < versions:
                with torch.no_grad():
                    model.get_input_embeddings().weight[3] += 1
    finally:
        give.close()
        take.close()


@pytest.fixture
def tied(tmp_path: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    folder = zoo.save("llama-tied", tmp_path / "model", dtype=torch.bfloat16)
    yield AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("versions", [1, 3])
def test_a_tied_table_comes_under_each_name(tied: Any, keep: bool, versions: int) -> None:
    receiver = receiver_of(tied)
    assert receiver.lm_head.weight is not receiver.model.embed_tokens.weight
    pushed(tied, receiver, keep=keep, versions=versions, delta=versions > 1)
    wanted, found = named(tied), named(receiver)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_a_trainer_that_unties_is_refused(tied: Any) -> None:
    trainer = receiver_of(tied)
    with pytest.raises(LiveError, match=r"one side lacks tensor 'lm_head\.weight', which the other has \(held by trainer 0\)"):
        pushed(trainer, tied)
