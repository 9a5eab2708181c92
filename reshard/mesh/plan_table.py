"""A plan as text: the title, the table and the totals that ``reshard plan --tp N`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from formats.notation.axes import Share
from reshard.mesh.plan import Plan
from reshard.mesh.stages import layers_at
from reshard.mesh.totals import Row, Totals, activation_bytes
from reshard.model.model import Model
from reshard.text import align, human_bytes, plural, shape_text


def title(model: Model) -> str:
    """``llama (rules: llama), 39 tensors``."""
    count = plural(len(model.tensors), "tensor")
    return f"{model.config.get('model_type', 'no model_type')} (rules: {model.architecture.name}), {count}"


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


def totals_lines(plan: Plan, totals: Totals, download: int | None = None) -> list[str]:
    """The totals, one a line; ``download`` is what is fetched for one rank (bytes), if the source lies elsewhere."""
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
    if download is not None:
        share = download / totals.bytes_full if totals.bytes_full else 0.0
        pairs.append(("download", f"{human_bytes(download)} for one rank, with --rank ({share:.1%} of the weights)"))
    full = plan.model.sizes.of({})
    for axis, size in plan.padding.items():
        pairs.append(("padding", f"{axis} {full[axis]:,} -> {size:,} with zeros; merge strips them"))
    if plan.mesh.pp > 1:
        stages = (layers_at(plan.mesh, stage) for stage in range(plan.mesh.pp))
        text = ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in stages)
        pairs.append(("stages", f"layers {text}"))
    pairs += [("uneven", line) for line in uneven_lines(plan)]
    if ranks > 1:
        for name, one_pass in (("forward", totals.forward), ("backward", totals.backward)):
            count, nbytes = plural(one_pass.count, "all-reduce"), human_bytes(one_pass.nbytes)
            pairs.append((name, f"{nbytes} a token in {count}, {width} bytes an activation"))
    wide = max(len(label) for label, _ in pairs)
    return [f"{label.ljust(wide)}  {text}" for label, text in pairs]
