"""An adapter that reads like the same adapter in another format: its A and B are put in order as they are read.

Nothing is computed: bytes are moved, and zeros put where a format joins what another has apart.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.documents import json_bytes
from formats.errors import CheckpointError, PlanError
from formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, CONFIG, has_adapter, open_adapter
from formats.files.checksum import check_unchanged, stamps_in, stamps_of
from formats.files.safetensors import DTYPE_BITS, TensorInfo, build_header, parse_header
from formats.files.sharded import is_sharded
from formats.notation.adapters import (
    PREFIX,
    SETTINGS,
    Settings,
    Wrapped,
    adapter_architecture,
    belongings,
    settings_of,
)
from formats.notation.architecture import Architecture
from formats.notation.architecture_files import find_architecture
from formats.notation.format import Pattern
from formats.notation.format_file import AdapterFormat
from formats.notation.module_names import ModuleTensor, module_tensors
from formats.store import FilePath, StoredPath, location_of, name_in
from reshard.model.binding import bind
from reshard.model.model import BoundTensor, FullTensor, Model
from reshard.source.adapted import by_expert
from reshard.source.dequantized import Kept, local_file
from reshard.source.expert_factors import Experts, Pair, Target, shapes, targets
from reshard.source.low_rank import A_ENDS, B_ENDS, LINEAR, Scales, check_tensors, factor_sizes, stack_form
from reshard.store.computed import ComputedFile
from reshard.store.range_store import Content, RangeStore, remote_of
from reshard.store.remote import Read, Remote

_VERSION = 1
"""The version of this order: files that were made with another version count as changed."""
Numbers = NDArray[Any]


class Piece(NamedTuple):
    """A tensor of the file, up to byte ``end``: a copy of ``info``, or A or B (``is_a``) of a target."""

    begin: int
    end: int
    info: TensorInfo | None
    target: Target | None
    is_a: bool


@dataclass(frozen=True, eq=False)
class ConvertedFile(ComputedFile):
    """The weights of an adapter in another format."""

    header: bytes
    pieces: tuple[Piece, ...]
    files: tuple[Remote, ...]
    size: int

    @cached_property
    def identity(self) -> str:
        """A digest of the adapter's identity and of what each tensor is made of."""
        return f"converted:{self.digest_of([_VERSION, [_plain(piece) for piece in self.pieces]])}"

    def open(self) -> Read:
        """Open the adapter's file when it is needed."""
        file = self.opened()

        def source(info: TensorInfo) -> Numbers:
            def read() -> Numbers:
                return np.frombuffer(file(0)(info.offset, info.offset + info.nbytes), _unit(info.dtype)).reshape(
                    info.shape
                )

            return _KEPT.get((self.files[0], info.offset), read)

        def content(piece: Piece, begin: int, end: int) -> memoryview:
            if piece.info is not None:
                return file(0)(piece.info.offset + begin, piece.info.offset + end)
            target = piece.target
            assert target is not None
            made = _KEPT.get((self, piece.begin), lambda: factor_of(target, piece.is_a, source))
            return made.reshape(-1).view(np.uint8)[begin:end].data

        return self.read_pieces(self.pieces, content)


_KEPT = Kept(256 << 20)
"""A and B that were used last, of the adapter and of the result."""


def _unit(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"<u{DTYPE_BITS[dtype] // 8}")


def _short(numbers: Numbers) -> str:
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


def _plain(piece: Piece) -> list[Any]:
    if piece.target is None:
        return [piece.end, piece.info and piece.info.offset]
    blocks = [
        [each.expert, _short(each.rows), each.pair.a.offset, each.pair.b.offset, each.of, _short(each.own), each.rank]
        for each in piece.target.blocks
    ]  # fmt: skip
    return [piece.end, piece.is_a, piece.target.form.a.axes, piece.target.form.b.axes, blocks]


def factor_of(target: Target, is_a: bool, source: Callable[[TensorInfo], Numbers]) -> Numbers:
    """A or B of a target: numbers of its dtype as unsigned integers of the same width."""
    sizes, factor = target.sizes, target.form.a if is_a else target.form.b
    side = factor.side
    found = np.zeros((sizes["expert"], sizes[side], sizes["rank"]), _unit(target.dtype))
    for block in target.blocks:
        pair = block.pair
        own = pair.form.a if pair.form.a.side == side else pair.form.b
        there = by_expert(source(pair.a if own is pair.form.a else pair.b), own, pair.sizes)[block.of]
        ranks = slice(block.rank, block.rank + pair.sizes["rank"])
        if side == "in":
            found[block.expert, :, ranks] = there
        else:
            found[block.expert, block.rows, ranks] = there[block.own]
    dims = [axis for dim in factor.dims for axis in dim]
    order = [("expert", side, "rank").index(axis) for axis in dims]
    shown = found if "expert" in dims else found[0]
    order = order if "expert" in dims else [place - 1 for place in order]
    return np.ascontiguousarray(shown.transpose(order))


