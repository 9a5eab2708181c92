"""What FSDP2 leaves on any number of ranks goes to every format that the model has: the bytes of the full checkpoint.

``fully_shard`` cuts each tensor along its first dimension into parts of ``ceil(rows / ranks)`` rows, so the parts end
within heads, experts and what is packed, and the last ranks may have none.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reshard.api import split
from reshard.formats.errors import PlanError
from reshard.formats.files.chunks import Chunk
from reshard.formats.files.safetensors import read_header
from tests import store
from tests.formats.test_dcp import Pieces, save
from tests.marks import thorough
from tests.support import contents, form_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")

MODELS = ("llama", "llama-tied", "phi3", "qwen2", "qwen3_moe", "gpt2", "bloom", "gpt_oss", "mamba", "qwen3_next")
FORMS = (
    None, "vllm", "sglang", "transformers", "dcp", "dcp modules", "megatron", "megatron-local", "megatron-legacy",
    "torchtitan", "meta", "mistral", "deepseek",
)  # fmt: skip
ONE = {"workers": 1, "fsync": False}


def sharded(folder: Path, model: Path, ranks: int) -> Path:
    """The checkpoint as FSDP2 saves it from so many ranks."""
    state = {}
    for name, whole in (each for file in sorted(model.glob("*.safetensors")) for each in load_file(file).items()):
        rows = len(whole) if whole.dim() else 1
        cuts = [min(rank * -(-rows // ranks), rows) for rank in range(ranks + 1)]
        rest = tuple(whole.shape[1:])
        boxes = [Chunk((a, *(0 for _ in rest)), (b - a, *rest)) for a, b in itertools.pairwise(cuts) if a < b]
        state[name] = Pieces(whole, boxes) if whole.dim() else whole
    save(folder, state)
    for name in ("config.json", "generation_config.json"):
        if (model / name).exists():
            (folder / name).write_bytes((model / name).read_bytes())
    return folder


def weights(folder: Path) -> dict[str, object]:
    """The tensors of each safetensors file, whose header names the source, and the bytes of all other weight files."""
    found: dict[str, object] = {}
    for name, content in contents(folder).items():
        if name.endswith(".safetensors"):
            tensors = read_header(folder / name).tensors.values()
            found[name] = {t.name: (t.dtype, t.shape, content[t.offset : t.offset + t.nbytes]) for t in tensors}
        elif not name.endswith((".json", ".txt")):
            found[name] = content
    return found


RANKS = (3, 5, 7)
CASES = [(name, RANKS[number % 3], (2,)) for number, name in enumerate(MODELS)]
CASES += [("llama", 7, (1, 4)), ("phi3", 5, (1, 4)), ("qwen3_moe", 3, (1, 4))]


@pytest.mark.parametrize(
    ("name", "ranks", "degrees"), [("phi3", 3, (2,)), *(pytest.param(*case, marks=thorough) for case in CASES)]
)
def test_any_number_of_ranks_gives_the_bytes_of_the_full_checkpoint(
    name: str, ranks: int, degrees: tuple[int, ...], tmp_path: Path
) -> None:
    original = store.checkpoint(name, "bfloat16")
    source, formats = sharded(tmp_path / "dcp", original, ranks), set()
    for form, tp in itertools.product(FORMS, degrees):
        direct, out = tmp_path / f"direct-{form}-{tp}", tmp_path / f"out-{form}-{tp}"
        try:
            split(original, direct, tp=tp, **form_of(form), **ONE)
        except PlanError:  # the model has no such form at this degree
            continue
        split(source, out, tp=tp, **form_of(form), config=str(original), **ONE)
        assert weights(out) == weights(direct), (form, tp)
        formats.add(form)
    assert len(formats) >= 4


def test_fully_shard_cuts_as_is_said_here() -> None:
    """torch's own chunks of a tensor: ``torch.chunk`` along the first dimension."""
    for rows, ranks in itertools.product((1, 4, 10, 48), (3, 5, 7)):
        cuts = [min(rank * -(-rows // ranks), rows) for rank in range(ranks + 1)]
        lengths = [b - a for a, b in itertools.pairwise(cuts) if a < b]
        assert lengths == [len(part) for part in torch.chunk(torch.empty(rows), ranks)]
