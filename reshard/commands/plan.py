"""Plans a checkpoint: the parts of each rank, or the possible degrees; and both as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Literal

from reshard.formats.errors import PlanError, Refusal, redacted, refused
from reshard.formats.files.safetensors import tensor_bytes
from reshard.formats.hints import typed
from reshard.formats.notation.architecture import without_numbers
from reshard.formats.notation.axes import Share
from reshard.formats.notation.format import SOURCE_NAMES, CutRule, Format, Pattern
from reshard.formats.notation.format_file import HUGGING_FACE, OWN, format_to_write, with_names
from reshard.mesh.degrees import Sweep, sweep
from reshard.mesh.plan import Degrees, Plan
from reshard.mesh.stages import layers_at
from reshard.mesh.totals import Row, Totals, activation_bytes, rows_of, totals_of
from reshard.mesh.traffic import Rates, traffic_of
from reshard.model.model import Model
from reshard.placement.arrangement import Arrangement, arrangement_of
from reshard.placement.kept_fields import check_kept
from reshard.placement.portions import Portion
from reshard.placement.program_plan import plan_for
from reshard.placement.stored import Stored
from reshard.source.access import Access, Place
from reshard.store.selection import Weights
from reshard.system import Taken, default
from reshard.text import Result, align, human_bytes, plural, shape_text, with_prefix
from reshard.transforms.opening import open_any


@dataclass(frozen=True)
class PlanRequest(Access, Degrees):
    """Arguments of ``plan``.

    ``source``: a folder, a Hub id, a URL, or what ``reshard.state_dict`` gave.
    ``format``: the name of another program's format to plan for.
    ``names``: whose names ``format="dcp"`` has, as in ``split``.
    ``link``: the bytes per second that a rank sends, such as ``"450GB/s"``: by default over an H100's NVLink.
    ``flops``: the operations per second of a rank, such as ``"990TFLOP/s"``: by default an H100's in BF16.
    """

    source: Place = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    format: str | None = None
    names: Literal["source", "published", "modules"] = "source"
    link: Taken[float | str, float] = default(Rates.link)
    flops: Taken[float | str, float] = default(Rates.flops)

    @property
    def rates(self) -> Rates:
        """The speeds at which a rank sends and computes."""
        return Rates(self.link, self.flops)


def plan(request: PlanRequest) -> PlanAnswer:
    """The plan of a checkpoint: each rank's part of each tensor. Reads headers only.

    Without a degree it is the plan of one rank, and its text says which degrees are possible, and why not others.
    Raises CheckpointError if the source is not a checkpoint, PlanError if a degree is not possible.
    """
    format, opened = planned_format(request), open_any(request.source, request, Weights.HEADERS)
    format = with_names(format, request.names, opened.spelling)
    planned = plan_for(opened.model, format, request)
    arrangement_of(planned, format)  # raises for a tensor that has no place in the format
    if format.plain and planned.mesh.size == 1:
        return possible_degrees(planned, request)
    return PlanAnswer(planned.model, planned.mesh, planned.padding, planned.laid, request.rates)


@dataclass(frozen=True, repr=False)
class PlanAnswer(Plan, Result):
    """The part of every tensor on each rank of a mesh, also as text."""

    rates: Rates

    @property
    def headline(self) -> str:
        """The mesh, the type of the model, and its number of tensors."""
        return f"{self.mesh}, {title(self.model)}"

    def to_text(self, width: int | None = None) -> str:
        """The table and the totals of ``reshard plan --tp N``."""
        return plan_text(self, self.headline, self.rates, width)


@dataclass(frozen=True, repr=False)
class PossibleDegrees(PlanAnswer):
    """A plan of one rank, whose text lists the possible degrees."""

    request: PlanRequest

    @cached_property
    def swept(self) -> Sweep:
        """The degrees that were tried, and all that are possible."""
        return sweep(self.model, pad=self.request.pad_vocab, uneven=self.request.uneven)

    @property
    def headline(self) -> str:
        """The type of the model, and the possible degrees."""
        return f"{title(self.model)}; valid degrees: {', '.join(map(str, self.swept.valid))}"

    def to_text(self, width: int | None = None) -> str:
        """The table of ``reshard plan`` without a degree."""
        source, swept = redacted(str(self.request.source)), self.swept
        table = align([("--tp", "possible", ""), *self.rows()], right=(0,), width=None)
        of_ep = [f"Valid degrees of --ep: {', '.join(map(str, swept.valid_ep))}."] if len(swept.valid_ep) > 1 else []
        valid = (
            f"Valid degrees: {', '.join(map(str, swept.valid))}. 'reshard plan {source} --tp N' shows one in detail."
        )
        of_time = [f"Collectives: at {speeds_of(self.rates)} a rank (--link, --flops)."]
        of_time *= len(self.plans) > 1
        return "\n".join([f"{source}: {title(self.model)}", "", *table, "", *of_time, *of_ep, valid])

    @cached_property
    def plans(self) -> dict[int, Plan]:
        """The plan of each possible degree of those that were tried."""
        degrees = [degree for degree, refusal in self.swept.attempts.items() if refusal is None]
        request = replace(self.request, ep=1, pp=1, pp_layers=(), same_ranks=False)
        return {tp: plan_for(self.model, OWN, replace(request, tp=tp)) for tp in degrees}

    def collectives(self, widths: Sequence[float]) -> list[tuple[int, list[float]]]:
        """The part of the time in collectives at each possible degree above one, if the model were so many times as
        wide.
        """
        traffics = {degree: traffic_of(plan) for degree, plan in self.plans.items() if degree > 1}
        known = {degree: traffic for degree, traffic in traffics.items() if traffic is not None and traffic.sent}
        return [(degree, [each.share(self.rates, width) for width in widths]) for degree, each in known.items()]

    def rows(self) -> list[tuple[str, str, str]]:
        """Each degree, with the reason why it is not possible, or else the bytes per rank, replication, uneven axes and
        padding.
        """
        rows, full = list[tuple[str, str, str]](), self.model.sizes.of({})
        for degree, refusal in self.swept.attempts.items():
            if refusal is not None:
                ways = other_ways(refusal)
                remark = refusal.why + (f"; possible with {' or '.join(ways)}" if ways else "")
                rows.append((str(degree), "no", remark))
                continue
            plan = self.plans[degree]
            totals = totals_of(plan, rows_of(plan))
            remark = f"{human_bytes(totals.bytes_per_rank)} per rank{' at most' if plan.mesh.uneven else ''}"
            remark += f", {totals.share_replicated:.1%} of it on other ranks too" if degree > 1 else ""
            if (traffic := traffic_of(plan)) is not None and traffic.sent:
                remark += f", {traffic.share(self.rates):.0%} of the time in collectives"
            remark += "".join(f", uneven: {line}" for line in uneven_lines(plan))
            remark += "".join(f", {axis} padded {full[axis]:,} -> {size:,}" for axis, size in plan.padding.items())
            rows.append((str(degree), "yes", remark))
        return rows


def other_ways(refusal: Refusal) -> list[str]:
    """The options that make a refused degree possible."""
    return [" ".join(typed(*setting) for setting in settings.items()) for settings in refusal.instead]


def possible_degrees(plan: Plan, request: PlanRequest) -> PossibleDegrees:
    """The plan of one rank, as one of which the text says the possible degrees."""
    return PossibleDegrees(plan.model, plan.mesh, plan.padding, plan.laid, request.rates, request)


def planned_format(request: PlanRequest) -> Format:
    """The requested format. Raises PlanError if it cannot be planned for."""
    format = format_to_write(request.format)
    if format is HUGGING_FACE:
        what = f"'{format.name}' is one full checkpoint: there are no ranks to plan for"
        raise PlanError(what, "give the format of a program that loads ranks")
    if format is OWN and request.names != SOURCE_NAMES:
        raise refused("names", None, "a plan of ranks has the model's names", instead=({"format": "dcp"},))
    check_kept(request, format)
    return format


# ---------------------------------------------------------------------------------------------------------- as a table


def plan_text(plan: Plan, head: str, rates: Rates, width: int | None, download: int | None = None) -> str:
    """Return the table and the totals of a plan, below the line ``head``. ``download``: bytes to fetch for one rank."""
    rows = rows_of(plan)
    totals = align(totals_pairs(plan, totals_of(plan, rows), rates, download), right=(), width=None)
    return "\n".join([head, "", *format_table(rows, width), "", *totals])


def title(model: Model) -> str:
    """``llama (rules: llama), 39 tensors``."""
    count = plural(len(model.tensors), "tensor")
    return f"{model.config.get('model_type', 'no model_type')} (rules: {model.architecture.name}), {count}"


def format_table(rows: Sequence[Row], width: int | None) -> list[str]:
    """The table's lines, within ``width`` columns (None: as wide as it needs)."""
    cells = [("tensor", "rule", "kind", "dtype", "full -> rank", "tensors", "per rank")]
    notes: dict[str, str] = {}
    for row in rows:
        kind, least, most = row.kind, min(row.copies, default=1), max(row.copies, default=1)
        if most > 1 and not row.kind.endswith("replicated"):  # how many ranks hold what they have
            copies = f"{most}x" if least == most else f"{least}-{most}x"
            some = f"some of it is on {plural(least, 'rank')}, some on {most}"
            notes[copies] = f"each part is on {most} ranks" if least == most else some
            kind += f" {copies}"
        if row.is_uneven:
            notes["uneven"] = "this is the first rank's part; the last ranks have less"
            kind += " uneven"
        change = shape_text(row.full) if row.full == row.local else f"{shape_text(row.full)} -> {shape_text(row.local)}"
        size = human_bytes(row.bytes_per_rank)
        cells.append((row.name, row.rule or "scalar", kind, row.dtype, change, f"{row.tensors:,}", size))
    lines: list[str] = []
    # all columns if they fit, else without the dtype, else without the rule, too
    for chosen in ((0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 4, 5, 6), (0, 2, 4, 5, 6)):
        columns = [[line[i] for i in chosen] for line in cells]
        elastic = [chosen.index(i) for i in (0, 1) if i in chosen]
        lines = align(columns, right=(len(chosen) - 2, len(chosen) - 1), width=width, elastic=elastic)
        if width is None or max(map(len, lines)) <= width:
            break
    return lines + [f"{mark}: {note}" for mark, note in sorted(notes.items())]


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


