"""What stands in the padding of a vocabulary: zeros, unless a program's format says that it may be anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from reshard.api import merge, split
from reshard.formats.errors import MismatchError
from reshard.formats.notation.expressions import read_expression
from reshard.formats.notation.format import Padding
from reshard.formats.notation.format_file import READ, format_of
from tests.programs.oracles import checkpoint
from tests.programs.test_oracles import tensors_of
from tests.support import change_tensor


def _with_a_filled_padding(folder: Path) -> Path:
    """Shards of vLLM's without our manifest; the last row of the vocabulary, which is padding, is not zero."""
    split(checkpoint("vllm", "llama"), folder, tp=2, format="vllm")
    (folder / "reshard.json").unlink()
    change_tensor(folder / "model-rank-1-part-0.safetensors", "lm_head.weight", at=95 * 64 * 4)
    return folder


def test_padding_that_is_not_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="padding"):
        merge(_with_a_filled_padding(tmp_path / "out"), tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("free", [True, False])
def test_what_it_may_hold_does_not_follow_from_its_size(free: bool, tmp_path: Path) -> None:
    """A format says apart from each other what the vocabulary is padded to, and what may stand there."""
    folder = _with_a_filled_padding(tmp_path / "out")
    format = replace(format_of("vllm"), padding=Padding(read_expression("64" if free else "96 * tp"), free))
    with mock.patch.dict(READ, {"vllm": format}):
        if not free:
            with pytest.raises(MismatchError, match="padding"):
                merge(folder, tmp_path / "merged")
            return
        merge(folder, tmp_path / "merged")
    assert tensors_of((tmp_path / "merged").glob("*.safetensors")) == tensors_of(
        checkpoint("vllm", "llama").glob("*.safetensors")
    )
