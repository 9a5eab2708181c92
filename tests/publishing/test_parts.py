"""Several processes that deal the files of one output among them: ``--part``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError, ReshardError
from reshard.formats.files.safetensors import read_header
from reshard.publishing import staging as output
from reshard.publishing.records import WHOLE, FileShare, ShareRun
from reshard.publishing.staging import Staging
from reshard.source.source import Source
from reshard.store.staging_names import BUILT, STATE, staging_of
from reshard.system import Share
from reshard.writing import publish
from tests import store
from tests.forked import Forked
from tests.marks import of_ranks, one_of_each, thorough
from tests.support import change_tensor, command, contents, write_checkpoint

FORMS = ["transformers", "dcp", "vllm", "megatron", None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("parts") / "llama", files=5)


@pytest.fixture(scope="module")
def shards(checkpoint: Path) -> Path:
    split(checkpoint, checkpoint.with_name("shards"), tp=4)
    return checkpoint.with_name("shards")


def written(folder: Path) -> set[str]:
    """The files of the output that are in the staging folder."""
    built = staging_of(folder) / BUILT
    return {path.relative_to(built).as_posix() for path in built.rglob("*.safetensors")}


def journal(out: Path, index: int, count: int) -> str:
    path = staging_of(out) / f"{STATE}journal-part-{index}-of-{count}"
    return path.read_text() if path.exists() else ""


# --- who writes what -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 8))
def test_each_piece_is_dealt_once_and_nobody_has_much_more(sizes: Sequence[int], count: int) -> None:
    dealt = [Share(index, count).of_sizes(sizes) for index in range(count)]
    assert sorted(number for mine in dealt for number in mine) == list(range(len(sizes)))
    loads = [sum(sizes[number] + 1 for number in mine) for mine in dealt]
    assert max(loads) - min(loads) <= max(sizes, default=0) + 1


@pytest.mark.parametrize("form", one_of_each(FORMS, lambda form: form in (None, "vllm") and form))
def test_parts_add_up_to_what_one_process_writes(form: str | None, checkpoint: Path, tmp_path: Path) -> None:
    split(checkpoint, tmp_path / "one", tp=2, format=form, max_shard_size=3000)
    out = tmp_path / "out"
    complete = [
        split(checkpoint, out, tp=2, format=form, max_shard_size=3000, part=Share(index, 3)).complete
        for index in (2, 0, 1)
    ]
    assert complete == [False, False, True]
    assert contents(out) == contents(tmp_path / "one") and not staging_of(out).exists()


@pytest.mark.parametrize("count", [2, 9])  # more processes than files, too
def test_a_merge_in_parts_reads_each_byte_once(
    count: int, checkpoint: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(file: object) -> str:
        raise AssertionError(f"{file} is read again for its checksum")

    monkeypatch.setattr(publish, "checksum_of", again)
    done = [merge(shards, tmp_path / "out", part=Share(index, count)) for index in range(count)]
    assert [summary.complete for summary in done].count(True) == 1 and sum(each.files for each in done) == 5
    assert contents(tmp_path / "out") == contents(checkpoint)


def test_all_at_the_same_time(checkpoint: Path, shards: Path, tmp_path: Path) -> None:
    for _ in range(5):
        out = tmp_path / "out"
        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(merge, shards, out, part=Share(index, 4)) for index in range(4)]
        assert [each.result().complete for each in done].count(True) >= 1
        assert contents(out) == contents(checkpoint) and not staging_of(out).exists()
        shutil.rmtree(out)


def test_a_part_counts_its_own_tensors(checkpoint: Path, shards: Path, tmp_path: Path) -> None:
    whole = merge(shards, tmp_path / "whole")
    done = [merge(shards, tmp_path / "out", part=Share(index, 3)) for index in range(3)]
    assert sum(each.tensors for each in done) == whole.tensors and all(each.tensors < whole.tensors for each in done)
    stage = split(checkpoint, tmp_path / "stages", pp=2, ranks=[0])
    assert stage.tensors == len(list_of(tmp_path / "stages/rank-00-of-02"))


def list_of(folder: Path) -> list[str]:
    """The tensors in a folder."""
    return [name for file in folder.glob("*.safetensors") for name in read_header(file).tensors]


def test_who_is_still_at_work_publishes(
    checkpoint: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process must not rename the folder in which this one may yet write."""
    out, note, seen = tmp_path / "out", Staging.note_finished, list[bool]()

    def finished(self: Staging, *arguments: Any) -> None:
        note(self, *arguments)
        if len(self.finished) == 2:
            monkeypatch.undo()
            seen.append(merge(shards, out, part=Share(0, 2)).complete)

    monkeypatch.setattr(Staging, "note_finished", finished)
    assert merge(shards, out, part=Share(1, 2)).complete and seen == [False]
    assert contents(out) == contents(checkpoint)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def stuck(shards: Path, out: Path, part: Share) -> None:
    """Merge a part, but hang when the first file is finished."""
    note = Staging.note_finished

    def wait(self: Staging, *arguments: Any) -> None:
        note(self, *arguments)
        time.sleep(60)

    Staging.note_finished = wait  # type: ignore[method-assign]
    merge(shards, out, part=part)


