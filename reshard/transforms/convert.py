"""``--as`` a format of adapters: an adapter's A and B in another form. They are put in order as they are read.

Nothing is computed: bytes are moved, and zeros put where a format joins what another has apart.

Two formats cut the weights of experts into other matrices: ``gate_up_proj`` of all experts here, the ``gate_proj`` of
one expert there. The rows of all of them are rows of the checkpoint's own tensors, so a target's rows are found in the
sources'. Matrices that are joined keep one A if their A's have the same bytes; else the ranks are put side by side,
each with zeros in the rows of the others. So nothing is computed, and the sum that is added to a weight is the same.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reshard.formats.documents import json_bytes
from reshard.formats.errors import CheckpointError, MismatchError, PlanError
from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG, CONFIG
from reshard.formats.files.safetensors import DTYPE_BITS, SourceFileRecord, build_header, tensor_bytes
from reshard.formats.notation.adapters import (
    Adapted,
    LoraSettings,
    other_stacks,
    parameters,
    settings_of,
    tensors_of_modules,
    wrapped,
)
from reshard.formats.notation.architecture import PREFIX, SETTINGS, Architecture, filled
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.format import Pattern
from reshard.formats.notation.format_file import AdapterFormat, ExpertFactor
from reshard.formats.notation.spellings import ModuleTensor, SourcePart
from reshard.formats.store import public_name
from reshard.model.model import BoundTensor, Model
from reshard.source.source import Source
from reshard.store.threads import ArrayCache
from reshard.transforms.low_rank import (
    A_ENDS,
    B_ENDS,
    LINEAR,
    Product,
    Term,
    alpha_of,
    by_expert,
    divisor_of,
    layout_of,
    pairs_of,
    rows_of,
    scale_of,
    shape_of,
)
from reshard.transforms.tensors import ARITHMETIC, Arithmetic, Tensor, computed, derived, store_of, tensors_of

Indices = tuple[tuple[str, int], ...]
Matrix = NDArray[Any]


Weight = tuple[str, Indices, int]
"""A matrix of the checkpoint: the line of its tensor, the indices in its name without the expert's, the expert."""


class Matrices(NamedTuple):
    """The matrices of a parameter: a tensor of a target, at these indices. ``expert`` is set if it is one."""

    target: Adapted
    tensor: ModuleTensor
    indices: Indices
    expert: int | None


class ExpertRows(NamedTuple):
    """Rows ``into`` of an expert of the result: rows ``of`` an expert's product, whose ranks begin at ``rank``."""

    expert: int
    into: range
    product: Product
    number: int
    of: range
    rank: int = 0


def _converted(
    factor: ExpertFactor, sizes: Mapping[str, int], dtype: str, factors: Sequence[Tensor], blocks: Sequence[ExpertRows]
) -> Tensor:
    """A or B that is made of blocks of others."""
    shape = tuple(math.prod(sizes[axis] for axis in dim) for dim in factor.dims)

    def numbers(arithmetic: Arithmetic) -> Matrix:
        numbers = np.zeros(shape, _unit(dtype))
        matrices = by_expert(numbers, factor, sizes)
        for block in blocks:
            part = block.product.matrix(factor.side, block.number, lambda tensor: _codes(tensor, arithmetic))
            into, own = (
                slice(rows.start, rows.stop, rows.step) if factor.side == "out" else slice(None)
                for rows in (block.into, block.of)
            )
            matrices[block.expert, into, block.rank : block.rank + part.shape[1]] = part[own]
        return numbers

    def compute(arithmetic: Arithmetic, begin: int, end: int) -> Matrix:
        return _FACTORS.get(compute, partial(numbers, arithmetic)).reshape(-1).view(np.uint8)[begin:end]

    inputs = [tensor.content for tensor in factors]
    return Tensor(dtype, shape, computed(compute, inputs, (factor, shape, sizes, dtype, blocks)))


_FACTORS = ArrayCache(256 << 20)
"""A and B that were used last, of the adapter and of the result: unsigned integers as wide as the numbers."""


def _codes(tensor: Tensor, arithmetic: Arithmetic) -> Matrix:
    def read() -> Matrix:
        content = tensor.content.read(arithmetic, 0, tensor_bytes("", tensor.dtype, tensor.shape))
        return np.frombuffer(content, _unit(tensor.dtype)).reshape(tensor.shape)

    return _FACTORS.get(tensor.content, read)


