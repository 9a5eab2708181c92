"""Pushes: the ranks of a trainer give their weights to the ranks of a receiver, each byte once.

All processes say what they hold, and each makes the same plan (``reshard.live.routing``). A push has two phases: when
all receivers have everything and its checksums are right, all commit.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from reshard.formats.documents import read_config
from reshard.formats.errors import LiveError, MismatchError, PlanError, ReshardError, listed
from reshard.formats.files.checkpoint import CONFIG
from reshard.formats.torch_internals import TORCH_DTYPES
from reshard.live.fence import Fence
from reshard.live.meshes import TRAINERS, Target, held_format, target_of
from reshard.live.parameters import check_unchanged, slices_of, slices_of_megatron, unwrapped
from reshard.live.routing import BUCKET, Routes, plan_push, view_of
from reshard.live.sides import HeldSlice, LiveState, bound, from_document, of_checkpoints, to_document, unstacked
from reshard.live.views import Parcel, TensorViews
from reshard.live.wire import Message, Stats, Wire
from reshard.placement.arrangement import Arrangement, on_mesh
from reshard.source.opening import find
from reshard.store.selection import HubAccess, Weights

SlicedTensors = Sequence[tuple[HeldSlice, torch.Tensor]]
"""A rank's slices, with their tensors."""

Work = Callable[[torch.Tensor], None]
"""A function that fills the memory of a message before it is sent, or reads it after it came."""
Witness = Callable[[Arrangement, int], Sequence[str]]
"""A function that returns a line for each tensor of a rank that an engine's own loader fills differently from the
rules.
"""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The meeting of a push's processes: address, number of ranks, and waiting times in seconds. Raises PlanError for
    wrong numbers of ranks or seconds.
    """

    store: str = field(repr=False)  # it may have a secret
    """``tcp://HOST:PORT``, where the trainer's rank 0 listens."""
    trainers: int
    receivers: int
    timeout: float = 10.0
    """The longest that a process may let the others wait."""
    join: float = 120.0
    """The longest until all have come."""
    patience: float | None = None
    """The longest that a process may come to a push after others; by default ``timeout``."""
    bucket: int = BUCKET
    """The bytes that a rank sends in one step."""
    shared: bool = True
    """Whether processes of one host share memory."""

    def __post_init__(self) -> None:
        for name in ("trainers", "receivers"):
            if not isinstance(ranks := getattr(self, name), int) or ranks < 1:
                raise PlanError(f"{name}={ranks!r} should be a number of ranks, at least 1")
        for name in ("timeout", "join", "patience"):
            seconds = getattr(self, name)
            is_default = name == "patience" and seconds is None
            if not is_default and not (isinstance(seconds, int | float) and 0 < seconds <= _LONGEST):
                raise PlanError(f"{name}={seconds!r} should be a number of seconds above 0, at most {_LONGEST:,}")

    def number(self, role: str, rank: int) -> int:
        """The number among all processes of a rank of the ``trainers`` or the ``receivers``. Raises PlanError."""
        if rank not in range(ranks := getattr(self, role)):
            raise PlanError(f"rank={rank!r} is not one of the {ranks} {role}, which count from 0")
        return rank if role == "trainers" else self.trainers + rank

    @property
    def names(self) -> list[str]:
        """The names of the processes in errors."""
        return [f"{role} {i}" for role in ("trainer", "receiver") for i in range(getattr(self, f"{role}s"))]


_LONGEST = 1_000_000