def totals_pairs(plan: Plan, totals: Totals, rates: Rates, download: int | None = None) -> list[tuple[str, str]]:
    """Return the totals for people, each with its label. ``download``: bytes to fetch for one rank, if the source lies
    elsewhere.
    """
    ranks, width = plan.mesh.size, activation_bytes(plan)
    share = totals.bytes_per_rank / totals.bytes_full if totals.bytes_full else 0.0
    exact = f"{human_bytes(totals.bytes_per_rank)} ({totals.bytes_per_rank:,} bytes)"
    where, least = f"on each of {plural(ranks, 'rank')}", ""
    if totals.bytes_least < totals.bytes_per_rank:
        where = f"on the largest of {plural(ranks, 'rank')}"
        least = f"; {human_bytes(totals.bytes_least)} ({totals.bytes_least:,} bytes) on the smallest"
    pairs = [
        ("bytes per rank", f"{exact} {where}, {share:.1%} of {human_bytes(totals.bytes_full)}{least}"),
        ("replicated", f"{human_bytes(totals.replicated)} of it on other ranks too ({totals.share_replicated:.1%})"),
    ]
    if download is not None:
        share = download / totals.bytes_full if totals.bytes_full else 0.0
        pairs.append(("download", f"{human_bytes(download)} for one rank, with --rank ({share:.1%} of the weights)"))
    full = plan.model.sizes.of({})
    for axis, size in plan.padding.items():
        pairs.append(("padding", f"{axis} {full[axis]:,} -> {size:,} with zeros; merge removes them"))
    if plan.mesh.pp > 1:
        stages = (layers_at(plan.mesh, stage) for stage in range(plan.mesh.pp))
        text = ", ".join(str(layers[0]) if len(layers) == 1 else f"{layers[0]} to {layers[-1]}" for layers in stages)
        pairs.append(("stages", f"layers {text}"))
    pairs += [("uneven", line) for line in uneven_lines(plan)]
    for name, one_pass in (("forward", totals.forward), ("backward", totals.backward)):
        if one_pass.count and ranks > plan.mesh.pp:
            count, nbytes = plural(one_pass.count, "all-reduce"), human_bytes(one_pass.nbytes)
            pairs.append((name, f"{nbytes} per token in {count} ({width} bytes per activation)"))
    return [*pairs, *traffic_pairs(plan, rates)]


