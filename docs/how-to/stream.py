"""A rank of an unsplit checkpoint, read by Run:ai's streamer: its own bytes alone.

pip install runai-model-streamer
reshard demo demo && python docs/how-to/stream.py demo/model 2 1
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from runai_model_streamer.file_streamer.file_streamer import FileStreamer
from runai_model_streamer.file_streamer.requests_iterator import FileChunks

import reshard
from reshard.formats.torch_internals import TORCH_DTYPES


def stream(model: str, tp: int, rank: int) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of a rank by name, and how many bytes were read."""
    tensors, rows = dict[str, torch.Tensor](), dict[str, list[tuple[int, np.ndarray]]]()
    for each in reshard.slices(model, tp=tp, rank=rank):
        if each.name not in tensors:
            tensors[each.name] = torch.zeros(each.tensor, dtype=TORCH_DTYPES[each.dtype])
        memory = tensors[each.name].view(-1).view(torch.uint8).numpy()
        into = np.ndarray(each.shape, np.uint8, memory, each.place, each.steps)
        if each.file is not None:  # else they are zeros
            for index in np.ndindex(each.shape[:-1]):
                offset = each.offset + sum(i * stride for i, stride in zip(index, each.strides, strict=False))
                rows.setdefault(each.file, []).append((offset, into[index]))
    files = [FileChunks(number, file, [at for at, _ in own], [into.size for _, into in own])
             for number, (file, own) in enumerate(rows.items())]  # fmt: skip
    parts, nbytes = [*rows.values()], 0
    with FileStreamer() as streamer:
        streamer.stream_files(files)
        for file, number, content in streamer.get_chunks():
            parts[file][number][1][:] = content.view(torch.uint8).numpy()
            nbytes += content.nbytes
    return tensors, nbytes


if __name__ == "__main__":
    model, tp, rank = sys.argv[1], *map(int, sys.argv[2:])
    found, nbytes = stream(model, tp, rank)
    wanted = reshard.load(model, tp=tp, rank=rank)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    print(f"{len(found)} tensors, {sum(t.nbytes for t in found.values()):,} bytes owned, {nbytes:,} bytes read")