class _Process:
    """One process of a push. It meets the others when it first needs them, and again after a failure.

    ``read`` gives what it holds; None: tensors are made for what the rules say that it has. ``description`` is what it
    says of itself besides. ``witness`` is asked before it agrees to a plan; ``keep`` and ``poison`` are a receiver's.
    """

    def __init__(
        self, meeting: Meeting, rank: int, device: str | None, read: Callable[[], SlicedTensors] | None,
        description: Mapping[str, Any], witness: Witness | None = None, *, keep: bool = True,
        poison: Callable[[str | None], None] | None = None,
    ) -> None:  # fmt: skip
        self.meeting, self.rank, self.device, self._sends = meeting, rank, device, rank < meeting.trainers
        self.routes: Routes | None = None
        self.at: int | None = None
        """The version that this process has; None: none, or half of one."""
        self._base: int | None = None
        """The version of which it has all that changes are added to, or compared with."""
        self._read, self._description, self._witness = read, description, witness
        self._keep, self._poison = keep, poison
        self._planned: list[HeldSlice] = []
        self._descriptions: Sequence[dict[str, Any]] = ()
        self._fence: Fence | None = None
        self._wire: Wire | None = None
        self._parcels: list[Parcel] = []
        self._room: dict[str, list[torch.Tensor]] = {}
        """For a receiver without tensors of its own: memory for those that come, kept between pushes."""
        self._padded: set[str] | None = None
        """The tensors of a receiver of which no rank sends a part."""
        self._open: tuple[Fence, int] | None = None
        """A receiver's push that is not committed, with its version."""

    def check(self) -> Routes:
        """Meet all others and agree on the plan, before any byte moves: coverage, dtypes, and the receivers' witnesses.

        Both trainers and receivers call it. Returns the plan. Raises LiveError on all ranks, with the tensor's name.
        """
        return self._meet(self.meeting.join)[2]

    def close(self) -> None:
        """Leave the others."""
        if self._wire is not None:
            self._wire.close()
        if self._fence is not None:
            self._fence.close()
        self._wire = self._fence = None

    def _describe(self) -> dict[str, Any]:
        """Return the description that this process sends to the others. Raises ReshardError."""
        parts = self._read() if self._read is not None else []
        # where the tensors are is the device, unless another was named
        self.device = self.device or next((str(tensor.device) for _, tensor in parts), None)
        self._planned = [part for part, _ in parts]
        return {
            "host": socket.gethostname(), "bucket": self.meeting.bucket,
            "held": to_document(self._planned) if self._read is not None else None,
            **self._description, "dtype": _rounding(self._description.get("dtype")),
        }  # fmt: skip

    def _meet(self, join: float | None = None) -> tuple[Fence, Wire, Routes]:
        """Join the others, plan, and agree; does nothing while the connection holds. Raises LiveError.

        ``join`` is how many seconds they may take to come; by default, as many as to all else if they have come before.
        """
        meeting, lost = self.meeting, ""
        if self._fence is not None:
            try:
                self._fence.check()
            except LiveError as error:
                lost = f"{error.message}; then "
                self.close()
        if self._fence is None or self._wire is None or self.routes is None:
            join = join or (meeting.timeout if self._descriptions else meeting.join)
            try:
                self._fence = Fence(meeting.store, self.rank, meeting.names, timeout=meeting.timeout, join=join)
                self._plan(self._fence)
                self._wire = Wire(self._fence, self.rank, self.device or "cpu", meeting.bucket, shared=meeting.shared)
            except BaseException as error:
                self.close()  # so that the others hear at once
                if isinstance(error, ReshardError):
                    raise LiveError(f"{lost}{error.message}", error.hint) from error
                raise
        assert self.routes is not None
        return self._fence, self._wire, self.routes

    def _plan(self, fence: Fence) -> None:
        """Make the plan from all descriptions, and agree on it. Raises LiveError on all ranks, or on none."""
        descriptions = self._gather(fence, "description", self._describe)
        if descriptions != self._descriptions:
            self.routes = None

        def planned() -> dict[str, Any]:
            if self.routes is None:
                self.routes, self._descriptions = _planned(self.meeting, descriptions), descriptions
                self._base, self._room, self._padded, memory = None, {}, None, dict[str, torch.Tensor]()
                peer_of = attrgetter("receiver" if self._sends else "sender")
                self._parcels = [
                    Parcel(step, peer, [*own], self.routes, memory, sends=self._sends)
                    for step, parts in enumerate(self.routes.parts(self.rank))
                    for peer, own in groupby(sorted(parts, key=peer_of), peer_of)
                ]
            if self._witness is not None:
                arrangement = self.routes.target.arrangement
                rank = self.rank - self.meeting.trainers
                differences = self._witness(on_mesh(arrangement.plan, arrangement.format), rank)
                if differences:
                    raise MismatchError(f"{differences[0]} ({len(differences)} differences in all)")
            return {"digest": self.routes.digest}

        answers = self._gather(fence, "plan", planned)
        for name, answer in zip(self.meeting.names, answers, strict=True):
            if answer != answers[0]:
                raise LiveError(f"{name} has made another plan than {self.meeting.names[0]}")

    def _gather(
        self, fence: Fence, what: str, work: Callable[[], dict[str, Any]], patience: float | None = None
    ) -> list[dict[str, Any]]:
        """Return the descriptions of all processes. Raises LiveError on all ranks if one has a problem."""
        try:
            own = work()
        except ReshardError as error:  # told to all, so that none waits
            own = {"problem": error.message, "hint": error.hint}
        replies: list[dict[str, Any]] = fence.gather(what, own, patience)
        problems = [(reply.get("problem"), reply.get("hint")) for reply in replies]
        for name, (problem, hint) in zip(self.meeting.names, problems, strict=True):
            if problem:  # without a name if all have the same
                raise LiveError(problem if len({*problems}) == 1 else f"{name}: {problem}", hint)
        return replies

    def _begin(self, version: int, *, delta: bool = True) -> tuple[Fence, Wire, dict[str, list[torch.Tensor]], bool]:
        """Agree on the version to push. Only changes are sent if all processes have the version before it.

        Also returns this rank's tensors as they are now. Raises LiveError on all ranks, or on none.
        """
        fence, wire, routes = self._meet()
        tensors: dict[str, list[torch.Tensor]] = {}

        def proposed() -> dict[str, Any]:
            if not isinstance(version, int) or not 0 <= version < 1 << 63:
                raise PlanError(f"version={version!r} should be a whole number from 0 to 2**63 - 1")
            if self._read is not None:
                tensors.update(self._tensors(routes, self._read()))
            return {"version": version, "at": self.at, "base": self._base if delta else None}

        proposals = self._gather(fence, "begin", proposed, self.meeting.patience)
        for name, other in zip(self.meeting.names, proposals, strict=True):
            if other["version"] != proposals[0]["version"]:
                versions = f"version {other['version']}, and {self.meeting.names[0]} {proposals[0]['version']}"
                raise LiveError(f"{name} is to have {versions}")
            if other["at"] is not None and other["at"] >= version:
                raise LiveError(f"{name} has version {other['at']} already: push a later one")
        self._base = None  # until all of this push is there
        bases = {other["base"] for other in proposals}
        return fence, wire, tensors, bases != {None} and len(bases) == 1

    def _tensors(self, routes: Routes, parts: SlicedTensors) -> dict[str, list[torch.Tensor]]:
        """This rank's tensors by the names of those that its side has; others are left alone. Raises LiveError."""
        check_unchanged(self._planned, [part for part, _ in parts])
        side = routes.source if self._sends else routes.target
        tensors: dict[str, list[torch.Tensor]] = {stored.name: [] for stored in side.stored}
        for part, tensor in parts:
            tensors.get(unstacked(side.arrangement.format, part).name, []).append(tensor)
        return {name: pieces for name, pieces in tensors.items() if pieces}

    def _messages(
        self, fence: Fence, has_base: bool, work: Callable[[Parcel], Work], tensors: TensorViews | None = None
    ) -> list[Message]:
        """Return the messages of this rank: all bytes of each parcel, or those that changed since the ``base``; none if
        empty.

        The trainers, who have ``tensors``, tell the receivers how many bytes come.
        """
        sizes = [each.nbytes for each in self._parcels]
        if has_base:
            own = [(each.step, each.peer, each.size(tensors)) for each in self._parcels] if tensors is not None else []
            replies = self._gather(fence, "changes", lambda: {"sizes": own}, self.meeting.patience)
            changed = {(step, frozenset((rank, peer))): size
                       for rank, reply in enumerate(replies) for step, peer, size in reply["sizes"]}  # fmt: skip
            sizes = [changed[each.step, frozenset((self.rank, each.peer))] for each in self._parcels]
        sized = zip(self._parcels, sizes, strict=True)
        return [Message(each.step, each.peer, size, work(each), self._sends) for each, size in sized if size]

    def _agree(self, fence: Fence, what: str, problem: str = "") -> None:
        """Raise LiveError on all ranks if any has a problem."""
        self._gather(fence, what, lambda: {"problem": problem})


