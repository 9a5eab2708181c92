"""Outputs in a bucket that are replaced, or that two tasks want: a reader finds one of them whole, or is told."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError, ReshardError
from reshard.move.jobs import Sizes
from reshard.publishing.records import WHOLE, FileShare
from reshard.publishing.upload import Uploading
from reshard.source.access import Access
from reshard.store import remote
from reshard.store.bucket import Bucket
from reshard.store.selection import HubAccess
from reshard.store.staging_names import JOURNAL, UNFINISHED, journal_in
from reshard.system import Share
from reshard.transforms.opening import open_any
from reshard.writing.request import place_of
from tests.marks import one_of_each, thorough
from tests.stores.store_server import StoreServer, status
from tests.support import change_tensor, command, contents, without_manifest, write_checkpoint

pytestmark = thorough


URL = "s3://bucket/out"
Cache = dict[str, Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("replacing") / "llama", files=2)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    (tmp_path / "bucket").mkdir()
    with StoreServer(tmp_path / "bucket") as server:
        for name, value in (server.environment | {"RESHARD_RETRY_SECONDS": "5"}).items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def access(tmp_path: Path) -> Cache:
    return {"cache_dir": tmp_path / "cache"}


def local(checkpoint: Path, folder: Path, tp: int) -> dict[str, bytes]:
    split(checkpoint, folder, tp=tp)
    return contents(folder)


def state(store: StoreServer, tmp_path: Path) -> str:
    """What reshard finds at the place: old (two ranks), new (one rank), unfinished."""
    done = command("inspect", URL, "--cache-dir", tmp_path / "seen")
    if "is unfinished output" in done.stderr:
        return "unfinished"
    assert done.returncode == 0, done.stderr
    return {2: "old", 1: "new"}[json.loads((store.root / "out/reshard.json").read_text())["mesh"]["tp"]]


def noted(store: StoreServer) -> set[str]:
    """The files that a journal in the bucket says are uploaded."""
    found = (journal_in(path.read_bytes(), "name") for path in (store.root / "out").glob(".reshard-journal-*"))
    return {entry["name"] for journal in found for _, entry in journal}


def refused_as_another_commands(checkpoint: Path, cache: Path, **options: Any) -> None:
    """A command is refused, because the place is another's, and its hint removes what is there."""
    with pytest.raises(CheckpointError, match="out holds the unfinished output of another command") as refused:
        split(checkpoint, URL, tp=2, cache_dir=cache, **options)
    assert f"aws s3 rm --recursive {URL}" in str(refused.value.hint)


