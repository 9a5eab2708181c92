"""The picture of a plan: one block of each kind, every weight as a rectangle to scale, with the part of each rank.

The page needs nothing else: no network, no script, no font.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.commands.plan import PossibleDegrees, totals_pairs
from reshard.formats.errors import NotationError
from reshard.formats.notation.axes import Dim, Run, merge_runs, segments
from reshard.mesh.plan import Layout, Plan
from reshard.mesh.stages import is_layered, layers_at
from reshard.mesh.totals import (
    activation_bytes,
    copies_of,
    is_summed,
    kind_of,
    output_size,
    rows_of,
    totals_of,
)
from reshard.model.model import Kind
from reshard.pages.markup import html_page
from reshard.text import human_bytes, plural, shape_text

LONGEST = 176
"""Units of the drawing for the longest side of the weights of one row: the width of a caption (11rem)."""
THINNEST = 6
LINE = 11
"""Units that a line of text takes."""
MOST_PARTS = 200
"""A side that is cut into more parts is drawn without cuts."""
MOST_SETS = 8
"""The most sets of ranks on which an expert is drawn."""

WIDTHS = {0.25: "¼ of the width", 0.5: "½", 1: "this width", 2: "2 x", 4: "4 x"}
"""The widths, relative to the model's, for which the time in collectives is drawn, and what they are called."""

RankSet = frozenset[int]


Drawn = dict[str, object]
"""Data for the template. A step, which a token comes to: the ``arrows`` before it, its ``drawings``, ``name``,
``words``, ``rule``, and the bytes that are ``summed``. A drawing of a weight to scale: ``words``, ``width``,
``height``, ``cells`` and, for a packed one, the ``lines`` between its parts, and their ``names`` with places. A cell,
which the same ranks hold: ``words``, its ``box`` (x, y, width, height), ``fill``, and ``kind``, its class.
"""


def plan_page(plan: Plan, source: str, degrees: PossibleDegrees, line: str = "reshard plan") -> str:
    """The text of the page. ``degrees`` are those that the model can have."""
    picture, totals = _Picture(plan), totals_pairs(plan, totals_of(plan, rows_of(plan)), degrees.rates)
    return html_page(
        "reshard/pages/plan_page.html", f"{source} on {plural(plan.mesh.size, 'rank')}, {plan.mesh}", line,
        totals=[("rules", plan.model.architecture.name), *totals],
        blocks=[(name, [[*picture.row(row)] for row in _modules(plan, kinds)]) for name, kinds in _blocks(plan)],
        patterns=[*picture.patterns()], legend=[*picture.legend()], ranks=plan.mesh.size, is_padded=bool(plan.padding),
        stages=_stages(plan), degrees=degrees.rows(), widths=[*WIDTHS.values()], shares=degrees.collectives([*WIDTHS]),
    )  # fmt: skip


def _stages(plan: Plan) -> list[tuple[str, str, str]]:
    """Stage, ranks and layers; nothing if there is one stage."""
    if plan.mesh.pp == 1:
        return []
    count = plan.mesh.size // plan.mesh.pp
    rows = []
    for stage, first in enumerate(range(0, plan.mesh.size, count)):
        where = f"ranks {first} to {first + count - 1}" if count > 1 else f"rank {first}"
        rows.append((f"stage {stage}", where, _layers("Layer", layers_at(plan.mesh, stage))))
    return rows


def _blocks(plan: Plan) -> list[tuple[str, list[Kind]]]:
    """Return the blocks to draw: the weights outside of the layers, and one layer of each kind, named by all that are
    like it.
    """
    architecture = plan.model.architecture
    order = {template: number for number, template in enumerate(architecture.tensors)}
    laid = sorted(plan.laid, key=lambda kind: order.get(kind.template, len(order)))
    stacks: dict[str, list[Kind]] = {}
    for kind in laid:  # of a tower's layers ``visual.blocks``; empty: in none
        in_tower = kind.template.partition(".{")[0] if kind.layers else ""
        stacks.setdefault("Layer" if is_layered(plan.model, kind) else in_tower, []).append(kind)
    outside = stacks.pop("", [])
    last = [k for k in outside if (where := architecture.stage_of(k.name)) is not None and where.text == "last"]
    first = [kind for kind in outside if kind not in last]
    drawn = [block for stack, kinds in stacks.items() for block in _layers_of(plan, stack, kinds)]
    named = [("Before the layers", _one_of_each(plan, first)), *drawn, ("After the layers", _one_of_each(plan, last))]
    return [(name, kinds) for name, kinds in named if kinds]


