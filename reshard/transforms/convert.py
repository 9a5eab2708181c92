"""``--as`` a format of adapters: an adapter's A and B in another form. They are put in order as they are read.

Nothing is computed: bytes are moved, and zeros put where a format joins what another has apart.

Two formats cut the weights of experts into other matrices: ``gate_up_proj`` of all experts here, the ``gate_proj`` of
one expert there. The rows of all of them are rows of the checkpoint's own tensors, so a target's rows are found in the
sources'. Matrices that are joined keep one A if their A's have the same bytes; else the ranks are put side by side,
each with zeros in the rows of the others. So nothing is computed, and the sum that is added to a weight is the same.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from formats.documents import json_bytes
from formats.errors import CheckpointError, MismatchError, PlanError
from formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, CONFIG
from formats.files.safetensors import DTYPE_BITS, build_header, tensor_bytes
from formats.files.sharded import SourceFileRecord
from formats.notation.adapters import (
    PREFIX,
    Adapted,
    FactorLayout,
    ModuleTensor,
    Part,
    Settings,
    belongings,
    expert_axes,
    module_tensors,
    other_stacks,
    parameters,
    settings_of,
    wrapped,
)
from formats.notation.architecture import SETTINGS, Architecture, filled
from formats.notation.architecture_files import find_architecture
from formats.notation.format import Pattern
from formats.notation.format_file import AdapterFormat
from reshard.model.model import BoundTensor, Model
from reshard.source.low_rank import (
    A_ENDS,
    B_ENDS,
    LINEAR,
    Scales,
    factor_sizes,
    rows_of,
    shape_of,
    stack_form,
)
from reshard.source.source import Source
from reshard.store.range_store import RangeStore
from reshard.transforms.adapter import by_expert
from reshard.transforms.tensors import ArrayCache, Bytes, Computed, Opened, Tensor, computed, store_of, tensors_of

Indices = tuple[tuple[str, int], ...]
Rows = NDArray[np.int64]
Numbers = NDArray[Any]


class Weight(NamedTuple):
    """A matrix of the checkpoint: the line of its tensor, the indices in its name without the expert's, the expert."""

    line: str
    indices: Indices
    expert: int


class Matrices(NamedTuple):
    """The matrices of a parameter: ``tensor`` of ``target``, with these ``indices``. ``expert`` is set if it is one."""

    target: Adapted
    tensor: ModuleTensor
    indices: Indices
    expert: int | None


@dataclass(frozen=True, eq=False)
class Pair:
    """A and B of a parameter, which lie as in ``form``: ``scale`` is what their product is multiplied by."""

    of: Matrices
    a: Tensor
    b: Tensor
    form: FactorLayout
    sizes: Mapping[str, int]
    scale: float

    def of_expert(self, expert: int, opened: Opened, *, is_a: bool) -> Numbers:
        """An expert's A or B, as unsigned integers of the same width."""
        tensor, factor = (self.a, self.form.a) if is_a else (self.b, self.form.b)
        nbytes = tensor_bytes("", tensor.dtype, tensor.shape)

        def read() -> Numbers:
            return np.frombuffer(tensor.content.read(opened, 0, nbytes), _unit(tensor.dtype)).reshape(tensor.shape)

        matrix: Numbers = by_expert(_FACTORS.get(tensor.content, read), factor, self.sizes)[expert]
        return matrix


class Block(NamedTuple):
    """Rows of a target's expert, which are ``own`` of a source's; its ranks begin at ``rank``."""

    expert: int
    rows: Rows
    pair: Pair
    of: int
    own: Rows
    rank: int


@dataclass(frozen=True, eq=False)
class Target:
    """A and B that are made of ``blocks``. ``sizes`` are those of expert, rank, in and out."""

    of: Matrices
    form: FactorLayout
    sizes: Mapping[str, int]
    dtype: str
    blocks: tuple[Block, ...]

    @property
    def scale(self) -> float | None:
        """What the product is multiplied by; None if it is zero. Raises PlanError if there are several."""
        scales = {block.pair.scale for block in self.blocks}
        if len(scales) > 1:
            raise PlanError(
                f"the parts of '{self.of.target.name}' are scaled by {min(scales)} and by {max(scales)}", _APART
            )
        return next(iter(scales), None)


_APART = "only a format in which each expert has its own A and B holds that: peft-per-expert"


