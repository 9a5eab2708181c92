"""What a stopped run has written is not written again, also within files; and only what is still there."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from reshard.api import inspect, merge, split
from reshard.move.jobs import Sizes
from reshard.publishing.staging import Staging
from reshard.store.staging_names import staging_of
from reshard.system import Share
from reshard.writing.summary import Summary
from tests.forked import Forked
from tests.marks import of_ranks, one_of_each, thorough
from tests.slow import be_slow
from tests.support import contents, write_checkpoint

SMALL = Sizes(step=1200, small=100, piece=600)
"""As in tests/slow.py: a tiny model has many steps."""
MODEL = 27_000
"""About the size of the tiny model's tensors in bytes."""
KINDS = ["split", "re-split", "merge", "vllm", "dcp", "huggingface"]


def run(kind: str, folder: Path, out: Path, **options: Any) -> Summary:
    """Write an output of this kind from what ``sources`` has made in a folder."""
    if kind == "merge":
        return merge(folder / "shards", out, **options)
    if kind == "huggingface":
        return merge(folder / "run", out, config=folder / "source", **options)
    form = {} if kind in ("split", "re-split") else {"format": kind}
    return split(folder / ("shards" if kind == "re-split" else "source"), out, tp=4, **form, **options)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_checkpoint(folder / "source", files=3)
    split(folder / "source", folder / "shards", tp=2)
    split(folder / "source", folder / "run", tp=2, format="vllm")
    for kind in KINDS:
        run(kind, folder, folder / f"of {kind}")
    return folder


def journals(out: Path) -> list[dict[str, Any]]:
    """The lines of the journals of an unfinished output."""
    found = list[str]()
    for path in staging_of(out).glob(".reshard-journal-*"):
        with contextlib.suppress(FileNotFoundError):  # the work ended since it was listed
            found += path.read_text().splitlines()
    return [json.loads(line) for line in found if line.endswith("}")]


def moved(out: Path) -> int:
    """How many reports of complete steps there are."""
    return sum("steps" in line for line in journals(out))


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, Callable[[], object]], str]:
    """Calls a function with Ctrl-C when it has written a share of the tiny model; what is said of what is kept."""
    real = os.pwrite

    def stopped(share: float, function: Callable[[], object]) -> str:
        left = share * MODEL

        def write(*arguments: Any) -> int:
            nonlocal left
            if threading.current_thread() is not threading.main_thread():  # which writes headers
                if left < 0:
                    raise KeyboardInterrupt
                left -= len(arguments[1])
            return real(*arguments)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as raised:
            patch.setattr(os, "pwrite", write)
            function()
        return str(raised.value)

    return stopped


Stop = Callable[[float, Callable[[], object]], str]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", one_of_each([1, 2]))
def test_steps_of_unfinished_files_are_kept(kind: str, workers: int, stop: Stop, sources: Path, tmp_path: Path) -> None:
    """All files grow at once; stopped twice, and nothing is written twice."""
    expected, out = contents(sources / f"of {kind}"), tmp_path / "out"
    again = partial(run, kind, sources, out, sizes=SMALL, workers=workers)
    said = stop(0.35, again)
    assert "are kept: the same command goes on from there" in said and moved(out)
    assert not any("name" in line for line in journals(out)) or kind in ("merge", "huggingface")
    first = moved(out)
    stop(0.35, again)
    assert moved(out) > first
    summary = again()
    assert summary.nbytes - summary.written > 0.5 * MODEL
    assert contents(out) == expected and not staging_of(out).exists()


def test_what_was_not_begun_is_no_more_read_than_in_one_run(stop: Stop, sources: Path, tmp_path: Path) -> None:
    """The checksums of the source are put together from what several runs have read of it."""
    out = tmp_path / "out"
    for _ in range(4):
        stop(0.2, partial(run, "split", sources, out, sizes=SMALL))
    done = run("split", sources, out, sizes=SMALL)
    read = json.loads((out / "reshard.json").read_text())["source"]["files"]
    assert done.complete and all(file["checksum"] for file in read)
    assert contents(out) == contents(sources / "of split")


def incomplete(out: Path) -> list[Path]:
    return sorted(staging_of(out).rglob("*.incomplete"))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("kind", one_of_each(["split", "merge", "dcp"]))
