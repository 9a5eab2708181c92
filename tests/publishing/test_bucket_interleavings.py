"""Every order in which the requests of several processes can come, for processes that write to one place in a bucket.

The real code of ``Uploading`` runs on a bucket in memory (``model_bucket.py``). All orders of the requests are
followed, also those in which a process is killed before any of them. In each state that can be reached, what a reader
takes for a checkpoint is whole and of one task, except while a process whose task was published by another has yet to
look at it again, and if it is killed before. In each that is an end, the same commands complete the output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reshard.formats.errors import CheckpointError
from reshard.publishing.existing import Existing
from reshard.publishing.records import WHOLE, FileShare, Finished
from reshard.publishing.upload import Uploading
from reshard.store.bucket import Bucket
from reshard.store.staging_names import JOURNAL, STATE, UNFINISHED, task_name
from tests.marks import thorough
from tests.publishing.model_bucket import Answers, Object, Run, Store, install

LIST = "reshard.json"
OWN = "thesis.txt"
"""An object of the user's."""
OLD = {"old": b"old", "config.json": b"old", LIST: b"old"}


@dataclass(frozen=True)
class Process:
    """A process that writes a share of an output, as ``rewrite`` does; ``name`` tells its task from others."""

    share: FileShare
    name: str = "new"
    overwrite: bool = False

    @property
    def task(self) -> dict[str, str]:
        return {"command": self.name}

    @property
    def output(self) -> dict[str, bytes]:
        """All objects that its task makes."""
        return dict.fromkeys(self.share.planned, task_name(self.task).encode()) | self._documents()

    def __call__(self) -> bool:
        there = Bucket("memory"), Path("here")
        with Uploading(*there, self.task, self.share, overwrite=self.overwrite, check=self._check) as staging:
            for name in sorted(self.share.files - staging.finished.keys()):
                staging.note_finished(name, Finished(1, None))
            if not staging.is_last():
                return False
            staging.commit(self._documents)
        return True

    def _documents(self) -> dict[str, bytes]:
        return {name: self.name.encode() for name in ("config.json", LIST)}

    def _check(self, there: Existing) -> None:
        if OWN in there.names:
            raise CheckpointError(f"holds {OWN}")
        if LIST in there.names and not there._is_unfinished and not self.overwrite:
            raise CheckpointError("exists")


def parts(*files: Sequence[str]) -> list[Process]:
    """Processes that write these files each."""
    planned, count = {name: 1 for names in files for name in names}, len(files)
    shares = [FileShare(f"part-{n}-of-{count}", frozenset(names), planned) for n, names in enumerate(files)]
    return [*map(Process, shares)]


def whole(name: str, *files: str, **of: Any) -> Process:
    return Process(FileShare(WHOLE, frozenset(files), dict.fromkeys(files, 1)), name, **of)


class Place(NamedTuple):
    """Where a process is, for what it does next (a number), the answers that lead there, and what has come of it."""

    at: int = -1
    answers: Answers = ()
    is_changing: bool = False
    """Whether it is between its two looks at whose the place is, before and after it puts or removes a file."""
    result: str | None = None


class State(NamedTuple):
    store: Store
    places: tuple[Place, ...]
    kills: int = 0
    is_late: bool = False
    """Whether a process was killed between its looks."""

    @property
    def is_end(self) -> bool:
        return all(place.result is not None for place in self.places)

    @property
    def key(self) -> object:
        return self.store.key, tuple((place.at, place.result) for place in self.places), self.kills, self.is_late

    def after(self, number: int, place: Place, **changes: Any) -> State:
        return self._replace(places=(*self.places[:number], place, *self.places[number + 1 :]), **changes)


class Explorer:
    """Follows all orders of the requests, with so many ``kills`` in all. ``quiet`` requests are parts of the step
    before.
    """

    def __init__(self, processes: Sequence[Process], kills: int = 0, quiet: Collection[str] = ()) -> None:
        self.processes, self.kills, self.quiet = processes, kills, quiet
        self._known: dict[object, tuple[Store, Place]] = {}
        self._places: dict[object, int] = {}

    def states(self, store: Store) -> Iterator[State]:
        """Every state that can be reached, each once."""
        left, seen = [State(store, (Place(),) * len(self.processes))], set[object]()
        while left:
            state = left.pop()
            if (key := state.key) not in seen:
                seen.add(key)
                yield state
                left += [each for number in range(len(self.processes)) for each in self._after(state, number)]

    def _after(self, state: State, number: int) -> Iterator[State]:
        place = state.places[number]
        if place.result is not None:
            return
        key = number, state.store.key, place.at
        if key not in self._known:
            self._known[key] = self.step(number, place.answers, state.store)
        store, then = self._known[key]
        yield state.after(number, then, store=store)
        if state.kills < self.kills:
            killed = Place(result="killed")
            yield state.after(number, killed, kills=state.kills + 1, is_late=state.is_late or place.is_changing)

    def step(self, number: int, answers: Answers, store: Store) -> tuple[Store, Place]:
        run = Run(number, answers, store, self.quiet)
        result = run.step(self.processes[number])
        if result is not None:
            return run.store, Place(result=result)
        at = self._places.setdefault(run.place, len(self._places))
        return run.store, Place(at, tuple(run.answers), run.is_in("_upload", "_change"))


