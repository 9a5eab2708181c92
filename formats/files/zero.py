"""DeepSpeed's checkpoints: ZeRO 1 to 3, whose ranks have ranges of flat lists, and Universal Checkpoints.

Stages 1 and 2: the parameters of a group lie end to end in one list, in the order of ``param_shapes``; it is padded at
its end and cut into equal parts. Stage 3: each parameter by itself is padded and cut into equal parts, and a rank has
its parts of all parameters end to end; sub-groups divide that list between parameters. The weights are the masters in
float32; what has none (frozen parameters, buffers) is as the model's file has it.

Source: files that DeepSpeed 0.19.8 wrote; ``deepspeed/runtime/zero/{stage_1_and_2,stage3}.py``,
``deepspeed/utils/zero_to_fp32.py``, ``deepspeed/checkpoint/ds_to_universal.py``.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from formats.errors import CheckpointError, MismatchError
from formats.files.chunks import flat_chunks, from_list, list_range
from formats.files.dcp import Distributed
from formats.files.gathered import STATE, Gathered
from formats.files.pickles import TENSORS, Tensor, kind_of, quote
from formats.files.safetensors import TensorInfo
from formats.files.torch_bin import BESIDE, TorchArchive, place_of, torch_file
from formats.files.universal import PLACES
from formats.store import FilePath, glob, read_ranges

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
OTHERS = re.compile(r"layer_.*-model_.*states\.pt|(layer_\d+_)?exp(ert|p_rank)_\d+_.*states\.pt")
_NAMES = TENSORS.with_classes(
    *BESIDE,
    *(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler")),
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_TOGETHER = "bring all files of one save together"
_DEEP = 6
_SETTINGS = "zero/optimizer_state.pt"
_CARRIED = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""The settings of an optimizer that are those of no group."""
Shape = tuple[int, ...]


class _File(NamedTuple):
    """A file's dictionary; its tensors are where they lie."""

    path: FilePath
    content: dict[str, Any]

    def table(self, key: str) -> dict[str, Any]:
        """A dictionary in it; an empty one if there is none."""
        value = self.content.get(key)
        return value if isinstance(value, dict) else {}


def read_zero(folder: FilePath) -> Distributed:
    """A checkpoint of DeepSpeed, given the folder of the step. Raises CheckpointError and MismatchError."""
    models, optimizers = (_files(folder, pattern) for pattern in (MODEL, OPTIMIZER))
    if not models:
        raise CheckpointError(f"{folder} has the states of an optimizer, and no model", "bring *_model_states.pt back")
    main, gathered = models[0], Gathered(folder)
    names = [path.name for path in glob(folder, "*.pt")]
    other = next((name for name in names if OTHERS.fullmatch(name)), None)
    parallel = [int(match[2]) + 1 for name in names if (match := MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name))]
    ranks = max(int(main.content.get("mp_world_size") or 1), *parallel)
    if other is not None or ranks > 1:
        what = f"stages of a pipeline or experts of its own ({other})" if other else f"{ranks} model parallel ranks"
        raise CheckpointError(
            f"{folder} has {what}, and no file says how its tensors are cut",
            "save it with one model parallel rank, or as a Hugging Face checkpoint",
        )
    groups = [_shapes(group, main.path) for group in main.content.get("param_shapes") or ()]
    for file in models:
        if file.content.get("global_steps") != models[0].content.get("global_steps"):
            raise MismatchError(f"{file.path} and {models[0].path}: their global_steps differ", _TOGETHER)
    is_universal = (folder / "zero").is_dir()
    if is_universal:
        files = _add_universal(gathered, folder, groups)
        form = "Universal Checkpoint"
    else:
        form = _add_lists(gathered, main, optimizers, groups)
        files = [file.path for file in optimizers]
    _add_others(gathered, models, {name for group in groups for name in group} if optimizers or is_universal else set())
    step = f", step {quote(main.content['global_steps'])}" if "global_steps" in main.content else ""
    saved = gathered.finish(f"saved by DeepSpeed: {form}{step}", [*(file.path for file in models), *files])
    own = _read(folder / _SETTINGS).content if is_universal and (folder / _SETTINGS).is_file() else {}
    own = optimizers[0].table("optimizer_state_dict") if optimizers else own
    extras = {"model": {key: value for key, value in main.content.items() if key not in PLACES}}
    return replace(saved, extras=extras | {"optimizer": {key: own[key] for key in _CARRIED if key in own}})


