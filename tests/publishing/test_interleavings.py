"""Every order in which the steps of several processes can come, for processes that write one output.

The real code of ``Staging`` runs on a disk in memory (``model_disk.py``). All orders of the steps are followed, also
those in which a process is killed or gets Ctrl-C before any of its steps. That a process is stopped for a while is one
of the orders. In each state that can be reached, what is at the place of the output is whole. In each that is an end,
nothing is left behind, and the same commands complete what is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from reshard.formats.errors import CheckpointError
from reshard.publishing.existing import Existing
from reshard.publishing.records import WHOLE, FileShare, Finished, Moved
from reshard.publishing.staging import Staging
from reshard.store.staging_names import BUILT, JOURNAL, STATE
from tests.marks import thorough
from tests.publishing.model_disk import INTERRUPT, OUT, WORK, Answers, Detail, Disk, Name, Run, install

LIST = "reshard.json"
OLD, NEW = "old", "new"


@dataclass(frozen=True)
class Process:
    """A process that writes a share of an output, as ``rewrite`` does."""

    share: FileShare
    overwrite: bool = False

    def __call__(self) -> bool:
        share = self.share
        if not share.files:
            return False
        task = {"command": "split"}
        building = Staging(Name(OUT), task, share, overwrite=self.overwrite, check=self._check)  # type: ignore[arg-type]
        Run.current.staging = building
        with building as staging:
            left = share.files - staging.finished.keys()
            moved = {name: content for of in staging.moved(left) for name, content in of.written.items()}
            for name in sorted(left):
                place = staging.path(name)
                begun = place.with_name(f"{place.name}.incomplete")
                if name not in moved or not begun.is_file() or begun.read_text() != moved[name]:
                    begun.write_text(NEW)
                    staging.note_moved(Moved(((0, 0),), 1, {name: NEW}))
                begun.rename(place)
                staging.note_finished(name, Finished(1, None))
            if not staging.is_last():
                return False
            staging.commit(self._documents)
        return True

    def _check(self, there: Existing) -> None:
        listed = json.loads(there.read(LIST) or "[]") if self.share.folders else ()
        if not self.overwrite and ({*self.share.folders} & {*listed} if self.share.folders else there.names):
            raise CheckpointError("exists")

    def _documents(self) -> Mapping[str, bytes]:
        if not self.share.folders:
            return {LIST: NEW.encode()}
        there = Name(OUT) / LIST
        listed = json.loads(there.read_bytes()) if there.is_file() else []
        return {LIST: json.dumps(sorted({*listed, *self.share.folders})).encode()}


def parts(*files: Sequence[str]) -> list[Process]:
    """Processes that write these files each."""
    planned = {name: 1 for names in files for name in names}
    count = len(files)
    return [
        Process(FileShare(f"part-{index}-of-{count}", frozenset(names), planned)) for index, names in enumerate(files)
    ]


def ranks(count: int, **options: bool) -> list[Process]:
    folders = [f"rank-{rank}" for rank in range(count)]
    return [
        Process(FileShare(f"{folder}-of-{count}", frozenset({f"{folder}/w"}), {f"{folder}/w": 1}, (folder,)), **options)
        for folder in folders
    ]


def whole(**options: bool) -> Process:
    return Process(FileShare(WHOLE, frozenset({"a"}), {"a": 1}), **options)


def again(*files: str) -> Process:
    """A part with files of a part of two, as if their number had been changed."""
    return Process(FileShare("part-0-of-3", frozenset(files), {"a": 1, "b": 1}))


Place = object
"""Where a process is, for what it does next (see ``Run.place``); a text, if it has ended."""


@dataclass(frozen=True)
class State:
    """A disk, of each process its answers, and where it is."""

    disk: Disk
    answers: tuple[Answers, ...]
    places: tuple[Place, ...]
    faults: int = 0

    @property
    def is_end(self) -> bool:
        return all(isinstance(place, str) for place in self.places)

    def after(self, number: int, disk: Disk, answers: Answers, place: Place, faults: int = 0) -> State:
        """The state when a process has made a step."""
        before, behind = slice(number), slice(number + 1, None)
        return State(
            disk,
            (*self.answers[before], answers, *self.answers[behind]),
            (*self.places[before], place, *self.places[behind]),
            self.faults + faults,
        )


class Explorer:
    """Follows all orders of the steps. ``faults`` happen before any step, but one in all."""

    def __init__(
        self, processes: Sequence[Process], faults: Sequence[str] = (), detail: Detail = Detail.UNDISTURBED
    ) -> None:
        self.processes, self.faults, self.detail = processes, faults, detail
        self._known: dict[object, tuple[Disk, Answers, Place] | None] = {}

    def states(self, disk: Disk) -> Iterator[State]:
        """Every state that can be reached, each once."""
        left = [State(disk, ((),) * len(self.processes), ((),) * len(self.processes))]
        seen = set[object]()
        while left:
            state = left.pop()
            key = state.disk.key, state.places, state.faults
            if key in seen:
                continue
            seen.add(key)
            yield state
            after = [each for number in range(len(self.processes)) for each in self._after(state, number)]
            assert after or state.is_end, "no process can go on"
            left += after

    def _after(self, state: State, number: int) -> Iterator[State]:
        place, answers = state.places[number], state.answers[number]
        if isinstance(place, str):
            return
        key = number, state.disk.key, place
        if key not in self._known:
            self._known[key] = self._step(state.disk, number, answers)
        if (known := self._known[key]) is not None:
            yield state.after(number, *known)
        journal = state.disk.files(WORK).get(f"{JOURNAL}{self.processes[number].share.label}", "")
        result = LATE if journal.rpartition("\n{")[2].startswith(ENDED) else "killed"
        if "kill" in self.faults and not state.faults:
            yield state.after(number, state.disk.without(number), (), result, 1)
        if INTERRUPT in self.faults and not state.faults and result != LATE:
            yield state.after(number, state.disk, (*answers, INTERRUPT), (place, INTERRUPT), 1)

    def _step(self, disk: Disk, number: int, answers: Answers) -> tuple[Disk, Answers, Place] | None:
        """What one step makes of it; None if the process waits for another."""
        run = Run(number, answers, disk.copy(), self.detail)
        result = run.step(self.processes[number])
        if run.is_blocked:
            return None
        if result is not None:
            return run.disk.without(number), (), result
        return run.disk, tuple(run.answers), run.place


def run_alone(process: Process, disk: Disk) -> str:
    """Run a process from its begin to its end."""
    answers: Answers = ()
    while True:
        run = Run(-1, answers, disk)
        result = run.step(process)
        if result is not None:
            return result
        answers = tuple(run.answers)


ENDS = ("committed", "done")
LATE = "killed when all was done"
ENDED = '"ended"'
BUSY, EXISTS = "CheckpointError another run is writing", "CheckpointError exists"


def output(disk: Disk, folder: str = OUT) -> dict[str, str]:
    """The files of the output in a folder."""
    return disk.files(folder)


def expected(processes: Sequence[Process]) -> dict[str, str]:
    """The output that the processes make."""
    folders = sorted({folder for process in processes for folder in process.share.folders})
    planned = {name: NEW for process in processes for name in process.share.planned}
    return {**planned, LIST: json.dumps(folders) if folders else NEW}


def is_whole(disk: Disk, new: Mapping[str, str], old: Mapping[str, str]) -> bool:
    """Whether each unit at the place of the output, a rank or all, is the old or the new one.

    It may be missing if there was none, or if both are in the staging folder.
    """
    for unit in {name.rpartition("/")[0] for name in new.keys() - {LIST}}:
        inside, folder = f"{unit}/" if unit else "", f"/{unit}" if unit else ""
        mine, before = (
            {name.removeprefix(inside): of[name] for name in of if name.startswith(inside)} for of in (new, old)
        )
        here = output(disk, OUT + folder)
        aside, built = output(disk, f"{WORK}/{STATE}replaced-{unit or WHOLE}"), output(disk, f"{WORK}/{BUILT}{folder}")
        is_moved = aside in (before, mine) and built == mine
        if here not in (mine, before) and (here or (before and not is_moved)):
            return False
    return True


def check_end(disk: Disk, new: Mapping[str, str]) -> None:
    """The output is complete, and nothing is beside it."""
    assert output(disk) == new and not disk.files(WORK) and WORK not in disk.names, disk.names


def follow(
    processes: Sequence[Process], old: Mapping[str, str] = {}, *, refusals: tuple[str, ...] = (), **how: Any
) -> int:
    """Check all states that can be reached; how many there are. Some of the processes may end with ``refusals``."""
    new, disk, count, reruns = expected(processes), Disk(), 0, set[object]()
    if old:
        disk.mkdir(OUT)
        for name, content in sorted(old.items()):
            if (folder := f"{OUT}/{name}".rpartition("/")[0]) not in disk.names:
                disk.mkdir(folder)
            disk.write(f"{OUT}/{name}", content)
    for state in Explorer(processes, **how).states(disk):
        count += 1
        assert is_whole(state.disk, new, old), state
        if not state.is_end:
            continue
        results = [str(place) for place in state.places]
        assert not state.disk.opened
        is_one_refused = bool(refusals) and any(result.startswith(refusals) for result in results)
        if not state.faults and not is_one_refused:
            assert all(result.startswith(ENDS) for result in results), results
            check_end(state.disk, new)
        elif state.disk.key not in reruns:
            reruns.add(state.disk.key)
            rerun = state.disk.copy()
            left = [process for process, result in zip(processes, results, strict=True) if not result.startswith(ENDS)]
            again = [run_alone(process, rerun) for process in left]
            may_exist = left[0].share.folders or refusals or LATE in results or "committed" not in results
            assert all(each.startswith((*ENDS, EXISTS) if may_exist else ENDS) for each in again), (results, again)
            check_end(rerun, new)
    return count


@pytest.fixture(autouse=True)
def _model_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


KILL, ANY = ("kill",), ("kill", INTERRUPT)


@pytest.mark.parametrize(
    ("processes", "how"),
    [
        (parts(["a"], ["b"]), {"faults": KILL, "detail": Detail.NOTICED}),
        pytest.param(parts(["a"], ["b"]), {"faults": KILL}, marks=thorough),
        pytest.param(ranks(2), {"faults": KILL, "detail": Detail.NOTICED}, marks=thorough),
        pytest.param(parts(["a", "b"], ["c"]), {"faults": KILL, "detail": Detail.NOTICED}, marks=thorough),
        pytest.param(parts(["a"], ["b"]), {"faults": ANY}, marks=thorough),
        pytest.param(ranks(2), {"faults": ANY, "detail": Detail.NOTICED}, marks=thorough),
        pytest.param(parts(["a"], ["b"]), {"faults": KILL, "detail": Detail.ALL}, marks=thorough),
        pytest.param(ranks(2), {"faults": KILL}, marks=thorough),
        pytest.param(parts(["a", "b"], ["c"]), {"faults": ANY, "detail": Detail.NOTICED}, marks=thorough),
        pytest.param(parts(["a"], ["b"], ["c"]), {"detail": Detail.NOTICED}, marks=thorough),
        pytest.param(ranks(3), {"detail": Detail.NOTICED}, marks=thorough),
    ],
    ids=lambda of: f"{len(of)} {of[0].share.label}" if isinstance(of, list) else None,
)
def test_several_make_one_output(processes: list[Process], how: dict[str, Any]) -> None:
    """Nobody is refused, and nothing is left behind by any of them, or by the same commands after a fault."""
    assert follow(processes, **how) > 1000


OUTPUT = {"a": OLD, LIST: OLD}
SPLIT = {"rank-0/w": OLD, "rank-1/w": OLD, LIST: json.dumps(["rank-0", "rank-1"])}


@pytest.mark.parametrize(
    ("processes", "how"),
    [
        (parts(["a"], [])[:1] * 2, {"refusals": (BUSY, EXISTS)}),
        *(
            pytest.param(processes, how, marks=thorough)
            for processes, how in [
                ([whole(), parts(["a"], [])[0]], {"refusals": (BUSY, EXISTS)}),
                ([*parts(["a"], ["b"]), again("a")], {"refusals": (BUSY, EXISTS), "detail": Detail.NOTICED}),
                ([whole(overwrite=True)] * 2, {"refusals": (BUSY,), "old": OUTPUT, "detail": Detail.NOTICED}),
                (ranks(2, overwrite=True), {"faults": KILL, "old": SPLIT, "detail": Detail.NOTICED}),
                (ranks(2, overwrite=True), {"faults": ANY, "old": SPLIT, "detail": Detail.NOTICED}),
            ]
        ),
    ],
    ids=[
        "the same part",
        "the whole and a part",
        "a part and another number",
        "an output replaced twice",
        "ranks replaced",
        "with Ctrl-C",
    ],
)
def test_some_get_in_the_way_of_others(processes: list[Process], how: dict[str, Any]) -> None:
    """One is refused or comes after the other; the same commands complete the output, whatever has happened."""
    assert follow(processes, **how) > 1000


def test_what_was_moved_aside_is_renamed_back() -> None:
    """By the next run, also by one that is refused."""
    old, seen = {"a": OLD, LIST: OLD}, 0
    disk = Disk()
    disk.mkdir(OUT)
    for name in old:
        disk.write(f"{OUT}/{name}", OLD)
    for state in Explorer([whole(overwrite=True)], KILL).states(disk):
        if state.is_end and not state.disk.files(OUT):
            seen += 1
            after = state.disk.copy()
            assert run_alone(whole(), after) == EXISTS
            assert output(after) == old
    assert seen