@of_ranks
@thorough
def test_a_killed_process_is_named_and_redone_by_the_same_command(
    checkpoint: Path, shards: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = Forked((partial(stuck, shards, out, Share(0, 2)), os.environ), tmp_path, tmp_path)
    while '"name"' not in journal(out, 0, 2):
        assert process.poll() is None
        time.sleep(0.002)
    assert "part-0-of-2" in command("inspect", staging_of(out)).stdout
    assert "it is at work" in command("inspect", staging_of(out)).stdout
    with pytest.raises(CheckpointError, match="another run is writing part-0-of-2 of"):
        merge(shards, out, part=Share(0, 2))
    with pytest.raises(CheckpointError, match="another run is writing part-0-of-2 of"):
        merge(shards, out, part=Share(1, 3))
    with pytest.raises(CheckpointError, match="another run is writing part-0-of-2 of"):
        merge(shards, out)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {name: (staging_of(out) / BUILT / name).stat().st_mtime_ns for name in written(out)}
    assert not merge(shards, out, part=Share(1, 2)).complete
    said = command("inspect", staging_of(out)).stdout
    assert "part-0-of-2: " in said and "nobody is at work" in said and "part-1-of-2" not in said
    done = merge(shards, out, part=Share(0, 2))
    assert done.complete and done.written < done.nbytes
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert contents(out) == contents(checkpoint)


def test_what_has_not_begun_is_named(shards: Path, tmp_path: Path) -> None:
    done = command("merge", shards, tmp_path / "out", "--part", "1/3")
    assert "part 1 of 3" in done.stdout and "ther parts are still missing" in done.stdout
    said = command("inspect", f"{tmp_path / 'out'}.partial").stdout
    assert "part-0-of-3: no file is written, nobody is at work" in said and "part-2-of-3: no" in said
    assert "part-1-of-3" not in said


def test_another_number_of_processes_goes_on(checkpoint: Path, shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    merge(shards, out, part=Share(0, 2))
    first = written(out)
    again = [merge(shards, out, part=Share(index, 3)) for index in range(3)]
    assert again[-1].complete and sum(each.nbytes - each.written for each in again) > 0
    assert contents(out) == contents(checkpoint)
    shutil.rmtree(out)
    merge(shards, out, part=Share(0, 2))
    alone = merge(shards, out)
    assert alone.complete and alone.written < alone.nbytes and first
    assert contents(out) == contents(checkpoint)


def test_who_was_stopped_at_the_end_and_who_has_no_file_find_nothing_to_do(
    checkpoint: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output waits for the first, which may come again, and not for the second."""
    out, vllm = tmp_path / "out", ("--tp", "2", "--as", "vllm")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Staging, "is_last", stopped)
        merge(shards, out, part=Share(0, 2))
    for index in (1, 0):
        assert not out.exists()
        done = command("merge", shards, out, "--part", "auto", RANK=str(index), WORLD_SIZE="2")
        assert done.returncode == 0, done.stderr
    assert "None of the files is left to write" in done.stdout and out.exists()
    for index in range(3):
        done = command("split", checkpoint, tmp_path / "vllm", *vllm, "--part", f"{index}/3")
        assert done.returncode == 0, done.stderr
    assert "None of the files is for this process" in done.stdout and (tmp_path / "vllm").exists()
    other = write_checkpoint(tmp_path / "other", files=5, seed=7)
    split(other, tmp_path / "others", tp=4)
    for source, target, more in (
        (tmp_path / "others", out, ()),
        (other, tmp_path / "vllm", vllm),
        (checkpoint, tmp_path / "vllm", ("--tp", "4", "--as", "vllm")),
    ):
        refused = command("split" if more else "merge", source, target, *more, "--part", "0/2")
        assert refused.returncode == 2 and f"{target} exists" in refused.stderr
        assert not staging_of(target).exists()


def stopped(*_: object) -> bool:
    raise KeyboardInterrupt


def test_no_mark_stays_if_nobody_can_come_late(shards: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for index in range(2):
        merge(shards, out, part=Share(index, 2))
    assert contents(out) == contents(checkpoint)
    with pytest.raises(CheckpointError, match="out exists"):
        merge(shards, out, part=Share(0, 2))


def test_a_part_of_an_earlier_state_of_the_source_is_not_taken(checkpoint: Path, tmp_path: Path) -> None:
    source, out = shutil.copytree(checkpoint, tmp_path / "source"), tmp_path / "out"
    arguments = {"tp": 2, "format": "vllm", "max_shard_size": 3000}
    split(source, out, **arguments, part=Share(0, 2))
    changed = source / "model-00002-of-00005.safetensors"
    before = changed.stat()
    change_tensor(changed, "model.layers.0.mlp.up_proj.weight")
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))  # the inode's own time tells
    assert not split(source, out, **arguments, part=Share(1, 2)).complete
    done = split(source, out, **arguments, part=Share(0, 2))
    assert done.complete and done.written == done.nbytes
    split(source, tmp_path / "one", **arguments)
    assert contents(out) == contents(tmp_path / "one")


def test_a_part_that_was_damaged_is_written_again(shards: Path, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    merge(shards, out, part=Share(0, 2))
    shutil.copyfile(path := min(staging_of(out).rglob("*.safetensors")), tmp_path / "copy")
    (tmp_path / "copy").replace(path)
    assert not merge(shards, out, part=Share(1, 2)).complete
    assert merge(shards, out, part=Share(0, 2)).complete
    assert contents(out) == contents(checkpoint)


@pytest.mark.parametrize("form", [None, "vllm"])
def test_sums_of_all_processes_are_compared(form: str | None, checkpoint: Path, tmp_path: Path) -> None:
    """One process can know only a part of what a shard holds; together they find a flipped bit."""
    shards, out = tmp_path / "shards", tmp_path / "out"
    split(checkpoint, shards, tp=2, format=form)
    file = min(shards.rglob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    for part in (Share(0, 2), Share(1, 2)):
        try:
            assert not merge(shards, out, part=part, max_shard_size=3000).complete
        except MismatchError as error:
            assert "checksum" in error.message or "the same in" in error.message
            break
    else:
        raise AssertionError("the flipped bit was not found")
    assert not out.exists() and not written(out)


def test_replicas_that_differ_stop_the_process_that_reads_them(shards: Path, tmp_path: Path) -> None:
    damaged, out = shutil.copytree(shards, tmp_path / "damaged"), tmp_path / "out"
    change_tensor(damaged / "rank-01-of-04" / "model.safetensors", "model.norm.weight")
    errors = 0
    for index in (0, 1):
        try:
            assert not merge(damaged, out, part=Share(index, 2)).complete
        except ReshardError as error:
            errors += 1
            assert "should be the same" in error.message
        else:
            kept = written(out)
    assert errors == 1 and kept and written(out) == kept and not out.exists()


def test_a_journal_says_what_was_read(checkpoint: Path, tmp_path: Path) -> None:
    """What was read for several files is told with the first of them; the others have its number."""
    split(checkpoint, tmp_path / "out", tp=4, part=Share(0, 2))
    begin, *lines = [json.loads(line) for line in journal(tmp_path / "out", 0, 2).splitlines() if line]
    finished = [line for line in lines if "name" in line]
    assert begin["files"] == sorted(line["name"] for line in finished) and len(finished) == 2
    assert any("steps" in line for line in lines) and "ended" in lines[-1]
    told = [read for line in finished for read in line["reads"]]
    whole = [read for read in told if isinstance(read, dict)]
    assert all(read["sum"] for read in whole) and len(whole) < len(told)
    assert {read["number"] for read in whole} == {read for read in told if isinstance(read, int)} | {*range(len(whole))}


@pytest.mark.parametrize("text", ["2/2", "1", "-1/2", "a/b", "0/0"])
def test_parts_that_make_no_sense(text: str, shards: Path, tmp_path: Path) -> None:
    done = command("merge", shards, tmp_path / "out", "--part", text)
    assert done.returncode == 2 and "is not 'auto', nor I/N" in done.stderr


def test_parts_and_ranks_go_apart(checkpoint: Path, shards: Path, tmp_path: Path) -> None:
    done = command("split", checkpoint, tmp_path / "out", "--tp", "2", "--part", "0/2", "--rank", "0")
    assert done.returncode == 2 and "--part is not possible with --rank: both share the work" in done.stderr
    done = command("merge", shards, tmp_path / "out", "--part", "auto", without=("RANK", "SLURM_PROCID"))
    assert done.returncode == 2 and done.stderr.startswith("Error: 'auto' needs a launcher's variable"), done.stderr


@pytest.mark.parametrize(("model", "form"), [("mamba", "vllm"), ("mixtral", "dcp")])
def test_what_a_program_does_not_keep_is_a_file_too(model: str, form: str, tmp_path: Path) -> None:
    source = store.checkpoint(model)
    split(source, tmp_path / "one", tp=2, format=form)
    for index in range(3):
        split(source, tmp_path / "out", tp=2, format=form, part=Share(index, 3))
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    for index in range(2):
        merge(tmp_path / "out", tmp_path / "merged", part=Share(index, 2))
    assert contents(tmp_path / "merged") == contents(source)


@pytest.mark.parametrize("ranks", [False, True])
def test_ranks_are_not_written_beside_the_whole(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: bool
) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0)
    out, arguments = tmp_path / "out", ({"ranks": [0]} if ranks else {"part": Share(0, 2)})
    whole = staging_while_split(monkeypatch, checkpoint, out, lambda: split(checkpoint, out, tp=2, **arguments))
    assert isinstance(whole, CheckpointError) and "another run is writing" in str(whole)
    assert not staging_of(out).exists() and len(list(out.glob("rank-*"))) == 2


def test_ranks_in_common_are_not_written_at_the_same_time(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def others() -> None:
        assert not split(checkpoint, out, tp=4, ranks=[2]).complete
        split(checkpoint, out, tp=4, ranks=[1, 3])

    error = staging_while_split(monkeypatch, checkpoint, out, others, tp=4, ranks=[0, 1])
    assert isinstance(error, CheckpointError) and error.message.startswith("another run is writing rank-0-1-of-4 of")
    assert split(checkpoint, out, tp=4, ranks=[3]).complete and not staging_of(out).exists()


def test_a_rank_that_is_done_leaves_the_locks_of_one_that_has_just_begun(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, begin = tmp_path / "out", Staging._begin

    def begun(self: Staging) -> None:
        begin(self)
        monkeypatch.setattr(Staging, "_begin", begin)
        split(checkpoint, out, tp=2, ranks=[1])
        with pytest.raises(CheckpointError, match="another run is writing rank-0-of-2 of"):
            split(checkpoint, out, tp=2, ranks=[0])

    monkeypatch.setattr(Staging, "_begin", begun)
    assert split(checkpoint, out, tp=2, ranks=[0]).complete


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 40), min_size=1))
def test_shares_go_together_if_they_have_no_file_in_common(one: set[int], other: set[int]) -> None:
    """What they are called does not matter."""
    sizes = {f"rank-{rank}": 1 for rank in range(41)}
    mine, theirs = (FileShare("rank-0", frozenset(f"rank-{rank}" for rank in of), sizes) for of in (one, other))
    begin = {"folders": False, "files": sorted(theirs.files)}
    assert mine.goes_with(ShareRun("rank-1", begin, False, True)) == (not one & other)
    assert not mine.goes_with(ShareRun("rank-1", begin | {"folders": True}, False, True))
    assert not mine.goes_with(ShareRun(WHOLE, begin, False, True))


@pytest.mark.parametrize("arguments", [{"ranks": [0]}, {"part": Share(0, 2)}])
def test_what_another_command_has_left_is_not_removed_by_one_of_several_processes(
    arguments: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    split(checkpoint, out, tp=2, part=Share(0, 2))
    before = written(out)
    with pytest.raises(CheckpointError, match="holds the unfinished output of another command"):
        split(checkpoint, out, tp=4, **arguments)
    assert before and written(out) == before
    assert split(checkpoint, out, tp=4).complete


def test_the_first_of_two_that_replace_ranks_leaves_the_work_of_the_other(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    split(checkpoint, out, tp=2)

    def other() -> None:
        split(checkpoint, out, tp=2, ranks=[1], overwrite=True)
        assert written(out), "what rank 0 has written is still there"

    error = staging_while_split(monkeypatch, checkpoint, out, other, ranks=[0], overwrite=True)
    assert error is None and not staging_of(out).exists()
    merge(out, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(checkpoint)


def staging_while_split(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, out: Path, other: Callable[[], object], **arguments: Any
) -> Exception | None:
    """Split, and run something else when the first file is finished; its error."""
    note, raised = Staging.note_finished, list[Exception | None]()

    def finished(self: Staging, *of: Any) -> None:
        note(self, *of)
        if not raised:
            raised.append(None)
            try:
                other()
            except CheckpointError as error:
                raised[0] = error

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "note_finished", finished)
        split(checkpoint, out, **{"tp": 2} | arguments)
    return raised[0]


def test_a_rank_that_cannot_be_trusted_leaves_the_work_of_another(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def other() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Source, "check_unchanged", changed)
            with pytest.raises(MismatchError, match="changed"):
                split(checkpoint, out, tp=2, ranks=[1])
        assert written(out) and not any("rank-01" in name for name in written(out))

    assert staging_while_split(monkeypatch, checkpoint, out, other, ranks=[0]) is None
    assert [path.name for path in out.glob("rank-*")] == ["rank-00-of-02"]


def changed(source: Source) -> None:
    raise MismatchError("a source file was changed")


def test_a_rank_is_added_to_what_parts_have_made(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for index in range(2):
        split(checkpoint, out, tp=2, part=Share(index, 2))
    shutil.rmtree(out / "rank-01-of-02")
    with pytest.raises(CheckpointError):
        split(checkpoint, out, tp=2, ranks=[1])
    assert split(checkpoint, out, tp=2, ranks=[1], overwrite=True).complete


def test_one_part_has_all_files(tmp_path: Path) -> None:
    """Who is at work without a file of its own is waited for, as it may yet write to the folder."""
    sizes = {"model.safetensors": 4}
    full, none = FileShare("part-0-of-2", frozenset(sizes), sizes), FileShare("part-1-of-2", frozenset(), sizes)
    assert full.has_others and none.has_others
    assert not FileShare("part-0-of-1", frozenset(sizes), sizes).has_others
