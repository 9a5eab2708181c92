"""The picture of a plan: one block of each kind, every weight as a rectangle to scale, with what each rank holds of it.

The page needs nothing else: no network, no script, no font.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.notation.axes import Dim, Run, segments
from reshard.mesh.plan import Entry, Layout, Plan
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
from reshard.pages.markup import Html, element, facts, html_page, joined, table
from reshard.text import human_bytes, plural

LONGEST = 176
"""Units of the drawing for the longest side of the weights of one row: the width of a caption (11rem)."""
THINNEST = 6
LINE = 11
"""Units that a line of text takes."""
MOST_PARTS = 200
"""A side that is cut into more parts is drawn without cuts."""
MOST_SETS = 8
"""An expert is drawn on so many sets of ranks at most."""

Ranks = frozenset[int]


@dataclass(frozen=True)
class Degree:
    """A degree, whether it is possible, and what there is to say: bytes per rank, or why not."""

    degree: int
    is_possible: bool
    remark: str


def plan_page(plan: Plan, source: str, degrees: Sequence[Degree]) -> str:
    """The text of the page."""
    title = f"{source} on {plural(plan.mesh.size, 'rank')}, {plan.mesh}"
    picture = _Picture(plan)
    blocks = _blocks(plan)
    parts = [
        element("header", element("h1", title)),
        _totals(plan),
        element("h2", "What is cut where"),
        _introduction(),
        *(picture.block(name, kinds) for name, kinds in blocks),
        _stages(plan),
        _degrees(degrees),
    ]
    legend = element("div", *picture.legend(), class_="legend")
    defs = element("svg", element("defs", *picture.patterns()), width="0", height="0", aria_hidden="true")
    style = (Path(__file__).parent / "plan_page.css").read_text(encoding="utf-8")
    return html_page("reshard plan", title, style, *parts[:4], element("div", defs, legend), *parts[4:])


def _totals(plan: Plan) -> Html:
    totals = totals_of(plan, rows_of(plan))
    pairs = [
        ("rules", plan.model.architecture.name),
        ("all weights", human_bytes(totals.bytes_full)),
        ("a rank holds", human_bytes(totals.bytes_per_rank)),
        ("of that on other ranks too", f"{human_bytes(totals.replicated)} ({totals.share_replicated:.1%})"),
    ]
    if plan.mesh.size > 1:
        for name, one in (("forward", totals.forward), ("backward", totals.backward)):
            pairs.append((name, f"{human_bytes(one.nbytes)} a token in {plural(one.count, 'all-reduce')}"))
    return facts(pairs)


def _introduction() -> Html:
    return joined(
        element(
            "p",
            "Each rectangle is a weight: outputs from top to bottom, inputs from left to right, those of one row "
            "to one scale. A colour is what one rank holds. A weight that is cut from top to bottom (column-parallel) "
            "takes the whole input and gives a rank a part of the outputs; the next one is cut from left to right "
            "(row-parallel): it takes just that part, and the ranks add up what comes out, in one all-reduce. x is the "
            "whole input, which every rank has.",
        ),
        element("p", "Point at a part to see which rows and columns it is, and of which rank.", class_="muted"),
    )


def _blocks(plan: Plan) -> list[tuple[str, list[Kind]]]:
    """What is drawn: what stands outside of the layers, and one layer of each kind, named by all that are like it."""
    architecture = plan.model.architecture
    order = {template: number for number, template in enumerate(architecture.tensors)}
    laid = sorted(plan.laid, key=lambda kind: order.get(kind.template, len(order)))
    stacks: dict[str, list[Kind]] = {}
    for kind in laid:
        stacks.setdefault(_stack(plan, kind), []).append(kind)
    outside = stacks.pop("", [])
    behind = [where is not None and where.text == "last" for where in (architecture.stage_of(k.name) for k in outside)]
    first, last = ([k for k, is_behind in zip(outside, behind, strict=True) if is_behind is side]
                   for side in (False, True))  # fmt: skip
    drawn = [block for stack, kinds in stacks.items() for block in _layers_of(plan, stack, kinds)]
    named = [("Before the layers", _one_of_each(plan, first)), *drawn, ("After the layers", _one_of_each(plan, last))]
    return [(name, kinds) for name, kinds in named if kinds]


def _stack(plan: Plan, kind: Kind) -> str:
    """The name of the layers that a tensor is in, as ``Layer`` or, of a tower's, ``visual.blocks``; empty: in none."""
    if is_layered(plan.model, kind):
        return "Layer"
    return kind.template.partition(".{")[0] if kind.layers else ""


