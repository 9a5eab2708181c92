"""A plan for another program's format: whether the program takes the model on these ranks, and how it pads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from formats.errors import PlanError
from formats.mesh import Mesh
from formats.notation.rewrites import Page
from reshard.planning.kept_options import not_kept
from reshard.planning.model import Model
from reshard.planning.plan import Plan, make_plan
from reshard.planning.portions import apart_by_lines, check_model_type
from reshard.planning.shares import padding_for


def plan_for(model: Model, page: Page, mesh: Mesh, *, pad: bool = True) -> Plan:
    """The plan by which a model is written in a program's format.

    Raises PlanError if the program cannot take it, or the degree is not possible.
    """
    check_demands(model, page, mesh)
    return program_plan(model, page, mesh, pad=pad)


def check_demands(model: Model, page: Page, mesh: Mesh) -> None:
    """Raise PlanError if a program cannot take a model on these ranks."""

    check_model_type(model, page)
    _check_compared(model, page, mesh)

    def look_up(name: str) -> Any:
        known = {"ranks": mesh.size, "tp": dict(mesh.degrees).get("tp", 1)}
        return known[name] if name in known else model.sizes.look_up(name)

    for demand in page.demands:
        if not demand.holds.evaluate(look_up):
            raise PlanError(
                f"the format '{page.name}' is not possible for {mesh}: {demand.why}",
                "docs/formats.md says what it can hold; 'reshard formats SOURCE' says which formats are possible",
            )


def _check_compared(model: Model, page: Page, mesh: Mesh) -> None:
    """Raise PlanError for a mesh on which it is not known what a program has of a model of this type."""
    kind = page.type_of(model.config)
    if kind not in page.meshes:
        return
    compared = page.meshes[kind]
    for dimension, degree in mesh.degrees:
        if dimension not in compared:
            raise PlanError(
                f"the format '{page.name}' is not possible for {mesh}: what {page.loaded_by} has of '{kind}' was "
                f"compared with {' and '.join(f'--{name}' for name in compared)} alone",
                f"leave out --{dimension}, or write another format",
            )
        largest = compared[dimension]
        if largest is not None and degree > largest:
            raise PlanError(
                f"--{dimension} {degree} is not possible with the format '{page.name}': how {page.loaded_by} splits "
                f"'{kind}' was compared up to --{dimension} {largest}",
                f"give --{dimension} {largest} or less, or write another format",
            )


def program_plan(
    model: Model, page: Page, mesh: Mesh, *, pad: bool = True, padding: Mapping[str, int] | None = None
) -> Plan:
    """The plan of a model on a mesh, padded as a program's page says.

    With ``pad=False`` a vocabulary that does not divide is refused. ``padding`` has the padded sizes of what is stored.
    Where files have boxes and nothing is padded, what does not divide is dealt unevenly. Raises PlanError if the degree
    is not possible.
    """
    model = apart_by_lines(model, page)
    if padding is not None:
        return make_plan(model, mesh, padding=padding)
    lacking = not_kept(page.name, page)
    if page.boxes and page.pad_to == 1:
        units = dict.fromkeys(sorted(padding_for(model, mesh, 1)), 1) | dict(mesh.uneven)
        return make_plan(model, replace(mesh, uneven=tuple(units.items())), pad=False, lacking=lacking)
    return make_plan(model, mesh, pad=pad and page.pad_to > 0, pad_to=_multiple(model, page, mesh), lacking=lacking)


def _multiple(model: Model, page: Page, mesh: Mesh) -> int:
    """What the vocabulary is padded to a multiple of."""
    multiple, degree = max(page.pad_to, 1), dict(mesh.degrees).get("tp", 1)
    if page.pad_product:
        return multiple * degree
    if page.pad_times_degree:
        sizes = [sizes[axis] for sizes in model.axis_sets() for axis in model.architecture.pad if axis in sizes]
        if any(-(-size // multiple) * multiple % degree for size in sizes):
            return multiple * degree
    return multiple