@dataclass(frozen=True)
class Experts:
    """The experts of a model with an adapter: where the rows of each parameter lie in the checkpoint's tensors."""

    base: Architecture
    model: Model
    rows: dict[tuple[Part, Indices], Rows] = field(default_factory=dict)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes of experts."""
        return expert_axes(self.base, self.model.config)

    def is_expert(self, target: Adapted) -> bool:
        """Whether a parameter is of experts: all of them, or one."""
        return target.is_stack or bool(Pattern(target.name).indices & self.axes)

    def matrices(self, target: Adapted, indices: Mapping[str, int]) -> Matrices:
        """The matrices of a parameter with these indices in its name."""
        tensor = next((tensor for tensor in target.tensors if tensor.parts[0].at is not None), target.tensors[0])
        axis = None if target.is_stack else next(iter(Pattern(target.name).indices & self.axes))
        others_at = tuple(sorted((name, index) for name, index in indices.items() if name != axis))
        return Matrices(target, tensor, others_at, indices[axis] if axis else None)

    def parts(self, of: Matrices) -> Iterator[tuple[Part, Rows, int]]:
        """The parts of each matrix: the rows of the checkpoint's tensor that it has, and its own first row."""
        begin = 0
        for part in of.tensor.parts:
            rows = self._rows(part, of.indices)
            yield part, rows, begin
            begin += len(rows)

    def sizes(self, of: Matrices) -> dict[str, int]:
        """The sizes of expert, in and out."""
        sizes = self.model.sizes.of(dict(of.indices))
        shape = shape_of(of.tensor.shapes, self.model, dict(of.indices))
        first, second = (dim.size(sizes) for dim in shape.dims[-2:])
        sides = (second, first) if shape.arrow is not None else (first, second)
        experts = 1 if of.expert is not None else shape.dims[0].size(sizes)
        return {"expert": experts, "out": sides[0], "in": sides[1]}

    def _rows(self, part: Part, indices: Indices) -> Rows:
        """The indices along the output of a checkpoint's tensor that a part has."""
        part = part if part.at is None else Part(part.source, part.label)
        if (part, indices) not in self.rows:
            self.rows[part, indices] = np.array(rows_of(self.base, self.model, part, dict(indices)), np.int64)
        return self.rows[part, indices]


# ------------------------------------------------------------------------------------------------------------- targets


def targets(experts: Experts, pairs: Sequence[Pair], format: AdapterFormat) -> list[Target]:
    """What the A and B of experts are made of in a format.

    Raises PlanError if the format has no place for them.
    """
    sources: dict[Weight, list[tuple[Pair, int, Rows, int]]] = defaultdict(list)
    for pair in pairs:
        for part, rows, begin in experts.parts(pair.of):
            for number in range(pair.sizes["expert"]):
                expert = number if pair.of.expert is None else pair.of.expert
                sources[Weight(part.source, pair.of.indices, expert)].append((pair, number, rows, begin))
    matrices = dict.fromkeys(_asked(experts, sources, format))
    makings = [_Making(experts, sources, of) for of in matrices]
    opened = Opened()
    apart = {making.of.target.name for making in makings if not making.has_one_a(opened)}
    if not makings:
        raise PlanError(f"the experts of this model have no names in the format '{format.name}'")
    return [making.target(side_by_side=making.of.target.name in apart) for making in makings]


def _asked(experts: Experts, sources: Mapping[Weight, object], format: AdapterFormat) -> Iterator[Matrices]:
    """The matrices that are made: those that have rows of a source, and what PEFT wraps with them."""
    parts: dict[str, list[tuple[Adapted, ModuleTensor]]] = defaultdict(list)
    wrapped_with: dict[str, list[tuple[Adapted, ModuleTensor]]] = defaultdict(list)
    seen: set[tuple[str, Indices, int | None]] = set()
    for target in _parameters(experts, {weight.line for weight in sources}, format):
        if format.since is not None:
            wrapped_with[target.module].append((target, target.tensors[0]))
        for tensor in target.tensors:
            for part in tensor.parts:
                parts[part.source].append((target, tensor))
    for line, indices, expert in sources:
        if line not in parts:
            raise PlanError(f"'{line}' has no place in the format '{format.name}'")
        for target, tensor in dict.fromkeys(parts[line]):
            for other, made_of in [(target, tensor), *wrapped_with[target.module]]:
                of = Matrices(other, made_of, indices, None if target.is_stack else expert)
                if (other.name, indices, of.expert) not in seen:
                    seen.add((other.name, indices, of.expert))
                    yield of