# -------------------------------------------------------------------------------------------------------------- store


def converted(path: FilePath, format: AdapterFormat, config: Path | None = None) -> RangeStore:
    """An adapter as if it had been saved in another format: a store around it. ``config`` is the model's folder.

    Raises CheckpointError if it is no adapter, PlanError if the format cannot hold it.
    """
    if is_sharded(path):
        raise CheckpointError(f"{path} is split: an adapter is converted as a whole", "merge the ranks first")
    if not has_adapter(path):
        raise CheckpointError(
            f"{path} is no adapter, and '{format.name}' is a format of adapters",
            f"it needs {ADAPTER}, {ADAPTER_CONFIG}",
        )
    known = stamps_in(path)
    checkpoint = open_adapter(path, config)
    stamps = stamps_of([path / ADAPTER, path / ADAPTER_CONFIG], path, known)
    settings = checkpoint.config[SETTINGS]
    plain = {key: value for key, value in checkpoint.config.items() if key != SETTINGS}
    base = find_architecture(plain, path)
    file = remote_of(path / ADAPTER) or local_file(path / ADAPTER, path, stamps[path / ADAPTER])
    found = _Conversion(base, checkpoint.config, checkpoint.tensors, format, _reader(file))
    check_tensors(found.lora, checkpoint.tensors)
    made, further = found.pieces()
    header = build_header([(name, dtype, shape) for name, dtype, shape, _ in made], {"format": "pt"})
    laid = parse_header(header, path / ADAPTER, None).tensors
    pieces = [Piece(laid[name].offset, laid[name].offset + laid[name].nbytes, *what) for name, _, _, what in made]
    size = max((piece.end for piece in pieces), default=len(header))
    file_made = ConvertedFile(header, tuple(piece for piece in pieces if piece.end > piece.begin), (file,), size)
    sides = {name_in(side, path): side for side in checkpoint.side_files}
    documents = {
        ADAPTER_CONFIG: json_bytes(settings | further) + b"\n",
        CONFIG: json_bytes(plain) + b"\n",
    }
    contents: dict[str, Content] = {**sides, **documents, ADAPTER: file_made}
    check_unchanged(stamps)
    location = location_of(path)
    commit = path.store.commit if isinstance(path, StoredPath) else None
    store = RangeStore(f"{location} as {format.name}", contents, location=location, commit=commit)
    store.keep({ADAPTER: {0: header}})
    return store


def _reader(file: Remote) -> Callable[[TensorInfo, int, Pair], bytes]:
    """What reads an expert's A."""
    opened = cache(file.open)

    def read(info: TensorInfo, expert: int, pair: Pair) -> bytes:
        found = _KEPT.get(
            (file, info.offset),
            lambda: np.frombuffer(opened()(info.offset, info.offset + info.nbytes), _unit(info.dtype)).reshape(
                info.shape
            ),
        )
        factor = pair.form.a if info is pair.a else pair.form.b
        own: Numbers = by_expert(found, factor, pair.sizes)[expert]
        return own.tobytes()

    return read


class _Copy(NamedTuple):
    """A tensor that is copied. Of an A, ``module`` is the name of the module, ``key`` that in the source's settings."""

    info: TensorInfo
    module: str | None
    key: str


_Made = tuple[str, str, tuple[int, ...], tuple[TensorInfo | None, Target | None, bool]]


