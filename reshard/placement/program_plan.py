"""A plan for a format: whether a program takes the model on these ranks, how it pads, and which settings it refuses.

A program's own config file is made from ``config.json``, and the other way, by the expressions of its format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from reshard.formats.errors import NotationError, PlanError, refused
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.notation.expressions import Expression, Lookup
from reshard.formats.notation.format import Format, ProgramConfig
from reshard.mesh.degrees import unevenly
from reshard.mesh.plan import Degrees, Plan, make_plan
from reshard.model.model import Model, padding_for
from reshard.placement.kept_fields import not_kept
from reshard.placement.portions import apart_by_lines, check_model_type


def program_config(settings: ProgramConfig, model: Model) -> dict[str, Any]:
    """The content of a program's config file for a model. Raises PlanError."""
    return _evaluated(settings.write, model.sizes.look_up, settings.file)


def made_config(
    settings: ProgramConfig,
    document: Mapping[str, Any],
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
    ranks: int,
) -> dict[str, Any]:
    """The ``config.json`` of a model, made from a program's config file and the stored tensors' shapes and dtypes.

    Besides the file's entries, expressions may use ``shapes`` and ``dtypes``, which have those of the first rank's
    ``tensors`` by name, and ``ranks``, the number of ranks. Raises PlanError.
    """
    shapes, dtypes = dict[str, list[int]](), dict[str, str]()
    for name, dtype, shape in tensors:
        shapes[name], dtypes[name] = list(shape), dtype
    stored = {"shapes": shapes, "dtypes": dtypes, "ranks": ranks}
    config = _evaluated(settings.read, {**document, **stored}.get, "config.json")
    # transformers has defaults of its own for what is not there
    return {key: config.get(key) for key in settings.read if "." not in key} | config


def _evaluated(expressions: Mapping[str, Expression], look_up: Lookup, file: str) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for key, expression in expressions.items():
        try:
            value = expression.evaluate(look_up)
        except NotationError as error:
            raise PlanError(f"{file}: '{key}' cannot be made: {error.message}", error.hint) from None
        if value is not None:
            *outer, last = key.split(".")
            inner = document
            for name in outer:
                inner = inner.setdefault(name, {})
            inner[last] = value
    return document


def plan_for(model: Model, format: Format, degrees: Degrees, *, files: bool = True) -> Plan:
    """The plan by which a model is written in a format, or, without ``files``, held in a program's modules.

    Raises PlanError if the program cannot take it, or the degree is not possible, and for stages if the format has no
    file names for them.
    """
    if format.plain:
        mesh = unevenly(model, degrees.mesh) if degrees.uneven else degrees.mesh
        pad, multiple = degrees.pad_vocab, degrees.pad_vocab_to
        return make_plan(model, mesh, pad=pad, pad_to=multiple, lacking=_lacking(degrees))
    if format.same_ranks and degrees.ep == 1 and degrees.tp > 1 and model.architecture.expert_axes:
        degrees = replace(degrees, ep=degrees.tp, same_ranks=True)
    ep, mesh = degrees.ep, degrees.mesh
    if ep > 1 and not degrees.same_ranks and not format.container.chunks and format.files.ep is None:
        why, advice = "its files have the numbers of tp alone", "it divides experts over the ranks of tp"
        instead = ({"tp": ep, "ep": ep, "same_ranks": True},)
        raise refused("ep", ep, why, format=format.name, instead=instead, advice=advice)
    if mesh.pp > 1 and format.files.pp is None:
        raise refused("pp", mesh.pp, "its ranks have all layers", format=format.name)
    check_demands(model, format, mesh, files=files)
    return program_plan(model, format, mesh, pad=degrees.pad_vocab, lacking=_lacking(degrees))


_UNTAKEN = ("dequantize",)


def _lacking(degrees: Degrees) -> tuple[str, ...]:
    """The fields that make a degree possible, but not of this request: it has none, or it quantizes itself."""
    return () if hasattr(degrees, "dequantize") and not getattr(degrees, "quantize", None) else _UNTAKEN


def check_demands(model: Model, format: Format, mesh: Mesh, *, files: bool = True) -> None:
    """Raise PlanError if a program cannot take a model on these ranks, in files or in its modules."""
    if (not format.files.is_distributed or format.files.is_single) and SETTINGS in model.config:
        from reshard.formats.notation.adapters import MERGE_IT

        raise PlanError(f"an adapter has no place in the format '{format.name}'", MERGE_IT)
    check_model_type(model, format, files=files)
    kind = format.types.name_of(model.config)
    compared = format.types.meshes.get(kind, dict.fromkeys(dict(mesh.degrees)))  # any mesh of a type without a table
    for dimension, degree in mesh.degrees:
        if dimension not in compared:
            why = f"what {format.loading.program} has of '{kind}' was compared with {' and '.join(compared)} alone"
            advice = "leave it out, or write another format"
            raise refused(dimension, degree, why, format=format.name, advice=advice)
        largest = compared[dimension]
        if largest is not None and degree > largest:
            why = f"how {format.loading.program} splits '{kind}' was compared up to {dimension} {largest}"
            advice = f"give {largest} or less, or write another format"
            raise refused(dimension, degree, why, format=format.name, advice=advice)

    def look_up(name: str) -> Any:
        degrees = {"ranks": mesh.size, "tp": dict(mesh.degrees).get("tp", 1)}
        return degrees[name] if name in degrees else model.sizes.look_up(name)

    for condition, why in format.demands:
        if not condition.evaluate(look_up):
            raise PlanError(
                f"the format '{format.name}' is not possible for {mesh}: {why}",
                "'reshard formats SOURCE' says which formats are possible",
            )


def program_plan(
    model: Model, format: Format, mesh: Mesh, *, pad: bool = True, padding: Mapping[str, int] | None = None,
    lacking: Collection[str] = _UNTAKEN,
) -> Plan:  # fmt: skip
    """The plan of a model on a mesh, padded as a program's format says.

    With ``pad=False`` a vocabulary that does not divide is refused. ``padding`` has the padded sizes of existing
    shards. If the files have chunks and nothing is padded, axes that do not divide are split unevenly. Raises PlanError
    if the degree is not possible; its hint names no field that is ``lacking``.
    """
    model = apart_by_lines(model, format)
    if padding is not None:
        return make_plan(model, mesh, padding=padding)
    lacking = {*not_kept(format), *lacking}
    if format.container.chunks and format.padding.to is None:
        units = dict.fromkeys(sorted(padding_for(model, mesh, 1)), 1) | dict(mesh.uneven)
        return make_plan(model, replace(mesh, uneven=tuple(units.items())), pad=False, lacking=lacking)
    padded = [sizes[axis] for sizes in model.axis_sets() for axis in model.architecture.pad if axis in sizes]
    multiple = format.padding.multiple(padded, dict(mesh.degrees).get("tp", 1))
    return make_plan(model, mesh, pad=pad and multiple > 0, pad_to=max(multiple, 1), lacking=lacking)