def _parameters(experts: Experts, lines: set[str], format: AdapterFormat) -> Iterator[Adapted]:
    """The parameters of experts in a format, of which some row is in one of these lines."""
    base, config = experts.base, experts.model.config
    modules = {tensor.name for tensor in module_tensors(base, config)}
    if format.factors is None:
        for name, tensors in parameters(base, config).items():
            target = Adapted(tensors, f"{name.removesuffix('weight')}")
            if tensors[0].dims == 2 and name.endswith(".weight") and experts.is_expert(target):
                yield target
    elif format.since is None:
        yield from (target for _, target in other_stacks(base, config, (format.name,)) if target.name in modules)
    else:
        names = {
            name
            for name, tensors in parameters(base, config).items()
            for part in chain.from_iterable(tensor.parts for tensor in tensors)
            if tensors[0].dims == 3 and part.source in lines and name in modules
        }
        settings = Settings(1, {}, tuple(sorted(names)), format.since)
        yield from (target for target in wrapped(base, config, settings) if target.is_stack)


@dataclass(frozen=True)
class _Making:
    """A target, before the ranks of its A are known."""

    experts: Experts
    sources: Mapping[Weight, Sequence[tuple[Pair, int, Rows, int]]]
    of: Matrices

    @cached_property
    def blocks(self) -> list[Block]:
        """The rows of each expert that a source has."""
        made_blocks = []
        for part, rows, begin in self.experts.parts(self.of):
            for number in range(self.experts.sizes(self.of)["expert"]):
                expert = number if self.of.expert is None else self.of.expert
                for pair, of, source_rows, first in self.sources.get(Weight(part.source, self.of.indices, expert), ()):
                    _, own_rows, positions = np.intersect1d(rows, source_rows, assume_unique=True, return_indices=True)
                    if len(own_rows):
                        made_blocks.append(Block(number, own_rows + begin, pair, of, positions + first, 0))
        return made_blocks

    @cached_property
    def factors(self) -> Mapping[int, Sequence[tuple[Pair, int]]]:
        """The pairs, and the experts in them, whose A each expert has."""
        pairs_of: dict[int, dict[tuple[Pair, int], None]] = defaultdict(dict)
        for block in self.blocks:
            pairs_of[block.expert][block.pair, block.of] = None
        return {expert: [*pairs] for expert, pairs in pairs_of.items()}

    def has_one_a(self, opened: Opened) -> bool:
        """Whether the parts of each expert have one A."""
        alike = (
            {(pair.sizes["rank"], pair.scale, pair.of_expert(of, opened, is_a=True).tobytes()) for pair, of in pairs}
            for pairs in self.factors.values()
        )
        return all(len(factors) <= 1 for factors in alike)

    def target(self, *, side_by_side: bool) -> Target:
        """The target, with the ranks of different A's side by side."""
        ranks = [1]
        places: dict[tuple[int, Pair, int], int] = {}
        for expert, pairs in self.factors.items():
            at = 0
            for pair, of in pairs:
                places[expert, pair, of] = at if side_by_side else 0
                at = at + pair.sizes["rank"] if side_by_side else pair.sizes["rank"]
            ranks.append(at)
        blocks = tuple(block._replace(rank=places[block.expert, block.pair, block.of]) for block in self.blocks)
        dtypes = {info.dtype for block in blocks for info in (block.pair.a, block.pair.b)}
        if len(dtypes) > 1:
            texts = " and ".join(sorted(dtypes))
            raise MismatchError(f"{ADAPTER}: the parts of '{self.of.target.name}' have different dtypes, {texts}")
        form = self.of.target.forms[0] if self.of.target.is_stack else LINEAR
        sizes = {**self.experts.sizes(self.of), "rank": max(ranks)}
        return Target(self.of, form, sizes, next(iter(dtypes), "F32"), blocks)