@dataclass(frozen=True)
class _Conversion:
    base: Architecture
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    format: AdapterFormat
    read: Callable[[TensorInfo, int, Pair], bytes]

    @cached_property
    def lora(self) -> Settings:
        return settings_of(self.config[SETTINGS], ADAPTER)

    @cached_property
    def model(self) -> Model:
        architecture = adapter_architecture(self.base, self.config, ADAPTER)
        found = [FullTensor(info.name, info.dtype, info.shape, info.file.name) for info in self.tensors.values()]
        return bind(architecture, self.config, found)

    def pieces(self) -> tuple[list[_Made], dict[str, Any]]:
        """The tensors of the result in the order of the file, what each is made of, and the changed settings."""
        experts = Experts(self.base, self.model)
        lines = belongings(self.base, self.config, self.lora)
        pairs: dict[tuple[str, Wrapped], dict[str, BoundTensor]] = defaultdict(dict)
        copies: dict[str, _Copy] = {}
        for tensor in self.model.tensors:
            each, suffix = lines.get(tensor.template, (None, ""))
            if each is None or not experts.is_expert(each):
                name, module = self._renamed(tensor, each, suffix)
                key = "" if each is None else self.lora.key_of(tensor.name.removesuffix(suffix), each)
                copies[name] = _Copy(self.tensors[tensor.name], module, key)
            elif suffix in A_ENDS or suffix in B_ENDS:
                pairs[tensor.name.removesuffix(suffix), each]["A" if suffix in A_ENDS else "B"] = tensor
            else:
                raise PlanError(f"{ADAPTER}: tensor '{tensor.name}' of an expert has no place in '{self.format.name}'")
        made = targets(experts, list(self._pairs(experts, pairs)), self.format, self.read) if pairs else []
        found: list[_Made] = [
            (name, each.info.dtype, each.info.shape, (each.info, None, False)) for name, each in copies.items()
        ]
        for target in made:
            for is_a, shape in zip((True, False), shapes(target), strict=True):
                found.append((self._name(target, is_a), target.dtype, shape, (None, target, is_a)))
        ordered = sorted(found, key=lambda each: (-DTYPE_BITS[each[1]], each[0]))
        return ordered, _settings(self, [*copies.values()], made)

    def _pairs(
        self, experts: Experts, found: Mapping[tuple[str, Wrapped], Mapping[str, BoundTensor]]
    ) -> Iterator[Pair]:
        scales = Scales(self.lora)
        for (place, each), pair in found.items():
            if pair.keys() != {"A", "B"}:
                raise PlanError(f"{ADAPTER}: '{place}' has only one of lora_A and lora_B")
            a, b = pair["A"], pair["B"]
            of = experts.matrices(each, self._indices(a))
            form = stack_form(each, a, b) if each.is_stack else LINEAR
            sizes = {**experts.sizes(of)}
            rank = factor_sizes(a.shape, b.shape, form, sizes["expert"])["rank"]
            scale = scales.of(self.lora.key_of(place, each), rank)
            yield Pair(of, self.tensors[a.name], self.tensors[b.name], form, {**sizes, "rank": rank}, scale)

    def _indices(self, tensor: BoundTensor) -> Mapping[str, int]:
        match = self.model.architecture.match(tensor.name)
        assert match is not None
        return match.indices

    # ------------------------------------------------------------------------------------------------------- names

    @cached_property
    def _of_modules(self) -> Sequence[ModuleTensor]:
        return [*module_tensors(self.base, self.config)]

    @cached_property
    def _renames(self) -> Mapping[str, str]:
        """Names of modules' tensors by those of checkpoints, or the other way round, where one is all of the other."""
        found: dict[str, str] = {}
        for tensor in self._of_modules:
            part = tensor.parts[0]
            if len(tensor.parts) == 1 and part.label is None and tensor.stacked is None and part.source != tensor.name:
                one, other = part.source, tensor.name
                found |= {other: one} if self.format.factors is None else {one: other}
        return found

    @cached_property
    def _spelling(self) -> tuple[str, str]:
        """What names begin with in the rules, and in this adapter."""
        own = self.base.prefixes[0] if self.base.prefixes else ""
        for tensor in self.model.tensors:
            filled = _filled(tensor.template, self._indices(tensor))
            if tensor.name != filled and filled.startswith(PREFIX + own):
                tail = filled.removeprefix(PREFIX + own)
                if tensor.name.startswith(PREFIX) and tensor.name.endswith(tail):
                    return own, tensor.name.removeprefix(PREFIX).removesuffix(tail)
        return own, own

    def _spelled(self, name: str) -> str:
        own, here = self._spelling
        return here + name.removeprefix(own) if name.startswith(own) else name

    def _renamed(self, tensor: BoundTensor, each: Wrapped | None, suffix: str) -> tuple[str, str | None]:
        """The name of a tensor that is copied, and that of the module that it belongs to, if it is A."""
        name = tensor.template.removeprefix(PREFIX)
        if tensor.template.endswith("*"):
            return tensor.name, None
        leaf = "" if each is None else ".weight" if each.name.endswith(".weight") else ""
        own = name if each is None else each.name
        new = self._renames.get(own, own)
        module = new.removesuffix(leaf) if leaf else new
        of = self._indices(tensor)
        if each is None:
            return PREFIX + self._spelled(_filled(new, of)), None
        return f"{PREFIX}{self._spelled(_filled(module, of))}.{suffix}", (
            self._spelled(_filled(module, of)) if suffix in A_ENDS else None
        )

    def _name(self, target: Target, is_a: bool) -> str:
        of = target.of
        place = self._spelled(_filled(of.each.place, self.indices_of(target)))
        if not of.each.is_stack:
            return f"{PREFIX}{place}{(A_ENDS if is_a else B_ENDS)[0]}"
        return f"{PREFIX}{place}{(target.form.a if is_a else target.form.b).name}"

    def indices_of(self, target: Target) -> Mapping[str, int]:
        """The indices in a target's name."""
        of = target.of
        axes = Pattern(of.each.name).indices - {name for name, _ in of.indices}
        return dict(of.indices) | ({next(iter(axes)): of.expert} if of.expert is not None else {})

    def unprefixed(self, name: str) -> str:
        """A name without what this adapter's names begin with, if the rules' begin with something else."""
        own, here = self._spelling
        return name if here == own else name.removeprefix(here)

    def module_of(self, target: Target) -> str:
        """The name of the parameter that a target changes; without ``.weight``, that of its module."""
        return self._spelled(_filled(target.of.each.name, self.indices_of(target))).removesuffix(".weight")