class Push(_Process):
    """A trainer's rank: gives its weights to the receivers. Made by ``push``."""

    @property
    def ticket(self) -> dict[str, Any]:
        """The settings with which an engine's ranks can meet this trainer."""
        return {name: value for name, value in asdict(self.meeting).items() if name != "receivers"}

    def __call__(self, version: int, *, delta: bool = False) -> Stats:
        """Push the weights as they are now; returns when all receivers compute with them.

        ``delta``: keep a copy of what was pushed, and send only what changed since, if all receivers have it; it must
        be the same on all ranks.

        Raises LiveError on all ranks. Then receivers have the version before, or refuse to go on.
        """
        fence, wire, tensors, has_base = self._begin(version, delta=delta)
        messages = self._messages(fence, has_base, lambda parcel: partial(parcel.pack, tensors, delta), tensors)
        stats = wire.exchange(messages, version)
        self._agree(fence, "received")
        self._base = version if delta else None
        self._agree(fence, "committed")
        self.at = version
        return stats

    def _tensors(self, routes: Routes, parts: SlicedTensors) -> dict[str, list[torch.Tensor]]:
        tensors = super()._tensors(routes, parts)
        for each in routes.source.stored:
            if each.constant and any(tensor.ne(each.constant.value).any() for tensor in tensors.get(each.name, ())):
                raise MismatchError(
                    f"tensor '{each.name}' is no longer {each.constant.value:g}, and no receiver has a place for it"
                )
        return tensors


