"""Possible degrees, and the reasons against others: the one place that decides it.

All commands refuse a degree for the reasons found here. ``formats/notation/axes.py`` computes the indices of a rank at
a possible degree. ``program_plan.py`` refuses a degree that only another program's format cannot hold.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from reshard.formats.errors import NotationError, PlanError, Refusal, SettingError, refused
from reshard.formats.files.safetensors import DTYPE_BITS
from reshard.formats.mesh import Mesh
from reshard.formats.notation.axes import Dim, Share, deal, degrees, owned, unit_of
from reshard.model.model import Model, padded_sizes, padding_for, shares_of


def refusal(model: Model, mesh: Mesh, *, pad: bool = True) -> Refusal | None:
    """Return the reason why the degree of a mesh of one dimension is not possible; None if it is."""
    ((mesh_dim, degree),) = mesh.degrees
    for family, sizes in _families(model, mesh_dim, pad=pad, same_ranks=mesh.same_ranks):
        unit, size, why = mesh.unit(family[0]), sizes[family[0]], None
        if unit is None and deal(family, sizes, degree) is None:
            why = does_not_divide([(axis, sizes[axis]) for axis in family], degree)
        elif unit is not None and not Share(degree, degree - 1, unit).run(size).length:
            length = Share(degree, 0, unit).run(size).length
            enough = f"is enough for {-(-size // length)} of {degree} ranks"
            why = f"{_size_of(family[:1], size)} in units of {unit} {enough}"
        if why is not None:
            return Refusal(mesh_dim, degree, why, axes=tuple(family))
    padding = padding_for(model, mesh, 1) if pad else {}
    for tensor in model.in_blocks:
        sizes = padded_sizes(tensor.sizes, padding)
        try:
            for rank in range(mesh.size):
                shares = shares_of(model.architecture, mesh, rank, sizes, tensor.axes)
                for dim in tensor.rule.unfolded(sizes).dims:
                    owned(dim, sizes, shares)
        except NotationError as error:
            why = f"tensor '{tensor.name}': {cuts_blocks(dim, sizes, shares) or error.message}"
            return Refusal(mesh_dim, degree, why, tensor=tensor.name, advice=tensor.advice)
    return None


def unevenly(model: Model, mesh: Mesh) -> Mesh:
    """The same mesh with a unit for each channel that has no equal parts, or none that leave scale blocks whole.

    A unit is the least common multiple of what the tensors with that axis need, so that no rank cuts a scale block.
    """
    degree, units = dict(mesh.degrees).get("tp", 1), units_of(model, experts=not mesh.same_ranks)
    sets = model.axis_sets(experts=not mesh.same_ranks)
    uneven = {
        axis: unit
        for axis, unit in sorted(units.items())
        if degree > 1 and any(sizes.get(axis, 0) % (degree * unit) for sizes in sets)
    }
    return replace(mesh, uneven=tuple(uneven.items()))


def units_of(model: Model, *, experts: bool) -> dict[str, int]:
    """The unit of each axis that may be split unevenly. Without ``experts``, tensors of experts do not count."""
    units = dict.fromkeys(model.channels, 1)
    for tensor in model.with_channels:
        if not experts and tensor.axes & model.architecture.expert_axes:
            continue
        *outer, last = tensor.rule.unfolded(tensor.sizes).dims
        whole_bytes = replace(last, step=math.lcm(last.step, 8 // math.gcd(8, DTYPE_BITS[tensor.dtype])))
        for axis in tensor.rule.axes & model.channels:
            units[axis] = math.lcm(units[axis], *(unit_of(dim, axis, tensor.sizes) for dim in (*outer, whole_bytes)))
    return units


def valid_degrees(
    model: Model,
    mesh_dim: str = "tp",
    *,
    pad: bool = True,
    same_ranks: bool = False,
    units: Mapping[str, int] = {},
    limit: int = 1024,
) -> list[int]:
    """Every possible degree up to ``limit``, in increasing order. With ``same_ranks`` experts are not split.

    ``units`` has the axes that may be split unevenly, each with its unit (see ``units_of``).
    """
    families = list(_families(model, mesh_dim, pad=pad, same_ranks=same_ranks))
    if not families:  # no axis is split, or only axes that may be padded
        return list(range(1, limit + 1)) if any(_families(model, mesh_dim)) else [1]
    least = min([limit, *(sizes[family[0]] for family, sizes in families if family[0] in units)])
    fixed = [degrees(family, sizes, limit) for family, sizes in families if family[0] not in units]
    common = sorted(set(range(1, least + 1)).intersection(*fixed))
    uneven = tuple(units.items())
    return [d for d in common if refusal(model, Mesh(((mesh_dim, d),), same_ranks, uneven=uneven), pad=pad) is None]


def _families(
    model: Model, mesh_dim: str, *, pad: bool = False, same_ranks: bool = False
) -> Iterable[tuple[list[str], Mapping[str, int]]]:
    """The families of axes that a mesh dimension splits, each with the sizes of a set of tensors.

    Those that may be padded are left out with ``pad``, those of experts with ``same_ranks``.
    """
    for family in model.architecture.families.get(mesh_dim, ()):
        for sizes in model.axis_sets(experts=mesh_dim == "ep" or not same_ranks):
            present = [axis for axis in family if axis in sizes]
            if present and not (pad and set(present) <= set(model.architecture.pad)):
                yield present, sizes


def check_degrees(model: Model, mesh: Mesh, *, pad: bool = True, lacking: Collection[str] = ()) -> None:
    """Raise SettingError with the valid degrees if a degree of the mesh is not possible.

    Its hint does not name fields of a request that are ``lacking`` in a format.
    """
    for axis, _ in mesh.uneven:
        if axis not in model.channels and axis not in model.architecture.pad:
            raise PlanError(f"{mesh}: the axis '{axis}' cannot be split unevenly")
    for mesh_dim, degree in mesh.degrees:
        if degree == 1 or mesh_dim == "pp":  # layers are dealt whole: see reshard.mesh.stages
            continue
        why = refusal(model, replace(mesh, degrees=((mesh_dim, degree),)), pad=pad)
        if why is not None:
            alternatives = other_ways(model, mesh, why, pad=pad)
            ways = tuple(way for way in alternatives if not way.keys() & {*lacking})
            units = dict(mesh.uneven) if mesh_dim == "tp" else {}
            valid = valid_degrees(model, mesh_dim, pad=pad, same_ranks=mesh.same_ranks, units=units)
            raise SettingError(replace(why, valid=tuple(valid), instead=ways))
        if not any(_families(model, mesh_dim)):
            raise refused(mesh_dim, degree, f"the rules of '{model.architecture.name}' split nothing over {mesh_dim}")


def other_ways(model: Model, mesh: Mesh, why: Refusal, *, pad: bool) -> Iterable[Mapping[str, object]]:
    """The settings that make a refused degree possible, in addition to it or instead of it."""
    degree = dict(mesh.degrees)[why.name]
    if refusal(model, unevenly(model, Mesh(((why.name, degree),), mesh.same_ranks)), pad=pad) is None:
        yield {"uneven": True}
    if mesh.degrees == (("tp", degree),) and any(_families(model, "ep")):
        tried = (refusal(model, Mesh(((dim, degree),), same_ranks=True), pad=pad) for dim in ("tp", "ep"))
        if all(obstacle is None for obstacle in tried):
            yield {"tp": degree, "ep": degree, "same_ranks": True}
    if why.tensor is not None:
        from reshard.model.scaled import can_be_dequantized  # numpy

        if can_be_dequantized(model):
            yield {"dequantize": True}


# ----------------------------------------------------------------------------------------------- the words of refusals


@cache
def _words() -> tuple[Mapping[tuple[str, ...], str], Mapping[str, str]]:
    """Return words for messages: the things that families of axes count, and the things whose length an axis
    measures.
    """
    table = tomllib.loads((Path(__file__).parent / "axes.toml").read_text(encoding="utf-8"))
    return {tuple(axes.split()): words for axes, words in table["counted"].items()}, table["measured"]


def does_not_divide(family: Sequence[tuple[str, int]], degree: int) -> str:
    """``12 attention heads do not divide by 5``: why a family of axes with these sizes does not absorb a degree."""
    axes, size = tuple(axis for axis, _ in family), math.prod(size for _, size in family)
    if counted := _words()[0].get(axes):
        return f"{size:,} {counted} do not divide by {degree}"
    return f"{_size_of(axes, size)} does not divide by {degree}"


def cuts_blocks(dim: Dim, sizes: Mapping[str, int], shares: Mapping[str, Share]) -> str | None:
    """``an intermediate size of 704 is 5.5 blocks of 128, which do not divide by 2``.

    None if a rank's part of the dimension is whole scale blocks, or if the dimension is a sum or a nested product.
    """
    factors = dim.summands[0].factors
    if dim.step == 1 or len(dim.summands) > 1 or not all(isinstance(factor, str) for factor in factors):
        return None
    axes = tuple(factor for factor in factors if isinstance(factor, str) and factor in shares)
    parts, size = math.prod(shares[axis].parts for axis in axes), dim.whole.size(sizes)
    if not axes or size % (dim.step * parts) == 0:
        return None
    blocks = f"{size / dim.step:g} blocks of {dim.step}, which do not divide by {parts}"
    named = next((name for end in range(len(axes), 0, -1) if (name := _words()[0].get(axes[:end]))), None)
    if named:
        return f"{size:,} rows of {named} are {blocks}"
    return f"{_size_of(axes, size)} is {blocks}" if axes == factors else None


def _size_of(axes: Sequence[str], size: int) -> str:
    measured = _words()[1].get(axes[0]) if len(axes) == 1 else None
    return f"{measured} of {size:,}" if measured else f"a size of {size:,} ({' x '.join(axes)})"


# --------------------------------------------------------------------------------------------------------- all degrees

TRIED = (*range(1, 17), 20, 24, 32, 40, 48, 64, 96, 128)
"""The degrees of tensor parallelism that a sweep tries; those above 16 only up to twice the largest valid one."""
LARGEST = 1 << 16
"""The largest degree that is listed as valid."""


@dataclass(frozen=True)
class Sweep:
    """The degrees of ``tp`` that were tried, in increasing order, and all that are valid: of ``tp`` and of ``ep``.

    An attempt is why a degree is refused; its ``instead`` has the options that make it possible. None: it is valid.
    """

    attempts: Mapping[int, Refusal | None]
    valid: tuple[int, ...]
    valid_ep: tuple[int, ...]


def sweep(model: Model, *, pad: bool = True, uneven: bool = False) -> Sweep:
    """Try the usual degrees of tensor parallelism, and all valid ones up to the largest of these.

    ``pad``: an indivisible vocabulary may be padded. ``uneven``: the last ranks may have less of an MLP.
    """
    units = units_of(model, experts=True) if uneven else {}
    valid = valid_degrees(model, pad=pad, units=units, limit=LARGEST)
    usual = [degree for degree in valid if degree <= max(TRIED)]
    tried = {degree for degree in TRIED if degree <= max(16, 2 * usual[-1])}
    attempts = dict[int, Refusal | None]()
    for degree in sorted({*tried, *usual}):
        mesh = Mesh((("tp", degree),))
        why = refusal(model, unevenly(model, mesh) if uneven else mesh, pad=pad)
        attempts[degree] = why and replace(why, instead=tuple(other_ways(model, mesh, why, pad=pad)))
    return Sweep(attempts, tuple(valid), tuple(valid_degrees(model, "ep")))
