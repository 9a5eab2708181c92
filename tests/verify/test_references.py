"""What an original computes is computed once for all shards compared with it, and anew where something is another."""

from __future__ import annotations

import shutil
from pathlib import Path

from reshard.source.opening import open_source
from reshard.verify.forward.compare import ForwardOptions
from reshard.verify.forward.job import Reference
from tests import store
from tests.marks import thorough
from tests.verify.faults import inject
from tests.verify.forwards import run_forwards
from tests.verify.test_limits import changed

pytestmark = thorough


QUICK = ForwardOptions(seq=8, draws=0)
ONCE = ["original in float64", "original in float32, 1 times"]


def runs_of_originals(said: list[str]) -> list[str]:
    return [text for text in said if text.startswith("original in")]


def test_an_original_runs_once_for_several_meshes_and_damaged_copies(tmp_path: Path) -> None:
    original, shards = store.pair("llama", tp=2)
    shutil.copytree(shards.path, tmp_path / "damaged")
    assert inject("gate_and_up", tmp_path / "damaged", original)
    said: list[str] = []
    pairs = [(original, shards), store.pair("llama", tp=4), (original, open_source(tmp_path / "damaged"))]
    reports = run_forwards(pairs, QUICK, said.append)
    assert [(report.ranks, report.is_same) for report in reports] == [(2, True), (4, True), (2, False)]
    assert reports[2].first == "model.layers.1.mlp.down_proj"
    assert runs_of_originals(said) == ONCE


def test_what_is_kept_serves_later_calls_until_something_is_another(tmp_path: Path) -> None:
    original, shards = store.pair("llama", tp=2)
    shutil.copytree(original.path, tmp_path / "original")
    copy, kept = open_source(tmp_path / "original"), dict[str, Reference]()

    def said(options: ForwardOptions = QUICK) -> list[str]:
        found: list[str] = []
        run_forwards([(copy, shards)], options, found.append, references=kept)
        return runs_of_originals(found)

    assert said() == ONCE
    assert said() == []
    assert said(ForwardOptions(seq=8, draws=0, seed=1)) == ONCE
    assert said(ForwardOptions(seq=8, draws=0, backward=True)) == ONCE
    assert said(ForwardOptions(seq=8, draws=0, timeout=200)) == []
    changed(copy.path, "model.norm.weight", lambda x: 2 * x)
    (report,) = run_forwards([(copy, shards)], QUICK, references=kept)
    assert report.first == "logits", "the original's file is another: it runs again"