def _layers_of(plan: Plan, stack: str, laid: Sequence[Kind]) -> Iterator[tuple[str, list[Kind]]]:
    """One layer of each kind of a stack."""
    alike: dict[tuple[Kind, ...], list[int]] = {}
    for layer in sorted({layer for kind in laid for layer in kind.layers}):
        alike.setdefault(tuple(kind for kind in laid if layer in kind.layers), []).append(layer)
    shapes: dict[tuple[object, ...], tuple[tuple[Kind, ...], list[int]]] = {}
    for kinds, layers in alike.items():
        key = tuple((kind.template, plan.laid[kind].layout.rule, kind.shape, kind.dtype) for kind in kinds)
        shapes.setdefault(key, (kinds, []))[1].extend(layers)
    for kinds, layers in shapes.values():
        stages = sorted({min(kind.stages) for kind in kinds if kind.stages})
        where = f", as on stage {stages[0]}" if stages else ""
        yield f"{_layers(stack, layers)}{where}", _one_of_each(plan, kinds)


_ATTENTION = re.compile(r"att|mixer|mamba|conv|ssm|linear|recurrent|temporal|lru|qkv")
_SECOND_NORM = re.compile(r"post|pre_f|pre_m|ffn|feed|mlp|ff|2")


def _modules(plan: Plan, kinds: Sequence[Kind]) -> list[list[Kind]]:
    """The weights of a layer in the order in which a token comes to them: those of the attention, or what stands in
    its place, and those of the MLP, or the experts; in each, the norm first, and last what the ranks add up.
    """
    if not any(kind.layers for kind in kinds):
        return [[*kinds]]
    architecture = plan.model.architecture
    stems = {kind: re.sub(r"[._](weight|bias)$", "", _in_layer(kind)) for kind in kinds}  # of a bias its weight's
    summed = {stems[kind] for kind in kinds if is_summed(plan.laid[kind], architecture)}
    modules = {kind: stem.rpartition(".")[0] for kind, stem in stems.items()}
    shared = {module for module in modules.values() if module}
    whole = {
        module for module in shared if all(plan.laid[k].layout.is_replicated for k in kinds if modules[k] == module)
    }
    places = [*dict.fromkeys(modules.values())]

    def row(kind: Kind) -> int:
        first = stems[kind].partition(".")[0]
        if not modules[kind] and len(kind.shape) < 2:
            return 1 if _SECOND_NORM.search(first) else 0
        return 0 if _ATTENTION.search(first) else 1

    def place(kind: Kind) -> tuple[object, ...]:
        module = modules[kind]
        is_whole = len(kind.shape) > 1 and plan.laid[kind].layout.is_replicated
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
        layout = plan.laid[kind].layout
        first.setdefault((kind.template, layout.full, kind.dtype, layout.dealt_by_name), kind)
    return [*first.values()]


def _layers(stack: str, numbers: Sequence[int]) -> str:
    """``Layer 3``, ``Layers 0 to 2, 5``, ``visual.blocks 0 to 26``."""
    ordered = sorted(numbers)
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    ellipsis = ", …" if len(texts) > 8 else ""
    several = "s" if stack == "Layer" and len(ordered) > 1 else ""
    return f"{stack}{several} {', '.join(texts[:8])}{ellipsis}"


