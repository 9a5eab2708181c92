"""The share of each axis on each rank of a mesh.

How a family absorbs a degree is in ``formats/notation/axes.py`` (``deal``); here the families of a model are taken one
by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from formats.mesh import Mesh
from formats.notation.axes import Share, deal, share
from reshard.model.model import Model


def shares_of(
    model: Model, mesh: Mesh, rank: int, sizes: Mapping[str, int], axes: AbstractSet[str]
) -> dict[str, Share]:
    """A rank's share of each axis, in a tensor with these axes; an axis that is not split is absent."""
    shares: dict[str, Share] = {}
    coordinates = mesh.coordinates(rank)
    for mesh_dim, degree in mesh.degrees:
        if mesh.same_ranks and (mesh_dim == "ep") != bool(axes & model.expert_axes):
            continue
        for family in model.architecture.families.get(mesh_dim, ()):
            known = [axis for axis in family if axis in sizes]
            unit = mesh.unit(family[0]) if mesh_dim == "tp" else None
            if unit is not None:
                shares[family[0]] = Share(degree, coordinates[mesh_dim], unit)
                continue
            parts = deal(known, sizes, degree) if known else None
            if parts is not None:
                shares |= share(parts, coordinates[mesh_dim])
    return shares


def sizes_of_parts(sizes: Mapping[str, int], shares: Mapping[str, Share]) -> dict[str, int]:
    """The size of each axis after the split into these shares."""
    return {axis: shares[axis].run(size).length if axis in shares else size for axis, size in sizes.items()}


def padding_for(model: Model, mesh: Mesh, pad_to: int) -> dict[str, int]:
    """The padded size of each axis that may be padded and does not divide by its degree or by ``pad_to``."""
    padding: dict[str, int] = {}
    degrees = dict(mesh.degrees)
    for mesh_dim, families in model.architecture.families.items():
        degree, axes = degrees.get(mesh_dim, 1), {axis for family in families for axis in family}
        for axis in model.architecture.pad:
            for sizes in model.axis_sets():
                size = sizes.get(axis)
                multiple = math.lcm(degree, pad_to)
                if axis in axes and size is not None and size % multiple:
                    padding[axis] = -(-size // multiple) * multiple
    return padding


def padded_sizes(sizes: Mapping[str, int], padding: Mapping[str, int]) -> dict[str, int]:
    """All sizes, with padded sizes in place of the model's own."""
    return {axis: padding.get(axis, size) for axis, size in sizes.items()}