def _layers_of(plan: Plan, stack: str, laid: Sequence[Kind]) -> Iterator[tuple[str, list[Kind]]]:
    """One layer of each kind of a stack."""
    alike: dict[tuple[object, ...], tuple[list[Kind], list[int]]] = {}
    for layer in sorted({layer for kind in laid for layer in kind.layers}):
        kinds = [kind for kind in laid if layer in kind.layers]
        key = tuple((kind.template, plan.laid[kind].rule, kind.shape, kind.dtype) for kind in kinds)
        alike.setdefault(key, (kinds, []))[1].append(layer)
    for kinds, layers in alike.values():
        stages = sorted({min(kind.stages) for kind in kinds if kind.stages})
        where = f", as on stage {stages[0]}" if stages else ""
        yield f"{_layers(stack, layers)}{where}", _one_of_each(plan, kinds)


_ATTENTION = re.compile(r"att|mixer|mamba|conv|ssm|linear|recurrent|temporal|lru|qkv")
_SECOND_NORM = re.compile(r"post|pre_f|pre_m|ffn|feed|mlp|ff|2")


def _modules(plan: Plan, kinds: Sequence[Kind]) -> list[list[Kind]]:
    """Return the weights of a layer in the order in which a token comes to them: those of the attention, or of what
    replaces it, then those of the MLP or the experts; in each, the norm first, and the weight before the all-reduce
    last.
    """
    if not any(kind.layers for kind in kinds):
        return [[*kinds]]
    stems = {kind: re.sub(r"[._](weight|bias)$", "", _in_layer(kind)) for kind in kinds}  # of a bias its weight's
    summed = {stems[kind] for kind in kinds if is_summed(plan, kind)}
    modules = {kind: stem.rpartition(".")[0] for kind, stem in stems.items()}
    shared = {module for module in modules.values() if module}
    whole = {module for module in shared if all(plan.laid[k].is_replicated for k in kinds if modules[k] == module)}
    places = [*dict.fromkeys(modules.values())]

    def row(kind: Kind) -> int:
        first = stems[kind].partition(".")[0]
        if not modules[kind] and len(kind.shape) < 2:
            return 1 if _SECOND_NORM.search(first) else 0
        return 0 if _ATTENTION.search(first) else 1

    def place(kind: Kind) -> tuple[object, ...]:
        module = modules[kind]
        is_whole = len(kind.shape) > 1 and plan.laid[kind].is_replicated
        is_router = bool(module) and is_whole and stems[kind] not in summed
        return bool(module), module not in whole, places.index(module), stems[kind] in summed, not is_router

    rows = [sorted((kind for kind in kinds if row(kind) == number), key=place) for number in (0, 1)]
    return [members for members in rows if members]


def _in_layer(kind: Kind) -> str:
    """The name of a tensor in its layer; of one that is in no layer, the whole name."""
    return re.sub(r"^[^{]*\{\w+\}\.", "", kind.template) if kind.layers else kind.template


def _one_of_each(plan: Plan, kinds: Sequence[Kind]) -> list[Kind]:
    """One kind for each rule, shape and cut."""
    first: dict[tuple[object, ...], Kind] = {}
    for kind in kinds:
        layout = plan.laid[kind]
        first.setdefault((kind.template, layout.full, kind.dtype, layout.dealt_by_name), kind)
    return [*first.values()]


def _layers(stack: str, numbers: Sequence[int]) -> str:
    """``Layer 3``, ``Layers 0 to 2, 5``, ``visual.blocks 0 to 26``."""
    runs = merge_runs(Run(number, 1) for number in sorted(numbers))
    texts = [str(run.offset) if run.length == 1 else f"{run.offset} to {run.end - 1}" for run in runs]
    ellipsis = ", …" if len(texts) > 8 else ""
    several = "s" if stack == "Layer" and len(numbers) > 1 else ""
    return f"{stack}{several} {', '.join(texts[:8])}{ellipsis}"