def shapes(target: Target) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A and of B."""
    a, b = (
        tuple(math.prod(target.sizes[axis] for axis in dim) for dim in factor.dims)
        for factor in (target.form.a, target.form.b)
    )
    return a, b


_FACTORS = ArrayCache(256 << 20)
"""A and B that were used last, of the adapter and of the result."""


@dataclass(frozen=True, eq=False)
class Converted(Computed):
    """A or B of a target, which is made of those of an adapter."""

    target: Target
    is_a: bool

    def read(self, opened: Opened, begin: int, end: int) -> Bytes:
        """Put it together."""
        factor = _FACTORS.get(self, lambda: self._factor(opened))
        return factor.reshape(-1).view(np.uint8)[begin:end].data

    def _factor(self, opened: Opened) -> Numbers:
        """Numbers of its dtype as unsigned integers of the same width."""
        target, factor = self.target, self.target.form.a if self.is_a else self.target.form.b
        sizes, side = target.sizes, factor.side
        values = np.zeros((sizes["expert"], sizes[side], sizes["rank"]), _unit(target.dtype))
        for block in target.blocks:
            pair = block.pair
            source_factor = pair.form.a if pair.form.a.side == side else pair.form.b
            part = pair.of_expert(block.of, opened, is_a=source_factor is pair.form.a)
            ranks = slice(block.rank, block.rank + pair.sizes["rank"])
            if side == "in":
                values[block.expert, :, ranks] = part
            else:
                values[block.expert, block.rows, ranks] = part[block.own]
        dims = [axis for dim in factor.dims for axis in dim]
        order = [("expert", side, "rank").index(axis) for axis in dims]
        laid = values if "expert" in dims else values[0]
        order = order if "expert" in dims else [place - 1 for place in order]
        return np.ascontiguousarray(laid.transpose(order))


def _unit(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"<u{DTYPE_BITS[dtype] // 8}")


def _short(numbers: Numbers) -> str:
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


# -------------------------------------------------------------------------------------------------------------- store


def convert(source: Source, format: AdapterFormat) -> RangeStore:
    """An adapter as if it had been saved in another format: a store.

    Raises CheckpointError if it is no adapter, PlanError if the format cannot hold it.
    """
    config = source.model.config
    if SETTINGS not in config:
        raise CheckpointError(
            f"{source.path} is no adapter, and '{format.name}' is a format of adapters",
            f"it needs {ADAPTER}, {ADAPTER_CONFIG}",
        )
    plain = {key: value for key, value in config.items() if key != SETTINGS}
    conversion = _Conversion(find_architecture(plain, source.path), source.model, tensors_of(source), format)
    tensors, further = conversion.made()
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPE_BITS[item[1].dtype], item[0]))
    kinds = [(name, tensor.dtype, tensor.shape) for name, tensor in ordered]
    header = build_header(kinds, {"format": "pt"})
    file = SourceFileRecord(ADAPTER, len(header) + sum(tensor_bytes(*kind) for kind in kinds), None, header)
    documents = {
        ADAPTER_CONFIG: json_bytes(config[SETTINGS] | further) + b"\n",
        CONFIG: json_bytes(plain) + b"\n",
    }
    contents = {name: tensor.content for name, tensor in tensors.items()}
    name_of = f"{source.location} as {format.name}"
    return store_of(source, name_of, [computed(file, contents)], {**source.side_files, **documents})


_Numbers = tuple[str, int, float]
"""The name of a module, its rank and its alpha."""


@dataclass(frozen=True)
class _Conversion:
    base: Architecture
    model: Model
    tensors: Mapping[str, Tensor]
    format: AdapterFormat

    @property
    def config(self) -> Mapping[str, Any]:
        return self.model.config

    @cached_property
    def lora(self) -> Settings:
        return settings_of(self.config[SETTINGS], ADAPTER)

    def made(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of the result, and the changed settings."""
        experts = Experts(self.base, self.model)
        lines = belongings(self.base, self.config, self.lora)
        pairs: dict[tuple[str, Adapted], dict[str, BoundTensor]] = defaultdict(dict)
        out, copied, scales = dict[str, Tensor](), list[_Numbers](), Scales(self.lora)
        for tensor in self.model.tensors:
            parameter, suffix = lines.get(tensor.template, (None, ""))
            if parameter is None or not experts.is_expert(parameter):
                name, module = self._renamed(tensor, parameter, suffix)
                out[name] = self.tensors[tensor.name]
                if parameter is not None and module is not None:
                    key = self.lora.key_of(tensor.name.removesuffix(suffix), parameter)
                    copied.append((module, tensor.shape[0], scales.alpha(key)))
            elif suffix in A_ENDS or suffix in B_ENDS:
                pairs[tensor.name.removesuffix(suffix), parameter]["A" if suffix in A_ENDS else "B"] = tensor
            else:
                raise PlanError(f"{ADAPTER}: tensor '{tensor.name}' of an expert has no place in '{self.format.name}'")
        made_targets = targets(experts, list(self._pairs(experts, pairs)), self.format) if pairs else []
        for target in made_targets:
            inputs = {content: None for b in target.blocks for content in (b.pair.a.content, b.pair.b.content)}
            blocks = [
                [b.expert, _short(b.rows), b.pair.a.content.plain, b.pair.b.content.plain, b.of, _short(b.own), b.rank]
                for b in target.blocks
            ]
            for is_a, shape in zip((True, False), shapes(target), strict=True):
                what = is_a, target.form, blocks
                out[self._name(target, is_a)] = Tensor(target.dtype, shape, Converted((*inputs,), what, target, is_a))
        return out, _settings(self, copied, made_targets)

    def _pairs(
        self, experts: Experts, factors: Mapping[tuple[str, Adapted], Mapping[str, BoundTensor]]
    ) -> Iterator[Pair]:
        scales = Scales(self.lora)
        for (place, target), pair in factors.items():
            if pair.keys() != {"A", "B"}:
                raise PlanError(f"{ADAPTER}: '{place}' has only one of lora_A and lora_B")
            a, b = pair["A"], pair["B"]
            of = experts.matrices(target, a.indices)
            form = stack_form(target, a, b) if target.is_stack else LINEAR
            sizes = {**experts.sizes(of)}
            rank = factor_sizes(a.shape, b.shape, form, sizes["expert"])["rank"]
            scale = scales.of(self.lora.key_of(place, target), rank)
            yield Pair(of, self.tensors[a.name], self.tensors[b.name], form, {**sizes, "rank": rank}, scale)

    # ------------------------------------------------------------------------------------------------------- names

    @cached_property
    def _of_modules(self) -> Sequence[ModuleTensor]:
        return [*module_tensors(self.base, self.config)]

    @cached_property
    def _renames(self) -> Mapping[str, str]:
        """Names of modules' tensors by those of checkpoints, or the other way round, where one is all of the other."""
        renames: dict[str, str] = {}
        for tensor in self._of_modules:
            part = tensor.parts[0]
            if len(tensor.parts) == 1 and part.label is None and tensor.stacked is None and part.source != tensor.name:
                one, other = part.source, tensor.name
                renames |= {other: one} if self.format.factors is None else {one: other}
        return renames

    @cached_property
    def _spelling(self) -> tuple[str, str]:
        """What names begin with in the rules, and in this adapter."""
        prefix = self.base.prefixes[0] if self.base.prefixes else ""
        for tensor in self.model.tensors:
            name = filled(tensor.template, tensor.indices)
            if tensor.name != name and name.startswith(PREFIX + prefix):
                tail = name.removeprefix(PREFIX + prefix)
                if tensor.name.startswith(PREFIX) and tensor.name.endswith(tail):
                    return prefix, tensor.name.removeprefix(PREFIX).removesuffix(tail)
        return prefix, prefix

    def _spelled(self, name: str) -> str:
        prefix, spelled = self._spelling
        return spelled + name.removeprefix(prefix) if name.startswith(prefix) else name

    def _renamed(self, tensor: BoundTensor, target: Adapted | None, suffix: str) -> tuple[str, str | None]:
        """The name of a tensor that is copied, and that of the module that it belongs to, if it is A."""
        name = tensor.template.removeprefix(PREFIX)
        if tensor.template.endswith("*"):
            return tensor.name, None
        leaf = "" if target is None else ".weight" if target.name.endswith(".weight") else ""
        old = name if target is None else target.name
        new = self._renames.get(old, old)
        module = new.removesuffix(leaf) if leaf else new
        of = tensor.indices
        if target is None:
            return PREFIX + self._spelled(filled(new, of)), None
        return f"{PREFIX}{self._spelled(filled(module, of))}.{suffix}", (
            self._spelled(filled(module, of)) if suffix in A_ENDS else None
        )

    def _name(self, target: Target, is_a: bool) -> str:
        of = target.of
        place = self._spelled(filled(of.target.place, self.indices_of(target)))
        if not of.target.is_stack:
            return f"{PREFIX}{place}{(A_ENDS if is_a else B_ENDS)[0]}"
        return f"{PREFIX}{place}{(target.form.a if is_a else target.form.b).name}"

    def indices_of(self, target: Target) -> Mapping[str, int]:
        """The indices in a target's name."""
        of = target.of
        axes = Pattern(of.target.name).indices - {name for name, _ in of.indices}
        return dict(of.indices) | ({next(iter(axes)): of.expert} if of.expert is not None else {})

    def unprefixed(self, name: str) -> str:
        """A name without what this adapter's names begin with, if the rules' begin with something else."""
        prefix, spelled = self._spelling
        return name if spelled == prefix else name.removeprefix(spelled)

    def module_of(self, target: Target) -> str:
        """The name of the parameter that a target changes; without ``.weight``, that of its module."""
        return self._spelled(filled(target.of.target.name, self.indices_of(target))).removesuffix(".weight")


