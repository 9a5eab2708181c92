"""DeepSpeed's checkpoints: ZeRO 1 to 3, whose ranks have ranges of flat lists, and Universal Checkpoints.

Stages 1 and 2: the parameters of a group lie end to end in one list, which is padded at its end and cut into equal
parts; ``param_slice_mappings`` says where each lies, older files have them in the order of ``param_shapes``. Stage 3:
each parameter by itself is padded and cut into equal parts, and a rank has its parts of all parameters end to end;
sub-groups divide that list between parameters. The weights are the masters in float32; what has none (frozen
parameters, buffers) is as the model's file has it. Tensor parallel ranks have files of their own;
``universal_checkpoint_info`` says how they cut each parameter.

A Universal Checkpoint, which is written too, has a file for each tensor and each state of one, and small files beside
them. ZeRO-1 and 2 read the settings of each group at the top of ``zero/optimizer_state.pt``, and
``zero/{tensor}/step.pt``; ZeRO-3 the settings of the first group and the step inside its ``optimizer_state_dict``. Each
has a name of its own for the model's states, from which no weight is read.

Source: files that DeepSpeed 0.19.8 wrote; ``deepspeed/runtime/{engine,base_optimizer}.py``,
``deepspeed/runtime/zero/{stage_1_and_2,stage3}.py``, ``deepspeed/utils/zero_to_fp32.py``,
``deepspeed/checkpoint/{ds_to_universal,universal_checkpoint}.py``.
"""

from __future__ import annotations

import math
import re
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from formats.errors import CheckpointError, MismatchError
from formats.files.chunks import flat_chunks, from_list, list_range
from formats.files.dcp import Distributed, object_bytes, read_object
from formats.files.gathered import STATE, TOGETHER, Gathered, check_steps
from formats.files.pickles import TENSORS, Inert, Tensor, kind_of, quote, write_pickle
from formats.files.safetensors import TensorInfo
from formats.files.torch_archive import BESIDE, TorchArchive, pickled_tensor, torch_file
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
_ELSE = "save it with one model parallel rank, or as a Hugging Face checkpoint"
_CUTS = "universal_checkpoint_info"
_PLAIN = {"tp_replicated_parameter_patterns": None, "parameter_with_row_parallelism_patterns": 1}
_OTHERWISE = ("parameter_to_average_patterns", "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params",
              "autotp_unsupported_parameter_patterns")  # fmt: skip
_SIMPLE = re.compile(r"\^?(?:\\d\+|\\[^\w]|[^\\*+?{}()|\[\]$^])*\$?")
_DEEP = 6
_SETTINGS_FILE = "zero/optimizer_state.pt"
_CARRIED = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
"""The settings of an optimizer that are those of no group."""
Shape = tuple[int, ...]