def _unit(dtype: str) -> np.dtype[Any]:
    return np.dtype(f"<u{DTYPE_BITS[dtype] // 8}")


@lru_cache(maxsize=1024)
def _common(one: range, other: range) -> tuple[range, range]:
    """Return the places of common rows in both ranges."""
    rows = [row for row in one if row in other]
    ends = [*rows[:2], *rows[-1:]]
    places = [[side.index(row) for row in ends] for side in (one, other)]
    at, at_other = (range(at[0], at[-1] + 1, max(at[1] - at[0], 1)) if at else range(0) for at in places)
    return at, at_other


def convert(source: Source, format: AdapterFormat) -> Source:
    """An adapter as if it had been saved in another format.

    Raises CheckpointError if it is no adapter, PlanError if the format cannot hold it.
    """
    config = source.model.config
    if SETTINGS not in config:
        raise CheckpointError(
            f"{source.path} is not an adapter, and '{format.name}' is a format of adapters",
            f"it needs {ADAPTER}, {ADAPTER_CONFIG}",
        )
    plain = {key: value for key, value in config.items() if key != SETTINGS}
    conversion = _Conversion(find_architecture(plain, source.path), source.model, tensors_of(source), format)
    further = conversion.run()
    ordered = sorted(conversion.out.items(), key=lambda item: (-DTYPE_BITS[item[1].dtype], item[0]))
    kinds = [(name, tensor.dtype, tensor.shape) for name, tensor in ordered]
    header = build_header(kinds, {"format": "pt"})
    file = SourceFileRecord(ADAPTER, len(header) + sum(tensor_bytes(*kind) for kind in kinds), None, header)
    documents = {
        ADAPTER_CONFIG: json_bytes(config[SETTINGS] | further) + b"\n",
        CONFIG: json_bytes(plain) + b"\n",
    }
    contents = {name: tensor.content for name, tensor in conversion.out.items()}
    name_of = f"{public_name(source.path)} as {format.name}"
    store = store_of(source, name_of, [file], contents, {**source.side_files, **documents})
    return derived(source, store, own_rules=False)


