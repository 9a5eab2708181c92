"""Runs in the engine's environment: lets a program's own loader load the original, and judges the shards by that.

Nothing of reshard but this room is imported, and that needs torch and the program alone. The request and the answer
are files of JSON.
"""

from __future__ import annotations

import json
import os
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from reshard.verify.loader.program import Box, Layout, Program, ProgramLayout, ProgramRank, Request
from reshard.verify.loader.watch import (
    SMALL,
    Creation,
    NotFollowedError,
    Room,
    first,
    followed,
    memory,
    unfit,
    unlike,
)


@dataclass
class Judgement:
    """The judgement on one rank: the number of tensors that the loader fills, at least in part, the number of those
    that it leaves as they were built, and a line for each that differs. ``ignored`` are tensors that it takes from
    neither folder.
    """

    rank: str
    loaded: int = 0
    constants: int = 0
    differences: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def judge(rank: ProgramRank, small: int = SMALL) -> Judgement:
    """Let a rank's loader load the original, and compare the shards with the loaded model. Raises NotFollowedError."""
    rooms = dict[int, Room]()
    for name, tensor in rank.held().items():
        if tensor.numel():
            if memory(tensor) in rooms:
                raise NotFollowedError(f"'{name}' and '{rooms[memory(tensor)].name}' share their memory")
            rooms[memory(tensor)] = Room(name, tensor, rank.files.get(name), small)
    with followed(rooms):
        rank.load()
    held, found = rank.held(), Judgement(rank.name, ignored=sorted(rank.ignored))
    for name in sorted(held.keys() | rank.files.keys()):
        texts = _differences(name, held.get(name), rank.files.get(name), rank.reserved, rooms)
        found.differences += [f"'{name}' on {rank.name}: {text}" for text in texts]
        if name in held:
            room = rooms.get(memory(held[name]))
            is_loaded = room is None or bool(room.marks().any())
            found.loaded, found.constants = found.loaded + is_loaded, found.constants + (not is_loaded)
    return found


def _differences(
    name: str, tensor: Tensor | None, stored: Tensor | None, reserved: Creation | None, rooms: Mapping[int, Room]
) -> Iterator[str]:
    if tensor is None:
        yield "only the shards have it"
    elif stored is None:
        yield "the shards lack it"
    elif text := unfit(tensor, stored):
        yield text
    elif (room := rooms.get(memory(tensor))) is not None:
        is_filled = bool(room.marks().all())
        yield from room.differences(
            tensor, not is_filled and reserved is not None and reserved.leaves_to_chance(name, tensor)
        )
    elif count := int((wrong := unlike(stored.reshape(-1), tensor.reshape(-1))).sum()):
        yield f"{count:,} of {len(wrong):,} elements that it loads, first at {first(wrong, tensor.shape)}"


def judge_layout(layout: ProgramLayout) -> list[str]:
    """Compare the shards' names, dtypes, shapes and chunks with those that a program asks for: a line for each that
    differs. Objects that only the shards have are no tensors, and left alone. Raises NotFollowedError if the ranks ask
    for an element of a tensor never, or in two places.
    """
    found = []
    for name in sorted(layout.asked.keys() | layout.stored.keys()):
        asked, stored = layout.asked.get(name), layout.stored.get(name)
        if asked is None:
            assert stored is not None
            text = "only the shards have it" if stored.dtype else None
        elif not tiles([*asked.boxes], asked.shape):
            raise NotFollowedError(f"the ranks do not ask for each element of '{name}' once")
        elif stored is None:
            text = "the shards lack it"
        elif not _fits(asked, stored):
            text = f"{stored}, the engine has {asked}"
        else:
            text = None if tiles([*stored.boxes], stored.shape) else "its chunks do not hold each element once"
        found += [f"'{name}': {text}"] if text else []
    return found


def _fits(asked: Layout, stored: Layout) -> bool:
    if asked.rows is None or not stored.shape:
        return (asked.dtype, asked.shape) == (stored.dtype, stored.shape)
    is_long = stored.shape[0] >= asked.rows
    return is_long and (asked.dtype, asked.shape[1:]) == (stored.dtype, stored.shape[1:])


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes hold each element of a shape once. A shape without axes has one, and is in a box without axes."""
    if not shape:
        return len(boxes) == 1
    edges = sorted({0, shape[0], *(edge for first, *_ in boxes for edge in first)})
    slabs: dict[int, list[Box]] = {edge: [] for edge in edges[:-1]}
    for (begin, end), *rest in boxes:
        for edge in edges[bisect_left(edges, begin) : bisect_left(edges, end)]:
            slabs[edge].append(tuple(rest))
    return (edges[0], edges[-1]) == (0, shape[0]) and all(tiles(slab, shape[1:]) for slab in slabs.values())


def answer(
    request: Request, ask: Callable[[ProgramRank], Any] = lambda rank: asdict(judge(rank))
) -> dict[str, Any]:  # fmt: skip
    """Ask the loader about each rank. ``stopped`` says what ended it early, in the program's own words."""
    found: dict[str, Any] = {"name": request.program, "ranks": [], "stopped": None}
    doing = f"reshard does not know the inside of the {request.program} that is installed there"
    try:
        program = cast(Program, import_module(f"reshard.verify.loader.in_{request.program}"))
        found["name"] = program.prepare(request)
        doing = f"{found['name']} stopped while it built its model on this machine"
        if hasattr(program, "layout"):
            layout = program.layout(request)
            tensors = sum(each.dtype is not None for each in layout.asked.values())
            found["layout"] = {"ranks": layout.ranks, "tensors": tensors, "differences": judge_layout(layout)}
            return found
        for rank in program.ranks(request):
            doing = f"{found['name']} stopped while it loaded the original as {rank.name}"
            found["ranks"].append(ask(rank))
            doing = f"{found['name']} stopped while it built its model on this machine, after {rank.name}"
            del rank  # or two would be in memory
    except NotFollowedError as error:
        found["stopped"] = f"what {found['name']} loads is not followed: {error}"
    except Exception as error:
        traceback.print_exc()
        broken = _failed_import(error)
        found["stopped"] = f"{doing}: {_words(error)}"
        if broken is not None:
            found["stopped"] = f"the environment of {found['name']} is broken: {broken}"
    return found


def _failed_import(error: BaseException) -> str | None:
    """Return the module whose import failed, with the error's own words, if that is the cause; else None."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals["__name__"] for frame in frames if frame.f_code.co_name == "<module>"]
    if not modules:
        return None
    return f"'{modules[-1]}' cannot be imported there: {_words(error)}"


def _words(error: BaseException) -> str:
    """An exception on a line: its last cause, with the place where it was raised if it has no words."""
    text = " ".join(str(error).split())
    if not text:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{frame.line} ({Path(frame.filename).name}:{frame.lineno})"
    return f"{type(error).__name__}: {text}"


def main(path: str) -> None:
    """Answer the request in a file, in a file beside it. Ends the process: what engines leave running is left."""
    request = Request(**json.loads(Path(path).read_text(encoding="utf-8")))
    Path(path).with_name("answer.json").write_text(json.dumps(answer(request)), encoding="utf-8")
    os._exit(0)
