"""Whether Megatron-Core computes the same from shards as transformers from the original: ``verify --engine`` for it.

Megatron-Core loads no Hugging Face checkpoint, so transformers runs the original in its place: its run in the dtype of
the engine's stands for the engine's, and the exact values are those in the next wider dtype. What Megatron-Core must be
told of a model is in megatron_settings.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from reshard.formats.errors import CheckpointError
from reshard.formats.mesh import Mesh
from reshard.formats.notation.expressions import read_expression
from reshard.formats.notation.format import Format
from reshard.mesh.stages import with_stages
from reshard.model.model import Model
from reshard.source.source import Source
from reshard.verify.engine.compare import (
    Baseline,
    EngineOptions,
    EngineReport,
    check_power,
    in_engine,
    in_transformers,
    tokens_of,
)

RUNNER = Path(__file__).with_name("megatron_run.py")
_DATA = Path(__file__).with_name("megatron_settings.toml")


def settings_for(model: Model, format: Format) -> dict[str, Any]:
    """The class of the model's settings in Megatron-Core, their values, the arguments of its model, and what a format
    of Megatron's means for the modules.

    Raises CheckpointError for a model that Megatron-Core cannot be told of.
    """
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    kind = format.types.name_of(model.config)
    if kind not in data["model_types"]:
        raise CheckpointError(f"how Megatron-Core runs a '{kind}' is not known")

    def value(text: str, **indices: int) -> Any:
        return model.sizes.evaluate(read_expression(text), indices)

    for holds, why in data["demands"].items():
        if not value(holds):
            raise CheckpointError(f"Megatron-Core does not run this '{kind}': {why}")
    layers = range(value(data["config"]["num_layers"]))
    config = {key: value(text) for key, text in data["config"].items()}
    config |= {key: [value(text, layer=layer) for layer in layers] for key, text in data["layers"].items()}
    further = 1 + max(_layers(model), default=-1) - len(layers)
    if further > 0:
        config["mtp_num_layers"] = further
    return {
        "class": next(name for holds, name in data["classes"].items() if value(holds)),
        "config": {key: found for key, found in config.items() if found is not None and found != [None] * len(layers)},
        "model": {key: value(text) for key, text in data["model"].items()},
        "form": data["forms"][format.name],
    }


def _layers(model: Model) -> Iterator[int]:
    """The layers that a model has tensors of; those that predict further tokens come behind the others."""
    axes = {kind: kind.index_axes for kind in model.kinds}
    for tensor in model.tensors:
        at = dict(zip(axes[tensor.kind], tensor.at, strict=True))
        yield at.get(model.architecture.layers.text, -1)


def run_original(original: Source, options: EngineOptions) -> Baseline:
    """Run the original in transformers, in two dtypes. Raises ReshardError if it cannot run."""
    tokens, dtype = tokens_of(original, options), getattr(torch, options.dtype)
    exact = in_transformers(original, tokens, torch.float64 if dtype == torch.float32 else torch.float32)
    whole = in_transformers(original, tokens, dtype)
    check_power(exact, whole, "transformers")
    return Baseline(tokens, exact, whole)


def run_shards(baseline: Baseline, shards: Source, mesh: Mesh | None = None, save: Path | None = None) -> EngineReport:
    """Run shards in Megatron-Core, on their own mesh or another (of a format with chunks), and compare.

    It saves what it has loaded in the folder ``save``. Raises ReshardError if it cannot run them.
    """
    assert mesh is None or shards.format.container.chunks, "ranks are loaded on their own mesh alone"
    mesh = with_stages(shards.model, mesh or shards.plan.mesh)
    further = {
        "settings": settings_for(shards.model, shards.format), "stages": mesh.stages,
        "save": str(save) if save else None,
    }  # fmt: skip
    return baseline.report("megatron", mesh, in_engine("megatron", RUNNER, further, shards, mesh, baseline.tokens))