_SETTING = re.compile(r"(?:.*\.)?param_groups\.(\d+)\.(\w+)")
_STEP = re.compile(r"(?:.*\.)?state\.(.+)\.step")
_NUMBERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
_MODEL_STATES: dict[str, object] = {
    "module": {}, "buffer_names": [], "optimizer": None, "frozen_param_shapes": {}, "frozen_param_fragments": {},
    "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "dp_world_size": 1,
    "mp_world_size": 1, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_version": "0.19.8",
}  # fmt: skip
_PLACES = {*_MODEL_STATES, "param_shapes", "shared_params"} - {
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
}
"""What a model's states say of how it lies in files."""


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
    names = [path.name for path in glob(folder, "*.pt")]
    if (other := next((name for name in names if OTHERS.fullmatch(name)), None)) is not None:
        what = f"stages of a pipeline or experts of its own ({other})"
        raise CheckpointError(f"{folder} has {what}, and no file says how its tensors are cut", _ELSE)
    parts, read, main, form, own = list[Gathered](), list[FilePath](), _File(folder, {}), "", dict[str, Any]()
    is_universal = (folder / "zero").is_dir()
    parallel = {int(match[2]) for name in names if (match := MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name))}
    cuts, origins = None, dict[str, str]()
    for rank in range(1 if is_universal else max(parallel) + 1):
        models, optimizers = (_files(folder, pattern, rank) for pattern in (MODEL, OPTIMIZER))
        if not models:
            problem = "the states of an optimizer, and no model" + (f" of model parallel rank {rank}" if rank else "")
            raise CheckpointError(f"{folder} has {problem}", "bring *_model_states.pt back")
        if rank == 0:
            main, own = models[0], optimizers[0].table("optimizer_state_dict") if optimizers else {}
            ranks = max(int(main.content.get("mp_world_size") or 1), *(number + 1 for number in parallel))
            if (missing := next((each for each in range(ranks) if each not in parallel), None)) is not None:
                raise CheckpointError(f"{folder}: the files of model parallel rank {missing} are missing", TOGETHER)
            origins = {str(copy): str(first) for copy, first in main.table("shared_params").items()}  # others have none
            info = main.table(_CUTS) or own.get(_CUTS)
            cuts = info if ranks > 1 and not is_universal else None
            if ranks > 1 and not is_universal and not isinstance(info, dict):
                why = f"{ranks} model parallel ranks, and no file says how its tensors are cut ({_CUTS})"
                raise CheckpointError(f"{folder} has {why}", _ELSE)
        for file in models:
            if file.content.get("global_steps") != main.content.get("global_steps"):
                raise MismatchError(f"{file.path} and {main.path}: their global_steps differ", TOGETHER)
        gathered = Gathered(folder)
        groups = [_shapes(group, main.path) for group in models[0].content.get("param_shapes") or ()]
        if is_universal:
            read += _add_universal(gathered, folder, groups, origins if len(parallel) > 1 else {})
            own = _read(folder / _SETTINGS_FILE).content if (folder / _SETTINGS_FILE).is_file() else {}
            form = "Universal Checkpoint"
        else:
            form = _add_lists(gathered, models[0], optimizers, groups)
        masters = {name for group in groups for name in group} if optimizers or is_universal else set[str]()
        if is_universal and len(parallel) > 1:  # what the model's file has are parts
            masters |= {*main.table("module")}
        _add_others(gathered, models, masters, origins)
        parts.append(gathered)
        read += [file.path for file in (*models, *optimizers)]
    if cuts is not None:
        if (buffer := next(iter(main.content.get("buffer_names") or ()), None)) is not None:
            raise CheckpointError(f"{folder}: no file says how '{buffer}', a buffer, is cut", _ELSE)
        parts[0].join(parts[1:], lambda name: _dim_of(folder, cuts, origins.get(name, name)))
        form += f", {len(parts)} model parallel ranks"
    step = f", step {quote(main.content['global_steps'])}" if "global_steps" in main.content else ""
    saved = parts[0].finish(f"saved by DeepSpeed: {form}{step}", read)
    extras = {"model": {key: value for key, value in main.content.items() if key not in _PLACES}}
    return replace(saved, extras=extras | {"optimizer": {key: own[key] for key in _CARRIED if key in own}})


def _dim_of(folder: FilePath, info: Mapping[str, Any], name: str) -> int | None:
    """The dimension of a parameter of which each tensor parallel rank has a part; None: each has all.

    ``info`` is DeepSpeed's ``universal_checkpoint_info``, lists of expressions. Raises CheckpointError if it is not
    said.
    """
    for key in (*_PLAIN, *_OTHERWISE):
        for entry in info.get(key) or ():
            for pattern in entry["patterns"] if isinstance(entry, dict) else (entry,):
                if not _SIMPLE.fullmatch(pattern):  # others may take forever
                    why = f"{_CUTS} has the expression {quote(pattern)}, which is not read"
                    raise CheckpointError(f"{folder}: {why}", _ELSE)
                if re.match(pattern, name) is None:
                    continue
                if key in _OTHERWISE:
                    raise CheckpointError(f"{folder}: '{name}' is cut in a way that is not read ({key})", _ELSE)
                return _PLAIN[key]
    return 0


# -------------------------------------------------------------------------------------------------------- the files


