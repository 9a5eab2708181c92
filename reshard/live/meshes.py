"""The sides of a push in a few letters, such as ``fsdp2:4tp2`` or ``vllm:tp4``: what a program's ranks would hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

from reshard.commands.fields import values_of
from reshard.formats.errors import PlanError
from reshard.formats.mesh import MOST_RANKS
from reshard.formats.notation.format import MODULES, Format
from reshard.formats.notation.format_file import format_of, with_names
from reshard.formats.notation.placements import ShardedDim, cut, in_order
from reshard.live.sides import HeldSlice, LiveState
from reshard.mesh.plan import Degrees
from reshard.model.model import Model
from reshard.placement.arrangement import Arrangement, on_mesh
from reshard.placement.geometry import Geometry
from reshard.placement.pieces import Runs
from reshard.placement.program_plan import check_demands, plan_for, program_plan
from reshard.source.access import Access, Place
from reshard.source.source import Source
from reshard.store.selection import Weights
from reshard.system import system_errors
from reshard.transforms.opening import open_any

TRAINERS: Mapping[str, str] = {
    "fsdp2": "dcp",
    "transformers": "dcp",
    "torchtitan": "torchtitan-live",
    "megatron": "megatron",
}
"""Formats of trainers' tensors: the names are the program's, and ranks hold chunks."""
MOST_PARTS = 1 << 22
"""The parts of tensors that all ranks of a trainer may hold together: they are planned one by one, in half a minute."""


def held_format(name: str) -> Format:
    """Return the format of a running program's tensors, with the names of its own modules. Raises PlanError."""
    return with_names(format_of(name), MODULES, None)


