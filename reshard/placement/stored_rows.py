"""What a program stores, as a table: tensors that differ only in the numbers in their names are one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formats.files.safetensors import tensor_bytes
from formats.notation.architecture import without_numbers
from formats.notation.format import Cut, Pattern
from reshard.placement.arrangement import Arrangement
from reshard.placement.portions import Portion
from reshard.placement.stored import Stored


@dataclass(frozen=True)
class StoredRow:
    """Stored tensors of one kind.

    ``sources`` are the Hugging Face tensors that each is made of, and ``how`` says what is done with them. ``shape`` is
    that on the first rank that has such a tensor, ``nbytes`` the size of all such tensors there.
    """

    name: str
    sources: tuple[str, ...]
    how: str
    dtype: str
    shape: tuple[int, ...]
    tensors: int
    nbytes: int


def stored_rows(arrangement: Arrangement) -> list[StoredRow]:
    """The rows of what a program stores, in its order."""
    names = dict[Portion, str]()
    for kind, portions in arrangement.parts.items():
        for portion in portions:
            label = portion.component.label
            names[portion] = f"{kind.pattern} ({label})" if label else kind.pattern
    groups: dict[tuple[str, str, tuple[int, ...]], list[Stored]] = {}
    for stored in arrangement.stored:
        shapes = map(stored.geometry.shape, stored.geometry.holders)
        first = next((shape for shape in shapes if shape is not None), ())
        shape = stored.constant.shape if stored.constant else first
        groups.setdefault((_general(stored), stored.dtype, shape), []).append(stored)
    rows = []
    for (name, dtype, shape), alike in groups.items():
        portions_of = () if alike[0].constant else alike[0].geometry.portions
        sources = tuple(dict.fromkeys(names[portion] for portion in portions_of))
        nbytes = sum(tensor_bytes(stored.name, dtype, shape) for stored in alike)
        rows.append(StoredRow(name, sources, _how(alike[0], portions_of), dtype, shape, len(alike), nbytes))
    return rows


def _general(stored: Stored) -> str:
    target = stored.geometry.portions[0].target if stored.constant is None else None
    if stored.naming is not None and len({*stored.naming.targets}) == 1:
        return stored.naming.targets[0]
    if target is not None and Pattern(target).match(stored.name) is not None:
        return target
    return without_numbers(stored.name)


def _how(stored: Stored, portions: Sequence[Portion]) -> str:
    if stored.constant is not None:
        return f"= {stored.constant.value:g}"
    first = portions[0]
    words = ["stacked"] if first.stacked and first.slots else []
    words += ["joined"] if len(portions) > 1 else []
    line = first.line
    if line is not None:
        words += ["output first"] if line.output_first and first.component.arrow is not None else []
        words += ["halves as pairs"] if any(line.pairs) else []
        words += ["pairs as halves"] if any(line.halves) else []
        words += [f"{line.function}(x)"] if line.function else []
        words += [f"as {line.dtype}"] if line.dtype else []
        words += ["whole"] if line.cut == Cut() else []
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
