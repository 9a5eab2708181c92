"""Pushes in one process: what a target's ranks get of any source is, byte for byte, what the path over the disk writes.

``python -m tests.live.combinations --seconds 600`` walks models x sources x targets, in an order that ``--seed`` gives,
and prints what fails; ``tests/live/test_combinations.py`` walks a sample.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from reshard.api import split
from reshard.commands.load import load_rank
from reshard.formats.errors import ReshardError
from reshard.formats.notation.axes import Run
from reshard.formats.torch_internals import TORCH_DTYPES
from reshard.live.meshes import Target, arranged, target_of, trainer_state
from reshard.live.routing import Routes, plan_push
from reshard.live.sides import LiveState, bound
from reshard.live.views import Parcel, TensorViews
from reshard.placement.arrangement import Arrangement, on_mesh
from reshard.source.opening import open_source
from reshard.source.source import Source
from tests import zoo

SOURCES = (
    "fsdp2:1", "fsdp2:2", "fsdp2:3", "fsdp2:4", "fsdp2:2x2", "fsdp2:tp2", "fsdp2:2tp2", "fsdp2:3tp2", "fsdp2:2ep2",
    "torchtitan:2", "torchtitan:3", "torchtitan:2tp2", "megatron:tp2", "megatron:tp4", "megatron:pp2", "megatron:ep2",
    "megatron:tp2pp2ep2", "megatron:x2tp2",
)  # fmt: skip
TARGETS = (
    "vllm:tp1", "vllm:tp2", "vllm:tp3", "vllm:tp4", "vllm:tp5", "vllm:pp2", "vllm:tp2pp2", "vllm:tp2ep2", "sglang:tp1",
    "sglang:tp2", "sglang:tp4", "fsdp2:1", "fsdp2:3", "fsdp2:2tp2", "fsdp2:tp2", "megatron:tp2", "megatron:tp2pp2",
    "megatron:ep2", "torchtitan:2",
)  # fmt: skip
LIVE = ("fsdp2", "torchtitan")
"""Targets whose ranks are live: they have chunks."""
BUCKET = 1 << 15


class Refused(Exception):
    """A program cannot have this model on this mesh, live or not."""


def part(tensor: torch.Tensor, runs: Sequence[Sequence[Run]]) -> torch.Tensor:
    """A copy of the part that a rank holds."""
    for dim, of in enumerate(runs):
        tensor = torch.cat(
            [tensor.narrow(dim, run.offset, run.length) for run in of] or [tensor.narrow(dim, 0, 0)], dim
        )
    return tensor.clone().contiguous()


def whole_tensors(source: Source, arrangement: Arrangement) -> dict[str, torch.Tensor]:
    """All tensors of a format, unsplit."""
    return load_rank(source, on_mesh(arrangement.plan.unsplit, arrangement.format), 0)


def parts_of(source: Source, live: LiveState, arrangement: Arrangement) -> list[dict[str, list[torch.Tensor]]]:
    """What the ranks of a live program have of a checkpoint."""
    whole = whole_tensors(source, arrangement)
    return [{held.name: [part(whole[held.name], held.runs)] for held in parts} for parts in live.ranks]


def wrong(folder: Path, source: str, target: str) -> list[str]:
    """The tensors of a target's ranks that differ from what the disk would give. Raises Refused, ReshardError."""
    opened, own, goal = open_source(folder), target_of(source), target_of(target)
    try:
        live, mine, theirs = trainer_state(opened.model, own), arranged(opened.model, own), arranged(opened.model, goal)
    except ReshardError as error:
        raise Refused(error.message) from None
    if mine.dropped and goal.program in LIVE:
        raise Refused("a receiver that has the checkpoint's tensors has more than the trainer")
    given = parts_of(opened, live, mine)
    rounded = "BF16" if goal.program in LIVE else None  # trainers have a router's bias in F32
    model = bound(live, opened.read_config(), dtype=rounded)
    if goal.program not in LIVE:
        chunks = theirs.format.container.chunks
        wanted = [_expected(opened, theirs, rank) for rank in range(theirs.ranks)] if chunks else on_disk(folder, goal)
        return different(plan_push(model, live, goal, bucket=BUCKET), given, wanted, theirs)
    receivers = trainer_state(opened.model, goal)
    return [
        line
        for each in (receivers, *([untied(receivers, theirs)] if theirs.copies else ()))
        for line in different(
            plan_push(model, live, each, bucket=BUCKET), given, parts_of(opened, each, theirs), theirs
        )
    ]  # fmt: skip


def untied(live: LiveState, arrangement: Arrangement) -> LiveState:
    """Ranks that hold a tied tensor under each of its names."""
    names = {(arrangement.atoms[atom].stored.name, placed.stored.name) for atom, placed in arrangement.copies}
    ranks = [
        [*parts, *(held._replace(name=other) for held in parts for name, other in names if name == held.name)]
        for parts in live.ranks
    ]
    return LiveState(live.format, ranks)


