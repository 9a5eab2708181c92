"""The proof from end to end: compare bytes, then run the model, unless the shards cannot be run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from formats.errors import ReshardError
from reshard.source.source import Source
from verify.bytes.exact import compare
from verify.bytes.exact_report import ExactReport
from verify.report.answer import Answer, OwnPlan
from verify.rules import own_rules
from verify.run_settings import Unmerged

if TYPE_CHECKING:
    from verify.forward.launch import Crew


class Display(Protocol):
    """Shows a person how far the proof is."""

    def bytes(self) -> AbstractContextManager[Callable[[int, int], None]]:
        """For the comparison of bytes: to be called with the bytes that are done and the bytes in all."""
        return nullcontext(lambda done, total: None)

    def phases(self) -> AbstractContextManager[Callable[[str], None]]:
        """For the forward pass: to be called with the name of each phase as it begins."""
        return nullcontext(lambda phase: None)


class Silent(Display):
    """It shows nothing."""


SILENT = Silent()


def prove(
    answer: Answer, original: Source, shards: Source | ExactReport, plan_file: Path | None, display: Display,
    crew: Crew | None = None, unmerged: Callable[[], Unmerged | None] = lambda: None,
) -> None:  # fmt: skip
    """Fill in an answer: the plan in use, the bytes and, if that is wanted and possible, the forward pass.

    ``unmerged`` opens what runs in the original's place, if that has an adapter in it.

    ``shards`` may be a report that says why they cannot be opened. ``crew``: this process is one of the ranks that a
    launcher started; the first of them compares the bytes. Raises ReshardError for what cannot be checked.
    """
    answer.plan = None if original.is_split else _own_plan(original, shards, plan_file)  # it will be refused
    is_first = crew is None or crew.is_first
    can_run = is_first and _compare_bytes(answer, original, shards, display)
    is_wanted = can_run and answer.wants_forward
    if crew is not None:
        is_wanted = crew.agree(is_wanted)
    if is_wanted:
        _run_forward(answer, unmerged() or original, shards, display, crew)
    if can_run and answer.engine_options is not None:
        _run_engine(answer, original, shards, answer.engine_options, display)


def _run_forward(
    answer: Answer, original: Source | Unmerged, shards: Source | ExactReport, display: Display, crew: Crew | None
) -> None:
    """Run the model, as it was and on the shards."""
    if isinstance(shards, ExactReport):  # the first rank has opened others, on a disk of its own
        which = f"rank {crew.rank}" if crew is not None else "this rank"
        raise ReshardError(f"{which}: {'; '.join(shards.problems)}")
    forward = import_module("verify.forward.compare")  # torch
    started = time.monotonic()
    with display.phases() as progress:
        answer.forward = forward.run_forward(original, shards, forward.ForwardOptions(**answer.options), progress)
    answer.seconds["forward"] = time.monotonic() - started


def _run_engine(
    answer: Answer, original: Source, shards: Source | ExactReport, options: dict[str, Any], display: Display
) -> None:
    """Run both in the engine that the shards are for."""
    assert not isinstance(shards, ExactReport)
    engine = import_module("verify.engine.compare")  # torch
    started = time.monotonic()
    with display.phases() as progress:
        answer.engine = engine.run_engine(original, shards, engine.EngineOptions(**options), progress)
    answer.seconds["engine"] = time.monotonic() - started


def _own_plan(original: Source, shards: Source | ExactReport, plan_file: Path | None) -> OwnPlan | None:
    """The plan that is not a built-in one: the user's file, or the rules that the shards say they were split by."""
    if isinstance(shards, ExactReport):
        return None
    differences = own_rules(shards.plan, original.model.architecture)
    if plan_file is None and not differences:
        return None
    name = str(plan_file) if plan_file is not None else f"of {shards.path}"
    return OwnPlan(name, str(original.model.config.get("model_type")), differences)


def _compare_bytes(answer: Answer, original: Source, shards: Source | ExactReport, display: Display) -> bool:
    """Compare bytes, and return whether these shards can be run."""
    if isinstance(shards, ExactReport):
        answer.exact = shards
        return False
    started = time.monotonic()
    with display.bytes() as progress:
        answer.exact = compare(original, shards, progress)
    answer.seconds["bytes"] = time.monotonic() - started
    if not answer.exact.comparable and answer.wants_forward:
        answer.notes.append("The forward was not run: these are not the original's tensors.")
    return bool(answer.exact.comparable)