def test_a_run_that_was_stopped_is_finished_by_the_same_command(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    split(checkpoint, URL, tp=2, **access)
    store.faults.extend([lambda _: False, lambda _: False, status(403)])
    with pytest.raises(CheckpointError, match="refused"):
        split(checkpoint, URL, tp=1, **access, overwrite=True, max_shard_size=5_000)
    left = contents(store.root / "out")
    assert state(store, tmp_path) == "unfinished" and not [name for name in left if name.startswith("rank-00-of-02")]
    give_up = time.monotonic() + 5
    while len(before := noted(store)) < 2 and time.monotonic() < give_up:  # those that were on their way still come
        time.sleep(0.01)
    store.requests.clear()
    split(checkpoint, URL, tp=1, **access, overwrite=True, max_shard_size=5_000)
    assert state(store, tmp_path) == "new" and before
    sent = {request.path.removeprefix("/bucket/out/") for request in store.requests if request.method == "PUT"}
    assert not sent & before  # what was there is not sent again
    split(checkpoint, tmp_path / "local", tp=1, max_shard_size=5_000)
    assert contents(store.root / "out") == contents(tmp_path / "local")


def test_what_a_stopped_run_has_not_cleared_is_removed(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same command: the manifest, which says what was there, goes last. Another is refused."""
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    (other / "notes.txt").write_text("known by the manifest alone")
    split(other, URL, tp=2, **access)
    delete = Bucket.delete

    def stop(self: Bucket, key: str) -> None:
        if key == "notes.txt":
            raise CheckpointError("stopped")
        delete(self, key)

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="stopped"):
        patch.setattr(Bucket, "delete", stop)
        split(checkpoint, URL, tp=1, **access, overwrite=True)
    assert {"notes.txt", "reshard.json", UNFINISHED} <= contents(store.root / "out").keys()  # who knows it goes last
    left = contents(store.root / "out")
    refused_as_another_commands(checkpoint, tmp_path / "third", overwrite=True)
    assert contents(store.root / "out") == left
    split(checkpoint, URL, tp=1, **access, overwrite=True)
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "local", 1)


def test_at_every_moment_the_old_or_the_new_or_unfinished(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    split(checkpoint, URL, tp=2, **access)
    old, new = local(checkpoint, tmp_path / "old", 2), local(checkpoint, tmp_path / "new", 1)
    found = []

    def look(_: str) -> None:
        there = {path.relative_to(store.root / "out").as_posix(): path for path in (store.root / "out").rglob("*")}
        here = {n: p.read_bytes() for n, p in there.items() if p.is_file() and not n.startswith(".reshard-")}
        is_whole = "old" if here == old else "new" if here == new else None
        found.append("unfinished" if UNFINISHED in there else is_whole)

    store.before_put = look
    split(checkpoint, URL, tp=1, **access, overwrite=True)
    look("")
    assert list(dict.fromkeys(found)) == ["old", "unfinished", "new"]


@pytest.mark.parametrize("moment", ["config.json", "rank-00-of-01/model.safetensors", "reshard.json"])
def test_stopped_while_the_old_is_replaced(
    moment: str, store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    split(checkpoint, URL, tp=2, **access)

    def stop(key: str) -> None:
        if key == f"out/{moment}":
            store.denied = True

    store.before_put = stop
    with pytest.raises(ReshardError):
        split(checkpoint, URL, tp=1, **access, overwrite=True)
    store.before_put, store.denied = None, False
    assert state(store, tmp_path) == "unfinished"
    split(checkpoint, URL, tp=1, **access, overwrite=True)
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "local", 1)


@pytest.mark.parametrize("moment", ["rank-00-of-01/model.safetensors", "tokenizer.json", "reshard.json"])
@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"dry_run": True}, {"part": Share(0, 2)}])
def test_another_command_is_refused_while_one_writes(
    moment: str, options: dict[str, Any], store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    said = []

    def second(key: str) -> None:
        if key == f"out/{moment}":
            store.before_put = None
            refused_as_another_commands(checkpoint, tmp_path / "other", **options)
            said.append(key)

    store.before_put = second
    assert split(checkpoint, URL, tp=1, **access).complete and said
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "local", 1)


def test_a_file_that_came_after_another_task_had_published_is_said(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    """Somebody clears the place for it, between the look and the upload: the upload is followed by another look."""

    def late(key: str) -> None:
        if key.endswith(".safetensors"):
            store.before_put = None
            store.clear("out")
            split(checkpoint, URL, tp=2, cache_dir=tmp_path / "other")

    store.before_put = late
    with pytest.raises(CheckpointError, match="marked as unfinished"):
        split(checkpoint, URL, tp=1, **access)
    assert state(store, tmp_path) == "unfinished"
    split(checkpoint, URL, tp=2, **access)
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "local", 2)


def test_the_same_file_again_after_its_task_was_published_changes_nothing(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    def late(key: str) -> None:
        if key.endswith(".safetensors"):
            store.before_put = None
            split(checkpoint, URL, tp=1, cache_dir=tmp_path / "other")

    store.before_put = late
    assert split(checkpoint, URL, tp=1, **access).complete
    assert state(store, tmp_path) == "new"


@pytest.mark.parametrize("moment", ["tokenizer.json", "reshard.json"])
def test_who_comes_late_with_a_small_file_does_not_say_complete(
    moment: str, store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    """Somebody clears the place, and another task publishes there, while the file is on its way.

    So may be another file: it comes after the place was cleared, and before it is taken.
    """
    other = write_checkpoint(tmp_path / "other", files=2, seed=7)
    (other / "tokenizer.json").write_text('{"of": "another"}')
    cleared = threading.Event()

    def late(key: str) -> None:
        if key == "out/rank-01-of-02/config.json" and moment == "tokenizer.json":
            cleared.wait(5)
        if key.removeprefix("out/").startswith(moment):
            store.before_put = None
            store.clear("out")
            cleared.set()
            split(other, URL, tp=2, cache_dir=tmp_path / "cache of the other")

    store.before_put = late
    with pytest.raises(CheckpointError, match=r"marked as unfinished|of another command|by another run"):
        split(checkpoint, URL, tp=2, **access, part=Share(0, 1))
    assert state(store, tmp_path) == "unfinished"
    split(other, URL, tp=2, **access)
    assert contents(store.root / "out") == local(other, tmp_path / "local", 2)


def test_two_parts_that_publish_at_the_same_time_both_say_complete(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    other = {"cache_dir": tmp_path / "other"}
    assert not split(checkpoint, URL, tp=2, **other, part=Share(1, 2)).complete
    said = []

    def again(key: str) -> None:
        if key == "out/reshard.json":
            store.before_put = None
            said.append(split(checkpoint, URL, tp=2, **other, part=Share(1, 2)).complete)

    store.before_put = again
    assert split(checkpoint, URL, tp=2, **access, part=Share(0, 2)).complete and said == [True]
    assert state(store, tmp_path) == "old"


def test_what_is_removed_late_is_said(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store carries it out after the same command has published, on another machine."""
    split(checkpoint, URL, tp=2, **access)
    first = Bucket.delete

    def late(self: Bucket, key: str) -> None:
        if key != "config.json":
            first(self, key)
            return
        monkeypatch.setattr(Bucket, "delete", first)
        split(checkpoint, URL, tp=1, cache_dir=tmp_path / "other", overwrite=True)
        (store.root / "out" / key).unlink()

    monkeypatch.setattr(Bucket, "delete", late)
    with pytest.raises(CheckpointError, match="marked as unfinished"):
        split(checkpoint, URL, tp=1, **access, overwrite=True)
    assert state(store, tmp_path) == "unfinished"


@pytest.mark.parametrize(
    ("file", "overwrite"),
    [
        ("rank-00-of-01/model.safetensors", False),
        ("rank-00-of-01/model.safetensors", True),
        ("tokenizer.json", False),
    ],
)
def test_a_file_that_was_replaced_is_not_published(
    file: str, overwrite: bool, store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    if overwrite:
        split(checkpoint, URL, tp=2, **access)

    def replace(key: str) -> None:
        if key == "out/reshard.json":
            (store.root / "out" / file).write_bytes(b"of another")

    store.before_put = replace
    with pytest.raises(CheckpointError, match=rf"{file} was replaced or removed by another run"):
        split(checkpoint, URL, tp=1, **access, overwrite=overwrite)
    store.before_put = None
    assert state(store, tmp_path) == "unfinished"


def test_a_small_file_that_was_put_again_is_published(
    store: StoreServer, access: Cache, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another process of the task; some stores give it another etag then."""
    put = Bucket.put

    def again(self: Bucket, key: str, content: bytes | Path, task: str = "") -> str | None:
        found = put(self, key, content, task)
        return found if key.endswith(".safetensors") else '"the first"'

    monkeypatch.setattr(Bucket, "put", again)
    split(checkpoint, URL, tp=1, **access, part=Share(0, 1))
    assert not (store.root / "out" / UNFINISHED).exists()


def test_what_was_uploaded_is_not_sent_again_as_a_small_file(
    store: StoreServer, access: Cache, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process was killed after it had noted the upload, and before it removed the file here."""
    note = Bucket.note

    def killed(self: Bucket, key: str, content: bytes, *of: Any, **more: Any) -> Any:
        answer = note(self, key, content, *of, **more)
        if key.startswith(JOURNAL) and [*journal_in(content, "name")]:
            raise KeyboardInterrupt
        return answer

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Bucket, "note", killed)
        split(checkpoint, URL, tp=1, **access)
    store.requests.clear()
    split(checkpoint, URL, tp=1, **access)
    assert not [request for request in store.requests if request.method == "PUT" and "safetensors" in request.path]


def test_a_bucket_of_googles(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.google(tmp_path / "account.json").items():
        monkeypatch.setenv(name, value)
    url = URL.replace("s3:", "gs:")
    split(checkpoint, url, tp=2, **access)
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "old", 2)
    split(url, url.replace("out", "again"), tp=1, **access)
    split(checkpoint, url, tp=1, **access, overwrite=True)
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "new", 1)
    merge(url.replace("out", "again"), tmp_path / "merged", **access)
    assert contents(tmp_path / "merged") == contents(checkpoint)


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_place_goes_to_the_first(
    kind: str, store: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.google(tmp_path / "account.json").items():
        monkeypatch.setenv(name, value)
    bucket = place_of(URL.replace("s3", kind), HubAccess(cache_dir=tmp_path))[1]
    assert isinstance(bucket, Bucket)
    assert [bucket.begin(task) for task in ("a", "b")] == [True, False] and bucket.task(UNFINISHED) == "a"


def test_two_of_one_task_have_a_journal_each(store: StoreServer, tmp_path: Path) -> None:
    """On two machines; on one, the second is told by the name that was given."""
    with uploading(URL, tmp_path / "one") as first, uploading(URL, tmp_path / "two") as second:
        assert first._journal_key != second._journal_key
        with pytest.raises(CheckpointError, match="another run is writing s3://bucket/out"):
            uploading(URL, tmp_path / "one").__enter__()


# --- the same place by another name ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "s3://bucket/./src",
        "s3://bucket/%73rc",
        "s3://bucket/x/../src",
        "s3://bucket/src/",
        "http",
        "s3://bucket/s%72c/",
    ],
)
@pytest.mark.parametrize("out", ["s3://bucket/src", "s3://bucket"])
def test_a_source_is_not_overwritten_by_another_spelling(
    source: str, out: str, store: StoreServer, access: Cache, checkpoint: Path
) -> None:
    shutil.copytree(checkpoint, store.root / "src")
    shutil.copy(checkpoint / "config.json", store.root)
    before = contents(store.root)
    source = store.url + "/bucket/src" if source == "http" else source
    with pytest.raises(CheckpointError, match="are the same place, or one lies in the other"):
        split(source, out, tp=2, **access, overwrite=True)
    assert contents(store.root) == before


def test_places_whose_names_begin_alike_are_two(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    for name in ("src", "src2"):
        shutil.copytree(checkpoint, store.root / name)
    for path in (store.root / "src2").iterdir():  # a copy, as a store makes it
        os.utime(path, (0, 0))
    assert split("s3://bucket/./src", "s3://bucket/src2", tp=2, **access, overwrite=True).complete
    split(checkpoint, tmp_path / "local", tp=2)
    assert without_manifest(store.root / "src2").items() >= without_manifest(tmp_path / "local").items()
    with pytest.raises(CheckpointError, match="are the same place"):
        split("s3://bucket/src", "s3://bucket/x/../src/inside", tp=2, **access)


@pytest.mark.parametrize("own", ["thesis.txt", "mine/data", "rank-00-of-02/notes.md"])
def test_a_users_own_object_is_named_and_stays(own: str, store: StoreServer, access: Cache, checkpoint: Path) -> None:
    split(checkpoint, URL, tp=2, **access)
    (store.root / "out" / own).parent.mkdir(exist_ok=True)
    (store.root / "out" / own).write_text("years")
    before = contents(store.root)
    with pytest.raises(CheckpointError, match=f"s3://bucket/out holds '{own}', not part of the checkpoint there"):
        split(checkpoint, URL, tp=1, **access, overwrite=True)
    assert contents(store.root) == before
    (store.root / "out" / own).unlink()
    assert split(checkpoint, URL, tp=1, **access, overwrite=True).complete


# --- several processes, and more than one command --------------------------------------------------------------------


@pytest.mark.parametrize("in_a_bucket", [False, True])
@pytest.mark.parametrize("second", [Share(0, 2), Share(1, 2)])
def test_a_part_of_one_and_a_part_of_another(
    second: Share, in_a_bucket: bool, store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", files=2, seed=7)
    out: str | Path = URL if in_a_bucket else tmp_path / "out"
    split(checkpoint, out, tp=2, **access, part=Share(0, 2))
    with pytest.raises(CheckpointError, match="holds the unfinished output of another command"):
        split(other, out, tp=2, **access, part=second)
    assert split(checkpoint, out, tp=2, **access, part=Share(1, 2)).complete
    assert contents(store.root / "out" if in_a_bucket else tmp_path / "out") == local(checkpoint, tmp_path / "local", 2)


def test_the_last_of_several_forgets_what_all_have_uploaded_if_it_cannot_be_trusted(
    store: StoreServer, access: Access, checkpoint: Path, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    split(checkpoint, shards, tp=2)
    document = json.loads((shards / "reshard.json").read_text())
    for file in document["ranks"]["0"] if isinstance(document["ranks"], dict) else document["ranks"][0]["files"]:
        file["checksum"] = "0" * 16
    (shards / "reshard.json").write_text(json.dumps(document))
    assert not merge(shards, URL, part=Share(0, 2), **access).complete and noted(store)
    with pytest.raises(MismatchError, match="its manifest says 0000"):
        merge(shards, URL, part=Share(1, 2), **access)
    assert not noted(store)


@pytest.mark.parametrize("moment", ["rank-00-of-02/model.safetensors", "tokenizer.json", "reshard.json"])
def test_two_commands_on_one_machine_for_one_place(
    moment: str, store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    """The second is told, and disturbs the first at no moment."""
    other = write_checkpoint(tmp_path / "other", files=2, seed=7)
    said = []

    def second(key: str) -> None:
        if key == f"out/{moment}":
            store.before_put = None
            with pytest.raises(CheckpointError, match="another run is writing s3://bucket/out") as refusal:
                split(other, URL, tp=2, **access)
            said.append(refusal.value.message)

    store.before_put = second
    assert split(checkpoint, URL, tp=2, **access).complete and said and str(tmp_path) not in said[0]
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "local", 2)


# --- what leaves nothing behind --------------------------------------------------------------------------------------


def uploading(url: str, cache: Path) -> Uploading:
    folder, bucket = place_of(url, HubAccess(cache_dir=cache))
    assert isinstance(bucket, Bucket)
    return Uploading(bucket, folder, {"command": "split"}, FileShare(WHOLE, frozenset(), {}))


def test_what_was_read_for_several_files_is_once_in_a_journal(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each state of it; who goes on checks the bytes of the source against what the journal has."""

    def stop(*_: object) -> None:
        raise CheckpointError("stopped")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="stopped"):
        patch.setattr(Uploading, "commit", stop)
        split(checkpoint, URL, tp=4, **access)
    (journal,) = [path.read_bytes() for path in (store.root / "out").glob(".reshard-journal-*")]
    entries = [entry for _, entry in journal_in(journal, "name")]
    reads = [read for entry in entries for read in entry["reads"]]
    whole = [read for read in reads if isinstance(read, dict)]
    assert len(entries) == 4 and {read["number"] for read in whole} == {*range(len(whole))}
    assert {*(read for read in reads if isinstance(read, int))} == {*range(len(whole))}  # each is of several ranks
    store.requests.clear()
    split(checkpoint, URL, tp=4, **access)
    assert not [each.path for each in store.requests if each.method == "PUT" and each.path.endswith(".safetensors")]
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "local", 4)


@pytest.mark.parametrize("line", one_of_each(range(1, 5)))
def test_a_damaged_line_of_a_journal_is_none(
    line: int, store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written again, and so is each whose sources that line has. Line 0 says whose journal it is."""

    def stop(*_: object) -> None:
        raise CheckpointError("stopped")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="stopped"):
        patch.setattr(Uploading, "commit", stop)
        split(checkpoint, URL, tp=4, **access)
    (journal,) = (store.root / "out").glob(".reshard-journal-*")
    lines = journal.read_text().splitlines(keepends=True)
    lines[line] = lines[line].replace("A", "B", 1) if line < 2 else "?" + lines[line]
    journal.write_text("".join(lines) if line < 4 else "")
    store.requests.clear()
    split(checkpoint, URL, tp=4, **access)
    assert [each.path for each in store.requests if each.method == "PUT" and each.path.endswith(".safetensors")]
    assert contents(store.root / "out") == local(checkpoint, tmp_path / "local", 4)


def test_what_cannot_begin_leaves_no_threads_and_no_lock(
    store: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise CheckpointError("the journals cannot be read")

    def working() -> int:
        return sum("(_work)" in thread.name for thread in threading.enumerate())

    before = working()
    with monkeypatch.context() as patch:
        patch.setattr(Uploading, "_uploaded", failing)
        kept = uploading(URL, tmp_path)
        with pytest.raises(CheckpointError, match="cannot be read"):
            kept.__enter__()
    give_up = time.monotonic() + 60
    while working() > before and time.monotonic() < give_up:
        time.sleep(0.01)
    assert working() == before
    with uploading(URL, tmp_path):
        pass


def test_who_stops_waiting_cancels_what_has_not_begun(store: StoreServer, tmp_path: Path) -> None:
    go, done = threading.Event(), list[int]()
    with pytest.raises(ZeroDivisionError), uploading(URL, tmp_path) as staging:
        assert staging._threads is not None
        staging._uploads = [staging._threads.submit(lambda: 1 // 0)]
        staging._uploads += [staging._threads.submit(lambda: bool(go.wait(10)) and done.append(1)) for _ in range(9)]
        staging._wait()
    go.set()
    time.sleep(0.1)
    assert len(done) <= 4


# --- who comes late --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_a_bucket", [False, True])
def test_another_model_of_the_same_fingerprint_is_not_taken_for_this_one(
    in_a_bucket: bool, store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    """It differs in bytes that the fingerprint does not take."""
    split(checkpoint, tmp_path / "shards", tp=2)
    other = write_checkpoint(tmp_path / "other", files=2)
    change_tensor(other / "model-00001-of-00002.safetensors", "model.layers.0.mlp.up_proj.weight")
    split(other, tmp_path / "others", tp=2)
    out: str | Path = URL if in_a_bucket else tmp_path / "out"
    merge(tmp_path / "others", out, part=Share(0, 2), **access)
    assert merge(tmp_path / "others", out, part=Share(1, 2), **access).complete
    with pytest.raises(CheckpointError, match="out exists"):
        merge(tmp_path / "shards", out, part=Share(1, 2), **access)


@pytest.mark.parametrize(("in_a_bucket", "single"), [(False, 0), (True, 8 << 20), (True, 1000)])
def test_an_output_of_several_processes_has_nothing_beside_it(
    in_a_bucket: bool, single: int, store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In a bucket, a part that comes again is told by the last document's metadata that it is complete.

    Also if that document is so large that it is sent in parts.
    """
    monkeypatch.setattr("reshard.store.bucket._SINGLE", single)
    out: str | Path = URL if in_a_bucket else tmp_path / "out"
    done = [split(checkpoint, out, tp=2, part=Share(index, 2), **access).complete for index in (0, 1)]
    assert done == [False, True] and not list(access["cache_dir"].glob("assets/reshard/uploads/*"))
    there = contents(store.root / "out" if in_a_bucket else tmp_path / "out")
    assert there == local(checkpoint, tmp_path / "local", 2)
    if in_a_bucket:
        store.requests.clear()
        assert split(checkpoint, out, tp=2, part=Share(0, 2), **access).complete
        assert not [request for request in store.requests if request.method == "PUT"]


# --- a busy server ----------------------------------------------------------------------------------------------------


def test_opening_and_uploading_wait_for_a_busy_server(store: StoreServer, access: Cache, checkpoint: Path) -> None:
    def busy(key: str) -> None:
        if key.endswith((UNFINISHED, "config.json")) and store.refused < 6:
            store.busy_until = time.time() + 1

    store.busy_until, store.before_put = time.time() + 1, busy
    begun = remote.tried_again()
    split(checkpoint, URL, tp=2, **access)
    assert store.refused >= 3
    assert remote.tried_again() > begun


def test_a_request_made_again_is_counted_once_by_however_many_threads(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    four: dict[str, Any] = {**access, "workers": 4, "sizes": Sizes(step=600, small=1000)}
    split(checkpoint, URL, tp=2, **access)
    merge(URL, tmp_path / "first", **four)  # the headers are kept from now on
    store.faults.extend([status(503)] * 3)
    begun = remote.tried_again()
    assert merge(URL, tmp_path / "merged", **four).tried_again == remote.tried_again() - begun == 3


# --- constants of a program's format ---------------------------------------------------------------------------------


def test_the_constants_of_a_file_are_read_together(
    store: StoreServer, access: Cache, checkpoint: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    split(checkpoint, saved, tp=2, format="vllm")
    (saved / "reshard.json").unlink()
    change_tensor(saved / "model-rank-1-part-0.safetensors", "model.layers.2.self_attn.attn._k_scale")
    shutil.copytree(saved, store.root / "saved")
    there = open_any(URL.replace("out", "saved"), Access(**access))
    asked = [request.path for request in store.requests if request.method == "GET"]
    for rank in (0, 1):  # for the header with the fingerprint, and for all constants
        assert asked.count(f"/bucket/saved/model-rank-{rank}-part-0.safetensors") == 2
    assert (
        there.left_behind
        == open_any(saved, Access(**access)).left_behind
        == ("model.layers.*.self_attn.attn._k_scale",)
    )
