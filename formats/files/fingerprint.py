"""The fingerprint of a checkpoint's weights: an id that does not depend on where or in which files they lie."""

from __future__ import annotations

import hashlib
import json

from reshard.formats.files.checkpoint import Checkpoint
from reshard.formats.files.safetensors import TensorInfo
from reshard.formats.store import FilePath, read_ranges

_SAMPLES = 1024
_SAMPLE = 64


def fingerprint(checkpoint: Checkpoint) -> str:
    """An id of the weights, in hex, that does not depend on where or in which files they lie.

    SHA-256 over name, dtype and shape of all tensors, sorted by name, and the samples: two fine-tunes of one model
    differ. Raises ``CheckpointError`` if a file can no longer be read.
    """
    ranges = samples(checkpoint)
    contents = {(file, begin): content for (file, begin, _), content in zip(ranges, read_ranges(ranges), strict=True)}
    digest = hashlib.sha256()
    kinds = {kind: json.dumps(kind)[1:] for kind in {(t.dtype, t.shape) for t in checkpoint.tensors.values()}}
    for name in sorted(checkpoint.tensors):
        info = checkpoint.tensors[name]
        digest.update(f"[{json.dumps(name)}, {kinds[info.dtype, info.shape]}".encode())  # [name, dtype, shape]
        digest.update(contents.get((info.file, _middle(info)[0]), b""))
    return digest.hexdigest()


def samples(checkpoint: Checkpoint) -> list[tuple[FilePath, int, int]]:
    """The bytes that the fingerprint takes of the weights: a file, the first byte, and the one behind the last.

    These are up to 64 bytes from the middle of a tensor; of more than 1024 tensors, 1024 at equal distances in the
    order of their names.
    """
    names = sorted(checkpoint.tensors)
    count = min(len(names), _SAMPLES)
    chosen = (checkpoint.tensors[names[i * len(names) // count]] for i in range(count))
    return [(info.file, *_middle(info)) for info in chosen]


def _middle(info: TensorInfo) -> tuple[int, int]:
    length = min(_SAMPLE, info.nbytes)
    begin = info.offset + (info.nbytes - length) // 2
    return begin, begin + length
