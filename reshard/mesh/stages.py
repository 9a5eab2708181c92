"""Pipeline parallelism: which stage has which layers, and which has the tensors before and after them.

A stage has consecutive layers. A tensor with a layer's number in its name is on that layer's stage. ``[stages]`` in an
architecture file says which tensors come after the layers: they are on the last stage, all others on the first. A tied
embedding is on both.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeVar

from reshard.formats.errors import PlanError, brief, refused
from reshard.formats.mesh import Mesh
from reshard.formats.notation.expressions import Expression
from reshard.formats.notation.heads import is_headless
from reshard.model.model import BoundTensor, Kind, Model

_Key = TypeVar("_Key")


def with_stages(model: Model, mesh: Mesh) -> Mesh:
    """The same mesh with the number of layers of each pipeline stage; MTP layers do not count.

    Raises PlanError if config.json does not give their number, if there are more stages than layers, or if the mesh has
    another number of layers.
    """
    if mesh.pp == 1:
        return mesh
    layers = model.architecture.layers
    count = model.sizes.count(layers.text, {}, without=predicts_further)
    if count is None:
        count = model.sizes.evaluate(layers, {}) or model.sizes.of({}).get(layers.text)
    if not isinstance(count, int) or count < 1:
        raise refused("pp", None, f"config.json does not give the number of layers ('{layers.text}')")
    if mesh.stages and sum(mesh.stages) != count:
        why = f"that is {sum(mesh.stages)} layers of {count}"
        raise refused("pp_layers", mesh.stages, why)
    if mesh.pp > count:
        raise refused("pp", mesh.pp, f"there are more stages than layers ({count})", advice=f"give at most {count}")
    return replace(mesh, stages=mesh.stages or even_stages(count, mesh.pp))


def even_stages(layers: int, degree: int) -> tuple[int, ...]:
    """Return the default number of layers of each stage.

    Remaining layers go one each to the stages just before the last, which has the norm and the head (as in vLLM).
    """
    least, remainder = divmod(layers, degree)
    return tuple(least + (degree - 1 - remainder <= stage < degree - 1) for stage in range(degree))


def predicts_further(name: str) -> bool:
    """Whether a setting or a name belongs to MTP layers (multi-token prediction)."""
    return "nextn" in name or "mtp" in name


def layers_at(mesh: Mesh, stage: int) -> range:
    """The numbers of the layers of a stage of a plan's mesh."""
    first = sum(mesh.stages[:stage])
    return range(first, first + mesh.stages[stage])


def staged(model: Model, mesh: Mesh) -> Model:
    """The same model with the pipeline stages of each kind; layers of different stages are of different kinds.

    The mesh is one of ``with_stages``. Raises PlanError for a tensor that every stage would need.
    """
    if mesh.pp == 1:
        has_none = all(kind.stages is None for kind in model.kinds)
        return model if has_none else divided(model, lambda _: 0, lambda *_: None)
    if not model.architecture.stages:  # a manifest of an older version
        why = f"the rules '{model.architecture.name}' have no [stages]"
        advice = "'reshard plan' saves those of the original"
        raise refused("pp", mesh.pp, why, instead=({"plan_file": "FILE"},), advice=advice)
    last, ends = mesh.pp - 1, [*itertools.accumulate(mesh.stages)][:-1]
    wheres = {kind: _where(model, kind) for kind in model.kinds}
    fixed = dict[Kind, int]()
    for kind, where in wheres.items():
        if where is not None and where.text == "every":
            raise refused("pp", mesh.pp, f"every stage would need the tensor '{kind.name}'", tensor=kind.name)
        if where is None or where.text in {"first", "last"}:
            fixed[kind] = last if where is not None and where.text == "last" else 0
    tables = [(kind.template, at) for kind, at in fixed.items() if model.architecture.is_table(kind.template)]
    # the embedding, if the last stage has no head of its own and the config does not say otherwise
    is_tied = all(at != last for _, at in tables) and _is_tied(model)
    tied = {template for template, _ in tables if is_tied}

    @cache
    def stage_of(kind: Kind, at: tuple[int, ...]) -> int:
        where = wheres[kind]
        if kind in fixed or where is None:
            return fixed[kind]
        layer = model.sizes.evaluate(where, dict(zip(kind.index_axes, at, strict=True)))
        if not isinstance(layer, int | float):
            raise PlanError(f"[stages]: '{where.text}' is {brief(layer)} for '{kind.name}', not the number of a layer")
        return bisect_right(ends, layer)

    both = frozenset({0, last})
    divided_model = divided(
        model,
        lambda tensor: stage_of(tensor.kind, tensor.at),
        lambda kind, at: both if kind.template in tied else frozenset({at}),
    )
    layered = {stage_of(kind, at) for _, kind, at in model.tensors if kind not in fixed}
    if empty := sorted({*range(mesh.pp)} - layered):
        layers = model.architecture.layers.text
        raise refused("pp", mesh.pp, f"stage {empty[0]} would have no layer ('{layers}' in names)")
    return divided_model


def divided(
    model: Model,
    key: Callable[[BoundTensor], _Key],
    stages: Callable[[Kind, _Key], frozenset[int] | None] = lambda kind, _: kind.stages,
) -> Model:
    """The same model with kinds divided so that all tensors of a kind have the same key, and with these ``stages``."""
    of_kind: dict[tuple[Kind, _Key], list[BoundTensor]] = {}
    keys = [(tensor.kind, key(tensor)) for tensor in model.tensors]
    for tensor, pair in zip(model.tensors, keys, strict=True):
        of_kind.setdefault(pair, []).append(tensor)
    kinds = {}
    for (kind, value), alike in of_kind.items():
        layers = kind.layers & {tensor.at[0] for tensor in alike if tensor.at}
        own = stages(kind, value)
        kinds[kind, value] = replace(kind, name=alike[0].name, count=len(alike), layers=layers, stages=own)
    tensors = (tensor._replace(kind=kinds[pair]) for tensor, pair in zip(model.tensors, keys, strict=True))
    return replace(model, tensors=tuple(tensors), kinds=tuple(kinds.values()))


def is_layered(model: Model, kind: Kind) -> bool:
    """Whether tensors are on the stage of their layer, and not before or after all layers."""
    where = _where(model, kind)
    return where is not None and where.text not in {"first", "last", "every"}


def _where(model: Model, kind: Kind) -> Expression | None:
    """Return the architecture's expression for the stage of tensors; None: before the layers."""
    layers = model.architecture.layers
    is_numbered = layers.text in kind.index_axes
    return model.architecture.stage_of(kind.name) or (layers if is_numbered else None)


def _is_tied(model: Model) -> bool:
    """True if the LM head reuses the weights of the embedding; asked of a model whose head has no table of its own.

    Some config.json (Marian's) say that weights are not tied where they are.
    """
    classes = model.config.get("architectures")
    if not isinstance(classes, list) or not classes:
        settings = (model.config, model.sizes.settings)
        return not any(settings_of.get("tie_word_embeddings") is False for settings_of in settings)
    return not is_headless(model.config)
