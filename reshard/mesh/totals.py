"""Totals by which a person decides: the split of each rule's tensors, bytes per rank, replication, all-reduces.

Pure: computed from a plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reshard.formats.files.safetensors import DTYPE_BITS, DTYPE_NAMES, stated_dtype, tensor_bytes
from reshard.formats.notation.axes import segments
from reshard.mesh.plan import Layout, Plan
from reshard.model.model import Kind

_SCALES = ("_scales", "_scale", "_scale_inv", ".scales", ".qzeros", ".g_idx", "_bias", ".bias")


@dataclass(frozen=True)
class Row:
    """All tensors that one rule covers and that have one dtype and shape. Sizes are in bytes; those of a rank are of
    the rank that has the most.
    """

    name: str
    rule: str
    kind: str
    dtype: str
    full: tuple[int, ...]
    local: tuple[int, ...]
    tensors: int
    copies: tuple[int, ...]
    """The numbers of ranks that hold one element, increasing: (1) if nothing is replicated, the degree if everything
    is, a number between if there are fewer KV heads than ranks, and (1, 2) if only the keys and values of a packed
    weight are on two ranks.
    """
    bytes_full: int
    bytes_per_rank: int
    replicated: int
    """The bytes of a rank that another rank holds too."""
    is_uneven: bool
    """Whether ranks have unequal parts."""


@dataclass(frozen=True)
class AllReduce:
    """The all-reduces of one pass: how many, and the bytes of one token that each rank puts into them together."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class Totals:
    """Totals by which a person decides. Sizes are in bytes."""

    tensors: int
    parameters: int
    bytes_full: int
    bytes_per_rank: int
    """The bytes on the largest rank."""
    bytes_least: int
    """The bytes on the smallest rank."""
    replicated: int
    """The bytes on a rank that another rank holds too."""
    forward: AllReduce
    backward: AllReduce

    @property
    def share_replicated(self) -> float:
        """The part of a rank's bytes that another rank holds too, 0 to 1."""
        return self.replicated / self.bytes_per_rank if self.bytes_per_rank else 0.0


def kind_of(plan: Plan, kind: Kind) -> str:
    """``column``, ``row``, ``vocabulary``, ``replicated`` or, dealt expert by expert, ``whole``; for experts ``expert
    column`` and so on.

    Column-parallel: split along the output (or along its only dimension, as its bias is); row-parallel: along the
    input. Vocabulary: along the vocabulary, which is the output of an LM head and what an embedding is looked up by.
    """
    layout, architecture = plan.laid[kind], plan.model.architecture
    what: str = "replicated" if layout.is_replicated else "column" if layout.split == "vector" else layout.split
    if layout.dealt & layout.rule.axes & {"vocab", *architecture.pad}:
        what = "vocabulary"
    return f"expert {what}" if kind.axes & architecture.expert_axes else what


def is_summed(plan: Plan, kind: Kind) -> bool:
    """Whether the outputs of a tensor are summed over the ranks: it is a row-parallel weight, and neither a bias nor a
    scale.
    """
    return is_weight(plan, kind) and kind_of(plan, kind).endswith("row")


def is_weight(plan: Plan, kind: Kind) -> bool:
    """Whether a tensor is a matrix or a kernel: neither a vector nor a scale."""
    return len(plan.laid[kind].full) > 1 and not kind.name.endswith(_SCALES)


