"""``--moves`` and the planned files of a dry run say all that an output needs: here it is written by hand."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reshard.api import merge, split
from reshard.formats.errors import PlanError
from reshard.formats.files.manifest import INTACT_FILE, MANIFEST
from reshard.formats.files.safetensors import DTYPE_BITS
from reshard.move.jobs import PlacesOfRank, TargetPlace
from reshard.writing.summary import Summary, file_document, move_document, move_lines
from tests import store
from tests.marks import one_of_each
from tests.support import command

ROUTES = [("llama", None), ("qwen3_moe", "vllm"), ("llama", "vllm"), ("gpt2", None), ("llama", "megatron"),
          ("qwen3_moe", "transformers"), ("qwen3_moe", "dcp"), ("phi3", "sglang"), ("gpt2", "vllm")]  # fmt: skip


def written_by_hand(documents: dict[str, Any], source: Path) -> dict[str, bytearray]:
    """The contents of the planned files, without headers: each move carried out as told, an element at a time."""
    files = {plan["file"]: bytearray(plan["bytes"]) for plan in documents["file_plans"]}
    read = defaultdict[str, bytes](bytes)
    for move in documents["moves"]:
        shape, full = move["shape"], dict[tuple[int, ...], bytes]()
        for part in move["from"]:
            content = read.get(part["file"]) or read.setdefault(part["file"], (source / part["file"]).read_bytes())
            for place, offset, nbytes in elements_of(part, shape):
                element = content[offset : offset + nbytes]
                assert full.setdefault(place, element) == element, "replicas differ"
        for part in move["to"]:
            for place, offset, nbytes in elements_of(part, shape):
                files[part["file"]][offset : offset + nbytes] = full[place]
    return files


def elements_of(part: dict[str, Any], shape: list[int]) -> Any:
    """The place of each element of a part in the tensor, its offset in the file, and its size; padding is left out."""
    nbytes = DTYPE_BITS[part["dtype"]] // 8
    indices = [[i for first, end in runs for i in range(first, end)] for runs in part["part"]]
    for local in np.ndindex(*map(len, indices)):
        place = tuple(indices[d][i] for d, i in enumerate(local))
        if all(index < size for index, size in zip(place, shape, strict=True)):
            at = sum(i * stride for i, stride in zip(local, part["strides"], strict=True))
            yield place, part["offset"] + at * nbytes, nbytes


def documents_of(summary: Summary) -> dict[str, Any]:
    """What ``--dry-run --moves --json`` prints of an output."""
    documents = {"file_plans": [*map(file_document, summary.planned)], "moves": [*map(move_document, summary.moves)]}
    result: dict[str, Any] = json.loads(json.dumps(documents))
    return result


def check(summary: Summary, source: Path, out: Path) -> None:
    """Each tensor of an output is what the moves of a dry run make by hand."""
    documents = documents_of(summary)
    by_hand, moved = written_by_hand(documents, source), {to["tensor"] for m in documents["moves"] for to in m["to"]}
    assert moved and not (out.parent / f"{out.name}.partial").exists()
    for plan in documents["file_plans"]:
        content: NDArray[np.uint8] = np.fromfile(out / plan["file"], np.uint8)
        assert content.size == plan["bytes"] and plan["tensors"]
        for name, tensor in plan["tensors"].items():
            if name in moved:
                begin, end = tensor["offset"], tensor["offset"] + tensor["bytes"]
                assert content[begin:end].tobytes() == by_hand[plan["file"]][begin:end], (plan["file"], name)


@pytest.mark.parametrize(("name", "format"), one_of_each(ROUTES, lambda route: route[1] in (None, "vllm")))
def test_moves_are_all_of_a_split(name: str, format: str | None, tmp_path: Path) -> None:
    model, mesh = store.checkpoint(name), {"tp": 2} if format not in {"transformers", "dcp"} else {}
    dry = split(model, tmp_path / "out", format=format, dry_run=True, **mesh)
    sent = pickle.loads(pickle.dumps(dry.moves))  # to another process
    assert [*map(move_document, sent)] == [*map(move_document, dry.moves)]
    split(model, tmp_path / "out", format=format, **mesh)
    check(dry, model, tmp_path / "out")


def test_moves_go_to_names_that_stages_count(tmp_path: Path) -> None:
    """Each stage counts its layers from 0."""
    model, options = store.checkpoint("llama"), {"pp": 2, "format": "megatron-legacy"}
    dry = split(model, tmp_path / "out", dry_run=True, **options)
    split(model, tmp_path / "out", **options)
    sent = pickle.loads(pickle.dumps(dry.moves))
    names = {to["tensor"] for job in sent for to in move_document(job)["to"]}
    assert any(".layers.0." in name for name in names) and not any(".layers.2." in name for name in names)


@pytest.mark.parametrize("format", one_of_each([None, "vllm"]))
def test_moves_are_all_of_a_merge(format: str | None, tmp_path: Path) -> None:
    split(store.checkpoint("llama"), shards := tmp_path / "shards", tp=2, format=format)
    dry = merge(shards, tmp_path / "out", dry_run=True)
    merge(shards, tmp_path / "out")
    check(dry, shards, tmp_path / "out")


def test_a_move_is_a_line_for_each_place(tmp_path: Path) -> None:
    dry = split(store.checkpoint("llama"), tmp_path / "out", tp=2, dry_run=True)
    texts = {job.name: [*move_lines(move_document(job))] for job in dry.moves}
    title, before, *after = texts["model.layers.0.mlp.down_proj.weight"]
    assert title.startswith("model.layers.0.mlp.down_proj.weight [") and before.startswith("  from model")
    assert [line.split()[:2] for line in after] == [["to", f"rank-0{rank}-of-02/model.safetensors"] for rank in (0, 1)]


def test_a_dry_run_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    """Also what shows only when a tensor is to be moved: bits that a program does not store, and that are not kept."""
    split(store.checkpoint("mamba2"), shards := tmp_path / "shards", tp=1, format="vllm")
    assert merge(shards, tmp_path / "out", dry_run=True).moves
    for name in (INTACT_FILE, MANIFEST):
        (shards / name).unlink()
    for dry_run in (True, False):
        with pytest.raises(PlanError, match="does not have the bits of tensor"):
            merge(shards, tmp_path / "out", dry_run=dry_run)
    assert not (tmp_path / "out").exists()


def test_moves_are_printed_or_the_path_is(tmp_path: Path) -> None:
    done = command("split", store.checkpoint("llama"), tmp_path / "out", "--tp", "2", "--moves", "--quiet")
    assert done.returncode == 2 and "--moves goes without --quiet" in done.stderr
    lines = command("split", store.checkpoint("llama"), tmp_path / "out", "--tp", "2", "--moves").stdout.splitlines()
    assert lines[0].endswith("]") and not (tmp_path / "out").exists()
    assert {line.split()[0] for line in lines if line.startswith(" ")} == {"from", "to"}


def test_ranks_that_hold_alike_share_what_is_planned(tmp_path: Path) -> None:
    """There may be a million tensors. Each place is that of the layout, also in the second file of a rank."""
    dry = split(store.checkpoint("llama"), tmp_path / "out", tp=2, max_shard_size=20_000, dry_run=True)
    of_ranks = [[file for file in dry.planned if file.rank == rank] for rank in (0, 1)]
    for one, other in zip(*of_ranks, strict=True):
        assert one.tensors and all(a is b for a, b in zip(one.tensors, other.tensors, strict=True))
    for files in of_ranks:
        places = {name: TargetPlace(file, offset) for file in files for name, offset in file.layout.places}
        assert len(files) > 1 and dict(PlacesOfRank(files)) == places and "" not in PlacesOfRank(files)