@dataclass(frozen=True)
class Target:
    """A program on so many ranks."""

    program: str
    """The name of a format (``vllm``, ``sglang``, ``megatron``), or ``fsdp2`` for a model of transformers."""
    tp: int = 1
    """The degree, as in ``split --as``; so are ``ep`` and ``pp``."""
    ep: int = 1
    pp: int = 1
    fsdp: int = 1
    """The ranks that hold equal parts of the first dimension of what is left."""
    replicas: int = 1
    """The ranks that hold the same."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not (isinstance(value, str) if name == "program" else number):
                what = "the name of a program" if name == "program" else "a whole number of at least 1"
                raise PlanError(f"{name}={value!r} is not possible: {what} is expected")
        if self.ranks > MOST_RANKS:
            raise PlanError(f"'{self}' are {self.ranks:,} ranks", f"give degrees of at most {MOST_RANKS:,} ranks")

    @property
    def format(self) -> Format:
        """The format of its tensors. Raises PlanError."""
        try:
            return held_format(TRAINERS.get(self.program, self.program))
        except PlanError as error:
            near = "did you mean fsdp2? " if self.program == "fsdp" else ""
            hint = f"{near}trainers are {', '.join(TRAINERS)}; engines vllm, sglang and others of 'reshard formats'"
            raise PlanError(f"'{self}': no program is called '{self.program}' here", hint) from error

    @property
    def ranks(self) -> int:
        """The number of its ranks."""
        return self.fsdp * self.replicas * self.degrees.mesh.size

    @property
    def degrees(self) -> Degrees:
        """The degrees by which the rules split."""
        format = self.format
        same = self.ep > 1 and format.files.ep is None and not format.container.chunks  # its engines deal experts so
        return Degrees(tp=self.tp, ep=self.ep, pp=self.pp, same_ranks=same)

    def __str__(self) -> str:
        degrees = {"": self.fsdp, "x": self.replicas, "tp": self.tp, "ep": self.ep, "pp": self.pp}
        text = "".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
        return f"{self.program}:{text or 1}"


_NAMES: Mapping[str, str] = {"": "fsdp", "fsdp": "fsdp", "x": "replicas", "tp": "tp", "ep": "ep", "pp": "pp"}


def target_of(text: Target | str) -> Target:
    """Reads ``fsdp2:4tp2``, ``megatron:tp2pp2ep2``, ``vllm:tp4``. A plain number is of FSDP. Raises PlanError."""
    if isinstance(text, Target):
        return text
    text = text if isinstance(text, str) else repr(text)
    program, _, tail = text.partition(":")
    pairs = re.findall(r"([a-z]*)(\d{1,18})", tail)
    sizes = {_NAMES[name]: int(number) for name, number in pairs if name in _NAMES}
    if "".join(f"{name}{number}" for name, number in pairs) != tail or len(sizes) != len(pairs) or 0 in sizes.values():
        raise PlanError(
            f"'{text}' is not a program and its degrees",
            "write for example fsdp2:8, fsdp2:4tp2, megatron:tp2pp2, vllm:tp4",
        )
    return Target(program, **sizes)


def arranged(model: Model, target: Target) -> Arrangement:
    """Return the arrangement of a model on a program's ranks, without FSDP. Raises PlanError.

    Running ranks may hold only their own layers where a format's files have all (Megatron's).
    """
    format, degrees = target.format, target.degrees
    if format.container.chunks and degrees.pp > 1:
        check_demands(model, format, degrees.mesh, files=False)
        return on_mesh(program_plan(model, format, degrees.mesh), format)
    return on_mesh(plan_for(model, format, degrees, files=False), format)


def trainer_state(model: Model, target: Target) -> LiveState:
    """Return the tensors that the ranks of a trainer would hold. Raises PlanError."""
    if target.program not in TRAINERS:
        meant = f"did you mean {replace(target, tp=target.fsdp, fsdp=1)}? " if target.fsdp > 1 == target.tp else ""
        raise PlanError(
            f"'{target}': {target.program} is not a trainer: it has no FSDP",
            f"{meant}trainers are {', '.join(TRAINERS)}",
        )
    arrangement = arranged(model, target)
    whole = {part.name: part.geometry.shape(0) for part in on_mesh(arrangement.plan.unsplit, target.format).stored}
    count = target.ranks * len(arrangement.stored)
    if count > MOST_PARTS:
        raise PlanError(
            f"'{target}': {target.ranks:,} ranks would hold {count:,} parts of tensors",
            f"a push is planned for at most {MOST_PARTS:,}, here of {MOST_PARTS // len(arrangement.stored):,} ranks",
        )
    inner = arrangement.plan.mesh.size
    ranks: list[list[HeldSlice]] = [[] for _ in range(target.ranks)]

    @cache
    def runs_of(geometry: Geometry) -> Sequence[tuple[Runs, ...] | None]:
        """Return each rank's runs of a tensor: ``inner`` ranks have parts, each of which is divided over ``fsdp``
        ranks.
        """
        of_inner: list[list[tuple[Runs, ...] | None]] = []
        for rank in range(inner):
            runs = geometry.dims(rank)
            parts: list[tuple[Runs, ...] | None] = [runs] * target.fsdp
            if runs and target.fsdp > 1:
                parts = [(cut(runs[0], target.fsdp, number), *runs[1:]) for number in range(target.fsdp)]
            of_inner.append(parts)
        return [*chain.from_iterable(zip(*of_inner, strict=True))] * target.replicas

    again = {atom.stored.name for _, atom in arrangement.copies}  # a tied parameter comes once
    for stored in arrangement.stored:
        geometry, shape = stored.geometry, whole[stored.name]
        assert shape is not None
        if stored.constant or stored.name in again:
            continue
        for parts, runs in zip(ranks, runs_of(geometry), strict=True):
            if runs is not None:
                parts.append(HeldSlice(stored.name, stored.dtype, shape, runs))
    return LiveState(target.format, ranks)


@dataclass(frozen=True, kw_only=True)
class _Headers(Access):
    source: Place = field(repr=False)  # a URL may have a password


def headers_of(checkpoint: Place, access: Mapping[str, Any]) -> Source:
    """A checkpoint of which headers are read; ``access`` are fields of ``Access``. Raises ReshardError."""
    request = _Headers(**values_of(_Headers, source=checkpoint, **access))
    with system_errors():
        return open_any(request.source, request, Weights.HEADERS)


def placements(checkpoint: Place, target: Target | str, **access: Any) -> dict[str, str | None]:
    """Return the placement that a DTensor on the target's ranks would have, for each tensor of the target.

    It is ``Replicate()``, ``Shard(0)``, or ``_StridedShard(0, split_factor=2)`` for a packed tensor; None if no
    placement can say it, as for heads that several ranks have. Only for ranks of one dimension (tp). Raises
    ReshardError.
    """
    goal = target_of(target)
    if goal.fsdp * goal.replicas > 1:
        raise PlanError(f"'{goal}' has ranks along other dimensions than tp, and placements are of one")
    arrangement = arranged(headers_of(checkpoint, access).model, goal)
    mesh, stored = arrangement.plan.mesh, (each for each in arrangement.stored if each.constant is None)
    if len([degree for _, degree in mesh.degrees if degree > 1]) > 1 and not goal.degrees.same_ranks:
        raise PlanError(f"'{goal}' has ranks along several dimensions, and placements are of one")
    return {each.name: _placement([each.geometry.dims(rank) for rank in range(mesh.size)]) for each in stored}


def _placement(ranks: Sequence[tuple[Runs, ...] | None]) -> str | None:
    runs_of = [dims for dims in ranks if dims is not None]
    if len(runs_of) < len(ranks):
        return None
    if all(dims == runs_of[0] for dims in runs_of):
        return "Replicate()"
    shape = [max(run.end for dims in runs_of for run in dims[dim]) for dim in range(len(runs_of[0]))]
    for dim in range(len(shape)):
        for parts in {1, len(runs_of[0][dim])}:
            cuts = [in_order(shape, [len(runs_of)], [rank], [ShardedDim(dim, parts)]) for rank in range(len(runs_of))]
            if cuts == runs_of:
                return f"Shard({dim})" if parts == 1 else f"_StridedShard({dim}, split_factor={parts})"
    return None