def output_size(layout: Layout) -> int:
    """The number of outputs of a weight for one token."""
    rule = layout.rule
    sizes = [length * dim.step // dim.per for length, dim in zip(layout.full, rule.dims, strict=True)]
    return math.prod(sizes[rule.arrow :]) if rule.arrow is not None else sizes[min(rule.input_dims) - 1]


# ---------------------------------------------------------------------------------------------------- rows, totals


def rows_of(plan: Plan) -> list[Row]:
    """One row for each rule, dtype and shape, in the order in which they occur in the checkpoint."""
    groups: dict[tuple[str, object, object, object, object, object], list[Kind]] = {}
    for kind, layout in plan.laid.items():
        prefix, dot, last = kind.template.rpartition(".")
        # the rule's line; with its own last word for what goes by the line of the quantized weight that it belongs to
        is_general = last.startswith("{") or last == "*"
        name = kind.template if is_general else f"{prefix}{dot}{kind.name.rpartition('.')[2]}"
        key = (name, kind.dtype, layout.rule, layout.full, layout.parallel_dims, layout.dealt_by_name)
        groups.setdefault(key, []).append(kind)
    # the rank that has the most: the first, but for pipeline stages
    nbytes = bytes_of_ranks(plan) if plan.mesh.pp > 1 else [0]
    largest = nbytes.index(max(nbytes))
    rows = []
    for (name, *_), kinds in groups.items():
        first, layout = kinds[0], plan.laid[kinds[0]]
        rank = min(layout.boxes)
        count, local = sum(kind.count for kind in kinds), layout.boxes[rank].shape
        count_there = sum(kind.count for kind in kinds if largest in plan.laid[kind].boxes)
        counts = copies_of(layout, rank)
        shared = sum(length for copies, length in counts.items() if copies > 1)
        row = Row(
            name=name,
            rule=str(layout.rule),
            kind=kind_of(plan, first),
            dtype=first.dtype,
            full=layout.stored,
            local=local,
            tensors=count,
            copies=tuple(sorted(counts)),
            bytes_full=count * tensor_bytes(first.name, first.dtype, layout.stored),
            bytes_per_rank=count_there * tensor_bytes(first.name, first.dtype, local),
            replicated=count_there * shared * DTYPE_BITS[first.dtype] // 8,
            is_uneven=len({box.shape for box in layout.boxes.values()}) > 1,
        )
        rows.append(row)
    return rows


def copies_of(layout: Layout, rank: int) -> Counter[int]:
    """Count the elements of ``rank`` by the number of ranks that hold them."""
    dims = [segments(dict(enumerate(layout.runs(i)))) for i in range(len(layout.padded))]
    parts_of = [[(ranks, run.length) for run, ranks in parts if rank in ranks] for parts in dims]
    everyone = frozenset(layout.boxes)
    counts: Counter[int] = Counter()
    for parts in itertools.product(*parts_of):
        holders = everyone.intersection(*(ranks for ranks, _ in parts))
        counts[len(holders)] += math.prod(length for _, length in parts)
    return counts


def totals_of(plan: Plan, rows: Sequence[Row]) -> Totals:
    """The sums of the rows, and the all-reduces of one token in the forward and backward pass."""
    forward, backward = all_reduces(plan)
    per_rank = sum(row.bytes_per_rank for row in rows)
    return Totals(
        tensors=sum(row.tensors for row in rows),
        parameters=sum(row.tensors * math.prod(row.full) for row in rows),
        bytes_full=sum(row.bytes_full for row in rows),
        bytes_per_rank=per_rank,
        bytes_least=min(bytes_of_ranks(plan)) if plan.mesh.uneven or plan.mesh.pp > 1 else per_rank,
        replicated=sum(row.replicated for row in rows),
        forward=forward,
        backward=backward,
    )


def bytes_of_ranks(plan: Plan) -> list[int]:
    """The bytes of all tensors that each rank has."""
    nbytes = [0] * plan.mesh.size
    alike = Counter[tuple[Layout, str]]()
    for kind, layout in plan.laid.items():
        alike[layout, kind.dtype] += kind.count
    for (layout, dtype), count in alike.items():
        for rank, box in layout.boxes.items():
            nbytes[rank] += count * tensor_bytes("", dtype, box.shape)
    return nbytes


def all_reduces(plan: Plan) -> tuple[AllReduce, AllReduce]:
    """The all-reduces of tensor parallelism for one token, forward and backward.

    With ``w`` the bytes of one activation (the checkpoint's own dtype; 2 for quantized weights) and ``d`` the output
    size of a weight:

        forward  = sum of d w over layers and their row-parallel weights
                   + one hidden vector for a vocabulary-parallel embedding, and what a second one puts out
        backward = the same sum, since each block that ends in a row-parallel weight begins with column-parallel ones,
                   whose input gradient is added up
                   + one hidden vector for a vocabulary-parallel LM head

    (Megatron-LM, arXiv:1909.08053, section 3.) The experts of a layer count once: their outputs are added before the
    all-reduce. These are the bytes of each rank's input; a ring over N ranks moves 2 (N - 1) / N times as many through
    each link. An engine may need fewer (parallel attention and MLP, or shared and routed experts, together), and a norm
    over heads that are split one number more.
    """
    width, laid = activation_bytes(plan), plan.laid
    blocks = {(kind.template, kind.layers): output_size(laid[kind]) for kind in laid if is_summed(plan, kind)}
    weights = [kind for kind in laid if is_weight(plan, kind)]
    tables = {kind.template: laid[kind] for kind in weights if kind_of(plan, kind) == "vocabulary"}
    sums = {(line, layer): size for (line, layers), size in blocks.items() for layer in layers or {None}}
    of_text = frozenset().union(*(table.rule.axes for table in tables.values() if "vocab" in table.rule.axes))
    # Embedding and head have a vocabulary or a width in common. A second embedding (Gemma's, by layers) has neither.
    first, second = list[int](), list[int]()  # the elements that each puts out for one token
    for table in tables.values():
        outputs = max(n for i, n in enumerate(table.full) if i not in table.parallel_dims)
        (second if of_text and not table.rule.axes & of_text else first).append(outputs)
    body, hidden = sum(sums.values()), max(first, default=0)
    head = hidden if len(first) > 1 or plan.model.sizes.settings.get("tie_word_embeddings") is not False else 0
    return (
        AllReduce(len(sums) + (hidden > 0) + len(second), (body + hidden + sum(second)) * width),
        AllReduce(len(sums) + (head > 0), (body + head) * width),
    )


def activation_bytes(plan: Plan) -> int:
    """The bytes of one activation: by the config's dtype, or else the dtype of the largest floating-point weight, or
    else 2.
    """
    floats = [kind for kind in plan.laid if kind.dtype in DTYPE_NAMES]
    largest = max(floats, key=lambda kind: math.prod(plan.laid[kind].full), default=None)
    dtype = stated_dtype(plan.model.sizes.settings) or (largest.dtype if largest else "BF16")
    return DTYPE_BITS[dtype] // 8
