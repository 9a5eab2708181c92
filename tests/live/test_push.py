"""Pushes between processes: what receivers have is what the path over the disk writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reshard.formats.errors import LiveError
from tests import zoo
from tests.live.processes import free_port, run
from tests.marks import of_ranks, thorough

BUCKET = 1 << 16


class Case(NamedTuple):
    """A push of a model of the zoo from so many ranks under FSDP2 to so many."""

    model: str
    trainers: int
    target: str
    receivers: int
    shared: bool = True
    keep: bool = True


CASES = [
    Case("llama", 2, "vllm:tp2", 2),
    Case("llama", 3, "vllm:tp2", 2, shared=False),
    Case("qwen3_moe", 2, "vllm:tp2", 2),
    Case("llama", 2, "fsdp2:5", 5, keep=False),
    Case("qwen3_moe", 2, "fsdp2:3", 3, shared=False),
]


def trainer(rank: int, folder: Path, case: Case, port: int) -> Any:
    """A trainer's rank: two pushes, and one of a version that is there already."""
    from reshard.live import push
    from tests.live.trainers import sharded, without_gathers

    model = sharded(folder, "trainers", rank, case.trainers)
    store = f"tcp://127.0.0.1:{port}"
    give = push(
        model, config=folder, to=case.target, store=store, rank=rank, world=case.trainers, bucket=BUCKET,
        shared=case.shared,
    )  # fmt: skip
    with without_gathers():
        routes = give.check()
        stats = [give(version=1), give(version=2)]
        with pytest.raises(LiveError, match="has version 2 already"):
            give(version=2)
        stats.append(give(version=3))
    give.close()
    return routes.digest, routes.sent[rank], [sum(each.sent.values()) for each in stats], []


def receiver(rank: int, folder: Path, case: Case, port: int) -> Any:
    """A receiver's rank, by rules or a live model; compares what it has with what is on disk."""
    import torch

    from reshard.live import pull
    from tests.live.trainers import sharded

    is_live = case.target.startswith("fsdp2")
    model = sharded(folder, "receivers", rank, case.receivers, empty=True) if is_live else None
    store = f"tcp://127.0.0.1:{port}"
    take = pull(
        model, store=store, rank=rank, world=case.receivers, trainers=case.trainers, keep=case.keep, bucket=BUCKET,
        shared=case.shared,
    )  # fmt: skip
    routes = take.check()
    for version in (1, 2, 3):
        if version == 3:
            with pytest.raises(LiveError, match="has version 2 already"):
                take.receive(2)
        found = take.receive(version)
        take.commit(version)
    take.close()
    if model is not None:
        found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
        wanted = whole(folder, case)
    else:
        from reshard.commands.load import load_rank
        from reshard.live.meshes import arranged, target_of
        from reshard.source.opening import open_source

        source = open_source(folder)
        arrangement = arranged(source.model, target_of(case.target))
        wanted = load_rank(source, arrangement, rank)
        for stored in arrangement.stored:
            if stored.constant is not None:
                del wanted[stored.name_on(rank)]
    assert found.keys() == wanted.keys()
    wrong = [name for name in found if not torch.equal(found[name], wanted[name])]
    return routes.digest, routes.received[rank], None, wrong


def whole(folder: Path, case: Case) -> Any:
    """The tensors of the model's own modules."""
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())


def either(rank: int, world: int, folder: Path, case: Case, port: int) -> Any:
    """A rank of the trainer, or behind these of the receiver."""
    if rank < case.trainers:
        return trainer(rank, folder, case, port)
    return receiver(rank - case.trainers, folder, case, port)


@thorough
@of_ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_push(tmp_path: Path, case: Case) -> None:
    import torch

    folder = zoo.save(case.model, tmp_path / "model", dtype=torch.bfloat16)
    said = run(either, case.trainers + case.receivers, folder, case, free_port(), group=False)
    assert len({digest for digest, *_ in said}) == 1
    for _, planned, sent, _ in said[: case.trainers]:
        assert sent == [planned] * 3, "other bytes on the wire than in the plan"
    assert [wrong for *_, wrong in said if wrong] == []