def run_alone(process: Process, store: Store) -> tuple[str, Store]:
    """Run a process from its begin to its end, on another machine."""
    run = Run(9, (), store, (*READS, "put", "delete"))
    return run.step(process) or "", run.store


def output(store: Store) -> dict[str, bytes]:
    return {name: of.content for name, of in store.objects.items() if not name.startswith(STATE)}


def is_read(store: Store) -> bool:
    """Whether a reader takes what is there for a checkpoint."""
    return LIST in store.objects and not any(name.startswith((UNFINISHED, JOURNAL)) for name in store.objects)


COMPLETE = ("committed", "PublishedError")


def follow(processes: Sequence[Process], old: Mapping[str, bytes] = {}, **how: Any) -> int:
    """Check all states that can be reached; how many there are."""
    store, count, reruns = Store({name: Object(content) for name, content in old.items()}), 0, set[object]()
    outputs, is_one_task = [process.output for process in processes], len({each.name for each in processes}) == 1
    for state in Explorer(processes, **how).states(store):
        count += 1
        there, results = output(state.store), [place.result or "" for place in state.places]
        is_late = state.is_late or any(place.is_changing for place in state.places)
        if is_read(state.store) and (not is_late or (is_one_task and not old)):
            assert there in (old, *outputs), (results, there)
        if not state.is_end:
            continue
        if is_one_task and not old and not state.kills:
            ends = (
                *COMPLETE,
                "left to others",
                *(() if processes[0].share.has_others else ("CheckpointError exists",)),
            )
            assert is_read(state.store) and all(each.startswith(ends) for each in results), results
        if not processes[0].share.has_others and not old and not state.kills:
            assert any(each.startswith(COMPLETE) for each in results), results
        if not is_read(state.store) and state.store.key not in reruns:
            reruns.add(state.store.key)
            check_again(processes, state.store)
    return count


REFUSED = "unfinished output of another command"


def check_again(processes: Sequence[Process], store: Store) -> None:
    """The same commands complete what is unfinished, or are refused because it is another's, who completes it."""
    names, refused = {process.name for process in processes}, set[str]()
    for name in names:
        mine, after, results = [process for process in processes if process.name == name], store, list[str]()
        for process in mine:
            result, after = run_alone(process, after)
            results.append(result)
        if all(REFUSED in each for each in results):
            assert after == store
            refused.add(name)
        else:
            assert results[-1].startswith((*COMPLETE, "CheckpointError exists")), results
            assert {key: of.content for key, of in after.objects.items()} == mine[0].output, results
    assert refused < names, store


READS = ("list", "get", "head")


@pytest.fixture(autouse=True)
def _model_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize(
    ("processes", "how"),
    [
        (parts(["a"], ["b"]), {"quiet": ("head",)}),
        pytest.param(parts(["a"], ["b"]), {"kills": 2}, marks=thorough),
        pytest.param(parts(["a", "b"], ["c"]), {"kills": 1}, marks=thorough),
        pytest.param([whole("x", "a")] * 2, {"kills": 1}, marks=thorough),
        pytest.param([*parts(["a"], ["b"]), parts(["a"], ["b"])[1]], {"quiet": READS}, marks=thorough),
        pytest.param(parts(["a"], ["b"], ["c"]), {"quiet": ("head", "get"), "kills": 1}, marks=thorough),
    ],
    ids=["two parts", "killed", "two files", "the same command", "a part twice", "three parts"],
)
def test_several_make_one_output(processes: list[Process], how: dict[str, Any]) -> None:
    """Nobody is refused, and nothing is left behind by any of them, or by the same commands after a fault."""
    assert follow(processes, **how) > 1000


@pytest.mark.parametrize(
    ("processes", "old", "how"),
    [
        pytest.param([whole("x", "a"), whole("y", "a")], {}, {"kills": 1}, marks=thorough),
        pytest.param([whole("x", "a", "b"), whole("y", "a", "c")], {}, {}, marks=thorough),
        pytest.param([whole(name, name, overwrite=True) for name in "xy"], OLD, {"kills": 1}, marks=thorough),
        pytest.param([whole("x", "a", overwrite=True)] * 2, OLD, {"kills": 1}, marks=thorough),
        pytest.param([*parts(["a"], ["b"]), whole("x", "a")], {}, {"quiet": READS}, marks=thorough),
    ],
    ids=["two commands", "other files", "an output replaced twice", "by the same", "parts and another command"],
)
def test_some_get_in_the_way_of_others(processes: list[Process], old: dict[str, bytes], how: dict[str, Any]) -> None:
    """One is refused or comes after the other; the same commands complete the output, whatever has happened."""
    assert follow(processes, old, **how) > 1000


def test_what_is_a_users_own_stays() -> None:
    for state in Explorer([whole("x", "a", overwrite=True)], 1).states(Store({OWN: Object(b""), LIST: Object(b"")})):
        assert state.store.objects.keys() == {OWN, LIST}