def speeds_of(rates: Rates) -> str:
    """``450.00 GB/s and 990.00 TFLOP/s``."""
    return f"{human_bytes(rates.link)}/s and {with_prefix(rates.flops, 'FLOP')}/s"


def traffic_pairs(plan: Plan, rates: Rates) -> Iterator[tuple[str, str]]:
    """Labels and texts of the bytes sent and the operations computed for a token and the time; none for one rank."""
    traffic = traffic_of(plan)
    if plan.mesh.size == 1:
        return
    if traffic is None:
        yield "sent", "not known: config.json lacks the number of experts per token"
        return
    sent = " + ".join(f"{human_bytes(nbytes)} ({name})" for name, nbytes in traffic.sent.items())
    yield "sent", f"{sent} per token and rank, beside {with_prefix(traffic.flops, 'FLOP')}"
    yield "collectives", f"{traffic.share(rates):.0%} of the time, at {speeds_of(rates)}"


# ------------------------------------------------------------------------------------------- what a program would store


@dataclass(frozen=True)
class StoredRow:
    """Stored tensors of one kind."""

    name: str
    sources: tuple[str, ...]
    """The Hugging Face tensors that each is made of."""
    how: str
    """A word on what is done with them."""
    dtype: str
    shape: tuple[int, ...]
    """The shape on the first rank that has such a tensor."""
    tensors: int
    nbytes: int
    """The bytes of all such tensors there."""