class _Picture:
    """Draws weights, and remembers which sets of ranks need a pattern."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        size = plan.mesh.size // plan.mesh.pp
        self._stages = [frozenset(range(first, first + size)) for first in range(0, plan.mesh.size, size)]
        self._shared: dict[Ranks, str] = {}
        self._scale = 1.0

    # -- colours

    def colour(self, rank: int) -> str:
        """A colour that is told from those of other ranks, and seen on light and dark."""
        count = self._plan.mesh.size
        hue = rank * 360 / count if count <= 8 else rank * 137.5  # neighbours are never alike
        return f"hsl({hue % 360:.0f} 62% {52 if rank % 2 else 60}%)"

    def fill(self, ranks: Ranks) -> str:
        """The fill of what these ranks hold."""
        if len(ranks) == 1:
            return self.colour(next(iter(ranks)))
        ranks = self._stages[0] if ranks in self._stages else ranks
        return f"url(#{self._shared.setdefault(ranks, f'shared-{len(self._shared)}')})"

    def patterns(self) -> Iterator[Html]:
        """Stripes for what several ranks hold: of their colours, or grey where all do."""
        for ranks, name in self._shared.items():
            is_all = ranks in self._stages or len(ranks) > 8
            colours = [] if is_all else [self.colour(rank) for rank in sorted(ranks)]
            width = 6 if is_all else 5 * len(colours)
            ground = element("rect", width=width, height=width, class_="ground")
            stripes = [element("rect", x=5 * i, width=5, height=width, fill=colour) for i, colour in enumerate(colours)]
            line = element("rect", width=2, height=width, class_="stripe") if is_all else None
            yield element(
                "pattern", ground, *stripes, line, id=name, width=width, height=width,
                patternUnits="userSpaceOnUse", patternTransform="rotate(45)",
            )  # fmt: skip

    def legend(self) -> Iterator[Html]:
        """What the colours mean."""
        for rank in range(min(self._plan.mesh.size, 16)):
            yield self._key(self.colour(rank), f"rank {rank}")
        if self._plan.mesh.size > 16:
            yield element("span", f"… to rank {self._plan.mesh.size - 1}")
        for ranks, name in self._shared.items():
            if ranks in self._stages:
                yield self._key(f"url(#{name})", f"on every rank{' of a stage' if len(self._stages) > 1 else ''}")
            elif len(self._shared) <= 12:
                yield self._key(f"url(#{name})", f"on ranks {', '.join(map(str, sorted(ranks)))}")
        if self._plan.padding:
            yield element("span", _small(element("rect", width=14, height=14, class_="padding")), "padding: zeros")

    @staticmethod
    def _key(fill: str, text: str) -> Html:
        return element("span", _small(element("rect", width=16, height=16, fill=fill)), text)

    # -- blocks

    def block(self, name: str, kinds: Sequence[Kind]) -> Html:
        """A figure: the weights in their order, arrows to the row-parallel ones, a mark at each all-reduce."""
        rows = (element("div", *self._row(weights), class_="flow") for weights in _modules(self._plan, kinds))
        return element("figure", element("h3", name), *rows)

    def _row(self, kinds: Sequence[Kind]) -> Iterator[Html]:
        plan, architecture = self._plan, self._plan.model.architecture
        self._scale = LONGEST / max(side for kind in kinds for side in _sides(plan.laid[kind].layout).lengths)
        is_cut = any(plan.laid[kind].layout.parallel_dims for kind in kinds)
        begin = next((kind for kind in kinds if is_cut and kind.layers and len(kind.shape) > 1), None)
        experts = next((kind for kind in kinds if kind.places), None)
        arrows: list[Html] = []  # they stand before what they lead to, also where a row is too long for the page
        for kind in kinds:
            entry = plan.laid[kind]
            what = kind_of(entry, architecture)
            if what == "whole" and frozenset(entry.layout.boxes) in self._stages:
                what = "replicated"
            sums = is_summed(entry, architecture) and plan.mesh.size > 1
            if kind is begin and plan.mesh.size > 1:
                arrows.append(element("span", "x →", class_="arrow", title="the same input on every rank"))
            if kind is experts:
                yield element("div", *arrows, self._experts(kind), class_="step")
                arrows.clear()
            if sums:
                arrows.append(element("span", "→", class_="arrow", title="each rank keeps its part"))
            is_looked_up = what == "vocabulary" and "embed" in kind.name and plan.mesh.size > 1
            outputs = output_size(entry) if sums else min(entry.layout.full) if is_looked_up else 0
            mark = _all_reduce(outputs * activation_bytes(plan)) if outputs else None
            yield element("div", *arrows, self._weight(kind, entry, what), mark, class_="step")
            arrows.clear()

    def _alike(self, kind: Kind) -> dict[Ranks, list[Kind]]:
        """The tensors of a layer that differ from one in the expert alone, by the ranks that hold them."""
        by_ranks: dict[Ranks, list[Kind]] = {}
        for other, entry in self._plan.laid.items():
            if other.template == kind.template and other.layers & kind.layers:
                by_ranks.setdefault(frozenset(entry.layout.boxes), []).append(other)
        return by_ranks

    def _experts(self, kind: Kind) -> Html:
        """Which ranks have which experts, where each expert is a tensor of its own."""
        alike = self._alike(kind)
        counts = {ranks: sum(tensor.count // max(1, len(tensor.layers)) for tensor in alike[ranks]) for ranks in alike}
        wide, high, x, parts = 120 / sum(counts.values()), 16, 0.0, list[Html]()
        for ranks, count in counts.items():
            box = {"x": f"{x:.1f}", "y": 0, "width": f"{count * wide:.1f}", "height": high}
            title = element("title", f"{plural(count, 'expert')} on {_ranks(ranks)}")
            parts.append(element("rect", title, **box, fill=self.fill(ranks), class_="cell"))
            x += count * wide
        text = "; ".join(f"{count} on {_ranks(ranks)}" for ranks, count in [*counts.items()][:4])
        tail = "; …" if len(counts) > 4 else ""
        caption = element("figcaption", element("span", f"{sum(counts.values())} experts", class_="name"), text, tail)
        drawing = element("svg", *parts, viewBox=f"0 0 120 {high}", width="120", height=high, role="img")
        return element("figure", drawing, caption, class_="weight")

    def _weight(self, kind: Kind, entry: Entry, what: str) -> Html:
        """A weight; of experts that are dealt by name, one for each set of ranks."""
        layout = entry.layout
        kinds = [kinds[0] for kinds in self._alike(kind).values()] if layout.dealt_by_name else [kind]
        drawings = element("div", *(self._drawing(drawn) for drawn in kinds[:MOST_SETS]), class_="drawings")
        limit = f", drawn for {MOST_SETS} of {len(kinds)} sets of ranks" if len(kinds) > MOST_SETS else ""
        sides, shape = _sides(layout), _shape(layout.stored)
        name = _in_layer(kind).removesuffix(".weight")
        times = f", {kind.count} of them" if kind.count > max(1, len(kind.layers)) else ""
        copies = max(copies_of(layout, min(layout.boxes)))
        shared = f", parts on {copies} ranks" if 1 < copies < len(layout.boxes) else ""
        caption = element(
            "figcaption", element("span", name, class_="name"), f"{what} · {shape}{sides.note}{times}{shared}{limit} ",
            element("code", layout.rule),
        )  # fmt: skip
        return element("figure", drawings, caption, class_="weight")

    def _drawing(self, kind: Kind) -> Html:
        layout = self._plan.laid[kind].layout
        sides = _sides(layout)
        height, width = (max(THINNEST, length * self._scale) for length in sides.lengths)
        hover = f"{kind.name}\n{layout.rule}\n{_shape(layout.stored)}"
        cells = [
            self._cell(part, ranks, sides, f"{hover}; {_shape(layout.boxes[min(ranks)].shape)} on {_ranks(ranks)}")
            for part, ranks in _cells(sides)
            if ranks
        ]
        return element(
            "svg", element("title", hover), *cells, *self._labels(layout, sides, width),
            viewBox=f"0 0 {width:.1f} {height:.1f}", width=f"{width:.1f}", height=f"{height:.1f}", role="img",
        )  # fmt: skip

    def _cell(self, part: tuple[Run, Run], ranks: Ranks, sides: _Sides, hover: str) -> Html:
        down, right = part
        heights, widths = sides.lengths
        box = {
            "x": f"{right.offset * self._scale if widths * self._scale > THINNEST else 0:.2f}",
            "y": f"{down.offset * self._scale if heights * self._scale > THINNEST else 0:.2f}",
            "width": f"{max(THINNEST if widths * self._scale <= THINNEST else 0.5, right.length * self._scale):.2f}",
            "height": f"{max(THINNEST if heights * self._scale <= THINNEST else 0.5, down.length * self._scale):.2f}",
        }
        place = f"{_ranks(ranks)}: {_extent('rows', down)}, {_extent('columns', right)}"
        if down.offset >= sides.full[0] or right.offset >= sides.full[1]:
            return element("rect", element("title", f"padding with zeros, {place}"), **box, class_="padding")
        return element(
            "rect",
            element("title", f"{place}\n{hover}"),
            **box,
            fill=self.fill(ranks),
            class_="thin cell" if min(float(box["width"]), float(box["height"])) < 4 else "cell",
        )

    def _labels(self, layout: Layout, sides: _Sides, width: float) -> Iterator[Html]:
        """The names of what is packed, and lines between."""
        sizes = self._plan.model.sizes.of({})
        dim = layout.rule.dims[sides.dims[0]] if layout.rule.dims and sides.dims[0] is not None else None
        if dim is None or len(dim.summands) < 2 or dim.counted != (1, 1):
            return
        offset = 0.0
        try:
            lengths = [Dim((summand,)).size(sizes) for summand in dim.summands]
        except Exception:  # sizes that depend on the layer
            return
        for summand, length in zip(dim.summands, lengths, strict=True):
            if offset:
                y = f"{offset * self._scale:.2f}"
                yield element("line", x1=0, x2=f"{width:.1f}", y1=y, y2=y, class_="block")
            text = summand.label or str(summand)
            if length * self._scale >= LINE:
                yield element("text", text, x=3, y=f"{(offset + length / 2) * self._scale + 3:.2f}", class_="part")
            offset += length


def _all_reduce(nbytes: int) -> Html:
    """The mark of an all-reduce, in two lines."""
    return element("span", "⊕ all-reduce, ", element("span", f"{human_bytes(nbytes)} a token"), class_="reduce")


@dataclass(frozen=True)
class _Sides:
    """A tensor as a rectangle: its two sides with padding and without, and what each rank holds of them.

    ``dims`` are the dimensions that the sides are, ``note`` says what is not drawn.
    """

    lengths: tuple[int, int]
    full: tuple[int, int]
    runs: tuple[Sequence[tuple[Run, ...]], Sequence[tuple[Run, ...]]]
    dims: tuple[int | None, int | None]
    note: str
    holders: Ranks


def _sides(layout: Layout) -> _Sides:
    """The last two dimensions of a tensor; a leading one instead of the first of these, if that is what is cut."""
    count = len(layout.full)
    dims = [*range(count)][-2:]
    cut = [dim for dim in layout.parallel_dims if dim not in dims]
    if cut and len(dims) == 2:
        dims[0] = cut[0]
    outer = [layout.full[dim] for dim in range(count) if dim not in dims]
    note = f", drawn once for {'x'.join(map(str, outer))}" if outer else ""
    everyone = [((Run(0, 1),) if rank in layout.boxes else ()) for rank in range(layout.ranks)]
    runs, lengths, full = list[Sequence[tuple[Run, ...]]](), list[int](), list[int]()
    for dim in dims:
        runs.append(layout.runs(dim))
        lengths.append(layout.padded[dim])
        full.append(layout.full[dim])
    drawn: list[int | None] = [*dims]
    while len(runs) < 2:  # a vector is drawn as a bar
        runs.insert(0, everyone)
        lengths.insert(0, 1)
        full.insert(0, 1)
        drawn.insert(0, None)
    if layout.rule.arrow is not None and drawn[0] is not None and drawn[0] < layout.rule.arrow:
        for values in (runs, lengths, full, drawn):  # the input is stored first, but drawn from left to right as always
            values.reverse()
    holders = frozenset(layout.boxes)
    return _Sides((lengths[0], lengths[1]), (full[0], full[1]), (runs[0], runs[1]), (drawn[0], drawn[1]), note, holders)


def _cells(sides: _Sides) -> Iterator[tuple[tuple[Run, Run], Ranks]]:
    """The parts of a rectangle that the same ranks hold."""
    down, right = (
        _segments(runs, length, full) for runs, length, full in zip(sides.runs, sides.lengths, sides.full, strict=True)
    )
    for (one, some), (other, holders) in itertools.product(down, right):
        yield (one, other), some & holders


def _segments(holders: Sequence[Sequence[Run]], length: int, full: int) -> list[tuple[Run, Ranks]]:
    """One side, cut wherever another set of ranks holds it, and where the padding begins."""
    cut = [*segments(dict(enumerate(holders)), (0, length, min(full, length)))]
    if len(cut) >= MOST_PARTS:
        return [(Run(0, length), frozenset(rank for rank, runs in enumerate(holders) if runs))]
    return cut


def _shape(lengths: Sequence[int]) -> str:
    return "x".join(map(str, lengths)) or "one number"


def _extent(what: str, run: Run) -> str:
    return f"{what} {run.offset:,} to {run.end - 1:,}"


def _ranks(ranks: Ranks) -> str:
    return f"rank {min(ranks)}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"


def _small(content: Html) -> Html:
    return element("svg", content, viewBox="0 0 16 16", aria_hidden="true")


def _stages(plan: Plan) -> Html | None:
    if plan.mesh.pp == 1:
        return None
    ranks = plan.mesh.size // plan.mesh.pp
    rows = []
    for stage in range(plan.mesh.pp):
        first = stage * ranks
        where = f"ranks {first} to {first + ranks - 1}" if ranks > 1 else f"rank {first}"
        rows.append((f"stage {stage}", where, _layers("Layer", layers_at(plan.mesh, stage))))
    columns = ["stage", "ranks", "layers"]
    return joined(
        element("h2", "Pipeline stages"), table("Which ranks have which layers", columns, rows, texts=columns)
    )


def _degrees(degrees: Sequence[Degree]) -> Html:
    rows = [(degree.degree, "yes" if degree.is_possible else "no", degree.remark) for degree in degrees]
    kinds = ["yes" if degree.is_possible else "no" for degree in degrees]
    columns = ["--tp", "possible", "why not"]
    return joined(
        element("h2", "Other degrees"),
        table("What this model can be split by", columns, rows, texts=columns[1:], kinds=kinds),
    )
