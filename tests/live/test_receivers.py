"""Pushes to receivers that hold more than the trainer: a tied table under each of its names, padding, constants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from reshard.formats.errors import LiveError
from reshard.formats.notation.format_file import format_of
from reshard.live import pull, push
from reshard.live.meshes import arranged, target_of, trainer_state
from reshard.live.process import Pull
from reshard.live.routing import Routes
from reshard.source.opening import open_source
from tests import zoo
from tests.live.combinations import part, whole_tensors
from tests.live.processes import free_port
from tests.live.trainers import Weights
from tests.marks import one_of_each


def receiver_of(model: nn.Module) -> nn.Module:
    """The same model after ``to_empty()``, which makes a parameter of each name of a tied one."""
    untied: nn.Module = type(model)(deepcopy(model.config)).to(torch.bfloat16).to("meta").to_empty(device="cpu")
    for tensor in untied.parameters():
        tensor.data.fill_(7)
    return untied


def pushed(
    model: Any, receiver: nn.Module, *, versions: int = 1, delta: bool = False, keep: bool = True,
    program: str = "transformers", config: Path | None = None, between: Callable[[], object] = lambda: None,
) -> Routes:  # fmt: skip
    """Push to a model in this process; returns the plan. ``between`` is called between two pushes. Raises LiveError,
    the same on both sides.
    """
    both: dict[str, Any] = {
        "store": f"tcp://127.0.0.1:{free_port()}", "rank": 0, "world": 1, "timeout": 20.0, "program": program
    }  # fmt: skip
    give = push(model, to=f"{program}:1", config=config, **both)
    take = pull(receiver, trainers=1, keep=keep, **both)
    try:
        for version in range(1, versions + 1):
            with ThreadPoolExecutor(2) as pool:
                ends = [pool.submit(give, version, delta=delta), pool.submit(take, version)]
            errors = [end.exception() for end in ends]
            assert str(errors[0]) == str(errors[1])
            if errors[0] is not None:
                raise errors[0]
            if version < versions:
                between()
                with torch.no_grad():
                    model.get_input_embeddings().weight[3] += 1
        assert take.routes is not None
        return take.routes
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
    why = r"one side lacks tensor 'lm_head\.weight', which the other has \(held by trainer 0\)"
    with pytest.raises(LiveError, match=why):
        pushed(receiver_of(tied), tied)


@pytest.mark.parametrize("keep", [True, False])
def test_a_receiver_that_became_another_is_refused_before_it_is_changed(tied: Any, keep: bool) -> None:
    receiver, short = receiver_of(tied), nn.Parameter(torch.zeros(40, dtype=torch.bfloat16))
    why = r"receiver 0: the model has model\.norm\.weight \(BF16 \[0:40\] of \[40\]\) where the plan has .*\[80\]\)"
    with pytest.raises(LiveError, match=why):
        pushed(tied, receiver, versions=2, keep=keep, between=lambda: setattr(receiver.model.norm, "weight", short))
    assert not torch.equal(receiver.lm_head.weight, tied.lm_head.weight), "a byte has moved"
    assert "_reshard_poison" not in vars(receiver)


EXTRA: dict[str, tuple[Callable[[Any], object], str]] = {
    "rows": (
        lambda model: model.resize_token_embeddings(128, mean_resizing=False),
        r"tensor 'model\.embed_tokens\.weight' is \[128, 80\] on live ranks, and should be \[120, 80\]",
    ),
    "a head": (
        lambda model: setattr(model, "score", nn.Linear(80, 1, bias=False, dtype=torch.bfloat16)),
        r"tensor 'score\.weight' does not belong to this model \(held by receiver 0\)",
    ),
    "a parameter in place of a buffer": (
        lambda model: model.model.register_parameter("offset", nn.Parameter(torch.ones(4, dtype=torch.bfloat16))),
        r"tensor 'model\.offset' does not belong to this model \(held by receiver 0\)",
    ),
    "a layer": (
        lambda model: model.model.layers.append(type(model.model.layers[0])(model.config, 3).to(torch.bfloat16)),
        r"tensor 'model\.layers\.3\.input_layernorm\.weight' does not belong to this model \(held by receiver 0\)",
    ),
}


@pytest.mark.parametrize("what", EXTRA)
def test_what_nobody_sends_is_refused(tied: Any, what: str) -> None:
    change, why = EXTRA[what]
    receiver = receiver_of(tied)
    change(receiver)
    with pytest.raises(LiveError, match=why):
        pushed(tied, receiver)
    assert all(bool((tensor == 7).all()) for name, tensor in receiver.named_parameters() if "layers.0" in name)


MORE = (
    "esm",  # a buffer that is saved, and that checkpoints have under other names
    "zamba2",  # layers that are one module
    "diffusion_gemma",  # an encoder and a decoder of the same parameters: checkpoints have the second names
)


@pytest.mark.parametrize("model", one_of_each(MORE))
@pytest.mark.parametrize("keep", [True, False])
def test_what_modules_have_beyond_checkpoints(tmp_path: Path, model: str, keep: bool) -> None:
    """A buffer is left alone, and named. A parameter is not (see ``EXTRA``)."""
    import transformers

    folder = zoo.save(model, tmp_path / "model", dtype=torch.bfloat16)
    config = transformers.AutoConfig.from_pretrained(folder)
    load = getattr(transformers, config.architectures[0]).from_pretrained
    trainer, receiver = load(folder, dtype="auto"), load(folder, dtype="auto")
    for each in (trainer, receiver):
        each.register_buffer("steps", torch.zeros(3))
    for tensor in [*receiver.parameters(), receiver.steps]:
        tensor.data.fill_(7)
    plan = pushed(trainer, receiver, keep=keep, versions=2, delta=True)
    assert plan.beyond == ("steps",) and str(plan).endswith("Left alone, as no checkpoint has them: steps.")
    wanted, found = named(trainer), named(receiver)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert receiver.steps.eq(7).all()


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """They have their values, and what was trained in their place is no checkpoint's: it is refused by name."""
    monkeypatch.setitem(vars(format_of("torchtitan-live").rules.constants[0]), "value", value)
    folder = zoo.save("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    source = open_source(folder)
    tensors = whole_tensors(source, arranged(source.model, target_of("torchtitan:1")))
    bias = "layers.0.moe.expert_bias_E"
    tensors |= {name: torch.full_like(tensor, value) for name, tensor in tensors.items() if "expert_bias" in name}
    trainer = Weights({name: tensor.clone() for name, tensor in tensors.items()})
    receiver = Weights({name: torch.ones_like(tensor) for name, tensor in tensors.items()})
    pushed(trainer, receiver, program="torchtitan", config=folder)
    found = named(receiver)
    assert [name for name, tensor in tensors.items() if not torch.equal(found[name], tensor)] == []
    with torch.no_grad():
        trainer.get_parameter(bias)[1] = 0.5
    with pytest.raises(LiveError, match=rf"tensor '{bias}' is no longer {value:g}, and no receiver has a place for it"):
        pushed(trainer, receiver, program="torchtitan", config=folder)


@pytest.mark.parametrize("to", ["fsdp2:2", "megatron:tp2"])
def test_without_a_model_a_rank_of_a_trainer_has_its_part(tied: Any, tmp_path: Path, to: str) -> None:
    both: dict[str, Any] = {"store": f"tcp://127.0.0.1:{free_port()}", "timeout": 20.0}
    give = push(tied, to=to, rank=0, world=1, **both)
    takes = [pull(rank=rank, world=2, trainers=1, **both) for rank in range(2)]

    def receive(take: Pull) -> dict[str, torch.Tensor]:
        found = take.receive(1)
        take.commit(1)
        return found

    with ThreadPoolExecutor(3) as pool:
        given, *ends = [pool.submit(give, 1), *(pool.submit(receive, take) for take in takes)]
        given.result()
        ranks = [end.result() for end in ends]
    for each in (give, *takes):
        each.close()
    source = open_source(tmp_path / "model")
    arrangement = arranged(source.model, target_of(to))
    whole = whole_tensors(source, arrangement)
    for parts, found in zip(trainer_state(source.model, target_of(to)).ranks, ranks, strict=True):
        assert found.keys() == {held.name for held in parts}
        assert [
            held.name for held in parts if not torch.equal(found[held.name], part(whole[held.name], held.runs))
        ] == []