@dataclass
class _Picture:
    """Draws weights, and remembers which sets of ranks need a pattern."""

    plan: Plan
    shared: dict[RankSet, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = self.plan.mesh.size // self.plan.mesh.pp
        self.stages = [frozenset(range(first, first + size)) for first in range(0, self.plan.mesh.size, size)]

    def colour(self, rank: int) -> str:
        """Return a rank's colour, which differs from those of other ranks, and is seen on light and dark."""
        count = self.plan.mesh.size
        hue = rank * 360 / count if count <= 8 else rank * 137.5  # neighbours are never alike
        return f"hsl({hue % 360:.0f} 62% {52 if rank % 2 else 60}%)"

    def fill(self, ranks: RankSet) -> str:
        """The fill of what these ranks hold."""
        if len(ranks) == 1:
            return self.colour(next(iter(ranks)))
        ranks = self.stages[0] if ranks in self.stages else ranks
        return f"url(#{self.shared.setdefault(ranks, f'shared-{len(self.shared)}')})"

    def patterns(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Return stripes for weights that several ranks hold: in their colours, or grey if all ranks hold them."""
        for ranks, name in self.shared.items():
            is_all = ranks in self.stages or len(ranks) > 8
            yield name, [] if is_all else [self.colour(rank) for rank in sorted(ranks)]

    def legend(self) -> Iterator[tuple[str | None, str]]:
        """Yield the fills with their meanings."""
        for rank in range(min(self.plan.mesh.size, 16)):
            yield self.colour(rank), f"rank {rank}"
        if self.plan.mesh.size > 16:
            yield None, f"… to rank {self.plan.mesh.size - 1}"
        for ranks, name in self.shared.items():
            if ranks in self.stages:
                yield f"url(#{name})", f"on every rank{' of a stage' if len(self.stages) > 1 else ''}"
            elif len(self.shared) <= 12:
                yield f"url(#{name})", f"on ranks {', '.join(map(str, sorted(ranks)))}"

    def row(self, kinds: Sequence[Kind]) -> Iterator[Drawn]:
        """The weights of a module in their order: arrows to the row-parallel ones, a mark at each all-reduce."""
        plan = self.plan
        scale = LONGEST / max(side.length for kind in kinds for side in _sides(plan.laid[kind])[0])
        is_cut = any(plan.laid[kind].parallel_dims for kind in kinds)
        begin = next((kind for kind in kinds if is_cut and kind.layers and len(kind.shape) > 1), None)
        experts = next((kind for kind in kinds if kind.places), None)
        for kind in kinds:
            layout, arrows = plan.laid[kind], list[str]()  # they stand before what they lead to, also in a new line
            what = kind_of(plan, kind)
            if what == "whole" and frozenset(layout.boxes) in self.stages:
                what = "replicated"
            sums = is_summed(plan, kind) and plan.mesh.size > 1
            if kind is begin and plan.mesh.size > 1:
                arrows.append("x →")
            if kind is experts:
                yield self._experts(kind, arrows)
                arrows = []
            if sums:
                arrows.append("→")
            is_looked_up = what == "vocabulary" and "embed" in kind.name and plan.mesh.size > 1
            outputs = output_size(layout) if sums else min(layout.full) if is_looked_up else 0
            summed = human_bytes(outputs * activation_bytes(plan)) if outputs else None
            yield self._weight(kind, layout, what, scale) | {"arrows": arrows, "summed": summed}

    def _alike(self, kind: Kind) -> dict[RankSet, list[Kind]]:
        """The tensors of a layer that differ from one in the expert alone, by the ranks that hold them."""
        by_ranks: dict[RankSet, list[Kind]] = {}
        for other, layout in self.plan.laid.items():
            if other.template == kind.template and other.layers & kind.layers:
                by_ranks.setdefault(frozenset(layout.boxes), []).append(other)
        return by_ranks

    def _experts(self, kind: Kind, arrows: Sequence[str]) -> Drawn:
        """Draw the experts of each rank, if each expert is a tensor of its own."""
        alike = self._alike(kind)
        counts = {ranks: sum(tensor.count // max(1, len(tensor.layers)) for tensor in alike[ranks]) for ranks in alike}
        total, x, cells = sum(counts.values()), 0.0, list[Drawn]()
        for ranks, count in counts.items():
            words, width = f"{plural(count, 'expert')} on {_ranks(ranks)}", count * 120 / total
            box = f"{x:.1f}", "0", f"{width:.1f}", "16"
            cells.append({"words": words, "box": box, "fill": self.fill(ranks), "kind": "cell"})
            x += width
        words = "; ".join(f"{count} on {_ranks(ranks)}" for ranks, count in [*counts.items()][:4])
        tail = "; …" if len(counts) > 4 else ""
        drawing = {"words": None, "width": "120", "height": "16", "cells": cells, "lines": (), "names": ()}
        step: Drawn = {"arrows": arrows, "drawings": [drawing], "name": f"{total} experts", "words": words + tail}
        return step | {"rule": None, "summed": None}

    def _weight(self, kind: Kind, layout: Layout, what: str, scale: float) -> Drawn:
        """A weight; of experts that are dealt by name, one for each set of ranks."""
        kinds = [kinds[0] for kinds in self._alike(kind).values()] if layout.dealt_by_name else [kind]
        limit = f", drawn for {MOST_SETS} of {len(kinds)} sets of ranks" if len(kinds) > MOST_SETS else ""
        times = f", {kind.count} of them" if kind.count > max(1, len(kind.layers)) else ""
        copies = max(copies_of(layout, min(layout.boxes)))
        shared = f", parts on {copies} ranks" if 1 < copies < len(layout.boxes) else ""
        words = f"{what} · {shape_text(layout.stored)}{_sides(layout)[1]}{times}{shared}{limit} "
        drawings = [self._drawing(drawn, scale) for drawn in kinds[:MOST_SETS]]
        name = _in_layer(kind).removesuffix(".weight")
        return {"drawings": drawings, "name": name, "words": words, "rule": str(layout.rule)}

    def _drawing(self, kind: Kind, scale: float) -> Drawn:
        layout = self.plan.laid[kind]
        down, right = sides = _sides(layout)[0]
        height, width = (f"{max(THINNEST, side.length * scale):.1f}" for side in sides)
        cells = []
        for (rows, some), (columns, others) in itertools.product(_segments(down), _segments(right)):
            if not (ranks := some & others):
                continue
            (y, high), (x, wide) = _drawn(down, rows, scale), _drawn(right, columns, scale)
            place, fill = f"{_ranks(ranks)}: {_extent('rows', rows)}, {_extent('columns', columns)}", None
            if rows.offset >= down.full or columns.offset >= right.full:
                words, look = f"padding with zeros, {place}", "padding"
            else:
                shapes = f"{shape_text(layout.stored)}; {shape_text(layout.boxes[min(ranks)].shape)} on {_ranks(ranks)}"
                words, fill = f"{place}\n{kind.name}\n{layout.rule}\n{shapes}", self.fill(ranks)
                look = "thin cell" if min(wide, high) < 4 else "cell"
            box = [f"{number:.2f}" for number in (x, y, wide, high)]
            cells.append({"words": words, "box": box, "fill": fill, "kind": look})
        lines, names = self._packed(layout, down, scale)
        words = f"{kind.name}\n{layout.rule}\n{shape_text(layout.stored)}"
        return {"words": words, "width": width, "height": height, "cells": cells, "lines": lines, "names": names}

    def _packed(self, layout: Layout, down: _RectangleSide, scale: float) -> tuple[list[str], list[tuple[str, str]]]:
        """Return the lines between the parts of a packed weight, and the places and names of the parts."""
        lines, names, offset = list[str](), list[tuple[str, str]](), 0.0
        dim = layout.rule.dims[down.dim] if layout.rule.dims and down.dim is not None else None
        if dim is None or len(dim.summands) < 2 or dim.counted != (1, 1):
            return lines, names
        try:
            sizes = self.plan.model.sizes.of({})
            lengths = [Dim((summand,)).size(sizes) for summand in dim.summands]
        except NotationError:  # sizes that depend on the layer
            return lines, names
        for summand, length in zip(dim.summands, lengths, strict=True):
            if offset:
                lines.append(f"{offset * scale:.2f}")
            if length * scale >= LINE:
                names.append((f"{(offset + length / 2) * scale + 3:.2f}", summand.label or str(summand)))
            offset += length
        return lines, names


class _RectangleSide(NamedTuple):
    """A side of a rectangle: the dimension that it is, its length with padding and without, and each rank's runs."""

    dim: int | None
    length: int
    full: int
    runs: Sequence[tuple[Run, ...]]


def _sides(layout: Layout) -> tuple[Sequence[_RectangleSide], str]:
    """Return the last two dimensions of a tensor, and a note on the others. A leading dimension that is cut takes the
    place of the first of the two.
    """
    dims = [*range(len(layout.full))][-2:]
    cut = [dim for dim in layout.parallel_dims if dim not in dims]
    if cut and len(dims) == 2:
        dims[0] = cut[0]
    outer = [length for dim, length in enumerate(layout.full) if dim not in dims]
    sides = [_RectangleSide(dim, layout.padded[dim], layout.full[dim], layout.runs(dim)) for dim in dims]
    everyone = [((Run(0, 1),) if rank in layout.boxes else ()) for rank in range(layout.ranks)]
    sides = [_RectangleSide(None, 1, 1, everyone)] * (2 - len(sides)) + sides  # a vector is drawn as a bar
    first, arrow = sides[0].dim, layout.rule.arrow
    if arrow is not None and first is not None and first < arrow:
        sides.reverse()  # the input is stored first, but drawn from left to right as always
    return sides, f", drawn once for {shape_text(outer)}" if outer else ""


def _segments(side: _RectangleSide) -> list[tuple[Run, RankSet]]:
    """A side, cut wherever another set of ranks holds it, and where the padding begins."""
    cut = [*segments(dict(enumerate(side.runs)), (0, side.length, min(side.full, side.length)))]
    if len(cut) >= MOST_PARTS:
        return [(Run(0, side.length), frozenset(rank for rank, runs in enumerate(side.runs) if runs))]
    return cut


def _drawn(side: _RectangleSide, run: Run, scale: float) -> tuple[float, float]:
    """Return the begin and the length of a run in a drawing."""
    if side.length * scale <= THINNEST:
        return 0.0, THINNEST
    return run.offset * scale, max(0.5, run.length * scale)


def _extent(what: str, run: Run) -> str:
    return f"{what} {run.offset:,} to {run.end - 1:,}"


def _ranks(ranks: RankSet) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