@dataclass
class _Conversion:
    """The conversion of one adapter. ``run`` fills the last four."""

    base: Architecture
    model: Model
    tensors: Mapping[str, Tensor]
    format: AdapterFormat
    out: dict[str, Tensor] = field(default_factory=dict)
    """The tensors of the result."""
    modules: list[str] = field(default_factory=list)
    """The names of wrapped modules of the result."""
    parameters: dict[str, None] = field(default_factory=dict)
    """The names of wrapped parameters of the result."""
    numbers: list[tuple[str, int, float | None]] = field(default_factory=list)
    """The name, the rank and the alpha of each."""

    def __post_init__(self) -> None:
        self.config = self.model.config
        self.lora = settings_of(self.config[SETTINGS], ADAPTER)
        self.of_modules = [*tensors_of_modules(self.base, self.config)]
        self.expert_axes = self.base.expert_axes | {tensor.stacked for tensor in self.of_modules if tensor.stacked}
        self.rows_of = cache(lambda part, indices: rows_of(self.base, self.model, part, dict(indices)))

    def run(self) -> dict[str, Any]:
        """Make the tensors. Returns the changed settings."""
        terms: dict[Weight, list[Term]] = defaultdict(list)
        pairs, rest = pairs_of(self.model, self.lora, self.base)
        for tensor, target, suffix in rest:
            if target is not None and self._is_expert(target):
                raise PlanError(f"{ADAPTER}: tensor '{tensor.name}' of an expert has no place in '{self.format.name}'")
            self.out[self._renamed(tensor, target, suffix)[0]] = self.tensors[tensor.name]
        for place, target, a, b in pairs:
            key = self.lora.key_of(place, target)
            if not self._is_expert(target):
                for tensor in (a, b):
                    name, module = self._renamed(tensor, target, tensor.name.removeprefix(place))
                    self.out[name] = self.tensors[tensor.name]
                self.modules.append(module)
                is_unknown = self.config[SETTINGS].get("lora_alpha", 0) is None  # no file of a run says it
                self.numbers.append((module, a.shape[0], None if is_unknown else alpha_of(self.lora, key)))
                continue
            whole = next((tensor for tensor in target.tensors if tensor.parts[0].at is not None), target.tensors[0])
            axis = None if target.is_stack else next(iter(Pattern(target.name).indices & self.expert_axes))
            others = tuple(sorted((name, index) for name, index in a.indices.items() if name != axis))
            matrices = Matrices(target, whole, others, a.indices[axis] if axis else None)
            form = layout_of(target, a, b)
            experts = self._sizes(matrices)["expert"]
            product = Product(self.tensors[a.name], self.tensors[b.name], form, experts, ("out", "in"), 1.0)
            product = product._replace(scale=scale_of(self.lora, key, product.sizes["rank"]))
            for weight, number, rows, at in self._rows(matrices):
                terms[weight].append(Term(product, number, 0, 0, rows, at))
        results: dict[Matrices, list[ExpertRows]] = {matrices: [] for matrices in self._asked(terms)}
        for matrices, blocks in results.items():
            for weight, number, rows, at in self._rows(matrices):
                for term in terms.get(weight, ()):
                    into, own = _common(rows, term.rows)
                    if into:
                        into = range(into.start + at, into.stop + at, into.step)
                        own = range(own.start + term.at, own.stop + term.at, own.step)
                        blocks.append(ExpertRows(number, into, term.product, term.expert, own))
        apart = {matrices.target.name for matrices, blocks in results.items() if not _has_one_a(blocks)}
        for matrices, blocks in results.items():
            self._add(matrices, blocks, side_by_side=matrices.target.name in apart)
        return self._settings()

    # ----------------------------------------------------------------------------------------------------- experts

    def _is_expert(self, target: Adapted) -> bool:
        """Whether a parameter belongs to experts: to all of them, or to one."""
        return target.is_stack or bool(Pattern(target.name).indices & self.expert_axes)

    def _sizes(self, matrices: Matrices) -> dict[str, int]:
        """The sizes of expert, in and out."""
        sizes = self.model.sizes.of(dict(matrices.indices))
        shape = shape_of(matrices.tensor.shapes, self.model, dict(matrices.indices))
        sides = ("in", "out") if shape.arrow is not None else ("out", "in")
        experts = 1 if matrices.expert is not None else shape.dims[0].size(sizes)
        return {"expert": experts} | {side: dim.size(sizes) for side, dim in zip(sides, shape.dims[-2:], strict=True)}

    def _rows(self, matrices: Matrices) -> Iterator[tuple[Weight, int, range, int]]:
        """Each matrix of the checkpoint that has rows of these: the number here, the rows there, and the first here."""
        at, experts = 0, self._sizes(matrices)["expert"]
        for part in matrices.tensor.parts:
            rows = self.rows_of(SourcePart(part.source, part.label), matrices.indices)
            for number in range(experts):
                expert = number if matrices.expert is None else matrices.expert
                yield (part.source, matrices.indices, expert), number, rows, at
            at += len(rows)

    def _asked(self, weights: Iterable[Weight]) -> Iterable[Matrices]:
        """Return the matrices to make: those that contain rows of these weights, and those that PEFT wraps with them.

        Raises PlanError if the format has no place for one.
        """
        weights, asked = [*weights], dict[tuple[str, Indices, int | None], Matrices]()
        lines = {line for line, *_ in weights}
        having: dict[str, list[tuple[Adapted, ModuleTensor]]] = {line: [] for line in lines}
        targets = [*self._targets(lines)]
        for target in targets:
            for tensor, part in ((one, part) for one in target.tensors for part in one.parts):
                if part.source in lines and (target, tensor) not in having[part.source]:
                    having[part.source].append((target, tensor))
        for line, places in having.items():
            if not places:
                raise PlanError(f"'{line}' has no place in the format '{self.format.name}'")
            if self.format.since is not None:
                modules = {target.module for target, _ in places}
                places += [(target, target.tensors[0]) for target in targets if target.module in modules]
        for line, indices, expert in weights:
            for target, tensor in having[line]:
                one = None if target.is_stack else expert
                asked.setdefault((target.name, indices, one), Matrices(target, tensor, indices, one))
        return asked.values()

    def _targets(self, lines: set[str]) -> Iterator[Adapted]:
        """Yield the format's parameters of experts that contain rows of these lines."""
        base, config, format, modules = self.base, self.config, self.format, {module.name for module in self.of_modules}
        if format.factors is None:
            for name, tensors in parameters(base, config).items():
                target = Adapted(tensors, f"{name.removesuffix('weight')}")
                if tensors[0].dims == 2 and name.endswith(".weight") and self._is_expert(target):
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
            settings = LoraSettings(1, {}, tuple(sorted(names)), format.since)
            yield from (target for target in wrapped(base, config, settings) if target.is_stack)

    def _add(self, matrices: Matrices, blocks: Sequence[ExpertRows], *, side_by_side: bool) -> None:
        """Add A and B to the result, with the ranks of different A's side by side."""
        begins, ends, placed = dict[tuple[int, Product, int], int](), defaultdict[int, int](int), list[ExpertRows]()
        for block in blocks:
            key, rank = (block.expert, block.product, block.number), block.product.sizes["rank"]
            if key not in begins:
                begins[key] = ends[block.expert] if side_by_side else 0
                ends[block.expert] = begins[key] + rank
            placed.append(block._replace(rank=begins[key]))
        factors = dict.fromkeys(factor for block in blocks for factor in (block.product.a, block.product.b))
        dtypes, rank = {factor.dtype for factor in factors}, max(ends.values(), default=1)
        if len(dtypes) > 1:
            texts = " and ".join(sorted(dtypes))
            raise MismatchError(f"{ADAPTER}: the parts of '{matrices.target.name}' have different dtypes, {texts}")
        scales = {block.product.scale for block in blocks}
        if len(scales) > 1:
            what = f"the parts of '{matrices.target.name}' are scaled by {min(scales)} and by {max(scales)}"
            raise PlanError(what, "only a format in which each expert has its own A and B holds that: peft-per-expert")
        form = matrices.target.forms[0] if matrices.target.is_stack else LINEAR
        place = self._named(matrices, matrices.target.place)
        sizes, dtype = {**self._sizes(matrices), "rank": rank}, next(iter(dtypes), "F32")
        for factor, end in ((form.a, A_ENDS[0]), (form.b, B_ENDS[0])):
            name = f"{PREFIX}{place}{factor.name if matrices.target.is_stack else end}"
            self.out[name] = _converted(factor, sizes, dtype, [*factors], placed)
        name = self._named(matrices, matrices.target.name).removesuffix(".weight")
        usual, divisor = self.config[SETTINGS].get("lora_alpha"), divisor_of(self.lora, rank)
        scale = next(iter(scales), usual / divisor)  # none: it is zero
        near = scale * divisor
        tried = (usual, round(near), near, math.nextafter(near, 0), math.nextafter(near, math.inf))
        alpha = next((alpha for alpha in tried if alpha / divisor == scale), None)
        if alpha is None:
            raise PlanError(f"no alpha gives '{name}' of rank {rank} its factor {scale}", _MERGE_IT)
        self.numbers.append((name, rank, alpha))
        if matrices.target.is_stack:
            self.parameters[re.split(r"\{\w+\}\.", matrices.target.name)[-1]] = None
        else:
            self.modules.append(name)

    # ------------------------------------------------------------------------------------------------------- names

    @cached_property
    def _renames(self) -> Mapping[str, str]:
        """Names of modules' tensors by names in checkpoints, or the other way round, for tensors that are the same in
        both.
        """
        renames: dict[str, str] = {}
        for tensor in self.of_modules:
            part = tensor.parts[0]
            if len(tensor.parts) == 1 and part.label is None and tensor.stacked is None and part.source != tensor.name:
                one, other = part.source, tensor.name
                renames |= {other: one} if self.format.factors is None else {one: other}
        return renames

    @cached_property
    def _spelling(self) -> tuple[str, str]:
        """The prefixes of names: in the rules, and in this adapter."""
        prefix = self.base.prefixes[0] if self.base.prefixes else ""
        for tensor in self.model.tensors:
            name = filled(tensor.template, tensor.indices)
            if tensor.name != name and name.startswith(PREFIX + prefix):
                tail = name.removeprefix(PREFIX + prefix)
                if tensor.name.startswith(PREFIX) and tensor.name.endswith(tail):
                    return prefix, tensor.name.removeprefix(PREFIX).removesuffix(tail)
        return prefix, prefix

    def _spelled(self, template: str, indices: Mapping[str, int]) -> str:
        (prefix, spelled), name = self._spelling, filled(template, indices)
        return spelled + name.removeprefix(prefix) if name.startswith(prefix) else name

    def _renamed(self, tensor: BoundTensor, target: Adapted | None, suffix: str) -> tuple[str, str]:
        """Return the name of a copied tensor, and the name of its module."""
        if tensor.template.endswith("*"):
            return tensor.name, ""
        name = tensor.template.removeprefix(PREFIX) if target is None else target.name
        new = self._renames.get(name, name)
        if target is None:
            return PREFIX + self._spelled(new, tensor.indices), ""
        module = self._spelled(re.sub(r"\.(weight|bias)$", "", new), tensor.indices)
        return f"{PREFIX}{module}.{suffix}", module

    def _named(self, matrices: Matrices, template: str) -> str:
        """A name that the parameter of these matrices has: with their indices in it."""
        axes = Pattern(matrices.target.name).indices - {name for name, _ in matrices.indices}
        expert = {next(iter(axes)): matrices.expert} if matrices.expert is not None else {}
        return self._spelled(template, dict(matrices.indices) | expert)

    # ---------------------------------------------------------------------------------------------------- settings

    def _settings(self) -> dict[str, Any]:
        """The entries of ``adapter_config.json`` that differ."""
        settings, format = self.config[SETTINGS], self.format
        ranks, alphas = self._patterns(1, settings["r"]), self._patterns(2, settings.get("lora_alpha"))
        if format.one_scale and (ranks or alphas):
            own = next(iter(ranks or alphas))
            raise PlanError(
                f"'{format.name}' has one rank and one alpha for all modules; '{own}' has its own",
                "write it in the format peft-per-expert, or merge it into the model",
            )
        old = settings.get("target_modules")  # given by their last words, or by whole names
        words = set(old) if isinstance(old, list) else set()
        targets = {last if (last := name.rpartition(".")[2]) in words else name for name in self.modules}
        edited = {
            "target_modules": sorted(targets),
            "target_parameters": [*self.parameters] if format.since is not None and self.parameters else None,
            "rank_pattern": ranks, "alpha_pattern": alphas, "lora_B_layout": None, "exclude_modules": None,
            "layers_to_transform": None, "layers_pattern": None, "peft_version": settings.get("peft_version"),
            **format.settings,
        }  # fmt: skip
        return {key: value for key, value in edited.items() if value is not None or key in settings}

    def _patterns(self, at: int, usual: float) -> dict[str, Any]:
        """The ranks (``at`` is 1) or alphas (2) that are not the usual one, by pattern of a name."""
        (prefix, spelled), patterns = self._spelling, dict[str, Any]()
        alike: dict[str, dict[str, Any]] = defaultdict(dict)
        for entry in self.numbers:  # without what names begin with, if that is not what it is in the rules
            name = entry[0] if spelled == prefix else entry[0].removeprefix(spelled)
            alike[re.sub(r"\.\d+(?=\.)", r".\\d+", name)][name] = entry[at]
        for pattern, values in alike.items():
            if len({*values.values()}) == 1:
                values = {pattern: next(iter(values.values()))}
            patterns |= {key: value for key, value in values.items() if len(values) > 1 or value != usual}
        return patterns


def _has_one_a(blocks: Sequence[ExpertRows]) -> bool:
    """Whether all parts of each expert share one A."""
    pairs = {(block.expert, block.product, block.number) for block in blocks}
    factors = set[tuple[int, int, float, bytes]]()
    for expert, product, number in pairs:
        a = product.matrix(product.form.a.side, number, lambda tensor: _codes(tensor, ARITHMETIC))
        factors.add((expert, product.sizes["rank"], product.scale, a.tobytes()))
    return len(factors) == len({expert for expert, _, _ in pairs})


_MERGE_IT = "merge it into the model: reshard merge ADAPTER --into BASE OUT"