# ----------------------------------------------------------------------------------------------------------- settings


def _settings(of: _Conversion, copied: Sequence[_Numbers], targets: Sequence[Target]) -> dict[str, Any]:
    """The entries of ``adapter_config.json`` that differ."""
    settings, format = of.config[SETTINGS], of.format
    modules = [module for module, _, _ in copied]
    stacks = [target for target in targets if target.of.target.is_stack]
    modules += [of.module_of(target) for target in targets if not target.of.target.is_stack]
    parameters = dict.fromkeys(re.split(r"\{\w+\}\.", target.of.target.name)[-1] for target in stacks)
    ranks, alphas = _numbers(of, copied, targets)
    if format.one_scale and (ranks or alphas):
        raise PlanError(
            f"'{format.name}' has one rank and one alpha for all modules; '{next(iter(ranks or alphas))}' has its own",
            "write it in the format peft-per-expert, or merge it into the model",
        )
    edited = {
        "target_modules": _targets(settings.get("target_modules"), modules),
        "target_parameters": [*parameters] if format.since is not None and parameters else None,
        "rank_pattern": ranks, "alpha_pattern": alphas, "lora_B_layout": None, "exclude_modules": None,
        "layers_to_transform": None, "layers_pattern": None, "peft_version": settings.get("peft_version"),
        **format.settings,
    }  # fmt: skip
    return {key: value for key, value in edited.items() if value is not None or key in settings}


