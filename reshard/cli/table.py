"""A plan as a table that a person can read: what each rule does to its tensors, and the totals one decides by.

Pure: rows and totals are computed from a plan, text from rows and a width. Nothing is read or printed here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from formats.files.safetensors import DTYPE_BITS, tensor_bytes
from formats.notation.architecture import Architecture
from formats.notation.axes import Share
from reshard.engine.transfer import segments_of
from reshard.planning.model import Kind
from reshard.planning.plan import Entry, Layout, Plan

_SCALES = ("_scales", "_scale", "_scale_inv", ".scales", ".qzeros", ".g_idx", "_bias", ".bias")
_ACTIVATION_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class Row:
    """All tensors that one rule covers and that have one dtype and shape. Sizes in bytes.

    ``copies`` are the numbers of ranks that hold one element, increasing: 1 where nothing is held twice, the degree
    where everything is, something between where there are fewer KV heads than ranks, and (1, 2) where only the keys
    and values of a packed weight are on two. ``replicated`` counts the bytes of a rank that another holds too. Where
    ``is_uneven``, ranks have unequal parts; all that is said of a rank is said of the first, which has the most.
    """

    name: str
    rule: str
    kind: str
    dtype: str
    full: tuple[int, ...]
    local: tuple[int, ...]
    tensors: int
    copies: tuple[int, ...]
    bytes_full: int
    bytes_per_rank: int
    replicated: int
    is_uneven: bool


@dataclass(frozen=True)
class AllReduce:
    """The all-reduces of one pass: how many, and the bytes of one token that each rank puts into them together."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class Totals:
    """What a person decides by. Sizes in bytes; ``replicated`` are those on a rank that another rank holds too.

    Where ranks have unequal parts, ``bytes_per_rank`` is that of the largest, and ``bytes_least`` of the smallest.
    """

    tensors: int
    parameters: int
    bytes_full: int
    bytes_per_rank: int
    bytes_least: int
    replicated: int
    forward: AllReduce
    backward: AllReduce

    @property
    def share_replicated(self) -> float:
        """The part of a rank's bytes that another rank holds too, 0 to 1."""
        return self.replicated / self.bytes_per_rank if self.bytes_per_rank else 0.0


# --------------------------------------------------------------------------------------------------------- kinds


def kind_of(entry: Entry, architecture: Architecture) -> str:
    """``column``, ``row``, ``vocabulary``, ``replicated`` or, dealt expert by expert, ``whole``; for experts ``expert
    column`` and so on.

    Column-parallel: split along the output (or along its only dimension, as its bias is); row-parallel: along the
    input. Vocabulary: along the vocabulary, which is the output of an LM head and what an embedding is looked up by.
    """
    kind = _plain_kind(entry, architecture)
    of_experts = {axis for family in architecture.families.get("ep", ()) for axis in family}
    named = {segment[1:-1] for segment in entry.template.split(".") if segment.startswith("{")}
    return f"expert {kind}" if of_experts & (named | entry.layout.rule.axes) else kind


def _plain_kind(entry: Entry, architecture: Architecture) -> str:
    layout = entry.layout
    if layout.is_replicated:
        return "replicated"
    if not layout.parallel_dims:
        return "whole"
    axes = frozenset().union(*(layout.rule.dims[i].axes for i in layout.parallel_dims))
    if axes & {"vocab", *architecture.pad}:
        return "vocabulary"
    if axes <= {axis for family in architecture.families.get("ep", ()) for axis in family}:
        return "whole"
    return "row" if layout.rule.input_dims & layout.parallel_dims else "column"


