"""The bytes that ranks send each other for a token, against what they compute: how much a wider mesh costs.

Pure: computed from a plan. Nothing is measured: no latency, no overlap, and no attention between tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.mesh.plan import Plan
from reshard.mesh.totals import activation_bytes, all_reduces, is_weight

CHOSEN = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts", "moe_topk", "moe_top_k",
    "moe_k", "num_selected_experts",
)  # fmt: skip
"""The settings of config.json that say how many experts compute a token."""


@dataclass(frozen=True)
class Rates:
    """The speeds at which a rank sends and computes. The defaults are those of an H100: NVLink, and dense BF16."""

    link: float = 450e9
    """Bytes per second that a rank sends."""
    flops: float = 990e12
    """Operations per second."""


@dataclass(frozen=True)
class Traffic:
    """The bytes that a rank sends and the operations that it computes for one token of its own in the forward pass.

    It is the mean over the ranks.
    """

    sent: Mapping[str, float]
    """Bytes by dimension of the mesh: the all-reduces of ``tp`` in a ring, the tokens that go to experts on other ranks
    of ``ep`` and come back, the hidden vectors between the stages of ``pp``.
    """
    flops: float
    """Two operations for each number of a weight that the token meets."""

    @property
    def nbytes(self) -> float:
        """All bytes that the rank sends."""
        return sum(self.sent.values())

    def share(self, rates: Rates, width: float = 1) -> float:
        """The part of the time that goes into sending, 0 to 1, if a rank does one after the other.

        In a model of so many times the width, sizes of vectors grow with it, and sizes of weights with its square.
        """
        sending, computing = self.nbytes / rates.link, self.flops * width / rates.flops
        return sending / (sending + computing) if sending else 0.0


def traffic_of(plan: Plan) -> Traffic | None:
    """The traffic of a plan; None if config.json does not say how many experts compute a token.

    With ``ep`` apart from ``tp``, ranks have tokens of their own, as with data-parallel attention: each goes to the
    ranks of its experts, which are equally busy. On the same ranks all have all tokens, and sum up.
    """
    mesh, architecture, settings = plan.mesh, plan.model.architecture, plan.model.sizes.settings
    degrees = {**dict.fromkeys(("tp", "ep", "pp"), 1), **dict(mesh.degrees)}
    ep, width = 1 if mesh.same_ranks else degrees["ep"], activation_bytes(plan)
    experts = {kind: kind.axes & architecture.expert_axes for kind in plan.laid}
    chosen, used = _chosen(settings), 1.0
    if any(experts.values()):
        counts = plan.model.sizes.counts
        count = max(kind.sizes.get(axis, counts.get(axis, 0)) for kind, axes in experts.items() for axis in axes)
        if chosen is None or not count:
            return None
        used = chosen / count * ep
    weights = [kind for kind in plan.laid if is_weight(plan, kind)]
    vocabulary = {"vocab", *architecture.pad}
    tables = [kind for kind in weights if kind.rule.axes & vocabulary]
    # an embedding is looked up: of embedding and head, and of a second embedding, one is multiplied with
    head = max(tables, key=lambda kind: ("vocab" in kind.axes, kind.name.endswith("head.weight")), default=None)
    met = (kind for kind in weights if kind is head or kind not in tables)
    numbers = sum(plan.laid[kind].numbers * kind.count * (used if experts[kind] else 1) for kind in met) / mesh.size
    dims = zip(plan.laid[head].full, plan.laid[head].rule.dims, strict=True) if head is not None else ()
    hidden = max((length for length, dim in dims if not dim.axes & vocabulary), default=0)
    layers = frozenset[int]().union(*(kind.layers for kind, axes in experts.items() if axes))
    into_experts = _ring(degrees["ep"]) if mesh.same_ranks else _ring(ep) * (chosen or 0)
    sent = {
        "tp": _ring(degrees["tp"]) * all_reduces(plan)[0].nbytes / mesh.pp,
        "ep": into_experts * len(layers) * hidden * width / mesh.pp,
        "pp": hidden * width * (mesh.pp - 1) / mesh.pp,
    }
    return Traffic({name: nbytes for name, nbytes in sent.items() if degrees[name] > 1}, 2 * numbers)


def _ring(ranks: int) -> float:
    """The bytes that a rank sends for each byte that a ring sums, or that goes to another rank and back."""
    return 2 * (ranks - 1) / ranks


def _chosen(settings: Mapping[str, object]) -> int | None:
    """The experts that compute a token, by config.json or a part of it."""
    parts = [settings, *(part for part in settings.values() if isinstance(part, Mapping))]
    found = (part[key] for part in parts for key in CHOSEN if isinstance(part.get(key), int))
    return next(found, None)
