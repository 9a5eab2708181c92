"""``--dtype``: a source as if its weights were in another dtype; ``reshard.move.moves`` rounds them on their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from reshard.formats.documents import json_bytes
from reshard.formats.errors import listed, refused
from reshard.formats.files.checkpoint import CONFIG, open_adapter, open_checkpoint
from reshard.formats.files.manifest import SourceRecord
from reshard.formats.files.safetensors import CASTS, DTYPE_BITS, DTYPE_NAMES
from reshard.formats.hints import synonym
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.notation.format_file import HUGGING_FACE
from reshard.formats.store import public_name
from reshard.model.model import AxisSizes, Kind
from reshard.source.source import Cast, Source
from reshard.text import plural
from reshard.transforms.tensors import changed, tensors_of


def cast(source: Source, name: str, stays: Callable[[str], bool] | None = None) -> Source:
    """A source whose model has the weights in the dtype of this name, and those that stay as they are.

    Quantized weights, their scales and integers stay, and of the tensors to be narrowed those of which ``stays`` says
    so, by default what the architecture's file keeps in float32. The dtype in config.json follows. Raises SettingError
    for another name.
    """
    dtype = CASTS.get(word := synonym(str(name)))
    if dtype is None:
        raise refused("dtype", str(name), f"the dtypes are {', '.join(CASTS)}")
    model, config = source.model, _restated(source.model.config, DTYPE_NAMES[dtype])
    dtypes = {tensor.name: tensor.dtype for tensor in model.tensors}
    stays = stays or (lambda name: model.architecture.stays_float32(name, model.sizes.settings, word))
    new, stay, quantized = dict[Kind, Kind](), dict[str, int](), False
    for kind in model.kinds:
        if model.sizes.scheme.companion(kind.name, kind.dtype, dtypes) is not None:
            quantized = True
        elif kind.dtype in DTYPE_NAMES and kind.dtype != dtype:
            if dtype != "F32" and stays(kind.name):
                stay[kind.template] = stay.get(kind.template, 0) + kind.count
            else:
                new[kind] = replace(kind, dtype=dtype)
    how = ", rounded to nearest even" if any(DTYPE_BITS[old.dtype] >= DTYPE_BITS[dtype] for old in new) else ""
    notes = [f"weights were cast to {word}{how}" if new else f"no weight is in another dtype than {word}"]
    if stay:
        shown = listed([f"{template} ({plural(count, 'tensor')})" for template, count in stay.items()], 5)
        notes.append(f"the model keeps these in float32, and they stay: {shown}")
    notes += ["quantized weights and their scales stay"] if quantized else []
    sides = dict(source.side_files)
    if CONFIG in sides and (own := _restated(stated := source.read_config(), DTYPE_NAMES[dtype])) != stated:
        sides[CONFIG] = json_bytes(own) + b"\n"
    tensors = tuple(tensor._replace(kind=new.get(tensor.kind, tensor.kind)) for tensor in model.tensors)
    sizes, kinds = AxisSizes(model.architecture, config, model.sizes.measured), (new.get(k, k) for k in model.kinds)
    model = replace(model, config=config, sizes=sizes, tensors=tensors, kinds=tuple(kinds))
    of = Cast(word, source, lambda: _record(source, opened, word))
    opened = replace(source, model=model, side_files=sides, cast=of).noted(*notes)
    return opened


def _restated(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a config.json with this dtype wherever it has one, except in quantization settings."""
    return {
        key: name
        if key in ("dtype", "torch_dtype") and value in DTYPE_NAMES.values()
        else _restated(value, name)
        if isinstance(value, dict) and key != "quantization_config"
        else value
        for key, value in config.items()
    }


def _record(source: Source, opened: Source, word: str) -> SourceRecord:
    """Return the record of the checkpoint that a merge of the cast source writes: its files, and the fingerprint of its
    weights.
    """
    store = changed(source, f"{public_name(source.path)} (in {word})", tensors_of(opened), opened.side_files)
    is_adapter = SETTINGS in source.model.config
    checkpoint = open_adapter(store, None, dict(source.model.config)) if is_adapter else open_checkpoint(store)
    of_merge = replace(source, path=store, format=HUGGING_FACE, checkpoint=checkpoint, was_named=source.names_of)
    return of_merge.record