def _files(folder: FilePath, pattern: re.Pattern[str], parallel: int) -> list[_File]:
    """The files of all ranks of a model parallel rank, in order. Raises CheckpointError if one is missing."""
    matches = ((path, match) for path in glob(folder, "*.pt") if (match := pattern.fullmatch(path.name)))
    paths = {int(match[1] or 0): path for path, match in matches if int(match[2]) == parallel}
    missing = next((rank for rank in range(max(paths, default=0)) if rank not in paths), None)
    if missing is not None:
        raise CheckpointError(f"{folder}: of {paths[max(paths)].name} the file of rank {missing} is missing", TOGETHER)
    return [_read(paths[rank]) for rank in sorted(paths)]


def _read(path: FilePath) -> _File:
    with torch_file(path) as archive:
        state = archive.read(_NAMES, "tensors and plain settings are read")
        if not isinstance(state, dict):
            raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a dictionary")
        return _File(path, {str(key): _with_locations(archive, str(key), value) for key, value in state.items()})


def _with_locations(archive: TorchArchive, name: str, value: object, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return archive.place(name, value)
    if isinstance(value, dict) and depth < _DEEP:
        return {key: _with_locations(archive, str(key), item, depth + 1) for key, item in value.items()}
    if isinstance(value, list) and depth < _DEEP:
        return [_with_locations(archive, name, item, depth + 1) for item in value]
    return value


def _shapes(group: object, path: FilePath) -> dict[str, Shape]:
    if not isinstance(group, dict) or not all(isinstance(shape, tuple) for shape in group.values()):
        raise CheckpointError(f"{path}: its param_shapes are no shapes")
    return group


# ------------------------------------------------------------------------------------------------------ flat lists


def _add_lists(gathered: Gathered, main: _File, optimizers: Sequence[_File], groups: Sequence[dict[str, Shape]]) -> str:
    """Add the masters and the states of the optimizer; returns what form they have."""
    if not optimizers:
        return "no ZeRO, whose optimizer is not read" if main.content.get("optimizer") else "no ZeRO"
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
        raise MismatchError(wrong, TOGETHER)
    inner = [state.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state") for state in states]
    elastic = [{"state": dict(enumerate(each))} if isinstance(each, list) else each for each in inner]
    saved = [each if isinstance(each, dict) else {} for each in elastic]
    masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    lists = {"model": [_lists(state.get(masters)) for state in states]}
    maps = [state.get("param_slice_mappings") or () for state in states]
    numbers = [*saved[0].get("state", {})]
    kinds = [kind for kind, value in (saved[0]["state"][numbers[0]] if numbers else {}).items() if _is_list(value)]
    for kind in kinds:
        lists[kind] = [_lists(each.get("state", {}).get(number, {}).get(kind) for number in numbers) for each in saved]
    for kind, of_ranks in lists.items():
        try:
            add = _of_stage_3(groups, of_ranks) if stage == 3 else _of_stage_2(groups, of_ranks, maps)
            for name, shape, chunks in add:
                gathered.add(("model", name) if kind == "model" else (*STATE, name, kind), shape, chunks)
        except CheckpointError as error:
            raise CheckpointError(f"{optimizers[-1].path}: {kind}: {error.message}", TOGETHER) from None
    steps = [next((entry.get("step") for entry in state.get("state", {}).values()), None) for state in saved]
    check_steps(zip((file.path for file in optimizers), steps, strict=True))
    _add_settings(gathered, [*saved[0].get("state", {}).values()], saved[0], groups)
    return f"ZeRO-{stage}, {world} rank{'s' * (world != 1)}"


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


def _of_stage_2(
    groups: Sequence[dict[str, Shape]], of_ranks: Sequence[Sequence[TensorInfo]], maps: Sequence[Sequence[Any]]
) -> NamedChunks:
    """``maps`` say, for each rank and group, where its parts of parameters lie; without them they lie end to end."""
    if any(len(lists) != len(groups) for lists in (*of_ranks, *(each for each in maps if each))):
        raise CheckpointError(f"there are {len(groups)} groups of parameters, and {len(of_ranks[0])} lists")
    for number, (shapes, parts) in enumerate(zip(groups, zip(*of_ranks, strict=True), strict=True)):
        total, length = sum(map(math.prod, shapes.values())), parts[0].shape[0]
        if all(maps):
            yield from _of_slices(shapes, parts, [of_rank[number] for of_rank in maps])
            continue
        for rank, part in enumerate(parts):
            n = min(max(total - rank * length, 0), length)  # without the padding
            if part.shape[0] not in (n, length):
                raise CheckpointError(f"the list of rank {rank} has {part.shape[0]:,} elements, it should have {n:,}")
        yield from ((name, shapes[name], chunks) for name, chunks in from_list(shapes, parts))


def _of_slices(
    shapes: dict[str, Shape], parts: Sequence[TensorInfo], slices: Sequence[Mapping[str, Any]]
) -> NamedChunks:
    """Parameters in another order than ``shapes`` (``round_robin_gradients``), or with padding between them."""
    fragments: dict[str, list[TensorInfo]] = defaultdict(list)
    for rank, (part, of_rank) in enumerate(zip(parts, slices, strict=True)):
        end = 0
        for begin, count, name in sorted((cut.get("start"), cut.get("numel"), name) for name, cut in of_rank.items()):
            if begin < end or begin + count > part.shape[0]:
                raise CheckpointError(
                    f"the list of rank {rank} has {part.shape[0]:,} elements, and not all of '{name}'"
                )
            fragments[name].append(list_range(part, begin, count))
            end = begin + count
    for name, shape in shapes.items():
        if (count := sum(part.shape[0] for part in fragments[name])) != math.prod(shape):
            raise CheckpointError(f"the ranks have {count:,} elements of '{name}', a tensor {list(shape)}")
        yield name, shape, next(from_list({name: shape}, fragments[name]))[1]


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


# ----------------------------------------------------------------------------------------------------- all the others


def _add_universal(
    gathered: Gathered, folder: FilePath, groups: Sequence[Mapping[str, Shape]], shared: Mapping[str, str]
) -> list[FilePath]:
    """Add a file a tensor; those made from stage 3 are flat, and ``param_shapes`` of the model has their shapes.

    Copies are not read: of tensor parallel ranks DeepSpeed's converter writes the first rank's part of one.
    """
    files, shapes = [], {name: shape for group in groups for name, shape in group.items()}
    steps = glob(folder, "zero/*/step.pt")
    if (settings := folder / _SETTINGS_FILE).is_file():
        saved = _read(settings)
        files.append(settings)
        inside = [] if steps else [*saved.table("optimizer_state_dict").get("state", {}).values()]
        _add_settings(gathered, inside, saved.content, groups)
    for path in (path for path in glob(folder, "zero/*/*.pt") if path.parent.name not in shared):
        with torch_file(path) as archive:
            state = archive.read(_NAMES, "a tensor and its shape is read")
            value = state.get("param") if isinstance(state, dict) else state
            if isinstance(value, int | float) and path in steps:
                gathered.add_object((*STATE, path.parent.name, "step"), value)
                continue
            if not isinstance(value, Tensor):
                raise CheckpointError(f"{path}: holds a {kind_of(state)}, not a tensor")
            info = archive.place(path.parent.name, value)
        name, kind = path.parent.name, path.name.removesuffix(".pt")
        keys = ("model", name) if kind == "fp32" else (*STATE, name, kind)
        is_flat = info.shape and not isinstance(state, dict)
        shape = shapes.get(name, info.shape) if is_flat else info.shape
        if math.prod(shape) != math.prod(info.shape):
            raise MismatchError(f"{path}: it has {math.prod(info.shape):,} elements, param_shapes says {list(shape)}")
        gathered.add(keys, shape, flat_chunks(info._replace(shape=(math.prod(shape),)), shape, 0))
        files.append(path)
    return files


def _add_others(gathered: Gathered, models: Sequence[_File], names: set[str], shared: Mapping[str, str]) -> None:
    """Add what has no master: frozen parameters, buffers, tied tensors; without lists, all that the model has."""
    main, world = models[0], len(models)
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
        gathered.add_copy(("model", copy), ("model", origin))


# ---------------------------------------------------------------------------- a Universal Checkpoint's small files


class Step(NamedTuple):
    """How many steps an optimizer has done, and what is saved of it: that number, or a tensor and its bytes."""

    number: float
    value: object
    content: bytes | None = None


def is_setting(name: str) -> bool:
    """Whether a name is that of a step or of a setting of a group, which all go into these files."""
    return bool(_STEP.fullmatch(name) or _SETTING.fullmatch(name))


def universal_documents(
    tensors: Mapping[str, Shape], states: Collection[str], shared: Mapping[str, str], saved: Distributed | None
) -> Iterator[tuple[str, bytes]]:
    """The small files of a checkpoint of ``tensors``, of which some have ``states``; ``shared`` are copies of others.

    Without settings there are as many empty groups as a run can have: it keeps its own. Raises MismatchError if the
    parameters are at different steps, and CheckpointError if a file cannot be read.
    """
    tensors = dict(sorted(tensors.items()))  # whatever the route they came by
    step = _step_of(saved) if saved is not None and states else None
    groups = _groups_of(saved) if saved is not None and states else []
    members = [{*group.pop("params", ())} for group in groups]
    named = [{name: tensors[name] for name in tensors if name in names} for names in members]
    if {name for names in named for name in names} < {*states}:
        named = [{name: tensors[name] for name in tensors if name in states or not states}]
    of_groups = [{**group, "params": [number]} for number, group in enumerate(groups)] or [{} for _ in tensors]
    extras = saved.extras if saved is not None else {}
    model = _MODEL_STATES | {
        "param_shapes": [{n: Inert("torch.Size", (shape,)) for n, shape in names.items()} for names in named],
        "shared_params": {**shared}, "global_steps": int(step.number) if step else 0,
    }  # fmt: skip
    for prefix in ("", "zero_pp_rank_0_"):
        yield f"{prefix}mp_rank_00_model_states.pt", object_bytes(model | _plain(extras.get("model", {})))
    own = _plain(extras.get("optimizer", {})) | {"ds_version": _MODEL_STATES["ds_version"], "param_groups": of_groups}

    state = {0: {"step": step.value}} if step else {}
    settings = own | {"optimizer_state_dict": {"state": state, "param_groups": of_groups}}
    yield "zero/optimizer_state.pt", object_bytes(settings, step and step.content)
    if step:
        saved_step = object_bytes(step.value, step.content)
        yield from ((f"zero/{name}/step.pt", saved_step) for name in tensors if name in states)


def _plain(table: Mapping[str, object]) -> dict[str, object]:
    """The entries that can be saved again: those without tensors."""

    def is_plain(value: object) -> bool:
        try:
            return bool(write_pickle(value))
        except TypeError:
            return False

    return {key: value for key, value in table.items() if is_plain(value)}


def _step_of(saved: Distributed) -> Step | None:
    infos = [info for name, whole in saved.tensors.items() if _STEP.fullmatch(name) for _, info in whole.chunks]
    contents = read_ranges([(info.file, info.offset, info.offset + info.nbytes) for info in infos])
    steps = [
        Step(number, pickled_tensor(0, "step", info.dtype, info.shape), content)
        for info, content in zip(infos, contents, strict=True)
        if info.dtype in _NUMBERS and len(content) == struct.calcsize(_NUMBERS[info.dtype])
        for (number,) in struct.iter_unpack(_NUMBERS[info.dtype], content)
    ]
    values = (read_object(blob) for name, blob in saved.objects.items() if _STEP.fullmatch(name))
    steps += [Step(value, value) for value in values if isinstance(value, int | float)]
    low, high = (extreme((step.number for step in steps), default=0) for extreme in (min, max))
    if low != high:
        why = f"its parameters have done {low:g} to {high:g} steps, and DeepSpeed has one number for all"
        raise MismatchError(f"{saved.path}: {why}", "merge it: the weights alone can be written")
    return next(iter(steps), None)


def _groups_of(saved: Distributed) -> list[dict[str, Any]]:
    groups: dict[int, dict[str, Any]] = {}
    for name, blob in saved.objects.items():
        if match := _SETTING.fullmatch(name):
            groups.setdefault(int(match[1]), {})[match[2]] = read_object(blob)
    return [_plain(groups[number]) for number in sorted(groups)]
