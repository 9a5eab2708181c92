"""Damages containers (``.metadata``, ``.distcp``, ``.bin``, ``.pt``, boxes in safetensors) and reads them: a result, or
one short line.

Damage is done to what the bytes mean: to instructions of pickles, fields of zip directories and numbers of headers, and
to bytes alone. Seeds take the targets in turn, so each has as many as any other.
``python -m tests.fuzz_containers --seconds 1800`` runs until the time is over; a failure shows the seed that makes it
again, with ``--seed N --runs 1``. ``tests/test_fuzz_containers.py`` runs the first seeds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pickletools
import random
import re
import resource
import struct
import sys
import time
import traceback
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from reshard.formats.errors import LONGEST_LINE, ReshardError
from reshard.formats.files.checkpoint import METADATA
from reshard.formats.files.chunks import chunks_metadata, read_chunks
from reshard.formats.files.dcp import read_distributed
from reshard.formats.files.safetensors import TensorInfo, read_header
from reshard.formats.files.torch_archive import read_bin, read_saved
from tests.fuzz import run_seeds

SECONDS = 5.0
"""What one reading may take of the processor: that others use it, too, is no fault of the reader's."""
MEMORY = 1 << 30
"""Bytes of memory that may be needed."""
ORACLES = Path(__file__).parent / "oracles" / "dcp"
NUMBERS = (0, 1, 2, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
NAMES = ("os.system", "builtins.eval", "torch.Size", "collections.OrderedDict", "torch.float32", "x" * 5000, "\n", "²")
GOOD = b"]}()N\x88\x89\x85\x86\x87\x8f\x90\x93\x94tbueaRsQ0122.q\x00h\x00h\x01K\x07J\xff\xff\xff\xff\x81\x8c\x01x"


def of_bytes(content: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, left out, put in, repeated or moved."""
    first, last = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    last = min(last, first + chance.choice([1, 2, 4, 8, 100, len(content)]))
    piece, kind = content[first:last], chance.randrange(6)
    if kind == 0:
        piece = bytes(chance.randrange(256) for _ in piece[:16]) + piece[16:]
    elif kind == 1:
        piece = b""
    elif kind == 2:
        piece = piece * 2
    elif kind == 3:
        piece = bytes(chance.choice(GOOD) for _ in range(chance.randint(1, 8))) + piece
    elif kind == 4:
        piece = chance.choice([b"(", b"]", b"\x85", b"}", b"2"]) * chance.choice([1, 100, 100_000]) + piece
    else:
        return content[:first]
    return content[:first] + piece + content[last:]


def of_instructions(content: bytes, chance: random.Random) -> bytes:
    """Some instructions of a pickle changed, left out, repeated or moved, and their numbers and texts."""
    starts = [position or 0 for *_, position in pickletools.genops(content)] + [len(content)]
    steps = [content[begin:end] for begin, end in itertools.pairwise(starts)]
    for _ in range(chance.randint(1, 3)):
        place, other = chance.randrange(len(steps)), chance.randrange(len(steps))
        kind = chance.randrange(6)
        if kind == 0:
            del steps[place]
        elif kind == 1:
            steps.insert(place, steps[other])
        elif kind == 2:
            steps[place] = steps[other]
        elif kind == 3:
            number = chance.choice(NUMBERS) * chance.choice([1, 1, -1])
            width = number.bit_length() // 8 + 1
            steps[place] = b"\x8a" + bytes([width]) + number.to_bytes(width, "little", signed=True)
        elif kind == 4:
            text = chance.choice(NAMES).encode()
            steps[place] = b"X" + struct.pack("<I", len(text)) + text
        else:
            steps[place] = b"c" + chance.choice(NAMES).rpartition(".")[0].encode() + b"\nx\n"
        if not steps:
            return b""
    return b"".join(steps)


def of_directories(content: bytes, chance: random.Random) -> bytes:
    """A field of a zip archive's headers."""
    signatures = [b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"]
    found = [place for sign in signatures for place in _all(content, sign)]
    if not found:
        return of_bytes(content, chance)
    place, width = chance.choice(found) + chance.randrange(4, 46), chance.choice([1, 2, 4, 8])
    number = chance.choice([*NUMBERS, chance.randrange(1 << 16)]) % (1 << 8 * width)
    return content[:place] + number.to_bytes(width, "little") + content[place + width :]


def of_headers(content: bytes, chance: random.Random) -> bytes:
    """A number, a word or a bracket of a safetensors header, which stays as long as its first eight bytes say."""
    length = min(int.from_bytes(content[:8], "little"), len(content) - 8)
    header = content[8 : 8 + length].decode("utf-8", "replace")
    words = [*re.finditer(r"\d+|\w+|[\[\]{}:,]", header)]
    if not words:
        return of_bytes(content, chance)
    word = chance.choice(words)
    instead = chance.choice([str(chance.choice(NUMBERS)), "-1", "1.5", "null", "F64", "[" * 300, '"', "", word[0] * 2])
    new = (header[: word.start()] + instead + header[word.end() :]).encode()
    said = len(new) if chance.randrange(4) else length
    return said.to_bytes(8, "little") + new + content[8 + length :]


def _all(content: bytes, word: bytes) -> list[int]:
    found, place = list[int](), content.find(word)
    while place >= 0:
        found.append(place)
        place = content.find(word, place + 1)
    return found


def of_pickles_within(content: bytes, chance: random.Random) -> bytes:
    """A pickle in one of the archives of a file, of the same length if that can be."""
    places = [place for place in _all(content, b"\x80\x02") if b"torch._utils" in content[place : place + 300]]
    if not places:
        return of_bytes(content, chance)
    begin = chance.choice(places)
    end = content.index(b".PK", begin) + 1 if b".PK" in content[begin:] else min(begin + 300, len(content))
    new = of_bytes(content[begin:end], chance)
    return content[:begin] + new[: end - begin].ljust(end - begin, b".") + content[end:]


# ----------------------------------------------------------------------------------------------------------- targets


def _inside(infos: Sequence[TensorInfo]) -> None:
    for info in infos:
        assert 0 <= info.offset <= info.file.stat().st_size - info.nbytes, info


def read_folder(folder: Path) -> None:
    """Read a distributed checkpoint."""
    found = read_distributed(folder)
    for whole in found.tensors.values():
        _inside([info for _, info in whole.chunks])
        assert math.prod(whole.shape) == sum(math.prod(at.shape) for at, _ in whole.chunks)


def read_file(folder: Path) -> None:
    """Read a file of torch.save."""
    _inside([*read_bin(folder / "pytorch_model.bin")[0].values()])


def read_boxes_of(folder: Path) -> None:
    """Read the header of a file that has boxes of tensors."""
    header = read_header(folder / "shard.safetensors")
    _inside([*header.tensors.values()])
    for name, at in read_chunks(folder / "shard.safetensors", header.metadata, header.tensors).items():
        assert len(at.offset) == len(header.tensors[name].shape)


def read_rank(folder: Path) -> None:
    """Read a rank's file of Megatron-LM's older form."""
    for tensors, _ in read_saved(folder / "model_optim_rng.pt", "model").states.values():
        _inside([*tensors.values()])


Change = Callable[[bytes, random.Random], bytes]
TARGETS: Sequence[tuple[str, str, Sequence[Change], Callable[[Path], None]]] = (
    ("fsdp_adam", METADATA, (of_bytes, of_instructions, of_instructions), read_folder),
    ("fsdp_tp", METADATA, (of_bytes, of_instructions), read_folder),
    ("fsdp_adam", "__0_0.distcp", (of_bytes, of_directories, of_pickles_within), read_folder),
    ("fsdp_tp", "__3_0.distcp", (of_bytes, of_directories, of_pickles_within), read_folder),
    ("bin", "pytorch_model.bin", (of_bytes, of_directories, of_pickles_within), read_file),
    ("legacy", "model_optim_rng.pt", (of_bytes, of_directories, of_pickles_within), read_rank),
    ("boxes", "shard.safetensors", (of_headers, of_headers, of_bytes), read_boxes_of),
)


def make_base(root: Path) -> None:
    """What is damaged: distributed checkpoints that torch wrote, and a file of torch.save."""
    import torch
    from safetensors.torch import save_file

    for case in ("fsdp_adam", "fsdp_tp"):
        with zipfile.ZipFile(ORACLES / f"{case}.zip") as archive:
            archive.extractall(root / f"{case}-whole")
        (root / f"{case}-whole" / "dcp").rename(root / case)
    (root / "bin").mkdir()
    shared = torch.ones(3)
    state = {"a": shared, "b": shared, "c": torch.nn.Parameter(torch.ones(2, 2)), "step": 1, "d": torch.zeros(2).half()}
    torch.save(state, root / "bin" / "pytorch_model.bin")
    for folder in ("legacy", "boxes"):
        (root / folder).mkdir()
    model = OrderedDict({"a.weight": torch.ones(4, 2), "a._extra_state": None, "b": state["d"]})
    file = {"args": argparse.Namespace(tp=2, name="x"), "checkpoint_version": 3.0, "iteration": 7, "model": model}
    torch.save(file | {"optimizer": {"state": [shared, 1]}}, root / "legacy" / "model_optim_rng.pt")
    boxes = chunks_metadata({"a": (4, 0), "b": (0,)})
    save_file({"a": torch.ones(4, 2), "b": torch.zeros(3).half()}, root / "boxes" / "shard.safetensors", boxes)


def fuzz(root: Path, seed: int) -> list[str]:
    """Damage a file by a seed and read what it belongs to: what is wrong with the answer. The file is put back."""
    chance = random.Random(seed)
    case, name, changes, read = TARGETS[seed % len(TARGETS)]
    path = root / case / name
    good = path.read_bytes()
    content, change = good, chance.choice(changes)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        try:
            content = change(content, chance)
        except (ValueError, IndexError, struct.error):  # an earlier change has made it something else
            content = of_bytes(content, chance)
    found, began = [], time.process_time()
    path.write_bytes(content)
    try:
        read(root / case)
    except ReshardError as error:
        if len(error.message) > LONGEST_LINE or not error.message.isprintable():
            found.append("a message that is no short line")
    except Exception as error:  # whatever it is, it should not be
        found.append("".join(traceback.format_exception_only(error)).strip() + " " + traceback.format_exc()[-400:])
    finally:
        path.write_bytes(good)
    seconds = time.process_time() - began
    if seconds > SECONDS:
        found.append(f"{seconds:.0f} seconds")
    return [f"seed {seed}, {change.__name__} of {case}/{name}: {each}" for each in found]


def main() -> int:
    """Fuzz from the command line."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    failed = run_seeds(make_base, fuzz)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if grown << 10 > MEMORY:
        print(f"{grown >> 10} MiB of memory")
    return int(failed or grown << 10 > MEMORY)


if __name__ == "__main__":
    sys.exit(main())
