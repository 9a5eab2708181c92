"""Nothing of the user's is lost, and nothing of two states of a source is mixed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

from reshard.api import inspect, load, merge, split
from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.checksum import Stamp, stamp_of
from reshard.formats.files.safetensors import read_header
from reshard.publishing.staging import Staging
from reshard.store.staging_names import STATE
from reshard.writing import publish as publishing
from reshard.writing import weights as writing
from tests.marks import one_of_each, thorough
from tests.support import change_tensor, contents, without_manifest, without_sums, write_checkpoint

ONE = {"workers": 1}


class Killed(BaseException):
    """Stands for a signal that ends the process: nothing is cleaned up but what the operating system cleans up."""


def killed_after(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Have a run die when it has noted that many finished files."""
    real, noted = Staging.note_finished, []

    def note(self, *arguments):
        real(self, *arguments)
        noted.append(arguments)
        if len(noted) == files:
            raise Killed

    monkeypatch.setattr(Staging, "note_finished", note)


def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no stamp tell that a file was changed: as if it was read wrongly once, by a bad disk or memory."""
    monkeypatch.setattr(Stamp, "closed_state", property(lambda stamp: (stamp.name, stamp.size)))


def run_killed(monkeypatch: pytest.MonkeyPatch, files: int, run) -> None:
    with monkeypatch.context() as patch:
        killed_after(patch, files)
        with pytest.raises(Killed):
            run()


def like(source: Path, out: Path) -> Path:
    """A checkpoint of the same names, shapes and sampled bytes, and other weights."""
    shutil.copytree(source, out)
    for file in out.glob("*.safetensors"):
        for name, info in read_header(file).tensors.items():
            if info.nbytes > 130:  # the middle is sampled
                change_tensor(file, name)
    return out


# -- 1, 2: whose folder it is


@pytest.mark.parametrize("where", ["llama.partial", "llama.partial/inside"])
def test_a_source_in_the_place_of_the_staging_folder_is_left_alone(where, tmp_path):
    source = tmp_path / where
    write_checkpoint(source)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"llama would be built in .*llama\.partial, which is the source"):
        split(source, tmp_path / "llama", tp=2)
    with pytest.raises(CheckpointError, match=r"llama would be built in .*llama\.partial"):
        split(source, tmp_path / "llama", tp=2, ranks=[0], dry_run=True)
    assert contents(tmp_path) == before
    shards = tmp_path / "merged.partial"
    split(write_checkpoint(tmp_path / "other"), shards, tp=2)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"merged would be built in .*merged\.partial"):
        merge(shards, tmp_path / "merged")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("command", ["split", "rank", "merge"])
def test_a_folder_of_the_users_is_not_taken_for_staging(command, tmp_path):
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "shards", tp=2)

    def run() -> None:
        if command == "merge":
            merge(tmp_path / "shards", tmp_path / "out")
        else:
            split(source, tmp_path / "out", tp=2, ranks=[0] if command == "rank" else None)

    mine, out = tmp_path / "out.partial", tmp_path / "out"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    (mine / f"{STATE}notes.txt").write_text("a name that only begins like a journal's")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"out\.partial holds '.*' and was not made by reshard"):
        run()
    assert contents(tmp_path) == before and not out.exists()
    shutil.rmtree(mine)
    mine.write_text("a file")
    with pytest.raises(CheckpointError, match=r"out\.partial is a file"):
        run()
    mine.unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/thesis.txt").write_text("years")
    for target in ("elsewhere", "nowhere"):
        mine.symlink_to(tmp_path / target)
        with pytest.raises(CheckpointError, match=r"out\.partial is a link"):
            run()
        mine.unlink()
    assert (tmp_path / "elsewhere/thesis.txt").read_text() == "years"
    assert not out.exists()


def test_no_link_in_a_staging_folder_is_followed(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "expected", tp=2)
    out, mine = tmp_path / "out", tmp_path / "mine"
    run_killed(monkeypatch, 1, lambda: split(source, out, tp=2, **ONE))
    mine.mkdir()
    (mine / "model.safetensors").write_text("mine")
    (mine / "config.json").write_text("mine")
    for rank in (tmp_path / "out.partial/output").glob("rank-*"):
        shutil.rmtree(rank)
        rank.symlink_to(mine)
    (tmp_path / "out.partial/output/tokenizer.json").symlink_to(mine / "config.json")
    split(source, out, tp=2)
    assert contents(out) == contents(tmp_path / "expected")
    assert {path.read_text() for path in mine.iterdir()} == {"mine"}


def test_a_staging_folder_whose_removal_was_killed_is_still_known(tmp_path, monkeypatch):
    """The marker goes last."""
    source = write_checkpoint(tmp_path / "source", files=3)
    out = tmp_path / "out"
    run_killed(monkeypatch, 1, lambda: split(source, out, tp=2, **ONE))
    real, left = Path.unlink, [0]

    def unlink(path, **options):
        left[0] -= 1
        if not left[0]:
            raise Killed
        real(path, **options)

    for moment in range(1, 30):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            left[0] = moment
            with contextlib.suppress(Killed):
                split(source, out, tp=4 if moment % 2 else 2, overwrite=True)
                break
    else:
        pytest.fail("it was never done")
    assert moment > 3
    split(source, out, tp=4, overwrite=True)
    split(source, tmp_path / "expected", tp=4)
    assert contents(out) == contents(tmp_path / "expected")


# -- 3: a source that is replaced between two runs


@pytest.mark.parametrize(
    ("command", "how"),
    one_of_each(
        itertools.product(["split", "re-split", "merge"], ["in place", "another file of the same time"]),
        lambda case: case[1] if case[0] == "merge" else case[0],
    ),
)
def test_a_source_replaced_between_two_runs(command, how, tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", files=3)
    other = like(source, tmp_path / "other")
    if command != "split":
        for folder in (source, other):
            split(folder, folder.with_name(f"{folder.name}-4"), tp=4, max_shard_size=2500)
        source, other = tmp_path / "source-4", tmp_path / "other-4"

    def run(source: Path, out: Path) -> None:
        if command == "merge":
            merge(source, out, **ONE)
        else:
            split(source, out, tp=2, max_shard_size=2500, **ONE)

    run(other, tmp_path / "expected")
    run_killed(monkeypatch, 2, lambda: run(source, tmp_path / "out"))
    for file in other.rglob("*"):
        if file.is_file():
            target = source / file.relative_to(other)
            before = target.stat()
            if how == "in place":
                target.write_bytes(file.read_bytes())
            else:
                target.unlink()
                shutil.copy(file, target)
                os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    run(source, tmp_path / "out")
    assert without_manifest(tmp_path / "out") == without_manifest(tmp_path / "expected")


def test_what_a_resumed_run_reads_again_is_what_the_killed_run_read(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    unseen(monkeypatch)
    run_killed(monkeypatch, 1, lambda: split(source, tmp_path / "out", tp=8, **ONE))
    for begun in (tmp_path / "out.partial").rglob("*.incomplete"):
        begun.unlink()
    before = (source / "model.safetensors").stat()
    change_tensor(source / "model.safetensors", "model.layers.0.self_attn.k_proj.weight")
    os.utime(source / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(MismatchError, match="has changed since another run read a part of it"):
        split(source, tmp_path / "out", tp=8, **ONE)
    assert not list(tmp_path.glob("out*"))


def test_ranks_from_two_sources_are_not_put_together(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    other = like(source, tmp_path / "other")
    out = tmp_path / "out"
    split(source, out, tp=2, ranks=[0])
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors of the source is not the file that the ranks in"):
        split(other, out, tp=2, ranks=[1])
    assert contents(tmp_path) == before
    split(source, out, tp=2, ranks=[1])
    assert inspect(out).complete


def test_ranks_of_two_sources_that_are_written_at_the_same_time(tmp_path, monkeypatch):
    """Both began before any rank was in the output."""
    source = write_checkpoint(tmp_path / "source")
    other = like(source, tmp_path / "other")
    shutil.copy(source / "config.json", other)
    out, real = tmp_path / "out", Staging.commit

    def commit(self, documents):
        monkeypatch.setattr(Staging, "commit", real)
        shutil.move(tmp_path / "out.partial", tmp_path / "aside")
        split(source, out, tp=2, ranks=[0])
        shutil.move(tmp_path / "aside", tmp_path / "out.partial")
        real(self, documents)

    monkeypatch.setattr(Staging, "commit", commit)
    with pytest.raises(CheckpointError, match="is not the file that the ranks in"):
        split(other, out, tp=2, ranks=[1])
    assert [path.name for path in out.glob("rank-*")] == ["rank-00-of-02"]


def test_ranks_with_different_side_files_are_not_put_together(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "out", tp=2, ranks=[0])
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer.json of the source is not as it was"):
        split(source, tmp_path / "out", tp=2, ranks=[1])


def test_a_copy_of_the_hub_is_known_by_its_content(tmp_path):
    """On each machine the same blob of the Hub, downloaded at another time."""
    source = write_checkpoint(tmp_path / "source")
    copies = []
    for name in ("a", "b"):
        blobs, snapshot = tmp_path / name / "blobs", tmp_path / name / "snapshots/1"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for file in source.iterdir():
            shutil.copy(file, blobs / f"etag-of-{file.name}")
            (snapshot / file.name).symlink_to(blobs / f"etag-of-{file.name}")
        copies.append(snapshot)
    for rank, copy in enumerate(copies):
        split(copy, tmp_path / "out", tp=2, ranks=[rank])
    (copies[1] / "model.safetensors").unlink()
    shutil.copy(source / "model.safetensors", tmp_path / "b/blobs/another")
    (copies[1] / "model.safetensors").symlink_to(tmp_path / "b/blobs/another")
    with pytest.raises(CheckpointError, match="is not the file"):
        split(copies[1], tmp_path / "out", tp=2, ranks=[1], overwrite=True)


def test_a_download_folder_is_known_by_its_content(tmp_path):
    source = write_checkpoint(tmp_path / "source")
    file, note = source / "model.safetensors", source / ".cache/huggingface/download/model.safetensors.metadata"
    note.parent.mkdir(parents=True)
    note.write_text(f"commit\netag-1\n{file.stat().st_mtime + 0.5}\n")
    assert stamp_of(file, file.name).content == "etag:etag-1"
    os.utime(file, (0, file.stat().st_mtime + 60))
    assert stamp_of(file, file.name).content is None


def test_when_two_stamps_are_of_one_file():
    stamp = Stamp("a", 10, 1, 9, 2, "host")
    assert stamp.is_same(stamp)
    assert stamp.is_same(Stamp("a", 10, 1, 8, 3, "another host"))
    for other in (
        Stamp("b", 10, 1, 9, 2, "host"), Stamp("a", 11, 1, 9, 2, "host"), Stamp("a", 10, 2, 9, 2, "host"),
        Stamp("a", 10, 1, 9, 3, "host"),
    ):  # fmt: skip
        assert not stamp.is_same(other)
    named = Stamp("a", 10, 1, 9, 2, "host", "etag:x")
    assert named.is_same(Stamp("a", 10, 7, 7, 8, "host", "etag:x"))
    assert not named.is_same(Stamp("a", 10, 1, 9, 2, "host", "etag:y"))


# -- 4: every byte that the output depends on is checked, in however many runs


@pytest.mark.parametrize(
    ("command", "repaired"),
    one_of_each(
        itertools.product(["merge", "re-split"], [None, "later", "unseen"]),
        lambda case: case[1] if case[0] == "merge" else case[0],
    ),
)
def test_a_damaged_shard_is_found_in_two_runs_as_in_one(command, repaired, tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", files=3)
    for rank in range(4):  # one by one, so that no checksum of the whole source is known
        split(source, tmp_path / "shards", tp=4, ranks=[rank])
    shard, out = tmp_path / "shards/rank-01-of-04/model.safetensors", tmp_path / "out"
    whole = shard.read_bytes()
    change_tensor(shard, "model.layers.0.mlp.gate_proj.weight")

    def run() -> None:
        if command == "merge":
            merge(tmp_path / "shards", out, **ONE)
        else:
            split(tmp_path / "shards", out, tp=2, max_shard_size=2500, **ONE)

    run_killed(monkeypatch, 3 if command == "re-split" else 1, run)
    if repaired:
        shard.write_bytes(whole)
    if repaired == "unseen":
        unseen(monkeypatch)
    if repaired == "later":
        run()
        merge(out, tmp_path / "merged") if command == "re-split" else shutil.copytree(out, tmp_path / "merged")
        assert contents(tmp_path / "merged") == contents(source)
        return
    with pytest.raises(MismatchError):
        run()
    assert not out.exists() and not (tmp_path / "out.partial").exists()


def test_a_resumed_merge_keeps_what_is_finished_and_reads_it_no_more(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "shards", tp=4)
    run_killed(monkeypatch, 2, lambda: merge(tmp_path / "shards", tmp_path / "out", **ONE))

    def again(path):
        raise AssertionError(f"{path} is read a second time for its checksum")

    monkeypatch.setattr(publishing, "checksum_of", again)
    summary = merge(tmp_path / "shards", tmp_path / "out", **ONE)
    assert 0 < summary.written < summary.nbytes
    assert contents(tmp_path / "out") == contents(source)


def test_a_finished_file_that_was_touched_is_made_again(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "expected", tp=2, max_shard_size=2500)
    run_killed(monkeypatch, 2, lambda: split(source, tmp_path / "out", tp=2, max_shard_size=2500, **ONE))
    finished = list((tmp_path / "out.partial").rglob("*.safetensors"))
    assert len(finished) == 2
    finished[0].write_bytes(b"\0" * finished[0].stat().st_size)
    split(source, tmp_path / "out", tp=2, max_shard_size=2500)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_after_a_restart_of_the_machine_finished_files_are_read_again(tmp_path, monkeypatch):
    """Without --fsync a file may have its name, size and time, and its content may be gone."""
    source = write_checkpoint(tmp_path / "source", files=3)
    split(source, tmp_path / "expected", tp=2, max_shard_size=2500)
    run_killed(monkeypatch, 2, lambda: split(source, tmp_path / "out", tp=2, max_shard_size=2500, **ONE))
    lost, kept = sorted((tmp_path / "out.partial").rglob("*.safetensors"))
    before, inode = lost.stat(), kept.stat().st_ino
    with lost.open("r+b") as file:
        file.write(b"\0" * before.st_size)
    os.utime(lost, ns=(before.st_atime_ns, before.st_mtime_ns))
    monkeypatch.setattr("reshard.publishing.staging.boot_id", lambda: "another")
    split(source, tmp_path / "out", tp=2, max_shard_size=2500)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert inode in {path.stat().st_ino for path in (tmp_path / "out").rglob("*.safetensors")}


def test_a_merge_that_would_not_give_the_original_is_refused(tmp_path):
    """Shards and manifest agree, and another byte was in the original."""
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "out", tp=2)
    manifest = tmp_path / "out/reshard.json"
    document = json.loads(manifest.read_text())
    assert document["source"]["files"][0]["checksum"] is not None
    document["source"]["files"][0]["checksum"] = "0" * 16
    manifest.write_text(json.dumps(document))
    with pytest.raises(MismatchError, match=r"model\.safetensors would have the checksum .*, the original's was 0000"):
        merge(tmp_path / "out", tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("model.norm.weight", "model.norm.weighs", r"reshard\.json: tensor 'model\.norm\.weight' is missing"),
        ('"BF16"', '"F16" ', r"tensor '.*' is F16 .*, rank 0 of tp 1 has BF16"),
    ],
)
def test_a_merge_into_files_that_have_other_tensors_is_refused(old, new, what, tmp_path):
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "out", tp=2)
    manifest = tmp_path / "out/reshard.json"
    document = json.loads(manifest.read_text())
    header = document["source"]["files"][0]["header"]
    assert old in header
    document["source"]["files"][0]["header"] = header.replace(old, new)
    manifest.write_text(json.dumps(document))
    with pytest.raises(MismatchError, match=what):
        merge(tmp_path / "out", tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


# -- 5: a source that is changed while it is read


@pytest.mark.parametrize("what", ["model-00002-of-00003.safetensors", "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("how", ["overwritten", "replaced", "removed"])
@pytest.mark.parametrize("ranks", [None, [0]])
def test_a_source_changed_while_it_is_read(what, how, ranks, tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source", files=3)
    real = writing.move

    def move(*arguments, **options):
        nbytes = real(*arguments, **options)
        content = (source / what).read_bytes()
        if how != "overwritten":
            (source / what).unlink()
        if how != "removed":
            (source / what).write_bytes(content)
        return nbytes

    monkeypatch.setattr(writing, "move", move)
    with pytest.raises((MismatchError, CheckpointError), match=what):
        split(source, tmp_path / "out", tp=2, ranks=ranks)
    assert not (tmp_path / "out").exists()


def test_shards_changed_while_they_are_merged(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "shards", tp=2)
    real = writing.move

    def move(*arguments, **options):
        nbytes = real(*arguments, **options)
        (tmp_path / "shards/reshard.json").touch()
        return nbytes

    monkeypatch.setattr(writing, "move", move)
    with pytest.raises(MismatchError, match=r"reshard\.json was changed while it was read"):
        merge(tmp_path / "shards", tmp_path / "merged")
    assert not list(tmp_path.glob("merged*"))


def test_a_source_changed_while_it_is_loaded(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    import reshard.commands.load

    real = reshard.commands.load.load_rank

    def load_rank(*arguments):
        (source / "model.safetensors").touch()
        return real(*arguments)

    monkeypatch.setattr(reshard.commands.load, "load_rank", load_rank)
    with pytest.raises(MismatchError, match="was changed while it was read"):
        load(source, tp=2, rank=1)


# -- 6: overwriting, and two at once


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("again", ["the same", "another", "another that fails"])
@thorough
def test_killed_while_an_output_is_replaced(moment, again, tmp_path, monkeypatch):
    """Whatever runs next: the old output or the new one has the name, and nothing else is left."""
    source, other = write_checkpoint(tmp_path / "source"), write_checkpoint(tmp_path / "other", seed=3)
    split(source, tmp_path / "old", tp=4)
    split(other, tmp_path / "new", tp=2)
    shutil.copytree(tmp_path / "old", tmp_path / "out")
    old, new, out = contents(tmp_path / "old"), contents(tmp_path / "new"), tmp_path / "out"
    real = Path.rename

    def rename(path, target):
        if moment == "before" and path == tmp_path / "out.partial/output":
            raise Killed
        result = real(path, target)
        if moment == "after" and path == tmp_path / "out.partial/output":
            raise Killed
        return result

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", rename)
        split(other, out, tp=2, overwrite=True)
    if again == "the same":
        split(other, out, tp=2, overwrite=True)
        expected = new
    elif again == "another":
        split(source, out, tp=4, overwrite=True)
        expected = old
    else:
        with pytest.raises(CheckpointError, match="out exists"):
            split(source, out, tp=8)
        expected = old if moment == "before" else new
    assert contents(out) == expected
    left = {"source", "other", "old", "new", "out"}
    if moment == "before" and again == "another that fails":
        left |= {"out.partial"}  # what the same command would still go on with
    assert {path.name for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("ranks", [[0], None])
def test_what_a_run_for_more_ranks_has_finished_is_written_again(ranks, tmp_path, monkeypatch):
    """It noted the sums of what several of its ranks want, of which this run has others."""
    source, out = write_checkpoint(tmp_path / "source", files=3), tmp_path / "out"
    run_killed(monkeypatch, 2, lambda: split(source, out, tp=4, ranks=[0, 1], max_shard_size=2500, **ONE))
    done = split(source, out, tp=4, ranks=ranks, max_shard_size=2500)
    assert done.written == done.nbytes and done.complete == (ranks is None)


@pytest.mark.parametrize(("moment", "again"), [("before", "the same"), ("before", "a new one"), ("after", "the same")])
def test_killed_while_a_rank_is_replaced(moment, again, tmp_path, monkeypatch):
    """The old folder gets its name back, until the new one has it."""
    source, out, real = write_checkpoint(tmp_path / "source"), tmp_path / "out", Path.rename
    split(source, out, tp=2)
    before = without_sums(out)

    def rename(path, target):
        is_new = path == tmp_path / "out.partial/output/rank-00-of-02"
        if moment == "before" and is_new:
            raise Killed
        result = real(path, target)
        if is_new:
            raise Killed
        return result

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Path, "rename", rename)
        split(source, out, tp=2, ranks=[0], overwrite=True)
    assert (out / "rank-00-of-02").exists() == (moment == "after")
    if again == "the same":
        split(source, out, tp=2, ranks=[0], overwrite=True)
        assert not (tmp_path / "out.partial").exists()
    else:
        with pytest.raises(CheckpointError, match="rank-00-of-02 exists"):
            split(source, out, tp=2, ranks=[0])
    assert without_sums(out) == before


def test_the_loser_of_two_equal_runs(tmp_path, monkeypatch):
    """One has checked that there is no output, and another has made it before the first has its locks."""
    source = write_checkpoint(tmp_path / "source")
    split(source, tmp_path / "expected", tp=2)
    real, out = Staging.__enter__, tmp_path / "out"

    def enter(self):
        monkeypatch.setattr(Staging, "__enter__", real)
        split(source, out, tp=2)
        return real(self)

    monkeypatch.setattr(Staging, "__enter__", enter)
    with pytest.raises(CheckpointError, match="out exists"):
        split(source, out, tp=2)
    assert contents(out) == contents(tmp_path / "expected")
    assert not (tmp_path / "out.partial").exists()


def test_an_output_that_appears_meanwhile_is_kept(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "source")
    real, out = Staging.commit, tmp_path / "out"

    def commit(self, documents):
        out.mkdir()
        (out / "thesis.txt").write_text("years")
        real(self, documents)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="out appeared while it was being built"):
        patch.setattr(Staging, "commit", commit)
        split(source, out, tp=2)
    assert contents(out) == {"thesis.txt": b"years"}
    shutil.rmtree(out)
    assert split(source, out, tp=2).written == 0
