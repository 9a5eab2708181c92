"""Tensors that lie alike are planned once, however many layers and experts there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.api import split
from reshard.move import moves
from reshard.source.opening import open_source
from tests.store import checkpoint
from tests.support import LLAMA, write_checkpoint


def test_layers_are_told_apart_only_where_a_rule_asks_for_them(tmp_path: Path) -> None:
    """A rule of drafts asks for the first layer of q, k and v: what is no draft has one kind of each."""
    path = write_checkpoint(tmp_path / "llama", config=LLAMA | {"num_hidden_layers": 5})
    kinds = open_source(path).model.kinds
    assert {kind.count for kind in kinds if ".{layer}." in kind.template} == {5}


def test_experts_share_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = list[Any]()

    class Counted(moves.Transfer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            planned.append(arguments)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(moves, "Transfer", Counted)
    path = checkpoint("mixtral")
    tensors = open_source(path).model.tensors
    split(path, tmp_path / "out", tp=2)
    assert len(planned) < len({tensor.kind.template for tensor in tensors}) + 2 < len(tensors) / 2
