"""The job that ranks are given to measure, and their results: pure data, which is pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from reshard.formats.errors import refused
from reshard.mesh.plan import Plan
from reshard.mesh.stages import is_layered
from reshard.model.model import Kind, Model
from reshard.store.selection import HubAccess
from reshard.system import Device, Dtype, Taken, default

OUTSIDE = ("embedding", "head")
"""The parts of a model that stand before and behind its layers."""


@dataclass(frozen=True)
class LayerKind:
    """Layers that have the same weights and do the same: the ``first`` of them, and how many there are."""

    first: int
    count: int

    @property
    def part(self) -> str:
        """The name of such a layer in measurements."""
        return f"layer {self.first}"


def layer_kinds(model: Model) -> tuple[LayerKind, ...]:
    """The kinds of layers, in the order of their first layers.

    Two layers are alike if their weights have the same rules, shapes and dtypes, and config.json calls them the same
    (``layer_types``: attention over all tokens or over a window).
    """
    of_layer: dict[int, list[Kind]] = {}
    for kind in model.kinds:
        for layer in kind.layers if is_layered(model, kind) else ():
            of_layer.setdefault(layer, []).append(kind)
    alike: dict[tuple[object, ...], list[int]] = {}
    for layer, kinds in sorted(of_layer.items()):
        tensors = sorted((kind.template, str(kind.rule), kind.shape, kind.dtype) for kind in kinds)
        alike.setdefault((_type_of(model.sizes.settings, layer), *tensors), []).append(layer)
    return tuple(LayerKind(layers[0], len(layers)) for layers in alike.values())


def _type_of(settings: Mapping[str, object], layer: int) -> str:
    types = settings.get("layer_types")
    return str(types[layer]) if isinstance(types, Sequence) and layer < len(types) else ""


def with_layers(plan: Plan, kinds: Sequence[LayerKind]) -> Plan:
    """The same plan for a model that has only the first layer of each kind, under its own number."""
    layers = {kind.first for kind in kinds}
    layered = {kind: is_layered(plan.model, kind) for kind in plan.model.kinds}
    tensors = tuple(t for t in plan.model.tensors if not layered[t.kind] or t.at[0] in layers)
    return replace(plan, model=replace(plan.model, tensors=tensors))


PHASES = ("decode", "prefill", "train")


@dataclass(frozen=True)
class Workload:
    """The work of one step: ``batch`` sequences of ``seq`` tokens.

    ``decode``: one more token of each sequence, with the keys and values of ``seq`` tokens in the cache. ``prefill``:
    all
    tokens at once. ``train``: the same, and the gradients of all weights.
    """

    phase: str
    batch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.phase}, batch {self.batch}, seq {self.seq}"

    @property
    def tokens(self) -> int:
        """The tokens that one step computes."""
        return self.batch * (1 if self.phase == "decode" else self.seq)

    def takes_as_much_as(self, other: Workload) -> bool:
        """Whether it needs at least as much memory as another workload of the same phase."""
        return self.phase == other.phase and self.batch >= other.batch and self.seq >= other.seq


@dataclass(frozen=True)
class ProfileRequest(HubAccess):
    """Arguments of ``profile``.

    ``source``: a checkpoint, or only its config.json.
    ``tp``: the degrees to run, by default all that are possible on ``ranks`` ranks.
    ``predict_tp``: degrees that are predicted without running.
    ``batch``: the numbers of sequences.
    ``seq``: the numbers of tokens in a sequence.
    ``phase``: ``decode``, ``prefill``, ``train``: what runs.
    ``ranks``: the most ranks, by default one for each GPU or core.
    ``device``: ``auto``, ``cpu``, or what torch calls the accelerator.
    ``dtype``: ``bfloat16``, ``float16`` or ``float32``; by default that of the config.json.
    ``memory``: a rank's memory, such as ``"78GB"``; by default this node's.
    ``link``: the bytes per second between the ranks of predicted degrees, such as ``"450GB/s"``.
    ``seconds``: a measurement is repeated for so long, unless its spread is small earlier.
    ``timeout``: the seconds that a rank waits for the others.
    ``plan_file``: an architecture file of the user's own.
    """

    source: str | Path = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    tp: Taken[int | Sequence[int] | None, tuple[int, ...] | None] = default(None)
    predict_tp: Taken[int | Sequence[int], tuple[int, ...]] = default(())
    batch: Taken[int | Sequence[int], tuple[int, ...]] = default((1,))
    seq: Taken[int | Sequence[int], tuple[int, ...]] = default((512,))
    phase: Taken[str | Sequence[str], tuple[str, ...]] = default(("decode", "prefill"))
    ranks: int | None = None
    device: Taken[Device, str] = default("auto")
    dtype: Taken[Dtype | None, str | None] = default(None)
    memory: Taken[int | str | None, int | None] = default(None)
    link: Taken[float | str | None, float | None] = default(None)
    seconds: float = 3.0
    timeout: float = 600.0
    plan_file: Taken[str | Path | None, Path | None] = default(None)

    def __post_init__(self) -> None:
        if unknown := [phase for phase in self.phase if phase not in PHASES]:
            raise refused("phase", unknown[0], f"it is one of {', '.join(PHASES)}")
        if self.link is not None and not self.predict_tp:
            raise refused("link", None, "it is for predicted degrees", instead=({"predict_tp": "N"},))

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """All workloads: each phase with each batch and sequence length."""
        return tuple(Workload(p, b, s) for p in self.phase for b in self.batch for s in self.seq)


@dataclass(frozen=True)
class ProfileJob:
    """The job of one degree's ranks. ``plan`` has only the first layer of each kind; a measurement is repeated for
    ``seconds`` at most.
    """

    plan: Plan
    kinds: tuple[LayerKind, ...]
    workloads: tuple[Workload, ...]
    threads: int
    seconds: float


@dataclass(frozen=True)
class Span:
    """A stretch of a step on one rank."""

    part: str
    """``embedding``, ``layer 3``, ``head``, or empty if it belongs to no part."""
    what: str
    """``compute``, ``all-reduce`` or ``all-gather``."""
    nbytes: int
    """The bytes that this rank put into the collective."""
    seconds: float


ProfileStep = tuple[Span, ...]


@dataclass(frozen=True)
class Measured:
    """One rank's measurements of a workload, for the parts that ran: one layer of each kind."""

    steps: tuple[ProfileStep, ...]
    work: Mapping[str, tuple[float, float]]
    """For each part the operations of its multiplications, and the bytes that they read and write."""
    cache: Mapping[str, int]
    activations: int
    """The most bytes that lived at once besides weights and cache."""
    saved: Mapping[str, int]
    """With gradients, for each part the bytes that its forward pass keeps for the backward pass."""


@dataclass(frozen=True)
class RankResult:
    """The results of one rank of a degree. ``exchanges`` has the seconds of each all-reduce, by its bytes."""

    measured: Mapping[Workload, Measured]
    exchanges: Mapping[int, Sequence[float]]
    backend: str
    device: str