class Pull(_Process):
    """A receiver's rank. Made by ``pull``.

    ``read`` gives the live tensors to write to. ``keep``: what comes is kept, and written at the end: a second copy,
    and the old weights serve until then. Else it is written as it comes, and a failure on the way leaves the model
    ``poisoned``.
    """

    def receive(self, version: int) -> dict[str, torch.Tensor]:
        """Receive a push: this rank's tensors by name, when all ranks have all of theirs. ``commit`` must follow.

        With live tensors, they hold what came. Raises LiveError on all ranks.
        """
        fence, wire, live, has_base = self._begin(version)
        assert self.routes is not None
        is_live, room = self._read is not None, self._room
        if is_live and not self._keep:
            room = live
        elif not room:
            for name, dtype, shape in self.routes.target.tensors_of(self.rank - self.meeting.trainers):
                tensor = torch.zeros(shape, dtype=TORCH_DTYPES[dtype], device=self.device)
                room.setdefault(name, []).append(tensor)
        messages = self._messages(fence, has_base, lambda parcel: partial(parcel.unpack, room))
        if not has_base:
            self._fill(self.routes, room)
        if room is live:
            self._mark("a push has begun to change it")
        wire.exchange(messages, version)
        self._agree(fence, "received")
        self._open, self._base = (fence, version), version
        if is_live and room is not live:
            self._mark("a push has begun to change it")
            for name, tensors in live.items():
                for tensor, new in zip(tensors, room[name], strict=True):
                    tensor.copy_(new)
        return {} if is_live else {name: tensors[0] for name, tensors in room.items()}

    def commit(self, version: int, error: str | None = None) -> None:
        """Tell all ranks that this one computes with the new weights, or why not. Raises LiveError on all if any does
        not; does nothing where no push has come so far.
        """
        if self._open is None or self._open[1] != version:
            return
        (fence, _), self._open = self._open, None
        self._agree(fence, "committed", error or "")
        self.at = version
        self._mark(None)

    def __call__(self, version: int) -> None:
        """Receive a push and compute with it. Raises LiveError on all ranks."""
        self.receive(version)
        self.commit(version)

    def _mark(self, why: str | None) -> None:
        self.at = None if why else self.at
        if self._poison is not None:
            self._poison(why)

    def _fill(self, routes: Routes, room: TensorViews) -> None:
        """Write the values that no rank sends: padding, which is zero, and constants."""
        if self._padded is None:
            counts = Counter[str]()
            for part in chain.from_iterable(routes.parts(self.rank)):
                counts[view_of(part, routes.target, sends=False).name] += part.box.numel
            self._padded = {name for name, own in room.items() if counts[name] < sum(each.numel() for each in own)}
        constants = {each.name: each.constant.value for each in routes.target.stored if each.constant}
        for name in self._padded:
            for tensor in room[name]:
                tensor.fill_(constants.get(name, 0))