def _output_size(entry: Entry) -> int:
    layout, rule = entry.layout, entry.layout.rule
    sizes = [length * dim.step // dim.per for length, dim in zip(layout.full, rule.dims, strict=True)]
    return math.prod(sizes[rule.arrow :]) if rule.arrow is not None else sizes[min(rule.input_dims) - 1]


# ---------------------------------------------------------------------------------------------------- rows, totals


def rows_of(plan: Plan) -> list[Row]:
    """One row for each rule, dtype and shape, in the order in which they occur in the checkpoint."""
    groups: dict[tuple[object, ...], list[Kind]] = {}
    for kind, entry in plan.laid.items():
        layout = entry.layout
        key = (_shown_name(entry), entry.dtype, layout.rule, layout.full, layout.parallel_dims, layout.dealt_by_name)
        groups.setdefault(key, []).append(kind)
    return [_row(plan, kinds) for kinds in groups.values()]


def _shown_name(entry: Entry) -> str:
    """The rule's line; with its own last word for what goes by the line of the quantized weight that it belongs to."""
    before, dot, last = entry.template.rpartition(".")
    own = entry.name.rpartition(".")[2]
    return entry.template if last.startswith("{") or last == "*" else f"{before}{dot}{own}"


def _row(plan: Plan, kinds: Sequence[Kind]) -> Row:
    entry = plan.laid[kinds[0]]
    layout, rank = entry.layout, min(entry.layout.boxes)
    count, local = sum(kind.count for kind in kinds), layout.boxes[rank].shape
    on_first = sum(kind.count for kind in kinds if 0 in plan.laid[kind].layout.boxes)
    counts = copies_of(layout, rank)
    shared = sum(length for copies, length in counts.items() if copies > 1)
    return Row(
        name=_shown_name(entry),
        rule=str(layout.rule),
        kind=kind_of(entry, plan.model.architecture),
        dtype=entry.dtype,
        full=layout.stored,
        local=local,
        tensors=count,
        copies=tuple(sorted(counts)),
        bytes_full=count * tensor_bytes(entry.name, entry.dtype, layout.stored),
        bytes_per_rank=on_first * tensor_bytes(entry.name, entry.dtype, local),
        replicated=on_first * shared * DTYPE_BITS[entry.dtype] // 8,
        is_uneven=len({box.shape for box in layout.boxes.values()}) > 1,
    )


def copies_of(layout: Layout, rank: int) -> Counter[int]:
    """How many ranks hold an element that ``rank`` holds -> how many such elements it has."""
    dims = []
    for i, padded in enumerate(layout.padded):
        segments = segments_of(layout.runs(i), (), padded, padded)
        dims.append([segment for segment in segments if rank in segment.sources])
    everyone = frozenset(layout.boxes)
    found: Counter[int] = Counter()
    for parts in itertools.product(*dims):
        holders = everyone.intersection(*(part.sources for part in parts))
        found[len(holders)] += math.prod(part.length for part in parts)
    return found


def totals_of(plan: Plan, rows: Sequence[Row]) -> Totals:
    """The sums of the rows, and the all-reduces of a token's way forward and back."""
    forward, backward = all_reduces(plan)
    per_rank = sum(row.bytes_per_rank for row in rows)
    return Totals(
        tensors=sum(row.tensors for row in rows),
        parameters=sum(row.tensors * math.prod(row.full) for row in rows),
        bytes_full=sum(row.bytes_full for row in rows),
        bytes_per_rank=per_rank,
        bytes_least=min(bytes_of_ranks(plan)) if plan.mesh.uneven else per_rank,
        replicated=sum(row.replicated for row in rows),
        forward=forward,
        backward=backward,
    )


def bytes_of_ranks(plan: Plan) -> list[int]:
    """The bytes of all tensors that each rank has."""
    found = [0] * plan.mesh.size
    alike = Counter[tuple[Layout, str]]()
    for kind, entry in plan.laid.items():
        alike[entry.layout, entry.dtype] += kind.count
    for (layout, dtype), count in alike.items():
        for rank, box in layout.boxes.items():
            found[rank] += count * tensor_bytes("", dtype, box.shape)
    return found


def uneven_lines(plan: Plan) -> list[str]:
    """``ff 2,880 = 7 x 384 + 192``: the parts of each axis that is dealt unevenly, in each size that it has."""
    degree, lines = dict(plan.mesh.degrees).get("tp", 1), []
    for axis, unit in plan.mesh.uneven:
        for size in sorted({sizes[axis] for sizes in plan.model.axis_sets() if axis in sizes}):
            parts = Counter(Share(degree, rank, unit).run(size).length for rank in range(degree))
            text = " + ".join(
                f"{count} x {length:,}" if count > 1 else f"{length:,}" for length, count in parts.items()
            )
            lines.append(f"{axis} {size:,} = {text}")
    return lines


def all_reduces(plan: Plan) -> tuple[AllReduce, AllReduce]:
    """What tensor parallelism adds up over the ranks for one token, forward and backward.

    With ``w`` the bytes of one activation (the checkpoint's own dtype; 2 for quantized weights) and ``d`` the output
    size of a weight:

        forward  = sum of d w over layers and their row-parallel weights
                   + one hidden vector for a vocabulary-parallel embedding
        backward = the same sum, since each block that ends in a row-parallel weight begins with column-parallel ones,
                   whose input gradient is added up
                   + one hidden vector for a vocabulary-parallel LM head

    (Megatron-LM, arXiv:1909.08053, section 3.) The experts of a layer count once: their outputs are added before the
    all-reduce. These are the bytes that each rank puts in; a ring over N ranks moves 2 (N - 1) / N times as many
    through each link. An engine may need fewer (parallel attention and MLP, or shared and routed experts, together),
    and a norm over heads that are split one number more.
    """
    width, architecture = activation_bytes(plan), plan.model.architecture
    blocks: dict[tuple[str, frozenset[int]], int] = {}
    vocabulary: dict[str, int] = {}
    for found, entry in plan.laid.items():
        layout = entry.layout
        if layout.is_replicated or len(layout.full) < 2 or entry.name.endswith(_SCALES):
            continue
        kind = _plain_kind(entry, architecture)
        if kind == "row":
            blocks[entry.template, found.layers] = _output_size(entry)
        elif kind == "vocabulary":
            vocabulary[entry.template] = max(n for i, n in enumerate(layout.full) if i not in layout.parallel_dims)
    sums = {(line, layer): size for (line, layers), size in blocks.items() for layer in layers or {None}}
    body, hidden = sum(sums.values()), max(vocabulary.values(), default=0)
    head = hidden if len(vocabulary) > 1 or plan.model.sizes.settings.get("tie_word_embeddings") is not False else 0
    return (
        AllReduce(len(sums) + (hidden > 0), (body + hidden) * width),
        AllReduce(len(sums) + (head > 0), (body + head) * width),
    )


def activation_bytes(plan: Plan) -> int:
    """Bytes of one activation: by the config's dtype, else by that of the largest floating-point weight, else 2."""
    settings = plan.model.sizes.settings
    named = str(settings.get("dtype") or settings.get("torch_dtype")).removeprefix("torch.")
    if named in _ACTIVATION_BYTES:
        return _ACTIVATION_BYTES[named]
    floats = [entry for entry in plan.laid.values() if entry.dtype in _ACTIVATION_BYTES]
    largest = max(floats, key=lambda entry: math.prod(entry.layout.full), default=None)
    return _ACTIVATION_BYTES[largest.dtype] if largest else 2


# ----------------------------------------------------------------------------------------------------------- text


def human_bytes(count: float) -> str:
    """``1.23 GB``, in decimal units as the Hub has them."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.995 or unit == "TB":
            break
    return f"{count:.2f} {unit}"


def plural(count: int, word: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def shape_text(shape: Sequence[int]) -> str:
    """``4096x1024``; ``scalar`` for no dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def format_table(rows: Sequence[Row], width: int | None) -> list[str]:
    """The table's lines, within ``width`` columns (None: as wide as it needs)."""
    cells = [("tensor", "rule", "kind", "dtype", "full -> rank", "tensors", "per rank")]
    notes: dict[str, str] = {}
    for row in rows:
        copies, note = _copies_text(row)
        notes |= {copies: note} if copies else {}
        notes |= {"uneven": "this is the first rank's part; the last ranks have less"} if row.is_uneven else {}
        change = shape_text(row.full) if row.full == row.local else f"{shape_text(row.full)} -> {shape_text(row.local)}"
        words = (row.kind, copies, "uneven" if row.is_uneven else "")
        kind, size = " ".join(filter(None, words)), human_bytes(row.bytes_per_rank)
        cells.append((row.name, row.rule or "scalar", kind, row.dtype, change, f"{row.tensors:,}", size))
    return _fit_columns(cells, width) + [f"{copies}: {note}" for copies, note in sorted(notes.items())]


def _copies_text(row: Row) -> tuple[str, str]:
    """How many ranks hold what a row's tensors have, in short and in words; empty where it goes without saying."""
    least, most = min(row.copies, default=1), max(row.copies, default=1)
    if most == 1 or row.kind.endswith("replicated"):
        return "", ""
    if least == most:
        return f"{most}x", f"each part is on {most} ranks"
    return f"{least}-{most}x", f"some of it is on {plural(least, 'rank')}, some on {most}"


def _fit_columns(cells: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """All columns if they fit, else without the dtype, else without the rule, too."""
    lines: list[str] = []
    for kept in ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 4, 5, 6), (0, 2, 4, 5, 6)):
        columns = [[line[i] for i in kept] for line in cells]
        elastic = [kept.index(i) for i in (0, 1) if i in kept]
        lines = align(columns, right=(len(kept) - 2, len(kept) - 1), width=width, elastic=elastic)
        if width is None or max(map(len, lines)) <= width:
            break
    return lines