def test_damaged_bytes_are_written_again(kind: str, stop: Stop, sources: Path, tmp_path: Path) -> None:
    """A flipped bit anywhere in an unfinished file, or all of it: what is still there is kept, and no more."""
    out, aside = tmp_path / "out", tmp_path / "aside"
    again = partial(run, kind, sources, out, sizes=SMALL)
    stop(0.6, again)
    shutil.copytree(staging_of(out), aside)
    whole, moments, written = again().written, random.Random(kind), set[int]()
    shutil.rmtree(out)
    for damage in ("a bit", "a bit", "a bit", "all"):
        shutil.copytree(aside, staging_of(out))
        for path in incomplete(out) if damage == "all" else [moments.choice(incomplete(out))]:
            flip(path, moments.randrange(path.stat().st_size))
            if damage == "all":
                path.write_bytes(bytes(path.stat().st_size))
        summary = again()
        written.add(summary.written)
        assert contents(out) == contents(sources / f"of {kind}")
        shutil.rmtree(out)
    assert min(written) >= whole and max(written) > whole


@pytest.mark.parametrize("kind", one_of_each(["split", "merge", "dcp"]))
def test_a_damaged_journal_is_not_believed(kind: str, stop: Stop, sources: Path, tmp_path: Path) -> None:
    """Another character anywhere in it, or nothing of it: the output is the same, with the same sums of the source."""
    out, moments = tmp_path / "out", random.Random(kind)
    again = partial(run, kind, sources, out, sizes=SMALL)
    for damage in ("sum", "sum", "any", "any", "any", "empty"):
        stop(0.9, again)
        (journal,) = staging_of(out).glob(".reshard-journal-*")
        text = journal.read_text()
        at = text.rindex('"sum": "') + 8 + moments.randrange(100) if damage == "sum" else moments.randrange(len(text))
        journal.write_text("" if damage == "empty" else f"{text[:at]}{'B' if text[at] == 'A' else 'A'}{text[at + 1 :]}")
        (staging_of(out) / "output" / "of-another-task.safetensors").write_bytes(b"")
        assert inspect(staging_of(out)).kind.startswith("unfinished output of ")
        again()
        assert contents(out) == contents(sources / f"of {kind}")
        shutil.rmtree(out)


def test_steps_that_two_runs_have_written_count_once(stop: Stop, sources: Path, tmp_path: Path) -> None:
    """They were damaged, and written again: then both runs have noted what is there."""
    out = tmp_path / "out"
    again = partial(run, "split", sources, out, sizes=SMALL)
    stop(0.4, again)
    for path in incomplete(out):
        path.write_bytes(bytes(path.stat().st_size))
    stop(0.6, again)
    summary = again()
    assert summary.nbytes - summary.written > 0.4 * MODEL
    assert contents(out) == contents(sources / "of split")


