"""What DeepSpeed reads of a Universal Checkpoint beside the files of its tensors and their states.

ZeRO-1 and 2 read the settings of each group at the top of ``zero/optimizer_state.pt``, and ``zero/{tensor}/step.pt``;
ZeRO-3 the settings of the first group and the step inside its ``optimizer_state_dict``. Each has a name of its own for
the model's states, from which no weight is read.

Source: DeepSpeed 0.19.8, ``deepspeed/checkpoint/{ds_to_universal,universal_checkpoint}.py``,
``deepspeed/runtime/{engine,base_optimizer,zero/stage3}.py``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from formats.errors import MismatchError
from formats.files.dcp import Distributed, object_bytes, read_object
from formats.files.pickles import Inert, write_pickle
from formats.files.torch_zip import pickled_tensor
from formats.store import read_ranges

Shape = tuple[int, ...]
_SETTING = re.compile(r"(?:.*\.)?param_groups\.(\d+)\.(\w+)")
_STEP = re.compile(r"(?:.*\.)?state\.(.+)\.step")
_NUMBERS = {"F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
_MODEL: dict[str, object] = {
    "module": {}, "buffer_names": [], "optimizer": None, "frozen_param_shapes": {}, "frozen_param_fragments": {},
    "lr_scheduler": None, "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "dp_world_size": 1,
    "mp_world_size": 1, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_version": "0.19.8",
}  # fmt: skip
PLACES = {*_MODEL, "param_shapes", "shared_params"} - {"lr_scheduler", "data_sampler", "random_ltd", "skipped_steps"}
"""What a model's states say of how it lies in files."""


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
    model = _MODEL | {
        "param_shapes": [{n: Inert("torch.Size", (shape,)) for n, shape in names.items()} for names in named],
        "shared_params": {**shared}, "global_steps": int(step.number) if step else 0,
    }  # fmt: skip
    for prefix in ("", "zero_pp_rank_0_"):
        yield f"{prefix}mp_rank_00_model_states.pt", object_bytes(model | _plain(extras.get("model", {})))
    own = _plain(extras.get("optimizer", {})) | {"ds_version": _MODEL["ds_version"], "param_groups": of_groups}

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