# -------------------------------------------------------------------------------------------------------- the files


def _files(folder: FilePath, pattern: re.Pattern[str]) -> list[_File]:
    """The files of all ranks, in order. Raises CheckpointError if one is missing."""
    paths = {int(match[1] or 0): path for path in glob(folder, "*.pt") if (match := pattern.fullmatch(path.name))}
    missing = next((rank for rank in range(max(paths, default=0)) if rank not in paths), None)
    if missing is not None:
        raise CheckpointError(f"{folder}: of {paths[max(paths)].name} the file of rank {missing} is missing", _TOGETHER)
    return [_read(paths[rank]) for rank in sorted(paths)]


def _read(path: FilePath) -> _File:
    with torch_file(path) as archive:
        state = archive.read(_NAMES, "tensors and plain settings are read")
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a dictionary")
        return _File(path, {str(key): _with_locations(archive, path, str(key), value) for key, value in state.items()})


def _with_locations(archive: TorchArchive, path: FilePath, name: str, value: object, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return place_of(path, path, name, value, *archive.locate(value.storage))
    if isinstance(value, dict) and depth < _DEEP:
        return {key: _with_locations(archive, path, str(key), of, depth + 1) for key, of in value.items()}
    if isinstance(value, list) and depth < _DEEP:
        return [_with_locations(archive, path, name, of, depth + 1) for of in value]
    return value


def _shapes(group: object, path: FilePath) -> dict[str, Shape]:
    if not isinstance(group, dict) or not all(isinstance(shape, tuple) for shape in group.values()):
        raise CheckpointError(f"{path}: its param_shapes are no shapes")
    return group


# ------------------------------------------------------------------------------------------------------ flat lists


def _add_lists(gathered: Gathered, main: _File, optimizers: Sequence[_File], groups: Sequence[dict[str, Shape]]) -> str:
    """Add the masters and the states of the optimizer; returns what form they have."""
    if not optimizers:
        return "no ZeRO"
    states = [file.table("optimizer_state_dict") for file in optimizers]
    forms = [_form(state) for state in states]
    (stage, world), wrong = forms[0], None
    if (other := next((at for at, form in enumerate(forms) if form != forms[0]), None)) is not None:
        wrong = f"{optimizers[other].path} and {optimizers[0].path} are of different stages or numbers of ranks"
    elif world != len(optimizers):
        wrong = f"{optimizers[0].path}: it is one of {quote(world)} ranks, and there are files of {len(optimizers)}"
    elif main.content.get("dp_world_size") not in (None, world):
        wrong = f"{main.path}: it is of {quote(main.content['dp_world_size'])} ranks, its optimizer of {world}"
    if wrong is not None:
        raise MismatchError(wrong, _TOGETHER)
    inner = [state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state") for state in states]
    saved = [each if isinstance(each, dict) else {} for each in inner]
    masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    lists = {"model": [_lists(state.get(masters)) for state in states]}
    numbers = [*saved[0].get("state", {})]
    kinds = [kind for kind, value in (saved[0]["state"][numbers[0]] if numbers else {}).items() if _is_list(value)]
    for kind in kinds:
        lists[kind] = [_lists(each.get("state", {}).get(number, {}).get(kind) for number in numbers) for each in saved]
    for kind, of_ranks in lists.items():
        add = _of_stage_3 if stage == 3 else _of_stage_2
        try:
            for name, shape, chunks in add(groups, of_ranks):
                gathered.add(("model", name) if kind == "model" else (*STATE, name, kind), shape, chunks)
        except CheckpointError as error:
            raise CheckpointError(f"{optimizers[-1].path}: {kind}: {error.message}", _TOGETHER) from None
    _check_steps(optimizers, saved)
    _add_settings(gathered, [*saved[0].get("state", {}).values()], saved[0], groups)
    if stage != 3:
        _check_slices(states, groups, lists["model"], optimizers)
    return f"ZeRO-{stage}, {world} ranks"


def _form(state: Mapping[str, Any]) -> tuple[object, object]:
    """The stage of ZeRO, and the number of ranks."""
    stage, count = state.get("zero_stage"), state.get("partition_count")
    return next(iter(getattr(stage, "arguments", (stage,))), None), max(count) if isinstance(count, list) else count


def _add_settings(
    gathered: Gathered,
    states: Sequence[dict[str, Any]],
    saved: Mapping[str, Any],
    groups: Sequence[Mapping[str, Shape]],
) -> None:
    """Add what an optimizer has besides lists: the steps, of a group or of a sub-group, and its settings."""
    settings = saved.get("param_groups")
    named = [[*group] for group in groups]
    if not isinstance(settings, list) or len(settings) != len(groups):  # of sub-groups
        named = [[name for group in named for name in group]]
    for of_group, names in zip(states, named, strict=False):
        for key, value in of_group.items():
            for name in names:
                if isinstance(value, TensorInfo) and not value.shape:
                    gathered.add_whole((*STATE, name, key), value)
                elif isinstance(value, int | float):
                    gathered.add_object((*STATE, name, key), value)
    gathered.add_groups(settings, named)


def _is_list(value: object) -> bool:
    return isinstance(value, TensorInfo) and len(value.shape) == 1


def _lists(values: Iterable[object] | None) -> list[TensorInfo]:
    infos = [*(values or ())]
    if not all(map(_is_list, infos)):
        raise CheckpointError("a group of parameters has no list")
    return infos  # type: ignore[return-value]


NamedChunks = Iterator[tuple[str, Shape, Iterable[Any]]]


def _of_stage_2(groups: Sequence[dict[str, Shape]], of_ranks: Sequence[Sequence[TensorInfo]]) -> NamedChunks:
    if any(len(lists) != len(groups) for lists in of_ranks):
        raise CheckpointError(f"there are {len(groups)} groups of parameters, and {len(of_ranks[0])} lists")
    for shapes, parts in zip(groups, zip(*of_ranks, strict=True), strict=True):
        total, length = sum(map(math.prod, shapes.values())), parts[0].shape[0]
        for rank, part in enumerate(parts):
            n = min(max(total - rank * length, 0), length)  # without the padding
            if part.shape[0] not in (n, length):
                raise CheckpointError(f"the list of rank {rank} has {part.shape[0]:,} elements, it should have {n:,}")
        yield from ((name, shapes[name], chunks) for name, chunks in from_list(shapes, parts))


def _of_stage_3(groups: Sequence[dict[str, Shape]], of_ranks: Sequence[Sequence[TensorInfo]]) -> NamedChunks:
    shapes = {name: shape for group in groups for name, shape in group.items()}
    lengths = {name: -(-math.prod(shape) // len(of_ranks)) for name, shape in shapes.items()}
    parts: dict[str, list[TensorInfo]] = defaultdict(list)
    for rank, lists in enumerate(of_ranks):
        total, padded = sum(info.shape[0] for info in lists), sum(lengths.values())
        if total != padded:
            raise CheckpointError(f"the lists of rank {rank} have {total:,} elements, they should have {padded:,}")
        for name, chunks in from_list({name: (length,) for name, length in lengths.items()}, lists):
            parts[name] += [info for _, info in chunks]
    for name, shape in shapes.items():
        yield name, shape, next(from_list({name: shape}, parts[name]))[1]


def _check_steps(files: Sequence[_File], saved: Sequence[dict[str, Any]]) -> None:
    """Raise MismatchError if the ranks' optimizers have done different numbers of steps."""
    first: object = None
    for file, state in zip(files, saved, strict=True):
        step: Any = next((of.get("step") for of in state.get("state", {}).values()), None)
        if isinstance(step, TensorInfo):
            (step,) = read_ranges([(step.file, step.offset, step.offset + step.nbytes)])
        first = step if file is files[0] else first
        if step != first:
            raise MismatchError(f"{file.path} and {files[0].path} are of different steps", _TOGETHER)


def _check_slices(
    states: Sequence[dict[str, Any]], groups: Sequence[dict[str, Shape]], masters: Sequence[Sequence[TensorInfo]],
    files: Sequence[_File],
) -> None:  # fmt: skip
    """Raise MismatchError if DeepSpeed's own map of a rank's lists says something else than the rule."""
    for rank, state in enumerate(states):
        for number, slices in enumerate(state.get("param_slice_mappings") or ()):
            at, length = 0, masters[0][number].shape[0]
            for name, shape in groups[number].items():
                begin, end = max(at, rank * length), min(at + math.prod(shape), (rank + 1) * length)
                slice_of, at = slices.get(name), at + math.prod(shape)
                stated = (slice_of.get("start"), slice_of.get("numel")) if slice_of is not None else None
                if stated != ((begin - rank * length, end - begin) if begin < end else None):
                    raise MismatchError(f"{files[rank].path}: '{name}' does not lie where param_shapes says", _TOGETHER)


# ----------------------------------------------------------------------------------------------------- all the others


def _add_universal(gathered: Gathered, folder: FilePath, groups: Sequence[Mapping[str, Shape]]) -> list[FilePath]:
    """Add a file a tensor; those made from stage 3 are flat, and ``param_shapes`` of the model has their shapes."""
    files, shapes = [], {name: shape for group in groups for name, shape in group.items()}
    steps = glob(folder, "zero/*/step.pt")
    if (settings := folder / _SETTINGS).is_file():
        saved = _read(settings)
        files.append(settings)
        inside = [] if steps else [*saved.table("optimizer_state_dict").get("state", {}).values()]
        _add_settings(gathered, inside, saved.content, groups)
    for path in glob(folder, "zero/*/*.pt"):
        with torch_file(path) as archive:
            state = archive.read(_NAMES, "a tensor and its shape is read")
            value = state.get("param") if isinstance(state, dict) else state
            if isinstance(value, int | float) and path in steps:
                gathered.add_object((*STATE, path.parent.name, "step"), value)
                continue
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a tensor")
            info = place_of(path, path, path.parent.name, value, *archive.locate(value.storage))
        name, kind = path.parent.name, path.name.removesuffix(".pt")
        keys = ("model", name) if kind == "fp32" else (*STATE, name, kind)
        shape = shapes.get(name, info.shape) if info.shape else ()
        if math.prod(shape) != math.prod(info.shape):
            raise MismatchError(f"{path}: it has {math.prod(info.shape):,} elements, param_shapes says {list(shape)}")
        gathered.add(keys, shape, flat_chunks(info._replace(shape=(math.prod(shape),)), shape, 0))
        files.append(path)
    return files


def _add_others(gathered: Gathered, models: Sequence[_File], names: set[str]) -> None:
    """Add what has no master: frozen parameters, buffers, tied tensors; without lists, all that the model has."""
    main, world = models[0], len(models)
    shared = {str(copy): origin for copy, origin in main.table("shared_params").items()}
    frozen = main.table("frozen_param_shapes")
    for name, shape in frozen.items():
        parts: list[Any] = [file.table("frozen_param_fragments").get(name) for file in models]
        if all(part is not None for part in parts) and name not in names:
            whole = world == 1 or len(parts[0].shape) != 1
            count = math.prod(shape) if whole else -(-math.prod(shape) // world)
            flat = [list_range(part, 0, min(math.prod(part.shape), count)) for part in (parts[:1] if whole else parts)]
            gathered.add(("model", name), shape, next(from_list({name: shape}, flat))[1])
            names = names | {name}
    for name, info in main.table("module").items():
        if isinstance(info, TensorInfo) and info.nbytes and name not in names and name not in shared:
            gathered.add_whole(("model", name), info)
    for copy, origin in shared.items():
        gathered.add_copy(("model", copy), ("model", str(origin)))