def align(
    cells: Sequence[Sequence[str]], *, right: Sequence[int], width: int | None, elastic: Sequence[int] = ()
) -> list[str]:
    """Lay cells out in columns, two spaces apart; if too wide, ``elastic`` ones lose their beginning."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(elastic, key=lambda i: widths[i], default=None)
        if widest is None or widths[widest] <= 20:
            break
        widths[widest] -= 1
    lines = []
    for line in cells:
        shown = [_shorten(cell, widths[i]) for i, cell in enumerate(line)]
        padded = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(shown)]
        lines.append("  ".join(padded).rstrip())
    return lines


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[len(text) - width + 1 :]}"


def totals_lines(plan: Plan, totals: Totals) -> list[str]:
    """The totals, one a line."""
    ranks, width = plan.mesh.size, activation_bytes(plan)
    share = totals.bytes_per_rank / totals.bytes_full if totals.bytes_full else 0.0
    exact = f"{human_bytes(totals.bytes_per_rank)} ({totals.bytes_per_rank:,} bytes)"
    where, least = f"on each of {plural(ranks, 'rank')}", ""
    if totals.bytes_least < totals.bytes_per_rank:
        where = f"on the largest of {plural(ranks, 'rank')}"
        least = f"; {human_bytes(totals.bytes_least)} ({totals.bytes_least:,} bytes) on the smallest"
    pairs = [
        ("bytes per rank", f"{exact} {where}, {share:.1%} of {human_bytes(totals.bytes_full)}{least}"),
        ("replicated", f"{human_bytes(totals.replicated)} of that on other ranks too ({totals.share_replicated:.1%})"),
    ]
    full = plan.model.sizes.of({})
    for axis, size in plan.padding.items():
        pairs.append(("padding", f"{axis} {full[axis]:,} -> {size:,} with zeros; merge strips them"))
    pairs += [("uneven", line) for line in uneven_lines(plan)]
    if ranks > 1:
        for name, one_pass in (("forward", totals.forward), ("backward", totals.backward)):
            count, nbytes = plural(one_pass.count, "all-reduce"), human_bytes(one_pass.nbytes)
            pairs.append((name, f"{nbytes} a token in {count}, {width} bytes an activation"))
    wide = max(len(label) for label, _ in pairs)
    return [f"{label.ljust(wide)}  {text}" for label, text in pairs]


def row_document(row: Row) -> Mapping[str, Any]:
    """A row for ``--json``."""
    as_is: Callable[[tuple[int, ...]], list[int]] = list
    return {
        "tensor": row.name,
        "rule": row.rule,
        "kind": row.kind,
        "dtype": row.dtype,
        "full_shape": as_is(row.full),
        "rank_shape": as_is(row.local),
        "tensors": row.tensors,
        "copies": max(row.copies, default=1),
        "bytes_full": row.bytes_full,
        "bytes_per_rank": row.bytes_per_rank,
        "uneven": row.is_uneven,
        "bytes_replicated": row.replicated,
    }
