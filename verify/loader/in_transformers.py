"""transformers, on a CPU: its model as ``from_pretrained`` makes it of the original, and of the shards.

The shards are a whole checkpoint again, or one in chunks, which torch's own reader puts together. Both models are in
memory at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reshard.verify.loader.chunks import read
from reshard.verify.loader.program import ProgramRank, Request


def prepare(request: Request) -> str:
    """Import transformers."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return f"transformers {transformers.__version__}"


def ranks(request: Request) -> Iterator[ProgramRank]:
    """The model, which has one part. What the loader of neither folder takes is ignored."""
    state: dict[str, Tensor] = {}
    model, unknown = _loaded(request.original, request.dtype)
    own = model.state_dict()
    if not any(Path(request.shards).glob("model*.safetensors")):
        files, further = read(request.shards, own)
        known = {tensor.data_ptr() for name, tensor in own.items() if name in files}
        own = {name: x for name, x in own.items() if name in files or x.data_ptr() not in known}  # one name is enough
    else:
        shards, further = _loaded(request.shards, request.dtype)
        files = shards.state_dict()
    extra = further - unknown
    files |= {name: torch.empty(0) for name in extra}
    yield ProgramRank("rank 0", lambda: state, files, lambda: state.update(own), ignored=sorted(further - extra))


def _loaded(folder: str, dtype: str | None) -> tuple[Any, set[str]]:
    """A model, and the names in its files that it has no use for. Raises KeyError if it lacks one."""
    import transformers

    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    kind = getattr(transformers, (config.get("architectures") or ["AutoModel"])[0], transformers.AutoModel)
    model, info = kind.from_pretrained(folder, dtype=dtype or "auto", output_loading_info=True)
    if info["missing_keys"]:
        raise KeyError(f"{folder} has no {', '.join(sorted(info['missing_keys'])[:3])}")
    return model, set(info["unexpected_keys"])