def _filled(template: str, indices: Mapping[str, int]) -> str:
    return Pattern(template).fill({name: str(index) for name, index in indices.items()})


# ----------------------------------------------------------------------------------------------------------- settings


def _settings(of: _Conversion, copies: Sequence[_Copy], made: Sequence[Target]) -> dict[str, Any]:
    """The entries of ``adapter_config.json`` that differ."""
    settings, format = of.config[SETTINGS], of.format
    modules = [each.module for each in copies if each.module is not None]
    stacks = [target for target in made if target.of.each.is_stack]
    modules += [of.module_of(target) for target in made if not target.of.each.is_stack]
    parameters = dict.fromkeys(_tail(target.of.each.name) for target in stacks)
    ranks, alphas = _numbers(of, copies, made)
    if format.one_scale and (ranks or alphas):
        raise PlanError(
            f"'{format.name}' has one rank and one alpha for all modules; '{next(iter(ranks or alphas))}' has its own",
            "write it in the format peft-per-expert, or merge it into the model",
        )
    found = {
        "target_modules": _targets(settings.get("target_modules"), modules),
        "target_parameters": [*parameters] if format.since is not None and parameters else None,
        "rank_pattern": ranks, "alpha_pattern": alphas, "lora_B_layout": None, "exclude_modules": None,
        "layers_to_transform": None, "layers_pattern": None, "peft_version": settings.get("peft_version"),
        **format.settings,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None or key in settings}


def _tail(name: str) -> str:
    """What stands behind the last index of a name."""
    return re.split(r"\{\w+\}\.", name)[-1]


def _targets(before: object, modules: Sequence[str]) -> list[str]:
    """``target_modules``: the last words of names that were given so, else the whole names."""
    words = set(before) if isinstance(before, list) else set()
    return sorted({last if (last := name.rpartition(".")[2]) in words else name for name in modules})


def _numbers(of: _Conversion, copies: Sequence[_Copy], made: Sequence[Target]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ranks and alphas that differ from ``r`` and ``lora_alpha``, by pattern of a name."""
    scales, settings = Scales(of.lora), of.config[SETTINGS]
    own = [(each.module, each.info.shape[0], scales.alpha(each.key)) for each in copies if each.module is not None]
    for target in made:
        rank, scale = target.sizes["rank"], target.scale
        alpha = scales.alpha_for(scale, rank) if scale is not None else settings["lora_alpha"]
        if alpha is None:
            raise PlanError(f"no alpha gives '{of.module_of(target)}' of rank {rank} its factor {scale}", _MERGE_IT)
        own.append((of.module_of(target), rank, alpha))
    own = [(of.unprefixed(name), rank, alpha) for name, rank, alpha in own]
    ranks, alphas = dict[str, Any](), dict[str, Any]()
    for found, place, usual in ((ranks, 1, settings["r"]), (alphas, 2, settings["lora_alpha"])):
        alike: dict[str, dict[str, Any]] = defaultdict(dict)
        for each in own:
            alike[re.sub(r"\.\d+(?=\.)", r".\\d+", each[0])][each[0]] = each[place]
        for pattern, values in alike.items():
            if len({*values.values()}) == 1:
                values = {pattern: next(iter(values.values()))}
            found |= {key: value for key, value in values.items() if len(values) > 1 or value != usual}
    return ranks, alphas


_MERGE_IT = "merge it into the model: reshard merge ADAPTER --into BASE OUT"