@pytest.mark.parametrize("is_touched", one_of_each([False, True]))
def test_a_file_that_is_complete_and_not_noted(
    is_touched: bool, stop: Stop, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill comes between its new name and the journal, or somebody touches it: it is read again, not written."""
    out, note = tmp_path / "out", Staging.note_finished

    def killed(self: Staging, *arguments: Any) -> None:
        if is_touched:
            note(self, *arguments)
        raise KeyboardInterrupt

    again = partial(run, "split", sources, out, sizes=SMALL)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Staging, "note_finished", killed)
        again()
    (complete,) = staging_of(out).rglob("*.safetensors")
    os.utime(complete, (1, 1))
    summary = again()
    assert summary.nbytes - summary.written > 0.8 * MODEL
    assert contents(out) == contents(sources / "of split")


def test_after_a_restart_of_the_machine_only_what_reached_the_disk_is_kept(
    stop: Stop, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal may be there, and the bytes not; or what is there of the journal is no text."""
    out = tmp_path / "out"
    again = partial(run, "split", sources, out, sizes=SMALL)
    stop(0.6, again)
    lost, *_ = incomplete(out)
    for path in staging_of(out).glob(".reshard-journal-*"):
        path.write_bytes(path.read_bytes() + b"\n\xff\0")
    lost.write_bytes(lost.read_bytes()[:2000])
    (incomplete(out)[1]).unlink()
    monkeypatch.setattr("reshard.publishing.staging.boot_id", lambda: "another")
    again()
    assert contents(out) == contents(sources / "of split")


@pytest.mark.parametrize(
    "other",
    one_of_each(
        [
            pytest.param({"seed": 9}, id="a source"),
            pytest.param({"tp": 2}, id="a degree"),
            pytest.param({"max_shard_size": 2500}, id="an option"),
            pytest.param({"format": "vllm"}, id="a format"),
            pytest.param({"sizes": replace(SMALL, step=1300)}, id="other steps"),
            pytest.param({"checksum": False}, id="no checksums"),
        ]
    ),
)
def test_another_command_takes_nothing_over(other: dict[str, Any], stop: Stop, sources: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"tp": 4, "sizes": SMALL} | other
    seed = options.pop("seed", None)
    source = write_checkpoint(tmp_path / "other", files=3, seed=seed) if seed is not None else sources / "source"
    stop(0.6, lambda: run("split", sources, out, sizes=SMALL))
    assert moved(out)
    summary = split(source, out, **options)
    assert summary.written == summary.nbytes
    split(source, tmp_path / "expected", **options)
    assert contents(out) == contents(tmp_path / "expected")


def test_a_source_that_was_touched_is_read_again(stop: Stop, sources: Path, tmp_path: Path) -> None:
    source, out = shutil.copytree(sources / "source", tmp_path / "source"), tmp_path / "out"
    stop(0.6, lambda: split(source, out, tp=4, sizes=SMALL))
    os.utime(source / "model-00002-of-00003.safetensors")
    summary = split(source, out, tp=4, sizes=SMALL)
    assert summary.written == summary.nbytes


def test_without_checksums_only_whole_files_are_kept(stop: Stop, sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stop(0.6, lambda: run("split", sources, out, sizes=SMALL, checksum=False)) == "nothing is kept"
    assert not staging_of(out).exists()


def test_parts_go_on_also_in_another_number(stop: Stop, sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for index in range(2):
        stop(0.2, partial(run, "split", sources, out, sizes=SMALL, part=Share(index, 2)))
    assert moved(out)
    done = [run("split", sources, out, sizes=SMALL, part=Share(index, 3)) for index in range(3)]
    assert sum(each.written for each in done) < sum(each.nbytes for each in done) and done[-1].complete
    assert contents(out) == contents(sources / "of split")


# -- real processes


def slowly(kind: str, sources: Path, out: Path, part: Share | None) -> None:
    be_slow()
    run(kind, sources, out, part=part)


def start(kind: str, sources: Path, out: Path, part: Share | None) -> Forked:
    return Forked((partial(slowly, kind, sources, out, part), os.environ), out.parent, out.parent)


CASES = [
    (kind, how, 1 + (number + how) % 2)
    for number, kind in enumerate(KINDS[:5])
    for how in (signal.SIGINT, signal.SIGKILL)
]  # fmt: skip
"""All pairs: what is written, how a process ends and how many there are do not know of each other."""


@pytest.mark.parametrize(("kind", "how", "count"), CASES)
@thorough
@of_ranks
def test_stopped_at_random_moments(kind: str, how: int, count: int, sources: Path, tmp_path: Path) -> None:
    """Some processes or all are stopped, several times; the result has the same bytes."""
    parts: list[Share | None] = [Share(index, count) for index in range(count)] if count > 1 else [None]
    out, moments, stopped = tmp_path / "out", random.Random(f"{kind}{how}{count}"), 0
    for _ in range(30):
        if out.exists() and stopped == 0:
            shutil.rmtree(out)  # it was complete before it could be stopped
        if out.exists() or stopped >= 4:
            break
        before = moved(out)
        processes = [start(kind, sources, out, part) for part in parts]
        while all(process.poll() is None for process in processes) and moved(out) <= before:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        for process in processes[: moments.choice([1, count])]:
            process.send_signal(how)
        stopped += [process.wait() != 0 for process in processes].count(True)
    for process in [start(kind, sources, out, part) for part in parts]:
        assert process.wait() == 0 or f"{out} exists" in process.stderr, process.stderr
    assert stopped and contents(out) == contents(sources / f"of {kind}")
    assert not staging_of(out).exists()
