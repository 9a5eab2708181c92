"""The one comparison of bytes, whatever the form: what it reads, and that it does not ask what wrote the shards."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reshard.api import split
from reshard.move import engine, jobs, slabs
from reshard.source.opening import open_source
from reshard.verify.api import verify
from reshard.verify.bytes import blocks, reading
from reshard.verify.bytes.comparison import no_progress
from reshard.verify.bytes.exact import compare, open_shards
from reshard.verify.bytes.exact_report import ExactReport
from tests import store
from tests.marks import one_of_each

READ: Mapping[str, tuple[str, dict[str, Any]]] = {
    "own": ("llama", {"tp": 4}),
    "packed": ("phi3", {"tp": 2}),
    "vllm": ("llama", {"tp": 2, "format": "vllm"}),
    "dcp": ("llama", {"tp": 2, "format": "dcp"}),
    "a transposed matrix": ("gpt_oss", {"tp": 2, "format": "vllm"}),
}


@pytest.mark.parametrize("case", READ)
@pytest.mark.parametrize("chunk", one_of_each([5000, 2 << 20]))
def test_each_byte_is_read_once(case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as all tensors of the original and of the shards have, their checksums included."""
    model, options = READ[case]
    source = store.checkpoint(model, "bfloat16")
    split(source, tmp_path / "out", **options)
    original = open_source(source)
    shards = open_shards(tmp_path / "out", original)
    assert not isinstance(shards, ExactReport)
    weights, plain = {*original.files, *shards.files}, reading.Files.read
    read = [0]

    def counted(self: reading.Files, path: Path, begin: int, nbytes: int) -> blocks.Array:
        read[0] += nbytes if path in weights else 0
        return plain(self, path, begin, nbytes)

    monkeypatch.setattr(reading.Files, "read", counted)
    monkeypatch.setattr(blocks, "CHUNK", chunk)
    report = compare(original, shards, no_progress, workers=1)
    assert report.verdict == "same", report
    held = sum(info.nbytes for source in (original, shards) for rank in source.ranks for info in rank.values())
    held += sum(info.nbytes for info in shards.intact.values())
    assert read[0] == held


@pytest.mark.parametrize("change", one_of_each([{}, {"dtype": "bf16"}, {"quantize": "fp8-block"}]), ids=str)
def test_the_engine_does_not_run(change: dict[str, str], tmp_path: Path) -> None:
    """Not for an original that is computed as it is read either."""
    source, out = store.checkpoint("llama"), tmp_path / "out"
    split(source, out, **change)
    files, called = {module.__file__ for module in (engine, slabs, jobs)}, set[str]()

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename in files and frame.f_code.co_name != "<module>":
            called.add(frame.f_code.co_name)

    sys.setprofile(note)
    threading.setprofile(note)
    try:
        found = verify(source, out, exact_only=True, **change)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert found.verdict == "same" and called == set()