def _rounding(dtype: str | torch.dtype | None) -> str | None:
    """A dtype as headers call it, by that name, torch's, or torch's object. Raises PlanError."""
    for name in ("BF16", "F16", "F32"):
        if dtype in (None, name, TORCH_DTYPES[name], str(TORCH_DTYPES[name]).removeprefix("torch.")):
            return None if dtype is None else name
    raise PlanError(f"dtype={dtype!r} should be BF16, F16 or F32")


def _planned(meeting: Meeting, descriptions: Sequence[Mapping[str, Any]]) -> Routes:
    """Make the plan from the descriptions of all processes. Raises ReshardError, with the holders of the tensor it
    names.
    """
    for name, answer in zip(meeting.names, descriptions, strict=True):
        if (bucket := answer["bucket"]) != (first_bucket := descriptions[0]["bucket"]):
            raise PlanError(
                f"{name} has bucket={bucket!r}, and {meeting.names[0]} {first_bucket!r}", "give all the same"
            )
    trainers, receivers = descriptions[: meeting.trainers], descriptions[meeting.trainers :]
    first = trainers[0]
    ends = target_of(first["target"])

    def state(answers: Sequence[Mapping[str, Any]]) -> LiveState:
        format = held_format(answers[0]["format"])
        ranks = [[unstacked(format, part) for part in from_document(answer["held"])] for answer in answers]
        return of_checkpoints(LiveState(format, ranks), first["config"])

    try:
        live = state(trainers)
        model = bound(live, first["config"], dtype=first["dtype"])
        goal = state(receivers) if receivers[0]["held"] is not None else ends
        plan = plan_push(model, live, goal, bucket=meeting.bucket, hosts=[answer["host"] for answer in descriptions])
    except ReshardError as error:
        names = [{name for name, _ in answer["held"]["names"]} if answer["held"] else set() for answer in descriptions]
        holders = [who for who, there in zip(meeting.names, names, strict=True) if {*error.message.split("'")} & there]
        if 0 < len(holders) < sum(map(bool, names)):
            raise PlanError(f"{error.message} (held by {listed(holders)})", error.hint) from error
        raise
    if plan.target.ranks != meeting.receivers:
        raise PlanError(f"{ends} has {plan.target.ranks} ranks, and there are {meeting.receivers} receivers")
    return plan