def _targets(old: object, modules: Sequence[str]) -> list[str]:
    """``target_modules``: the last words of names that were given so, else the whole names."""
    words = set(old) if isinstance(old, list) else set()
    return sorted({last if (last := name.rpartition(".")[2]) in words else name for name in modules})


def _numbers(
    of: _Conversion, copied: Sequence[_Numbers], targets: Sequence[Target]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ranks and alphas that differ from ``r`` and ``lora_alpha``, by pattern of a name."""
    scales, settings = Scales(of.lora), of.config[SETTINGS]
    numbers = [*copied]
    for target in targets:
        rank, scale = target.sizes["rank"], target.scale
        alpha = scales.alpha_for(scale, rank) if scale is not None else settings["lora_alpha"]
        if alpha is None:
            raise PlanError(f"no alpha gives '{of.module_of(target)}' of rank {rank} its factor {scale}", _MERGE_IT)
        numbers.append((of.module_of(target), rank, alpha))
    numbers = [(of.unprefixed(name), rank, alpha) for name, rank, alpha in numbers]
    ranks, alphas = dict[str, Any](), dict[str, Any]()
    for pattern_table, place, usual in ((ranks, 1, settings["r"]), (alphas, 2, settings["lora_alpha"])):
        alike: dict[str, dict[str, Any]] = defaultdict(dict)
        for entry in numbers:
            alike[re.sub(r"\.\d+(?=\.)", r".\\d+", entry[0])][entry[0]] = entry[place]
        for pattern, values in alike.items():
            if len({*values.values()}) == 1:
                values = {pattern: next(iter(values.values()))}
            pattern_table |= {key: value for key, value in values.items() if len(values) > 1 or value != usual}
    return ranks, alphas


_MERGE_IT = "merge it into the model: reshard merge ADAPTER --into BASE OUT"
