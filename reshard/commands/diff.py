"""The differences between two checkpoints, as a command."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from reshard.delta.differences import Diff, differences
from reshard.delta.storing import write_delta
from reshard.formats.errors import CheckpointError, MismatchError, refused
from reshard.model.naming import ChoiceError
from reshard.move.jobs import ByteProgress, no_progress
from reshard.source.access import Access, Place
from reshard.source.folder import Folder
from reshard.source.opening import find
from reshard.source.recognition import recognise
from reshard.source.source import Source
from reshard.store.selection import Weights
from reshard.store.staging_names import check_name
from reshard.system import Taken, default
from reshard.transforms.opening import open_beside


@dataclass(frozen=True)
class DiffRequest(Access):
    """Arguments of ``diff``: two checkpoints of one model, each in any form.

    ``a``: the first: a folder, a Hub id, a URL, or what ``reshard.state_dict`` gave.
    ``b``: the second.
    ``out``: a new folder for a delta (see ``formats.files.delta``).
    ``compress``: the delta is smaller.
    ``progress``: True for a bar, or a function of the bytes compared so far and the total.
    """

    a: Place = field(repr=False)  # a URL may have a password
    b: Place = field(repr=False)
    _: KW_ONLY
    out: str | Path | None = field(default=None, repr=False)
    compress: bool = False
    progress: Taken[ByteProgress | bool, ByteProgress] = default(no_progress)


def diff(request: DiffRequest) -> Diff:
    """Compare two checkpoints: which tensors differ, and how much. Each byte is read once, in constant memory.

    Raises ReshardError, also if copies of a tensor in one of them differ.
    """
    if request.compress and request.out is None:
        raise refused("compress", None, "no delta is written", instead=({"out": None},))
    if "://" in str(request.out):
        raise CheckpointError(f"{request.out}: a delta is written to a folder of this machine", "copy it from there")
    if request.out is not None:
        check_name(request.out)
    try:
        a, b = open_both(request.a, request.b, request)
        if request.out is not None:
            return write_delta(a, b, Path(request.out), request.progress, is_compressed=request.compress)
        return differences(a, b, progress=request.progress)
    except MismatchError as error:  # one of them is not one model: that is no answer
        raise CheckpointError(error.message, error.hint) from error


def open_both(a: Place, b: Place, access: Access) -> tuple[Source, Source]:
    """Open two checkpoints of one model: files of a program that does not say which are read as the other's model.

    Raises ReshardError.
    """
    paths = [find(side, access, Weights.FILES if access.download else Weights.RANGES) for side in (a, b)]
    folders = [recognise(Folder(path)) for path in paths]
    has_models = [side.kind != "program" or side.manifest is not None for side in folders]
    opened, chosen = list[Source](), access.beginning
    access, dtype = replace(access, dtype=None), access.dtype
    for path, _ in sorted(zip(paths, has_models, strict=True), key=lambda side: not side[1]):
        model = opened[0].model if opened else None
        try:
            opened.append(open_beside(path, access, model))
        except ChoiceError:  # the one that is chosen is in the other
            if chosen is None:
                raise
            opened.append(open_beside(path, replace(access, weights=None), model))
            chosen = None
    if dtype is not None:
        from reshard.transforms.cast import cast  # numpy

        opened = [cast(side, dtype) for side in opened]
    return (opened[1], opened[0]) if has_models == [False, True] else (opened[0], opened[1])
