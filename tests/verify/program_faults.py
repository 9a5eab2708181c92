"""Faults of joining: what a buggy writer of another program's format may do, in shards whose headers stay right.

``FAULTS[name](shards)`` damages a folder; afterwards ``shards.damaged`` has the stored tensor and the rank of each
whose bytes are others now. A fault that does not apply to a model changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from reshard.placement.arrangement import Arrangement
from reshard.placement.stored import Stored
from reshard.source.source import Source
from reshard.verify.bytes.exact import open_shards
from tests.verify.faults import Array, Damaged, read, sign


class ProgramShards(Damaged):
    """Shards in another program's format to be damaged: what their arrangement says of them."""

    @cached_property
    def source(self) -> Source:
        found = open_shards(self.folder, self.original)
        assert isinstance(found, Source)
        return found

    @cached_property
    def arrangement(self) -> Arrangement:
        assert self.source.arrangement is not None
        return self.source.arrangement

    @property
    def ranks(self) -> range:
        return range(len(self.source.ranks))

    def size(self, axis: str) -> int:
        return self.source.model.sizes.of({"layer": self.layer})[axis]

    @cached_property
    def layer(self) -> int:
        """The layer that most faults damage: the last but one, or the last with experts."""
        names = [each.name for each in self.arrangement.stored]
        layers = [int(found[1]) for name in names if (found := re.search(r"\.(\d+)\.", name))]
        experts = [int(found[1]) for name in names if (found := re.search(r"\.(\d+)\..*w13_weight", name))]
        return max(experts, default=max(layers) - 1)

    def stored(self, pattern: str) -> Iterator[Stored]:
        """The tensors of that layer whose names have this in them, and are held by some rank."""
        for each in self.arrangement.stored:
            if re.search(rf"\.{self.layer}\..*(?:{pattern})", each.name) and each.constant is None:
                yield each

    def full(self, name: str) -> Array:
        return read(self.original.ranks[0][name])

    def rows(self, stored: Stored, rank: int) -> list[int]:
        """How many rows each of the joined tensors has."""
        geometry = stored.geometry
        found, start = [], next(i for i, layout in enumerate(geometry.layouts) if rank in layout.boxes)
        for portion, layout in zip(geometry.portions, geometry.layouts[start:], strict=False):
            lengths = [sum(run.length for run in layout.boxes[rank].dims[place]) for place in portion.order]
            found.append(math.prod(lengths[: portion.counts[0]]))
        return found

    def joined(self, stored: Stored, rank: int) -> list[Array]:
        """What is joined in a tensor."""
        ends = np.cumsum(self.rows(stored, rank))[:-1]
        return np.split(self.local(stored.name, rank), ends, axis=int(stored.geometry.is_stack))


Fault = Callable[[ProgramShards], None]


def qkv_order(shards: ProgramShards) -> None:
    """q, k and v are joined as k, v, q."""
    for stored in shards.stored("qkv_proj|query_key_value"):
        for rank in shards.ranks:
            if len(stored.geometry.portions) == 3:
                q, k, v = shards.joined(stored, rank)
                shards.write(stored.name, rank, np.concatenate([k, v, q]))


def gate_and_up(shards: ProgramShards) -> None:
    """gate and up are joined as up, gate."""
    for stored in shards.stored("gate_up_proj|w13_weight"):
        for rank in shards.ranks:
            gate, up = shards.joined(stored, rank)
            shards.write(stored.name, rank, np.concatenate([up, gate], axis=int(stored.geometry.is_stack)))


def neighbouring_experts(shards: ProgramShards) -> None:
    """In the stack of the last rank, each pair of neighbouring experts has changed places."""
    rank = shards.ranks[-1]
    for stored in shards.stored("w13_weight|w2_weight"):
        local = shards.local(stored.name, rank)
        order = np.arange(len(local) // 2 * 2).reshape(-1, 2)[:, ::-1].reshape(-1)
        shards.write(stored.name, rank, local[[*order, *range(len(order), len(local))]])


def rotary_halves(shards: ProgramShards) -> None:
    """In q and k, the halves of each head are stored as pairs."""
    head = shards.size("head")
    order = np.arange(head).reshape(2, -1).T.reshape(-1)
    for stored in shards.stored("qkv_proj|query_key_value"):
        for rank in shards.ranks:
            if len(stored.geometry.portions) == 3:
                q, k, v = shards.joined(stored, rank)
                q, k = (part.reshape(-1, head, *part.shape[1:])[:, order].reshape(part.shape) for part in (q, k))
                shards.write(stored.name, rank, np.concatenate([q, k, v]))


def kv_replica_of_wrong_head(shards: ProgramShards) -> None:
    """Ranks that share a KV head have the heads in turn, not one head on neighbouring ranks."""
    kv, head = shards.size("kv"), shards.size("head")
    if kv >= len(shards.ranks):
        return
    for stored in shards.stored("qkv_proj"):
        for rank in shards.ranks:
            q, _, _ = shards.joined(stored, rank)
            others = [shards.full(atom.tensor).reshape(kv, head, -1)[rank % kv] for atom in stored.atoms[1:]]
            shards.write(stored.name, rank, np.concatenate([q, *others]))


def layers_by_one(shards: ProgramShards) -> None:
    """The layers of the last pipeline stage are numbered one too high: each has the tensors of the layer before.

    Without stages, all layers but the first.
    """
    mesh = shards.source.plan.mesh
    names = {rank: dict.fromkeys(tensors) for rank, tensors in enumerate(shards.source.ranks)}
    before = {(name, rank): shards.local(name, rank) for rank, held in names.items() for name in held}
    for rank in shards.ranks:
        for name in names[rank] if mesh.stage(rank) == mesh.pp - 1 else ():
            other = re.sub(r"\.(\d+)\.", lambda found: f".{int(found[1]) - 1}.", name, count=1)
            holders = [holder for holder in (rank, rank - mesh.size // mesh.pp) if (other, holder) in before]
            if other != name and holders:
                shards.write(name, rank, before[other, holders[0]])


def padding_in_the_middle(shards: ProgramShards) -> None:
    """The vocabulary is divided first and each part padded then, so that zeros stand between the ranks' rows."""
    vocab, degree = shards.size("vocab"), len(shards.ranks)
    for stored in shards.arrangement.stored:
        if stored.constant is None and re.search(r"embed|lm_head|wte", stored.name) and len(stored.atoms) == 1:
            full = shards.full(stored.atoms[0].tensor)
            assert len(full) == vocab
            for rank, part in enumerate(np.array_split(full, degree)):
                local = np.zeros_like(shards.local(stored.name, rank))
                local[: len(part)] = part
                shards.write(stored.name, rank, local)


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        qkv_order, gate_and_up, neighbouring_experts, rotary_halves, kv_replica_of_wrong_head, layers_by_one,
        padding_in_the_middle,
    )
}  # fmt: skip


def inject(fault: Fault | str, folder: Path, original: Source) -> ProgramShards:
    """Put a fault, or one of ``FAULTS`` by its name, into the shards in ``folder``."""
    shards = ProgramShards(folder, original)
    (FAULTS[fault] if isinstance(fault, str) else fault)(shards)
    sign(folder)
    return shards