def different(
    routes: Routes, given: Sequence[TensorViews], wanted: Sequence[TensorViews], arrangement: Arrangement
) -> list[str]:
    """What a push by these routes brings otherwise than wanted."""
    found = [_rooms(routes, rank, wanted[rank]) for rank in range(routes.target.ranks)]
    _execute(routes, given, found)
    constants = {each.name for each in arrangement.stored if each.constant is not None}
    return [
        f"rank {rank}: {name}"
        for rank, tensors in enumerate(wanted)
        for name, of in tensors.items()
        if not (name in constants or all(map(_equal, of, found[rank].get(name, [None] * len(of)))))
    ]


@cache
def on_disk(folder: Path, target: Target) -> list[dict[str, list[torch.Tensor]]]:
    """What each rank of a program reads of a checkpoint that was split for it."""
    out = folder.with_name(f"{folder.name}-{target}".replace(":", "-"))
    degrees = target.degrees
    split(
        folder,
        out,
        format=target.program,
        tp=degrees.tp,
        ep=degrees.ep,
        pp=degrees.pp,
        same_ranks=degrees.same_ranks,
        workers=1,
    )
    ranks = []
    for tensors in open_source(out).ranks:
        files = {info.file for info in tensors.values()}
        ranks.append({name: [tensor] for file in files for name, tensor in load_file(str(file)).items()})
    return ranks


def _expected(source: Source, arrangement: Arrangement, rank: int) -> dict[str, list[torch.Tensor]]:
    tensors = load_rank(source, arrangement, rank)
    for stored, _ in arrangement.tensors_of(rank):
        if stored.constant is not None:
            del tensors[stored.name_on(rank)]
        elif rank in arrangement.atoms[stored.atoms[0]].zeros:  # a file has zeros there
            tensors[stored.name_on(rank)].zero_()
    return {name: [tensor] for name, tensor in tensors.items()}


def _rooms(routes: Routes, rank: int, wanted: TensorViews) -> dict[str, list[torch.Tensor]]:
    if routes.target.live is not None:
        return {name: [torch.zeros_like(each) for each in of] for name, of in wanted.items()}
    held = [(each, shape) for each, shape in routes.target.arrangement.tensors_of(rank) if each.constant is None]
    return {each.name_on(rank): [torch.zeros(shape, dtype=TORCH_DTYPES[each.dtype])] for each, shape in held}


def _execute(routes: Routes, given: Sequence[TensorViews], found: Sequence[TensorViews]) -> None:
    """Do what the processes do, bucket by bucket."""
    target, first = routes.target, routes.source.ranks
    plans = [list(routes.parts(rank)) for rank in range(first + target.ranks)]
    sent = 0
    for step in range(len(routes.ends)):
        for sender, receiver in itertools.product(range(first), range(target.ranks)):
            sends = [each for each in plans[sender][step] if each.receiver == first + receiver]
            receives = [each for each in plans[first + receiver][step] if each.sender == sender]
            assert sends == receives, "two ranks would not agree"
            if not sends:
                continue
            room = torch.empty(sum(each.nbytes for each in sends), dtype=torch.uint8)
            assert len(room) <= BUCKET
            Parcel(step, receiver, sends, routes, {}, sends=True).pack(given[sender], False, room)
            Parcel(step, sender, receives, routes, {}, sends=False).unpack(found[receiver], room)
            sent += len(room)
    assert sent == routes.nbytes == sum(routes.received)


def _equal(wanted: torch.Tensor, found: torch.Tensor | None) -> bool:
    """Whether tensors have the same bytes; one that a trainer has in F32 keeps its dtype where the rules allow both."""
    if found is None:
        return False
    if found.dtype != wanted.dtype:
        wanted = wanted.to(found.dtype)
    return wanted.shape == found.shape and torch.equal(_bytes(wanted), _bytes(found))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def walk(
    models: Sequence[str], pairs: Sequence[tuple[str, str]], seed: int, each: int | None = None
) -> Iterator[tuple[str, str, str, str]]:
    """All combinations, or ``each`` of a model: the model, the source, the target, and what became of it."""
    order = random.Random(seed)
    for model in order.sample(models, len(models)):
        with tempfile.TemporaryDirectory() as folder:
            path = zoo.save(model, Path(folder) / "model", dtype=torch.bfloat16)
            for source, target in order.sample(pairs, each or len(pairs)):
                try:
                    found = wrong(path, source, target)
                    yield model, source, target, f"WRONG: {found[0]} and {len(found) - 1} more" if found else "same"
                except Refused as error:
                    yield model, source, target, f"refused: {error}"
                except Exception as error:
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    yield model, source, target, f"ERROR: {error} ({Path(place.filename).name}:{place.lineno})"


def main() -> int:
    """Walk until the time is over; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--pairs", type=int, help="of a source and a target, for each model; default: all")
    parser.add_argument("--model", action="append", choices=[*zoo.ZOO])
    given = parser.parse_args()
    counts, end = Counter[str](), time.monotonic() + given.seconds
    pairs = list(itertools.product(SOURCES, TARGETS))
    for model, source, target, became in walk(given.model or [*zoo.ZOO], pairs, given.seed, given.pairs):
        counts[became.partition(":")[0]] += 1
        if became.startswith(("WRONG", "ERROR")):
            print(model, source, target, became, flush=True)
        if time.monotonic() > end:
            break
    print(*(f"{word} {count:,}" for word, count in sorted(counts.items())))
    return int(counts["WRONG"] + counts["ERROR"] > 0)


if __name__ == "__main__":
    sys.exit(main())