def stored_rows(arrangement: Arrangement) -> list[StoredRow]:
    """Return the rows of a program's stored tensors, in its order; tensors that differ only in numbers in their names
    share one.
    """
    kinds, groups = arrangement.plan.model.kind_of, dict[tuple[str, str, tuple[int, ...]], list[Stored]]()
    for stored in arrangement.stored:
        shapes = map(stored.geometry.shape, stored.geometry.holders)
        first = next((shape for shape in shapes if shape is not None), ())
        shape = stored.constant.shape if stored.constant else first
        target = stored.geometry.portions[0].target if stored.constant is None else None
        is_general = target is not None and Pattern(target).match(stored.name) is not None
        name = str(target) if is_general else without_numbers(stored.name)
        groups.setdefault((name, stored.dtype, shape), []).append(stored)
    rows = []
    for (name, dtype, shape), alike in groups.items():
        portions_of = () if alike[0].constant else alike[0].geometry.portions
        sources = tuple(
            dict.fromkeys(
                f"{kinds[atom.tensor].pattern} ({atom.label})" if atom.label else kinds[atom.tensor].pattern
                for atom in alike[0].atoms[: len(portions_of)]
            )
        )
        nbytes = sum(tensor_bytes(stored.name, dtype, shape) for stored in alike)
        rows.append(StoredRow(name, sources, _how(alike[0], portions_of), dtype, shape, len(alike), nbytes))
    return rows


def _how(stored: Stored, portions: Sequence[Portion]) -> str:
    if stored.constant is not None:
        return f"= {stored.constant.value:g}"
    first = portions[0]
    words = ["stacked"] if first.stacked and first.slots else []
    words += ["joined"] if len(portions) > 1 else []
    line = first.line
    words += ["output first"] if line.output_first and first.component.arrow is not None else []
    words += ["halves as pairs"] if any(line.pairs) else []
    words += ["pairs as halves"] if any(line.halves) else []
    words += [f"{line.function}(x)"] if line.function else []
    words += [f"as {line.dtype}"] if line.dtype else []
    words += ["whole"] if line.cut == CutRule() else []
    words += ["on the first rank, else zeros"] if line.on == "first rank" else []
    return ", ".join(words)


def sources_text(row: StoredRow) -> str:
    """The tensors that a row is made of, in short: ``model.layers.{layer}.mlp.(gate_proj + up_proj).weight``."""
    if not row.sources:
        return "a constant"
    if row.sources == (row.name,):
        return "the same"
    parts = [source.split(".") for source in row.sources]
    same = len({len(part) for part in parts}) == 1
    places = [i for i in range(len(parts[0])) if len({part[i] for part in parts}) > 1] if same else []
    if len(places) != 1:
        return " + ".join(row.sources)
    words = parts[0][:]
    words[places[0]] = f"({' + '.join(part[places[0]] for part in parts)})"
    return ".".join(words)
