"""--rank with --as: processes that write one rank's files each of a program's format; the last one publishes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, PlanError
from reshard.store.staging_names import staging_of
from reshard.system import Share
from tests.marks import one_of_each
from tests.programs.oracles import checkpoint
from tests.support import command, contents

CASES = [
    ("vllm", "llama", {"tp": 4}),
    ("vllm", "llama", {"tp": 2, "pp": 2}),
    ("vllm", "mamba", {"tp": 2}),  # has tensors that are kept beside the shards
    ("sglang", "qwen3", {"tp": 2}),
    ("meta", "llama", {"tp": 2}),
    ("megatron-legacy", "llama", {"tp": 2}),
]


def _source(form: str, model: str) -> Path:
    return checkpoint("meta", "llama3") if form == "meta" else checkpoint("vllm", model)


@pytest.mark.parametrize(("form", "model", "mesh"), one_of_each(CASES, lambda case: case[1]))
def test_ranks_add_up_to_what_one_process_writes(form: str, model: str, mesh: dict[str, int], tmp_path: Path) -> None:
    source, out = _source(form, model), tmp_path / "out"
    split(source, tmp_path / "one", **mesh, format=form)
    size = mesh["tp"] * mesh.get("pp", 1)
    found = []
    for rank in reversed(range(size)):
        assert not out.exists()
        found.append(split(source, out, **mesh, ranks=[rank], format=form).complete)
    assert found == [False] * (size - 1) + [True]
    assert contents(out) == contents(tmp_path / "one") and not staging_of(out).exists()


def test_ranks_are_written_at_the_same_time_by_the_shares_of_a_launcher(tmp_path: Path) -> None:
    source, out = checkpoint("vllm", "llama"), tmp_path / "out"
    split(source, tmp_path / "one", tp=4, format="vllm")
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(split, source, out, tp=4, ranks=Share(index, 4), format="vllm") for index in range(4)]
    assert any(run.result().complete for run in runs)
    assert contents(out) == contents(tmp_path / "one")
    with pytest.raises(CheckpointError, match="exists"):  # all have ended: nobody comes late
        split(source, out, tp=4, ranks=Share(0, 4), format="vllm")


def test_a_rank_that_is_missing_is_written_by_the_same_command(tmp_path: Path) -> None:
    source, out = checkpoint("vllm", "llama"), tmp_path / "out"
    done = command("split", source, out, "--tp", "2", "--as", "vllm", "--rank", "1")
    assert done.returncode == 0 and not out.exists(), done.stderr
    with pytest.raises(CheckpointError):
        merge(out, tmp_path / "merged")
    assert command("split", source, out, "--tp", "2", "--as", "vllm", "--rank", "0").returncode == 0
    merge(out, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)


@pytest.mark.parametrize("form", ["transformers", "dcp"])
def test_a_format_that_any_number_of_ranks_loads_has_no_ranks(form: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=f"ranks is not possible with the format '{form}': any number of ranks"):
        split(checkpoint("vllm", "llama"), tmp_path / "out", tp=2, ranks=[0], format=form)