def push(
    model: Any, *, to: Target | str, store: str, rank: int, world: int,
    config: Mapping[str, Any] | str | Path | None = None, program: str = "transformers",
    dtype: str | torch.dtype | None = None, receivers: int | None = None, device: str | None = None, **options: Any,
) -> Push:  # fmt: skip
    """A trainer's rank of ``world``, which pushes ``model`` to the ranks of ``to``.

    ``model`` is a torch module or its named tensors; of Megatron-Core, a list of model chunks.
    ``config`` is the model's config.json: a folder, a Hub id, or what is in it; by default that of the model itself.
    ``device`` is where buckets are, by default where the tensors are; with ``"cpu"`` they go through the host's memory.
    ``program`` names the model's tensors: ``transformers``, ``torchtitan`` or ``megatron``. ``dtype``: what the trainer
    has in F32 is rounded to it; ``"BF16"``, ``"bfloat16"`` or ``torch.bfloat16``. ``options``: the seconds ``timeout``,
    ``join`` and ``patience``, the bytes of a ``bucket``, and ``shared=False`` against shared memory (see ``Meeting``).
    Raises PlanError, CheckpointError.
    """
    target = target_of(to)
    meeting = Meeting(store=store, trainers=world, receivers=receivers or target.ranks, **options)
    description: dict[str, Any] = {"format": TRAINERS.get(program, program), "dtype": dtype, "target": str(target)}
    description["config"] = _config(model, config) if rank == 0 else None
    return Push(meeting, meeting.number("trainers", rank), device, reader(model, program), description)


def reader(model: Any, program: str) -> Callable[[], SlicedTensors]:
    """Return a function that reads a rank's live tensors again."""
    if program == "megatron":
        return partial(slices_of_megatron, model)
    if not isinstance(model, torch.nn.Module | Mapping):
        model = list(model)
    return partial(slices_of, model)


def _config(model: Any, config: Mapping[str, Any] | str | Path | None) -> Mapping[str, Any]:
    if config is None:
        settings = getattr(unwrapped(model), "config", None)
        if settings is None or not hasattr(settings, "to_json_string"):
            raise PlanError("the model has no config of transformers", "give config=: a folder, a Hub id, or a mapping")
        return dict(json.loads(settings.to_json_string(use_diff=False)))
    if isinstance(config, Mapping):
        return config
    return read_config(find(config, HubAccess(), Weights.NONE) / CONFIG)


def pull(
    model: torch.nn.Module | None = None, *, store: str, rank: int, world: int, trainers: int,
    program: str = "transformers", keep: bool = True, device: str | None = None, witness: Witness | None = None,
    poison: Callable[[str | None], None] | None = None, **options: Any,
) -> Pull:  # fmt: skip
    """A receiver's rank of ``world``. ``model`` is written to; without one, ``receive`` returns the tensors.

    ``program`` names the model's tensors. With ``keep=False`` they are written as they come, without a second copy, and
    a failure leaves the model half new: ``poison`` has it refuse to compute. ``witness`` asks an engine's own loader
    where elements belong. ``options`` are those of ``push``. Raises PlanError.
    """
    meeting = Meeting(store=store, trainers=trainers, receivers=world, **options)
    number, description = meeting.number("receivers", rank), {"format": TRAINERS.get(program, program)}
    if model is None:
        return Pull(meeting, number, device, None, description, witness, poison=poison)
    read, poison = reader(model, program), poison or partial(poisoned, model)
    return Pull(meeting, number, device, read, description, witness, keep=keep, poison=poison)


def poisoned(model: torch.nn.Module, why: str | None) -> None:
    """Have a model that is half new refuse to compute; without a reason, compute again."""
    handle = vars(model).pop("_reshard_poison", None)
    if handle is not None:
        handle.remove()
    if why is not None:

        def refuse(*_: object) -> None:
            raise LiveError(f"the weights are half new: {why}, and it has not ended", "push again")

        vars(model)["_reshard_poison"] = model.register_forward_pre_hook(refuse)
