"""Why a degree is not possible, in the words of the field rather than the names of axes.

Only words: ``degrees.py`` decides, and asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from formats.notation.axes import Dim, Share

_COUNTED: Mapping[tuple[str, ...], str] = {
    ("kv", "group"): "attention heads",
    ("heads",): "attention heads",
    ("kv",): "KV heads",
    ("skv", "sgroup"): "heads of sliding-window attention",
    ("sheads",): "heads of sliding-window attention",
    ("chunk", "per", "sgroup"): "heads of sliding-window attention",
    ("chunk", "per"): "KV heads of sliding-window attention",
    ("chunk",): "groups of KV heads of sliding-window attention",
    ("skv",): "KV heads of sliding-window attention",
    ("gkv", "ggroup"): "heads of global attention",
    ("gkv",): "KV heads of global attention",
    ("ekv", "egroup"): "attention heads of the encoder",
    ("dkv", "dgroup"): "attention heads of the decoder",
    ("dkv",): "attention heads of the decoder",
    ("kheads", "vper"): "value heads of linear attention",
    ("kheads",): "key heads of linear attention",
    ("lheads",): "heads of linear attention",
    ("g", "per"): "heads of the state-space layers",
    ("g",): "groups of the state-space layers",
    ("mheads",): "heads of the state-space layers",
    ("groups",): "groups of the attention's output",
    ("blocks",): "blocks of the recurrent layers",
    ("expert",): "experts",
}
_MEASURED: Mapping[str, str] = {
    "ff": "an intermediate size",
    "dense_ff": "an intermediate size of dense layers",
    "wide_ff": "an intermediate size of wide layers",
    "moe_ff": "an intermediate size of experts",
    "text_ff": "an intermediate size of experts for text",
    "image_ff": "an intermediate size of experts for images",
    "shared_ff": "an intermediate size of shared experts",
    "rff": "an intermediate size of the residual MLP",
    "eff": "an intermediate size of the encoder",
    "dff": "an intermediate size of the decoder",
    "gff": "an intermediate size of the global model",
    "inner": "an inner size of the state-space layers",
    "channel": "a number of channels",
    "vocab": "a vocabulary",
    "draft": "a draft's vocabulary",
    "dvocab": "a vocabulary of the decoder",
    "layer_vocab": "a vocabulary of each layer",
    "rows": "a number of rows of the embedding",
    "hashes": "a number of hashed embeddings",
    "ngram_dim": "a size of n-gram embeddings",
}


def does_not_divide(family: Sequence[tuple[str, int]], degree: int) -> str:
    """``12 attention heads do not divide by 5``: why a family of axes with these sizes does not absorb a degree."""
    axes, size = tuple(axis for axis, _ in family), math.prod(size for _, size in family)
    if axes in _COUNTED:
        return f"{size:,} {_COUNTED[axes]} do not divide by {degree}"
    return f"{_size_of(axes, size)} does not divide by {degree}"


def too_few_units(axis: str, size: int, unit: int, degree: int) -> str:
    """``an intermediate size of 96 in units of 32 is enough for 3 of 4 ranks``."""
    each = Share(degree, 0, unit).run(size).length
    return f"{_size_of((axis,), size)} in units of {unit} is enough for {-(-size // each)} of {degree} ranks"


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
    named = next((name for end in range(len(axes), 0, -1) if (name := _COUNTED.get(axes[:end]))), None)
    if named:
        return f"{size:,} rows of {named} are {blocks}"
    return f"{_size_of(axes, size)} is {blocks}" if axes == factors else None


def _size_of(axes: Sequence[str], size: int) -> str:
    if len(axes) == 1 and axes[0] in _MEASURED:
        return f"{_MEASURED[axes[0]]} of {size:,}"
    return f"a size of {size:,} ({' x '.join(axes)})"
